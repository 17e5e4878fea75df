"""Shortest job first: run the operation with the shortest expected duration.

A baseline: it ignores switches.

Deviation: to prevent starvation, an operation that has waited for `STARVED` times its duration runs
first, the oldest before the others.
"""

from __future__ import annotations

from phaseloom.scheduler.core.policies.device_view import Candidate, DeviceView, Ordering

STARVED = 100.0
STARVED_S = 1.0
"""Minimum wait that counts as starvation, for operations of negligible duration."""


def _choose(view: DeviceView) -> Candidate:
    """Return the shortest operation. Ties are broken by earliest arrival, then by log entry, then
    by key."""
    starved = [c for c in view.candidates if _is_starved(c, view.now_s)]
    if starved:
        return min(starved, key=lambda c: c.by_arrival)
    return min(view.candidates, key=lambda c: (c.duration_s, c.by_arrival))


def _is_starved(candidate: Candidate, now_s: float) -> bool:
    return candidate.waited_s(now_s) >= max(STARVED * candidate.duration_s, STARVED_S)


def _why(candidate: Candidate, view: DeviceView) -> str:
    if _is_starved(candidate, view.now_s):
        waited_s = candidate.waited_s(view.now_s)
        return f"it has waited for {waited_s:.2f} s, so it runs before shorter operations"
    return f"shortest job first: it takes about {candidate.duration_s:.2f} s"


sjf = Ordering(_choose, _why)
