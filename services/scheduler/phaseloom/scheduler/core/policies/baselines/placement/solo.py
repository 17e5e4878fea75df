"""Every job on nodes of its own in every pool: plain disaggregation (WEAVE §6.1, *Solo-D*).

The yardstick for slowdowns, and the dearest. Pure; cost: a look at the free nodes.
"""

from __future__ import annotations

from phaseloom.scheduler.core.planning.nodes import alone_takes
from phaseloom.scheduler.core.planning.weave.pool import fresh
from phaseloom.scheduler.core.state.cluster import Cluster, Decision, Member, Placement, Waits


def _place(cluster: Cluster, member: Member) -> Decision:
    alone = fresh(cluster, member, "alone, on nodes of its own")
    return alone or Waits(f"it takes {alone_takes(cluster, member)}")


solo = Placement(_place)
