"""A rank works a layout out once: the same slots again bring what was made of them."""

from __future__ import annotations

import msgspec
import pytest

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.worker.state.layouts import LayoutCache, paired


def _slots(*names: str) -> list[TensorSlot]:
    return [
        TensorSlot(name, Role.WEIGHT, "uint8", [64], 128 * at, 64) for at, name in enumerate(names)
    ]


def test_the_same_slots_bring_what_was_made_of_them() -> None:
    layouts, slots = LayoutCache(), _slots("a", "b")
    table, cut = layouts.table(slots), layouts.cut(slots)
    pairs = layouts.paired(table, slots)
    assert layouts.table(list(slots)) is table
    assert layouts.cut(tuple(slots)) is cut
    assert layouts.paired(layouts.read(table.packed), slots) is pairs
    assert layouts.read(bytes(bytearray(table.packed))) is layouts.read(table.packed)
    assert table == TensorTable.of(slots)
    places, _ = cut
    assert [place.offset for place in places] == [0, 64]
    assert pairs == list(zip(slots, slots, strict=True))


def test_a_list_that_was_changed_is_another_one() -> None:
    layouts, slots = LayoutCache(), _slots("a", "b")
    before = layouts.table(slots)
    slots.reverse()
    assert layouts.table(slots) == TensorTable.of(slots) != before
    slots.pop()
    assert layouts.table(slots) == TensorTable.of(slots)
    assert layouts.table(slots[:0]) == TensorTable.of([])


def test_pairs_are_of_both_layouts() -> None:
    layouts, slots = LayoutCache(), _slots("a", "b")
    table = layouts.table(slots)
    moved = TensorTable.of(list(reversed(slots)))
    layouts.paired(table, slots)
    assert layouts.paired(moved, slots) == list(zip(slots, slots, strict=True))
    for _ in range(2):
        with pytest.raises(CallerError, match="another model"):
            layouts.paired(layouts.table(_slots("a", "c")), slots)


def test_only_the_newest_are_kept() -> None:
    layouts, every = LayoutCache(), [_slots(str(number)) for number in range(9)]
    first = layouts.table(every[0])
    for slots in every:
        layouts.table(slots)
    assert layouts.table(every[0]) is not first
    assert layouts.table(every[0]) == first


def test_tensor_that_is_shorter_than_its_shape_is_not_taken() -> None:
    """What lies behind it is not the version's: it was made by somebody else."""
    slot = TensorSlot("w", Role.WEIGHT, "uint8", [4096], 0, 4096)
    with pytest.raises(CallerError, match="w is"):
        paired([msgspec.structs.replace(slot, num_bytes=1)], [slot])
