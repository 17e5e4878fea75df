"""Hold a device for its job while the expected gap costs less than the switch back.

Goes beyond PlexRL §4.4. If a job leaves its device, only one of the two switches is extra: the one
that brings it back. The other job needs its switch in any case. So a device is worth holding for
its job if the gap until the job's next operation there is shorter than the switch back. The gap
leaves out the time for which other jobs keep the job waiting elsewhere, and includes the switches
that the job needs elsewhere until then.

The rule looks along the job's chain of operations. A job that waits for another device holds none,
because its gap has no known end. So two jobs never each hold the device that the other needs.

- An operation that continues the phase of the resident job goes first.
- Until the turn ends, a further phase of the job goes first, and the device waits for its job.
- A turn ends once another job has waited for as long as one cycle of each of these jobs takes, with
  its switches, but not before it has lasted `LEAST_TURN` times as long as the two switches.
- It also ends if another job has no slack left in its SLO.
- The next job is the one whose phase has the highest response ratio.

The device waits for one operation for at most `PATIENCE` switches back, so a wrong prediction costs
at most that. If no switch is saved, it never waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from phaseloom.scheduler.core.policies.device_view import (
    Candidate,
    DeviceView,
    Ordering,
    Resident,
    Wait,
)
from phaseloom.scheduler.core.policies.ordering.hrrs import response_ratio

LEAST_TURN = 2.0
"""A turn with gaps lasts at least this many times the two switches. A shorter one would not pay for
them."""
PATIENCE = 2.0
"""Longest wait for one operation, relative to the switch back."""


class _Hold(NamedTuple):
    until_s: float
    """Until when the resident job keeps the device. A past time means that it leaves now."""
    reason: str


_TURN_IS_OVER = _Hold(0.0, "another job has waited long enough")


def _choose(view: DeviceView) -> Candidate | Wait:
    resident = view.resident
    rivals = [c for c in view.candidates if resident is None or c.job != resident.job]
    if resident is None or not rivals:
        return _highest(view.candidates, view.now_s)
    hold = _hold(view, resident, rivals)
    if hold.until_s > view.now_s:
        resident_ones = view.of(resident.job)
        if resident_ones:
            return resident_ones[0]
        if view.may_wait:
            return Wait(hold.until_s, resident.job, hold.reason)
    return _highest(rivals, view.now_s)


def _hold(view: DeviceView, resident: Resident, rivals: list[Candidate]) -> _Hold:
    """Decide until when the resident job keeps the device, and why."""
    resident_ones, rival = view.of(resident.job), _highest(rivals, view.now_s)
    work_s = resident_ones[0].switch_s + resident_ones[0].duration_s if resident_ones else 0.0
    slack_s = min(c.slack_s - c.switch_s for c in rivals)
    if slack_s < work_s or slack_s <= 0.0:
        return _Hold(0.0, "another job has no slack left in its SLO")
    if resident_ones and resident_ones[0].continues:
        return _Hold(math.inf, "its phase here has not ended")
    if not rival.leaving_s:
        return _Hold(0.0, "to leave costs it no switch")
    turn_end_s = _turn_end_s(resident, rivals, rival)
    if not resident_ones:
        return _gap(view.now_s, resident, rival.back_s, turn_end_s, slack_s)
    if view.now_s >= turn_end_s:
        return _TURN_IS_OVER
    return _Hold(turn_end_s, f"its turn has not ended, and to return takes {rival.back_s:.2f} s")


def _gap(
    now_s: float, resident: Resident, back_s: float, turn_end_s: float, slack_s: float
) -> _Hold:
    """Decide whether the device waits for the resident job, which has nothing ready there."""
    turn_end_s = max(turn_end_s, resident.phase_until_s)
    if now_s >= turn_end_s:
        return _TURN_IS_OVER
    if resident.is_blocked:
        return _Hold(0.0, "it waits for another device itself")
    gap_s = resident.net_gap_s + resident.away_switch_s
    gap = f"its gap here takes {gap_s:.2f} s" if math.isfinite(gap_s) else "its gap is not known"
    reason = f"{gap}, and to return takes {back_s:.2f} s"
    if gap_s >= back_s:
        return _Hold(0.0, reason)
    since_s = now_s if resident.is_busy else resident.idle_since_s
    return _Hold(min(since_s + PATIENCE * back_s, now_s + slack_s, turn_end_s), reason)


def _turn_end_s(resident: Resident, rivals: list[Candidate], rival: Candidate) -> float:
    """Return the time at which the resident job's turn ends."""
    both_s = rival.switch_s + rival.back_s
    cycles_s = {c.job: max(c.period_s, c.phase_s, c.duration_s) + both_s for c in rivals}
    cycles_s[resident.job] = resident.period_s + both_s
    waits_since_s = min(c.arrival_s for c in rivals)
    enough_s = waits_since_s + math.fsum(cycles_s.values())
    return max(enough_s, resident.since_s + LEAST_TURN * both_s)


def _ratio(candidate: Candidate, now_s: float) -> float:
    service_s = max(candidate.duration_s, candidate.phase_s) + candidate.switch_s
    return response_ratio(candidate.waited_s(now_s), service_s)


def _highest(candidates: Iterable[Candidate], now_s: float) -> Candidate:
    """Return the highest response ratio. Ties go to the earlier arrival."""
    return min(candidates, key=lambda c: (-_ratio(c, now_s), c.by_arrival))


def _why(candidate: Candidate, view: DeviceView) -> str:
    ratio = (
        f"response ratio {_ratio(candidate, view.now_s):.2f}: waited "
        f"{candidate.waited_s(view.now_s):.2f} s for a phase of "
        f"{max(candidate.duration_s, candidate.phase_s):.2f} s and {candidate.switch_s:.2f} s of "
        "switching"
    )
    resident = view.resident
    rivals = [c for c in view.candidates if resident is None or c.job != resident.job]
    if resident is None or not rivals:
        return ratio
    hold = _hold(view, resident, rivals)
    if candidate.job == resident.job:
        return hold.reason if hold.until_s > view.now_s else f"its turn is over: {hold.reason}"
    is_held = "keeps it for now" if hold.until_s > view.now_s else "leaves it"
    return f"the last job on the device {is_held}: {hold.reason}; {ratio}"


hold = Ordering(_choose, _why, may_wait=True)
