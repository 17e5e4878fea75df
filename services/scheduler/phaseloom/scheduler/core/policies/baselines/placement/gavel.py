"""Time shares for whole jobs, without interleaving their phases (WEAVE §6.1, *Gavel+*).

The job is the unit of scheduling: the jobs of a group take turns on all of its nodes, one whole job
at a time. To keep within its SLO, a job needs 1/SLO of the group's time. Jobs share a group while
their shares add up to at most 1. A best-effort job requests an equal part of the largest allowed
group. Two jobs with tight SLOs (below 2) never fit together, which is the point of the paper's
comparison: without interleaving there is little to gain.

Gavel's choice of accelerator types is omitted, because jobs declare their pools. Use it together
with `fifo_lock`.
"""

from __future__ import annotations

from phaseloom.scheduler.core.planning.nodes import alone_takes
from phaseloom.scheduler.core.planning.weave.period import ROLLOUT
from phaseloom.scheduler.core.planning.weave.pool import fresh, groups_with_room, need_of, pinned
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
    """Share of a group's time that a job requests."""
    return 1.0 / member.slo if member.slo > 0 else 1.0 / max(1, limits.max_group_jobs)


def _place(cluster: Cluster, member: Member) -> Decision:
    own_share = share(member, cluster.limits)
    least_taken = 1.0
    for room in groups_with_room(cluster, member):
        taken_share = sum(
            share(neighbour, cluster.limits) for neighbour in room.group.members.values()
        )
        if taken_share + own_share <= 1.0 + 1e-9:
            rolls = room.rolls[: need_of(member, ROLLOUT).num_nodes]
            reason = (
                f"gets {own_share:.0%} of the group's time; its other jobs have {taken_share:.0%}"
            )
            return Placed(room.group.name, pinned(rolls, room.trains), reason)
        least_taken = min(least_taken, taken_share)
    alone = fresh(cluster, member, "alone on its own nodes")
    return alone or Waits(
        f"needs {own_share:.0%} of a group's time, but at least {least_taken:.0%} are taken in "
        f"every group; running alone needs {alone_takes(cluster, member)}"
    )


gavel = Placement(_place)
