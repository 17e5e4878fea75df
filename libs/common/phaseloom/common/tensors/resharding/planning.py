"""Which rank sends which part of which parameter to which rank, so that a deployment's weights
reach another one that is laid out otherwise.

Every byte that a target rank holds, except padding, reaches it exactly once. It comes from the
nearest ranks that hold it, dealt out so that none of them sends much more than another. Parameters
that are alike (shape, rule, place) share one plan, in which each is one of the *members*.

`Plan.copies` is what an executor carries out. Pure; the same inputs give the same plan.

Source: PlexRL §5.3 (each rollout rank fetches only the slices that its layout requires).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from phaseloom.common.tensors.resharding.cells import Cell, Index, cells
from phaseloom.common.tensors.resharding.sharding import (
    Parameter,
    Rule,
    Shard,
    Sharding,
    item_bytes,
    shards,
)


@dataclass(frozen=True)
class Topology:
    """Where ranks are. A *site* is what fast links join; between sites links are slow."""

    sources: Sequence[str]
    """Node of source rank 0, 1, …"""
    targets: Sequence[str]
    sites: dict[str, str]
    """Of each node."""

    def distance(self, node: str, other: str) -> int:
        """0: the same node; 1: the same site; 2: another one."""
        if node == other:
            return 0
        return 1 if self.sites[node] == self.sites[other] else 2


@dataclass(frozen=True)
class Leg:
    """One cell of some of a group's members, from one rank to another."""

    cell: Cell
    source: int
    source_start: Index
    target: int
    target_start: Index
    members: range
    is_relayed: bool = False
    """`source` is a target rank too, which has got it by an earlier leg of the group."""

    @property
    def num_elements(self) -> int:
        return self.cell.num_elements * len(self.members)


@dataclass(frozen=True)
class Group:
    """Parameters that lie alike."""

    parameters: tuple[int, ...]
    """Their numbers: the members."""
    item_bytes: int
    cells: list[Cell]
    sources: list[list[int]]
    """Ranks that hold each source shard."""
    targets: list[list[int]]
    source_shards: list[Shard]
    target_shards: list[Shard]
    legs: tuple[Leg, ...] = ()

    def sources_of(self, cell: Cell) -> list[tuple[int, Index]]:
        """(rank, where the cell starts in its tensor)."""
        return [(rank, at) for shard, at in cell.sources for rank in self.sources[shard]]

    def targets_of(self, cell: Cell) -> list[tuple[int, Index]]:
        return [(rank, at) for shard, at in cell.targets for rank in self.targets[shard]]

    def bytes_of(self, leg: Leg) -> int:
        return leg.num_elements * self.item_bytes


@dataclass(frozen=True)
class Copy:
    """A box of one parameter, as an executor moves it."""

    parameter: int
    source: int
    source_start: Index
    source_shape: Index
    """Of the tensor that the sender holds."""
    target: int
    target_start: Index
    target_shape: Index
    size: Index
    item_bytes: int
    is_relayed: bool

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """(offset at the sender, offset at the receiver, length): bytes that are adjacent there
        and here, the longest such runs."""
        inner, dim = self.item_bytes, len(self.size)
        while (
            dim and self.size[dim - 1] == self.source_shape[dim - 1] == self.target_shape[dim - 1]
        ):
            dim -= 1
            inner *= self.size[dim]
        if dim:
            dim -= 1
            inner *= self.size[dim]
        source_strides = _strides(self.source_shape, self.item_bytes)
        target_strides = _strides(self.target_shape, self.item_bytes)
        source = sum(
            at * stride for at, stride in zip(self.source_start, source_strides, strict=True)
        )
        target = sum(
            at * stride for at, stride in zip(self.target_start, target_strides, strict=True)
        )
        offsets = [(source, target)]
        for axis in range(dim):
            offsets = [
                (there + step * source_strides[axis], here + step * target_strides[axis])
                for there, here in offsets
                for step in range(self.size[axis])
            ]
        yield from ((there, here, inner) for there, here in offsets)


