"""What ranks take of a version in parts, byte by byte, over layouts and nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.specs import Layout
from phaseloom.common.contract.state_layout import TensorSlot, VersionPart, VersionParts
from phaseloom.common.tensors.resharding import Sharding
from phaseloom.common.tensors.versionparts import part_name
from phaseloom.worker.backends.base import RankGroup
from phaseloom.worker.backends.layout import plan
from phaseloom.worker.core.reading import (
    Reader,
    Runs,
    fetches_of_whole,
    from_part,
    from_slices,
    needs,
    parts_of,
)
from phaseloom.worker.state.layouts import packed

SHAPES = {"a": [7, 3], "b": [4], "c": [1, 5], "d": [16, 2, 3], "e": []}
WHOLE = plan(SHAPES, trainable=False).slots


def rows(rank: int, world: int) -> list[TensorSlot]:
    """What FSDP2 has on a rank, as its heap is laid out."""
    return plan(SHAPES, trainable=False, ranks=RankGroup(rank, world)).slots


def value(slot: TensorSlot, number: int) -> np.ndarray[Any, Any]:
    """The slice that a slot is, of a parameter whose elements are all different."""
    name = slot.name
    whole = np.arange(int(np.prod(SHAPES[name])), dtype=np.float32) + 1000 * number
    whole = whole.reshape(SHAPES[name])
    if not slot.global_shape:
        return whole
    return whole[slot.start[0] : slot.start[0] + slot.shape[0]]


NUMBERS = {name: number for number, name in enumerate(sorted(SHAPES), start=1)}


def memory_of(slots: Sequence[TensorSlot]) -> bytearray:
    memory = bytearray(max(slot.offset + slot.num_bytes for slot in slots))
    for slot in slots:
        content = value(slot, NUMBERS[slot.name]).tobytes()
        memory[slot.offset : slot.offset + slot.num_bytes] = content
    return memory


def copy(runs: Runs, source: bytearray, target: bytearray, written: bytearray) -> None:
    for there, here, num_bytes in runs:
        span = slice(here, here + num_bytes)
        target[span] = source[there : there + num_bytes]
        assert not any(written[span]), "a byte comes twice"
        written[span] = b"\1" * num_bytes


def manifest_of(layout: Layout, fsdp: int, count: int) -> VersionParts:
    parts = [VersionPart(part_name(i, count), 0, "", "") for i in range(count)]
    return VersionParts(layout, fsdp, "", parts)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(1, 6), st.booleans(), st.integers(1, 3))
def test_every_byte_of_a_rank_comes_once(
    writers: int, readers: int, is_sharded: bool, num_nodes: int
) -> None:
    source = Sharding(Layout(dp=writers), 1, fsdp=writers)
    parts = parts_of(source, WHOLE)
    assert parts == [[rank] for rank in range(writers)]
    manifest = manifest_of(source.layout, writers, writers)
    tables = [packed(rows(rank, writers))[0] for rank in range(writers)]
    memories = [memory_of(table) for table in tables]
    target = Sharding(Layout(dp=readers), 1, fsdp=readers if is_sharded else 1)
    for node in range(num_nodes):
        here = [rank for rank in range(readers) if rank % num_nodes == node]
        for rank in here:
            slots = rows(rank, readers) if is_sharded else WHOLE
            reader = Reader(target, rank, here, WHOLE, slots)
            needed = needs(manifest, reader)
            end = max((s.offset + s.num_bytes for s in needed.slices), default=0)
            came = bytearray(end)
            for each, fetch in zip(needed.slices, needed.fetches, strict=True):
                table = {slot.name: slot for slot in tables[fetch.part]}
                slot = table[each.name]
                tensor = np.frombuffer(
                    memories[fetch.part], np.float32, slot.num_bytes // 4, slot.offset
                ).reshape(slot.shape)
                span = zip(each.start, each.size, strict=True)
                box = tensor[tuple(slice(s, s + n) for s, n in span)]
                came[each.offset : each.offset + each.num_bytes] = box.tobytes()
            heap = bytearray(max(s.offset + s.num_bytes for s in slots))
            written = bytearray(len(heap))
            for number in range(writers):
                name = part_name(number, writers)
                if name in needed.whole_parts:
                    runs = from_part(tables[number], needed.whole_parts[name], reader)
                    copy(runs, memories[number], heap, written)
            copy(from_slices(needed.slices, needed.fetches, reader), came, heap, written)
            assert heap == memory_of(slots)
            for slot in slots:
                assert all(written[slot.offset : slot.offset + slot.num_bytes])


@pytest.mark.parametrize("is_sharded", [False, True])
def test_what_was_written_whole_is_cut_for_each_rank(is_sharded: bool) -> None:
    source = memory_of(WHOLE)
    for rank in range(3):
        slots = rows(rank, 3) if is_sharded else WHOLE
        target = Sharding(Layout(dp=3), 1, fsdp=3 if is_sharded else 1)
        reader = Reader(target, rank, range(3), WHOLE, slots)
        heap = bytearray(max(s.offset + s.num_bytes for s in slots))
        runs = from_part(WHOLE, fetches_of_whole(reader), reader)
        copy(runs, source, heap, bytearray(len(heap)))
        assert heap == memory_of(slots)


def test_ranks_that_hold_the_same_have_one_part() -> None:
    assert parts_of(Sharding(Layout(dp=3), 1), WHOLE) == [[0, 1, 2]]


def test_who_needs_all_of_a_part_takes_it_whole_and_who_needs_half_takes_slices() -> None:
    manifest = manifest_of(Layout(dp=2), 2, 2)
    target = Sharding(Layout(dp=4), 1, fsdp=4)
    all_here = needs(manifest, Reader(target, 0, range(4), WHOLE, rows(0, 4)))
    assert list(all_here.whole_parts) == ["0of2", "1of2"]
    assert all_here.slices == []
    alone = needs(manifest, Reader(target, 0, [0], WHOLE, rows(0, 4)))
    assert alone.whole_parts == {}
    assert {each.part for each in alone.slices} <= {"0of2", "1of2"}


def test_parts_of_another_model_are_refused() -> None:
    target = Sharding(Layout(), 1)
    reader = Reader(target, 0, [0], WHOLE, WHOLE)
    with pytest.raises(CallerError, match="its parts are") as caught:
        needs(manifest_of(Layout(dp=3), 3, 2), reader)
    assert caught.value.info.code is Code.FAILED_PRECONDITION
    manifest = manifest_of(Layout(dp=2), 2, 2)
    fetches = needs(manifest, reader).whole_parts["0of2"]
    for wrong in (rows(0, 2)[:1], rows(0, 6)):
        with pytest.raises(CallerError, match="of another model"):
            from_part(packed(wrong)[0], fetches, reader)


def test_tensor_that_is_shorter_than_its_shape_is_not_taken() -> None:
    """What lies behind it is not the part's: it was made by somebody else."""
    reader = Reader(Sharding(Layout(), 1), 0, [0], WHOLE, WHOLE)
    short = [msgspec.structs.replace(slot, num_bytes=4) for slot in WHOLE]
    with pytest.raises(CallerError, match="another model") as caught:
        from_part(short, fetches_of_whole(reader), reader)
    assert caught.value.info.code is Code.FAILED_PRECONDITION
