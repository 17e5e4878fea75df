"""Ordering policies: which of the ready operations of a device runs next.

To add one: a module with an `Ordering` called like it, and a line in `POLICIES`.
"""

from __future__ import annotations

from phaseloom.scheduler.core.ordering.candidate import Candidate, Ordering
from phaseloom.scheduler.core.ordering.fcfs import fcfs
from phaseloom.scheduler.core.ordering.hrrs import hrrs

POLICIES: dict[str, Ordering] = {
    "fcfs": fcfs,
    "hrrs": hrrs,
}

__all__ = ["POLICIES", "Candidate", "Ordering"]
