"""Outcomes of operations that never ran are stored behind the scheduler's fold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from opentelemetry.context import Context

from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.common.contract.events import OperationsQueued, QueuedOperation
from phaseloom.common.contract.ids import OperationKey
from phaseloom.common.contract.operations import Completion, Outcome
from phaseloom.common.process import lifecycle
from phaseloom.scheduler.core.core import Core
from phaseloom.scheduler.core.state.outputs import (
    Answer,
    DeleteOperations,
    Output,
    PublishNotice,
    WriteCompletion,
)
from phaseloom.scheduler.outcomes import WRITES_AT_ONCE, OutcomeWriter
from phaseloom.scheduler.shell import Shell
from tests.support.memorylog import MemoryLog, MemorySink
from tests.support.world import CONFIG


def key(seq: int, tenant: str = "acme") -> OperationKey:
    return OperationKey(tenant, "a", "policy", str(seq))


def write(seq: int, tenant: str = "acme") -> WriteCompletion:
    return WriteCompletion(key(seq, tenant), Completion("id", Outcome.FAILED), "")


async def until(is_met: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_met():
            await asyncio.sleep(0)


class Server:
    """Stores the outcomes of a tenant only once the test allows it."""

    def __init__(self) -> None:
        self.given: list[Output] = []
        self.stored: list[Output] = []
        self.gates = {"acme": asyncio.Event(), "globex": asyncio.Event()}

    async def perform(self, output: Output) -> None:
        self.given.append(output)
        if isinstance(output, WriteCompletion):
            await self.gates[output.key.tenant].wait()
        self.stored.append(output)


async def test_outcomes_come_before_their_deletions_and_tenants_do_not_wait_for_each_other() -> (
    None
):
    server, number = Server(), 100
    notice = PublishNotice("x", "y", "z")
    async with asyncio.TaskGroup() as tasks:
        writer = OutcomeWriter(server.perform, tasks)
        deletions = [DeleteOperations([key(seq)]) for seq in range(number)]
        ended: list[Output] = [*map(write, range(number)), *deletions, Answer("r"), notice]
        assert writer.add(ended) == [notice]
        later = DeleteOperations([key(number)])
        assert writer.add([later]) == [], "it comes after the outcomes before it"
        other = DeleteOperations([key(0, "globex")])
        assert writer.add([other]) == [other], "nothing of this tenant is being stored"
        writer.add([write(1, "globex"), DeleteOperations([key(1, "globex")])])

        server.gates["globex"].set()
        await until(lambda: len(server.stored) == 2)
        assert server.stored == [write(1, "globex"), DeleteOperations([key(1, "globex")])]
        assert len(server.given) == WRITES_AT_ONCE + 2
        waiting = tasks.create_task(writer.stored())
        await asyncio.sleep(0)
        assert not waiting.done()
        server.gates["acme"].set()
        await waiting
    written = [o.key.seq for o in server.stored[2 : number + 2] if isinstance(o, WriteCompletion)]
    assert sorted(seq or 0 for seq in written) == list(range(number))
    assert server.stored[number + 2 :] == [*deletions, Answer("r"), later]


async def test_nothing_is_kept_of_a_tenant_whose_outcomes_are_stored() -> None:
    server = Server()
    server.gates["acme"].set()
    async with asyncio.TaskGroup() as tasks:
        writer = OutcomeWriter(server.perform, tasks)
        writer.add([write(1)])
        await writer.stored()
    deletion = DeleteOperations([key(1)])
    assert writer.add([deletion]) == [deletion]


class HeldSink(MemorySink):
    def __init__(self) -> None:
        super().__init__()
        self.writing = 0
        self.let = asyncio.Event()

    async def perform(self, output: Output, context: Context | None) -> None:
        if isinstance(output, WriteCompletion):
            self.writing += 1
            await self.let.wait()
        await super().perform(output, context)


@asynccontextmanager
async def running(log: MemoryLog, sink: MemorySink, snapshot_every: int) -> AsyncIterator[Shell]:
    shell = Shell(Core(), log, sink, CONFIG, snapshot_every)
    task = asyncio.create_task(shell.run())
    try:
        await shell.caught_up.wait()
        yield shell
    finally:
        await lifecycle.end([task])


def refused(seq: int) -> QueuedOperation:
    error = ErrorInfo(Code.INVALID_ARGUMENT, "wrong")
    return QueuedOperation(key(seq), f"id{seq}", "optim_step", error=error)


async def test_fold_does_not_wait_for_outcomes_and_a_snapshot_does() -> None:
    log, sink = MemoryLog(lambda: 1.0), HeldSink()
    async with running(log, sink, snapshot_every=10) as shell:
        for first in range(1, 101, 10):
            await log.append(OperationsQueued([refused(seq) for seq in range(first, first + 10)]))
        await until(lambda: shell.core.state.sequence == len(log.entries))
        await until(lambda: sink.writing == 10)
        assert sink.outputs == []
        assert sink.snapshots == []
        sink.let.set()
        await until(lambda: len(sink.snapshots) > 0)
        sequence, _ = sink.snapshots[0]
        refusals = [e for e in log.entries[:sequence] if isinstance(e.event, OperationsQueued)]
        stored = sum(isinstance(output, WriteCompletion) for output in sink.outputs)
        assert stored >= 10 * len(refusals)
