"""Monolithic nodes: each job has its own nodes, which run all of its phases (WEAVE §6.1, veRL).

Samplers and trainers take turns on the same nodes, so the job declares all of its deployments, with
their durations on those nodes, on one pool (`train`). An iteration then takes 0.934 to 1.089 times
as long as a disaggregated one (WEAVE, Table 4). A job that declares several pools gets nodes of
each pool, as under `solo`, because placement never moves a deployment to a pool that its owner did
not choose.
"""

from __future__ import annotations

from phaseloom.scheduler.core.planning.nodes import alone_takes
from phaseloom.scheduler.core.planning.weave.pool import fresh
from phaseloom.scheduler.core.state.cluster import Cluster, Decision, Member, Placement, Waits


def _place(cluster: Cluster, member: Member) -> Decision:
    pools = " and ".join(member.needs)
    alone = fresh(cluster, member, f"alone, with all phases on nodes of pool {pools}")
    return alone or Waits(f"needs {alone_takes(cluster, member)}")


colocated = Placement(_place)
