"""Huge pages change how fast memory is, and nothing else."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator

import pytest

from phaseloom.common.tensors.hugepages import HUGE_BYTES, make_huge, map_file

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


@pytest.mark.parametrize("num_bytes", [mmap.PAGESIZE, HUGE_BYTES + mmap.PAGESIZE])
def test_file_that_is_only_read_is_mapped_without_being_written(num_bytes: int) -> None:
    """Its descriptor allows reading only, and what is written by others is seen."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, num_bytes)
    read_only_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    whole, start = map_file(read_only_fd, num_bytes, writable=False)
    os.close(read_only_fd)
    mapped = memoryview(whole)[start : start + num_bytes]
    os.pwrite(fd, b"seen", num_bytes - 4)
    assert bytes(mapped[-4:]) == b"seen"
    if num_bytes >= HUGE_BYTES:
        assert ctypes.addressof(ctypes.c_char.from_buffer(mapped)) % HUGE_BYTES == 0
    mapped[:4] = b"mine"
    assert os.pread(fd, 4, 0) == bytes(4)
    os.close(fd)
