"""Cycle detection on shapes of loops that a synchronous GRPO job does not have."""

from __future__ import annotations

import pytest

from phaseloom.profiler.core.cycle import Span, choose_anchor, find_cycle, merge_runs

POOLS = {"sampler": "rollout", "reference": "rollout", "policy": "train"}


def spans(start_s: float, *steps: tuple[str, str, float]) -> list[Span]:
    """(deployment, kind, seconds), one after the other."""
    made = []
    for deployment, kind, duration_s in steps:
        made.append(Span(POOLS[deployment], deployment, kind, start_s, start_s + duration_s))
        start_s += duration_s
    return made


def test_no_cycle_when_fewer_than_three_turns_were_seen() -> None:
    turn = [("sampler", "generate", 1.0), ("policy", "forward_backward", 1.0)]
    three_turns = [s for i in range(3) for s in spans(2.0 * i, *turn)]
    assert find_cycle(three_turns) is None
    four_turns = [s for i in range(4) for s in spans(2.0 * i, *turn)]
    cycle = find_cycle(four_turns)
    assert cycle is not None
    assert cycle.period_s == 2.0


def test_no_cycle_when_nothing_ran() -> None:
    assert find_cycle([]) is None


def test_several_optimizer_steps_a_turn_are_one_cycle() -> None:
    """PPO epochs repeat forward_backward and optim_step: the rarest item still comes once."""
    epoch = [("policy", "forward_backward", 0.2), ("policy", "optim_step", 0.05)]
    turn = [("sampler", "generate", 1.0), *epoch * 4]
    cycle = find_cycle([s for i in range(10) for s in spans(2.0 * i, *turn)])
    assert cycle is not None
    assert cycle.period_s == pytest.approx(2.0)
    assert [s.pool for s in cycle.segments] == ["rollout", "train"]
    assert [s.duration_s for s in cycle.segments] == pytest.approx([1.0, 1.0])


def test_evaluation_in_between_is_outvoted() -> None:
    turn = [
        ("sampler", "sync_weights", 0.1),
        ("sampler", "generate", 0.9),
        ("policy", "forward_backward", 1.0),
    ]
    seen, now_s = [], 0.0
    for i in range(9):
        seen += spans(now_s, *turn)
        now_s += 2.0
        if i == 6:
            seen += spans(now_s, ("sampler", "generate", 5.0))
            now_s += 5.0
    cycle = find_cycle(seen)
    assert cycle is not None
    assert cycle.period_s == pytest.approx(2.0)


def test_overlapping_pools_of_an_asynchronous_job_have_one_segment_each() -> None:
    """One step off-policy: training on batch k runs while batch k + 1 is generated."""
    seen = []
    for i in range(8):
        start_s = 3.0 * i
        seen += spans(start_s, ("sampler", "sync_weights", 0.1), ("sampler", "generate", 2.5))
        training = [("policy", "forward_backward", 0.5)] * 3 + [("policy", "optim_step", 0.2)]
        seen += spans(start_s + 0.3, *training)
    cycle = find_cycle(seen)
    assert cycle is not None
    assert cycle.period_s == pytest.approx(3.0)
    durations = {s.pool: s.duration_s for s in cycle.segments}
    assert durations == pytest.approx({"rollout": 2.6, "train": 1.7})


def test_pool_used_twice_a_turn_has_two_segments() -> None:
    """Old log-probabilities on the train pool between generation and training."""
    turn = [
        ("policy", "forward", 0.4),
        ("reference", "forward", 0.6),
        ("policy", "forward_backward", 1.0),
        ("sampler", "generate", 2.0),
    ]
    cycle = find_cycle([s for i in range(6) for s in spans(4.0 * i, *turn)])
    assert cycle is not None
    assert sorted(s.pool for s in cycle.segments) == ["rollout", "rollout", "train", "train"]
    assert sum(s.duration_s for s in cycle.segments) == pytest.approx(4.0)


def test_anchor_begins_a_run_on_its_pool_when_counts_differ_by_the_cut() -> None:
    turn = [("sampler", "generate", 1.0), ("policy", "forward_backward", 1.0)]
    seen = [s for i in range(6) for s in spans(2.0 * i, *turn)]
    cut = [*spans(-1.0, ("policy", "publish_weights", 0.5)), *seen]
    assert choose_anchor(merge_runs(cut)) == ("rollout", "sampler", "generate")
