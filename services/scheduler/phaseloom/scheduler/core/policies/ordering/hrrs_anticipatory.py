"""HRRS with anticipation: delay a switch while waiting for the resident job is cheaper.

Goes beyond PlexRL §4.4. An operation that has not waited has the minimum ratio of 1. So under HRRS
the next operation of a job that submits one operation at a time always loses to any waiting
operation, and every operation causes a switch. Here the resident job keeps the device in two cases:

- It has a ready operation that takes less time than leaving would cost. That cost is the phase of
  the job that HRRS would run instead, plus the two switches, away and back.
- It has no ready operation, but the next one is predicted soon enough to cost less than the two
  switches. The device then waits until the prediction is overdue, but never longer than the two
  switches take. A wrong prediction thus at most doubles the cost of having left at once.

The turn ends when another job reaches the response ratio `STARVED`, counted from the start of this
turn, or when another job has no slack left in its SLO. In all other cases plain HRRS decides.
"""

from __future__ import annotations

from phaseloom.scheduler.core.policies.device_view import (
    Candidate,
    DeviceView,
    Ordering,
    Resident,
    Wait,
)
from phaseloom.scheduler.core.policies.ordering.hrrs import highest, why

STARVED = 8.0
"""Give up the device once another job's response ratio, counted from the start of this turn,
reaches this value."""
LEEWAY = 0.25
"""Minimum lateness that a prediction is allowed, as a fraction of the two switches."""


def _choose(view: DeviceView) -> Candidate | Wait:
    resident = view.resident
    rivals = [c for c in view.candidates if resident is None or c.job != resident.job]
    if resident is None or not rivals:
        return highest(view.candidates, view.now_s)
    rival = highest(rivals, view.now_s)
    resident_ones = view.of(resident.job)
    if resident_ones:
        first = highest(resident_ones, view.now_s)
        is_best = _is_worth_it(view, resident, first, rival, rivals)
        return first if is_best else highest(view.candidates, view.now_s)
    until_s = _until_s(view, resident, rival, rivals) if view.may_wait else 0.0
    if until_s > view.now_s:
        reason = "its next operation is expected soon, and switching away would cost more"
        return Wait(until_s, resident.job, reason)
    return rival


def _is_worth_it(
    view: DeviceView,
    resident: Resident,
    first: Candidate,
    rival: Candidate,
    rivals: list[Candidate],
) -> bool:
    """Whether the resident job's operation should run before the one that HRRS prefers."""
    takes_s = first.switch_s + first.duration_s
    if takes_s >= max(rival.duration_s, rival.phase_s) + rival.leaving_s:
        return False
    is_starved = any(_starved_s(c, resident) <= view.now_s for c in rivals)
    has_room = all(c.slack_s - c.switch_s >= takes_s for c in rivals)
    return has_room and not is_starved


def _until_s(
    view: DeviceView, resident: Resident, rival: Candidate, rivals: list[Candidate]
) -> float:
    """Time until which to wait for the resident job's next operation. A past time means no wait."""
    given_up_s = resident.idle_since_s + rival.leaving_s
    overdue_s = max(resident.late_s, resident.at_s + LEEWAY * rival.leaving_s)
    starved_s = min(_starved_s(c, resident) for c in rivals)
    slack_s = min(c.slack_s - c.switch_s for c in rivals)
    until_s = min(given_up_s, overdue_s, starved_s, view.now_s + slack_s)
    return until_s if resident.at_s < until_s else 0.0


def _starved_s(candidate: Candidate, resident: Resident) -> float:
    """Time at which a candidate has waited too long during the resident job's turn."""
    service_s = candidate.duration_s + candidate.switch_s
    return max(candidate.arrival_s, resident.since_s) + (STARVED - 1.0) * service_s


def _why(candidate: Candidate, view: DeviceView) -> str:
    resident = view.resident
    if resident is not None and candidate.job == resident.job:
        return f"its job is already on the device; {why(candidate, view)}"
    return why(candidate, view)


hrrs_anticipatory = Ordering(_choose, _why, may_wait=True)
