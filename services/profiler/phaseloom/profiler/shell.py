"""The profiler's shell: reads the decision log, folds it, and sends traces and views.

The fold never waits for the server, so it keeps up with the log. Traces (for the scheduler) and
views (for people) each have their own outbox, so neither waits for the other.

After a restart the fold starts again at the beginning of the log. Traces of that time are already
in the log and are recognized by message id. If the previous process died before appending a trace,
this one appends it after catching up with the log, but only the newest trace of each job.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

import msgspec

from phaseloom.common.contract.errors import InternalError
from phaseloom.common.contract.events import JobFinished, PhaseTrace
from phaseloom.common.contract.streams import Bucket
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.decisionlog import LogEntry
from phaseloom.common.transport.retry import ATTEMPT_S, RetryingLog, until_done
from phaseloom.profiler.core.profile import Emission, Profiler
from phaseloom.profiler.observing import Metrics
from phaseloom.profiler.outbox import Outbox

log = logging.getLogger(__name__)

MSG_ID = "Nats-Msg-Id"

_READ_PAUSE_S = 0.1
"""Pause between two reads of the log. Nobody waits for the profiler, so it reads many entries at
once and wakes up less often."""


class Shell:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._log = RetryingLog(bus, "profiler")
        self._profiler = Profiler()
        self._metrics = Metrics(bus)
        self._traces = Outbox(self._append)
        self._views = Outbox(self._put_view)

    async def run(self) -> None:
        """Follow the log until cancelled."""
        self._metrics.register()
        history_end = await self._log.end()
        # Set only now, because the request above would wait for the pause as well.
        self._bus.client.read_pause_s = _READ_PAUSE_S
        async with asyncio.TaskGroup() as group:
            if history_end == 0:
                log.info("the decision log is empty")
                self._start_sending(group)
            async with aclosing(self._bus.log.read_entries()) as entries:
                is_new = history_end == 0
                async for entry in entries:
                    for event_entry in entry.split():
                        self._fold(event_entry, is_new=is_new)
                    if not is_new and entry.sequence >= history_end:
                        is_new = True
                        log.info("caught up with the decision log at %d", entry.sequence)
                        self._start_sending(group)
            raise InternalError("the decision log's subscription ended")

    def _start_sending(self, group: asyncio.TaskGroup) -> None:
        group.create_task(self._traces.run())
        group.create_task(self._views.run())

    def _fold(self, entry: LogEntry, *, is_new: bool) -> None:
        emission = self._profiler.step(entry.sequence, entry.time_s, entry.event)
        self._metrics.fold(entry, self._profiler.ready, is_new=is_new)
        match entry.event:
            case JobFinished(job=job):
                self._traces.drop(job)
                self._views.drop(job)
            case PhaseTrace(job=job):
                self._traces.drop(job, entry.headers.get(MSG_ID, ""))
        if emission is not None:
            self._traces.put(emission)
            self._views.put(emission)

    async def _append(self, emission: Emission) -> None:
        await self._log.append(emission.trace, msg_id=emission.msg_id)

    async def _put_view(self, emission: Emission) -> None:
        view = msgspec.json.encode(emission.trace)
        job = emission.trace.job
        await until_done(
            lambda: self._bus.keys.put(Bucket.PROFILES, str(job), view),
            "put the profile",
            attempt_s=ATTEMPT_S,
        )
