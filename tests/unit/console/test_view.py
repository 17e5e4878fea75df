"""What the console tells of a decision log: everything, what is new, and to a tenant its own."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

import phaseloom.scheduler.core.core
from phaseloom.common.contract import events
from phaseloom.common.contract.api import DeploymentStatus, JobReport, JobStatus
from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.common.contract.ids import DeploymentKey, JobKey, NodeId, OperationKey
from phaseloom.common.contract.operations import Outcome
from phaseloom.common.contract.specs import DeviceSpec, Segment
from phaseloom.console.core.decisions import ROUTINE, of_notice
from phaseloom.console.core.view import Listener, View
from phaseloom.console.core.wire import TICK_S, Update

T0 = 1_700_000_000.0
POLICY = DeploymentKey("acme", "a", "policy")
OTHER = DeploymentKey("globex", "b", "policy")
NODE = NodeId("train-0")


def queued(key: DeploymentKey, seq: int) -> events.QueuedOperation:
    operation = OperationKey(key.tenant, key.job, key.deployment, str(seq))
    return events.QueuedOperation(operation, str(operation), "forward_backward")


def finished(
    key: DeploymentKey, seq: int, start_s: float, seconds: float, **changed: object
) -> events.OperationFinished:
    operation = OperationKey(key.tenant, key.job, key.deployment, str(seq))
    event = events.OperationFinished(
        operation, "forward_backward", Outcome.COMPLETED, 1, 1, T0 + start_s, seconds
    )
    return msgspec.structs.replace(event, **changed)


def opened(
    key: DeploymentKey, start_s: float, *displaced: DeploymentKey, num_bytes: int = 100
) -> events.ActivationOpened:
    return events.ActivationOpened(
        key, 1, NODE, T0 + start_s, 0.2, 0.3, num_bytes, num_bytes, [*displaced]
    )


def mesh(history: int = 1000) -> View:
    """One device that two tenants' jobs are on."""
    view = View(history)
    view.step(T0, events.NodeUp(NODE, "train", [DeviceSpec(64)], 640, 1, "h:1"))
    for key in (POLICY, OTHER):
        view.step(T0, events.WpgStarted(key, 1, NODE, 10, 0, [0]))
    return view


def run(view: View, key: DeploymentKey, seq: int, start_s: float) -> None:
    """An operation of a second that waited for half of one."""
    view.step(T0 + start_s - 0.5, queued(key, seq))
    view.step(T0 + start_s + 1, finished(key, seq, start_s, 1.0))


def names(update: Update) -> list[str]:
    return [f"{update.deployments[row.deployment]}.{row.slot}" for row in update.operations]


def test_operation_is_told_with_its_place_and_when_it_was_queued_ready_and_ran() -> None:
    view = mesh()
    run(view, POLICY, 1, 10.0)
    update = view.update(T0 + 12)
    (row,) = update.operations
    assert update.deployments[row.deployment] == "acme.a.policy"
    assert update.kinds[row.kind] == "forward_backward"
    assert [update.devices[one] for one in row.devices] == ["train-0/0"]
    times = [row.queued, row.ready, row.start, row.end]
    assert [round(one * TICK_S, 3) for one in times] == [9.5, 9.5, 10.0, 11.0]
    assert update.origin_s == T0


def test_update_has_what_came_since_the_one_before_and_nothing_twice() -> None:
    view = mesh()
    run(view, POLICY, 1, 1.0)
    first = view.update(T0 + 3)
    assert first.is_whole
    run(view, POLICY, 2, 3.0)
    second = view.update(T0 + 5, since=first.cursor)
    assert not second.is_whole
    assert (names(first), names(second)) == (["acme.a.policy.1"], ["acme.a.policy.2"])
    assert not view.update(T0 + 5, since=second.cursor).operations


def test_update_is_whole_again_for_who_was_away_too_long_or_comes_from_another_view() -> None:
    view = mesh(history=10)
    cursor = view.update(T0).cursor
    for seq in range(1, 31):
        run(view, POLICY, seq, 2.0 * seq)
    late = view.update(T0 + 70, since=cursor)
    assert late.is_whole
    assert names(late) == [f"acme.a.policy.{seq}" for seq in range(21, 31)], "the newest, bounded"
    assert view.update(T0 + 70, since=late.cursor + 1).is_whole


