"""The profiler's fold: durations, gaps, cycles, and when it speaks."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phaseloom.common.ids import DeploymentKey, JobKey, NodeId, OperationKey
from phaseloom.common.messages import (
    ActivationOpened,
    DeviceSpec,
    Event,
    JobFinished,
    KindEstimate,
    NodeUp,
    OperationFinished,
    Outcome,
    PhaseTrace,
)
from phaseloom.profiler.core.profile import Emission, Profiler
from tests.support.joblog import JOB, TOKEN_LIMIT, JobLog, Turn, grpo_log, submitted

Entries = list[tuple[int, float, Event]]


def fold(entries: Entries) -> list[Emission]:
    profiler = Profiler()
    return [e for entry in entries if (e := profiler.step(*entry))]


def last_trace(log: JobLog) -> PhaseTrace:
    return fold(log.entries())[-1].trace


def estimate(trace: PhaseTrace, deployment: str, kind: str) -> KindEstimate:
    (found,) = [e for e in trace.estimates if (e.deployment, e.kind) == (deployment, kind)]
    return found


def test_trace_gives_durations_and_gaps_of_a_regular_job() -> None:
    trace = last_trace(grpo_log(12, lambda _: Turn()))
    generate = estimate(trace, "sampler", "generate")
    assert generate.duration_s == pytest.approx(0.5)
    # Rewards take 0.1 s before the reference's forward, the same pool's next operation, is queued.
    assert generate.next_gap_s == pytest.approx(0.1)
    # Then the rollout pool is not needed until publish_weights is done: 0.46 s of training.
    assert estimate(trace, "reference", "forward").next_gap_s == pytest.approx(0.46)
    # Micro-batches are queued together: the next is ready as one ends.
    assert estimate(trace, "policy", "forward_backward").next_gap_s == 0.0
    assert estimate(trace, "policy", "publish_weights").next_gap_s == pytest.approx(0.7)


def test_trace_gives_the_cycle_of_a_regular_job() -> None:
    trace = last_trace(grpo_log(12, lambda _: Turn(), warm_up=30))
    assert trace.period_s == pytest.approx(1.16)
    assert [s.pool for s in trace.segments] == ["rollout", "train"]
    assert [s.offset_s for s in trace.segments] == pytest.approx([0.0, 0.7])
    assert [s.duration_s for s in trace.segments] == pytest.approx([0.7, 0.46])


def test_cycle_is_the_same_when_another_job_holds_the_device_in_between() -> None:
    """On a shared device the wall-clock period is half as long again; the job's own is not."""
    shared = grpo_log(12, lambda _: Turn(), wait_s=lambda step: 0.3 + 0.1 * (step % 4))
    trace = last_trace(shared)
    assert trace.period_s == pytest.approx(1.16)
    assert [s.duration_s for s in trace.segments] == pytest.approx([0.7, 0.46])


jitters = st.lists(st.floats(0.9, 1.1), min_size=14, max_size=14)


@settings(max_examples=60, deadline=None)
@given(
    generate=jitters,
    train=jitters,
    reward_s=st.floats(0.0, 0.2),
    warm_up=st.integers(0, 60),
    waits=st.lists(st.floats(0.0, 2.0), min_size=14, max_size=14),
)
def test_cycle_is_found_when_durations_jitter(
    generate: list[float], train: list[float], reward_s: float, warm_up: int, waits: list[float]
) -> None:
    """Whatever came before, however long it waits for devices: within the jitter of the truth."""

    def turn(step: int) -> Turn:
        return Turn(
            generate_s=0.5 * generate[step], reward_s=reward_s, micro_batch_s=0.1 * train[step]
        )

    trace = last_trace(grpo_log(14, turn, warm_up=warm_up, wait_s=waits.__getitem__))
    truth = Turn(reward_s=reward_s)
    # One trace may lag the newest figures by the 10 % below which nothing is said.
    assert trace.period_s == pytest.approx(truth.period_s, rel=0.21)
    assert [s.pool for s in trace.segments] == ["rollout", "train"]
    assert trace.segments[0].duration_s == pytest.approx(truth.rollout_s, rel=0.21)
    assert trace.segments[1].duration_s == pytest.approx(truth.train_s, rel=0.21)


def test_traces_keep_their_distance_and_stop_when_nothing_changes() -> None:
    log = grpo_log(60, lambda _: Turn())
    entries = log.entries()
    times = {sequence: time_s for sequence, time_s, _ in entries}
    emitted = [times[int(e.msg_id.removeprefix("profiler:"))] for e in fold(entries)]
    assert all(b - a >= 2.0 for a, b in pairwise(emitted))
    # A job of 70 s that never changes: it is described once its cycle and all gaps are known.
    assert 2 <= len(emitted) <= 5
    assert emitted[-1] < 12.0


def test_trace_is_sent_again_when_durations_change() -> None:
    emissions = fold(
        grpo_log(60, lambda step: Turn(generate_s=0.5 if step < 30 else 0.8)).entries()
    )
    assert estimate(emissions[-1].trace, "sampler", "generate").duration_s == pytest.approx(0.8)
    assert emissions[-1].trace.period_s == pytest.approx(1.46)


