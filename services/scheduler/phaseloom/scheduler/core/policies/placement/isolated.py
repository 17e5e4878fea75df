"""Every job on its own nodes: the baseline of PlexRL §6.3 and WEAVE §6."""

from __future__ import annotations

from phaseloom.scheduler.core.planning.nodes import alone_takes
from phaseloom.scheduler.core.planning.sharing.choice import on_free_nodes
from phaseloom.scheduler.core.state.cluster import Cluster, Decision, Member, Placement, Waits


def _place(cluster: Cluster, member: Member) -> Decision:
    """Place the job on the first free nodes by name."""
    placed = on_free_nodes(cluster, member)
    return placed or Waits(f"isolated: needs {alone_takes(cluster, member)}")


isolated = Placement(_place)
