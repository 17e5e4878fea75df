"""Computes the mesh's metrics from the decision log. Only the profiler does this.

Entries from before this process started are folded but not counted: the previous process counted
them. Counters are plain sums that a scrape reads, because several of them change with every
operation and updating an OpenTelemetry instrument takes ten times as long.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from phaseloom.common.contract.events import (
    ActivationOpened,
    ActivationRefused,
    Event,
    JobFinished,
    NodeLost,
    PhaseTrace,
    SealCommitted,
    SealFailed,
    WpgLost,
)
from phaseloom.common.contract.ids import JobKey, OperationKey
from phaseloom.common.observability import metrics
from phaseloom.common.observability.activity import Activity, Execution, Switch
from phaseloom.common.observability.metrics import Metric, Reading
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.decisionlog import LogEntry


class Totals:
    """Sums of all counters, read at a scrape."""

    def __init__(self) -> None:
        self._sums: defaultdict[Metric, defaultdict[tuple[str, ...], float]]
        self._sums = defaultdict(lambda: defaultdict(float))

    def add(self, metric: Metric, amount: float, *labels: str) -> None:
        """Add to a counter.

        Args: labels: values of the metric's labels, in the order of its declaration.
        """
        self._sums[metric][labels] += amount

    def register(self) -> None:
        for metric in metrics.TABLE:
            if metric.service == "profiler" and metric.kind is metrics.InstrumentKind.COUNTER:
                metrics.observe(metric, partial(self._read, metric))

    def _read(self, metric: Metric) -> list[Reading]:
        return [
            (total, dict(zip(metric.labels, labels, strict=True)))
            for labels, total in self._sums[metric].items()
        ]


class Metrics:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._activity = Activity()
        self._totals = Totals()
        self._periods: dict[JobKey, float] = {}
        self._sequence = 0
        self._log_end = 0

    def register(self) -> None:
        metrics.before_scrape(self._refresh)
        self._totals.register()
        metrics.observe(metrics.JOB_PERIOD, lambda: metrics.per_job(self._periods))
        metrics.observe(
            metrics.PROFILER_LAG, lambda: [(max(0, self._log_end - self._sequence), {})]
        )

    def fold(self, entry: LogEntry, ready: Sequence[OperationKey], *, is_new: bool) -> None:
        """Fold the next entry of the log.

        Args: ready: operations that the entry made ready.
              is_new: whether to count the entry. False if it is older than this process.
        """
        self._sequence = entry.sequence
        match entry.event:
            case PhaseTrace(job=job, period_s=period_s) if period_s:
                self._periods[job] = period_s
            case PhaseTrace(job=job) | JobFinished(job=job):
                self._periods.pop(job, None)
        observations = self._activity.step(entry.time_s, entry.event, ready)
        if not is_new:
            return
        for observation in observations:
            match observation:
                case Execution():
                    self._count_execution(observation)
                case Switch():
                    self._count_switch(observation)
        self._count_event(entry.event)

    async def _refresh(self) -> None:
        self._log_end = await self._bus.log.end()

    def _count_execution(self, ran: Execution) -> None:
        add = self._totals.add
        for (node, device), seconds in ran.busy_s.items():
            add(metrics.DEVICE_BUSY, seconds, node, str(device))
        if ran.is_replay:
            add(metrics.OPERATIONS_REPLAYED, 1, ran.kind)
            return
        labels = {"pool": ran.pool, "kind": ran.kind}
        metrics.measure(metrics.OPERATION_WAIT, ran.waited_s, **labels)
        metrics.measure(metrics.OPERATION_DURATION, ran.end_s - ran.start_s, **labels)
        add(metrics.OPERATION_TOKENS, ran.num_tokens, ran.pool, ran.kind)
        add(metrics.OPERATIONS_FINISHED, 1, ran.key.tenant, ran.kind, ran.outcome)

    def _count_switch(self, switch: Switch) -> None:
        node, add = switch.node, self._totals.add
        metrics.measure(metrics.SWITCH_DURATION, switch.offload_s, node=node, part="offload")
        metrics.measure(metrics.SWITCH_DURATION, switch.load_s, node=node, part="load")
        add(metrics.SWITCH_HIDDEN, switch.hidden_s, node)
        add(metrics.SWITCH_MOVED, switch.bytes_out, node, "out")
        add(metrics.SWITCH_MOVED, switch.bytes_in, node, "in")

    def _count_event(self, event: Event) -> None:
        add = self._totals.add
        match event:
            case ActivationOpened(node=node, is_speculative=True):
                add(metrics.SWITCHES_SPECULATIVE, 1, node)
            case ActivationRefused(node=node, error=error):
                add(metrics.ACTIVATIONS_REFUSED, 1, node, error.code)
            case WpgLost(node=node, error=error):
                add(metrics.WPG_LOSSES, 1, node, error.code)
            case NodeLost(node=node):
                add(metrics.NODE_LOSSES, 1, node)
            case SealCommitted(node=node):
                add(metrics.SEALS, 1, node, "committed")
            case SealFailed(node=node):
                add(metrics.SEALS, 1, node, "failed")
