"""Cycle detection on shapes of loops that a synchronous GRPO job does not have."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phaseloom.profiler.core.cycle import MAX_CYCLES, Span, find_cycle

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


def test_turn_begins_where_a_pool_does_whatever_the_window_cuts() -> None:
    turn = [("sampler", "generate", 1.0), ("policy", "forward_backward", 1.0)]
    seen = [s for i in range(6) for s in spans(2.0 * i, *turn)]
    cut = [*spans(-1.0, ("policy", "publish_weights", 0.5)), *seen]
    for window in (seen, cut, seen[1:]):
        cycle = find_cycle(window)
        assert cycle is not None
        assert [s.pool for s in cycle.segments] == ["rollout", "train"]


def test_checkpoint_every_ten_turns_is_no_turn_of_its_own() -> None:
    turn = [("sampler", "generate", 1.0), ("policy", "forward_backward", 1.0)]
    seen, now_s = [], 0.0
    for i in range(60):
        steps = [*turn, ("policy", "save_state", 0.2)] if i % 10 == 9 else turn
        seen += spans(now_s, *steps)
        now_s = seen[-1].end_s
    cycle = find_cycle(seen)
    assert cycle is not None
    assert cycle.period_s == pytest.approx(2.0)
    assert cycle.num_operations == {
        ("rollout", "sampler", "generate"): 1,
        ("train", "policy", "forward_backward"): 1,
    }


factors = st.floats(0.75, 1.3)


@settings(max_examples=60, deadline=None)
@given(
    jitter=st.lists(st.tuples(factors, factors), min_size=30, max_size=30),
    micro_batches=st.lists(st.integers(1, 6), min_size=30, max_size=30),
    drift=st.floats(-0.02, 0.03),
    evaluations=st.sets(st.integers(0, 29), max_size=6),
    lag_s=st.floats(0.0, 1.0),
    is_asynchronous=st.booleans(),
)
def test_cycle_survives_jitter_and_drift(
    jitter: list[tuple[float, float]],
    micro_batches: list[int],
    drift: float,
    evaluations: set[int],
    lag_s: float,
    is_asynchronous: bool,
) -> None:
    """Durations jitter and drift, micro-batches come in other numbers, evaluations between: the
    period is that of the newest turns."""
    seen: list[Span] = []
    periods_s = []
    now_s = 0.0
    for i, ((rollout, training), num) in enumerate(zip(jitter, micro_batches, strict=True)):
        scale = (1 + drift) ** i
        generate_s, train_s = 2.0 * rollout * scale, 1.5 * training * scale
        begin_s = now_s
        seen += spans(now_s, ("sampler", "sync_weights", 0.1), ("sampler", "generate", generate_s))
        start_s = now_s + lag_s if is_asynchronous else seen[-1].end_s
        parts = [("policy", "forward_backward", train_s / num)] * num
        seen += spans(start_s, *parts, ("policy", "optim_step", 0.1))
        now_s = max(seen[-1].end_s, begin_s + 0.1 + generate_s)
        if i in evaluations:
            seen += spans(now_s, ("sampler", "generate", 3.0))
            now_s += 3.0
        else:
            periods_s.append(now_s - begin_s)
    cycle = find_cycle(seen)
    assert cycle is not None
    newest = periods_s[-MAX_CYCLES:]
    # The median stands as long as evaluations are in fewer than half of the newest turns.
    allowance_s = 3.0 if len(evaluations & set(range(30 - MAX_CYCLES - 1, 30))) > 3 else 0.0
    assert 0.95 * min(newest) <= cycle.period_s <= 1.05 * max(newest) + allowance_s
    assert {s.pool for s in cycle.segments} == {"rollout", "train"}
