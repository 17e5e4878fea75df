"""Plans of the slices of parameters that a node fetches, so that weights reach another layout.

A *part* is everything that one source rank holds; source ranks that hold the same share one part.
Every byte that any target rank of a node holds, except padding, reaches the node exactly once, and
no part is asked for much more than another. Parameters that are alike (shape, dtype, rule, place)
form a group with one plan, and are its *members*.

Everything here is pure: the same inputs give the same plan, and the same plan gives the same parts
and fetches.

Source: PlexRL §5.3 (each rollout rank fetches only the slices that its layout requires).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

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
class Group:
    """Parameters of the same shape, dtype and rule that lie on the same ranks."""

    parameters: tuple[int, ...]
    """The numbers of the group's members in the plan's parameters."""
    item_bytes: int
    cells: list[Cell]
    sources: list[list[int]]
    """The ranks that hold each source shard."""
    targets: list[list[int]]
    """The ranks that hold each target shard."""
    target_shards: list[Shard]

    def sources_of(self, cell: Cell) -> list[tuple[int, Index]]:
        """Each rank that holds the cell, and where the cell starts in the rank's tensor."""
        return [(rank, at) for shard, at in cell.sources for rank in self.sources[shard]]


@dataclass(frozen=True)
class Plan:
    """How weights of one sharding reach another, for all parameters of a model."""

    parameters: Sequence[Parameter]
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class Use:
    """The place of a slice in a target rank's tensor."""

    rank: int
    start: Index
    shape: Index
    """Shape of the rank's tensor."""


@dataclass(frozen=True)
class Fetch:
    """A slice of one parameter that a node fetches once, for all of its ranks that hold it."""

    parameter: int
    part: int
    start: Index
    """Where the slice starts in the part's tensor."""
    size: Index
    num_bytes: int
    uses: tuple[Use, ...]


def plan(parameters: Sequence[Parameter], source: Sharding, target: Sharding) -> Plan:
    """Plan which source ranks hold each piece of the parameters that each target rank holds.

    Raises: CallerError: the sizes of a sharding do not fit, or a parameter cannot be cut that way.
    """
    return Plan(parameters, tuple(_groups(parameters, source, target)))


def source_parts(plan: Plan) -> list[list[int]]:
    """The source ranks that hold each part."""
    held: dict[int, list[tuple[int, int]]] = {}
    for number, group in enumerate(plan.groups):
        for shard, ranks in enumerate(group.sources):
            for rank in ranks:
                held.setdefault(rank, []).append((number, shard))
    parts: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for rank in sorted(held):
        parts.setdefault(tuple(held[rank]), []).append(rank)
    return list(parts.values())


def part_bytes(plan: Plan) -> list[int]:
    """The number of bytes of each part that some target rank needs.

    Bytes that several parts hold count for each of them.
    """
    part_of = {rank: part for part, held in enumerate(source_parts(plan)) for rank in held}
    sizes = [0] * len(set(part_of.values()))
    for group in plan.groups:
        for cell in group.cells:
            num_bytes = cell.num_elements * group.item_bytes * len(group.parameters)
            for part in {part_of[rank] for rank, _ in group.sources_of(cell)}:
                sizes[part] += num_bytes
    return sizes


def node_fetches(plan: Plan, ranks: Collection[int]) -> list[Fetch]:
    """Everything that the target ranks of one node need, spread over the parts that have it.

    Args: ranks: the target ranks of the node.
    Cost: O(fetches returned).
    """
    part_of = {rank: part for part, held in enumerate(source_parts(plan)) for rank in held}
    loads: Counter[int] = Counter()
    found: list[Fetch] = []
    for group in plan.groups:
        for cell in group.cells:
            uses = _uses(group, cell, ranks)
            if not uses:
                continue
            starts = {part_of[rank]: start for rank, start in group.sources_of(cell)}
            num_bytes = cell.num_elements * group.item_bytes
            members = range(len(group.parameters))
            for part, assigned in assign(members, num_bytes, sorted(starts), loads):
                found += [
                    Fetch(group.parameters[m], part, starts[part], cell.size, num_bytes, uses)
                    for m in assigned
                ]
    return sorted(found, key=lambda fetch: (fetch.part, fetch.parameter, fetch.start))


def _uses(group: Group, cell: Cell, ranks: Collection[int]) -> tuple[Use, ...]:
    return tuple(
        Use(rank, start, group.target_shards[shard].shape)
        for shard, start in cell.targets
        for rank in group.targets[shard]
        if rank in ranks
    )


