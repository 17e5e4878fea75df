"""Durations that decisions need: from the profiler's traces, from switches seen, else a default."""

from __future__ import annotations

from phaseloom.common.ids import JobKey
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


def next_gap_s(state: State, job: JobKey, last: str) -> float:
    """Seconds until the job's next operation on this pool is ready, after `last` ended.

    Args:    last: `<deployment>.<kind>`.
    Returns: -1 where the profiler does not know.
    """
    trace = state.traces.get(str(job))
    if trace is not None:
        for estimate in trace.estimates:
            if f"{estimate.deployment}.{estimate.kind}" == last:
                return estimate.next_gap_s
    return -1.0


def switch_s(state: State, deployment: Deployment) -> float:
    """What switching this deployment in costs: the newest offload and load."""
    seen = state.switch_s.get(deployment.name)
    return sum(seen) if seen else DEFAULT_SWITCH_S
