"""Files that are read past the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from random import Random

import pytest

from phaseloom.common.tensors.uncachedfile import UncachedFile

MiB = 2**20


def test_any_bytes_are_those_of_the_file(tmp_path: Path) -> None:
    path, random = tmp_path / "file", Random(7)
    content = random.randbytes(3 * MiB + 17)
    path.write_bytes(content)
    with UncachedFile(path) as file:
        for _ in range(200):
            start = random.randrange(len(content))
            size = random.choice([1, 8, 4096, random.randrange(MiB)])
            stop = min(len(content), start + size)
            assert bytes(file.read(start, stop - start)) == content[start:stop]
        assert bytes(file.read(0, len(content))) == content
        with pytest.raises(OSError, match="ends before"):
            file.read(len(content) - 5, 6)


def test_file_whose_direct_reads_are_refused_is_read_like_any_other(tmp_path: Path) -> None:
    """The kernel refuses a direct read at an odd offset."""
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 64)
    with UncachedFile(path) as file:
        memory = memoryview(bytearray(100))
        assert file._read(memory, 7) == 100
        assert bytes(memory) == (bytes(range(256)) * 64)[7:107]
        assert bytes(file.read(300, 20)) == (bytes(range(256)) * 64)[300:320]


def test_what_was_read_is_not_in_the_page_cache(tmp_path: Path) -> None:
    path, size = tmp_path / "file", 8 * MiB
    path.write_bytes(bytes(size))
    fd = os.open(path, os.O_RDWR)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if _num_cached(fd, size):
            pytest.skip("this file system keeps files in memory")
        with UncachedFile(path) as file:
            file.read(100, 7 * MiB)
        assert _num_cached(fd, size) == 0
        os.pread(fd, size, 0)
        assert _num_cached(fd, size) == size // mmap.PAGESIZE, "as any other read leaves it"
    finally:
        os.close(fd)


def _num_cached(fd: int, size: int) -> int:
    """The number of the file's pages that are in memory."""
    pages = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
    with mmap.mmap(fd, size) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        address = ctypes.c_void_p(ctypes.addressof(start))
        assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(size), pages) == 0
        del start
    return sum(page & 1 for page in pages)
