"""Durations that decisions need: from the profiler's traces, from switches seen, else a default."""

from __future__ import annotations

from phaseloom.common.contract.events import KindEstimate
from phaseloom.common.contract.ids import JobKey
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.job import Job
from phaseloom.scheduler.core.state.operation import Op
from phaseloom.scheduler.core.state.tree import State

DEFAULT_DURATION_S = 0.1
"""The duration of a kind that was never measured: only its ratio to a switch matters."""
DEFAULT_SWITCH_S = 0.02


def duration_s(state: State, deployment: Deployment, kind: str) -> float:
    trace = state.traces.get(deployment.job_name)
    if trace is not None:
        for estimate in trace.estimates:
            if estimate.kind == kind and estimate.deployment == deployment.key.deployment:
                return estimate.duration_s
    return DEFAULT_DURATION_S


def after(state: State, job: JobKey, last: str) -> KindEstimate | None:
    """The profiler's estimate of the job's operations like `last` and of what follows them.

    Args: last: `<deployment>.<kind>`.
    """
    trace = state.traces.get(str(job))
    if trace is not None:
        for estimate in trace.estimates:
            if f"{estimate.deployment}.{estimate.kind}" == last:
                return estimate
    return None


def next_gap_s(state: State, job: JobKey, last: str) -> float:
    """Seconds until the job's next operation on this pool is ready, after `last` ended.

    Returns: -1 where the profiler does not know.
    """
    estimate = after(state, job, last)
    return -1.0 if estimate is None else estimate.next_gap_s


def phase_s(state: State, deployment: Deployment) -> float:
    """The longest segment of its job's cycle on its pool, as measured or declared; 0: not known."""
    key, pool = deployment.key.job_key, deployment.spec.pool
    trace = state.traces.get(str(key))
    cycle = state.jobs[str(key)].spec.cycle
    segments = trace.segments if trace is not None else cycle.segments if cycle else []
    return max((s.duration_s for s in segments if s.pool == pool), default=0.0)


def period_s(state: State, job: Job) -> float:
    """The period of a job's cycle when it is alone: as measured, else as declared; 0: not known."""
    trace = state.traces.get(str(job.key))
    if trace is not None and trace.period_s:
        return trace.period_s
    return job.spec.cycle.period_s if job.spec.cycle else 0.0


def worst_period_s(state: State, job: Job) -> float:
    """The period of a job whose operations all take as long as they may; 0: not known."""
    trace = state.traces.get(str(job.key))
    measured_s = max(trace.worst_period_s, trace.period_s) if trace is not None else 0.0
    return max(measured_s, job.spec.cycle.worst_period_s) if job.spec.cycle else measured_s


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
