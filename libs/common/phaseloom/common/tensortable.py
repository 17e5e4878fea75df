"""Where a layout's tensors lie, as columns: what travels, is recorded and is compared as one.

Tens of thousands of `TensorSlot`s take tens of milliseconds to decode; their columns take a few,
and equal bytes are equal layouts, so whoever has seen them before need not decode them at all. The
slots themselves are made when somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from operator import add, le
from typing import Annotated, TypeVar

import msgspec

from phaseloom.common.errors import CallerError
from phaseloom.common.statewire import Role, TensorSlot

ALIGNMENT_BYTES = 64
MAX_TENSORS = 2**18
"""Of one rank: decoding what a hostile one sends must not exhaust memory."""
_MAX_DIMS = 64

T = TypeVar("T")
_Column = Annotated[list[T], msgspec.Meta(max_length=MAX_TENSORS)]
_Dims = Annotated[list[int], msgspec.Meta(max_length=_MAX_DIMS)]


class _Columns(msgspec.Struct, frozen=True, array_like=True):
    names: _Column[str]
    roles: _Column[Role]
    dtypes: _Column[str]
    shapes: _Column[_Dims]
    offsets: _Column[int]
    sizes: _Column[int]
    global_shapes: _Column[_Dims]
    """Empty: every tensor is here whole. So is `starts`."""
    starts: _Column[_Dims]


_DECODER = msgspec.msgpack.Decoder(_Columns)


class TensorTable:
    """Immutable. Equal where the packed bytes are."""

    def __init__(self, packed: bytes, columns: _Columns) -> None:
        self.packed = packed
        self._columns = columns

    @classmethod
    def of(cls, tensors: Sequence[TensorSlot]) -> TensorTable:
        """Equal for equal tensors in the same order."""
        is_whole = not any(slot.global_shape or slot.start for slot in tensors)
        columns = _Columns(
            names=[slot.name for slot in tensors],
            roles=[slot.role for slot in tensors],
            dtypes=[slot.dtype for slot in tensors],
            shapes=[slot.shape for slot in tensors],
            offsets=[slot.offset for slot in tensors],
            sizes=[slot.num_bytes for slot in tensors],
            global_shapes=[] if is_whole else [slot.global_shape for slot in tensors],
            starts=[] if is_whole else [slot.start for slot in tensors],
        )
        return cls(msgspec.msgpack.encode(columns), columns)

    @classmethod
    def read(cls, packed: bytes | msgspec.Raw) -> TensorTable:
        """Raises: CallerError: it is no table."""
        try:
            columns = _DECODER.decode(packed)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _unreadable(str(error)) from None
        always = (columns.roles, columns.dtypes, columns.shapes, columns.offsets, columns.sizes)
        slices = (columns.global_shapes, columns.starts)
        count = len(columns.names)
        if {len(c) for c in always} != {count} or {len(c) for c in slices} not in ({0}, {count}):
            raise _unreadable("its columns differ in length")
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
        whole: list[list[int]] = [[]] * len(self)
        rows = zip(
            columns.names,
            columns.roles,
            columns.dtypes,
            columns.shapes,
            columns.offsets,
            columns.sizes,
            columns.global_shapes or whole,
            columns.starts or whole,
            strict=True,
        )
        return [TensorSlot(*row) for row in rows]

    @cached_property
    def end(self) -> int | None:
        """Bytes up to where its last tensor ends; None: names come twice, or tensors lie where
        they cannot, and going through them one by one tells which.

        Cost: O(n log n) in tensors, once.
        """
        columns = self._columns
        if not columns.names:
            return 0
        if len(set(columns.names)) != len(self):
            return None
        offsets, sizes = columns.offsets, columns.sizes
        if min(offsets) < 0 or min(sizes) < 0 or any(map(ALIGNMENT_BYTES.__rmod__, offsets)):
            return None
        end = _end_of(offsets, sizes)
        if end is None:
            places = sorted(zip(offsets, sizes, strict=True))
            end = _end_of([place[0] for place in places], [place[1] for place in places])
        return end


def _end_of(offsets: list[int], sizes: list[int]) -> int | None:
    """Of the last one, where each begins behind the one before."""
    ends = list(map(add, offsets, sizes))
    return ends[-1] if all(map(le, ends, offsets[1:])) else None


EMPTY = TensorTable.of([])


def _unreadable(why: str) -> CallerError:
    return CallerError(
        f"no table of tensors: {why}",
        field="tensors",
        remedy=f"send the packed columns of at most {MAX_TENSORS} tensors",
    )
