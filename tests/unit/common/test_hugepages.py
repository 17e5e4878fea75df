"""Huge pages change how fast memory is, and nothing else."""

from __future__ import annotations

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
