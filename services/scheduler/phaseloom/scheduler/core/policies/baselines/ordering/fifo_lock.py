"""A lock on the device, taken for a whole phase, first in first out.

llm-d does this when reinforcement-learning jobs share a node group by time slices: a job takes the
lock for its phase and keeps it until it leaves the pool; the others queue. The phase ends when the
controller says so, when every kind of operation that the job runs here has come, or when the next
is not predicted soon. Deviation: a lock is no better than its holder, so that it is kept only as
long as the holder's next operation is not overdue.
"""

from __future__ import annotations

from phaseloom.scheduler.core.policies.device_view import Candidate, DeviceView, Ordering, Wait


def _choose(view: DeviceView) -> Candidate | Wait:
    """The next operation of the phase that has the lock; else the earliest arrival."""
    resident = view.resident
    if resident is not None:
        going_on = [c for c in view.of(resident.job) if c.continues]
        if going_on:
            return going_on[0]
        if view.may_wait and resident.phase_until_s > view.now_s and not view.of(resident.job):
            return Wait(resident.phase_until_s, resident.job, "its phase has the device's lock")
    return min(view.candidates, key=lambda c: c.by_arrival)


def _why(candidate: Candidate, view: DeviceView) -> str:
    if candidate.continues:
        return "its job's phase has the device's lock"
    return f"next for the device's lock: it came {candidate.waited_s(view.now_s):.2f} s ago"


fifo_lock = Ordering(_choose, _why, may_wait=True, weighs=False)
