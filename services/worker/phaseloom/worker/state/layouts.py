"""A cache of what follows from layouts: a deployment has the same few in every step.

With tens of thousands of tensors it takes tens of milliseconds to pack a table, to read one, and to
find for each tensor of one layout its place in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Generic, TypeVar

from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.worker.state.copying import packed, paired

_NUM_KEPT = 4
"""Entries of each kind: what a rank registers, publishes and reads, and one more."""

Value = TypeVar("Value")
Pairs = list[tuple[TensorSlot, TensorSlot]]


class _Newest(Generic[Value]):
    """Values made last, by the slots, and the table, that they were made of.

    Slots are the same when they are the same objects: comparing them by value takes half as long as
    making most values again.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[list[TensorSlot], bytes, Value]] = []

    def get(self, slots: Sequence[TensorSlot], of: bytes, make: Callable[[], Value]) -> Value:
        """The value kept for these slots, or a new one. Raises: what `make` does,
        keeping nothing."""
        for entry in self._kept:
            if len(entry[0]) == len(slots) and all(map(is_, entry[0], slots)) and entry[1] == of:
                return entry[2]
        made = make()
        self._kept = [(list(slots), of, made), *self._kept[: _NUM_KEPT - 1]]
        return made


class Layouts:
    """Values made of layouts. Nobody may change the lists that it returns."""

    def __init__(self) -> None:
        self._tables: _Newest[TensorTable] = _Newest()
        self._read: _Newest[TensorTable] = _Newest()
        self._cuts: _Newest[tuple[list[TensorSlot], Pairs]] = _Newest()
        self._paired: _Newest[Pairs] = _Newest()

    def table(self, slots: Sequence[TensorSlot]) -> TensorTable:
        return self._tables.get(slots, b"", lambda: TensorTable.of(slots))

    def read(self, packed_tensors: bytes) -> TensorTable:
        """A table from its packed form. Raises: CallerError: it is no table."""
        return self._read.get((), packed_tensors, lambda: TensorTable.read(packed_tensors))

    def cut(self, slots: Sequence[TensorSlot]) -> tuple[list[TensorSlot], Pairs]:
        """Places of these slots alone in a version, and each slot with its place."""

        def make() -> tuple[list[TensorSlot], Pairs]:
            places, _ = packed(slots)
            return places, list(zip(slots, places, strict=True))

        return self._cuts.get(slots, b"", make)

    def paired(self, table: TensorTable, slots: Sequence[TensorSlot]) -> Pairs:
        """Each slot with the table's tensor of its name.

        Raises: CallerError: they are not of the same model.
        """
        return self._paired.get(slots, table.packed, lambda: paired(table.tensors, slots))
