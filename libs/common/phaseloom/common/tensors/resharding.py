"""Move weights from one layout to another: which tensor slices a node fetches, from which part.

A rank *holds* at most one box of each tensor, however the model was split: by rows, columns, heads,
layers or experts. A plan knows nothing else about a rank. A *part* is what one source rank holds
and writes; source ranks with equal holdings share one part.

Every byte that any target rank of a node holds reaches the node exactly once. If several parts have
a byte, all nodes fetch it from the same one, regardless of their other needs. So nodes behind a
shared slow link transfer each byte over it once. The load of a node that needs everything is spread
evenly over the parts.

Everything here is pure: the same boxes give the same plan.

Source: PlexRL §5.3 (each rollout rank fetches only the slices that its layout requires).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import NamedTuple

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.state_layout import Role, TensorSlot

_ITEM_BYTES = {
    **dict.fromkeys(("float64", "int64", "uint64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("bfloat16", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "int8", "uint8", "bool"), 1),
}

Index = tuple[int, ...]


def item_bytes(dtype: str) -> int:
    """Return the size of one element of a dtype.

    Raises: CallerError: weights cannot have this dtype.
    """
    try:
        return _ITEM_BYTES[dtype]
    except KeyError:
        raise CallerError(
            f"unsupported dtype of weights {dtype!r}",
            field="dtype",
            remedy=f"use one of {', '.join(_ITEM_BYTES)}",
        ) from None


class Box(NamedTuple):
    """A slice of a whole tensor: its start and size along each dimension."""

    start: Index
    size: Index

    def covers(self, inner: Box) -> bool:
        return all(
            outer_start <= inner_start and inner_start + inner_size <= outer_start + outer_size
            for outer_start, outer_size, inner_start, inner_size in zip(
                self.start, self.size, inner.start, inner.size, strict=True
            )
        )

    def offset(self, inner: Box) -> Index:
        """Return the start of a box inside this one, relative to this one."""
        return tuple(
            inner_start - outer_start
            for outer_start, inner_start in zip(self.start, inner.start, strict=True)
        )


class Tensor(NamedTuple):
    """Shape and dtype of a whole tensor."""

    shape: Index
    dtype: str


Holding = Mapping[str, Box]
"""A rank's share of a model's weights: the name of each tensor that it has a slice of → the box."""


def holding_of(slots: Sequence[TensorSlot]) -> dict[str, Box]:
    """Return the box of each weight among these slots, by name. Other roles are ignored."""
    return {
        slot.name: Box(tuple(slot.start or [0] * len(slot.shape)), tuple(slot.shape))
        for slot in slots
        if slot.role is Role.WEIGHT
    }


def tensors_of(slots: Sequence[TensorSlot]) -> dict[str, Tensor]:
    """Return the whole tensors that the weights among these slots are slices of."""
    return {
        slot.name: Tensor(tuple(slot.global_shape or slot.shape), slot.dtype)
        for slot in slots
        if slot.role is Role.WEIGHT
    }


def parts_of(holdings: Sequence[Holding]) -> list[list[int]]:
    """Return the ranks that share each part, in the order of their first rank."""
    parts: dict[tuple[tuple[str, Box], ...], list[int]] = {}
    for rank, holding in enumerate(holdings):
        parts.setdefault(tuple(sorted(holding.items())), []).append(rank)
    return list(parts.values())


@dataclass(frozen=True)
class Use:
    """Destination of a slice in a target rank's tensor."""

    rank: int
    start: Index


@dataclass(frozen=True)
class SliceFetch:
    """A slice of one tensor that a node fetches once for all of its ranks that hold it."""

    name: str
    part: int
    start: Index
    size: Index
    num_bytes: int
    uses: tuple[Use, ...]


def plan_fetches(
    tensors: Mapping[str, Tensor], parts: Sequence[Holding], ranks: Mapping[int, Holding]
) -> list[SliceFetch]:
    """Plan the fetches of everything that the target ranks of one node need, spread over the parts.

    Tensors that are split the same way on both sides are planned together.

    Args:   tensors: all tensors of the model, including those not needed here.
            ranks: the holdings of the node's target ranks, by rank.
    Raises: CallerError: FAILED_PRECONDITION: no part has a required slice.
    """
    sources = _by_tensor(dict(enumerate(parts)))
    homes = _homes(tensors, sources)
    groups: dict[tuple[Tensor, _Held, _Held], list[str]] = {}
    for name, targets in _by_tensor(ranks).items():
        groups.setdefault((tensors[name], targets, sources.get(name, ())), []).append(name)
    plan: list[SliceFetch] = []
    for (tensor, targets, holders), names in groups.items():
        item, home = item_bytes(tensor.dtype), homes[tensor, holders]
        for cell in _cells(names[0], targets, holders):
            num_bytes = cell.num_elements * item
            part_of = home.parts_of(cell.box)
            for name in names:
                part = part_of[name]
                start = cell.sources[part]
                plan.append(SliceFetch(name, part, start, cell.box.size, num_bytes, cell.uses))
    return sorted(plan, key=lambda fetch: (fetch.part, fetch.name, fetch.start))


