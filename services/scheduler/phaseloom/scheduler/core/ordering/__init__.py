"""Ordering policies: which of the ready operations of a device runs next.

To add one: a module with an `Ordering` called like it, and a line in `POLICIES`.
"""

from __future__ import annotations

from phaseloom.scheduler.core.ordering.fcfs import fcfs
from phaseloom.scheduler.core.ordering.fifo_lock import fifo_lock
from phaseloom.scheduler.core.ordering.hrrn import hrrn
from phaseloom.scheduler.core.ordering.hrrs import hrrs
from phaseloom.scheduler.core.ordering.hrrs_anticipatory import hrrs_anticipatory
from phaseloom.scheduler.core.ordering.hrrs_literal import hrrs_literal
from phaseloom.scheduler.core.ordering.lrs import lrs
from phaseloom.scheduler.core.ordering.round_robin import round_robin
from phaseloom.scheduler.core.ordering.scene import (
    Candidate,
    Member,
    Ordering,
    Resident,
    Scene,
    Wait,
)
from phaseloom.scheduler.core.ordering.sjf import sjf

POLICIES: dict[str, Ordering] = {
    "fcfs": fcfs,
    "sjf": sjf,
    "hrrn": hrrn,
    "hrrs": hrrs,
    "hrrs_literal": hrrs_literal,
    "hrrs_anticipatory": hrrs_anticipatory,
    "round_robin": round_robin,
    "lrs": lrs,
    "fifo_lock": fifo_lock,
}

__all__ = ["POLICIES", "Candidate", "Member", "Ordering", "Resident", "Scene", "Wait"]
