"""Columns of tensor slots: what goes in comes out, equal layouts are equal bytes, the rest is
refused before it costs anything."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.common.tensors.tensortable import EMPTY, MAX_TENSORS, TensorTable

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
        "kinds": [KIND],
        "numbers": bytes(4),
        "offsets": bytes(8),
        "sizes": bytes([1, *bytes(7)]),
    }
    return msgspec.msgpack.encode(list((given | columns).values()))


KIND = ["weight", "uint8", [1], [], []]


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        EMPTY.packed[:-1],
        msgspec.msgpack.encode([TensorSlot("w", Role.WEIGHT, "uint8", [1], 0, 1)]),
        _packed(names=["w", "v"]),
        _packed(offsets=b""),
        _packed(sizes=bytes(16)),
        _packed(numbers=bytes(3)),
        _packed(numbers=bytes([1, 0, 0, 0])),
        _packed(numbers=b"\xff" * 4),
        _packed(kinds=[]),
        _packed(kinds=[["none", *KIND[1:]]]),
        _packed(kinds=[[*KIND[:2], [0.5], [], []]]),
        _packed(kinds=[[*KIND[:2], [1] * 65, [], []]]),
        _packed(kinds=[KIND] * (MAX_TENSORS + 1)),
        _packed(names=[b"\xff"]),
    ],
)
def test_what_is_no_table_is_refused(packed: bytes) -> None:
    assert TensorTable.read(_packed()).tensors == [TensorSlot("w", Role.WEIGHT, "uint8", [1], 0, 1)]
    with pytest.raises(CallerError, match="invalid tensor table"):
        TensorTable.read(packed)


@pytest.mark.parametrize(("offset", "num_bytes"), [(2**63, 1), (0, 2**64), (-(2**63) - 1, 1)])
def test_numbers_beyond_64_bits_make_no_table(offset: int, num_bytes: int) -> None:
    with pytest.raises(CallerError, match="invalid tensor table"):
        TensorTable.of([TensorSlot("w", Role.WEIGHT, "uint8", [1], offset, num_bytes)])
