"""Tensor slices: the boxes of tensors that a reader needs, split into batches for the transfer.

Pure. The sender gathers a box from the runs of adjacent bytes that it occupies in the tensor. In
the reader's memory the bytes of a slice are contiguous. A piece that is cut along the outermost dim
longer than one is contiguous there too. A piece that was cut in another way, because a peer fetches
the rest of the box, consists of several runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple, TypeVar

import msgspec

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.state_layout import Role, Slice, TensorSlot
from phaseloom.common.tensors.resharding import box_runs, item_bytes
from phaseloom.statemgr.records.layouts import check_layout

MAX_BATCH_BYTES = 8 * 1024 * 1024
"""Most bytes in one request: a block of a state file."""
_BATCH_BYTES = 4 * 1024 * 1024
"""Largest batch of tensor slices."""
MAX_BATCH_BOXES = 256
_SMALL_BATCH_BYTES = 512 * 1024
"""Batch size of a small transfer. A request takes as long as moving these bytes."""
_MIN_CHUNKS = 64
"""Chunks of a large transfer, at least, so that every node of a site has work."""
_STEP_BYTES = 64 * 1024
"""Chunk sizes are multiples of this."""
_MAX_ENCODED_BYTES = 48 * 1024
"""Size limit for the boxes of a batch in its request message; the rest of the message is a few
KiB."""
_RAW = re.compile(r"bytes from ([0-9]{1,18})")

T = TypeVar("T")


class Box(msgspec.Struct, frozen=True, array_like=True):
    """A box of one tensor, as state managers name it to each other."""

    name: str
    start: list[int]
    size: list[int]


class Piece(NamedTuple):
    """A box of a slice: the unit of requests."""

    slice: Slice
    box: Box
    """Inside the slice, in coordinates of the part's tensor."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.box.size) * item_bytes(self.slice.dtype)

    def cut(self, limit_bytes: int) -> Iterator[Piece]:
        """Cut the piece into smaller ones, in order, each of at most `limit_bytes` adjacent
        bytes."""
        item = item_bytes(self.slice.dtype)
        for start, size in _split(self.box.start, self.box.size, item, limit_bytes):
            yield Piece(self.slice, Box(self.box.name, start, size))


@dataclass(frozen=True)
class Batch:
    """Pieces of one part that are requested together."""

    part: str
    pieces: list[Piece]

    @property
    def boxes(self) -> list[Box]:
        return [piece.box for piece in self.pieces]

    @cached_property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)

    @property
    def max_spans(self) -> int:
        """An upper bound for the number of `spans`, which are slow to compute if there are many."""
        return sum(
            1 if piece.box.size[1:] == piece.slice.size[1:] else math.prod(piece.box.size[:-1])
            for piece in self.pieces
        )

    @cached_property
    def spans(self) -> list[slice]:
        """The ranges of memory that the boxes fill, in order; adjacent ranges are merged."""
        spans: list[slice] = []
        for piece in self.pieces:
            offsets, length = runs(slot_of(piece.slice), relative_to(piece.slice, piece.box))
            for at in offsets:
                if spans and spans[-1].stop == at + piece.slice.offset:
                    spans[-1] = slice(spans[-1].start, spans[-1].stop + length)
                else:
                    spans.append(slice(at + piece.slice.offset, at + piece.slice.offset + length))
        return spans

    def put(self, memory: memoryview, content: bytes | memoryview) -> None:
        """Write the bytes of the boxes, given end to end, to their ranges of memory.

        Raises: CallerError: there are too few or too many bytes.
        """
        if len(content) != self.num_bytes:
            raise CallerError(
                f"expected {self.num_bytes} bytes, got {len(content)}", field="slices"
            )
        at = 0
        for span in self.spans:
            length = span.stop - span.start
            memory[span] = content[at : at + length]
            at += length

    def split(self, shares: Sequence[Sequence[Fragment]]) -> list[Batch]:
        """Split the batch into one batch for each share.

        Raises: CallerError: the shares together are not this batch.
        """
        missing = [[box] for box in self.boxes]
        split_batches = []
        for fragments in shares:
            pieces = []
            for number, box in fragments:
                if not (0 <= number < len(missing) and contains(self.pieces[number].box, box)):
                    raise CallerError(f"{box} is not inside box {number}", field="boxes")
                missing[number] = subtract(missing[number], box)
                pieces.append(Piece(self.pieces[number].slice, box))
            split_batches.append(Batch(self.part, pieces))
        if any(missing) or sum(share.num_bytes for share in split_batches) != self.num_bytes:
            raise CallerError("the shares do not add up to the request", field="boxes")
        return split_batches


Fragment = tuple[int, Box]
"""A box inside a box of a request: (index of the request's box, inner box)."""


