"""Every job has nodes of its own (PlexRL §6.3, the baseline)."""

from __future__ import annotations

from collections.abc import Sequence

from phaseloom.scheduler.core.placement.view import NodeView


def isolated(nodes: Sequence[NodeView]) -> NodeView | None:
    return min((n for n in nodes if n.num_jobs == 0), key=lambda n: n.node, default=None)