@dataclass(frozen=True)
class Plan:
    parameters: Sequence[Parameter]
    groups: tuple[Group, ...]

    def copies(self, target: int | None = None) -> Iterator[Copy]:
        """In an order in which nobody relays what it has not got.

        Args: target: only what this rank fetches.
        """
        for group in self.groups:
            for leg in group.legs:
                if target is None or leg.target == target:
                    yield from self._copies(group, leg)

    @property
    def num_bytes(self) -> int:
        """Moved in all."""
        return sum(group.bytes_of(leg) for group in self.groups for leg in group.legs)

    @cached_property
    def sent_bytes(self) -> Counter[int]:
        """By source rank; what targets relay is not in it."""
        sent: Counter[int] = Counter()
        for group in self.groups:
            for leg in group.legs:
                if not leg.is_relayed:
                    sent[leg.source] += group.bytes_of(leg)
        return sent

    def _copies(self, group: Group, leg: Leg) -> Iterator[Copy]:
        senders = group.targets if leg.is_relayed else group.sources
        shapes = group.target_shards if leg.is_relayed else group.source_shards
        source_shape = _shape_of(leg.source, senders, shapes)
        target_shape = _shape_of(leg.target, group.targets, group.target_shards)
        for member in leg.members:
            yield Copy(
                parameter=group.parameters[member],
                source=leg.source,
                source_start=leg.source_start,
                source_shape=source_shape,
                target=leg.target,
                target_start=leg.target_start,
                target_shape=target_shape,
                size=leg.cell.size,
                item_bytes=group.item_bytes,
                is_relayed=leg.is_relayed,
            )


def plan(
    parameters: Sequence[Parameter],
    source: Sharding,
    target: Sharding,
    topology: Topology | None = None,
) -> Plan:
    """Every target rank fetches what it holds from the nearest ranks that have it.

    Args:   topology: None: all are equally near.
    Raises: CallerError: a sharding that is none, or a parameter that cannot be cut so.
    """
    loads: Counter[int] = Counter()
    found: list[Group] = []
    for group in _groups(parameters, source, target):
        legs: list[Leg] = []
        for cell in group.cells:
            holders = group.sources_of(cell)
            for rank, start in group.targets_of(cell):
                near = nearest(holders, rank, topology)
                legs += deal_legs(group, cell, near, (rank, start), loads)
        found.append(replace(group, legs=tuple(legs)))
    return Plan(parameters, tuple(found))


def deal_legs(
    group: Group,
    cell: Cell,
    senders: Sequence[tuple[int, Index]],
    target: tuple[int, Index],
    loads: Counter[int],
    *,
    members: range | None = None,
) -> list[Leg]:
    """Legs that bring a cell of these members to one rank, dealt out over the senders.

    Args: loads: bytes that each rank sends already; added to.
    """
    members = range(len(group.parameters)) if members is None else members
    num_bytes = cell.num_elements * group.item_bytes
    starts = dict(senders)
    return [
        Leg(cell, rank, starts[rank], *target, run)
        for rank, run in deal(members, num_bytes, [*starts], loads)
    ]


def deal(
    members: range, num_bytes: int, ranks: Sequence[int], loads: Counter[int]
) -> list[tuple[int, range]]:
    """Deal members of equal size out to ranks, always to the least loaded one; adds to `loads`.

    Cost: O(ranks · log ranks), however many members there are.
    """
    if len(ranks) == 1:
        loads[ranks[0]] += num_bytes * len(members)
        return [(ranks[0], members)]
    counts = _filled(len(members), num_bytes, [loads[rank] for rank in ranks])
    dealt: list[tuple[int, range]] = []
    start = members.start
    for rank, count in zip(ranks, counts, strict=True):
        if count:
            dealt.append((rank, range(start, start + count)))
            start += count
            loads[rank] += num_bytes * count
    return dealt