def test_tenant_is_told_its_own_alone_and_by_no_name_of_another() -> None:
    view = mesh()
    view.step(T0 + 1, opened(POLICY, 0.5, OTHER))
    run(view, POLICY, 1, 2.0)
    run(view, OTHER, 1, 4.0)
    view.step(T0 + 5, queued(OTHER, 2))
    view.status(T0, JobKey("acme", "a"), JobStatus("a", "active", placement="on train-0"))
    view.status(T0, JobKey("globex", "b"), JobStatus("b", "active", placement="on train-0"))
    own = view.update(T0 + 6, tenant="acme")
    assert names(own) == ["acme.a.policy.1"]
    assert [row.job for row in own.jobs or []] == ["acme.a"]
    assert b"globex" not in msgspec.json.encode(own)
    everything = view.update(T0 + 6)
    assert len(everything.operations) == 2
    (row,) = everything.activations
    assert [everything.deployments[one] for one in row.displaced] == ["globex.b.policy"]


def test_ready_operation_without_an_outcome_is_told_as_the_head_of_its_deployment() -> None:
    view = mesh()
    for seq in (1, 2):
        view.step(
            T0 + seq,
            events.QueuedOperation(
                OperationKey("acme", "a", "policy", f"r{seq}"), str(seq), "forward"
            ),
        )
    update = view.update(T0 + 5)
    (head,) = update.heads
    assert (head.slot, head.num_ready, round(head.ready * TICK_S, 3)) == ("r1", 2, 1.0)
    assert not view.update(T0 + 5, tenant="globex").heads
    view.status(T0 + 6, JobKey("acme", "a"), JobStatus("a", "failed"))
    update = view.update(T0 + 7)
    assert not update.heads
    assert [row.num_open for row in update.jobs or []] == [0]


def test_switch_is_hidden_for_as_long_as_nobody_waited() -> None:
    view = mesh()
    view.step(T0 + 10.1, queued(POLICY, 1))
    view.step(T0 + 10.5, opened(POLICY, 10.0))
    (row,) = view.update(T0 + 11).activations
    assert round(row.hidden * TICK_S, 3) == 0.1
    assert round((row.offload + row.load) * TICK_S, 3) == 0.5


def test_wpg_on_several_nodes_has_the_devices_of_all_of_them() -> None:
    view = mesh()
    view.step(T0, events.WpgStarted(POLICY, 1, NodeId("train-1"), 10, 0, [0, 1]))
    run(view, POLICY, 1, 1.0)
    update = view.update(T0 + 3)
    (row,) = update.operations
    places = ["train-0/0", "train-1/0", "train-1/1"]
    assert [update.devices[one] for one in row.devices] == places
    view.step(T0 + 4, events.WpgStarted(POLICY, 2, NodeId("train-1"), 10, 0, [0]))
    run(view, POLICY, 2, 5.0)
    later = view.update(T0 + 7, since=update.cursor)
    assert later.devices == ["train-1/0"], "the next incarnation is elsewhere"


def test_job_is_told_with_its_counts_its_cycle_and_what_is_wrong() -> None:
    view = mesh()
    job = JobKey("acme", "a")
    problem = ErrorInfo(Code.RESOURCE_EXHAUSTED, "too big", remedy="ask for less")
    deployment = DeploymentStatus("policy", "train", "train-0", "ready", 1, 3, error=problem)
    view.status(T0, job, JobStatus("a", "active", [deployment], placement="group g1"))
    view.cycle(job, events.PhaseTrace(job, 2.5, [Segment("train", 0.5, 1.0)], []))
    run(view, POLICY, 1, 1.0)
    view.step(T0 + 3, queued(POLICY, 2))
    error = ErrorInfo(Code.INTERNAL, "no")
    view.step(T0 + 5, finished(POLICY, 2, 3.5, 1.5, outcome=Outcome.FAILED, error=error))
    view.step(T0 + 6, finished(POLICY, 2, 5.5, 0.5, replay=True))
    view.step(T0 + 7, queued(POLICY, 3))
    (row,) = view.jobs()
    assert (row.state, row.placement, row.num_open) == ("active", "group g1", 1)
    assert (row.num_done, row.num_failed) == (2, 1), "what was run again counts once"
    assert round(row.device_s, 3) == 2.5
    assert (row.period_s, row.segments[0].pool) == (2.5, "train")
    assert row.deployments[0].error is not None
    assert row.deployments[0].error.remedy == "ask for less"
    view.status(T0 + 8, job, None)
    assert not view.jobs()


def test_reports_of_a_job_are_told_whole_and_as_they_come() -> None:
    view = mesh(history=4)
    job = JobKey("acme", "a")
    for step in range(10):
        view.reported(job, JobReport("a", step, {"reward": step / 10}))
    whole = view.update(T0)
    assert [row.step for row in whole.reports] == [*range(10)], "more than the history has"
    view.reported(job, JobReport("a", 10, {"reward": 1.0}))
    (row,) = view.update(T0, since=whole.cursor).reports
    assert (row.job, row.step, row.values) == ("acme.a", 10, {"reward": 1.0})
    assert not view.update(T0, tenant="globex").reports
    view.status(T0, job, None)
    assert not view.update(T0).reports


