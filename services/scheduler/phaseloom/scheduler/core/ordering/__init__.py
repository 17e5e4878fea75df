"""Ordering policies: which of the ready operations of a device runs next.

To add one: a module with a function of this signature, and a line in `POLICIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phaseloom.scheduler.core.ordering.candidate import Candidate
from phaseloom.scheduler.core.ordering.fcfs import fcfs
from phaseloom.scheduler.core.ordering.hrrs import hrrs

Ordering = Callable[[Sequence[Candidate], float], Candidate]
"""(candidates, at least one; now in seconds) -> the one to run. Pure; ties are explicit."""

POLICIES: dict[str, Ordering] = {
    "fcfs": fcfs,
    "hrrs": hrrs,
}

__all__ = ["POLICIES", "Candidate", "Ordering"]
