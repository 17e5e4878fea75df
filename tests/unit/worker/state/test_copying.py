"""Moving tensors between memories: in any order, of any size, with whatever lies between."""

from __future__ import annotations

import mmap
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.common.tensors.blockhash import BLOCK_BYTES, digest_in_threads, digest_of
from phaseloom.common.tensors.hugepages import HUGE_BYTES
from phaseloom.common.tensors.resharding import StridedRanges
from phaseloom.worker.state.copying import (
    MappedVersions,
    Mapping,
    copy,
    copy_hashed,
    copy_rows,
    gather,
    scatter,
)
from phaseloom.worker.state.heap import PAGE_BYTES, Heap, align
from phaseloom.worker.state.layouts import packed

MiB = 1024 * 1024
KEYS = [VersionKey(DeploymentKey("acme", "sums", "policy"), seq) for seq in range(6)]


def random_memory(num_bytes: int) -> memoryview:
    return memoryview(bytearray(os.urandom(num_bytes)))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_tensors_come_to_their_places_and_what_is_between_is_zeroes(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 400), min_size=1, max_size=12))
    gaps = data.draw(st.lists(st.integers(0, 2), min_size=len(sizes), max_size=len(sizes)))
    slots, end = [], 0
    for number, (size, gap) in enumerate(zip(sizes, gaps, strict=True)):
        slots.append(TensorSlot(f"w{number}", Role.WEIGHT, "uint8", [size], end, size))
        end = align(end + size) + 64 * gap
    heap, slots = random_memory(end + 10), data.draw(st.permutations(slots))
    places, num_bytes = packed(slots)
    version = random_memory(num_bytes)
    digest = gather(version, heap, list(zip(slots, places, strict=True)))
    expected = bytearray(num_bytes)
    for slot, place in zip(slots, places, strict=True):
        content = heap[slot.offset : slot.offset + slot.num_bytes]
        expected[place.offset : place.offset + place.num_bytes] = content
    assert version == expected
    assert digest == digest_of(memoryview(expected))
    back = random_memory(len(heap))
    scatter(version, back, list(zip(places, slots, strict=True)))
    for slot in slots:
        span = slice(slot.offset, slot.offset + slot.num_bytes)
        assert back[span] == heap[span]


