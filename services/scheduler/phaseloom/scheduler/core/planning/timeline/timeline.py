"""The timeline: which nodes are busy when, on the ring of coming time (PlexRL §4.3.1, §5.2.1).

It has two levels: for each pool the number of nodes that are free and open in each slot (a segment
tree), for each node its free ranges. A job's footprint lies on every period of the ring from the
moment it is reserved. Nodes that take no further job count as no capacity: nothing is looked for on
them.

Everything here follows from the groups of a cluster: which job is on which node, and when its cycle
began. So it is kept beside the scheduler's state, not in it: in the cluster's `__dict__`, which no
snapshot holds, and `timeline_of` brings it up to date before each use by comparing it with the
groups, whose versions tell which of them changed. A cluster that was restored, or copied, answers
as the one that went on, and nobody has to tell the timeline what happened.

Deviation: PlexRL reserves free time only. Jobs that no shift fits may share nodes all the same, up
to the duty limit (its §4.4: strict non-overlap is infeasible), so that a slot can be several jobs';
it is free again when the last of them has gone.

Cost: a reservation takes O(P log M) a node and O(P log L) a pool, of P periods on the ring;
`timeline_of` a dictionary look-up a host and a group, and a reservation for each member that
changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from phaseloom.common.contract.ids import NodeId
from phaseloom.common.contract.specs import Cycle
from phaseloom.scheduler.core.planning.timeline.ring import (
    HORIZON_SLOTS,
    FreeRanges,
    Range,
    common,
    footprint,
    in_slots,
    merged,
    minus,
    overlap,
    starts,
)
from phaseloom.scheduler.core.planning.timeline.segment_tree import SegmentTree
from phaseloom.scheduler.core.state.cluster import Cluster, Group, Limits, Member, Pool

Nodes = Mapping[Pool, Sequence[NodeId]]

SHORTEST_PERIOD_S = 20.0
"""Shorter cycles have no footprint, because slots of a second are too coarse for them; only the
duty bound limits them."""


class Demand(msgspec.Struct, frozen=True):
    """A cycle in slots."""

    period: int
    period_starts: list[int]
    """Slots in which periods begin on the ring, counted from the cycle's beginning."""
    segments: dict[Pool, list[tuple[int, int]]]
    """(offset, length) of each segment, by pool."""


class Search(msgspec.Struct):
    """How much of the search for free time the tree spared."""

    looked_at: int = 0
    """Shifts of a job on a set of nodes."""
    pruned: int = 0
    """Shifts that the tree refused before any node was looked at."""


class _Track(msgspec.Struct):
    """One node's time."""

    pool: Pool
    free: FreeRanges
    held: dict[str, list[Range]] = {}
    """Footprint of each job."""
    is_open: bool = True


