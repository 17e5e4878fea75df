"""The scheduler's shell on a log and a sink in memory."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable

import pytest
from msgspec.structs import replace
from opentelemetry.context import Context

from phaseloom.common.contract.commands import OpenActivation, Permit, Permits, StartWpg
from phaseloom.common.contract.errors import CallerError, Code, ErrorInfo, ResourceError
from phaseloom.common.contract.events import (
    ActivationRefused,
    Event,
    JobFinished,
    JobSubmitted,
    OperationFinished,
    OperationsFinished,
    OperationsQueued,
    QueuedOperation,
    SchedulerConfigured,
    TimerFired,
    WpgStarted,
)
from phaseloom.common.contract.ids import JobKey, NodeId, OperationKey
from phaseloom.common.contract.operations import Outcome
from phaseloom.common.contract.specs import JobSpec
from phaseloom.common.process import lifecycle
from phaseloom.scheduler.core.core import Core
from phaseloom.scheduler.core.dispatch.dispatch import REFUSAL_PAUSE_S
from phaseloom.scheduler.core.state.outputs import (
    DeleteOperations,
    DropCheckpoint,
    Output,
    PutView,
    SendCommand,
    WriteCompletion,
)
from phaseloom.scheduler.shell import Clock, Shell
from tests.support.memorylog import MemoryLog, MemorySink
from tests.support.world import CONFIG, deployment, node_up, spec

NODE = NodeId("t0")


class Harness:
    def __init__(
        self, snapshot_every: int = 1000, clock: Callable[[], float] | None = None
    ) -> None:
        ticks = itertools.count(1)
        self.log = MemoryLog(clock or (lambda: float(next(ticks))))
        self.sink = MemorySink()
        self.snapshot_every = snapshot_every

    def shell(self, core: Core | None = None, clock: Clock | None = None) -> Shell:
        return Shell(core or Core(), self.log, self.sink, CONFIG, self.snapshot_every, clock=clock)

    async def fold_all(self, shell: Shell) -> None:
        """Fold until the log is at rest."""
        while shell.core.state.sequence < len(self.log.entries):
            await shell.handle(self.log.entries[shell.core.state.sequence])

    def fired(self) -> list[float]:
        """When timers fired, by the log's clock."""
        return [e.time_s for e in self.log.entries if isinstance(e.event, TimerFired)]

    async def start_job(self, shell: Shell) -> None:
        await self.log.append(SchedulerConfigured(CONFIG))
        await self.log.append(node_up("t0", "train"))
        specs = [spec("policy", "train", trainable=True)]
        await self.log.append(JobSubmitted(JobKey("t", "a"), JobSpec(deployments=specs), "r"))
        await self.log.append(WpgStarted(deployment("a", "policy"), 1, NODE, 10, 0))
        await self.fold_all(shell)


def queued(seq: int) -> QueuedOperation:
    return QueuedOperation(OperationKey("t", "a", "policy", str(seq)), f"id{seq}", "optim_step")


async def test_first_permit_follows_its_activation() -> None:
    harness = Harness()
    shell = harness.shell()
    await harness.start_job(shell)
    await harness.log.append(queued(1))
    await harness.fold_all(shell)
    commands = [o.command for o in harness.sink.outputs if isinstance(o, SendCommand)]
    opened, permit = commands[-2:]
    assert isinstance(opened, OpenActivation)
    assert isinstance(permit, Permit)
    assert opened.epoch == permit.epoch == len(harness.log.entries)
    assert opened.id < permit.id


async def test_restart_performs_the_same_commands_again() -> None:
    harness = Harness()
    first = harness.shell()
    await harness.start_job(first)
    await harness.log.append(queued(1))
    await harness.fold_all(first)
    performed = list(harness.sink.outputs)
    harness.sink.outputs.clear()
    await harness.fold_all(harness.shell())
    assert harness.sink.outputs == performed


