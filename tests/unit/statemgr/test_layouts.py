"""What a state manager knows of layouts: those in use, each once."""

from __future__ import annotations

import pytest

from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.statemgr.memory.layouts import Layouts, check_layout
from phaseloom.statemgr.residency.incarnations import Rank, Wpg


def _table(name: str, offset: int = 0) -> TensorTable:
    return TensorTable.of([TensorSlot(name, Role.WEIGHT, "uint8", [64], offset, 64)])


def _incarnation(num_ranks: int = 1) -> Wpg:
    wpg = Wpg(DeploymentKey("acme", "job", "policy"), 1, 0)
    wpg.ranks = [Rank(wpg, index, 0, f"token {index}") for index in range(num_ranks)]
    return wpg


def test_the_same_bytes_are_one_layout() -> None:
    layouts, incarnation = Layouts(), _incarnation()
    one = layouts.read(_table("w").packed, incarnation)
    assert layouts.read(bytes(bytearray(_table("w").packed)), _incarnation()) is one
    assert layouts.read(_table("v").packed, incarnation) is not one
    assert one == _table("w")


def test_what_somebody_uses_is_one_however_many_came_since() -> None:
    layouts, incarnation = Layouts(), _incarnation()
    used = layouts.read(_table("w").packed, incarnation)
    assert layouts.read(_table("v").packed, incarnation) == _table("v")
    assert layouts.read(_table("w").packed, incarnation) is used


def test_what_cannot_be_a_layout_is_not_kept_and_refused_each_time() -> None:
    layouts, incarnation = Layouts(), _incarnation()
    for _ in range(2):
        table = layouts.read(_table("w", offset=32).packed, incarnation)
        with pytest.raises(CallerError, match="no multiple of 64"):
            check_layout(table, 4096)
    with pytest.raises(CallerError, match="no table"):
        layouts.read(b"", incarnation)


def test_incarnation_that_sends_layouts_without_end_is_refused_and_others_are_not() -> None:
    """Somebody uses each of them."""
    table_bytes = _table("0").memory_bytes
    layouts = Layouts(max_bytes_of_a_rank=2 * table_bytes)
    incarnation = _incarnation(num_ranks=2)
    used = [layouts.read(_table(str(number)).packed, incarnation) for number in range(4)]
    with pytest.raises(ResourceError, match="a layout of 1 tensors") as refused:
        layouts.read(_table("4").packed, incarnation)
    assert refused.value.info.code is Code.RESOURCE_EXHAUSTED
    assert refused.value.info.remedy
    assert refused.value.info.details == {
        "needed_bytes": str(table_bytes),
        "used_bytes": str(4 * table_bytes),
        "limit": str(4 * table_bytes),
    }
    assert [layouts.read(table.packed, incarnation) for table in used] == used
    assert layouts.read(_table("4").packed, _incarnation()) == _table("4")


def test_what_an_incarnation_uses_no_more_counts_no_more() -> None:
    table_bytes = _table("0").memory_bytes
    layouts, incarnation = Layouts(max_bytes_of_a_rank=table_bytes), _incarnation()
    for number in range(10):
        assert layouts.read(_table(str(number)).packed, incarnation) == _table(str(number))


def test_a_layout_is_held_against_the_memory_it_is_for() -> None:
    table = Layouts().read(_table("w", offset=64).packed, _incarnation())
    check_layout(table, 128)
    with pytest.raises(CallerError, match=r"ends at 128, beyond 127 bytes .*tensors\[w\]"):
        check_layout(table, 127)
    with pytest.raises(CallerError, match="-1 bytes"):
        check_layout(TensorTable.of([]), -1)
