"""Groups and nodes that could take a job, and explanations, with numbers, if there are none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from math import inf
from typing import NamedTuple

from phaseloom.common.contract.ids import NodeId
from phaseloom.scheduler.core.planning.nodes import alone_takes, other_jobs, own_nodes, with_room
from phaseloom.scheduler.core.planning.weave.period import (
    ROLLOUT,
    TRAIN,
    period_s,
    phases,
    timing_of,
)
from phaseloom.scheduler.core.state.cluster import Cluster, Group, Member, Need, Placed, Pool

NO_NEED = Need(num_nodes=0)


def need_of(member: Member, pool: Pool) -> Need:
    return member.needs.get(pool, NO_NEED)


def price_per_hour(cluster: Cluster, nodes: Iterable[NodeId]) -> float:
    return sum(cluster.hosts[node].price_per_hour for node in nodes)


def fresh(cluster: Cluster, member: Member, reason: str = "") -> Placed | None:
    """Place a job alone in a new group. None if too few nodes are free."""
    nodes = own_nodes(cluster, member)
    return None if nodes is None else Placed("", nodes, reason)


def trains_on(cluster: Cluster, group: Group, member: Member) -> list[NodeId] | None:
    """Train nodes of the group, all of which every member uses. None if the job cannot use them.

    WEAVE scales a job's data-parallel degree to the group's train pool (footnotes 2, 3). Here a job
    declares its number of nodes, so only groups of that size are candidates.
    """
    need = need_of(member, TRAIN)
    nodes = group.nodes.get(TRAIN, [])
    is_possible = len(nodes) == need.num_nodes and nodes == with_room(cluster, group, TRAIN, need)
    return nodes if is_possible else None


def rolls_on(cluster: Cluster, group: Group, member: Member) -> list[NodeId]:
    """Rollout nodes of the group with room for the job."""
    return with_room(cluster, group, ROLLOUT, need_of(member, ROLLOUT))


def has_promise(group: Group) -> bool:
    """Whether any member of the group has an SLO."""
    return any(member.slo > 0 for member in group.members.values())


def share_blindly(cluster: Cluster, member: Member) -> Placed | None:
    """Place a job of unknown cycle in the group with the fewest jobs.

    Only groups without SLOs qualify, so no SLO can be violated. None if the job itself has an SLO
    or no such group has room.
    """
    if member.slo > 0:
        return None
    best: tuple[int, Placed] | None = None
    for group, rolls, trains in groups_with_room(cluster, member):
        size = len(group.members)
        if has_promise(group) or (best is not None and best[0] <= size):
            continue
        users = Counter(
            node for user in group.members.values() for node in user.nodes.get(ROLLOUT, ())
        )
        count = need_of(member, ROLLOUT).num_nodes
        chosen = sorted(rolls, key=lambda node: users[node])[:count]
        reason = f"shares with {other_jobs(size)} while its cycle is unknown"
        best = size, Placed(group.name, pinned(chosen, trains), reason)
    return best[1] if best is not None else None


class GroupRoom(NamedTuple):
    """A group that can take one more job, with its nodes that have enough memory left for that
    job."""

    group: Group
    rolls: list[NodeId]
    trains: list[NodeId]


def groups_with_room(cluster: Cluster, member: Member) -> Iterator[GroupRoom]:
    """Yield the groups that have room for a job by size and memory, in order of creation."""
    full = cluster.limits.max_group_jobs
    for group in cluster.groups.values():
        if group.is_closed or len(group.members) >= full:
            continue
        trains = trains_on(cluster, group, member)
        rolls = rolls_on(cluster, group, member)
        if trains is not None and len(rolls) >= need_of(member, ROLLOUT).num_nodes:
            yield GroupRoom(group, rolls, trains)


def pinned(rolls: Iterable[NodeId], trains: Iterable[NodeId]) -> dict[Pool, list[NodeId]]:
    """Nodes by pool, omitting pools that the job does not use."""
    nodes = {ROLLOUT: list(rolls), TRAIN: list(trains)}
    return {pool: names for pool, names in nodes.items() if names}


def no_place(cluster: Cluster, member: Member) -> str:
    """Explain why a job cannot be placed: what sharing would take, and what running alone would
    take."""
    return f"{_sharing(cluster, member)}; running alone needs {alone_takes(cluster, member)}"


def _sharing(cluster: Cluster, member: Member) -> str:
    if member.cycle is None:
        return "its cycle is unknown, so its effect on other jobs cannot be predicted"
    best_s, allowed_s, strictest = inf, 0.0, member
    for group in cluster.groups.values():
        settled_s = _settled_s(cluster, group, member)
        if settled_s is not None and settled_s < best_s:
            strictest = min((*group.members.values(), member), key=lambda m: timing_of(m).allowed_s)
            best_s, allowed_s = settled_s, timing_of(strictest).allowed_s
    if best_s == inf:
        return "no group has enough nodes and host memory for one more job"
    # Do not name the job: it may be another tenant's.
    owner = "this job" if strictest is member else "another job"
    allowed = f"{allowed_s:.1f} s are allowed (SLO {strictest.slo:g} of {owner})"
    if best_s > allowed_s:
        return f"in the best group an iteration would take {best_s:.1f} s, but only {allowed}"
    return (
        f"in the best group an iteration would take {best_s:.1f} s, and {allowed}, but the group "
        "has no slack for a job that joins midway"
    )


def _settled_s(cluster: Cluster, group: Group, member: Member) -> float | None:
    """Period with the job on the group's first nodes with room. None if it does not fit."""
    full = len(group.members) >= cluster.limits.max_group_jobs
    if group.is_closed or full or trains_on(cluster, group, member) is None:
        return None
    rolls = rolls_on(cluster, group, member)
    count = need_of(member, ROLLOUT).num_nodes
    if len(rolls) < count:
        return None
    members = group.members.values()
    everybody = [(timing_of(m), tuple(m.nodes.get(ROLLOUT, ()))) for m in members]
    joined = (*everybody, (timing_of(member), tuple(rolls[:count])))
    return period_s(phases(joined, cluster.limits.switch_s))
