"""First come, first served."""

from __future__ import annotations

from collections.abc import Sequence

from phaseloom.scheduler.core.ordering.candidate import Candidate, Ordering


def _choose(candidates: Sequence[Candidate], now_s: float) -> Candidate:
    """The earliest arrival; ties: the earlier log entry, then the key."""
    return min(candidates, key=lambda c: (c.arrival_s, c.arrival, c.operation))


def _why(candidate: Candidate, now_s: float) -> str:
    return f"first come, first served: it came {now_s - candidate.arrival_s:.2f} s ago"


fcfs = Ordering(_choose, _why)
