"""Round robin: every job of a group one phase a turn, in the order in which they joined.

The meta-iteration of WEAVE (§4.3): each job of a co-execution group runs exactly one rollout and
one training phase in it, in one fixed order on every pool. A strict barrier: the device waits for
the next in order even where another has something ready. A phase holds the device as long as
operations of kinds that it has not run yet are ready or predicted soon. A job that joins, or comes
back, enters the round that is running.

Deviation: a member that is not on its way (its controller or its workers are gone, it never ran
anything, its next phase is overdue) is passed over until it comes, so that it blocks nobody.
"""

from __future__ import annotations

from phaseloom.scheduler.core.policies.device_view import Candidate, DeviceView, Ordering, Wait


def _choose(view: DeviceView) -> Candidate | Wait:
    """The next operation of the present phase; else that of the first member in order that is there
    or waited for. Ties (one job's deployments): by arrival."""
    resident = view.resident
    if resident is not None:
        own = view.of(resident.job)
        going_on = [c for c in own if c.continues]
        if going_on:
            return going_on[0]
        if view.may_wait and resident.phase_until_s > view.now_s and not own:
            return Wait(resident.phase_until_s, resident.job, "its phase is not over")
    for member in view.members:
        own = view.of(member.job)
        if own:
            return own[0]
        if view.may_wait and member.until_s > view.now_s:
            return Wait(member.until_s, member.job, "it is its turn in the round")
    return min(view.candidates, key=lambda c: c.by_arrival)


def _why(candidate: Candidate, view: DeviceView) -> str:
    if candidate.continues:
        return "round robin: its job's phase is not over"
    jobs = [member.job for member in view.members]
    before = jobs.index(candidate.job) if candidate.job in jobs else 0
    return f"round robin: its job's turn comes after those of {before} others"


round_robin = Ordering(_choose, _why, may_wait=True, is_strict=True, weighs=False)
