"""Every job on its own nodes in every pool: plain disaggregation (WEAVE §6.1, *Solo-D*).

The reference for slowdowns, and the most expensive policy. Pure; it only reads the free nodes.
"""

from __future__ import annotations

from phaseloom.scheduler.core.planning.nodes import alone_takes
from phaseloom.scheduler.core.planning.weave.pool import fresh
from phaseloom.scheduler.core.state.cluster import Cluster, Decision, Member, Placement, Waits


def _place(cluster: Cluster, member: Member) -> Decision:
    alone = fresh(cluster, member, "alone on its own nodes")
    return alone or Waits(f"needs {alone_takes(cluster, member)}")


solo = Placement(_place)
