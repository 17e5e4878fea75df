"""`spread` with backfill: a job may overtake waiting jobs if it does not delay the first of them.

PlexRL §6.3 backfills without protecting the job at the head of the queue. A stream of small jobs
can then keep a large one waiting forever (`backfill_greedy`). Here the head has a reservation.
"""

from __future__ import annotations

from phaseloom.scheduler.core.planning.sharing.backfill import Reservation
from phaseloom.scheduler.core.planning.sharing.choice import join_or_open
from phaseloom.scheduler.core.state.cluster import Cluster, Decision, Member, Placement


def _place(cluster: Cluster, member: Member) -> Decision:
    accepts = Reservation(cluster, member).allows
    return join_or_open(cluster, member, "spread_backfill", most_first=False, accepts=accepts)


spread_backfill = Placement(_place, may_overtake=True)
