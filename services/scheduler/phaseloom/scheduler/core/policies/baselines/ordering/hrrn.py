"""Highest response ratio next: waiting time relative to service time, ignoring switches.

The ancestor of HRRS (PlexRL §4.4). It prefers short operations, but every waiting operation
eventually wins.
"""

from __future__ import annotations

from phaseloom.scheduler.core.policies.device_view import Candidate, DeviceView, Ordering
from phaseloom.scheduler.core.policies.ordering.hrrs import response_ratio


def score(candidate: Candidate, now_s: float) -> float:
    """(W + E) / E."""
    return response_ratio(candidate.waited_s(now_s), candidate.duration_s)


def _choose(view: DeviceView) -> Candidate:
    """Return the highest score. Ties go to the earlier arrival, then the log entry, then the
    key."""
    return min(view.candidates, key=lambda c: (-score(c, view.now_s), c.by_arrival))


def _why(candidate: Candidate, view: DeviceView) -> str:
    return (
        f"response ratio {score(candidate, view.now_s):.2f}: waited "
        f"{candidate.waited_s(view.now_s):.2f} s for {candidate.duration_s:.2f} s of work"
    )


hrrn = Ordering(_choose, _why)
