"""A frozen heap, whose host copy comes with each order to load it."""

from __future__ import annotations

import gc
import os

import pytest

from phaseloom.common.contract.errors import Code, InternalError, ResourceError
from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.common.contract.state_rank import CopyIn, VersionLayout
from phaseloom.common.tensors.blockhash import digest_of
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.worker.state.heap import Heap
from phaseloom.worker.state.hostcopies import HeapCopier

SIZE = 3 * 4096


def memfd(content: bytes) -> int:
    fd = os.memfd_create("memory", os.MFD_CLOEXEC)
    os.write(fd, content + bytes(-len(content) % 4096))
    return fd


@pytest.fixture
def copies() -> HeapCopier:
    copies = HeapCopier(lambda: 7, lambda: None)
    copies.register(Heap(SIZE), [], 0, None, frozen=True)
    return copies


def load(copies: HeapCopier, contents: list[bytes], digest: str) -> bytes:
    copies.copy(CopyIn(digest), [memfd(content) for content in contents])
    assert isinstance(copies.heap, Heap)
    return bytes(copies.heap.buffer)


def test_heap_is_the_beginning_of_what_comes_and_the_mapping_is_kept(copies: HeapCopier) -> None:
    first, second = os.urandom(SIZE), os.urandom(SIZE + 4096)
    for content in (first, second):
        whole = content[:SIZE]
        assert load(copies, [content], digest_of(memoryview(whole))) == whole
    assert copies._source is not None
    copies.drop_source()
    assert copies._source is None


def test_nothing_is_left_of_what_the_memory_of_the_device_had(copies: HeapCopier) -> None:
    """Chunks of zeroes and the bytes between tensors are written too."""
    whole = os.urandom(4096) + bytes(SIZE - 4096)
    stale = memfd(b"\xff" * SIZE)
    again = os.dup(stale)
    copies.copy(CopyIn(digest_of(memoryview(whole))), [memfd(whole), stale])
    assert isinstance(copies.heap, Heap)
    assert bytes(copies.heap.buffer) == whole
    copies.heap.release()
    copies.slots = [TensorSlot("w", Role.WEIGHT, "uint8", [64], 64, 64)]
    version = os.urandom(64)
    place = [TensorSlot("w", Role.WEIGHT, "uint8", [64], 0, 64)]
    layout = VersionLayout(64, TensorTable.of(place).packed)
    os.pwrite(again, b"\xff" * SIZE, 0)
    order = CopyIn(digest_of(memoryview(version)), layout)
    copies.copy(order, [memfd(version), again])
    assert bytes(copies.heap.buffer) == bytes(64) + version + bytes(SIZE - 128)


def test_bad_bit_is_never_loaded(copies: HeapCopier) -> None:
    whole = os.urandom(SIZE)
    digest = digest_of(memoryview(whole))
    bad = whole[:77] + bytes([whole[77] ^ 1]) + whole[78:]
    with pytest.raises(ResourceError) as caught:
        load(copies, [bad], digest)
    assert caught.value.info.code is Code.DATA_LOSS
    assert not copies.is_resident
    assert isinstance(copies.heap, Heap)
    assert copies.heap.resident_bytes() == 0
    assert load(copies, [whole], digest)


@pytest.mark.parametrize("sizes", [[], [SIZE - 4096], [SIZE] * 3, [SIZE, SIZE - 4096]])
def test_load_from_anything_but_one_whole_extent_is_refused(
    copies: HeapCopier, sizes: list[int]
) -> None:
    gc.collect()  # mappings of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(InternalError):
        load(copies, [bytes(size) for size in sizes], "")
    copies.drop_source()
    assert len(os.listdir("/proc/self/fd")) == before
