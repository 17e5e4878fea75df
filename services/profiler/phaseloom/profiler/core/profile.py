"""The profiler's core: a fold over the decision log into phase traces.

`Profiler.step` is the only entry point. For each job it keeps the durations of each (deployment,
kind), the gaps until the job's next operation on the same pool became ready, and the newest
operations. It reviews jobs at a bounded rate and returns a `PhaseTrace` if a review finds
something new. A review happens with the entry that ends an operation of the job or, if the rate
limit forbids it then, with a later entry of any job.

All times come from the log: an operation ended when its `OperationFinished` was appended and
started `duration_s` earlier, so clocks of other hosts do not matter. The same log gives the same
traces with the same ids.

A job's cycle is measured on its own clock, which stops while the job has ready work and none of it
runs: waits for other jobs, switches and permits belong to the mesh, not to the job. Cost: that of
`Readiness` per event, O(window log window) per review.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from math import ceil
from statistics import median

from phaseloom.common.contract.events import (
    ActivationOpened,
    DeploymentCreated,
    Event,
    JobFinished,
    JobSubmitted,
    KindEstimate,
    NodeUp,
    OperationFinished,
    PhaseTrace,
    QueuedOperation,
    StepRun,
    WpgStarted,
)
from phaseloom.common.contract.ids import DeploymentKey, JobKey, NodeId, OperationKey
from phaseloom.common.contract.operations import Outcome
from phaseloom.common.observability.intervals import Interval, merge, subtract
from phaseloom.common.observability.readiness import Readiness
from phaseloom.common.observability.substages import FINE_EDGES, split_runs
from phaseloom.profiler.core.agenda import Agenda
from phaseloom.profiler.core.cycle import MAX_CYCLES, Cycle, Span, find_cycle
from phaseloom.profiler.core.history import WINDOW, History, Ran

RECENT = 32
"""Number of samples of a median."""
RECENT_STEPS = 8
"""Number of operations of a kind whose sub-stages are compared."""
NEAR_WINDOW = 128
"""Number of newest operations to search first. Older ones are searched only if no cycle shows."""
MIN_INTERVAL_S = 2.0
"""Minimum time between two reviews of a job, on the log's clock."""
MIN_CHANGE = 0.1
"""A trace is published if a figure changed by more than this share and `MIN_CHANGE_S`."""
MIN_CHANGE_S = 1e-3
"""Smallest change of a figure, in seconds, that can cause a new trace."""
UNKNOWN_GAP_S = -1.0


@dataclass(frozen=True, slots=True)
class Emission:
    """A trace to append. `msg_id` names its cause, so the bus stores a repeated trace only once."""

    msg_id: str
    trace: PhaseTrace


def usual_sub_stages(operations: Iterable[Sequence[StepRun]]) -> list[StepRun]:
    """Return the usual sub-stages of each replica: the most common sequence, with median values.

    Args: operations: the step runs of recent operations.
    """
    by_replica: dict[int, list[list[StepRun]]] = {}
    for steps in operations:
        for replica, runs in groupby(steps, key=lambda run: run.replica):
            by_replica.setdefault(replica, []).append(split_runs(list(runs)))
    usual = []
    for replica, cuts in sorted(by_replica.items()):
        shape = Counter(map(_shape, cuts)).most_common(1)[0][0]
        similar = [stages for stages in cuts if _shape(stages) == shape]
        usual += [
            StepRun(
                round(median(stage.steps for stage in stages)),
                round(median(stage.tokens for stage in stages)),
                median(stage.duration_s for stage in stages),
                replica,
            )
            for stages in zip(*similar, strict=True)
        ]
    return usual


def _shape(stages: Sequence[StepRun]) -> tuple[int, ...]:
    return tuple(bisect_right(FINE_EDGES, stage.tokens / stage.steps) for stage in stages)


