"""Columns of tensor slots: what goes in comes out, equal layouts are equal bytes, the rest is
refused before it costs anything."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phaseloom.common.errors import CallerError
from phaseloom.common.statewire import Role, TensorSlot
from phaseloom.common.tensortable import EMPTY, MAX_TENSORS, TensorTable

_DIMS = st.lists(st.integers(0, 9), max_size=3)
_SLOTS = st.builds(
    TensorSlot,
    st.text(max_size=4),
    st.sampled_from(Role),
    st.sampled_from(["float32", "uint8"]),
    _DIMS,
    st.integers(-64, 512),
    st.integers(-1, 128),
    _DIMS,
    _DIMS,
)


@settings(deadline=None)
@given(st.lists(_SLOTS, max_size=6))
def test_slots_come_back_as_they_were_and_equal_ones_are_equal_bytes(
    slots: list[TensorSlot],
) -> None:
    table = TensorTable.of(slots)
    read = TensorTable.read(table.packed)
    assert read.tensors == table.tensors == slots
    assert (len(read), read, hash(read)) == (len(slots), table, hash(table))
    assert TensorTable.of([msgspec.structs.replace(slot) for slot in slots]).packed == table.packed
    for at, slot in enumerate(slots):
        other = [*slots[:at], msgspec.structs.replace(slot, name=slot.name + "x"), *slots[at + 1 :]]
        assert TensorTable.of(other) != table


@settings(deadline=None, max_examples=300)
@given(st.lists(_SLOTS, max_size=4))
def test_end_is_known_exactly_where_each_tensor_lies_for_itself(slots: list[TensorSlot]) -> None:
    """Against a look at every pair."""
    is_good = len({slot.name for slot in slots}) == len(slots)
    is_good &= all(s.num_bytes >= 0 and s.offset >= 0 and not s.offset % 64 for s in slots)
    spans = [range(s.offset, s.offset + s.num_bytes) for s in slots]
    is_good &= all(
        a.stop <= b.start or b.stop <= a.start
        for at, a in enumerate(spans)
        for b in spans[at + 1 :]
    )
    end = max((span.stop for span in spans), default=0)
    assert TensorTable.of(slots).end == (end if is_good else None)


def _packed(**columns: Any) -> bytes:
    given: dict[str, Any] = {
        "names": ["w"],
        "roles": ["weight"],
        "dtypes": ["uint8"],
        "shapes": [[1]],
        "offsets": [0],
        "sizes": [1],
        "global_shapes": [],
        "starts": [],
    }
    return msgspec.msgpack.encode(list((given | columns).values()))


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        EMPTY.packed[:-1],
        msgspec.msgpack.encode([TensorSlot("w", Role.WEIGHT, "uint8", [1], 0, 1)]),
        _packed(names=["w", "v"]),
        _packed(offsets=[]),
        _packed(global_shapes=[[1]]),
        _packed(global_shapes=[[1], [1]], starts=[[0], [0]]),
        _packed(offsets=[0.5]),
        _packed(roles=["none"]),
        _packed(names=[b"\xff"]),
        _packed(shapes=[[1] * 65]),
        _packed(shapes=[[]] * (MAX_TENSORS + 1)),
    ],
)
def test_what_is_no_table_is_refused(packed: bytes) -> None:
    assert TensorTable.read(_packed()).tensors == [TensorSlot("w", Role.WEIGHT, "uint8", [1], 0, 1)]
    with pytest.raises(CallerError, match="no table of tensors"):
        TensorTable.read(packed)