class Timeline:
    def __init__(
        self,
        nodes: Mapping[NodeId, Pool],
        num_slots: int = HORIZON_SLOTS,
        shortest_s: float = SHORTEST_PERIOD_S,
    ) -> None:
        self.num_slots = num_slots
        self._shortest_s = shortest_s
        self.search = Search()
        self._tracks: dict[NodeId, _Track] = {}
        self._on: dict[str, Nodes] = {}
        self._trees: dict[Pool, SegmentTree] = {}
        self._pending: dict[Pool, dict[int, int]] = {}
        """By pool, changes that the trees do not have yet, as steps at a slot. Many nodes often
        change alike, and ranges that touch become one."""
        for node, pool in nodes.items():
            self.add_node(node, pool)

    def add_node(self, node: NodeId, pool: Pool) -> None:
        assert node not in self._tracks, node
        self._tracks[node] = _Track(pool, FreeRanges(self.num_slots))
        self._change(pool, [(0, self.num_slots)], 1)

    def remove_node(self, node: NodeId) -> None:
        """Forget a node and what is reserved on it."""
        track = self._tracks.pop(node)
        if track.is_open:
            self._change(track.pool, track.free.ranges(), -1)

    def set_open(self, node: NodeId, is_open: bool) -> None:
        """Set whether a node takes further jobs."""
        track = self._tracks[node]
        if track.is_open != is_open:
            track.is_open = is_open
            self._change(track.pool, track.free.ranges(), 1 if is_open else -1)

    def demand(self, cycle: Cycle) -> Demand:
        """A cycle in slots; without segments where it is too short for them."""
        if cycle.period_s < self._shortest_s:
            return Demand(self.num_slots, [0], {})
        pools = dict.fromkeys(segment.pool for segment in cycle.segments)
        segments = {
            pool: in_slots((s.offset_s, s.duration_s) for s in cycle.segments if s.pool == pool)
            for pool in pools
        }
        period_starts = starts(cycle.period_s, self.num_slots)
        return Demand(self.num_slots // len(period_starts), period_starts, segments)

    def reserve(
        self, job: str, nodes: Nodes, demand: Demand, origin: int, may_overlap: bool = False
    ) -> bool:
        """Take a job's footprint on these nodes, in every period at once: all of it, or nothing.

        Args:    origin: the slot in which the job's cycle begins.
        Returns: False where some of it is taken and it may not overlap: nothing has changed then.
        """
        assert job not in self._on, job
        busy = {pool: self._footprint(demand, pool, origin) for pool in nodes}
        if not may_overlap and not all(
            self._tracks[node].free.holds(start, end)
            for pool, names in nodes.items()
            for node in names
            for start, end in busy[pool]
        ):
            return False
        for pool, names in nodes.items():
            for node in names:
                self._take(self._tracks[node], job, busy[pool])
        self._on[job] = {pool: tuple(names) for pool, names in nodes.items()}
        return True

    def release(self, job: str) -> None:
        """Give back all that a job has reserved."""
        for names in self._on.pop(job).values():
            for node in names:
                track = self._tracks.get(node)
                if track is not None:
                    self._give(track, job)

    def find_shift(self, nodes: Nodes, demand: Demand, origin: int, limit: int) -> int | None:
        """The smallest shift, in slots up to `limit`, at which a demand fits in every period.

        The first period's segments propose shifts, and the tree refuses those that cannot be. Only
        then are the nodes' free ranges gone through for all periods.
        """
        free = {pool: self._common(names) for pool, names in nodes.items()}
        first = [
            (origin + offset, length, free[pool].first_fit)
            for pool in nodes
            for offset, length in demand.segments.get(pool, [])
        ]
        every = [
            (start + at, length, first_fit)
            for start in demand.period_starts
            for at, length, first_fit in first
        ]
        shift: int | None = 0
        while shift is not None and shift <= limit:
            self.search.looked_at += 1
            if not self._may_fit(nodes, demand, origin + shift):
                self.search.pruned += 1
                shift = self._next(nodes, free, demand, origin, shift)
                continue
            lasts = smallest_shift(first, limit, shift)
            if lasts == shift:
                lasts = smallest_shift(every, limit, shift)
                if lasts == shift:
                    return shift
            shift = lasts
        return None

    def overlap_share(self, nodes: Nodes, demand: Demand, origin: int) -> float:
        """Share of all time in which a demand and another job are busy on one of these nodes.

        Shares of several pools are summed. This is the predicted interference (PlexRL §4.3.2).
        """
        total = 0
        for pool, names in nodes.items():
            held = (self._tracks[node].held.values() for node in names)
            busy = merged(r for footprints in held for ranges in footprints for r in ranges)
            total += overlap(self._footprint(demand, pool, origin), busy)
        return total / self.num_slots

    def num_free(self, pool: Pool, start: int, length: int) -> int:
        """The fewest nodes of a pool that are free and open in any of these slots."""
        tree = self._tree(pool)
        return 0 if tree is None else tree.minimum(start, length)

    def capacity(self, pool: Pool) -> list[int]:
        """Number of nodes that are free and open, for every slot. Cost: O(L)."""
        tree = self._tree(pool)
        return [0] * self.num_slots if tree is None else tree.values()

    def _may_fit(self, nodes: Nodes, demand: Demand, origin: int) -> bool:
        """Whether the pools have enough nodes free in the first period, even if others than
        asked."""
        return all(
            self.num_free(pool, origin + offset, length) >= len(names)
            for pool, names in nodes.items()
            for offset, length in demand.segments.get(pool, [])
        )

    def _next(
        self,
        nodes: Nodes,
        free: Mapping[Pool, FreeRanges],
        demand: Demand,
        origin: int,
        shift: int,
    ) -> int | None:
        """The next shift that brings a segment to the start of a free range."""
        found = (
            (free[pool].next_start(origin + offset + shift), origin + offset)
            for pool in nodes
            for offset, _ in demand.segments.get(pool, [])
        )
        return min((place - at for place, at in found if place is not None), default=None)

    def _common(self, names: Sequence[NodeId]) -> FreeRanges:
        """Time that is free on all nodes; nodes with the same jobs are looked at once."""
        different = {tuple(self._tracks[node].held): self._tracks[node].free for node in names}
        if len(different) == 1:
            return next(iter(different.values()))
        return common(different.values(), self.num_slots)

    def _footprint(self, demand: Demand, pool: Pool, origin: int) -> list[Range]:
        segments = demand.segments.get(pool, [])
        return footprint(segments, demand.period_starts, origin, self.num_slots)

    def _take(self, track: _Track, job: str, busy: list[Range]) -> None:
        track.held[job] = busy
        taken = [part for start, end in busy for part in track.free.take(start, end)]
        if track.is_open:
            self._change(track.pool, taken, -1)

    def _give(self, track: _Track, job: str) -> None:
        busy = track.held.pop(job)
        others = merged(part for ranges in track.held.values() for part in ranges)
        freed = minus(busy, others)
        for start, end in freed:
            track.free.give(start, end)
        if track.is_open:
            self._change(track.pool, freed, 1)

    def _change(self, pool: Pool, ranges: Iterable[Range], amount: int) -> None:
        steps = self._pending.setdefault(pool, {})
        for start, end in ranges:
            steps[start] = steps.get(start, 0) + amount
            steps[end] = steps.get(end, 0) - amount

    def _tree(self, pool: Pool) -> SegmentTree | None:
        """A pool's tree with all changes made; None where the pool has no node."""
        steps = self._pending.pop(pool, None)
        if steps is not None:
            if pool not in self._trees:
                self._trees[pool] = SegmentTree([0] * self.num_slots)
            self._trees[pool].add_all(_runs(steps))
        return self._trees.get(pool)


def _runs(steps: Mapping[int, int]) -> dict[Range, int]:
    """The ranges between steps, without those where the steps add up to 0."""
    runs: dict[Range, int] = {}
    total, since = 0, 0
    for slot, step in sorted(steps.items()):
        if step:
            if total:
                runs[since, slot] = total
            total += step
            since = slot
    return runs


N = TypeVar("N", int, float)
"""Positions and lengths: seconds, or whole slots."""
FirstFit = Callable[[N, N], N | None]
"""(position, length) -> the earliest position from there on with so much free time, if any."""


def smallest_shift(segments: Iterable[tuple[N, N, FirstFit[N]]], limit: N, at_least: N) -> N | None:
    """Micro-shift: the smallest delay δ in [at_least, limit] that puts every segment into free
    time.

    The best shift is 0 or brings some segment to the start of a window, so each step goes to the
    next such δ; no grid is searched.

    Args:   segments: (offset, length, search for its free time).
    Cost:   one bisection a segment for each window that is passed.
    Source: PlexRL §4.3.2, eq. 1-2. Its cost J(δ) = w1·(t_end(δ) − T)/T + w2·δ/T, with t_end =
        max(a_i + d_i) + δ, grows with δ: the best shift is the smallest that fits.
    """
    parts = list(segments)
    shift = at_least
    has_moved = True
    while has_moved:
        has_moved = False
        for offset, length, first_fit in parts:
            place = first_fit(offset + shift, length)
            if place is None or place - offset > limit:
                return None
            if place > offset + shift:
                shift = place - offset
                has_moved = True
    return shift


_KEY = "timeline"
_Mark = tuple[dict[Pool, list[NodeId]], Cycle | None, float]
"""Nodes and cycle of a member, and when the cycle began: its reservation follows from these."""


def timeline_of(cluster: Cluster) -> Timeline:
    """The timeline of a cluster, brought up to date. Changes nothing that a policy sees."""
    kept = cluster.__dict__.get(_KEY)
    if kept is None:
        kept = cluster.__dict__[_KEY] = _Kept()
    kept.follow(cluster)
    timeline: Timeline = kept.timeline
    return timeline


def has_room(group: Group, limits: Limits) -> bool:
    """Whether a group takes another job, as far as the number of its jobs goes."""
    return not group.is_closed and len(group.members) < limits.max_group_jobs


class _Laid(msgspec.Struct):
    """A group as the timeline has it: the reserved members and the closed nodes."""

    version: int = -1
    members: dict[str, _Mark] = {}
    closed: list[NodeId] = []
    """The group's nodes, while it takes no further job."""


class _Kept:
    """A cluster's timeline, and what it was made from."""

    def __init__(self) -> None:
        self.timeline = Timeline({})
        self._hosts: dict[NodeId, Pool] = {}
        self._laid: dict[str, _Laid] = {}

    def follow(self, cluster: Cluster) -> None:
        """Bring the timeline up to date.

        Whatever is gone is given up before anything new is reserved, because a job or a node may
        have gone from one group to another.
        """
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
        """Nodes that came, went, or are now in another pool."""
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
        """Reserve a member's footprint. A job without a known cycle has none."""
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
