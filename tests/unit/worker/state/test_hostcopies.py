"""A frozen heap whose host copy lies in several places."""

from __future__ import annotations

import os

import pytest

from phaseloom.common.contract.errors import Code, InternalError, ResourceError
from phaseloom.common.contract.state_rank import CopyIn, HeapPiece
from phaseloom.common.tensors.blockhash import digest_of
from phaseloom.worker.state.heap import Heap
from phaseloom.worker.state.hostcopies import HostCopies

SIZE = 3 * 4096


def memfd(content: bytes) -> int:
    fd = os.memfd_create("memory", os.MFD_CLOEXEC)
    os.write(fd, content + bytes(-len(content) % 4096))
    return fd


@pytest.fixture
def copies() -> HostCopies:
    copies = HostCopies(lambda: 7, lambda: None)
    copies.register(Heap(SIZE), [], 0, None, frozen=True)
    return copies


def load(copies: HostCopies, contents: list[bytes], pieces: list[HeapPiece], digest: str) -> bytes:
    copies.copy_frozen(CopyIn(digest, pieces), [memfd(content) for content in contents])
    assert isinstance(copies.heap, Heap)
    return bytes(copies.heap.buffer)


def test_heap_is_put_together_from_all_of_them(copies: HostCopies) -> None:
    first, second = os.urandom(SIZE), os.urandom(5000)
    whole = first[100:4000] + second[1:4001] + first[8000:] + second[:100]
    whole += first[: SIZE - len(whole)]
    pieces = [HeapPiece(0, 100, 3900), HeapPiece(1, 1, 4000), HeapPiece(0, 8000, SIZE - 8000)]
    pieces += [HeapPiece(1, 0, 100), HeapPiece(0, 0, SIZE - sum(p.num_bytes for p in pieces) - 100)]
    digest = digest_of(memoryview(whole))
    for _ in range(2):
        assert load(copies, [first, second], pieces, digest) == whole
    assert len(copies._sources) == 2  # those of the first load went with it
    copies.drop_source()
    assert not copies._sources


def test_bad_bit_in_a_piece_is_never_loaded(copies: HostCopies) -> None:
    first, second = os.urandom(SIZE), os.urandom(4096)
    pieces = [HeapPiece(0, 0, SIZE - 4096), HeapPiece(1, 0, 4096)]
    digest = digest_of(memoryview(first[: SIZE - 4096] + second))
    bad = second[:77] + bytes([second[77] ^ 1]) + second[78:]
    with pytest.raises(ResourceError) as caught:
        load(copies, [first, bad], pieces, digest)
    assert caught.value.info.code is Code.DATA_LOSS
    assert not copies.is_resident
    assert isinstance(copies.heap, Heap)
    assert copies.heap.resident_bytes() == 0
    assert load(copies, [first, second], pieces, digest)


@pytest.mark.parametrize(
    "pieces",
    [
        [HeapPiece(1, 0, SIZE)],
        [HeapPiece(-1, 0, SIZE)],
        [HeapPiece(0, 1, SIZE)],
        [HeapPiece(0, -1, SIZE)],
        [HeapPiece(0, 0, SIZE), HeapPiece(0, 0, 1)],
        [HeapPiece(0, 0, SIZE + 1), HeapPiece(0, SIZE, -1)],
        [HeapPiece(0, 0, SIZE - 1)],
    ],
)
def test_place_that_there_is_not_is_refused(copies: HostCopies, pieces: list[HeapPiece]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(InternalError):
        load(copies, [bytes(SIZE)], pieces, "")
    copies.drop_source()
    assert len(os.listdir("/proc/self/fd")) == before


def test_load_from_nothing_is_refused(copies: HostCopies) -> None:
    with pytest.raises(InternalError):
        load(copies, [], [], "")
