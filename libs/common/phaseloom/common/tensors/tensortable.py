"""Tensor tables: the places of a layout's tensors, as columns that travel and are compared as one.

Tens of thousands of `TensorSlot`s take tens of milliseconds to decode; their columns take a few:
attributes that many tensors of a model have in common are there once, and numbers are packed. Equal
bytes are equal layouts, so a reader that has seen the bytes before need not decode them at all. The
slots themselves are made when somebody asks for them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cached_property
from itertools import islice
from operator import add, le
from typing import Annotated, TypeVar

import msgspec

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.state_layout import Role, TensorSlot

ALIGNMENT_BYTES = 64
MAX_TENSORS = 2**18
"""The most tensors of one rank: decoding a table that a hostile rank sends must not exhaust
memory."""
_MAX_DIMS = 64
_ALIGNED = bytes(range(0, 256, ALIGNMENT_BYTES))
"""Every value of the lowest byte of an aligned offset."""
_POSITIVE = bytes(range(128))
"""Every value of the highest byte of a number that is not below zero."""

T = TypeVar("T")
_Column = Annotated[list[T], msgspec.Meta(max_length=MAX_TENSORS)]
_Dims = Annotated[list[int], msgspec.Meta(max_length=_MAX_DIMS)]


class _Kind(msgspec.Struct, frozen=True, array_like=True):
    """The attributes that many tensors have in common."""

    role: Role
    dtype: str
    shape: _Dims
    global_shape: _Dims
    start: _Dims


class _Columns(msgspec.Struct, frozen=True, array_like=True):
    names: _Column[str]
    kinds: _Column[_Kind]
    """Each kind once, in the order in which the kinds first occur."""
    numbers: bytes
    """The place of each tensor's kind in `kinds`, as uint32."""
    offsets: bytes
    """The offset of each tensor, as int64; all numbers are little-endian."""
    sizes: bytes
    """The size of each tensor in bytes, as int64."""


_DECODER = msgspec.msgpack.Decoder(_Columns)


class TensorTable:
    """An immutable table of tensors; two tables are equal where their packed bytes are."""

    def __init__(self, packed: bytes, columns: _Columns) -> None:
        self.packed = packed
        self._columns = columns

    @classmethod
    def of(cls, tensors: Sequence[TensorSlot]) -> TensorTable:
        """The table of these tensors; equal for equal tensors in the same order.

        Raises: CallerError: an offset or a size is beyond 64 bits.
        """
        kinds, numbers = _kinds_of(tensors)
        columns = _Columns(
            names=[slot.name for slot in tensors],
            kinds=kinds,
            numbers=_packed("I", numbers),
            offsets=_packed("q", [slot.offset for slot in tensors]),
            sizes=_packed("q", [slot.num_bytes for slot in tensors]),
        )
        return cls(msgspec.msgpack.encode(columns), columns)

    @classmethod
    def read(cls, packed: bytes | msgspec.Raw) -> TensorTable:
        """The table with these packed bytes.

        Raises: CallerError: the bytes are no table.
        """
        try:
            columns = _DECODER.decode(packed)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _unreadable(str(error)) from None
        count = len(columns.names)
        lengths = (len(columns.numbers), len(columns.offsets), len(columns.sizes))
        if lengths != (4 * count, 8 * count, 8 * count):
            raise _unreadable("its columns differ in length")
        if max(_unpacked("I", columns.numbers), default=-1) >= len(columns.kinds):
            raise _unreadable("a tensor is of no kind")
        return cls(bytes(packed), columns)

    def __len__(self) -> int:
        return len(self._columns.names)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorTable) and self.packed == other.packed

    def __hash__(self) -> int:
        return hash(self.packed)

    @cached_property
    def tensors(self) -> list[TensorSlot]:
        columns = self._columns
        kinds = [columns.kinds[number] for number in _unpacked("I", columns.numbers)]
        rows = zip(
            columns.names,
            [kind.role for kind in kinds],
            [kind.dtype for kind in kinds],
            [kind.shape for kind in kinds],
            _unpacked("q", columns.offsets),
            _unpacked("q", columns.sizes),
            [kind.global_shape for kind in kinds],
            [kind.start for kind in kinds],
            strict=True,
        )
        return [TensorSlot(*row) for row in rows]

    @cached_property
    def end(self) -> int | None:
        """The offset at which the last tensor ends, in bytes; None: the table is not valid.

        A table is not valid where a name occurs twice, or a tensor is not aligned, lies below zero
        or overlaps another. A pass through the tensors one by one then finds which.

        Cost: O(n log n) in tensors, once.
        """
        columns = self._columns
        if not columns.names:
            return 0
        # Byte by byte, for all numbers at once.
        is_unaligned = columns.offsets[::8].strip(_ALIGNED)
        is_below_zero = (columns.offsets[7::8] + columns.sizes[7::8]).strip(_POSITIVE)
        if is_unaligned or is_below_zero or len(set(columns.names)) != len(self):
            return None
        offsets, sizes = _unpacked("q", columns.offsets), _unpacked("q", columns.sizes)
        end = _end_of(offsets, sizes)
        if end is None:
            places = sorted(zip(offsets, sizes, strict=True))
            end = _end_of([place[0] for place in places], [place[1] for place in places])
        return end


def _kinds_of(tensors: Sequence[TensorSlot]) -> tuple[list[_Kind], list[int]]:
    """The distinct kinds of tensors, and the number of each tensor's kind among them."""
    known: dict[tuple[object, ...], int] = {}
    kinds: list[_Kind] = []
    numbers = []
    for slot in tensors:
        shape, global_shape, start = slot.shape, slot.global_shape, slot.start
        key: tuple[object, ...] = (slot.role, slot.dtype, tuple(shape))
        if global_shape or start:
            key = (*key, tuple(global_shape), tuple(start))
        number = known.get(key)
        if number is None:
            number = known[key] = len(kinds)
            kinds.append(_Kind(slot.role, slot.dtype, shape, global_shape, start))
        numbers.append(number)
    return kinds, numbers


def _packed(code: str, numbers: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"<{len(numbers)}{code}", *numbers)
    except struct.error as error:
        raise _unreadable(str(error)) from None


def _unpacked(code: str, column: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(column) // struct.calcsize('<' + code)}{code}", column)


def _end_of(offsets: Sequence[int], sizes: Sequence[int]) -> int | None:
    """The end of the last tensor; None where one begins before the end of the one before it."""
    ends = map(add, offsets, sizes)
    is_behind = all(map(le, ends, islice(offsets, 1, None)))
    return offsets[-1] + sizes[-1] if is_behind else None


EMPTY = TensorTable.of([])


def _unreadable(why: str) -> CallerError:
    return CallerError(
        f"no table of tensors: {why}",
        field="tensors",
        remedy=f"send the packed columns of at most {MAX_TENSORS} tensors",
    )
