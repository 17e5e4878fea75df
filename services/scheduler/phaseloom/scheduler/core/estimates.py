"""Durations that decisions need: from the profiler's traces, from switches seen, else a default."""

from __future__ import annotations

from phaseloom.common.ids import JobKey
from phaseloom.common.messages import KindEstimate
from phaseloom.scheduler.core.state import Deployment, State

DEFAULT_DURATION_S = 0.1
"""Before a kind was ever measured: only the ratio to a switch matters then."""
DEFAULT_SWITCH_S = 0.02


def duration_s(state: State, deployment: Deployment, kind: str) -> float:
    trace = state.traces.get(str(deployment.key.job_key))
    if trace is not None:
        for estimate in trace.estimates:
            if estimate.kind == kind and estimate.deployment == deployment.key.deployment:
                return estimate.duration_s
    return DEFAULT_DURATION_S


def after(state: State, job: JobKey, last: str) -> KindEstimate | None:
    """What the profiler knows of the job's operations like `last` and of what follows them.

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


def switch_s(state: State, deployment: Deployment) -> float:
    """What switching this deployment in costs: the newest offload and load."""
    seen = state.switch_s.get(deployment.name)
    return sum(seen) if seen else DEFAULT_SWITCH_S