def test_estimates_give_the_spread_and_the_worst_case_at_the_token_limit() -> None:
    """Generation takes 0.4 to 0.59 s and uses at least a quarter of its token limit."""

    def turn(step: int) -> Turn:
        return Turn(generate_s=0.4 + 0.01 * step, num_tokens=TOKEN_LIMIT // (1 + step % 4))

    trace = last_trace(grpo_log(20, turn))
    generate = estimate(trace, "sampler", "generate")
    assert generate.duration_s < generate.p95_s <= 0.59
    # The 0.59 s of the last step were a quarter of what the limit allows; 10 % are not told.
    assert generate.worst_s == pytest.approx(4 * 0.59, rel=0.11)
    assert 0 <= generate.gap_p10_s <= generate.next_gap_s <= generate.gap_p90_s
    excess_s = generate.worst_s - generate.duration_s
    assert trace.worst_period_s == pytest.approx(trace.period_s + excess_s)


def test_drift_tells_how_the_period_moved() -> None:
    steady = fold(grpo_log(60, lambda _: Turn()).entries())
    assert all(e.trace.drift == 0 for e in steady)
    slower = fold(grpo_log(60, lambda step: Turn(generate_s=0.5 if step < 30 else 1.66)).entries())
    told = [e.trace for e in slower if e.trace.drift]
    assert told
    growth = 1.0
    for trace in told:
        growth *= 1 + trace.drift
    assert growth == pytest.approx(2.0, rel=0.1)


def test_same_log_gives_the_same_traces_with_the_same_ids() -> None:
    entries = grpo_log(20, lambda step: Turn(generate_s=0.4 + 0.01 * (step % 7))).entries()
    assert fold(entries) == fold(entries)


def test_replays_and_failures_are_no_samples() -> None:
    log = grpo_log(6, lambda _: Turn())
    key = OperationKey("demo", "sums", "policy", "1")
    for i, (outcome, replay) in enumerate([(Outcome.COMPLETED, True), (Outcome.FAILED, False)]):
        event = OperationFinished(
            key, "forward_backward", outcome, 1, 1, 0.0, duration_s=9.0, replay=replay
        )
        log.events.append((6.0 + i, event))
    trace = last_trace(log)
    assert estimate(trace, "policy", "forward_backward").duration_s == pytest.approx(0.1)


def test_pools_come_from_nodes_when_the_log_begins_after_the_submission() -> None:
    """After truncation the log begins in the middle of a step."""
    tail = grpo_log(12, lambda _: Turn()).entries()[15:]
    start_s = tail[0][1]
    places: list[Event] = []
    for node, pool, names in (
        ("r0", "rollout", ["sampler", "reference"]),
        ("t0", "train", ["policy"]),
    ):
        places.append(NodeUp(NodeId(node), pool, [DeviceSpec(1)], 1, 1, "h:1"))
        places += [
            ActivationOpened(DeploymentKey("demo", "sums", n), 1, NodeId(node), 0.0, 0, 0, 0, 0)
            for n in names
        ]
    head: Entries = [(i, start_s, event) for i, event in enumerate(places, 1)]
    trace = fold([*head, *[(s + 100, t, e) for s, t, e in tail]])[-1].trace
    assert trace.period_s == pytest.approx(1.16)
    assert [s.pool for s in trace.segments] == ["rollout", "train"]


def test_two_jobs_do_not_mix() -> None:
    fast = grpo_log(30, lambda _: Turn())
    slow = grpo_log(12, lambda _: Turn(generate_s=2.0), job=JobKey("demo", "letters"))
    both = sorted([*fast.events, *slow.events], key=lambda e: e[0])
    head: list[tuple[float, Event]] = [(0.0, submitted(fast.job)), (0.0, submitted(slow.job))]
    emissions = fold([(i, t, e) for i, (t, e) in enumerate([*head, *both], 1)])
    newest = {e.trace.job.job: e.trace.period_s for e in emissions}
    assert newest == pytest.approx({"sums": 1.16, "letters": 2.66})


def test_operation_that_ends_after_its_job_starts_no_new_trace() -> None:
    """The controller's last operation is stored as done before the log has its end."""
    profiler = Profiler()
    *entries, last = grpo_log(12, lambda _: Turn()).entries()
    for entry in entries:
        profiler.step(*entry)
    profiler.step(last[0], last[1], JobFinished(JOB, "r2"))
    assert profiler.step(last[0] + 1, last[1] + 10.0, last[2]) is None
    assert not profiler._jobs


def test_job_submitted_again_after_its_end_is_measured_anew() -> None:
    profiler = Profiler()
    entries = grpo_log(12, lambda _: Turn()).entries()
    for entry in entries:
        profiler.step(*entry)
    profiler.step(len(entries) + 1, entries[-1][1], JobFinished(JOB, "r2"))
    again = [
        profiler.step(len(entries) + 1 + sequence, 100.0 + time_s, event)
        for sequence, time_s, event in entries
    ]
    assert [e.trace.period_s for e in again if e][-1] == pytest.approx(1.16)


def test_finished_job_is_forgotten() -> None:
    profiler = Profiler()
    entries = grpo_log(12, lambda _: Turn()).entries()
    for entry in entries:
        profiler.step(*entry)
    profiler.step(len(entries) + 1, entries[-1][1], JobFinished(JOB, "r2"))
    assert not profiler._jobs
    assert not profiler._pools
