"""HRRS exactly as printed in PlexRL's Algorithm 1: every waiting operation pays for a switch.

Lines 4-9 charge the setup to every operation that is not running, whether or not it would switch.
Lines 16-17 charge it again at the head of the timeline. The score therefore does not favour the
resident job, and plans are one setup too long when nothing is running. Kept for comparison; use
`hrrs` instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from phaseloom.scheduler.core.policies.device_view import (
    Candidate,
    DeviceView,
    Ordering,
    PlannedRun,
)
from phaseloom.scheduler.core.policies.ordering.hrrs import response_ratio


def _service_s(candidate: Candidate) -> float:
    setup_s = 0.0 if candidate.is_running else candidate.setup_s
    return candidate.duration_s + setup_s


def score(candidate: Candidate, now_s: float) -> float:
    return response_ratio(candidate.waited_s(now_s), _service_s(candidate))


def timeline(ordered: Sequence[Candidate], now_s: float) -> list[PlannedRun]:
    """Plan start and end times as in lines 13-24, including both charges."""
    entries: list[PlannedRun] = []
    cursor_s = now_s
    for candidate in ordered:
        if not entries and not candidate.is_running:
            cursor_s += candidate.setup_s
        end_s = cursor_s + _service_s(candidate)
        entries.append(PlannedRun(candidate.operation, cursor_s, end_s))
        cursor_s = end_s
    return entries


def _choose(view: DeviceView) -> Candidate:
    """Return the highest score. Ties go to the earlier arrival, the running operation, the log
    entry and the key, in that order."""
    return min(view.candidates, key=lambda c: (-score(c, view.now_s), c.by_arrival))


def _why(candidate: Candidate, view: DeviceView) -> str:
    return (
        f"response ratio {score(candidate, view.now_s):.2f}: waited "
        f"{candidate.waited_s(view.now_s):.2f} s for {candidate.duration_s:.2f} s of work"
        f" and {candidate.setup_s:.2f} s of switching, whether needed or not"
    )


hrrs_literal = Ordering(_choose, _why, timeline=timeline)