def byte_runs(
    size: Index, item_bytes: int, there: tuple[Index, Index], here: tuple[Index, Index]
) -> Iterator[tuple[int, int, int]]:
    """The longest runs of a slice's bytes that are adjacent on both sides.

    Each run is (offset at the sender, offset at the receiver, length), in bytes.

    Args: size: the slice's size along each dim.
          there: where the slice starts in the sender's tensor, and that tensor's shape.
          here: the same for the receiver's tensor.
    """
    inner, dim = item_bytes, len(size)
    (source_start, source_shape), (target_start, target_shape) = there, here
    while dim and size[dim - 1] == source_shape[dim - 1] == target_shape[dim - 1]:
        dim -= 1
        inner *= size[dim]
    if dim:
        dim -= 1
        inner *= size[dim]
    source_strides = _strides(source_shape, item_bytes)
    target_strides = _strides(target_shape, item_bytes)
    source = sum(at * stride for at, stride in zip(source_start, source_strides, strict=True))
    target = sum(at * stride for at, stride in zip(target_start, target_strides, strict=True))
    offsets = [(source, target)]
    for axis in range(dim):
        offsets = [
            (away + step * source_strides[axis], near + step * target_strides[axis])
            for away, near in offsets
            for step in range(size[axis])
        ]
    yield from ((away, near, inner) for away, near in offsets)


def assign(
    members: range, num_bytes: int, parts: Sequence[int], loads: Counter[int]
) -> list[tuple[int, range]]:
    """Assign members of equal size to parts, always the next one to the least loaded part.

    Args:    loads: the bytes that each part has to send so far; the assigned ones are added to it.
    Returns: the members of each part that gets any.
    Cost:    O(parts · log parts), however many members there are.
    """
    if len(parts) == 1:
        loads[parts[0]] += num_bytes * len(members)
        return [(parts[0], members)]
    counts = _filled(len(members), num_bytes, [loads[part] for part in parts])
    assigned: list[tuple[int, range]] = []
    start = members.start
    for part, count in zip(parts, counts, strict=True):
        if count:
            assigned.append((part, range(start, start + count)))
            start += count
            loads[part] += num_bytes * count
    return assigned


def _filled(count: int, size: int, loads: list[int]) -> list[int]:
    """How many of `count` items of this size each part gets, the least loaded part first.

    Args: loads: the load of each part before.
    """
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
    # The rest is fewer items than there are open parts, each below the level by less than an item.
    by_load = sorted(order, key=lambda i: (loads[i] + counts[i] * size, i))
    for i in range(rest):
        counts[by_load[i % len(by_load)]] += 1
    return counts


def _groups(parameters: Sequence[Parameter], source: Sharding, target: Sharding) -> Iterator[Group]:
    """The groups of parameters that are alike.

    Those with the largest slices come first, so that small ones even the loads out.
    """
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
    patterns: dict[object, tuple[list[Shard], list[Cell]]] = {}
    groups: list[Group] = []
    for numbers in members.values():
        first = parameters[numbers[0]]
        is_expert = first.expert is not None
        cuts = source.cuts(is_expert=is_expert), target.cuts(is_expert=is_expert)
        rules = source.rule_of(first), target.rule_of(first)
        pattern = (first.shape, rules, cuts)
        if pattern not in patterns:
            patterns[pattern] = _pattern(first.shape, rules, cuts)
        here, pieces = patterns[pattern]
        groups.append(
            Group(
                tuple(numbers),
                item_bytes(first.dtype),
                pieces,
                source.ranks(*places_of_source(first)),
                target.ranks(*places_of_target(first)),
                here,
            )
        )
    yield from sorted(groups, key=_member_bytes, reverse=True)


def _pattern(
    shape: Index, rules: tuple[Rule, Rule], cuts: tuple[tuple[int, int], tuple[int, int]]
) -> tuple[list[Shard], list[Cell]]:
    there, here = (shards(shape, rule, *cut) for rule, cut in zip(rules, cuts, strict=True))
    return here, cells(shape, there, here)


def _remembered(
    place: Callable[[Parameter], tuple[tuple[int, ...], int | None]],
) -> Callable[[Parameter], tuple[tuple[int, ...], int | None]]:
    """A cached form of `place`: tens of thousands of parameters lie in some hundred places."""
    known: dict[tuple[object, int | None], tuple[tuple[int, ...], int | None]] = {}

    def remembered(parameter: Parameter) -> tuple[tuple[int, ...], int | None]:
        key = (parameter.layer, parameter.expert)
        found = known.get(key)
        if found is None:
            found = known[key] = place(parameter)
        return found

    return remembered


def _member_bytes(group: Group) -> int:
    return group.item_bytes * max((cell.num_elements for cell in group.cells), default=0)


def _strides(shape: Index, item_bytes: int) -> list[int]:
    strides = [item_bytes] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return strides
