"""Shares of time for whole jobs, phases not interleaved (WEAVE §6.1, *Gavel+*).

Read so: a job is the atomic unit. Jobs of a group take turns on all of its nodes, one whole job at
a time, so what a job needs is a share of the group's time: 1/SLO of it to be no slower than its
SLO allows. Jobs share a group while their shares add up to one at most; a best-effort job asks for
as much as an equal part of the largest group. Beside a job of tight SLO (below 2) nobody of tight
SLO fits, which is what the paper's comparison shows: without interleaving there is little to gain.
Gavel's choice of accelerator types has no part here, since a job declares its pools. To be run
with `fifo_lock`.
"""

from __future__ import annotations

from phaseloom.scheduler.core.planning.nodes import alone_takes
from phaseloom.scheduler.core.planning.weave.period import ROLLOUT
from phaseloom.scheduler.core.planning.weave.pool import fresh, need_of, pinned, rooms
from phaseloom.scheduler.core.state.cluster import (
    Cluster,
    Decision,
    Limits,
    Member,
    Placed,
    Placement,
    Waits,
)


def share(member: Member, limits: Limits) -> float:
    """Share of a group's time that a job asks for."""
    return 1.0 / member.slo if member.slo > 0 else 1.0 / max(1, limits.max_group_jobs)


def _place(cluster: Cluster, member: Member) -> Decision:
    own = share(member, cluster.limits)
    least = 1.0
    for room in rooms(cluster, member):
        taken = sum(share(other, cluster.limits) for other in room.group.members.values())
        if taken + own <= 1.0 + 1e-9:
            rolls = room.rolls[: need_of(member, ROLLOUT).num_nodes]
            why = f"{own:.0%} of a group's time, {taken:.0%} being taken"
            return Placed(room.group.name, pinned(rolls, room.trains), why)
        least = min(least, taken)
    alone = fresh(cluster, member, "alone, on nodes of its own")
    return alone or Waits(
        f"it needs {own:.0%} of a group's time, of which {least:.0%} at least are taken; alone it "
        f"takes {alone_takes(cluster, member)}"
    )


gavel = Placement(_place)
