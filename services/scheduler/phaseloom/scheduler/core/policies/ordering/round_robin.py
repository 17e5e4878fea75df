"""Round robin: each job of a group runs one phase per turn, in the order in which the jobs joined.

This is WEAVE's meta-iteration (§4.3): each job of a co-execution group runs exactly one rollout and
one training phase, in one fixed order on every pool. It is a strict barrier: the device waits for
the next job in order even if another has work ready. A phase holds the device while operations of
kinds that it has not run yet are ready or predicted soon. A job that joins or returns enters the
current round.

Deviation: a job that is not expected (its controller or workers are gone, it never ran anything, or
    its next phase is overdue) is skipped until it has work, so it blocks no other job.
"""

from __future__ import annotations

from phaseloom.scheduler.core.planning.nodes import other_jobs
from phaseloom.scheduler.core.policies.device_view import Candidate, DeviceView, Ordering, Wait


def _choose(view: DeviceView) -> Candidate | Wait:
    """Return the next operation of the current phase, or else of the next job that is ready or
    awaited.

    Ties, between deployments of one job, go to the earlier arrival.
    """
    resident = view.resident
    if resident is not None:
        ready = view.of(resident.job)
        continuing = [c for c in ready if c.continues]
        if continuing:
            return continuing[0]
        if view.may_wait and resident.phase_until_s > view.now_s and not ready:
            return Wait(resident.phase_until_s, resident.job, "its phase has not ended")
    for member in view.members:
        ready = view.of(member.job)
        if ready:
            return ready[0]
        if view.may_wait and member.until_s > view.now_s:
            return Wait(member.until_s, member.job, "it is next in the round")
    return min(view.candidates, key=lambda c: c.by_arrival)


def _why(candidate: Candidate, view: DeviceView) -> str:
    if candidate.continues:
        return "round robin: its job's phase has not ended"
    jobs = [member.job for member in view.members]
    before = jobs.index(candidate.job) if candidate.job in jobs else 0
    return f"round robin: its job comes after {other_jobs(before)} in the round"


round_robin = Ordering(_choose, _why, may_wait=True, is_strict=True, weighs=False)
