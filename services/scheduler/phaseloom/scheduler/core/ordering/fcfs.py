"""First come, first served."""

from __future__ import annotations

from collections.abc import Sequence

from phaseloom.scheduler.core.ordering.candidate import Candidate


def fcfs(candidates: Sequence[Candidate], now_s: float) -> Candidate:
    """The earliest arrival; ties: the earlier log entry, then the key."""
    return min(candidates, key=lambda c: (c.arrival_s, c.arrival, c.operation))