@dataclass(slots=True)
class _Kind:
    durations_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    worst_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Estimated duration of each operation if it had used its maximum number of tokens."""
    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    steps: deque[list[StepRun]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    """Step runs of the newest operations that reported any."""
    count: int = 0

    def ran(self, duration_s: float, num_tokens: int, limit: int, steps: list[StepRun]) -> None:
        self.count += 1
        if steps:
            self.steps.append(steps)
        self.durations_s.append(duration_s)
        # Work grows with tokens. Ignoring the fixed cost makes this an upper estimate.
        share = max(1.0, limit / num_tokens) if num_tokens > 0 else 1.0
        self.worst_s.append(duration_s * share)

    def estimate(self, deployment: str, kind: str) -> KindEstimate:
        return KindEstimate(
            deployment,
            kind,
            duration_s=median(self.durations_s),
            next_gap_s=median(self.gaps_s) if self.gaps_s else UNKNOWN_GAP_S,
            count=self.count,
            p95_s=quantile(self.durations_s, 0.95),
            worst_s=max(self.worst_s),
            gap_p10_s=quantile(self.gaps_s, 0.1) if self.gaps_s else UNKNOWN_GAP_S,
            gap_p90_s=quantile(self.gaps_s, 0.9) if self.gaps_s else UNKNOWN_GAP_S,
            sub_stages=tuple(usual_sub_stages(self.steps)),
        )


@dataclass(slots=True)
class _Job:
    kinds: dict[tuple[str, str], _Kind] = field(default_factory=dict)
    ran: History = field(default_factory=History)
    ready_s: dict[OperationKey, float] = field(default_factory=dict)
    """When each ready, unfinished operation became ready."""
    num_ready: Counter[str] = field(default_factory=Counter)
    """Number of ready operations by deployment, without zeros."""
    limits: dict[OperationKey, int] = field(default_factory=dict)
    """Maximum tokens of each open operation."""
    idle_since: dict[str, tuple[_Kind, float]] = field(default_factory=dict)
    """For each pool on which no operation of the job is ready: the kind that ran there last, and
    when it ended."""
    last_trace: PhaseTrace | None = None
    reviewed_s: float = float("-inf")


class Profiler:
    def __init__(self) -> None:
        self.ready: list[OperationKey] = []
        """Operations that the newest entry made ready."""
        self._jobs: dict[JobKey, _Job] = {}
        self._agenda = Agenda()
        self._pools: dict[DeploymentKey, str] = {}
        self._node_pools: dict[NodeId, str] = {}
        self._readiness = Readiness()
        self._finished: set[JobKey] = set()
        """Jobs that have ended. Their operations that finish later are ignored."""

    def step(self, sequence: int, time_s: float, event: Event) -> Emission | None:
        """Fold the next entry of the decision log."""
        match event:
            case QueuedOperation(key=key) | OperationFinished(key=key) if (
                key.job_key in self._finished
            ):
                self.ready = []
            case _:
                self.ready = self._readiness.step(event)
                self._fold(sequence, time_s, event)
        return self._review(sequence, time_s)

    def _fold(self, sequence: int, time_s: float, event: Event) -> None:
        match event:
            case QueuedOperation() if event.error is None and event.size:
                self._job(event.key.job_key).limits[event.key] = event.size
            case OperationFinished() if not event.replay:
                self._finish(sequence, time_s, event)
            case WpgStarted() | ActivationOpened():
                if event.node in self._node_pools:
                    self._pools.setdefault(event.deployment, self._node_pools[event.node])
            case NodeUp():
                self._node_pools[event.node] = event.pool
            case JobSubmitted(job=job):
                self._finished.discard(job)
                for spec in event.spec.deployments:
                    self._pools[DeploymentKey(job.tenant, job.job, spec.name)] = spec.pool
            case DeploymentCreated(job=job, spec=spec):
                self._pools[DeploymentKey(job.tenant, job.job, spec.name)] = spec.pool
            case JobFinished(job=job):
                self._finished.add(job)
                self._jobs.pop(job, None)
                self._agenda.discard(job)
                for deployment in [d for d in self._pools if d.job_key == job]:
                    del self._pools[deployment]
        for key in self.ready:
            self._became_ready(key, time_s)

    def _job(self, key: JobKey) -> _Job:
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = _Job()
        return job

    def _became_ready(self, key: OperationKey, time_s: float) -> None:
        job = self._job(key.job_key)
        if key not in job.ready_s:
            job.num_ready[key.deployment] += 1
        job.ready_s[key] = time_s
        idle = job.idle_since.pop(self._pools.get(key.deployment_key, ""), None)
        if idle:
            kind, since_s = idle
            kind.gaps_s.append(max(0.0, time_s - since_s))

    def _finish(self, sequence: int, time_s: float, event: OperationFinished) -> None:
        key, job_key = event.key, event.key.job_key
        job = self._job(job_key)
        start_s = time_s - event.duration_s
        ready_s = job.ready_s.pop(key, None)
        if ready_s is None:
            ready_s = start_s
        else:
            job.num_ready[key.deployment] -= 1
            if not job.num_ready[key.deployment]:
                del job.num_ready[key.deployment]
        limit = job.limits.pop(key, 0)
        if event.outcome is not Outcome.COMPLETED:
            return
        name = (key.deployment, event.kind)
        kind = job.kinds.setdefault(name, _Kind())
        kind.ran(event.duration_s, event.num_tokens, limit, event.steps)
        job.ran.append(name, ready_s, start_s, time_s)
        self._update_pool_gap(job, kind, key, time_s)
        if job_key not in self._agenda:
            self._agenda.add(job_key, max(time_s, job.reviewed_s + MIN_INTERVAL_S), sequence)

    def _update_pool_gap(self, job: _Job, kind: _Kind, key: OperationKey, time_s: float) -> None:
        pool = self._pools.get(key.deployment_key)
        if pool is None:
            return
        next_deployments = {*job.num_ready, *(operation.deployment for operation in self.ready)}
        if any(self._pool(key, deployment) == pool for deployment in next_deployments):
            kind.gaps_s.append(0.0)
            job.idle_since.pop(pool, None)
        else:
            job.idle_since[pool] = (kind, time_s)

    def _pool(self, job: JobKey | OperationKey, deployment: str) -> str | None:
        return self._pools.get(DeploymentKey(job.tenant, job.job, deployment))

    def _review(self, sequence: int, time_s: float) -> Emission | None:
        key = self._agenda.next(time_s)
        if key is None:
            return None
        job = self._jobs[key]
        job.reviewed_s = time_s
        trace = self._trace(key, job)
        if job.last_trace is not None and not is_news(job.last_trace, trace):
            return None
        job.last_trace = trace
        # The job is part of the id, because one entry may bring news of several jobs.
        return Emission(f"profiler:{key}:{sequence}", trace)

    def _trace(self, key: JobKey, job: _Job) -> PhaseTrace:
        estimates = [job.kinds[name].estimate(*name) for name in sorted(job.kinds)]
        cycle = self._cycle(key, job)
        if cycle is None:
            return PhaseTrace(key, 0.0, [], estimates)
        steps = (num for (_, _, kind), num in cycle.num_operations.items() if kind == "optim_step")
        return PhaseTrace(
            key,
            cycle.period_s,
            cycle.segments,
            estimates,
            worst_period_s=cycle.period_s + _excess_s(cycle, estimates),
            drift=_drift(job.last_trace, cycle.period_s),
            # A loop without training counts each turn as one iteration.
            num_optim_steps=max(1, round(sum(steps))),
        )

    def _cycle(self, key: JobKey, job: _Job) -> Cycle | None:
        recent_cycle = find_cycle(self._spans(key, job.ran.newest(NEAR_WINDOW)))
        is_whole_history = len(job.ran) <= NEAR_WINDOW
        if is_whole_history or (recent_cycle is not None and recent_cycle.num_turns >= MAX_CYCLES):
            return recent_cycle
        return find_cycle(self._spans(key, job.ran.newest(WINDOW)))

    def _spans(self, key: JobKey, ran: list[Ran]) -> list[Span]:
        job_clock = OwnClock(ran)
        names = {r.deployment for r in ran}
        pools = {name: pool for name in names if (pool := self._pool(key, name))}
        return [
            Span(
                pools[r.deployment], r.deployment, r.kind, job_clock(r.start_s), job_clock(r.end_s)
            )
            for r in ran
            if r.deployment in pools
        ]


def quantile(samples: Iterable[float], share: float) -> float:
    """Return the nearest-rank quantile: the smallest sample that `share` of all do not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


