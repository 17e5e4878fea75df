"""Highest response ratio with setup (PlexRL §4.4, eq. 3-4).

Deviation: Algorithm 1 as printed charges the switch to every waiting operation; here, as eq. 3
says, only to those that would switch. A running operation is no candidate: it is not preempted.
"""

from __future__ import annotations

from collections.abc import Sequence

from phaseloom.scheduler.core.ordering.candidate import Candidate, Ordering

_SHORTEST_S = 1e-6


def score(candidate: Candidate, now_s: float) -> float:
    """(W + S) / S with S = E + [switch]·(T_offload + T_load)."""
    service_s = max(candidate.duration_s + candidate.switch_s, _SHORTEST_S)
    return (now_s - candidate.arrival_s + service_s) / service_s


def _choose(candidates: Sequence[Candidate], now_s: float) -> Candidate:
    """The highest score; ties: earlier arrival, then log entry, then key."""
    return min(candidates, key=lambda c: (-score(c, now_s), c.arrival_s, c.arrival, c.operation))


def _why(candidate: Candidate, now_s: float) -> str:
    return (
        f"response ratio {score(candidate, now_s):.2f}: waited {now_s - candidate.arrival_s:.2f} s"
        f" for {candidate.duration_s:.2f} s of work and {candidate.switch_s:.2f} s of switching"
    )


hrrs = Ordering(_choose, _why)
