"""Free nodes first, then the group with the fewest jobs, then the lowest duty (PlexRL §6.3).

First come, first served: no job overtakes a waiting one.
"""

from __future__ import annotations

from phaseloom.scheduler.core.planning.sharing.choice import join_or_open
from phaseloom.scheduler.core.state.cluster import Cluster, Decision, Member, Placement


def _place(cluster: Cluster, member: Member) -> Decision:
    return join_or_open(cluster, member, "spread", most_first=False)


spread = Placement(_place)
