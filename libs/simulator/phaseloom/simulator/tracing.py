"""Phase traces of simulated jobs, as a profiler would find them in the log.

The first trace comes after one whole iteration, the next ones when the figures have changed. They
are few, since the scheduler folds each. Periods are net of waiting and switches.
"""

from __future__ import annotations

from collections import deque
from statistics import median

import msgspec

from phaseloom.common.contract.events import KindEstimate, PhaseTrace
from phaseloom.simulator.jobs import SimJob, cycle_of, deployment_of, period_s

_RECENT = 16
"""The number of samples that a median is taken over."""
_MIN_CHANGE = 0.1
"""The relative change of a period that makes a new trace worth telling."""
_EVERY = 8
"""The number of iterations between two looks; the second and the fourth are looked at too."""


class Tracer:
    """The phase traces of one job."""

    def __init__(self, job: SimJob) -> None:
        self._job = job
        self._durations_s = [deque[float](maxlen=_RECENT) for _ in job.phases]
        self._gaps_s = [deque[float](maxlen=_RECENT) for _ in job.phases]
        self._left: dict[str, tuple[int, float]] = {}
        """The phase that ended last on each pool where none is open, and when it ended."""
        self._count = 0
        self._told: PhaseTrace | None = None

    def declared(self) -> PhaseTrace:
        """The trace of a job whose cycle is known at submission, from an earlier run."""
        usual_s = [phase.mean_s for phase in self._job.phases]
        self._told = self._trace(usual_s, period_s(self._job, usual_s), 0.0)
        return self._told

    def began(self, phase: int, now_s: float) -> None:
        """Note that a phase's operation is ready."""
        left = self._left.pop(self._job.phases[phase].pool, None)
        if left is not None:
            self._gaps_s[left[0]].append(now_s - left[1])

    def ended(self, phase: int, now_s: float) -> None:
        self._left[self._job.phases[phase].pool] = (phase, now_s)

    def completed(self, durations_s: list[float]) -> PhaseTrace | None:
        """Note that an iteration is over; a trace, where it says something new."""
        for known, duration_s in zip(self._durations_s, durations_s, strict=True):
            known.append(duration_s)
        self._count += 1
        if self._count not in (1, 2, 4) and self._count % _EVERY:
            return None
        usual_s = [median(known) for known in self._durations_s]
        period = period_s(self._job, usual_s)
        change = 0.0
        if self._told is not None and self._told.period_s:
            change = period / self._told.period_s - 1.0
            has_news = abs(change) >= _MIN_CHANGE or self._count in (2, 4)
            if not has_news:
                return None
        self._told = self._trace(usual_s, period, change if abs(change) >= _MIN_CHANGE else 0.0)
        return self._told

    def _trace(self, usual_s: list[float], period: float, drift: float) -> PhaseTrace:
        job = self._job
        phases = zip(job.phases, usual_s, strict=True)
        measured = tuple(
            msgspec.structs.replace(phase, mean_s=duration_s) for phase, duration_s in phases
        )
        estimates = [self._estimate(index, usual_s[index]) for index in range(len(job.phases))]
        return PhaseTrace(
            job=job.key,
            period_s=period,
            segments=cycle_of(msgspec.structs.replace(job, phases=measured)).segments,
            estimates=estimates,
            worst_period_s=period_s(job, [estimate.worst_s for estimate in estimates]),
            drift=drift,
            num_optim_steps=job.num_optim_steps,
        )

    def _estimate(self, index: int, usual_s: float) -> KindEstimate:
        phase, known = self._job.phases[index], sorted(self._durations_s[index]) or [usual_s]
        gaps_s = sorted(self._gaps_s[index]) or [_gap_alone_s(self._job, index)]
        return KindEstimate(
            deployment=deployment_of(phase.pool),
            kind=phase.operation_kind,
            duration_s=usual_s,
            next_gap_s=median(gaps_s),
            count=self._count,
            p95_s=quantile(known, 0.95),
            worst_s=max(phase.longest_s, known[-1]),
            gap_p10_s=quantile(gaps_s, 0.1),
            gap_p90_s=quantile(gaps_s, 0.9),
        )


def quantile(ordered: list[float], share: float) -> float:
    """The value below which a share of these lies. Args: ordered: at least one, in order."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def _gap_alone_s(job: SimJob, index: int) -> float:
    """The time from the end of a phase until its pool is needed again, where the job runs alone."""
    count, pool = len(job.phases), job.phases[index].pool
    gap_s = 0.0
    for step in range(1, count + 1):
        before, place = job.phases[(index + step - 1) % count], (index + step) % count
        gap_s += before.think_s + (job.sync_s if place == 0 else 0.0)
        if job.phases[place].pool == pool:
            break
        gap_s += job.phases[place].mean_s
    if job.steps_ahead:
        busy_s = sum(phase.mean_s for phase in job.phases if phase.pool == pool)
        return min(gap_s, max(0.0, job.mean_s - busy_s))
    return gap_s
