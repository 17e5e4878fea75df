"""The live fold says what the run report finds out afterwards, and forgets what ended unseen."""

from __future__ import annotations

import pytest

from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.common.contract.events import (
    ActivationOpened,
    CancelRequested,
    Event,
    JobFinished,
    OperationFinished,
    QueuedOperation,
    WpgStarted,
)
from phaseloom.common.contract.ids import DeploymentKey, JobKey, NodeId, OperationKey
from phaseloom.common.contract.operations import After, Outcome
from phaseloom.common.observability.activity import Activity, Execution, Observation, Switch
from phaseloom.demo.report import figures, read_log
from tests.support.runlog import HandMade, shared

JOB = JobKey("demo", "a")
NODE = NodeId("t0")


def folded(log: HandMade) -> tuple[Activity, list[Observation]]:
    activity = Activity()
    seen = [o for e in log.recorded() for o in activity.step(e.time_unix_s, e.event)]
    return activity, seen


def key(slot: int | str, deployment: str = "policy", job: str = "a") -> OperationKey:
    return OperationKey("demo", job, deployment, str(slot))


def queued(
    slot: int | str,
    kind: str = "forward_backward",
    after: tuple[tuple[str, int], ...] = (),
    deployment: str = "policy",
    job: str = "a",
    timeout_s: float = 0.0,
) -> QueuedOperation:
    named = key(slot, deployment, job)
    needs = [After(d, s) for d, s in after]
    return QueuedOperation(named, str(named), kind, needs, timeout_s=timeout_s)


def finished(
    slot: int | str,
    start_s: float,
    end_s: float,
    kind: str = "forward_backward",
    outcome: Outcome = Outcome.COMPLETED,
    deployment: str = "policy",
) -> OperationFinished:
    named = key(slot, deployment)
    return OperationFinished(named, kind, outcome, 1, 1, start_s, end_s - start_s)


def started(deployment: str = "policy", *devices: int, job: str = "a") -> WpgStarted:
    return WpgStarted(DeploymentKey("demo", job, deployment), 1, NODE, 1, 0, list(devices))


def after(*events: tuple[float, Event]) -> Activity:
    activity = Activity()
    for time_s, event in events:
        activity.step(time_s, event)
    return activity


def test_fold_agrees_with_the_report_of_the_whole_run() -> None:
    """The differential oracle: one is computed live, the other from all intervals at the end."""
    log = shared()
    window = (100.0, 125.0)
    expected = figures(read_log(log.recorded()), window)
    _, seen = folded(log)
    executions = [o for o in seen if isinstance(o, Execution) and window[0] <= o.start_s < 125.0]
    for node, share in expected.busy_share.items():
        busy_s = sum(s for e in executions for (n, _), s in e.busy_s.items() if n == node)
        assert busy_s == pytest.approx(share * expected.seconds)
    switches = [o for o in seen if isinstance(o, Switch) and o.end_s - o.duration_s >= 100.0]
    assert len(switches) == expected.context_switches == 6
    assert sum(s.duration_s for s in switches) == pytest.approx(expected.switch_seconds)
    assert sum(s.hidden_s for s in switches) == pytest.approx(expected.hidden_switch_seconds)
    assert expected.hidden_switch_seconds == pytest.approx(0.5)


def test_execution_has_its_wait_and_pool() -> None:
    _, seen = folded(shared())
    (last,) = [o for o in seen if isinstance(o, Execution) and o.start_s == 120.0]
    assert (last.pool, last.kind, last.waited_s) == ("train", "forward_backward", 2.5)


def test_overlapping_executions_count_once_whatever_order_they_end_in() -> None:
    activity = after((0.0, started("policy", 0, 1)))
    seen = [
        activity.step(end_s, finished(f"r{n}", start_s, end_s, "forward"))
        for n, (start_s, end_s) in enumerate([(5.0, 6.0), (0.0, 7.0), (6.5, 8.0)])
    ]
    busy = [o.busy_s for (o,) in seen if isinstance(o, Execution)]
    assert busy == [{("t0", d): s for d in (0, 1)} for s in (1.0, 6.0, 1.0)]


def test_holder_is_the_deployment_of_the_newest_activation() -> None:
    log = shared()
    activity, _ = folded(log)
    assert str(activity.holders["t0"]) == "demo.b.policy"
    assert activity.pools == {"r0": "rollout", "t0": "train"}


def test_switch_is_hidden_when_nobody_waits_for_its_device() -> None:
    opened = ActivationOpened(JOB_POLICY, 1, NODE, 10.0, 0.5, 0.5, 1, 1)
    activity = after(
        (0.0, started()), (0.0, started("policy", 1, job="b")), (9.0, queued(1, job="b"))
    )
    (switch,) = activity.step(11.0, opened)
    assert isinstance(switch, Switch)
    assert switch.hidden_s == switch.duration_s == 1.0, "b waits for another device"
    activity = after((0.0, started()), (10.25, queued(1)))
    (switch,) = activity.step(11.0, opened)
    assert isinstance(switch, Switch)
    assert switch.hidden_s == 0.25


def test_activation_that_moves_nothing_is_no_switch() -> None:
    assert Activity().step(1.0, ActivationOpened(JOB_POLICY, 1, NODE, 1.0, 0, 0, 0, 0)) == []


JOB_POLICY = DeploymentKey("demo", "a", "policy")


@pytest.mark.parametrize(
    "ending",
    [
        finished(1, 1.0, 2.0, outcome=Outcome.FAILED),
        CancelRequested(key(1), "r"),
        QueuedOperation(key(1), "x", "forward_backward", error=ErrorInfo(Code.ABORTED, "over")),
    ],
)
def test_operations_after_one_that_ended_unfinished_end_with_it(ending: Event) -> None:
    """They leave no entry of their own; the chain is as long as it is."""
    chain = [
        (0.1, queued(1, deployment="sampler", kind="generate", after=(("policy", 1),))),
        (0.2, queued(2, after=(("sampler", 1),))),
        (0.3, queued(3)),
    ]
    first: list[tuple[float, Event]] = []
    if not isinstance(ending, QueuedOperation):
        first = [(0.0, queued(1))]
    activity = after(*first, *chain)
    assert activity.depth() == {JOB: len(first) + 3}
    activity.step(2.0, ending)
    assert activity.depth() == {JOB: 1}, "the third names nobody"


def test_finished_mutating_operation_proves_that_lower_ones_have_ended() -> None:
    activity = after((0.0, queued(1)), (0.0, queued(2)), (0.0, queued(3)))
    activity.step(1.0, finished(2, 0.5, 1.0))
    assert activity.depth() == {JOB: 1}


def test_waiting_counts_what_is_ready_until_it_times_out() -> None:
    activity = after(
        (0.0, started()),
        (0.0, queued("r1", "forward", timeout_s=5.0)),
        (0.0, queued("r2", "forward")),
        (0.0, queued(2)),
    )
    assert activity.waiting(1.0) == {"t0": 2}, "seq 2 waits for seq 1"
    assert activity.waiting(6.0) == {"t0": 1}


def test_ended_job_is_forgotten() -> None:
    activity = after((0.0, started()), (0.0, queued(1)), (1.0, JobFinished(JOB, "r")))
    assert activity.depth() == {}
    assert activity.waiting(2.0) == {}
