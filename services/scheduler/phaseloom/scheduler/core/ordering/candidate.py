"""What an ordering policy sees of a ready operation."""

from __future__ import annotations

import msgspec


class Candidate(msgspec.Struct, frozen=True):
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
