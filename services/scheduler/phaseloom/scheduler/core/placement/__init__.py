"""Placement policies: which node of each pool a job is pinned to.

To add one: a module with a function of this signature, and a line in `POLICIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phaseloom.scheduler.core.placement.isolated import isolated
from phaseloom.scheduler.core.placement.pack import pack
from phaseloom.scheduler.core.placement.view import NodeView

Placement = Callable[[Sequence[NodeView]], NodeView | None]
"""(the nodes of one pool, by name, at least one) -> the node, or None: the job waits."""

POLICIES: dict[str, Placement] = {
    "isolated": isolated,
    "pack": pack,
}

__all__ = ["POLICIES", "NodeView", "Placement"]
