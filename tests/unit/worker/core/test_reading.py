"""What ranks take of a version in parts, byte by byte, over layouts and nodes."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.worker.backends.base import RankGroup
from phaseloom.worker.backends.layout import plan
from phaseloom.worker.core.reading import (
    Reader,
    fetches_of_full_version,
    plan_node_fetches,
    runs_from_part,
)
from phaseloom.worker.state.layouts import packed
from tests.support.layoutpairs import (
    Version,
    contents_of,
    copy,
    manifest_of,
    memory_of,
    reader_of,
)

SHAPES = {"a": [7, 3], "b": [4], "c": [1, 5], "d": [16, 2, 3], "e": []}
WHOLE = plan(SHAPES, trainable=False).slots


def rows(rank: int, world: int) -> list[TensorSlot]:
    """What FSDP2 has on a rank, as its heap is laid out."""
    return plan(SHAPES, trainable=False, ranks=RankGroup(rank, world)).slots


CONTENTS = contents_of(SHAPES)


def parts(writers: int) -> list[list[TensorSlot]]:
    return [packed(rows(rank, writers))[0] for rank in range(writers)]


def reader(rank: int, world: int, here: Collection[int], *, is_sharded: bool = True) -> Reader:
    ranks = [rows(each, world) if is_sharded else WHOLE for each in range(world)]
    return reader_of(ranks, WHOLE, rank, here)


ALONE = reader(0, 1, [0])


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(1, 6), st.booleans(), st.integers(1, 3))
def test_every_byte_of_a_rank_comes_once(
    writers: int, readers: int, is_sharded: bool, num_nodes: int
) -> None:
    version = Version([rows(rank, writers) for rank in range(writers)], CONTENTS)
    assert len(version.tables) == writers
    for node in range(num_nodes):
        here = [rank for rank in range(readers) if rank % num_nodes == node]
        for rank in here:
            mine = reader(rank, readers, here, is_sharded=is_sharded)
            assert version.read(mine) == memory_of(mine.slots, CONTENTS)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_what_was_written_whole_is_cut_for_each_rank(is_sharded: bool) -> None:
    source = memory_of(WHOLE, CONTENTS)
    for rank in range(3):
        mine = reader(rank, 3, range(3), is_sharded=is_sharded)
        heap = bytearray(max(s.offset + s.num_bytes for s in mine.slots))
        runs = runs_from_part(WHOLE, fetches_of_full_version(mine), mine)
        copy(runs, source, heap, bytearray(len(heap)))
        assert heap == memory_of(mine.slots, CONTENTS)


def test_who_needs_all_of_a_part_takes_it_whole_and_who_needs_half_takes_slices() -> None:
    manifest = manifest_of(parts(2))
    all_here = plan_node_fetches(manifest, reader(0, 4, range(4)))
    assert list(all_here.whole_parts) == ["0of2", "1of2"]
    assert all_here.slices == []
    alone = plan_node_fetches(manifest, reader(0, 4, [0]))
    assert alone.whole_parts == {}
    assert {each.part for each in alone.slices} <= {"0of2", "1of2"}


def test_parts_of_another_model_are_refused() -> None:
    longer = [msgspec.structs.replace(slot, global_shape=[99, 3]) for slot in rows(0, 2)[:1]]
    other = msgspec.structs.replace(WHOLE[0], name="other")
    for wrong in ([longer], [[other]], [parts(2)[0]], parts(3)[1:]):
        with pytest.raises(CallerError) as caught:
            plan_node_fetches(manifest_of(wrong), ALONE)
        assert caught.value.info.code is Code.FAILED_PRECONDITION
    fetches = plan_node_fetches(manifest_of(parts(2)), ALONE).whole_parts["0of2"]
    for lacking in (rows(0, 2)[:1], rows(0, 6)):
        with pytest.raises(CallerError, match="of another model"):
            runs_from_part(packed(lacking)[0], fetches, ALONE)


def test_tensor_that_is_shorter_than_its_shape_is_not_taken() -> None:
    """What lies behind it is not the part's: it was made by somebody else."""
    short = [msgspec.structs.replace(slot, num_bytes=4) for slot in WHOLE]
    with pytest.raises(CallerError, match="another model") as caught:
        runs_from_part(short, fetches_of_full_version(ALONE), ALONE)
    assert caught.value.info.code is Code.FAILED_PRECONDITION
