"""The profiler against a real nats-server: traces in the log, the view, restarts."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from phaseloom.common.contract.events import PhaseTrace
from phaseloom.common.contract.ids import JobKey
from phaseloom.common.contract.streams import Bucket
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.decisionlog import LogEntry
from phaseloom.common.transport.natsserver import EmbeddedServer
from phaseloom.profiler.core.profile import is_news
from phaseloom.profiler.shell import MSG_ID, Shell
from tests.support.joblog import JobLog, Turn, grpo_log
from tests.support.processes import service

SUMS, LETTERS = JobKey("acme", "sums"), JobKey("acme", "letters")


async def append(bus: Bus, log: JobLog) -> None:
    for _, _, event in log.entries():
        await bus.log.append(event)


@dataclass(frozen=True)
class Told:
    """A trace in the log."""

    sequence: int
    msg_id: str
    event: PhaseTrace


async def traces_until(bus: Bus, job: JobKey) -> list[Told]:
    """All traces in the log, up to the first one of a job."""
    traces = []
    async for entry in bus.log.read():
        if isinstance(entry.event, PhaseTrace):
            traces.append(Told(entry.sequence, entry.headers[MSG_ID], entry.event))
            if entry.event.job == job:
                break
    return traces


@asynccontextmanager
async def following(bus: Bus) -> AsyncIterator[None]:
    task = asyncio.create_task(Shell(bus).run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_trace_goes_to_the_log_and_to_the_view(bus: Bus) -> None:
    """One operation makes one trace, whatever comes later."""
    log = JobLog(SUMS)
    log.finish(1.0, 0.02, log.queue(0.0, "sampler", "sync_weights"), "sync_weights")
    async with following(bus):
        await append(bus, log)
        (told,) = await traces_until(bus, SUMS)
        (estimate,) = told.event.estimates
        assert (estimate.deployment, estimate.kind, estimate.count) == (
            "sampler",
            "sync_weights",
            1,
        )
        assert estimate.duration_s == 0.02
        async with aclosing(bus.keys.watch(Bucket.PROFILES)) as changes:
            view = await anext(changes)
    assert view.key == "acme.sums"
    assert view.stored is not None
    assert msgspec.json.decode(view.stored.payload, type=PhaseTrace) == told.event


async def test_neither_the_fold_nor_the_log_waits_for_the_view(bus: Bus) -> None:
    """Views cannot be put for a while; the log is followed all the same."""
    view = f"KV_{Bucket.PROFILES}"
    await bus.js.delete_stream(view)
    async with following(bus):
        for job in (SUMS, LETTERS):
            await append(bus, grpo_log(1, lambda _: Turn(), job=job))
            await traces_until(bus, job)
        await bus.provision()
        waiting = {str(SUMS), str(LETTERS)}
        async with aclosing(bus.keys.watch(Bucket.PROFILES)) as changes:
            async for change in changes:
                waiting.discard(change.key)
                if not waiting:
                    break


async def test_profiler_started_late_says_what_it_missed(bus: Bus) -> None:
    """A predecessor died before its trace was stored: the log has the cause and not the trace."""
    await append(bus, grpo_log(1, lambda _: Turn(), job=SUMS))
    async with following(bus):
        (entry,) = await traces_until(bus, SUMS)
    causes = {e.sequence async for e in _first(bus, 8)}
    assert int(entry.msg_id.rpartition(":")[2]) in causes


async def test_process_killed_and_started_again_repeats_nothing(
    bus: Bus, nats_server: EmbeddedServer
) -> None:
    async with service("profiler", nats_server) as first:
        await append(bus, grpo_log(2, lambda _: Turn(), job=SUMS))
        before = await traces_until(bus, SUMS)
        first.send_signal(signal.SIGKILL)
        await first.wait()
    async with service("profiler", nats_server):
        # A second job's trace comes after all that the restart had to say about the first: nothing,
        # or what the second job's entries gave it the occasion to look at.
        await append(bus, grpo_log(1, lambda _: Turn(), job=LETTERS))
        after = [e for e in await traces_until(bus, LETTERS) if e.event.job == SUMS]
    assert [e.sequence for e in after[: len(before)]] == [e.sequence for e in before]
    assert all(is_news(a.event, b.event) for a, b in pairwise(after))


async def test_process_ends_in_order_when_told_to(nats_server: EmbeddedServer, bus: Bus) -> None:
    async with service("profiler", nats_server) as running:
        await append(bus, grpo_log(1, lambda _: Turn(), job=SUMS))
        await traces_until(bus, SUMS)
        running.send_signal(signal.SIGTERM)
        assert await running.wait() == 0


async def test_process_outlasts_a_server_that_is_killed(
    nats_server: EmbeddedServer, bus: Bus
) -> None:
    async with service("profiler", nats_server) as running:
        await append(bus, grpo_log(1, lambda _: Turn(), job=SUMS))
        await traces_until(bus, SUMS)
        # It has a trace to append while the server takes nothing, and then is gone.
        pid = nats_server.pid
        assert pid is not None
        await append(bus, grpo_log(1, lambda _: Turn(), job=LETTERS))
        os.kill(pid, signal.SIGSTOP)
        await nats_server.kill()
        await nats_server.start()
        await traces_until(bus, LETTERS)
        running.send_signal(signal.SIGTERM)
        assert await running.wait() == 0


async def _first(bus: Bus, count: int) -> AsyncIterator[LogEntry]:
    async for entry in bus.log.read():
        yield entry
        if entry.sequence >= count:
            return
