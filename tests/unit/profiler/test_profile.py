"""The profiler's fold: durations, gaps, cycles, and when it speaks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from phaseloom.common.contract.events import (
    ActivationOpened,
    Event,
    JobFinished,
    KindEstimate,
    NodeUp,
    OperationFinished,
    PhaseTrace,
    StepRun,
)
from phaseloom.common.contract.ids import DeploymentKey, JobKey, NodeId, OperationKey
from phaseloom.common.contract.operations import Outcome
from phaseloom.common.contract.specs import DeviceSpec
from phaseloom.profiler.core.agenda import BURST, SPACING_S
from phaseloom.profiler.core.profile import NEAR_WINDOW, Emission, Profiler
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
    emitted = [times[int(e.msg_id.rpartition(":")[2])] for e in fold(entries)]
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


def test_traces_that_one_entry_brought_are_told_apart() -> None:
    """The bus stores one message of an id: the other job's would be taken for a repeat."""
    logs = [grpo_log(12, lambda _: Turn(), job=JobKey("demo", name)) for name in "ab"]
    profiler = Profiler()
    emitted = []
    for sequence, events in enumerate(zip(*(log.events for log in logs), strict=True), 1):
        for time_s, event in events:
            emitted.append(profiler.step(sequence, time_s, event))
    told = [emission for emission in emitted if emission]
    assert {emission.trace.job.job for emission in told} == {"a", "b"}
    assert len({emission.msg_id for emission in told}) == len(told)


def changing_log(job: JobKey, start_s: float, seconds: int) -> JobLog:
    """An operation a second, each a third longer than the one before: every look has news."""
    log = JobLog(job)
    for i in range(seconds):
        operation = log.queue(start_s + i, "policy", "forward_backward")
        log.finish(start_s + i + 0.5, 0.002 * 1.3**i, operation, "forward_backward")
    return log


def test_looks_are_bounded_and_fair_when_there_are_a_hundred_jobs() -> None:
    num_jobs, seconds = 100, 60
    jobs = [JobKey("demo", f"job-{i}") for i in range(num_jobs)]
    logs = [changing_log(job, 1.0 + i / num_jobs, seconds) for i, job in enumerate(jobs)]
    events = sorted((e for log in logs for e in log.events), key=lambda e: e[0])
    times_s = [0.0, *(t for t, _ in events)]
    told_s: dict[JobKey, list[float]] = {job: [] for job in jobs}
    for e in fold([(i, t, e) for i, (t, e) in enumerate(events, 1)]):
        told_s[e.trace.job].append(times_s[int(e.msg_id.rpartition(":")[2])])
    looks_s = sorted(t for told in told_s.values() for t in told)
    assert len(looks_s) <= BURST + seconds / SPACING_S + 1
    for first_s in looks_s:
        in_a_second = [t for t in looks_s if first_s <= t < first_s + 1]
        assert len(in_a_second) <= BURST + 1 / SPACING_S + 1
    bound_s = num_jobs * SPACING_S + 1
    for told in told_s.values():
        assert told[0] <= 1 + bound_s
        assert all(b - a <= bound_s for a, b in pairwise([*told, 1.0 + seconds]))


def test_job_that_went_quiet_is_told_with_a_later_entry_of_another() -> None:
    """Its last operation ended sooner after the look before than looks may follow one another."""
    profiler = Profiler()
    quiet, other = JobLog(JobKey("demo", "quiet")), JobLog(JobKey("demo", "other"))
    for end_s, kind in ((1.0, "forward_backward"), (1.5, "optim_step")):
        quiet.finish(end_s, 0.1, quiet.queue(end_s - 0.1, "policy", kind), kind)
    other.queue(4.0, "policy", "forward_backward")
    events = [*quiet.events, *other.events]
    told = [e for i, (t, event) in enumerate(events, 1) if (e := profiler.step(i, t, event))]
    assert [e.trace.job for e in told] == [quiet.job, quiet.job]
    assert [e.kind for e in told[-1].trace.estimates] == ["forward_backward", "optim_step"]
    assert told[-1].msg_id == f"profiler:{quiet.job}:{len(events)}"


