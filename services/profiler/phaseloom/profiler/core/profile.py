"""The profiler's core: a fold over the decision log into phase traces.

`Profiler.step` is the one door. It keeps, per job, the durations of each (deployment, kind), the
gaps until the job's next operation on the same pool became ready, and the newest operations; at a
bounded rate it answers with a `PhaseTrace` when that says something new. All times come from the
log: an operation ended when its `OperationFinished` was appended and began `duration_s` earlier,
so clocks of other hosts do not enter. The same log gives the same traces with the same ids.

A job's cycle is measured on its own clock, which stands still while the job has work that is ready
and none that runs: waiting for other jobs, switches and permits belong to the mesh, not the job.
Cost: O(open operations) an event, O(window log window) a trace.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median

from phaseloom.common.ids import DeploymentKey, JobKey, NodeId, OperationKey
from phaseloom.common.intervals import Interval, merge, subtract
from phaseloom.common.messages import (
    ActivationOpened,
    Event,
    JobFinished,
    JobSubmitted,
    KindEstimate,
    NodeUp,
    OperationFinished,
    Outcome,
    PhaseTrace,
    QueuedOperation,
    WpgStarted,
)
from phaseloom.common.readiness import Readiness
from phaseloom.profiler.core.cycle import Span, find_cycle

RECENT = 32
"""Samples that a median is taken over."""
WINDOW = 1024
"""Newest operations of a job in which its cycle is looked for."""
MIN_INTERVAL_S = 2.0
"""Between two traces of a job, on the log's clock."""
MIN_CHANGE = 0.1
"""Relative change of any figure that makes a trace worth telling …"""
MIN_CHANGE_S = 1e-3
"""… if it is at least this much."""
UNKNOWN_GAP_S = -1.0


@dataclass(frozen=True, slots=True)
class Emission:
    """A trace to append. `msg_id` names its cause: emitted again, the bus stores it once."""

    msg_id: str
    trace: PhaseTrace


@dataclass(slots=True)
class _Kind:
    durations_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    count: int = 0

    def estimate(self, deployment: str, kind: str) -> KindEstimate:
        gap_s = median(self.gaps_s) if self.gaps_s else UNKNOWN_GAP_S
        return KindEstimate(deployment, kind, median(self.durations_s), gap_s, self.count)


@dataclass(frozen=True, slots=True)
class _Ran:
    """An executed operation, with the time at which it was ready."""

    deployment: str
    kind: str
    ready_s: float
    start_s: float
    end_s: float


@dataclass(slots=True)
class _Job:
    kinds: dict[tuple[str, str], _Kind] = field(default_factory=dict)
    ran: deque[_Ran] = field(default_factory=lambda: deque(maxlen=WINDOW))
    ready_s: dict[OperationKey, float] = field(default_factory=dict)
    """Ready and not finished."""
    idle_since: dict[str, tuple[_Kind, float]] = field(default_factory=dict)
    """Pool → the kind that ran there last and its end, while nothing of the job is ready there."""
    told: PhaseTrace | None = None
    told_s: float = float("-inf")


