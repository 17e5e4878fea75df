"""A run by turns, predicted under other policies."""

from __future__ import annotations

import pytest

from phaseloom.common.contract.specs import KindSlowdown, SlowdownTable
from phaseloom.common.process.slowdowns import SUB_STAGES
from phaseloom.simulator.rerun import makespan_s
from tests.support.byturns import BESIDE, ON_A_HALF, ROLL_OUT, TABLE, THINKS_S, TRAIN, by_turns


def test_the_same_policy_takes_as_long_again() -> None:
    _, entries, (begin_s, end_s) = by_turns(
        {"a": [ROLL_OUT, TRAIN] * 3, "b": [TRAIN, ROLL_OUT] * 3}
    )
    again_s = makespan_s(entries, (begin_s, end_s), "off", TABLE)
    assert again_s == pytest.approx(end_s - begin_s, abs=1e-4)


def test_side_by_side_each_is_slower_and_both_are_through_earlier() -> None:
    """Two rollouts: beside one another until the shorter one ends; what is left has half of the
    device under `static`, and all of it under `greedy`."""
    mesh, entries, window = by_turns({"a": [ROLL_OUT], "b": [ROLL_OUT]})
    short_s, long_s = sorted(ran_s for (ran_s,) in mesh.ran_s.values())
    beside_s = ON_A_HALF * BESIDE * short_s
    for policy, slower in (("static", ON_A_HALF), ("greedy", 1.0)):
        expected_s = beside_s + slower * (long_s - short_s)
        assert makespan_s(entries, window, policy, TABLE) == pytest.approx(expected_s, abs=1e-4)


def test_training_that_has_begun_keeps_its_units_to_its_end() -> None:
    """Its passes are not in the log, so it is taken for a single one."""
    mesh, entries, window = by_turns({"a": [TRAIN], "b": [TRAIN]})
    both_s = sum(ran_s for (ran_s,) in mesh.ran_s.values())
    assert makespan_s(entries, window, "greedy", TABLE) == pytest.approx(both_s, abs=1e-4)


def test_a_controllers_own_time_passes_as_it_did() -> None:
    mesh, entries, window = by_turns({"a": [ROLL_OUT] * 4})
    assert makespan_s(entries, window, "greedy", TABLE) == pytest.approx(
        sum(mesh.ran_s["a"]) + 3 * THINKS_S, abs=1e-4
    )


def test_a_true_table_may_be_another_than_the_one_that_policies_go_by() -> None:
    """Under a truth in which sharing costs nothing, two rollouts last as long as the longer one."""
    mesh, entries, window = by_turns({"a": [ROLL_OUT], "b": [ROLL_OUT]})
    free = SlowdownTable("free", {kind: KindSlowdown({1.0: 1.0}) for kind in SUB_STAGES})
    longest_s = max(ran_s for (ran_s,) in mesh.ran_s.values())
    assert makespan_s(entries, window, "greedy", free) == pytest.approx(longest_s, abs=1e-4)


def test_a_window_in_which_nothing_was_queued_is_refused() -> None:
    _, entries, (begin_s, _) = by_turns({"a": [ROLL_OUT]})
    with pytest.raises(ValueError, match="no operation"):
        makespan_s(entries, (begin_s - 2.0, begin_s - 1.0), "off", TABLE)


def test_what_would_take_far_longer_than_the_recorded_run_is_given_up() -> None:
    _, entries, window = by_turns({"a": [ROLL_OUT], "b": [ROLL_OUT]})
    kinds = {kind: KindSlowdown({0.5: 100.0, 1.0: 1.0}) for kind in SUB_STAGES}
    with pytest.raises(ValueError, match="not end within 10 times"):
        makespan_s(entries, window, "static", SlowdownTable("slow", kinds))
