"""What a node fetches for the target ranks that are on it: every byte that any of them needs, once.

A *part* is what one source rank holds; ranks that hold the same share one. Pure; the same plan
gives the same parts and the same fetches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from phaseloom.common.tensors.resharding.cells import Cell, Index
from phaseloom.common.tensors.resharding.planning import Group, Plan, deal


@dataclass(frozen=True)
class Use:
    """Where a target rank keeps a box."""

    rank: int
    start: Index
    shape: Index
    """Of the rank's tensor."""


@dataclass(frozen=True)
class Fetch:
    """A box that comes to a node once."""

    parameter: int
    part: int
    start: Index
    """In the tensor as the part has it."""
    size: Index
    num_bytes: int
    uses: tuple[Use, ...]


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
    """Of each part, what of it any target needs; parts that hold the same count it each."""
    part_of = {rank: part for part, held in enumerate(source_parts(plan)) for rank in held}
    sizes = [0] * len(set(part_of.values()))
    for group in plan.groups:
        for cell in group.cells:
            num_bytes = cell.num_elements * group.item_bytes * len(group.parameters)
            for part in {part_of[rank] for rank, _ in group.sources_of(cell)}:
                sizes[part] += num_bytes
    return sizes


def node_fetches(plan: Plan, ranks: Collection[int]) -> list[Fetch]:
    """What the target ranks of one node need together, dealt out over the parts that have it.

    Cost: O(what is returned).
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
            for part, dealt in deal(members, num_bytes, sorted(starts), loads):
                found += [
                    Fetch(group.parameters[m], part, starts[part], cell.size, num_bytes, uses)
                    for m in dealt
                ]
    return sorted(found, key=lambda fetch: (fetch.part, fetch.parameter, fetch.start))


def _uses(group: Group, cell: Cell, ranks: Collection[int]) -> tuple[Use, ...]:
    return tuple(
        Use(rank, start, group.target_shards[shard].shape)
        for shard, start in cell.targets
        for rank in group.targets[shard]
        if rank in ranks
    )