class Profiler:
    def __init__(self) -> None:
        self._jobs: dict[JobKey, _Job] = {}
        self._pools: dict[DeploymentKey, str] = {}
        self._node_pools: dict[NodeId, str] = {}
        self._readiness = Readiness()
        self._finished: set[JobKey] = set()
        """Their last operations may come after their end; they are nobody's any more."""

    def step(self, sequence: int, time_s: float, event: Event) -> Emission | None:
        """Fold one entry of the decision log, in its order."""
        match event:
            case QueuedOperation(key=key) | OperationFinished(key=key):
                if key.job_key in self._finished:
                    return None
        ready = self._readiness.step(event)
        emission = None
        match event:
            case JobSubmitted(job=job):
                self._finished.discard(job)
                for spec in event.spec.deployments:
                    self._pools[DeploymentKey(job.tenant, job.job, spec.name)] = spec.pool
            case NodeUp():
                self._node_pools[event.node] = event.pool
            case WpgStarted() | ActivationOpened():
                self._locate(event.deployment, event.node)
            case OperationFinished() if not event.replay:
                emission = self._finish(sequence, time_s, event, ready)
            case JobFinished(job=job):
                self._forget(job)
        for key in ready:
            self._became_ready(key, time_s)
        return emission

    def _locate(self, deployment: DeploymentKey, node: NodeId) -> None:
        """Pools of jobs whose submission is older than the log."""
        if node in self._node_pools:
            self._pools.setdefault(deployment, self._node_pools[node])

    def _job(self, key: JobKey) -> _Job:
        return self._jobs.setdefault(key, _Job())

    def _became_ready(self, key: OperationKey, time_s: float) -> None:
        job = self._job(key.job_key)
        job.ready_s[key] = time_s
        waited = job.idle_since.pop(self._pools.get(key.deployment_key, ""), None)
        if waited:
            kind, since_s = waited
            kind.gaps_s.append(max(0.0, time_s - since_s))

    def _finish(
        self, sequence: int, time_s: float, event: OperationFinished, ready: Iterable[OperationKey]
    ) -> Emission | None:
        key, job = event.key, self._job(event.key.job_key)
        ready_s = job.ready_s.pop(key, time_s - event.duration_s)
        if event.outcome is not Outcome.COMPLETED:
            return None
        kind = job.kinds.setdefault((key.deployment, event.kind), _Kind())
        kind.count += 1
        kind.durations_s.append(event.duration_s)
        start_s = time_s - event.duration_s
        job.ran.append(_Ran(key.deployment, event.kind, ready_s, start_s, time_s))
        self._note_pool_left(job, kind, key, time_s, ready)
        return self._tell(sequence, time_s, key.job_key, job)

    def _note_pool_left(
        self,
        job: _Job,
        kind: _Kind,
        key: OperationKey,
        time_s: float,
        ready: Iterable[OperationKey],
    ) -> None:
        pool = self._pools.get(key.deployment_key)
        if pool is None:
            return
        coming = [*job.ready_s, *ready]
        if any(self._pools.get(other.deployment_key) == pool for other in coming):
            kind.gaps_s.append(0.0)
            job.idle_since.pop(pool, None)
        else:
            job.idle_since[pool] = (kind, time_s)

    def _tell(self, sequence: int, time_s: float, key: JobKey, job: _Job) -> Emission | None:
        if time_s - job.told_s < MIN_INTERVAL_S:
            return None
        job.told_s = time_s
        trace = self._trace(key, job)
        if job.told is not None and not is_news(job.told, trace):
            return None
        job.told = trace
        return Emission(f"profiler:{sequence}", trace)

    def _trace(self, key: JobKey, job: _Job) -> PhaseTrace:
        estimates = [job.kinds[name].estimate(*name) for name in sorted(job.kinds)]
        cycle = find_cycle(self._spans(key, job))
        if cycle is None:
            return PhaseTrace(key, 0.0, [], estimates)
        return PhaseTrace(key, cycle.period_s, cycle.segments, estimates)

    def _spans(self, key: JobKey, job: _Job) -> list[Span]:
        own_s = OwnClock(job.ran)
        pools = self._pools
        return [
            Span(pool, ran.deployment, ran.kind, own_s(ran.start_s), own_s(ran.end_s))
            for ran in job.ran
            if (pool := pools.get(DeploymentKey(key.tenant, key.job, ran.deployment)))
        ]

    def _forget(self, key: JobKey) -> None:
        self._finished.add(key)
        self._jobs.pop(key, None)
        for deployment in [d for d in self._pools if d.job_key == key]:
            del self._pools[deployment]


class OwnClock:
    """A job's own time: the log's time less the stalls before it."""

    def __init__(self, ran: Iterable[_Ran]) -> None:
        ran = list(ran)
        waits = merge((r.ready_s, r.start_s) for r in ran)
        self._stalls: list[Interval] = subtract(waits, merge((r.start_s, r.end_s) for r in ran))
        self._starts = [start for start, _ in self._stalls]
        self._before = list(accumulate((e - s for s, e in self._stalls), initial=0.0))

    def __call__(self, time_s: float) -> float:
        i = bisect_right(self._starts, time_s)
        inside_s = max(0.0, self._stalls[i - 1][1] - time_s) if i else 0.0
        return time_s - (self._before[i] - inside_s)


def is_news(told: PhaseTrace, trace: PhaseTrace) -> bool:
    """True when a figure moved by more than `MIN_CHANGE`, or something came or went."""
    before, after = _figures(told), _figures(trace)
    return before.keys() != after.keys() or any(
        abs(after[name] - value) > max(MIN_CHANGE * abs(value), MIN_CHANGE_S)
        for name, value in before.items()
    )


def _figures(trace: PhaseTrace) -> dict[tuple[str, ...], float]:
    figures: dict[tuple[str, ...], float] = {("period",): trace.period_s}
    for i, segment in enumerate(trace.segments):
        figures["segment", str(i), segment.pool] = segment.duration_s
    for estimate in trace.estimates:
        name = (estimate.deployment, estimate.kind)
        figures["duration", *name] = estimate.duration_s
        figures["gap", *name] = estimate.next_gap_s
    return figures