async def test_snapshot_is_taken_and_a_restart_goes_on_from_it() -> None:
    harness = Harness(snapshot_every=3)
    await harness.log.append(SchedulerConfigured(CONFIG))
    await harness.log.append(node_up("t0", "train"))
    await harness.log.append(node_up("r0", "rollout"))
    shell = harness.shell()
    running = asyncio.create_task(shell.run())
    await shell.caught_up.wait()
    while not harness.sink.snapshots:
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    sequence, snapshot = harness.sink.snapshots[0]
    restored = Core.restore(snapshot)
    assert restored.state.sequence == sequence == 3
    assert set(restored.state.nodes) == {"t0", "r0"}


async def test_entry_behind_a_hole_in_the_log_is_never_folded() -> None:
    """The server skips an entry that it cannot read any more."""
    harness = Harness()
    for name in ("t0", "t1", "t2"):
        await harness.log.append(node_up(name, "train"))
    del harness.log.entries[1]
    shell = harness.shell()
    with pytest.raises(ExceptionGroup) as stopped:
        await shell.run()
    (error,) = stopped.value.exceptions
    assert isinstance(error, ResourceError)
    assert (error.info.code, error.info.details["first_lost"]) == (Code.DATA_LOSS, "2")
    assert set(shell.core.state.nodes) == {"t0"}


async def test_what_would_delete_a_living_jobs_data_is_not_performed_again() -> None:
    """The name of a job that ended is used again: its checkpoint goes, the next one's must not."""
    harness = Harness()
    await harness.start_job(harness.shell())
    specs = JobSpec(deployments=[spec("policy", "train", trainable=True)])
    await harness.log.append(JobFinished(JobKey("t", "a"), "finish"))
    await harness.log.append(JobSubmitted(JobKey("t", "a"), specs, "again"))
    shell = harness.shell()
    running = asyncio.create_task(shell.run())
    await shell.caught_up.wait()
    await lifecycle.end([running])
    assert any(isinstance(output, DropCheckpoint) for output in harness.sink.outputs)
    sequence, snapshot = harness.sink.snapshots[-1]
    assert sequence == len(harness.log.entries)
    harness.sink.outputs.clear()
    await harness.log.append(TimerFired("none"))
    await harness.fold_all(harness.shell(Core.restore(snapshot)))
    assert not any(isinstance(output, DropCheckpoint) for output in harness.sink.outputs)


async def test_configuration_enters_the_log_once_and_at_each_change() -> None:
    harness = Harness()
    for _ in range(2):
        core = Core()
        for entry in harness.log.entries:
            core.step(entry.sequence, entry.time_s, entry.event)
        shell = harness.shell(core)
        running = asyncio.create_task(shell.run())
        await shell.caught_up.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    configured = [e for e in harness.log.entries if isinstance(e.event, SchedulerConfigured)]
    assert len(configured) == 1


def submitted(request: str) -> JobSubmitted:
    return JobSubmitted(JobKey("t", "a"), JobSpec(deployments=[spec("s", "rollout")]), request)


async def test_request_is_answered_by_the_core() -> None:
    harness = Harness()
    shell = harness.shell()
    running = asyncio.create_task(shell.run())
    await shell.caught_up.wait()
    status = (await shell.request(submitted)).status
    assert status is not None
    assert status.job == "a"
    with pytest.raises(CallerError) as caught:
        await shell.request(submitted)
    assert caught.value.info.code is Code.ALREADY_EXISTS
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


class HeldSink(MemorySink):
    """Stores nothing until it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Output] = []
        self.let = asyncio.Event()

    async def perform(self, output: Output, context: Context | None) -> None:
        self.given.append(output)
        await self.let.wait()
        await super().perform(output, context)


async def test_request_is_answered_once_what_it_brings_is_stored() -> None:
    """Whoever submits a job and then attaches to it finds it in the routers' view."""
    harness = Harness()
    harness.sink = sink = HeldSink()
    shell = harness.shell()
    running = asyncio.create_task(shell.run())
    try:
        await shell.caught_up.wait()
        asking = asyncio.create_task(shell.request(submitted))
        await until(lambda: bool(sink.given))
        for _ in range(100):  # room for an answer that would not wait
            await asyncio.sleep(0)
        assert not asking.done()
        sink.let.set()
        await asking
        assert any(isinstance(output, PutView) for output in sink.outputs)
    finally:
        await lifecycle.end([running])


