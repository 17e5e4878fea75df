"""Metrics of the scheduler, read from outside the core at each step and each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from phaseloom.common.contract import streams
from phaseloom.common.contract.commands import Permit
from phaseloom.common.observability import metrics
from phaseloom.common.observability.metrics import Reading
from phaseloom.common.transport.bus import Bus
from phaseloom.scheduler.core.core import Core
from phaseloom.scheduler.core.state.outputs import Output, SendCommand
from phaseloom.scheduler.core.state.transitions import JOB_ENDED


def stepped(outputs: Iterable[Output], duration_s: float) -> None:
    """Record one step of the core: its duration, and the permits among its outputs."""
    metrics.measure(metrics.STEP_DURATION, duration_s)
    for output in outputs:
        if isinstance(output, SendCommand) and isinstance(output.command, Permit):
            metrics.count(metrics.PERMITS, kind=output.command.kind)


class Gauges:
    """Gauges of the process. They only have readings while it leads."""

    def __init__(self) -> None:
        self._term: _Term | None = None

    def register(self) -> None:
        """Register the gauges. Called once per process, although a process may become the leader
        several times."""
        metrics.before_scrape(self._refresh)
        metrics.observe(metrics.QUEUE_DEPTH, lambda: self._read(_Term.depths))
        metrics.observe(metrics.SCHEDULER_LAG, lambda: self._read(_Term.lag))
        metrics.observe(metrics.LOG_SIZE, lambda: self._read(_Term.log_size))
        metrics.observe(metrics.OPERATIONS_SIZE, lambda: self._read(_Term.sizes))

    @contextmanager
    def of(self, core: Core, bus: Bus) -> Iterator[None]:
        """Context manager around the time in which this process leads."""
        self._term = _Term(core, bus)
        try:
            yield
        finally:
            self._term = None

    async def _refresh(self) -> None:
        if self._term is not None:
            await self._term.refresh()

    def _read(self, reading: Callable[[_Term], list[Reading]]) -> list[Reading]:
        return [] if self._term is None else reading(self._term)


class _Term:
    """Readings of one term as leader: queue depths from its core, lag and sizes from the server."""

    def __init__(self, core: Core, bus: Bus) -> None:
        self._core = core
        self._bus = bus
        self._log_end = 0
        self._log_bytes = 0
        self._operations_bytes: dict[str, int] = {}

    async def refresh(self) -> None:
        log = (await self._bus.js.stream_info(streams.SCHED)).state
        self._log_end, self._log_bytes = log.last_seq, log.bytes
        for tenant in {job.key.tenant for job in self._core.state.jobs.values()}:
            stream = await self._bus.js.stream_info(streams.ops_stream(tenant))
            self._operations_bytes[tenant] = stream.state.bytes

    def depths(self) -> list[Reading]:
        state = self._core.state
        depths = {j.key: 0.0 for j in state.jobs.values() if j.state not in JOB_ENDED}
        for deployment in state.deployments.values():
            if deployment.key.job_key in depths:
                num_open = len(deployment.queue.operations) + len(deployment.queue.unordered)
                depths[deployment.key.job_key] += num_open
        return metrics.per_job(depths)

    def lag(self) -> list[Reading]:
        # The core has advanced since the server was queried.
        return [(max(0, self._log_end - self._core.state.sequence), {})]

    def log_size(self) -> list[Reading]:
        return [(self._log_bytes, {})]

    def sizes(self) -> list[Reading]:
        return [(size, {"tenant": tenant}) for tenant, size in self._operations_bytes.items()]
