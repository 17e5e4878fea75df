"""The group with the most idle time, regardless of SLOs (WEAVE §6.5, *Greedy*).

A baseline. Within the group it takes the most idle rollout nodes, and it opens a new group only if
no existing one has room. Idle is the share of node time not spent on any phase in a settled
meta-iteration.
"""

from __future__ import annotations

from phaseloom.scheduler.core.planning.nodes import alone_takes
from phaseloom.scheduler.core.planning.weave.period import ROLLOUT, TRAIN, group_phases, period_s
from phaseloom.scheduler.core.planning.weave.pool import fresh, groups_with_room, need_of, pinned
from phaseloom.scheduler.core.state.cluster import (
    Cluster,
    Decision,
    Group,
    Member,
    Placed,
    Placement,
    Waits,
)


def idle_share(group: Group, switch_s: float) -> float:
    """Idle share of a group's node time, from 0 to 1. It is 1 if no phase is known."""
    jobs = group_phases(group, switch_s)
    settled_s = period_s(jobs)
    nodes = len(group.nodes.get(ROLLOUT, ())) + len(group.nodes.get(TRAIN, ()))
    if not settled_s or not nodes:
        return 1.0
    trains = len(group.nodes.get(TRAIN, ()))
    busy_s = sum(job.rollout_s * len(job.nodes) + job.train_s * trains for job in jobs)
    return 1.0 - busy_s / (settled_s * nodes)


def _place(cluster: Cluster, member: Member) -> Decision:
    switch_s = cluster.limits.switch_s
    # `min` keeps the first of equals: the group that was made first.
    room = min(
        groups_with_room(cluster, member),
        key=lambda r: -idle_share(r.group, switch_s),
        default=None,
    )
    if room is None:
        alone = fresh(cluster, member, "alone on its own nodes: no group has room")
        return alone or Waits(
            f"no group has room, and running alone needs {alone_takes(cluster, member)}"
        )
    busy: dict[str, float] = {}
    for job in group_phases(room.group, switch_s):
        for node in job.nodes:
            busy[node] = busy.get(node, 0.0) + job.rollout_s
    ranked = sorted(room.rolls, key=lambda node: busy.get(node, 0.0))
    rolls = ranked[: need_of(member, ROLLOUT).num_nodes]
    idle = idle_share(room.group, switch_s)
    reason = f"in the group with the most idle time, {idle:.0%} of its node time"
    return Placed(room.group.name, pinned(rolls, room.trains), reason)


most_idle = Placement(_place)
