"""A reservation for the job at the head of the queue (EASY backfill).

The head's earliest possible start follows from the latest end of the jobs before it. A later job
may overtake only if it leaves that start unchanged. A job without a known end is assumed never to
end; if the head's start depends on such a job, there is no start to protect.

Cost: reads every member, and the cycles of the groups that would be free first.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import msgspec

from phaseloom.common.contract.ids import NodeId
from phaseloom.scheduler.core.planning.nodes import Pinned, free_nodes, is_usable
from phaseloom.scheduler.core.planning.sharing.sites import (
    longest_wait,
    site_in,
    sites_in,
)
from phaseloom.scheduler.core.state.cluster import Cluster, Group, Member, Need, Pool


class Reservation:
    """The reservation of the oldest waiting job (the head) against a later job."""

    def __init__(self, cluster: Cluster, member: Member) -> None:
        self._cluster = cluster
        self._member = member
        head = cluster.waiting[0] if cluster.waiting else None
        self._head = None if head is None or head.job == member.job else head
        self._start_s: float | None = None
        """The head's earliest start, computed on first use."""

    def allows(self, group: str, nodes: Pinned) -> bool:
        """Whether the head starts no later if the other job is placed like this."""
        if self._head is None:
            return True
        if self._start_s is None:
            self._start_s = earliest_start(self._cluster, self._head)
        if _end_s(self._member) <= self._start_s:
            return True
        with_it = _with(self._cluster, self._member, group, nodes)
        return earliest_start(with_it, self._head) <= self._start_s


def earliest_start(cluster: Cluster, head: Member) -> float:
    """Latest time at which the head can be placed, if no other jobs come.

    The head is placed on nodes of its own, or in a group from which some jobs have gone. All jobs
    are assumed to end as late as they may.
    """
    own_s = _own_start(cluster, head)
    by_time = sorted(
        (at_s, i, num_ended, group)
        for i, group in enumerate(cluster.groups.values())
        for at_s, num_ended in _openings(cluster, group)
        if at_s < own_s
    )
    for at_s, _, num_ended, group in by_time:
        if _takes(cluster, group, num_ended, head):
            return at_s
    return own_s


def _with(cluster: Cluster, member: Member, name: str, pinned: Pinned) -> Cluster:
    """Return the cluster with one more job. Unchanged parts are shared."""
    joined = msgspec.structs.replace(member, nodes=pinned)
    group = cluster.groups.get(name, Group(name))
    nodes = dict(group.nodes)
    free = dict(cluster.free)
    for pool, names in pinned.items():
        present = nodes.get(pool, [])
        nodes[pool] = present + [name for name in names if name not in present]
        free[pool] = [name for name in free.get(pool, []) if name not in names]
    members = {**group.members, member.job: joined}
    grown = msgspec.structs.replace(group, members=members, nodes=nodes)
    return msgspec.structs.replace(cluster, groups={**cluster.groups, name: grown}, free=free)


def _own_start(cluster: Cluster, head: Member) -> float:
    """Time at which enough nodes of every pool will be free."""
    until_s: dict[NodeId, float] = {}
    for group in cluster.groups.values():
        for member in group.members.values():
            for names in member.nodes.values():
                for name in names:
                    until_s[name] = max(until_s.get(name, 0.0), _end_s(member))
    starts_s = [cluster.now_s]
    for pool, need in head.needs.items():
        missing = need.num_nodes - len(free_nodes(cluster, pool, need, need.num_nodes))
        if missing > 0:
            frees_s = sorted(_frees(cluster, pool, need, until_s))
            starts_s.append(frees_s[missing - 1] if len(frees_s) >= missing else inf)
    return max(starts_s)


def _frees(
    cluster: Cluster, pool: Pool, need: Need, until_s: dict[NodeId, float]
) -> Iterator[float]:
    """Yield the times at which the used nodes of a pool become free."""
    for name, at_s in until_s.items():
        host = cluster.hosts[name]
        if host.pool == pool and is_usable(host, need):
            yield at_s


def _openings(cluster: Cluster, group: Group) -> Iterator[tuple[float, int]]:
    """Yield (time, number of ended jobs) of a group with room, as its jobs end one by one.

    After its last job the group is gone: its nodes then count as free nodes.
    """
    if group.is_closed:
        return
    ends_s = sorted(_end_s(member) for member in group.members.values())
    for num_ended in range(len(ends_s)):
        if len(ends_s) - num_ended < cluster.limits.max_group_jobs:
            yield (
                (max(cluster.now_s, ends_s[num_ended - 1]) if num_ended else cluster.now_s),
                num_ended,
            )


def _takes(cluster: Cluster, group: Group, num_ended: int, head: Member) -> bool:
    """Whether the head fits next to the group's remaining jobs, on their nodes and the currently
    free ones."""
    ended = {member.job for member in sorted(group.members.values(), key=_end_s)[:num_ended]}
    remaining = {job: member for job, member in group.members.items() if job not in ended}
    nodes: dict[Pool, list[NodeId]] = {}
    for pool, names in group.nodes.items():
        used = {name for member in remaining.values() for name in member.nodes.get(pool, ())}
        nodes[pool] = [name for name in names if name in used]
    shrunk = msgspec.structs.replace(group, members=remaining, nodes=nodes)
    site = site_in(cluster, shrunk, head)
    return site is not None and any(
        longest_wait(cluster.limits, candidate, head, 0.0)[1]
        for candidate in sites_in(cluster, shrunk, head, site)
    )


def _end_s(member: Member) -> float:
    return member.ends_s or inf
