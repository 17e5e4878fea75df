"""Durations that decisions need: from the profiler's traces, from switches seen, else a default."""

from __future__ import annotations

import math
from statistics import NormalDist

from phaseloom.common.contract.events import KindEstimate
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.operation import Op
from phaseloom.scheduler.core.state.tree import State

DEFAULT_DURATION_S = 0.1
"""The duration of a kind that was never measured: only its ratio to a switch matters."""
DEFAULT_SWITCH_S = 0.02
_P95 = NormalDist().inv_cdf(0.95)
_SURELY = 1.0 - 1e-6
"""The highest probability of a normal distribution that is told apart from 1."""


def duration_s(state: State, deployment: Deployment, kind: str) -> float:
    trace = state.traces.get(deployment.job_name)
    if trace is not None:
        for estimate in trace.estimates:
            if estimate.kind == kind and estimate.deployment == deployment.key.deployment:
                return estimate.duration_s
    return DEFAULT_DURATION_S


def recent_s(state: State, deployment: Deployment, kind: str) -> float:
    """The duration of an operation as its kind has lasted of late. Predictions alone go by it."""
    recent = deployment.recent.get(kind)
    return recent[0] if recent is not None else duration_s(state, deployment, kind)


def left_s(state: State, deployment: Deployment, op: Op) -> float:
    """Seconds until the end of an operation that runs is known."""
    median_s, p95_s = recent_s(state, deployment, op.kind), 0.0
    estimate = after(state, deployment.job_name, f"{deployment.key.deployment}.{op.kind}")
    if estimate is not None and estimate.duration_s > 0.0:
        p95_s = estimate.p95_s * median_s / estimate.duration_s
    ran_s = state.now_s - began_s(state, deployment, op) - state.latency_s
    return still_s(median_s, p95_s, ran_s)


def still_s(median_s: float, p95_s: float, ran_s: float) -> float:
    """The median of the seconds that are left of something that has not ended after `ran_s`.

    Durations are taken to be lognormal, through their median and 95th percentile: what runs for
    longer than usual has something left still.
    """
    if ran_s <= 0.0 or not p95_s > median_s > 0.0:
        return max(0.0, median_s - ran_s)
    logarithm = NormalDist(math.log(median_s), math.log(p95_s / median_s) / _P95)
    passed = min(logarithm.cdf(math.log(ran_s)), _SURELY)
    return max(0.0, math.exp(logarithm.inv_cdf((1.0 + passed) / 2.0)) - ran_s)


def after(state: State, job: str, last: str) -> KindEstimate | None:
    """The profiler's estimate of the job's operations like `last` and of what follows them.

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
    """Seconds until the job's next operation on this pool is ready, after `last` ended.

    Returns: -1 where the profiler does not know.
    """
    estimate = after(state, job, last)
    return -1.0 if estimate is None else estimate.next_gap_s


def phase_s(state: State, deployment: Deployment) -> float:
    """The longest segment of its job's cycle on its pool, as measured or declared; 0: not known."""
    job, pool = deployment.job_name, deployment.spec.pool
    trace = state.traces.get(job)
    cycle = state.jobs[job].spec.cycle
    segments = trace.segments if trace is not None else cycle.segments if cycle else []
    return max((s.duration_s for s in segments if s.pool == pool), default=0.0)


def period_s(state: State, job: str) -> float:
    """The period of a job's cycle when it is alone: as measured, else as declared; 0: not known."""
    trace, cycle = state.traces.get(job), state.jobs[job].spec.cycle
    if trace is not None and trace.period_s:
        return trace.period_s
    return cycle.period_s if cycle else 0.0


def worst_period_s(state: State, job: str) -> float:
    """The period of a job whose operations all take as long as they may; 0: not known."""
    trace, cycle = state.traces.get(job), state.jobs[job].spec.cycle
    measured_s = max(trace.worst_period_s, trace.period_s) if trace is not None else 0.0
    return max(measured_s, cycle.worst_period_s) if cycle else measured_s


def began_s(state: State, deployment: Deployment, op: Op) -> float:
    """When a permitted operation begins: one that came with its activation when that is open."""
    return max(op.permitted_s, open_s(state, deployment))


def open_s(state: State, deployment: Deployment) -> float:
    """When a deployment's activation is or was open, as far as it is known."""
    return deployment.activation.opening_s + switch_s(state, deployment)


def switch_s(state: State, deployment: Deployment) -> float:
    """The cost of switching a deployment in: the newest offload and load.

    Before it was ever seen: as planned in the configuration.
    """
    seen = state.switch_s.get(deployment.name)
    if seen:
        return sum(seen)
    planned_s = state.config.switch_s if state.config else 0.0
    return planned_s or DEFAULT_SWITCH_S
