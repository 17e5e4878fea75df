"""Placement policies: which nodes of each pool a job is pinned to, and with whom it shares them.

To add one: a module with a `Placement` called like it, and a line in `POLICIES`.
"""

from __future__ import annotations

from phaseloom.scheduler.core.placement.view import Placement

POLICIES: dict[str, Placement] = {}

__all__ = ["POLICIES", "Placement"]
