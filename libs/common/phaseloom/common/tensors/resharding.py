"""Weights from one layout to another: which tensor slices a node fetches, and from which part.

A rank *holds* one box of each tensor that it has anything of, whatever cut the model so: rows,
columns, heads, layers, experts. What it holds is all that a plan knows of it. A *part* is what one
source rank holds and writes; source ranks that hold the same share one part. Every byte that any
target rank of a node holds reaches the node exactly once. Of parts that hold the same, every node
takes a byte from the same one, whatever else it needs: so nodes that share a slow link fetch each
byte over it once. A node that needs all asks no part for much more than another.

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
    """The size of one element of a dtype.

    Raises: CallerError: no weight has this dtype.
    """
    try:
        return _ITEM_BYTES[dtype]
    except KeyError:
        raise CallerError(
            f"{dtype!r} is no dtype of weights", field="dtype", remedy=f"use one of {_ITEM_BYTES}"
        ) from None


class Box(NamedTuple):
    """A slice of a whole tensor: where it begins and its size, along each dim."""

    start: Index
    size: Index

    def covers(self, other: Box) -> bool:
        return all(
            mine <= its and its + size <= mine + length
            for mine, length, its, size in zip(
                self.start, self.size, other.start, other.size, strict=True
            )
        )

    def offset(self, inner: Box) -> Index:
        """Where a box inside this one begins in it."""
        return tuple(its - mine for mine, its in zip(self.start, inner.start, strict=True))


class Tensor(NamedTuple):
    """A whole tensor's shape and dtype."""

    shape: Index
    dtype: str


Holding = Mapping[str, Box]
"""A rank's share of a model's weights: the box of each tensor that the rank has anything of."""


def holding_of(slots: Sequence[TensorSlot]) -> dict[str, Box]:
    """The box of each weight among these slots, by name; other roles are left out."""
    return {
        slot.name: Box(tuple(slot.start or [0] * len(slot.shape)), tuple(slot.shape))
        for slot in slots
        if slot.role is Role.WEIGHT
    }


def tensors_of(slots: Sequence[TensorSlot]) -> dict[str, Tensor]:
    """The whole tensors that the weights among these slots are slices of."""
    return {
        slot.name: Tensor(tuple(slot.global_shape or slot.shape), slot.dtype)
        for slot in slots
        if slot.role is Role.WEIGHT
    }


def parts_of(holdings: Sequence[Holding]) -> list[list[int]]:
    """The ranks that share each part, in the order of their first rank."""
    parts: dict[tuple[tuple[str, Box], ...], list[int]] = {}
    for rank, holding in enumerate(holdings):
        parts.setdefault(tuple(sorted(holding.items())), []).append(rank)
    return list(parts.values())


@dataclass(frozen=True)
class Use:
    """The place of a slice in a target rank's tensor."""

    rank: int
    start: Index


@dataclass(frozen=True)
class Fetch:
    """A slice of one tensor that a node fetches once, for all of its ranks that hold it."""

    name: str
    part: int
    start: Index
    """Where the slice begins in the part's tensor."""
    size: Index
    num_bytes: int
    uses: tuple[Use, ...]


def fetches(
    tensors: Mapping[str, Tensor], parts: Sequence[Holding], ranks: Mapping[int, Holding]
) -> list[Fetch]:
    """Everything that the target ranks of one node need, spread over the parts that have it.

    Tensors that are cut alike on both sides are planned once.

    Args:   tensors: all tensors of the model, whatever is needed of it here.
            ranks: the holdings of the node's target ranks, by rank.
    Raises: CallerError: FAILED_PRECONDITION: no part holds something that is needed.
    """
    sources = _by_tensor(dict(enumerate(parts)))
    homes = _homes(tensors, sources)
    alike: dict[tuple[Tensor, _Held, _Held], list[str]] = {}
    for name, held in _by_tensor(ranks).items():
        alike.setdefault((tensors[name], held, sources.get(name, ())), []).append(name)
    found: list[Fetch] = []
    for (tensor, held, there), names in alike.items():
        item, home = item_bytes(tensor.dtype), homes[tensor, there]
        for cell in _cells(names[0], held, there):
            num_bytes = cell.num_elements * item
            part_of = home.parts_of(cell.box)
            for name in names:
                part = part_of[name]
                start = cell.sources[part]
                found.append(Fetch(name, part, start, cell.box.size, num_bytes, cell.uses))
    return sorted(found, key=lambda fetch: (fetch.part, fetch.name, fetch.start))


_Held = tuple[tuple[int, Box], ...]
"""The holders of one tensor: the number of each part or rank, with its box."""


@dataclass(frozen=True)
class _Cell:
    """A slice that every source and target box holds whole or not at all."""

    box: Box
    sources: Mapping[int, Index]
    """Each part that holds it, and where it begins in the part's tensor."""
    uses: tuple[Use, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.box.size)


@dataclass(frozen=True)
class _Home:
    """The part from which every node takes each slice of some tensors that the parts cut alike."""

    slices: list[tuple[Box, dict[str, int]]]
    """(a slice that every part holds whole or not at all, the part that it comes from by
    tensor)."""

    def parts_of(self, box: Box) -> dict[str, int]:
        """The part from which a slice comes, by tensor. Args: box: the slice, inside one of
        `slices`."""
        return next(parts for each, parts in self.slices if each.covers(box))


