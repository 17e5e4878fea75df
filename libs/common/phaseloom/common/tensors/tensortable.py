"""Tensor tables: the positions of a layout's tensors, stored as columns.

Decoding tens of thousands of `TensorSlot`s takes tens of milliseconds; decoding their columns takes
a few. Attributes that many tensors share are stored once, and numbers are packed. Equal bytes mean
equal layouts, so a reader need not decode bytes that it has seen before. The slots themselves are
created on demand.
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
"""Maximum number of tensors of one rank. Decoding a table from a hostile rank must not exhaust
memory."""
_MAX_DIMS = 64
_ALIGNED = bytes(range(0, 256, ALIGNMENT_BYTES))
"""All values of the lowest byte of an aligned offset."""
_POSITIVE = bytes(range(128))
"""All values of the highest byte of a non-negative number."""

T = TypeVar("T")
_Column = Annotated[list[T], msgspec.Meta(max_length=MAX_TENSORS)]
_Dims = Annotated[list[int], msgspec.Meta(max_length=_MAX_DIMS)]


class _SharedAttributes(msgspec.Struct, frozen=True, array_like=True):
    """Attributes that many tensors share."""

    role: Role
    dtype: str
    shape: _Dims
    global_shape: _Dims
    start: _Dims


class _Columns(msgspec.Struct, frozen=True, array_like=True):
    names: _Column[str]
    kinds: _Column[_SharedAttributes]
    """Each kind once, in order of first occurrence."""
    numbers: bytes
    """Index of each tensor's kind in `kinds`, as uint32."""
    offsets: bytes
    """Offset of each tensor, as int64. All numbers are little-endian."""
    sizes: bytes
    """Size of each tensor in bytes, as int64."""


_DECODER = msgspec.msgpack.Decoder(_Columns)


class TensorTable:
    """An immutable table of tensors. Two tables are equal if their packed bytes are equal."""

    def __init__(self, packed: bytes, columns: _Columns) -> None:
        self.packed = packed
        self._columns = columns

    @classmethod
    def of(cls, tensors: Sequence[TensorSlot]) -> TensorTable:
        """Build the table of these tensors. Equal tensors in the same order give equal tables.

        Raises: CallerError: an offset or a size exceeds 64 bits.
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
        """Decode the packed bytes of a table.

        Raises: CallerError: the bytes are not a table.
        """
        try:
            columns = _DECODER.decode(packed)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _unreadable(str(error)) from None
        count = len(columns.names)
        lengths = (len(columns.numbers), len(columns.offsets), len(columns.sizes))
        if lengths != (4 * count, 8 * count, 8 * count):
            raise _unreadable("the columns differ in length")
        if max(_unpacked("I", columns.numbers), default=-1) >= len(columns.kinds):
            raise _unreadable("a tensor has an unknown kind")
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
        """The end offset of the last tensor, in bytes; None: the table is invalid.

        A table is invalid if a name occurs twice, or if a tensor is unaligned, negative in offset
        or size, or overlaps another. To find the tensor at fault, check the tensors one by one.

        Cost: O(n log n) in the number of tensors, once.
        """
        columns = self._columns
        if not columns.names:
            return 0
        # Check one byte of every number at once instead of unpacking them.
        is_unaligned = columns.offsets[::8].strip(_ALIGNED)
        is_below_zero = (columns.offsets[7::8] + columns.sizes[7::8]).strip(_POSITIVE)
        if is_unaligned or is_below_zero or len(set(columns.names)) != len(self):
            return None
        offsets, sizes = _unpacked("q", columns.offsets), _unpacked("q", columns.sizes)
        end = _end_of(offsets, sizes)
        # Usually the tensors are in order of offset; sort them only if they are not.
        if end is None:
            spans = sorted(zip(offsets, sizes, strict=True))
            end = _end_of([place[0] for place in spans], [place[1] for place in spans])
        return end


def _kinds_of(tensors: Sequence[TensorSlot]) -> tuple[list[_SharedAttributes], list[int]]:
    numbers_by_key: dict[tuple[object, ...], int] = {}
    kinds: list[_SharedAttributes] = []
    numbers = []
    for slot in tensors:
        shape, global_shape, start = slot.shape, slot.global_shape, slot.start
        key: tuple[object, ...] = (slot.role, slot.dtype, tuple(shape))
        if global_shape or start:
            key = (*key, tuple(global_shape), tuple(start))
        number = numbers_by_key.get(key)
        if number is None:
            number = numbers_by_key[key] = len(kinds)
            kinds.append(_SharedAttributes(slot.role, slot.dtype, shape, global_shape, start))
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
    """Return the end of the last tensor; None if a tensor starts before the end of the previous
    one."""
    ends = map(add, offsets, sizes)
    is_behind = all(map(le, ends, islice(offsets, 1, None)))
    return offsets[-1] + sizes[-1] if is_behind else None


EMPTY = TensorTable.of([])


def _unreadable(problem: str) -> CallerError:
    return CallerError(
        f"invalid tensor table: {problem}",
        field="tensors",
        remedy=f"send the packed columns of at most {MAX_TENSORS} tensors",
    )
