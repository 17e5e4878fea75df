"""`spread`, but a job that fits now overtakes all waiting jobs (PlexRL §6.3, as printed)."""

from __future__ import annotations

from phaseloom.scheduler.core.planning.sharing.choice import join_or_open
from phaseloom.scheduler.core.state.cluster import Cluster, Decision, Member, Placement


def _place(cluster: Cluster, member: Member) -> Decision:
    return join_or_open(cluster, member, "backfill_greedy", most_first=False)


backfill_greedy = Placement(_place, may_overtake=True)