_Held = tuple[tuple[int, Box], ...]
"""The holders of one tensor: the number of each part or rank, with its box."""


@dataclass(frozen=True)
class _Cell:
    """A slice that every source and target box contains either completely or not at all."""

    box: Box
    sources: Mapping[int, Index]
    """Each part that has it → the slice's start in the part's tensor."""
    uses: tuple[Use, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.box.size)


@dataclass(frozen=True)
class _Home:
    """The part that all nodes fetch each slice from, for tensors that the parts split the same
    way."""

    slices: list[tuple[Box, dict[str, int]]]
    """Each slice that every part contains completely or not at all, with the assigned part by
    tensor."""

    def parts_of(self, box: Box) -> dict[str, int]:
        """Return the part to fetch a slice from, by tensor.

        Args:   box: the slice, inside one of `slices`.
        """
        return next(parts for region, parts in self.slices if region.covers(box))


def _homes(
    tensors: Mapping[str, Tensor], sources: Mapping[str, _Held]
) -> dict[tuple[Tensor, _Held], _Home]:
    """Assign each byte, for all targets, to the least loaded part that has it.

    The largest slices are assigned first, so that small ones can even out the loads.
    """
    groups: dict[tuple[Tensor, _Held], list[str]] = {}
    for name in sorted(tensors):
        groups.setdefault((tensors[name], sources.get(name, ())), []).append(name)
    planned = [
        (names, item_bytes(tensor.dtype), _cells(names[0], holders, holders), (tensor, holders))
        for (tensor, holders), names in groups.items()
    ]
    planned.sort(key=lambda group: -group[1] * max((c.num_elements for c in group[2]), default=0))
    loads: Counter[int] = Counter()
    homes = {}
    for names, item, cells, key in planned:
        slices = []
        for cell in cells:
            assigned = assign(
                range(len(names)), cell.num_elements * item, sorted(cell.sources), loads
            )
            slices.append((cell.box, {names[m]: part for part, subset in assigned for m in subset}))
        homes[key] = _Home(slices)
    return homes


def _by_tensor(holdings: Mapping[int, Holding]) -> dict[str, _Held]:
    holders: dict[str, list[tuple[int, Box]]] = {}
    for number, holding in holdings.items():
        for name, box in holding.items():
            holders.setdefault(name, []).append((number, box))
    return {name: tuple(boxes) for name, boxes in holders.items()}


def _cells(name: str, targets: _Held, sources: _Held) -> list[_Cell]:
    """Return the cells of everything that a target holds; empty without targets.

    Raises: CallerError: no source has one of them.
    """
    if not targets:
        return []
    boxes = [box for _, box in (*targets, *sources)]
    edges = [
        sorted({edge for box in boxes for edge in (box.start[dim], box.start[dim] + box.size[dim])})
        for dim in range(len(boxes[0].start))
    ]
    cells: list[_Cell] = []
    # Cut space at every edge of every box: no box then crosses a cell.
    for spans in product(*(pairwise(dim_edges) for dim_edges in edges)):
        box = Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))
        uses = tuple(
            Use(rank, holding.offset(box)) for rank, holding in targets if holding.covers(box)
        )
        if not uses:
            continue
        starts = {part: holding.offset(box) for part, holding in sources if holding.covers(box)}
        if not starts:
            raise CallerError(
                f"no part of the version has {name} from {list(box.start)} on",
                code=Code.FAILED_PRECONDITION,
                remedy="sync only between deployments of the same model",
            )
        cells.append(_Cell(box, starts, uses))
    return cells


def assign(
    members: range, num_bytes: int, parts: Sequence[int], loads: Counter[int]
) -> list[tuple[int, range]]:
    """Assign equally large members to parts, each one to the least loaded part.

    Args:    loads: the bytes already assigned to each part; updated by this call.
    Returns: the members of each part that gets any.
    Cost:    O(parts · log parts), independent of the number of members.
    """
    if len(parts) == 1:
        loads[parts[0]] += num_bytes * len(members)
        return [(parts[0], members)]
    counts = _fill_counts(len(members), num_bytes, [loads[part] for part in parts])
    assigned: list[tuple[int, range]] = []
    start = members.start
    for part, count in zip(parts, counts, strict=True):
        if count:
            assigned.append((part, range(start, start + count)))
            start += count
            loads[part] += num_bytes * count
    return assigned