def test_cycle_is_found_when_its_turns_hold_more_than_is_looked_at_first() -> None:
    log, now_s = JobLog(), 1.0
    for _ in range(6):
        for kind, count in (("forward_backward", NEAR_WINDOW // 2), ("optim_step", 1)):
            for _ in range(count):
                operation = log.queue(now_s, "policy", kind)
                now_s += 0.05
                log.finish(now_s, 0.05, operation, kind)
        now_s += 0.75
    assert last_trace(log).period_s == pytest.approx(0.05 * (NEAR_WINDOW // 2 + 1) + 0.75)


@pytest.mark.parametrize("epochs", [1, 3])
def test_optimizer_steps_of_a_turn_are_counted(epochs: int) -> None:
    """By them the scheduler knows where an iteration ends."""
    log, now_s = JobLog(), 1.0
    turn = [("sampler", "generate"), ("policy", "forward_backward"), ("policy", "optim_step")]
    for _ in range(8):
        for deployment, kind in [*turn, *turn[1:] * (epochs - 1)]:
            operation = log.queue(now_s, deployment, kind)
            took_s = 1.0 if kind == "generate" else 0.1
            now_s += took_s
            log.finish(now_s, took_s, operation, kind)
    trace = last_trace(log)
    assert trace.period_s == pytest.approx(1.0 + 0.2 * epochs)
    assert trace.num_optim_steps == epochs


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


FULL, HALF, TAIL = StepRun(40, 40 * 64, 0.4), StepRun(30, 30 * 20, 0.2), StepRun(50, 50 * 4, 0.3)
BLIP = StepRun(3, 3 * 500, 0.1)


def with_steps(log: JobLog, steps: Callable[[int], list[StepRun]]) -> Entries:
    """The log, where each `generate` tells the steps that `steps` gives for its place."""
    told: Entries = []
    place = 0
    for sequence, time_s, event in log.entries():
        if isinstance(event, OperationFinished) and event.kind == "generate":
            told.append((sequence, time_s, replace(event, steps=steps(place))))
            place += 1
        else:
            told.append((sequence, time_s, event))
    return told


def test_sub_stages_are_those_of_most_of_the_newest_rollouts() -> None:
    """A short burst makes none; an evaluation of another shape is outvoted."""

    def steps(place: int) -> list[StepRun]:
        return [TAIL] if place % 4 == 3 else [FULL, BLIP, HALF, TAIL]

    trace = fold(with_steps(grpo_log(12, lambda _: Turn()), steps))[-1].trace
    full, half, tail = estimate(trace, "sampler", "generate").sub_stages
    assert full == StepRun(43, 40 * 64 + 3 * 500, 0.5)
    assert half == HALF
    assert (tail.steps, tail.tokens) == (TAIL.steps, TAIL.tokens)
    assert estimate(trace, "policy", "forward_backward").sub_stages == ()


def test_each_replica_has_sub_stages_of_its_own() -> None:
    log = grpo_log(12, lambda _: Turn())
    entries = with_steps(log, lambda _: [FULL, TAIL, replace(FULL, replica=1)])
    found = estimate(fold(entries)[-1].trace, "sampler", "generate").sub_stages
    assert found == (FULL, TAIL, replace(FULL, replica=1))


def test_trace_is_sent_again_when_a_sub_stage_comes() -> None:
    log = grpo_log(40, lambda _: Turn())
    before = fold(with_steps(log, lambda _: [FULL]))
    after = fold(with_steps(log, lambda place: [FULL] if place < 20 else [FULL, TAIL]))
    assert len(after) > len(before)
    assert estimate(after[-1].trace, "sampler", "generate").sub_stages == (FULL, TAIL)
