"""Least recently served: the job whose last operation on the device began longest ago.

OpenRL does this between the trainers that share a device: fair by turns, whatever they take, and a
switch at every turn while several have something ready.
"""

from __future__ import annotations

from phaseloom.scheduler.core.policies.device_view import Candidate, DeviceView, Ordering


def _choose(view: DeviceView) -> Candidate:
    """The job served longest ago; those never served first. Ties (one job's deployments): by
    arrival."""
    return min(view.candidates, key=lambda c: (c.served, c.by_arrival))


def _why(candidate: Candidate, view: DeviceView) -> str:
    later = len({c.job for c in view.candidates if c.served > candidate.served})
    last = "was last served longer ago" if candidate.served else "was never served here"
    return f"least recently served: its job {last} than {later} of the others"


lrs = Ordering(_choose, _why, weighs=False)
