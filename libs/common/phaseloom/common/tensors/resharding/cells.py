"""Cells: the tensor slices in which the shards of two shardings of one shape meet.

A *cell* is a slice of a parameter that every shard of both sides holds whole or not at all, and in
one run along each dim. Cells tile the parameter. Adjacent slices that the same shards hold, end to
end on both sides, are one cell. Cells depend on the shape and on how each side cuts it, not on the
parameter, so they are made once for each distinct combination.

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
    """A slice of a parameter that every source or target shard holds whole or not at all."""

    size: Index
    """Its size along each dim."""
    sources: tuple[tuple[int, Index], ...]
    """Each source shard that holds the cell, and where the cell starts in the shard's tensor."""
    targets: tuple[tuple[int, Index], ...]
    """Each target shard that holds the cell, and where the cell starts in the shard's tensor."""

    @property
    def num_elements(self) -> int:
        return num_elements(self.size)


@dataclass
class _Interval:
    """A run of indices of one dim, and where it starts in each shard that holds it."""

    length: int
    sources: dict[int, int]
    targets: dict[int, int]

    def goes_on(self, later: _Interval) -> bool:
        return _continues(self.sources, later.sources, self.length) and _continues(
            self.targets, later.targets, self.length
        )


def cells(shape: Index, sources: Sequence[Shard], targets: Sequence[Shard]) -> list[Cell]:
    """The cells of everything that some target shard holds."""
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
    """The number of each interval that is held, and where it starts in the shard's own dim.

    Args: edges: the sorted ends of all intervals.
    """
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
    """The shards that hold the interval of every dim, with the start of each interval in them."""
    if not dims:
        return tuple((shard, ()) for shard in range(num_shards))
    fewest = min(dims, key=len)
    return tuple(
        (shard, tuple(dim[shard] for dim in dims))
        for shard in fewest
        if all(shard in dim for dim in dims)
    )
