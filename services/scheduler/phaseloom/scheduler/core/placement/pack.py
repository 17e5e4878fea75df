"""The most loaded node first (PlexRL §6.3): whole nodes stay free for others.

Deviation: load is the number of jobs; the paper's duty ratio needs a phase trace, which a job has
only after its first cycles.
"""

from __future__ import annotations

from collections.abc import Sequence

from phaseloom.scheduler.core.placement.view import NodeView


def pack(nodes: Sequence[NodeView]) -> NodeView | None:
    return min(nodes, key=lambda n: (-n.num_jobs, n.node))