def slots_of(slices: Sequence[Slice], num_bytes: int) -> list[TensorSlot]:
    """Convert slices to a layout of the reader's memory.

    Raises: CallerError: a slice is not a box, occurs twice, or is at an impossible offset.
    """
    slots = []
    for number, slice_ in enumerate(slices):
        field = f"slices[{number}]"
        if (
            len(slice_.start) != len(slice_.size)
            or min([0, *slice_.start]) < 0
            or min([1, *slice_.size]) < 1
        ):
            raise CallerError(f"{slice_.start} + {slice_.size} is not a box", field=field)
        if math.prod(slice_.size) * item_bytes(slice_.dtype) != slice_.num_bytes:
            raise CallerError(
                f"{slice_.dtype} {slice_.size} is not {slice_.num_bytes} bytes", field=field
            )
        name = f"{slice_.name} {slice_.start} + {slice_.size} of {slice_.part or 'all'}"
        slots.append(
            TensorSlot(
                name, Role.WEIGHT, slice_.dtype, slice_.size, slice_.offset, slice_.num_bytes
            )
        )
    check_layout(slots, num_bytes)
    return slots


def slot_of(slice_: Slice) -> TensorSlot:
    """Convert a slice to a tensor of the reader's memory."""
    return TensorSlot(
        slice_.name, Role.WEIGHT, slice_.dtype, slice_.size, slice_.offset, slice_.num_bytes
    )


def slices_of_part(part: str, tensors: Iterable[TensorSlot], num_bytes: int) -> list[Slice]:
    """The slices that cover a whole part, each at its offset in the part: all tensors, and the
    bytes between them."""
    slices: list[Slice] = []
    end = 0
    for slot in sorted(tensors, key=attrgetter("offset")):
        if not _is_plain(slot):
            continue
        if end < slot.offset:
            slices.append(_raw(part, end, slot.offset))
        start = [0] * len(slot.shape)
        slices.append(
            Slice(part, slot.name, slot.dtype, start, slot.shape, slot.offset, slot.num_bytes)
        )
        end = slot.offset + slot.num_bytes
    return [*slices, _raw(part, end, num_bytes)] if end < num_bytes else slices


def raw_slot(name: str, num_bytes: int) -> TensorSlot | None:
    """The slot with this name that holds the bytes between tensors, in a part of this size; None:
    the name is not of such a slot."""
    place = _RAW.fullmatch(name)
    if place is None or int(place[1]) >= num_bytes:
        return None
    size = num_bytes - int(place[1])
    return TensorSlot(name, Role.WEIGHT, "uint8", [size], int(place[1]), size)


def _raw(part: str, start: int, end: int) -> Slice:
    return Slice(part, f"bytes from {start}", "uint8", [0], [end - start], start, end - start)


def _is_plain(slot: TensorSlot) -> bool:
    """Whether the slot's bytes are just its elements, end to end. Other slots travel as raw
    bytes."""
    try:
        return slot.num_bytes == math.prod(slot.shape) * item_bytes(slot.dtype) > 0
    except CallerError:
        return False


def box_of(slice_: Slice) -> Box:
    """The box of the part's tensor that a slice covers."""
    return Box(slice_.name, slice_.start, slice_.size)


def relative_to(slice_: Slice, box: Box) -> Box:
    """Convert a box from coordinates of the part's tensor to those of a slice."""
    start = [at - zero for at, zero in zip(box.start, slice_.start, strict=True)]
    return Box(slice_.name, start, box.size)


