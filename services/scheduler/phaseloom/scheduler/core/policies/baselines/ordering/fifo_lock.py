"""First-in, first-out lock on the device, held for a whole phase.

llm-d does this when reinforcement-learning jobs time-slice a node group: a job takes the lock for
its phase and keeps it until it leaves the pool, while the others queue. A phase ends when the
controller says so, when the job has run every kind of operation that it runs on this pool, or when
no next operation is predicted soon.

Deviation: the lock expires when the holder's next operation is overdue, so a dead holder cannot
    block the device.
"""

from __future__ import annotations

from phaseloom.scheduler.core.policies.device_view import Candidate, DeviceView, Ordering, Wait


def _choose(view: DeviceView) -> Candidate | Wait:
    """Return the next operation of the phase that holds the lock, or else the earliest arrival."""
    resident = view.resident
    if resident is not None:
        continuing = [c for c in view.of(resident.job) if c.continues]
        if continuing:
            return continuing[0]
        if view.may_wait and resident.phase_until_s > view.now_s and not view.of(resident.job):
            return Wait(resident.phase_until_s, resident.job, "its phase holds the device's lock")
    return min(view.candidates, key=lambda c: c.by_arrival)


def _why(candidate: Candidate, view: DeviceView) -> str:
    if candidate.continues:
        return "its job's phase holds the device's lock"
    return f"next in line for the device's lock: ready for {candidate.waited_s(view.now_s):.2f} s"


fifo_lock = Ordering(_choose, _why, may_wait=True, weighs=False)
