"""What an ordering policy sees of a deployment that could run next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec


class Candidate(msgspec.Struct, frozen=True):
    """The first ready operation of one deployment."""

    operation: str
    """Its key."""
    deployment: str
    job: str
    arrival_s: float
    """When it was queued and what it waits for on other deployments was done."""
    arrival: int
    """Log sequence: breaks ties."""
    duration_s: float
    """Estimated."""
    switch_s: float
    """Offload and load that running it would cost now; 0: it is resident."""


class Ordering(NamedTuple):
    choose: Callable[[Sequence[Candidate], float], Candidate]
    """(candidates, at least one; now in seconds) -> the one to run. Pure; ties are explicit."""
    why: Callable[[Candidate, float], str]
    """What decides about this candidate now, for people."""
