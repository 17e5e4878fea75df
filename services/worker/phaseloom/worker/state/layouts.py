"""Tensor layouts in memory, and a cache of values derived from them.

A deployment uses the same few layouts in every step. With tens of thousands of tensors, packing a
table, parsing one, or pairing the tensors of two layouts each takes tens of milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Generic, TypeVar

import msgspec

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.worker.state.heap import align

_MAX_ENTRIES = 4
"""Entries per kind. A rank registers, publishes and reads with one layout each, plus one spare."""

Value = TypeVar("Value")
Pairs = list[tuple[TensorSlot, TensorSlot]]


class _RecentValues(Generic[Value]):
    """A small cache of the newest values, keyed by slots and packed table.

    Slots match by identity: comparing them by value takes half as long as making most values again.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[list[TensorSlot], bytes, Value]] = []

    def get(self, slots: Sequence[TensorSlot], of: bytes, make: Callable[[], Value]) -> Value:
        """Return the cached value for these slots, or make and cache one.

        Raises: the errors of `make`; nothing is cached then.
        """
        for entry in self._entries:
            if len(entry[0]) == len(slots) and all(map(is_, entry[0], slots)) and entry[1] == of:
                return entry[2]
        value = make()
        self._entries = [(list(slots), of, value), *self._entries[: _MAX_ENTRIES - 1]]
        return value


class LayoutCache:
    """Cached values derived from layouts. Callers must not modify the returned lists."""

    def __init__(self) -> None:
        self._tables: _RecentValues[TensorTable] = _RecentValues()
        self._read: _RecentValues[TensorTable] = _RecentValues()
        self._cuts: _RecentValues[tuple[list[TensorSlot], Pairs]] = _RecentValues()
        self._paired: _RecentValues[Pairs] = _RecentValues()

    def table(self, slots: Sequence[TensorSlot]) -> TensorTable:
        return self._tables.get(slots, b"", lambda: TensorTable.of(slots))

    def read(self, packed_tensors: bytes) -> TensorTable:
        """Parse a packed table. Raises: CallerError: the bytes are not a table."""
        return self._read.get((), packed_tensors, lambda: TensorTable.read(packed_tensors))

    def cut(self, slots: Sequence[TensorSlot]) -> tuple[list[TensorSlot], Pairs]:
        """Return packed slots for a version of these tensors, and pairs of each slot with its
        packed slot."""

        def make() -> tuple[list[TensorSlot], Pairs]:
            packed_slots, _ = packed(slots)
            return packed_slots, list(zip(slots, packed_slots, strict=True))

        return self._cuts.get(slots, b"", make)

    def paired(self, table: TensorTable, slots: Sequence[TensorSlot]) -> Pairs:
        """Pair the table's tensors with the slots by name.

        Raises: CallerError: the table is of another model.
        """
        return self._paired.get(slots, table.packed, lambda: paired(table.tensors, slots))


def packed(slots: Sequence[TensorSlot]) -> tuple[list[TensorSlot], int]:
    """Return the same tensors packed from offset 0, and their total size in bytes."""
    packed_slots = []
    end = 0
    for slot in slots:
        packed_slots.append(msgspec.structs.replace(slot, offset=end))
        end = align(end + slot.num_bytes)
    return packed_slots, end


def gaps(slots: Sequence[TensorSlot], num_bytes: int) -> list[tuple[int, int]]:
    """Return [start, end) of the parts of a memory of this size that no tensor uses."""
    free, end = [], 0
    for slot in sorted(slots, key=lambda slot: slot.offset):
        if slot.offset > end:
            free.append((end, slot.offset))
        end = max(end, slot.offset + slot.num_bytes)
    return [*free, (end, num_bytes)] if end < num_bytes else free


def paired(
    tensors: list[TensorSlot], slots: Sequence[TensorSlot]
) -> list[tuple[TensorSlot, TensorSlot]]:
    """Pair the version's tensors with the slots by name.

    Raises: CallerError: the version is of another model.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    if by_name.keys() != {slot.name for slot in slots}:
        unmatched = sorted(by_name.keys() ^ {slot.name for slot in slots})
        raise CallerError(
            f"the version is of another model: {', '.join(unmatched[:3])} exists on one side only",
            code=Code.FAILED_PRECONDITION,
            remedy="sync only between deployments of the same model",
        )
    pairs = [(by_name[slot.name], slot) for slot in slots]
    for tensor, slot in pairs:
        stored = (tensor.dtype, tensor.shape, tensor.num_bytes)
        if stored != (slot.dtype, slot.shape, slot.num_bytes):
            raise CallerError(
                f"{slot.name} is {tensor.dtype}{tensor.shape} in the version and "
                f"{slot.dtype}{slot.shape} here, in {tensor.num_bytes} and {slot.num_bytes} bytes",
                code=Code.FAILED_PRECONDITION,
                remedy="sync only between deployments of the same model",
            )
    return pairs
