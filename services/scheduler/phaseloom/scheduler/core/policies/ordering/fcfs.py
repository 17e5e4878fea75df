"""First come, first served: on every device a queue in the order of arrival.

Co-execution groups without a barrier run like this, too: a phase joins its node's queue when the
phase before it has ended, and runs when it is at the head.
"""

from __future__ import annotations

from phaseloom.scheduler.core.policies.device_view import Candidate, DeviceView, Ordering


def _choose(view: DeviceView) -> Candidate:
    """The earliest arrival; ties: the earlier log entry, then the key."""
    return min(view.candidates, key=lambda c: c.by_arrival)


def _why(candidate: Candidate, view: DeviceView) -> str:
    return f"first come, first served: it came {candidate.waited_s(view.now_s):.2f} s ago"


fcfs = Ordering(_choose, _why, weighs=False)
