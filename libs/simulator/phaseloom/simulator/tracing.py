"""Phase traces of simulated jobs, as the profiler would publish them.

The first trace follows the first iteration; later ones follow changes of the figures. Traces are
few, because the scheduler folds each of them. Periods exclude waits and switches.
"""

from __future__ import annotations

from collections import deque
from statistics import median

import msgspec

from phaseloom.common.contract.events import KindEstimate, PhaseTrace
from phaseloom.simulator.jobs import SimJob, cycle_of, deployment_of, period_s

_RECENT = 16
"""Samples in a median."""
_MIN_CHANGE = 0.1
"""Relative change of the period that triggers a new trace."""
_EVERY = 8
"""Iterations between two checks for changes. The second and the fourth are checked, too."""


class Tracer:
    """The phase traces of one job."""

    def __init__(self, job: SimJob) -> None:
        self._job = job
        self._durations_s = [deque[float](maxlen=_RECENT) for _ in job.phases]
        self._gaps_s = [deque[float](maxlen=_RECENT) for _ in job.phases]
        self._last_ended: dict[str, tuple[int, float]] = {}
        """Pool without a running phase → its newest phase and when that ended."""
        self._count = 0
        self._published: PhaseTrace | None = None

    def declared(self) -> PhaseTrace:
        """Return the trace of a job that declares its cycle at submission."""
        median_s = [phase.mean_s for phase in self._job.phases]
        self._published = self._trace(median_s, period_s(self._job, median_s), 0.0)
        return self._published

    def on_ready(self, phase: int, now_s: float) -> None:
        """Record that a phase's operation is ready."""
        last = self._last_ended.pop(self._job.phases[phase].pool, None)
        if last is not None:
            self._gaps_s[last[0]].append(now_s - last[1])

    def on_ended(self, phase: int, now_s: float) -> None:
        self._last_ended[self._job.phases[phase].pool] = (phase, now_s)

    def on_iteration(self, durations_s: list[float]) -> PhaseTrace | None:
        """Record the end of an iteration, and return a trace if the figures have changed."""
        for samples, duration_s in zip(self._durations_s, durations_s, strict=True):
            samples.append(duration_s)
        self._count += 1
        if self._count not in (1, 2, 4) and self._count % _EVERY:
            return None
        median_s = [median(samples) for samples in self._durations_s]
        period = period_s(self._job, median_s)
        change = 0.0
        if self._published is not None and self._published.period_s:
            change = period / self._published.period_s - 1.0
            has_news = abs(change) >= _MIN_CHANGE or self._count in (2, 4)
            if not has_news:
                return None
        self._published = self._trace(
            median_s, period, change if abs(change) >= _MIN_CHANGE else 0.0
        )
        return self._published

    def _trace(self, median_s: list[float], period: float, drift: float) -> PhaseTrace:
        job = self._job
        phases = zip(job.phases, median_s, strict=True)
        measured = tuple(
            msgspec.structs.replace(phase, mean_s=duration_s) for phase, duration_s in phases
        )
        estimates = [self._estimate(index, median_s[index]) for index in range(len(job.phases))]
        return PhaseTrace(
            job=job.key,
            period_s=period,
            segments=cycle_of(msgspec.structs.replace(job, phases=measured)).segments,
            estimates=estimates,
            worst_period_s=period_s(job, [estimate.worst_s for estimate in estimates]),
            drift=drift,
            num_optim_steps=job.num_optim_steps,
        )

    def _estimate(self, index: int, median_s: float) -> KindEstimate:
        phase, samples = self._job.phases[index], sorted(self._durations_s[index]) or [median_s]
        gaps_s = sorted(self._gaps_s[index]) or [_gap_alone_s(self._job, index)]
        return KindEstimate(
            deployment=deployment_of(phase.pool),
            kind=phase.operation_kind,
            duration_s=median_s,
            next_gap_s=median(gaps_s),
            count=self._count,
            p95_s=quantile(samples, 0.95),
            worst_s=max(phase.longest_s, samples[-1]),
            gap_p10_s=quantile(gaps_s, 0.1),
            gap_p90_s=quantile(gaps_s, 0.9),
        )


def quantile(ordered: list[float], share: float) -> float:
    """Return a quantile. Args: ordered: at least one value, in ascending order."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def _gap_alone_s(job: SimJob, index: int) -> float:
    """Time from the end of a phase until a job that runs alone needs its pool again."""
    count, pool = len(job.phases), job.phases[index].pool
    gap_s = 0.0
    for step in range(1, count + 1):
        before, position = job.phases[(index + step - 1) % count], (index + step) % count
        gap_s += before.think_s + (job.sync_s if position == 0 else 0.0)
        if job.phases[position].pool == pool:
            break
        gap_s += job.phases[position].mean_s
    if job.steps_ahead:
        busy_s = sum(phase.mean_s for phase in job.phases if phase.pool == pool)
        return min(gap_s, max(0.0, job.mean_s - busy_s))
    return gap_s