class OwnClock:
    """Converts log time to a job's own clock: log time minus all previous stalls of the job."""

    def __init__(self, ran: Sequence[Ran]) -> None:
        waits = merge((r.ready_s, r.start_s) for r in ran)
        self._stalls: list[Interval] = subtract(waits, merge((r.start_s, r.end_s) for r in ran))
        self._starts = [start for start, _ in self._stalls]
        self._previous_stalls_s = list(accumulate((e - s for s, e in self._stalls), initial=0.0))

    def __call__(self, time_s: float) -> float:
        i = bisect_right(self._starts, time_s)
        inside_s = max(0.0, self._stalls[i - 1][1] - time_s) if i else 0.0
        return time_s - (self._previous_stalls_s[i] - inside_s)


def _excess_s(cycle: Cycle, estimates: Iterable[KindEstimate]) -> float:
    """Return how many seconds longer a turn gets if all its operations take their worst time.

    The pools' times are added as if they did not overlap, so this is an upper bound.
    """
    counts: Counter[tuple[str, str]] = Counter()
    for (_, deployment, kind), num in cycle.num_operations.items():
        counts[deployment, kind] += num  # type: ignore[assignment]
    return sum(counts[e.deployment, e.kind] * (e.worst_s - e.duration_s) for e in estimates)


def _drift(last_trace: PhaseTrace | None, period_s: float) -> float:
    """Return the relative change since the last reported period, or 0 if it is too small to
    report."""
    previous_s = last_trace.period_s if last_trace else 0.0
    if previous_s <= 0 or abs(period_s - previous_s) <= max(MIN_CHANGE * previous_s, MIN_CHANGE_S):
        return 0.0
    return period_s / previous_s - 1.0


def is_news(last_trace: PhaseTrace, trace: PhaseTrace) -> bool:
    """Return whether a figure changed by more than `MIN_CHANGE`, appeared or disappeared."""
    before, after = _figures(last_trace), _figures(trace)
    return before.keys() != after.keys() or any(
        abs(after[name] - value) > max(MIN_CHANGE * abs(value), MIN_CHANGE_S)
        for name, value in before.items()
    )


def _figures(trace: PhaseTrace) -> dict[tuple[str, ...], float]:
    figures: dict[tuple[str, ...], float] = {("period",): trace.period_s}
    figures["optim_steps",] = trace.num_optim_steps
    for i, segment in enumerate(trace.segments):
        figures["segment", str(i), segment.pool] = segment.duration_s
    for estimate in trace.estimates:
        name = (estimate.deployment, estimate.kind)
        figures["duration", *name] = estimate.duration_s
        figures["gap", *name] = estimate.next_gap_s
        figures["worst", *name] = estimate.worst_s
        # Only the existence of sub-stages matters: their times change with the durations.
        for i, stage in enumerate(estimate.sub_stages):
            figures["sub-stage", *name, str(stage.replica), str(i)] = 0.0
    return figures