async def test_operation_is_deleted_once_its_outcome_is_stored() -> None:
    """Else it would look lost to its controller, which finds neither."""
    harness = Harness()
    harness.sink = sink = HeldSink()
    sink.let.set()
    shell = harness.shell()
    await harness.start_job(shell)
    sink.let.clear()
    sink.outputs.clear()
    error = ErrorInfo(Code.INVALID_ARGUMENT, "wrong")
    await harness.log.append(replace(queued(1), error=error))
    folding = asyncio.create_task(harness.fold_all(shell))
    await until(lambda: any(isinstance(o, WriteCompletion) for o in sink.given))
    for _ in range(100):  # room for a deletion that would not wait
        await asyncio.sleep(0)
    assert not any(isinstance(output, DeleteOperations) for output in sink.given)
    sink.let.set()
    await folding
    assert any(isinstance(output, DeleteOperations) for output in sink.outputs)


async def test_timer_is_appended_when_it_is_due() -> None:
    harness = Harness()  # its clock starts at 1: every timer is long due
    shell = harness.shell()
    running = asyncio.create_task(shell.run())
    await shell.caught_up.wait()
    await harness.log.append(node_up("t0", "train"))
    for job in ("a", "b"):
        specs = [spec("policy", "train", trainable=True)]
        await harness.log.append(JobSubmitted(JobKey("t", job), JobSpec(deployments=specs), job))
        await harness.log.append(WpgStarted(deployment(job, "policy"), 1, NODE, 10, 0))
    refused = ActivationRefused(
        deployment("a", "policy"), 0, NODE, ErrorInfo(Code.UNAVAILABLE, "not now")
    )
    await harness.log.append(refused)  # asks for another look after a pause
    while not harness.fired():
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_timers_that_have_fired_do_not_fire_again_after_a_restart() -> None:
    harness = Harness(clock=time.time)
    await harness.start_job(harness.shell())
    refused = ActivationRefused(
        deployment("a", "policy"), 0, NODE, ErrorInfo(Code.UNAVAILABLE, "not now")
    )
    await harness.log.append(refused)
    for _ in range(2):
        shell = harness.shell()
        running = asyncio.create_task(shell.run())
        await shell.caught_up.wait()
        async with asyncio.timeout(60):
            while not harness.fired() or shell.core.state.timers:
                await asyncio.sleep(0)
        await lifecycle.end([running])
    assert len(harness.fired()) == 1


class LeapingClock:
    """It is at once as late as is waited for."""

    def __init__(self) -> None:
        self.time_s = 1000.0

    def now_s(self) -> float:
        return self.time_s

    async def wait(self, event: asyncio.Event, until_s: float | None) -> None:
        if until_s is None:
            await event.wait()
        else:
            self.time_s = max(self.time_s, until_s)
            await asyncio.sleep(0)


async def test_timer_fires_when_it_is_due_by_the_logs_clock() -> None:
    """The server's clock is behind ours: the timer comes early once, and then in time."""
    ours = LeapingClock()
    harness = Harness(clock=lambda: ours.time_s - 0.25)
    await harness.start_job(harness.shell())
    refused = ActivationRefused(
        deployment("a", "policy"), 0, NODE, ErrorInfo(Code.UNAVAILABLE, "not now")
    )
    await harness.log.append(refused)
    due_s = harness.log.entries[-1].time_s + REFUSAL_PAUSE_S
    shell = harness.shell(clock=ours)
    running = asyncio.create_task(shell.run())
    await until(lambda: bool(harness.fired()) and not shell.core.state.timers)
    await lifecycle.end([running])
    assert harness.fired() == [due_s - 0.25, due_s]


