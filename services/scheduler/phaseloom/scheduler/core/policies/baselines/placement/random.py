"""A random choice between the groups with room and new nodes, regardless of SLOs (WEAVE §6.5).

A baseline. The core has no random numbers: the choice is a hash of the job's name and the total
number of groups ever created. Replaying the log therefore repeats it.
"""

from __future__ import annotations

from zlib import crc32

from phaseloom.common.contract.ids import NodeId
from phaseloom.scheduler.core.planning.nodes import alone_takes
from phaseloom.scheduler.core.planning.weave.period import ROLLOUT
from phaseloom.scheduler.core.planning.weave.pool import fresh, groups_with_room, need_of, pinned
from phaseloom.scheduler.core.state.cluster import (
    Cluster,
    Decision,
    Member,
    Placed,
    Placement,
    Waits,
)


def _place(cluster: Cluster, member: Member) -> Decision:
    alone = fresh(cluster, member, "alone on its own nodes by random choice")
    options_with_room = list(groups_with_room(cluster, member))
    num_options = len(options_with_room) + (alone is not None)
    if not num_options:
        takes = alone_takes(cluster, member)
        return Waits(f"no group has room, and running alone needs {takes}")
    number = crc32(f"{member.job}/{cluster.num_groups}".encode())
    chosen = number % num_options
    if chosen == len(options_with_room):
        assert alone is not None
        return alone
    room = options_with_room[chosen]

    def rank(node: NodeId) -> tuple[int, str]:
        return crc32(f"{member.job}/{node}".encode()), node

    rolls = sorted(room.rolls, key=rank)[: need_of(member, ROLLOUT).num_nodes]
    reason = f"random choice among {num_options} options"
    return Placed(room.group.name, pinned(rolls, room.trains), reason)


random = Placement(_place)
