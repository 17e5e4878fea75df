"""What a state manager remembers of layouts: as much as is worth it, and no more."""

from __future__ import annotations

import pytest

from phaseloom.common.errors import CallerError
from phaseloom.common.statewire import Role, TensorSlot
from phaseloom.common.tensortable import TensorTable
from phaseloom.statemgr.core.layout import Layouts, check_layout


def _table(name: str, offset: int = 0) -> TensorTable:
    return TensorTable.of([TensorSlot(name, Role.WEIGHT, "uint8", [64], offset, 64)])


def test_the_same_bytes_are_one_layout() -> None:
    layouts = Layouts()
    one = layouts.read(_table("w").packed)
    assert layouts.read(bytes(bytearray(_table("w").packed))) is one
    assert layouts.read(_table("v").packed) is not one
    assert one == _table("w")


def test_what_came_longest_ago_is_forgotten_where_there_are_too_many() -> None:
    layouts = Layouts(max_bytes=4096)
    first = layouts.read(_table("0").packed)
    for number in range(100):
        layouts.read(_table(str(number)).packed)
        assert layouts.read(_table("0").packed) is first
        assert layouts.known_bytes <= 4096
    one = layouts.read(_table("1").packed)
    assert one == _table("1")
    assert layouts.read(_table("99").packed) is not one


def test_what_is_larger_than_all_that_is_kept_is_read_all_the_same() -> None:
    layouts = Layouts(max_bytes=16)
    assert layouts.read(_table("w").packed) == _table("w")
    assert layouts.known_bytes == 0


def test_what_cannot_be_a_layout_is_not_kept_and_refused_each_time() -> None:
    layouts = Layouts()
    for _ in range(2):
        table = layouts.read(_table("w", offset=32).packed)
        with pytest.raises(CallerError, match="no multiple of 64"):
            check_layout(table, 4096)
    with pytest.raises(CallerError, match="no table"):
        layouts.read(b"")
    assert layouts.known_bytes == 0


def test_a_layout_is_held_against_the_memory_it_is_for() -> None:
    table = Layouts().read(_table("w", offset=64).packed)
    check_layout(table, 128)
    with pytest.raises(CallerError, match=r"ends at 128, beyond 127 bytes .*tensors\[w\]"):
        check_layout(table, 127)
    with pytest.raises(CallerError, match="-1 bytes"):
        check_layout(TensorTable.of([]), -1)