def chunk_bytes(num_bytes: int) -> int:
    """Size of the chunks in which the nodes of a site share a transfer."""
    even_share = -(-num_bytes // _MIN_CHUNKS)
    steps = -(-even_share // _STEP_BYTES)
    return min(_BATCH_BYTES, max(1, steps) * _STEP_BYTES)


def batches(slices: Sequence[Slice]) -> list[Batch]:
    """Split and group all slices into batches of about the same size, part by part. A batch is one
    chunk, or several small ones."""
    limit = max(_SMALL_BATCH_BYTES, chunk_bytes(sum(slice_.num_bytes for slice_ in slices)))
    grouped_batches: list[Batch] = []
    by_part: dict[str, list[Slice]] = {}
    for slice_ in slices:
        by_part.setdefault(slice_.part, []).append(slice_)
    for part, part_slices in by_part.items():
        whole_pieces = (Piece(slice_, box_of(slice_)) for slice_ in part_slices)
        pieces = (piece for slice_ in whole_pieces for piece in slice_.cut(limit))
        grouped_batches += [Batch(part, group) for group in grouped(pieces, limit)]
    return grouped_batches


@dataclass(slots=True)
class Room:
    """The remaining room in one request."""

    limit_bytes: int
    num_boxes: int = 0
    num_bytes: int = 0
    encoded_bytes: int = 0

    def take(self, boxes: Sequence[Box], num_bytes: int) -> bool:
        """Count boxes if they fit into the request. The first boxes always fit.

        Returns: whether they fit.
        """
        encoded_bytes = sum(len(msgspec.msgpack.encode(box)) for box in boxes)
        is_too_much = (
            self.num_boxes + len(boxes) > MAX_BATCH_BOXES
            or self.num_bytes + num_bytes > self.limit_bytes
            or self.encoded_bytes + encoded_bytes > _MAX_ENCODED_BYTES
        )
        if self.num_boxes and is_too_much:
            return False
        self.num_boxes += len(boxes)
        self.num_bytes += num_bytes
        self.encoded_bytes += encoded_bytes
        return True


def split_into_requests(
    items: Iterable[T], box_of: Callable[[T], tuple[Box, int]], limit_bytes: int
) -> Iterator[list[T]]:
    """Group the items in order, each group as large as one request may be.

    Args: box_of: returns the box of an item and its number of bytes.
    """
    group: list[T] = []
    room = Room(limit_bytes)
    for item in items:
        box, num_bytes = box_of(item)
        if not room.take([box], num_bytes):
            yield group
            group, room = [], Room(limit_bytes)
            room.take([box], num_bytes)
        group.append(item)
    if group:
        yield group


def grouped(pieces: Iterable[Piece], limit_bytes: int) -> Iterator[list[Piece]]:
    """Group the pieces in order, each group as large as one request may be."""
    return split_into_requests(pieces, lambda piece: (piece.box, piece.num_bytes), limit_bytes)


def contains(outer: Box, inner: Box) -> bool:
    return outer.name == inner.name and overlap(outer, inner) == inner


def overlap(first: Box, second: Box) -> Box | None:
    """The intersection of two boxes of one tensor; None: it is empty, or their dims differ."""
    if len({len(first.start), len(first.size), len(second.start), len(second.size)}) > 1:
        return None
    start, size = [], []
    for a, n, b, m in zip(first.start, first.size, second.start, second.size, strict=True):
        begin, end = max(a, b), min(a + n, b + m)
        if begin >= end:
            return None
        start.append(begin)
        size.append(end - begin)
    return Box(first.name, start, size)


def subtract(boxes: Iterable[Box], removed: Box) -> list[Box]:
    """Remove a box from disjoint boxes of one tensor. Returns: disjoint boxes."""
    remaining: list[Box] = []
    for box in boxes:
        common = overlap(box, removed)
        remaining += [box] if common is None else _subtract_box(box, common)
    return remaining


def _subtract_box(box: Box, removed: Box) -> list[Box]:
    remaining: list[Box] = []
    start, size = list(box.start), list(box.size)
    for dim, (at, length) in enumerate(zip(removed.start, removed.size, strict=True)):
        before, after = at - start[dim], start[dim] + size[dim] - at - length
        for begin, count in ((start[dim], before), (at + length, after)):
            if count:
                remaining.append(
                    Box(
                        box.name,
                        [*start[:dim], begin, *start[dim + 1 :]],
                        [*size[:dim], count, *size[dim + 1 :]],
                    )
                )
        start[dim], size[dim] = at, length
    return remaining


def bytes_of(tensor: TensorSlot, box: Box) -> int:
    """The number of bytes of a box.

    Raises: CallerError: the box is not inside the tensor, or too large for one request.
    """
    shape = tensor.shape
    if not len(box.start) == len(box.size) == len(shape) or not all(
        at >= 0 and size >= 1 and at + size <= extent
        for at, size, extent in zip(box.start, box.size, shape, strict=True)
    ):
        raise CallerError(
            f"{box.start} + {box.size} is not inside {tensor.name} of shape {shape}", field="boxes"
        )
    num_bytes = math.prod(box.size) * item_bytes(tensor.dtype)
    if num_bytes > MAX_BATCH_BYTES:
        raise CallerError(f"{box} is larger than {MAX_BATCH_BYTES} bytes", field="boxes")
    return num_bytes


def runs(tensor: TensorSlot, box: Box) -> tuple[list[int], int]:
    """The runs of adjacent bytes of a box, in order: (offsets in the tensor, length)."""
    bytes_of(tensor, box)
    return box_runs(box.size, item_bytes(tensor.dtype), box.start, tensor.shape)


def _split(
    start: list[int], size: list[int], item: int, limit: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Cut a box into boxes, in order, each of at most `limit` adjacent bytes."""
    dim = next((d for d, length in enumerate(size) if length > 1), len(size))
    if dim == len(size) or math.prod(size) * item <= limit:
        yield start, size
        return
    row_bytes = math.prod(size[dim + 1 :]) * item
    step = max(1, limit // row_bytes)
    for done in range(0, size[dim], step):
        length = min(step, size[dim] - done)
        yield from _split(
            [*start[:dim], start[dim] + done, *start[dim + 1 :]],
            [*size[:dim], length, *size[dim + 1 :]],
            item,
            limit,
        )
