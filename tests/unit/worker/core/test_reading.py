"""What ranks take of a version in parts, byte by byte, over layouts and nodes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.state_layout import TensorSlot, VersionPart, VersionParts
from phaseloom.common.tensors.resharding import holding_of, parts_of, tensors_of
from phaseloom.common.tensors.tensortable import TensorTable
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
)
from phaseloom.worker.state.layouts import packed
from tests.support.sharded import inside

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


def manifest_of(tables: Sequence[Sequence[TensorSlot]]) -> VersionParts:
    parts = [
        VersionPart(part_name(i, len(tables)), 0, "", TensorTable.of(table).packed)
        for i, table in enumerate(tables)
    ]
    return VersionParts("", parts)


def parts(writers: int) -> list[list[TensorSlot]]:
    return [packed(rows(rank, writers))[0] for rank in range(writers)]


def reader_of(rank: int, world: int, here: Collection[int], *, is_sharded: bool = True) -> Reader:
    slots = [rows(each, world) if is_sharded else WHOLE for each in range(world)]
    held = [holding_of(each) for each in slots]
    return Reader(held, rank, here, tensors_of(WHOLE), slots[rank])


ALONE = reader_of(0, 1, [0])


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(1, 6), st.booleans(), st.integers(1, 3))
def test_every_byte_of_a_rank_comes_once(
    writers: int, readers: int, is_sharded: bool, num_nodes: int
) -> None:
    tables = parts(writers)
    assert parts_of([holding_of(table) for table in tables]) == [[rank] for rank in range(writers)]
    manifest = manifest_of(tables)
    memories = [memory_of(table) for table in tables]
    for node in range(num_nodes):
        here = [rank for rank in range(readers) if rank % num_nodes == node]
        for rank in here:
            reader = reader_of(rank, readers, here, is_sharded=is_sharded)
            slots = reader.slots
            needed = needs(manifest, reader)
            end = max((s.offset + s.num_bytes for s in needed.slices), default=0)
            came = bytearray(end)
            for each, fetch in zip(needed.slices, needed.fetches, strict=True):
                table = {slot.name: slot for slot in tables[fetch.part]}
                slot = table[each.name]
                tensor = np.frombuffer(
                    memories[fetch.part], np.float32, slot.num_bytes // 4, slot.offset
                ).reshape(slot.shape)
                box = tensor[inside(each.start, each.size)]
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
        reader = reader_of(rank, 3, range(3), is_sharded=is_sharded)
        heap = bytearray(max(s.offset + s.num_bytes for s in reader.slots))
        runs = from_part(WHOLE, fetches_of_whole(reader), reader)
        copy(runs, source, heap, bytearray(len(heap)))
        assert heap == memory_of(reader.slots)


def test_who_needs_all_of_a_part_takes_it_whole_and_who_needs_half_takes_slices() -> None:
    manifest = manifest_of(parts(2))
    all_here = needs(manifest, reader_of(0, 4, range(4)))
    assert list(all_here.whole_parts) == ["0of2", "1of2"]
    assert all_here.slices == []
    alone = needs(manifest, reader_of(0, 4, [0]))
    assert alone.whole_parts == {}
    assert {each.part for each in alone.slices} <= {"0of2", "1of2"}


def test_parts_of_another_model_are_refused() -> None:
    longer = [msgspec.structs.replace(slot, global_shape=[99, 3]) for slot in rows(0, 2)[:1]]
    other = msgspec.structs.replace(WHOLE[0], name="other")
    for wrong in ([longer], [[other]], [parts(2)[0]], parts(3)[1:]):
        with pytest.raises(CallerError) as caught:
            needs(manifest_of(wrong), ALONE)
        assert caught.value.info.code is Code.FAILED_PRECONDITION
    fetches = needs(manifest_of(parts(2)), ALONE).whole_parts["0of2"]
    for lacking in (rows(0, 2)[:1], rows(0, 6)):
        with pytest.raises(CallerError, match="of another model"):
            from_part(packed(lacking)[0], fetches, ALONE)


def test_tensor_that_is_shorter_than_its_shape_is_not_taken() -> None:
    """What lies behind it is not the part's: it was made by somebody else."""
    short = [msgspec.structs.replace(slot, num_bytes=4) for slot in WHOLE]
    with pytest.raises(CallerError, match="another model") as caught:
        from_part(short, fetches_of_whole(ALONE), ALONE)
    assert caught.value.info.code is Code.FAILED_PRECONDITION