def _fill_counts(count: int, size: int, loads: list[int]) -> list[int]:
    """Return how many of `count` items of this size each part gets, filling the least loaded part
    first.

    Args:   loads: the previous load of each part.
    """
    # Water filling: raise the least loaded parts to a common level, ignoring the size of items.
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
    remaining = count - sum(counts)
    # Fewer items remain than there are open parts. Each open part is below the level by less than
    # one item.
    by_load = sorted(order, key=lambda i: (loads[i] + counts[i] * size, i))
    for i in range(remaining):
        counts[by_load[i % len(by_load)]] += 1
    return counts


class StridedRanges(NamedTuple):
    """Equally long byte ranges at constant strides, in a source and in a target memory.

    For example, some columns of a matrix are one instance with one range per row.
    """

    source: int
    """Byte offset of the first range in the source."""
    target: int
    """Byte offset of the first range in the target."""
    num_bytes: int
    num_rows: int = 1
    source_stride: int = 0
    """Bytes from the start of one range to the start of the next; meaningless for a single
    range."""
    target_stride: int = 0

    def shifted(self, source: int, target: int) -> StridedRanges:
        """Return the same rows, shifted by these numbers of bytes in source and target."""
        return self._replace(source=self.source + source, target=self.target + target)

    def subset(self, first: int, num_rows: int) -> StridedRanges:
        """Return `num_rows` of the rows, starting with row `first`."""
        source, target = first * self.source_stride, first * self.target_stride
        return self.shifted(source, target)._replace(num_rows=num_rows)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield each range as (offset in the source, offset in the target, length)."""
        for row in range(self.num_rows):
            source_offset, target_offset = row * self.source_stride, row * self.target_stride
            yield self.source + source_offset, self.target + target_offset, self.num_bytes


def byte_rows(
    size: Index, item_bytes: int, sender: tuple[Index, Index], receiver: tuple[Index, Index]
) -> Iterator[StridedRanges]:
    """Yield the longest byte ranges of a slice that are contiguous in both sender and receiver.

    Args:   size: size of the slice along each dimension.
            sender: (start of the slice in the sender's tensor, shape of that tensor).
            receiver: the same for the receiver's tensor.
    """
    dim, length = _adjacent(size, item_bytes, sender[1], receiver[1])
    # The innermost of the outer dimensions becomes the rows of one StridedRanges.
    outer = max(0, dim - 1)
    rows = StridedRanges(0, 0, length)
    if dim:
        strides = (_strides(item_bytes, shape)[outer] for _, shape in (sender, receiver))
        rows = StridedRanges(0, 0, length, size[outer], *strides)
    sources, targets = (
        _offsets(size, item_bytes, outer, *slice_of) for slice_of in (sender, receiver)
    )
    yield from map(rows.shifted, sources, targets)


def box_runs(
    size: Sequence[int], item_bytes: int, start: Sequence[int], shape: Sequence[int]
) -> tuple[list[int], int]:
    """Find the longest contiguous byte ranges of a box in its tensor, in order.

    Args:    start: start of the box in the tensor.
             shape: shape of the tensor.
    Returns: the offset of each range in the tensor, and their common length; in bytes.
    """
    dim, length = _adjacent(size, item_bytes, shape)
    return _offsets(size, item_bytes, dim, start, shape), length


def _adjacent(size: Sequence[int], item_bytes: int, *shapes: Sequence[int]) -> tuple[int, int]:
    """Find the contiguous ranges of a slice in tensors of these shapes.

    Returns: the number of outer dimensions over which the ranges are spread, and the bytes of each.
    """
    length, dim = item_bytes, len(size)
    # Dimensions that the slice covers completely in every tensor are contiguous.
    while dim and all(size[dim - 1] == shape[dim - 1] for shape in shapes):
        dim -= 1
        length *= size[dim]
    if dim:
        dim -= 1
        length *= size[dim]
    return dim, length


def _offsets(
    size: Sequence[int], item_bytes: int, dim: int, start: Sequence[int], shape: Sequence[int]
) -> list[int]:
    """Return the byte offset of each range of a slice; the ranges are spread over the first `dim`
    dimensions."""
    strides = _strides(item_bytes, shape)
    offsets = [sum(at * stride for at, stride in zip(start, strides, strict=True))]
    for axis in range(dim):
        offsets = [base + step * strides[axis] for base in offsets for step in range(size[axis])]
    return offsets


def _strides(item_bytes: int, shape: Sequence[int]) -> list[int]:
    """Bytes from one index to the next along each dimension of a contiguous tensor."""
    strides = [item_bytes] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return strides
