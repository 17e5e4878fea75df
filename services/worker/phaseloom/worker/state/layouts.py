"""Layouts of tensors in memory, and a cache of values that follow from them.

A deployment has the same few layouts in every step. With tens of thousands of tensors it takes tens
of milliseconds to pack a table, to read one, and to find for each tensor of one layout its place in
the other.
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

_NUM_KEPT = 4
"""The number of entries of each kind: those that a rank registers, publishes and reads, and one
more."""

Value = TypeVar("Value")
Pairs = list[tuple[TensorSlot, TensorSlot]]


class _Newest(Generic[Value]):
    """The values that were made last, by the slots and the table that they were made of.

    Slots are the same when they are the same objects: comparing them by value takes half as long as
    making most values again.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[list[TensorSlot], bytes, Value]] = []

    def get(self, slots: Sequence[TensorSlot], of: bytes, make: Callable[[], Value]) -> Value:
        """The value kept for these slots, or a new one.

        Raises: as `make`; nothing is kept then.
        """
        for entry in self._kept:
            if len(entry[0]) == len(slots) and all(map(is_, entry[0], slots)) and entry[1] == of:
                return entry[2]
        made = make()
        self._kept = [(list(slots), of, made), *self._kept[: _NUM_KEPT - 1]]
        return made


class Layouts:
    """Values made from layouts. Nobody may change the lists that it returns."""

    def __init__(self) -> None:
        self._tables: _Newest[TensorTable] = _Newest()
        self._read: _Newest[TensorTable] = _Newest()
        self._cuts: _Newest[tuple[list[TensorSlot], Pairs]] = _Newest()
        self._paired: _Newest[Pairs] = _Newest()

    def table(self, slots: Sequence[TensorSlot]) -> TensorTable:
        return self._tables.get(slots, b"", lambda: TensorTable.of(slots))

    def read(self, packed_tensors: bytes) -> TensorTable:
        """The table with these packed bytes. Raises: CallerError: they are no table."""
        return self._read.get((), packed_tensors, lambda: TensorTable.read(packed_tensors))

    def cut(self, slots: Sequence[TensorSlot]) -> tuple[list[TensorSlot], Pairs]:
        """The places of these slots alone in a version, and each slot with its place."""

        def make() -> tuple[list[TensorSlot], Pairs]:
            places, _ = packed(slots)
            return places, list(zip(slots, places, strict=True))

        return self._cuts.get(slots, b"", make)

    def paired(self, table: TensorTable, slots: Sequence[TensorSlot]) -> Pairs:
        """Each slot with the table's tensor of its name.

        Raises: CallerError: they are not of the same model.
        """
        return self._paired.get(slots, table.packed, lambda: paired(table.tensors, slots))


def packed(slots: Sequence[TensorSlot]) -> tuple[list[TensorSlot], int]:
    """The same tensors one after another from offset 0, and the number of bytes that they take."""
    places = []
    end = 0
    for slot in slots:
        places.append(msgspec.structs.replace(slot, offset=end))
        end = align(end + slot.num_bytes)
    return places, end


def paired(
    tensors: list[TensorSlot], slots: Sequence[TensorSlot]
) -> list[tuple[TensorSlot, TensorSlot]]:
    """Each slot with the version's tensor of its name.

    Raises: CallerError: they are not of the same model.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    if by_name.keys() != {slot.name for slot in slots}:
        odd = sorted(by_name.keys() ^ {slot.name for slot in slots})
        raise CallerError(
            f"the version is of another model: {', '.join(odd[:3])} is on one side only",
            code=Code.FAILED_PRECONDITION,
            remedy="sync between deployments of one model only",
        )
    pairs = [(by_name[slot.name], slot) for slot in slots]
    for tensor, slot in pairs:
        there = (tensor.dtype, tensor.shape, tensor.num_bytes)
        if there != (slot.dtype, slot.shape, slot.num_bytes):
            raise CallerError(
                f"{slot.name} is {tensor.dtype}{tensor.shape} in the version and "
                f"{slot.dtype}{slot.shape} here, in {tensor.num_bytes} and {slot.num_bytes} bytes",
                code=Code.FAILED_PRECONDITION,
                remedy="sync between deployments of one model only",
            )
    return pairs