def test_page_is_told_what_is_news_to_it_and_now_and_then_that_nothing_is() -> None:
    view = mesh()
    view.status(T0, JobKey("acme", "a"), JobStatus("a", "active"))
    page = Listener(view, "", None)
    first = page.news(T0)
    assert first is not None
    assert first.is_whole
    assert [row.state for row in first.jobs or []] == ["active"]
    assert page.news(T0 + 0.25) is None
    run(view, POLICY, 1, 1.0)
    second = page.news(T0 + 0.5)
    assert second is not None
    assert names(second) == ["acme.a.policy.1"]
    assert second.jobs is None, "they are told once a second"
    third = page.news(T0 + 1.5)
    assert third is not None
    assert [row.num_done for row in third.jobs or []] == [1]
    assert not third.operations
    assert page.news(T0 + 3.0) is None
    silent = page.news(T0 + 7.0)
    assert silent is not None
    assert not silent.is_whole


def test_decisions_are_told_with_their_reasons_and_trouble_as_such() -> None:
    view = mesh()
    view.step(T0 + 1, events.SessionOpened(JobKey("acme", "a"), 3))
    view.step(T0 + 2, events.NodeLost(NODE, 1, "its lease ran out"))
    lost = events.WpgLost(POLICY, 1, NODE, ErrorInfo(Code.UNAVAILABLE, "killed"))
    view.step(T0 + 3, lost)
    on_order = ErrorInfo(Code.ABORTED, "stopped by the scheduler")
    view.step(T0 + 3.5, events.WpgLost(OTHER, 1, NODE, on_order))
    told = {one.what: one for one in view.update(T0 + 4).decisions}
    attached = told["controller attached"]
    assert (attached.job, attached.why) == ("acme.a", "session 3")
    assert not attached.is_trouble
    assert told["node train-0 is up"].why == "1 device in pool train"
    assert told["node train-0 lost"].why == "its lease ran out"
    assert told["policy lost on train-0"].is_trouble
    stopped = told["policy stopped on train-0"]
    assert (stopped.job, stopped.why) == ("globex.b", "stopped by the scheduler")
    assert not stopped.is_trouble, "as at the end of every job"
    (row,) = view.update(T0 + 4).nodes or []
    assert not row.is_up


def test_notices_are_trouble_unless_they_tell_of_what_is_as_it_should_be() -> None:
    done = of_notice(
        T0, events.Notice("scheduler", "job done", "the controller finished", "acme.a")
    )
    assert (done.what, done.is_trouble) == ("job done acme.a", False)
    full = of_notice(T0, events.Notice("supervisor", "disk_full", "0 bytes are left", "nats"))
    assert (full.what, full.is_trouble) == ("disk full nats", True)


def test_routine_notices_are_those_that_the_scheduler_has() -> None:
    core = Path(phaseloom.scheduler.core.core.__file__).parent
    sources = "".join(path.read_text() for path in core.rglob("*.py"))
    told = {*re.findall(r'\.notify\(\s*"([^"]+)"', sources), "job done"}
    assert told >= ROUTINE


def test_activations_are_told_also_where_nothing_moved_and_are_no_decisions() -> None:
    view = mesh()
    before = len(view.update(T0).decisions)
    view.step(T0 + 1, opened(POLICY, 1.0, num_bytes=0))
    view.step(T0 + 2, opened(OTHER, 2.0))
    update = view.update(T0 + 3)
    assert [row.bytes_in for row in update.activations] == [0, 100]
    assert len(update.decisions) == before


def test_second_run_of_a_job_has_its_own_counts_and_curves() -> None:
    view, job = mesh(), JobKey("acme", "a")
    view.status(T0, job, JobStatus("a", "active", run="r1", submitted_s=T0))
    run(view, POLICY, 1, 2.0)
    view.reported(job, JobReport("a", 0, {"loss": 1.0}, "r1"))
    view.status(T0 + 3, job, JobStatus("a", "done", run="r1", submitted_s=T0, ended_s=T0 + 3))
    (row,) = view.update(T0 + 4).jobs or []
    assert (row.run, row.num_done, row.ended_s) == ("r1", 1, T0 + 3)
    view.status(T0 + 5, job, JobStatus("a", "active", run="r2", submitted_s=T0 + 5, tags=["x"]))
    view.reported(job, JobReport("a", 0, {"loss": 2.0}, "r2"))
    update = view.update(T0 + 6)
    (row,) = update.jobs or []
    assert (row.run, row.num_done, row.ended_s, row.tags) == ("r2", 0, 0.0, ["x"])
    assert [(r.run, r.values) for r in update.reports] == [
        ("r1", {"loss": 1.0}),
        ("r2", {"loss": 2.0}),
    ]
