"""Durations for decisions: from the profiler's traces, from observed switches, or a default."""

from __future__ import annotations

import math
from statistics import NormalDist

from phaseloom.common.contract.events import KindEstimate
from phaseloom.common.contract.specs import Segment
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.operation import Op
from phaseloom.scheduler.core.state.tree import State

DEFAULT_DURATION_S = 0.1
"""Assumed duration of a kind that was never measured. Only its ratio to a switch matters."""
DEFAULT_SWITCH_S = 0.02
_P95 = NormalDist().inv_cdf(0.95)
_SURELY = 1.0 - 1e-6
"""Largest probability below 1 that a normal distribution still distinguishes from 1."""


def duration_s(state: State, deployment: Deployment, kind: str) -> float:
    trace = state.traces.get(deployment.job_name)
    if trace is not None:
        for estimate in trace.estimates:
            if estimate.kind == kind and estimate.deployment == deployment.key.deployment:
                return estimate.duration_s
    return DEFAULT_DURATION_S


def recent_s(state: State, deployment: Deployment, kind: str) -> float:
    """Recent duration of operations of this kind. Only used for predictions."""
    recent = deployment.recent.get(kind)
    return recent[0] if recent is not None else duration_s(state, deployment, kind)


def left_s(state: State, deployment: Deployment, op: Op) -> float:
    """Predicted seconds until the scheduler learns that a running operation has ended."""
    median_s, p95_s = recent_s(state, deployment, op.kind), 0.0
    estimate = after(state, deployment.job_name, f"{deployment.key.deployment}.{op.kind}")
    if estimate is not None and estimate.duration_s > 0.0:
        p95_s = estimate.p95_s * median_s / estimate.duration_s
    ran_s = state.now_s - began_s(state, deployment, op) - state.latency_s
    return still_s(median_s, p95_s, ran_s)


def still_s(median_s: float, p95_s: float, ran_s: float) -> float:
    """Median of the remaining seconds of an operation that has run for `ran_s`.

    Assumes a lognormal distribution with the given median and 95th percentile, so an operation that
    runs longer than usual still has some time remaining.
    """
    if ran_s <= 0.0 or not p95_s > median_s > 0.0:
        return max(0.0, median_s - ran_s)
    logarithm = NormalDist(math.log(median_s), math.log(p95_s / median_s) / _P95)
    passed = min(logarithm.cdf(math.log(ran_s)), _SURELY)
    return max(0.0, math.exp(logarithm.inv_cdf((1.0 + passed) / 2.0)) - ran_s)


def after(state: State, job: str, last: str) -> KindEstimate | None:
    """Return the profiler's estimate for the job's operations like `last` and for what follows
    them.

    Args: last: `<deployment>.<kind>`.
    """
    trace = state.traces.get(job)
    if trace is not None:
        deployment, _, kind = last.partition(".")
        for estimate in trace.estimates:
            if estimate.kind == kind and estimate.deployment == deployment:
                return estimate
    return None


def next_gap_s(state: State, job: str, last: str) -> float:
    """Seconds from the end of `last` until the job's next operation on this pool is ready, or -1 if
    unknown."""
    estimate = after(state, job, last)
    return -1.0 if estimate is None else estimate.next_gap_s


def phase_s(state: State, deployment: Deployment) -> float:
    """Longest segment of the job's cycle on the deployment's pool, measured or declared. 0 if
    unknown."""
    segments = _segments(state, deployment.job_name, deployment.spec.pool)
    return max((s.duration_s for s in segments), default=0.0)


def longest_gap_s(state: State, job: str, pool: str) -> float:
    """Longest gap between two segments on a pool when the job runs alone. inf if unknown."""
    segments = _segments(state, job, pool)
    if not segments:
        return math.inf
    first_s = segments[0].offset_s + period_s(state, job)
    next_s = [*(s.offset_s for s in segments[1:]), first_s]
    return max(
        after_s - (s.offset_s + s.duration_s) for s, after_s in zip(segments, next_s, strict=True)
    )


def _segments(state: State, job: str, pool: str) -> list[Segment]:
    """Segments of a job's cycle on a pool, measured or declared, in order."""
    trace, cycle = state.traces.get(job), state.jobs[job].spec.cycle
    segments = trace.segments if trace is not None else cycle.segments if cycle else []
    return sorted((s for s in segments if s.pool == pool), key=lambda s: s.offset_s)


def period_s(state: State, job: str) -> float:
    """Period of a job's cycle when it runs alone: measured, else declared. 0 if unknown."""
    trace, cycle = state.traces.get(job), state.jobs[job].spec.cycle
    if trace is not None and trace.period_s:
        return trace.period_s
    return cycle.period_s if cycle else 0.0


def worst_period_s(state: State, job: str) -> float:
    """Period of a job's cycle if all operations take their worst-case time. 0 if unknown."""
    trace, cycle = state.traces.get(job), state.jobs[job].spec.cycle
    measured_s = max(trace.worst_period_s, trace.period_s) if trace is not None else 0.0
    return max(measured_s, cycle.worst_period_s) if cycle else measured_s


def began_s(state: State, deployment: Deployment, op: Op) -> float:
    """Time at which a permitted operation starts: no earlier than its activation is open."""
    return max(op.permitted_s, open_s(state, deployment))


def open_s(state: State, deployment: Deployment) -> float:
    """Estimated time at which a deployment's activation is or was open."""
    return deployment.activation.opening_s + switch_s(state, deployment)


def switch_s(state: State, deployment: Deployment) -> float:
    """Cost of switching a deployment in: the newest offload and load times.

    Before the first switch, the planned time from the configuration.
    """
    seen = state.switch_s.get(deployment.name)
    if seen:
        return sum(seen)
    planned_s = state.config.switch_s if state.config else 0.0
    return planned_s or DEFAULT_SWITCH_S