class SlowSink(MemorySink):
    """Stores a permit only when it is let; what it has been given is in `given`."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[str] = []
        self.let = asyncio.Event()
        self.failure: Exception | None = None

    async def perform(self, output: Output, context: Context | None) -> None:
        if isinstance(output, SendCommand) and isinstance(output.command, Permit):
            self.given.append(output.command.operation.slot)
            await self.let.wait()
            if self.failure is not None:
                raise self.failure
        await super().perform(output, context)


def reading(slot: str) -> QueuedOperation:
    return QueuedOperation(OperationKey("t", "a", "policy", slot), slot, "forward")


async def readers(snapshot_every: int = 1000) -> tuple[Harness, SlowSink, Shell]:
    """A job with an activation open, whose permits are stored slowly from now on."""
    harness = Harness(snapshot_every)
    harness.sink = sink = SlowSink()
    sink.let.set()
    first = harness.shell()
    await harness.start_job(first)
    await harness.log.append(reading("r0"))
    await harness.fold_all(first)
    sink.let.clear()
    sink.given.clear()
    return harness, sink, harness.shell(first.core)


async def until(is_met: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_met():
            await asyncio.sleep(0)


async def test_permits_do_not_wait_for_one_another_and_nothing_overtakes_them() -> None:
    harness, sink, shell = await readers()
    running = asyncio.create_task(shell.run())
    try:
        for slot in ("r1", "r2", "r3"):
            await harness.log.append(reading(slot))
        await until(lambda: len(sink.given) == 3)
        num_stored = len(sink.outputs)
        await harness.log.append(node_up("t1", "train"))
        again = JobSubmitted(JobKey("t", "b"), JobSpec(deployments=[spec("x", "train")]), "r2")
        await harness.log.append(again)
        await until(lambda: shell.core.state.sequence == len(harness.log.entries))
        assert len(sink.outputs) == num_stored, "stored before the permits of earlier entries"
        sink.let.set()
        await until(lambda: len(sink.outputs) > num_stored + 3)
        stored = [o.command for o in sink.outputs[num_stored:] if isinstance(o, SendCommand)]
        assert [c.operation.slot for c in stored[:3] if isinstance(c, Permit)] == ["r1", "r2", "r3"]
        assert isinstance(stored[3], StartWpg)
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_snapshot_waits_until_every_permit_is_stored() -> None:
    harness, sink, shell = await readers(snapshot_every=2)
    running = asyncio.create_task(shell.run())
    try:
        for slot in ("r1", "r2"):
            await harness.log.append(reading(slot))
        await until(lambda: len(sink.given) == 2)
        for _ in range(100):  # room for whoever would not wait
            await asyncio.sleep(0)
        assert not sink.snapshots
        sink.let.set()
        await until(lambda: bool(sink.snapshots))
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_permit_that_cannot_be_stored_ends_the_scheduler() -> None:
    """Whoever comes next sends it again; going on without it would leave the device taken."""
    harness, sink, shell = await readers()
    sink.failure = ResourceError("refused by the server")
    sink.let.set()
    running = asyncio.create_task(shell.run())
    await harness.log.append(reading("r1"))
    await asyncio.wait([running], timeout=60)
    assert running.done()
    assert isinstance(running.exception(), BaseExceptionGroup)


def finished(seq: int) -> OperationFinished:
    key = queued(seq).key
    return OperationFinished(key, "optim_step", Outcome.COMPLETED, 1, 1, 0.0, 0.1)


async def test_copy_of_an_operation_that_came_late_leaves_nothing_behind() -> None:
    harness = Harness()
    shell = harness.shell()
    await harness.start_job(shell)
    for event in (queued(1), finished(1), queued(1), queued(2)):
        await harness.log.append(event)
    await harness.fold_all(shell)
    assert list(shell._traces) == ["t.a.policy.2"]


async def test_timers_that_were_taken_back_are_not_kept_until_they_are_due() -> None:
    harness = Harness()
    shell = harness.shell()
    await harness.start_job(shell)
    for seq in range(1, 301):
        await harness.log.append(replace(queued(seq), timeout_s=86400.0))
        await harness.log.append(finished(seq))
    await harness.fold_all(shell)
    kept = {timer for _, timer in shell._timers}
    assert len(kept) < 100
    assert kept >= set(shell.core.state.timers)


async def test_what_one_append_brought_is_permitted_in_one_message() -> None:
    harness, sink, shell = await readers()
    sink.outputs.clear()
    sink.let.set()
    slots = ["r1", "r2", "r3"]
    await harness.log.append(OperationsQueued([reading(slot) for slot in slots]))
    await harness.fold_all(shell)
    (command,) = [o.command for o in sink.outputs if isinstance(o, SendCommand)]
    assert isinstance(command, Permits)
    assert [permit.operation.slot for permit in command.permits] == slots
    assert len({permit.id for permit in command.permits}) == len(slots)
    assert command.id == command.permits[0].id


async def test_snapshots_come_after_as_many_events_however_few_entries_brought_them() -> None:
    """What a restart performs again, and a node must remember, is bounded by them."""
    harness, sink, shell = await readers(snapshot_every=6)
    sink.let.set()
    running = asyncio.create_task(shell.run())
    try:
        await shell.caught_up.wait()
        for first in (1, 4):
            batch = [reading(f"r{first + i}") for i in range(3)]
            await harness.log.append(OperationsQueued(batch))
        await until(lambda: shell.core.state.sequence == len(harness.log.entries))
        await until(lambda: bool(sink.snapshots))
    finally:
        await lifecycle.end([running])


async def test_events_that_one_append_brought_come_to_the_same_as_one_by_one() -> None:
    """Two that are permitted, one that ends before it runs, one that comes twice."""
    _, _, shell = await readers()
    snapshot = shell.core.snapshot()
    sequence, now_s = shell.core.state.sequence, shell.core.state.now_s
    ops = [reading(slot) for slot in ("r1", "r2", "r3")]
    refused = replace(ops[2], error=ErrorInfo(Code.INVALID_ARGUMENT, "wrong"))
    came: list[QueuedOperation] = [ops[0], ops[1], refused, ops[0]]
    ended = [done(op, Outcome.COMPLETED) for op in (ops[1], ops[0], ops[1])]
    apart, together = Core.restore(snapshot), Core.restore(snapshot)
    outputs: list[list[Output]] = [[], []]
    one_by_one: list[Event] = [*came, *ended]
    for i, event in enumerate(one_by_one, 1):
        outputs[0] += apart.step(sequence + i, now_s + 1.0, event)
    at_once: list[Event] = [OperationsQueued(came), OperationsFinished(ended)]
    for i, event in enumerate(at_once, 1):
        outputs[1] += together.step(sequence + i, now_s + 1.0, event)
    for made in outputs:
        permits = [
            o.command.operation.slot
            for o in made
            if isinstance(o, SendCommand) and isinstance(o.command, Permit)
        ]
        assert permits == ["r1", "r2"]
        assert [o.key.slot for o in made if isinstance(o, WriteCompletion)] == ["r3"]
        deleted = [key.slot for o in made if isinstance(o, DeleteOperations) for key in o.keys]
        assert deleted == ["r3", "r2", "r1"]
    deployments = [core.state.deployments["t.a.policy"] for core in (apart, together)]
    assert deployments[0] == deployments[1]
    assert "r1" not in deployments[0].queue.unordered


def done(op: QueuedOperation, outcome: Outcome) -> OperationFinished:
    return OperationFinished(op.key, op.kind, outcome, 1, 1, 0.0, 0.1)
