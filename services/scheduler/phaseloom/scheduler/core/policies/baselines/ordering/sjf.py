"""Shortest job first: the operation that is expected to take least.

A baseline: it knows nothing of switches, and long operations wait for as long as short ones come.
Deviation, so that nothing starves: what has waited for `STARVED` times its duration goes first, the
oldest before the others.
"""

from __future__ import annotations

from phaseloom.scheduler.core.policies.device_view import Candidate, DeviceView, Ordering

STARVED = 100.0
STARVED_S = 1.0
"""Least wait that counts as starving, for operations that take hardly any time."""


def _choose(view: DeviceView) -> Candidate:
    """The least duration; ties: earlier arrival, then log entry, then key."""
    starved = [c for c in view.candidates if _is_starved(c, view.now_s)]
    if starved:
        return min(starved, key=lambda c: c.by_arrival)
    return min(view.candidates, key=lambda c: (c.duration_s, c.by_arrival))


def _is_starved(candidate: Candidate, now_s: float) -> bool:
    return candidate.waited_s(now_s) >= max(STARVED * candidate.duration_s, STARVED_S)


def _why(candidate: Candidate, view: DeviceView) -> str:
    if _is_starved(candidate, view.now_s):
        return f"it has waited for {candidate.waited_s(view.now_s):.2f} s: longer than is fair"
    return f"shortest first: it takes about {candidate.duration_s:.2f} s"


sjf = Ordering(_choose, _why)
