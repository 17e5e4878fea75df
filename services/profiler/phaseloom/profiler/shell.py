"""The profiler's shell: read the decision log, fold it, append traces, put the view for people.

After a restart the fold runs again from where the log begins. What it would have said then is in
the log already, found by message id; a trace that a predecessor's death kept out of the log is
said now, the newest of each job only.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

import msgspec

from phaseloom.common.bus import Bus, LogEntry
from phaseloom.common.errors import InternalError
from phaseloom.common.ids import JobKey
from phaseloom.common.messages import JobFinished
from phaseloom.common.patience import PatientLog, until_done
from phaseloom.common.streams import Bucket
from phaseloom.profiler.core.profile import Emission, Profiler
from phaseloom.profiler.observing import Metrics

log = logging.getLogger(__name__)

MSG_ID = "Nats-Msg-Id"


class Shell:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._log = PatientLog(bus, "profiler")
        self._profiler = Profiler()
        self._metrics = Metrics(bus)
        self._missed: dict[JobKey, Emission] = {}
        """While catching up: what the log does not have yet."""

    async def run(self) -> None:
        """Follow the log until cancelled."""
        self._metrics.register()
        history_end = await self._log.log_end()
        if history_end == 0:
            log.info("the decision log is empty")
        caught_up = history_end == 0
        async with aclosing(self._bus.read_log()) as entries:
            async for entry in entries:
                self._metrics.take(entry, is_new=caught_up)
                emission = self._profiler.step(entry.sequence, entry.time_s, entry.event)
                if caught_up:
                    await self._tell(emission)
                    continue
                self._remember(entry, emission)
                if entry.sequence >= history_end:
                    caught_up = True
                    await self._tell_missed(entry.sequence)
        raise InternalError("the decision log's subscription ended")

    async def _tell_missed(self, sequence: int) -> None:
        log.info("caught up with the decision log at %d", sequence)
        for emission in self._missed.values():
            await self._tell(emission)
        self._missed.clear()

    def _remember(self, entry: LogEntry, emission: Emission | None) -> None:
        if isinstance(entry.event, JobFinished):
            self._missed.pop(entry.event.job, None)
        if emission is not None:
            self._missed[emission.trace.job] = emission
            return
        stored = entry.headers.get(MSG_ID)
        self._missed = {j: m for j, m in self._missed.items() if m.msg_id != stored}

    async def _tell(self, emission: Emission | None) -> None:
        if emission is None:
            return
        trace = emission.trace
        await self._log.append(trace, msg_id=emission.msg_id)
        view = msgspec.json.encode(trace)
        await until_done(
            lambda: self._bus.kv_put(Bucket.PROFILES, str(trace.job), view), "put the profile"
        )
        # A publish that is answered in the moment of its cancellation swallows it.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
