"""HRRS that looks ahead: a switch is put off where the resident job is worth waiting for.

Past PlexRL §4.4: an operation that has not waited has ratio 1, the least there is, so that under
HRRS the next operation of a job that submits serially always loses against any that waits, and
every operation is a switch. Here the resident job keeps the device

- while it has an operation ready that takes less time than leaving would cost it: the phase of the
  job that HRRS would run instead, and the two switches, away and back;
- while it has none ready, if the next one is predicted after a time that is worth less than these
  two switches; until that is overdue, and never for longer than the two switches take together, so
  that a wrong prediction at most doubles the cost of having left at once.

Both end when somebody else has waited in this turn for so long that its response ratio counted from
the turn's beginning reaches `STARVED`, or when its SLO has no more room. Otherwise: HRRS.
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
"""Response ratio of this turn's waiting at which the resident job's turn ends."""
LEEWAY = 0.25
"""Least lateness that a prediction is allowed, as a share of the two switches."""


def _choose(view: DeviceView) -> Candidate | Wait:
    resident = view.resident
    others = [c for c in view.candidates if resident is None or c.job != resident.job]
    if resident is None or not others:
        return highest(view.candidates, view.now_s)
    rival = highest(others, view.now_s)
    own = view.of(resident.job)
    if own:
        first = highest(own, view.now_s)
        is_best = _is_worth_it(view, resident, first, rival, others)
        return first if is_best else highest(view.candidates, view.now_s)
    until_s = _until_s(view, resident, rival, others) if view.may_wait else 0.0
    if until_s > view.now_s:
        return Wait(until_s, resident.job, "its next operation is expected, and switching is dear")
    return rival


def _is_worth_it(
    view: DeviceView,
    resident: Resident,
    first: Candidate,
    rival: Candidate,
    others: list[Candidate],
) -> bool:
    """Whether the resident job's operation should go before the one that HRRS prefers."""
    takes_s = first.switch_s + first.duration_s
    if takes_s >= max(rival.duration_s, rival.phase_s) + rival.leaving_s:
        return False
    is_starved = any(_starved_s(c, resident) <= view.now_s for c in others)
    has_room = all(c.slack_s - c.switch_s >= takes_s for c in others)
    return has_room and not is_starved


def _until_s(
    view: DeviceView, resident: Resident, rival: Candidate, others: list[Candidate]
) -> float:
    """Time until which the resident job's next operation is waited for; a past time: not at all."""
    given_up_s = resident.idle_since_s + rival.leaving_s
    overdue_s = max(resident.late_s, resident.at_s + LEEWAY * rival.leaving_s)
    starved_s = min(_starved_s(c, resident) for c in others)
    slack_s = min(c.slack_s - c.switch_s for c in others)
    until_s = min(given_up_s, overdue_s, starved_s, view.now_s + slack_s)
    return until_s if resident.at_s < until_s else 0.0


def _starved_s(candidate: Candidate, resident: Resident) -> float:
    """Time at which a candidate has waited too long in the resident job's turn."""
    service_s = candidate.duration_s + candidate.switch_s
    return max(candidate.arrival_s, resident.since_s) + (STARVED - 1.0) * service_s


def _why(candidate: Candidate, view: DeviceView) -> str:
    resident = view.resident
    if resident is not None and candidate.job == resident.job:
        return f"its job is on the device; {why(candidate, view)}"
    return why(candidate, view)


hrrs_anticipatory = Ordering(_choose, _why, may_wait=True)
