"""The mesh's metrics that the decision log tells: computed here, and nowhere else.

What is older than this process is folded and not counted: it was counted by the one before.
"""

from __future__ import annotations

from phaseloom.common import metrics
from phaseloom.common.activity import Activity, Execution, Switch
from phaseloom.common.bus import Bus, LogEntry
from phaseloom.common.ids import JobKey
from phaseloom.common.messages import (
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


class Metrics:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._activity = Activity()
        self._periods: dict[JobKey, float] = {}
        self._sequence = 0
        self._log_end = 0

    def register(self) -> None:
        metrics.before_scrape(self._refresh)
        metrics.observe(metrics.JOB_PERIOD, lambda: metrics.per_job(self._periods))
        metrics.observe(
            metrics.PROFILER_LAG, lambda: [(max(0, self._log_end - self._sequence), {})]
        )

    def take(self, entry: LogEntry, *, is_new: bool) -> None:
        """The next entry of the log, whatever it is."""
        self._sequence = entry.sequence
        self._note_period(entry.event)
        observations = self._activity.step(entry.time_s, entry.event)
        if not is_new:
            return
        for observation in observations:
            match observation:
                case Execution():
                    _executed(observation)
                case Switch():
                    _switched(observation)
        _happened(entry.event)

    async def _refresh(self) -> None:
        self._log_end = await self._bus.log_end()

    def _note_period(self, event: Event) -> None:
        match event:
            case PhaseTrace(job=job, period_s=period_s) if period_s:
                self._periods[job] = period_s
            case PhaseTrace(job=job) | JobFinished(job=job):
                self._periods.pop(job, None)


def _executed(ran: Execution) -> None:
    for (node, device), seconds in ran.busy_s.items():
        metrics.count(metrics.DEVICE_BUSY, seconds, node=node, device=str(device))
    if ran.is_replay:
        metrics.count(metrics.OPERATIONS_REPLAYED, kind=ran.kind)
        return
    labels = {"pool": ran.pool, "kind": ran.kind}
    metrics.measure(metrics.OPERATION_WAIT, ran.waited_s, **labels)
    metrics.measure(metrics.OPERATION_DURATION, ran.end_s - ran.start_s, **labels)
    metrics.count(metrics.OPERATION_TOKENS, ran.num_tokens, **labels)
    metrics.count(
        metrics.OPERATIONS_FINISHED, tenant=ran.key.tenant, kind=ran.kind, outcome=ran.outcome
    )


def _switched(switch: Switch) -> None:
    node = switch.node
    metrics.measure(metrics.SWITCH_DURATION, switch.offload_s, node=node, part="offload")
    metrics.measure(metrics.SWITCH_DURATION, switch.load_s, node=node, part="load")
    metrics.count(metrics.SWITCH_HIDDEN, switch.hidden_s, node=node)
    metrics.count(metrics.SWITCH_MOVED, switch.bytes_out, node=node, direction="out")
    metrics.count(metrics.SWITCH_MOVED, switch.bytes_in, node=node, direction="in")


def _happened(event: Event) -> None:
    match event:
        case ActivationOpened(node=node, early=True):
            metrics.count(metrics.SWITCHES_EARLY, node=node)
        case ActivationRefused(node=node, error=error):
            metrics.count(metrics.ACTIVATIONS_REFUSED, node=node, code=error.code)
        case WpgLost(node=node, error=error):
            metrics.count(metrics.WPG_LOSSES, node=node, code=error.code)
        case NodeLost(node=node):
            metrics.count(metrics.NODE_LOSSES, node=node)
        case SealCommitted(node=node):
            metrics.count(metrics.SEALS, node=node, result="committed")
        case SealFailed(node=node):
            metrics.count(metrics.SEALS, node=node, result="failed")