def _filled(count: int, size: int, loads: list[int]) -> list[int]:
    """How many of `count` items of this size each gets, the least loaded one first."""
    order = sorted(range(len(loads)), key=lambda i: (loads[i], i))
    total, num_open = count * size, 0
    level = 0
    for i, number in enumerate(order):
        if num_open and loads[number] >= level:
            break
        total += loads[number]
        num_open = i + 1
        level = total // num_open
    counts = [0] * len(loads)
    for number in order[:num_open]:
        counts[number] = (level - loads[number]) // size if size else 0
    rest = count - sum(counts)
    # Fewer than are open, each below the level by less than one item.
    by_load = sorted(order, key=lambda i: (loads[i] + counts[i] * size, i))
    for i in range(rest):
        counts[by_load[i % len(by_load)]] += 1
    return counts


def _groups(parameters: Sequence[Parameter], source: Sharding, target: Sharding) -> Iterator[Group]:
    """Without legs; the largest parameters first, so that small ones even the loads out."""
    source.check()
    target.check()
    members: dict[tuple[object, ...], list[int]] = {}
    places_of_source = _remembered(source.place)
    places_of_target = _remembered(target.place)
    for number, parameter in enumerate(parameters):
        key = (
            *(parameter.shape, parameter.dtype, parameter.rule),
            *(places_of_source(parameter), places_of_target(parameter)),
        )
        members.setdefault(key, []).append(number)
    patterns: dict[object, tuple[list[Shard], list[Shard], list[Cell]]] = {}
    groups: list[Group] = []
    for numbers in members.values():
        first = parameters[numbers[0]]
        is_expert = first.expert is not None
        cuts = source.cuts(is_expert=is_expert), target.cuts(is_expert=is_expert)
        rules = source.rule_of(first), target.rule_of(first)
        pattern = (first.shape, rules, cuts)
        if pattern not in patterns:
            patterns[pattern] = _pattern(first.shape, rules, cuts)
        there, here, boxes = patterns[pattern]
        groups.append(
            Group(
                tuple(numbers),
                item_bytes(first.dtype),
                boxes,
                source.ranks(*places_of_source(first)),
                target.ranks(*places_of_target(first)),
                there,
                here,
            )
        )
    yield from sorted(groups, key=_member_bytes, reverse=True)


def _pattern(
    shape: Index, rules: tuple[Rule, Rule], cuts: tuple[tuple[int, int], tuple[int, int]]
) -> tuple[list[Shard], list[Shard], list[Cell]]:
    there, here = (shards(shape, rule, *cut) for rule, cut in zip(rules, cuts, strict=True))
    return there, here, cells(shape, there, here)


def _remembered(
    place: Callable[[Parameter], tuple[tuple[int, ...], int | None]],
) -> Callable[[Parameter], tuple[tuple[int, ...], int | None]]:
    """Tens of thousands of parameters lie in some hundred places."""
    known: dict[tuple[object, int | None], tuple[tuple[int, ...], int | None]] = {}

    def remembered(parameter: Parameter) -> tuple[tuple[int, ...], int | None]:
        key = (parameter.layer, parameter.expert)
        found = known.get(key)
        if found is None:
            found = known[key] = place(parameter)
        return found

    return remembered


def nearest(
    holders: list[tuple[int, Index]], target: int, topology: Topology | None
) -> list[tuple[int, Index]]:
    """Those of the ranks that are least far from a target rank."""
    if topology is None or len(holders) == 1:
        return holders
    here = topology.targets[target]
    distances = [topology.distance(topology.sources[rank], here) for rank, _ in holders]
    least = min(distances)
    return [each for each, distance in zip(holders, distances, strict=True) if distance == least]


def _member_bytes(group: Group) -> int:
    return group.item_bytes * max((cell.num_elements for cell in group.cells), default=0)


def _shape_of(rank: int, ranks: list[list[int]], shards: list[Shard]) -> Index:
    return next(
        shard.shape for shard, holders in zip(shards, ranks, strict=True) if rank in holders
    )


def _strides(shape: Index, item_bytes: int) -> list[int]:
    strides = [item_bytes] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return strides
