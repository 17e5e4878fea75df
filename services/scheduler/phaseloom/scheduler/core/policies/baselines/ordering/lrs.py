"""Least recently served: run the job whose last operation on the device started longest ago.

OpenRL alternates like this between trainers that share a device. Every job gets the same number of
turns however long they take, and every turn is a switch while several jobs have work.
"""

from __future__ import annotations

from phaseloom.scheduler.core.planning.nodes import other_jobs
from phaseloom.scheduler.core.policies.device_view import Candidate, DeviceView, Ordering


def _choose(view: DeviceView) -> Candidate:
    """Return the least recently served job's operation. Jobs that were never served come first.

    Ties, between deployments of one job, go to the earlier arrival.
    """
    return min(view.candidates, key=lambda c: (c.served, c.by_arrival))


def _why(candidate: Candidate, view: DeviceView) -> str:
    if not candidate.served:
        return "least recently served: its job has never run on this device"
    later = len({c.job for c in view.candidates if c.served > candidate.served})
    return f"least recently served: {other_jobs(later)} ran on this device more recently"


lrs = Ordering(_choose, _why, weighs=False)
