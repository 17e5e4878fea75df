"""The console's shell: follows the log, the job views and the notices, and feeds the view.

Nobody waits for the console, so it reads many entries at once. A page may also ask why an operation
waits or what state a node stores. The shell forwards these questions to the services on behalf of
the caller's tenant.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

from phaseloom.common.contract import api
from phaseloom.common.contract.codec import JSON, decode
from phaseloom.common.contract.errors import CallerError, InternalError, PhaseloomError
from phaseloom.common.contract.events import PhaseTrace
from phaseloom.common.contract.ids import JobKey, OperationKey
from phaseloom.common.contract.state_agent import StatusReport
from phaseloom.common.contract.streams import Bucket
from phaseloom.common.observability.spans import describe_location, spans_of, waterfall
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.keys import KeyChange
from phaseloom.common.transport.leases import nodes_up
from phaseloom.common.transport.services import node_report
from phaseloom.console.core.decisions import of_notice
from phaseloom.console.core.view import View
from phaseloom.console.core.wire import TICK_S, Leg

log = logging.getLogger(__name__)

_READ_PAUSE_S = 0.1
_NUM_NOTICES = 50
"""Number of notices from before the console's start that it still shows."""
_SPAN_BYTES = 2**25
"""Number of bytes at the end of each span file that are searched for an operation."""
_REPORT_TIMEOUT_S = 2.0
_REPORTS_AGE_S = 1.0
"""Time for which node reports are cached for all pages."""


class Shell:
    """Args: spans: directory of the span files of this machine's services, or None."""

    def __init__(self, bus: Bus, view: View, spans: Path | None = None) -> None:
        self.bus = bus
        self.view = view
        self._spans = spans
        self._reports: dict[str, StatusReport | str] = {}
        self._reported_s = float("-inf")
        self._reporting = asyncio.Lock()

    async def run(self) -> None:
        """Follow the mesh until cancelled."""
        self.bus.client.read_pause_s = _READ_PAUSE_S
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_log())
            group.create_task(self._follow_notices())
            group.create_task(self._follow_reports())
            group.create_task(self._follow(Bucket.VIEW, self._status))
            group.create_task(self._follow(Bucket.PROFILES, self._cycle))

    async def _follow_log(self) -> None:
        async with aclosing(self.bus.log.read()) as entries:
            async for entry in entries:
                self.view.step(entry.time_s, entry.event)
        raise InternalError("the decision log's subscription ended")

    async def _follow_notices(self) -> None:
        async with aclosing(self.bus.read_notices(_NUM_NOTICES)) as notices:
            async for notice in notices:
                self.view.decided(of_notice(time.time(), notice))

    async def _follow_reports(self) -> None:
        async with aclosing(self.bus.read_reports()) as reports:
            async for job, _, report in reports:
                self.view.reported(job, report)

    async def _follow(self, bucket: Bucket, handle: Callable[[JobKey, KeyChange], None]) -> None:
        changes: AsyncIterator[KeyChange] = self.bus.keys.watch(bucket)
        async for change in changes:
            tenant, _, job = change.key.partition(".")
            try:
                handle(JobKey(tenant, job), change)
            except CallerError as error:
                log.warning(
                    "ignored %s of %s, which has another version: %s", bucket, change.key, error
                )

    def _status(self, job: JobKey, change: KeyChange) -> None:
        content = None if change.stored is None else decode(change.stored.payload, api.JobStatus)
        self.view.status(time.time(), job, content)

    def _cycle(self, job: JobKey, change: KeyChange) -> None:
        content = None if change.stored is None else decode(change.stored.payload, PhaseTrace, JSON)
        self.view.cycle(job, content)

    async def reports(self) -> dict[str, StatusReport | str]:
        """Return the report of each node that is up, or an error text if it does not answer."""
        async with self._reporting:
            if time.monotonic() - self._reported_s > _REPORTS_AGE_S:
                nodes = await nodes_up(self.bus)
                answers = await asyncio.gather(*(self._report(node) for node in nodes))
                self._reports = dict(zip(nodes, answers, strict=True))
                self._reported_s = time.monotonic()
            return self._reports

    async def legs(self, operation: OperationKey) -> list[Leg]:
        """Return the waterfall of an operation from its spans; empty if none are available."""
        if self._spans is None:
            return []
        spans = await asyncio.to_thread(spans_of, str(operation), self._spans, _SPAN_BYTES)
        legs = []
        for row in waterfall(spans, str(operation)):
            span = row.span
            begin, end = (
                round((ns / 1e9 - self.view.origin_s) / TICK_S)
                for ns in (span.start_unix_ns, span.end_unix_ns)
            )
            where, error = describe_location(span), span.error or ""
            legs.append(Leg(span.name, where, begin, end, row.depth, error))
        return legs

    async def _report(self, node: str) -> StatusReport | str:
        try:
            return await node_report(self.bus.client, node, timeout_s=_REPORT_TIMEOUT_S)
        except PhaseloomError as error:
            return str(error)