@pytest.mark.parametrize("num_bytes", [0, 100, 16 * BLOCK_BYTES + 77])
def test_copies_by_several_threads_are_whole_and_hashed(num_bytes: int) -> None:
    """The largest is of more than two parts."""
    block = bytearray(os.urandom(MiB + 1))
    source = memoryview(block * (num_bytes // len(block) + 1))[:num_bytes]
    target = memoryview(bytearray(num_bytes))
    copy(source, target)
    assert digest_of(target) == digest_of(source) == digest_in_threads(source)
    slot = TensorSlot("w", Role.WEIGHT, "uint8", [num_bytes], 0, num_bytes)
    again = memoryview(bytearray(num_bytes))
    scatter(source, again, [(slot, slot)])
    assert again == source


@pytest.mark.parametrize("behind", [0, 5000, BLOCK_BYTES])
def test_digest_of_a_load_covers_what_lies_behind_the_heap_too(behind: int) -> None:
    num_bytes = BLOCK_BYTES + 1000
    extent, heap = random_memory(num_bytes + behind), memoryview(bytearray(num_bytes))
    assert copy_hashed(extent, heap) == digest_of(extent)
    assert heap == extent[:num_bytes]


def test_zeroes_that_are_loaded_into_a_clear_heap_need_no_pages() -> None:
    num_bytes = 2 * BLOCK_BYTES
    extent, heap = memoryview(bytearray(num_bytes + 1)), Heap(num_bytes)
    extent[BLOCK_BYTES - 100 : BLOCK_BYTES + 100] = random_memory(200)
    extent[num_bytes - 1] = 1
    assert copy_hashed(extent, heap.buffer, is_clear=True) == digest_of(extent)
    assert 0 < heap.resident_bytes() < num_bytes
    assert heap.buffer == extent[:num_bytes]
    heap.buffer[:] = random_memory(num_bytes)
    assert copy_hashed(extent, heap.buffer) == digest_of(extent)
    assert heap.buffer == extent[:num_bytes]


def test_resident_bytes_of_a_heap_are_those_that_were_touched_and_not_released() -> None:
    heap = Heap(8 * 1024 * 1024)
    assert heap.resident_bytes() == 0
    heap.buffer[:] = b"\1" * heap.num_bytes
    assert heap.resident_bytes() == heap.num_bytes
    heap.release()
    assert heap.resident_bytes() == 0


def test_mapping_that_is_in_use_is_kept_and_the_others_are_unmapped() -> None:
    versions = MappedVersions()
    views = [versions.map(key, [_memory()], 100, writable=True).buffer[:] for key in KEYS]
    # Only so many are kept for reuse; all of these are in use.
    assert versions.unmap_unused() == KEYS
    views[3][:4] = b"kept"
    del views[0], views[-1]
    assert versions.unmap_unused() == KEYS[1:-1]
    assert bytes(views[2][:4]) == b"kept"
    views.clear()
    assert versions.unmap_unused() == []


def test_mapping_is_used_again_for_the_same_memory() -> None:
    versions, fd = MappedVersions(), _memory()
    first = versions.map(KEYS[0], [os.dup(fd)], 100, writable=True)
    view = first.buffer[:3]
    again = versions.map(KEYS[1], [fd], 100, writable=True)
    view[:] = b"abc"
    assert bytes(again.buffer[:3]) == b"abc"
    assert again is first
    assert versions.unmap_unused() == [KEYS[1]]


def _memory() -> int:
    fd = os.memfd_create("test")
    os.ftruncate(fd, PAGE_BYTES)
    return fd


def test_mapping_is_put_on_huge_pages_once() -> None:
    """It is asked for in each switch, and long where the system has none to give."""
    fd = os.memfd_create("extent")
    os.ftruncate(fd, 2 * HUGE_BYTES)
    mapping = Mapping(os.dup(fd), 2 * HUGE_BYTES, writable=True)
    mapping.make_huge()
    assert os.fstat(fd).st_blocks
    mmap.mmap(fd, 2 * HUGE_BYTES).madvise(mmap.MADV_REMOVE)
    mapping.make_huge()
    assert not os.fstat(fd).st_blocks
    mapping.close()
    os.close(fd)


def test_version_of_several_blocks_is_whole_and_hashed() -> None:
    """Tensors run over blocks; some are neighbours on both sides, some have gaps behind them."""
    sizes = [BLOCK_BYTES + 640, 3 * MiB, 64, 5 * MiB + 1, 2 * MiB]
    slots, end = [], 0
    for number, size in enumerate(sizes):
        slots.append(TensorSlot(f"w{number}", Role.WEIGHT, "uint8", [size], end, size))
        end = align(end + size) + (4096 if number == 1 else 0)
    heap = random_memory(end)
    places, num_bytes = packed(slots)
    expected = bytearray(num_bytes)
    for slot, place in zip(slots, places, strict=True):
        content = heap[slot.offset : slot.offset + slot.num_bytes]
        expected[place.offset : place.offset + place.num_bytes] = content
    version = memoryview(bytearray(b"\xff") * num_bytes)
    digest = gather(version, heap, list(zip(slots, places, strict=True)))
    assert version == expected
    assert digest == digest_of(version)


@pytest.mark.parametrize(
    "rows",
    [
        StridedRanges(5, 3, 7, 4, 9, 11),
        StridedRanges(5, 3, 7, 1),
        StridedRanges(0, 64, 3000, 7000, 3500, 3100),  # more than a batch of one thread
        StridedRanges(64, 0, BLOCK_BYTES + 9, 2, BLOCK_BYTES + 100, BLOCK_BYTES + 50),
        StridedRanges(0, 0, 0, 3, 5, 5),
        StridedRanges(0, 0, 5, 0, 5, 5),
    ],
)
def test_rows_are_copied_and_nothing_between_them(rows: StridedRanges) -> None:
    source, target = random_memory(25 * MiB), memoryview(bytearray(25 * MiB))
    expected = bytearray(len(target))
    for start, to, num_bytes in rows.runs():
        expected[to : to + num_bytes] = source[start : start + num_bytes]
    copy_rows(source, target, [rows])
    assert target == expected
