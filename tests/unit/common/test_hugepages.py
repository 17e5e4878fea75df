"""Huge pages change how fast memory is, and nothing else."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import pytest

from phaseloom.common.tensors.hugepages import HUGE_BYTES, make_huge, map_file, touch

SIZE = 3 * HUGE_BYTES + mmap.PAGESIZE


@pytest.fixture(name="fd")
def _fd() -> Iterator[int]:
    fd = os.memfd_create("huge")
    os.ftruncate(fd, SIZE)
    yield fd
    os.close(fd)


def _mapped(fd: int, num_bytes: int) -> memoryview:
    whole, start = map_file(fd, num_bytes)
    return memoryview(whole)[start : start + num_bytes]


@pytest.mark.parametrize("num_bytes", [mmap.PAGESIZE, HUGE_BYTES, SIZE])
def test_what_is_mapped_is_the_file(fd: int, num_bytes: int) -> None:
    memory = _mapped(fd, num_bytes)
    memory[-1] = 7
    assert os.pread(fd, 1, num_bytes - 1) == b"\x07"
    os.pwrite(fd, b"first", 0)
    assert bytes(memory[:5]) == b"first"


def test_content_stays_where_pages_become_huge(fd: int) -> None:
    content = os.urandom(SIZE)
    os.pwrite(fd, content, 0)
    memory = _mapped(fd, SIZE)
    make_huge(memory)
    assert bytes(memory) == os.pread(fd, SIZE, 0) == content
    make_huge(memory[mmap.PAGESIZE :])
    assert bytes(memory) == content


def test_memory_that_nobody_touched_is_zeroes_and_can_be_given_back(fd: int) -> None:
    whole, start = map_file(fd, SIZE)
    memory = memoryview(whole)[start : start + SIZE]
    make_huge(memory)
    assert not any(memory)
    memory[:] = b"\x01" * SIZE
    assert os.fstat(fd).st_blocks * 512 == SIZE
    whole.madvise(mmap.MADV_REMOVE, start, SIZE)
    assert os.fstat(fd).st_blocks == 0
    assert not any(memory)


@pytest.mark.parametrize("num_bytes", [mmap.PAGESIZE, HUGE_BYTES, SIZE])
def test_all_of_what_is_touched_is_there_and_its_content_stays(fd: int, num_bytes: int) -> None:
    os.pwrite(fd, b"\x07", num_bytes - 1)
    memory = _mapped(fd, num_bytes)
    assert touch(memory)
    assert os.fstat(fd).st_blocks * 512 >= num_bytes
    assert bytes(memory) == bytes(num_bytes - 1) + b"\x07"
    assert touch(memory[:0])


def test_what_cannot_be_huge_is_left_alone(fd: int) -> None:
    assert not make_huge(_mapped(fd, SIZE).toreadonly())
    assert not make_huge(_mapped(fd, mmap.PAGESIZE))
    assert not make_huge(memoryview(b""))
    # Not at a multiple of their size, wherever the system has put it.
    assert not make_huge(_mapped(fd, HUGE_BYTES)[1:])


def test_map_ends_with_its_last_reference(fd: int) -> None:
    def num_maps() -> int:
        with open("/proc/self/maps") as maps:
            return sum("memfd:huge" in line for line in maps)

    memory = _mapped(fd, SIZE)
    assert num_maps() == 1
    del memory
    assert num_maps() == 0


def test_map_that_cannot_be_is_an_error() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        map_file(-1 & 0x7FFFFFFF, HUGE_BYTES)
