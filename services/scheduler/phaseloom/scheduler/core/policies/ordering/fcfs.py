"""First come, first served: each device runs operations in order of arrival.

Co-execution groups without a barrier also run like this: a phase joins the queue of its node when
the preceding phase ends, and runs when it reaches the head.
"""

from __future__ import annotations

from phaseloom.scheduler.core.policies.device_view import Candidate, DeviceView, Ordering


def _choose(view: DeviceView) -> Candidate:
    """Return the earliest arrival. Ties go to the earlier log entry, then the key."""
    return min(view.candidates, key=lambda c: c.by_arrival)


def _why(candidate: Candidate, view: DeviceView) -> str:
    return f"first come, first served: ready for {candidate.waited_s(view.now_s):.2f} s"


fcfs = Ordering(_choose, _why, weighs=False)
