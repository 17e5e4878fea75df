"""Where the shards of two shardings of one shape meet: boxes, each in the order of either side.

A *cell* is a box of a parameter that every shard holds whole or not at all, and in one run along
each dim. Cells tile the parameter; neighbours that the same shards hold, end to end on both sides,
are one cell. They depend on the shape and on how each side cuts, not on the parameter: they are
made once for each distinct pair.

Cost: O(cells · shards that hold each).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from phaseloom.common.tensors.layouts import Held
from phaseloom.common.tensors.resharding.sharding import Shard, num_elements

Index = tuple[int, ...]


@dataclass(frozen=True)
class Cell:
    size: Index
    sources: tuple[tuple[int, Index], ...]
    """(shard, where the cell starts in its tensor), of each that holds it."""
    targets: tuple[tuple[int, Index], ...]

    @property
    def num_elements(self) -> int:
        return num_elements(self.size)


@dataclass
class _Interval:
    """A run of one dim, and where it starts in each shard that holds it."""

    length: int
    sources: dict[int, int]
    targets: dict[int, int]

    def goes_on(self, later: _Interval) -> bool:
        return _continues(self.sources, later.sources, self.length) and _continues(
            self.targets, later.targets, self.length
        )


def cells(shape: Index, sources: Sequence[Shard], targets: Sequence[Shard]) -> list[Cell]:
    """Everything that some target shard holds, cut into cells."""
    dims = [
        _intervals(size, [s.dims[dim] for s in sources], [t.dims[dim] for t in targets])
        for dim, size in enumerate(shape)
    ]
    found: list[Cell] = []
    for box in product(*dims):
        cell = Cell(
            tuple(interval.length for interval in box),
            _common([interval.sources for interval in box], len(sources)),
            _common([interval.targets for interval in box], len(targets)),
        )
        if cell.targets:
            found.append(cell)
    return found


def _intervals(size: int, sources: list[Held], targets: list[Held]) -> list[_Interval]:
    edges = sorted({0, size, *_edges(sources), *_edges(targets)})
    cut = [_Interval(stop - start, {}, {}) for start, stop in pairwise(edges)]
    for shard, held in enumerate(sources):
        for number, at in _inside(held, edges):
            cut[number].sources[shard] = at
    for shard, held in enumerate(targets):
        for number, at in _inside(held, edges):
            cut[number].targets[shard] = at
    merged: list[_Interval] = []
    for interval in cut:
        if merged and merged[-1].goes_on(interval):
            merged[-1].length += interval.length
        else:
            merged.append(interval)
    return merged


def _edges(held: list[Held]) -> Iterator[int]:
    for each in held:
        for piece in each.pieces:
            yield from (piece.indices.start, piece.indices.stop)


def _inside(held: Held, edges: list[int]) -> Iterator[tuple[int, int]]:
    """(number of an interval, where it starts in what is held)."""
    at = 0
    for piece in held.pieces:
        first = bisect_left(edges, piece.indices.start)
        for number in range(first, bisect_left(edges, piece.indices.stop, first)):
            yield number, at + edges[number] - piece.indices.start
        at += piece.length


def _continues(first: dict[int, int], second: dict[int, int], length: int) -> bool:
    return first.keys() == second.keys() and all(
        second[shard] == at + length for shard, at in first.items()
    )


def _common(dims: list[dict[int, int]], num_shards: int) -> tuple[tuple[int, Index], ...]:
    """The shards that hold every dim's interval."""
    if not dims:
        return tuple((shard, ()) for shard in range(num_shards))
    fewest = min(dims, key=len)
    return tuple(
        (shard, tuple(dim[shard] for dim in dims))
        for shard in fewest
        if all(shard in dim for dim in dims)
    )
