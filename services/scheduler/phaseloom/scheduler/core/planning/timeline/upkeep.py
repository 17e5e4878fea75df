"""The timeline of a cluster, as its members' nodes and cycles make it.

It is derived: kept in the cluster's `__dict__`, which no snapshot holds, and brought up to date
before each use by comparing it with the groups, whose versions tell which of them changed. So a
cluster that was restored, or copied, answers as the one that went on, and nobody has to tell the
timeline what happened.

Cost: a dictionary look-up a host and a group; a reservation for each member that changed.
"""

from __future__ import annotations

import msgspec

from phaseloom.common.contract.ids import NodeId
from phaseloom.common.contract.specs import Cycle
from phaseloom.scheduler.core.planning.timeline.timeline import Timeline
from phaseloom.scheduler.core.state.cluster import Cluster, Group, Limits, Member, Pool

_KEY = "timeline"
_Mark = tuple[dict[Pool, list[NodeId]], Cycle | None, float]
"""What a member's reservation follows from."""


def of(cluster: Cluster) -> Timeline:
    """Mutates nothing that a policy sees."""
    kept = cluster.__dict__.get(_KEY)
    if kept is None:
        kept = cluster.__dict__[_KEY] = _Kept()
    kept.follow(cluster)
    timeline: Timeline = kept.timeline
    return timeline


def has_room(group: Group, limits: Limits) -> bool:
    """Whether it takes another job, as far as numbers go."""
    return not group.is_closed and len(group.members) < limits.max_group_jobs


class _Laid(msgspec.Struct):
    """A group, as the timeline has it."""

    version: int = -1
    members: dict[str, _Mark] = {}
    closed: list[NodeId] = []
    """Of its nodes, while it takes no further job."""


class _Kept:
    """A timeline, and what it was made from."""

    def __init__(self) -> None:
        self.timeline = Timeline({})
        self._hosts: dict[NodeId, Pool] = {}
        self._laid: dict[str, _Laid] = {}

    def follow(self, cluster: Cluster) -> None:
        """First all that is gone is given up, then what is new is taken: a job or a node may have
        gone from one group to another."""
        hosts = {node: host.pool for node, host in cluster.hosts.items() if host.is_up}
        changed = self._changed(hosts)
        for name, laid in list(self._laid.items()):
            group = cluster.groups.get(name)
            if group is None or laid.version != group.version or changed:
                self._give_up(laid, group, changed)
            if group is None:
                del self._laid[name]
        for node in changed:
            self._follow_host(node, hosts)
        self._hosts = hosts
        for name, group in cluster.groups.items():
            self._lay(self._laid.setdefault(name, _Laid()), group, cluster.limits)

    def _changed(self, hosts: dict[NodeId, Pool]) -> set[NodeId]:
        """Nodes that came, went, or are of another pool now."""
        if hosts == self._hosts:
            return set()
        return {node for node, _ in hosts.items() ^ self._hosts.items()}

    def _give_up(self, laid: _Laid, group: Group | None, changed: set[NodeId]) -> None:
        members = {} if group is None else group.members
        for job, mark in list(laid.members.items()):
            member = members.get(job)
            if member is None or not _is_as(member, mark) or _is_on(mark, changed):
                del laid.members[job]
                self.timeline.release(job)
        for node in laid.closed:
            self.timeline.set_open(node, True)
        laid.closed = []
        laid.version = -1

    def _follow_host(self, node: NodeId, hosts: dict[NodeId, Pool]) -> None:
        if node in self._hosts:
            self.timeline.remove_node(node)
        if node in hosts:
            self.timeline.add_node(node, hosts[node])

    def _lay(self, laid: _Laid, group: Group, limits: Limits) -> None:
        has_changed = laid.version != group.version
        if has_changed:
            for job, member in group.members.items():
                if job not in laid.members:
                    self._reserve(laid, job, member)
            laid.version = group.version
        takes_more = has_room(group, limits)
        if has_changed or takes_more == bool(laid.closed):
            self._set_open(laid, group, takes_more)

    def _reserve(self, laid: _Laid, job: str, member: Member) -> None:
        """A job without a known cycle is busy nowhere: nobody can tell when it will be."""
        kept = {pool: list(nodes) for pool, nodes in member.nodes.items()}
        laid.members[job] = (kept, member.cycle, member.began_s)
        cycle = member.cycle or Cycle(float(self.timeline.num_slots), [])
        up = {pool: [n for n in nodes if n in self._hosts] for pool, nodes in kept.items()}
        demand = self.timeline.demand(cycle)
        self.timeline.reserve(job, up, demand, int(member.began_s), may_overlap=True)

    def _set_open(self, laid: _Laid, group: Group, is_open: bool) -> None:
        nodes = [n for names in group.nodes.values() for n in names if n in self._hosts]
        for node in nodes:
            self.timeline.set_open(node, is_open)
        laid.closed = [] if is_open else nodes


def _is_as(member: Member, mark: _Mark) -> bool:
    nodes, cycle, began_s = mark
    return member.cycle is cycle and member.began_s == began_s and member.nodes == nodes


def _is_on(mark: _Mark, nodes: set[NodeId]) -> bool:
    return bool(nodes) and any(node in nodes for names in mark[0].values() for node in names)
