"""Boxes of tensors: what a reader needs of a weights version's parts, cut for the transfer.

Pure. A box is gathered from where its tensor lies, runs of adjacent bytes, and lies end to end at
the reader; cut along its outermost dim that is longer than one, its pieces do, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from phaseloom.common.errors import CallerError
from phaseloom.common.resharding import item_bytes
from phaseloom.common.statewire import Role, Slice, TensorSlot
from phaseloom.statemgr.core.dealing import Blocks
from phaseloom.statemgr.core.layout import check_layout

MAX_BATCH_BYTES = 4 * 1024 * 1024
"""That are asked for at once, at most."""
_BATCH_BOXES = 256


class Box(msgspec.Struct, frozen=True, array_like=True):
    """A box of one tensor, as state managers ask one another for it."""

    name: str
    start: list[int]
    size: list[int]


@dataclass(frozen=True)
class Batch:
    """Boxes of one part that are asked for at once."""

    part: str
    boxes: list[Box]
    spans: list[slice]
    """Where they belong, in their order; neighbours are one."""
    num_bytes: int


def slots_of(slices: Sequence[Slice], num_bytes: int) -> list[TensorSlot]:
    """The slices as a layout of the reader's memory.

    Raises: CallerError: one is no box, is there twice, or lies where it cannot.
    """
    slots = []
    for number, each in enumerate(slices):
        where = f"slices[{number}]"
        if (
            len(each.start) != len(each.size)
            or min([0, *each.start]) < 0
            or min([1, *each.size]) < 1
        ):
            raise CallerError(f"{each.start} + {each.size} is no box", field=where)
        if math.prod(each.size) * item_bytes(each.dtype) != each.num_bytes:
            raise CallerError(
                f"{each.dtype} {each.size} is not {each.num_bytes} bytes", field=where
            )
        name = f"{each.name} {each.start} + {each.size} of {each.part or 'all'}"
        slots.append(
            TensorSlot(name, Role.WEIGHT, each.dtype, each.size, each.offset, each.num_bytes)
        )
    check_layout(slots, num_bytes)
    return slots


def batches(slices: Sequence[Slice]) -> list[Batch]:
    """All of them, cut and put together to about the same size, part by part."""
    limit = Blocks(sum(each.num_bytes for each in slices)).size
    found: list[Batch] = []
    by_part: dict[str, list[Slice]] = {}
    for each in slices:
        by_part.setdefault(each.part, []).append(each)
    for part, mine in by_part.items():
        boxes: list[Box] = []
        spans: list[slice] = []
        size = 0
        for box, span in (piece for each in mine for piece in _pieces(each, limit)):
            num_bytes = span.stop - span.start
            if boxes and (size + num_bytes > limit or len(boxes) == _BATCH_BOXES):
                found.append(Batch(part, boxes, spans, size))
                boxes, spans, size = [], [], 0
            boxes.append(box)
            if spans and spans[-1].stop == span.start:
                spans[-1] = slice(spans[-1].start, span.stop)
            else:
                spans.append(span)
            size += num_bytes
        if boxes:
            found.append(Batch(part, boxes, spans, size))
    return found


def runs(tensor: TensorSlot, box: Box) -> tuple[list[int], int]:
    """(offsets from the tensor's beginning, length): the box's bytes, in its order.

    Raises: CallerError: the box is not inside the tensor, or larger than what is asked for at once.
    """
    shape, item = tensor.shape, item_bytes(tensor.dtype)
    if not len(box.start) == len(box.size) == len(shape) or not all(
        at >= 0 and size >= 1 and at + size <= whole
        for at, size, whole in zip(box.start, box.size, shape, strict=True)
    ):
        raise CallerError(
            f"{box.start} + {box.size} is not inside {tensor.name} of shape {shape}", field="boxes"
        )
    if math.prod(box.size) * item > MAX_BATCH_BYTES:
        raise CallerError(f"{box} is more than {MAX_BATCH_BYTES} bytes", field="boxes")
    strides = [item] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    inner, dim = item, len(shape)
    while dim and box.size[dim - 1] == shape[dim - 1]:
        dim -= 1
        inner *= box.size[dim]
    if dim:
        dim -= 1
        inner *= box.size[dim]
    offsets = [sum(at * stride for at, stride in zip(box.start, strides, strict=True))]
    for axis in range(dim):
        offsets = [
            base + step * strides[axis] for base in offsets for step in range(box.size[axis])
        ]
    return offsets, inner


def _pieces(whole: Slice, limit: int) -> Iterator[tuple[Box, slice]]:
    if whole.num_bytes <= limit:
        span = slice(whole.offset, whole.offset + whole.num_bytes)
        yield Box(whole.name, whole.start, whole.size), span
        return
    item = item_bytes(whole.dtype)
    at = whole.offset
    for start, size in _cut(whole.start, whole.size, item, limit):
        num_bytes = math.prod(size) * item
        yield Box(whole.name, start, size), slice(at, at + num_bytes)
        at += num_bytes


def _cut(
    start: list[int], size: list[int], item: int, limit: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Pieces of at most `limit` bytes, in order, each of adjacent bytes of the box."""
    dim = next((d for d, length in enumerate(size) if length > 1), len(size))
    if dim == len(size) or math.prod(size) * item <= limit:
        yield start, size
        return
    row_bytes = math.prod(size[dim + 1 :]) * item
    step = max(1, limit // row_bytes)
    for done in range(0, size[dim], step):
        taken = min(step, size[dim] - done)
        yield from _cut(
            [*start[:dim], start[dim] + done, *start[dim + 1 :]],
            [*size[:dim], taken, *size[dim + 1 :]],
            item,
            limit,
        )
