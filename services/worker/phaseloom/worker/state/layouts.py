"""What was worked out of layouts, kept: a deployment has the same few in every step of its life.

Of tens of thousands of tensors it takes tens of milliseconds to pack a table, to read one, and to
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
"""Of each kind: what a rank registers, what it publishes, what it reads, and one more."""

Value = TypeVar("Value")
Pairs = list[tuple[TensorSlot, TensorSlot]]


class _Newest(Generic[Value]):
    """What was made last of which slots, and of which table besides.

    Slots are the same when they are the same objects: to compare them by value takes half as long
    as to make most of it again.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[list[TensorSlot], bytes, Value]] = []

    def get(self, slots: Sequence[TensorSlot], of: bytes, make: Callable[[], Value]) -> Value:
        """Raises: what `make` does, and keeps nothing then."""
        for entry in self._kept:
            if len(entry[0]) == len(slots) and all(map(is_, entry[0], slots)) and entry[1] == of:
                return entry[2]
        made = make()
        self._kept = [(list(slots), of, made), *self._kept[: _NUM_KEPT - 1]]
        return made


class Layouts:
    """Nobody may change the lists that it gives."""

    def __init__(self) -> None:
        self._tables: _Newest[TensorTable] = _Newest()
        self._read: _Newest[TensorTable] = _Newest()
        self._cuts: _Newest[tuple[list[TensorSlot], Pairs]] = _Newest()
        self._paired: _Newest[Pairs] = _Newest()

    def table(self, slots: Sequence[TensorSlot]) -> TensorTable:
        return self._tables.get(slots, b"", lambda: TensorTable.of(slots))

    def read(self, packed_tensors: bytes) -> TensorTable:
        """Raises: CallerError: it is no table."""
        return self._read.get((), packed_tensors, lambda: TensorTable.read(packed_tensors))

    def cut(self, slots: Sequence[TensorSlot]) -> tuple[list[TensorSlot], Pairs]:
        """Places in a version of these slots alone, and each slot with its own."""

        def make() -> tuple[list[TensorSlot], Pairs]:
            places, _ = packed(slots)
            return places, list(zip(slots, places, strict=True))

        return self._cuts.get(slots, b"", make)

    def paired(self, table: TensorTable, slots: Sequence[TensorSlot]) -> Pairs:
        """Each slot with the table's tensor of its name.

        Raises: CallerError: it is not the same model.
        """
        return self._paired.get(slots, table.packed, lambda: paired(table.tensors, slots))
