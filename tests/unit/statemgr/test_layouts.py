"""What a state manager knows of layouts: those in use, each once."""

from __future__ import annotations

import pytest

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.statemgr.records.layouts import Layouts, check_layout


def _table(name: str, offset: int = 0) -> TensorTable:
    return TensorTable.of([TensorSlot(name, Role.WEIGHT, "uint8", [64], offset, 64)])


def test_the_same_bytes_are_one_layout() -> None:
    layouts = Layouts()
    one = layouts.read(_table("w").packed)
    assert layouts.read(bytes(bytearray(_table("w").packed))) is one
    assert layouts.read(_table("v").packed) is not one
    assert one == _table("w")


def test_what_somebody_uses_is_one_however_many_came_since() -> None:
    layouts = Layouts()
    used = layouts.read(_table("w").packed)
    assert layouts.read(_table("v").packed) == _table("v")
    assert layouts.read(_table("w").packed) is used


def test_what_cannot_be_a_layout_is_not_kept_and_refused_each_time() -> None:
    layouts = Layouts()
    for _ in range(2):
        table = layouts.read(_table("w", offset=32).packed)
        with pytest.raises(CallerError, match="multiple of 64"):
            check_layout(table, 4096)
    with pytest.raises(CallerError, match="invalid tensor table"):
        layouts.read(b"")


def test_a_layout_is_held_against_the_memory_it_is_for() -> None:
    table = Layouts().read(_table("w", offset=64).packed)
    check_layout(table, 128)
    with pytest.raises(CallerError, match=r"must end within 127 bytes, ends at 128 .*tensors\[w\]"):
        check_layout(table, 127)
    with pytest.raises(CallerError, match="-1 bytes"):
        check_layout(TensorTable.of([]), -1)
