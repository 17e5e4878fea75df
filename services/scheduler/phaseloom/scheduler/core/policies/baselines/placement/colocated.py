"""Monolithic nodes: a job alone on nodes that do everything for it (WEAVE §6.1, veRL).

Its samplers and trainers take turns on the same nodes of one pool, so such a job declares all of
its deployments on that pool (`train`), and its phases as they take there: an iteration is 0.934 to
1.089 of the disaggregated one (WEAVE, Table 4). A job that declares several pools gets nodes of
each, as under `solo`: placement never moves a deployment to another pool than its owner's.
"""

from __future__ import annotations

from phaseloom.scheduler.core.planning.nodes import alone_takes
from phaseloom.scheduler.core.planning.weave.pool import fresh
from phaseloom.scheduler.core.state.cluster import Cluster, Decision, Member, Placement, Waits


def _place(cluster: Cluster, member: Member) -> Decision:
    pools = " and ".join(member.needs)
    alone = fresh(cluster, member, f"alone, all of it on nodes of pool {pools}")
    return alone or Waits(f"it takes {alone_takes(cluster, member)}")


colocated = Placement(_place)