def _homes(
    tensors: Mapping[str, Tensor], sources: Mapping[str, _Held]
) -> dict[tuple[Tensor, _Held], _Home]:
    """The part from which each byte comes, for all targets: the least loaded one that has the byte.

    The largest slices are assigned first, so that small ones even the loads out.
    """
    alike: dict[tuple[Tensor, _Held], list[str]] = {}
    for name in sorted(tensors):
        alike.setdefault((tensors[name], sources.get(name, ())), []).append(name)
    planned = [
        (names, item_bytes(tensor.dtype), _cells(names[0], there, there), (tensor, there))
        for (tensor, there), names in alike.items()
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
            slices.append((cell.box, {names[m]: part for part, some in assigned for m in some}))
        homes[key] = _Home(slices)
    return homes


def _by_tensor(holdings: Mapping[int, Holding]) -> dict[str, _Held]:
    found: dict[str, list[tuple[int, Box]]] = {}
    for number, holding in holdings.items():
        for name, box in holding.items():
            found.setdefault(name, []).append((number, box))
    return {name: tuple(held) for name, held in found.items()}


def _cells(name: str, targets: _Held, sources: _Held) -> list[_Cell]:
    """The cells of everything that a target holds, none where there is no target.

    Raises: CallerError: no source holds one of them.
    """
    if not targets:
        return []
    boxes = [box for _, box in (*targets, *sources)]
    edges = [
        sorted({edge for box in boxes for edge in (box.start[dim], box.start[dim] + box.size[dim])})
        for dim in range(len(boxes[0].start))
    ]
    cells: list[_Cell] = []
    for spans in product(*(pairwise(each) for each in edges)):
        box = Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))
        uses = tuple(Use(rank, held.offset(box)) for rank, held in targets if held.covers(box))
        if not uses:
            continue
        there = {part: held.offset(box) for part, held in sources if held.covers(box)}
        if not there:
            raise CallerError(
                f"no part of the version has {name} from {list(box.start)} on",
                code=Code.FAILED_PRECONDITION,
                remedy="sync between deployments of one model only",
            )
        cells.append(_Cell(box, there, uses))
    return cells


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
    """The number of `count` items of this size that each part gets, the least loaded part first.

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


class Rows(NamedTuple):
    """Runs of adjacent bytes that lie at equal distances, in one memory and in another.

    A slice of some columns of a matrix is as many runs as the matrix has rows, and one `Rows`.
    """

    source: int
    """The offset of the first run in the source, in bytes."""
    target: int
    """The offset of the first run in the target, in bytes."""
    num_bytes: int
    """The length of each run."""
    num_rows: int = 1
    source_stride: int = 0
    """The bytes from the start of one run to that of the next; without meaning for a single run."""
    target_stride: int = 0

    def moved(self, source: int, target: int) -> Rows:
        """The same rows, moved by so many bytes in source and target."""
        return self._replace(source=self.source + source, target=self.target + target)

    def some(self, first: int, num_rows: int) -> Rows:
        """A number of the rows, from the row `first` on."""
        there, here = first * self.source_stride, first * self.target_stride
        return self.moved(there, here)._replace(num_rows=num_rows)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Each run as (offset in the source, offset in the target, length)."""
        for row in range(self.num_rows):
            there, here = row * self.source_stride, row * self.target_stride
            yield self.source + there, self.target + here, self.num_bytes


def byte_rows(
    size: Index, item_bytes: int, there: tuple[Index, Index], here: tuple[Index, Index]
) -> Iterator[Rows]:
    """The longest runs of a slice's bytes that are adjacent in sender and receiver.

    Args: size: the slice's size along each dim.
          there: (start of the slice in the sender's tensor, that tensor's shape).
          here: the same for the receiver's tensor.
    """
    dim, length = _adjacent(size, item_bytes, there[1], here[1])
    outer = max(0, dim - 1)
    rows = Rows(0, 0, length)
    if dim:
        strides = (_strides(item_bytes, shape)[outer] for _, shape in (there, here))
        rows = Rows(0, 0, length, size[outer], *strides)
    away, near = (_offsets(size, item_bytes, outer, *each) for each in (there, here))
    yield from map(rows.moved, away, near)


def box_runs(
    size: Sequence[int], item_bytes: int, start: Sequence[int], shape: Sequence[int]
) -> tuple[list[int], int]:
    """The longest runs of a box's bytes that are adjacent in its tensor, in order.

    Args:    start: where the box starts in the tensor. shape: the tensor's.
    Returns: the offset of each run in the tensor, and the length of all; in bytes.
    """
    dim, length = _adjacent(size, item_bytes, shape)
    return _offsets(size, item_bytes, dim, start, shape), length


def _adjacent(size: Sequence[int], item_bytes: int, *shapes: Sequence[int]) -> tuple[int, int]:
    """The shape of a slice's runs in tensors of these shapes.

    Returns: the number of outer dims over which the runs are spread, and the bytes of each run.
    """
    length, dim = item_bytes, len(size)
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
    """The offset of each run of a slice that starts there, in bytes; the runs are spread over the
    first `dim` dims."""
    strides = _strides(item_bytes, shape)
    offsets = [sum(at * stride for at, stride in zip(start, strides, strict=True))]
    for axis in range(dim):
        offsets = [base + step * strides[axis] for base in offsets for step in range(size[axis])]
    return offsets


def _strides(item_bytes: int, shape: Sequence[int]) -> list[int]:
    """The bytes from one index to the next along each dim of a tensor that lies end to end."""
    strides = [item_bytes] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return strides
