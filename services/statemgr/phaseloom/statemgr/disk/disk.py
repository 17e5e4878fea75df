"""The disk: reads and writes state files by the fastest method that it supports.

Several blocks of a file move at a time, each with its checksum. Some threads only move blocks, so
that the disk always has its next block, while others take checksums. Neither hold the GIL.
Blocking: call it in a thread.

There are three methods (`DiskMethod`). A test write and read on the disk decides: the preferred
method is used if its bytes come back, otherwise the next simpler one.

`python -m phaseloom.statemgr.disk.disk DIRECTORY [METHOD]` prints the working method as JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from phaseloom.common.contract.state_agent import DiskMethod, DiskPath
from phaseloom.common.tensors.blockfile import (
    DEPTH,
    FILES,
    NUM_CHECKING,
    PAGE_BYTES,
    BlockFile,
    in_two_steps,
)
from phaseloom.common.tensors.blockhash import BLOCK_BYTES, checksum, combine_checksums
from phaseloom.common.tensors.hugepages import make_huge
from phaseloom.statemgr.disk.statefile import check_blocks, encode_header, layout_of
from phaseloom.statemgr.records.stateheader import SectionRef, StateHeader

PROBE_PREFIX = ".probe-"
_PROBE_BYTES = 3 * PAGE_BYTES + 100


class MemoryFile:
    """A file of fixed size in memory: a seal that is on no disk."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def write(self, block: memoryview, offset: int) -> None:
        copy(self._memory[offset : offset + len(block)], block)

    def read(self, block: memoryview, offset: int) -> int:
        """As `BlockFile.read`."""
        content = self._memory[offset : offset + len(block)]
        copy(block[: len(content)], content)
        return len(content)


def probe(directory: Path, preferred: DiskMethod = DiskMethod.DIRECT) -> DiskPath:
    """Find the method for a directory: the preferred one, or the next simpler one that works.

    Raises nothing: if the directory is not writable, each later write fails by itself.
    """
    reasons = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory, prefix=PROBE_PREFIX) as scratch:
            for method in list(FILES)[list(FILES).index(preferred) : -1]:
                why_not = _why_not(method, Path(scratch) / method)
                if not why_not:
                    reasons.append(f"a round trip by {method} came back")
                    return DiskPath(method, PAGE_BYTES, "; ".join(reasons))
                reasons.append(f"{method}: {why_not}")
    except OSError as error:
        reasons = [f"nothing can be written in {directory}: {error.strerror}"]
    return DiskPath(DiskMethod.BUFFERED, 1, "; ".join(reasons) or "buffered I/O is preferred")


def _why_not(method: DiskMethod, path: Path) -> str:
    """The reason why a method does not work here; empty: what it wrote came back."""
    try:
        if method is DiskMethod.DIRECT:
            _write_page_directly(path)
        opened = FILES[method]
        written, read = (memoryview(mmap.mmap(-1, _PROBE_BYTES)) for _ in range(2))
        written[:] = os.urandom(_PROBE_BYTES)
        with contextlib.closing(opened(path, writable=True, num_bytes=_PROBE_BYTES)) as file:
            file.write(written, 0)
            file.finish(_PROBE_BYTES)
        with contextlib.closing(opened(path, writable=False)) as file:
            came_back = file.read(read, 0) == _PROBE_BYTES and read == written
        return "" if came_back else "it lost bytes"
    except ImportError as error:
        return f"it is not installed ({error}): pip install 'phaseloom[gds]'"
    except OSError as error:
        return error.strerror or repr(error)


def _write_page_directly(path: Path) -> None:
    """Write a page past the page cache, which `DirectFile` would use instead. Raises: OSError: the
    kernel refuses."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    try:
        with mmap.mmap(-1, PAGE_BYTES) as memory:
            os.pwrite(fd, memory, PAGE_BYTES)
    finally:
        os.close(fd)


class Writable(Protocol):
    def write(self, block: memoryview, offset: int) -> None: ...


class Readable(Protocol):
    def read(self, block: memoryview, offset: int) -> int: ...


class Disk:
    """The disk of a directory. Opens files by the method that `probe` finds."""

    def __init__(self, directory: Path, preferred: DiskMethod = DiskMethod.DIRECT) -> None:
        self.path: DiskPath = probe(directory, preferred)
        self._open = FILES[self.path.method]

    def create(self, path: Path, num_bytes: int) -> BlockFile:
        """Create an empty file with space for `num_bytes`. Raises: OSError: the disk is full."""
        return self._open(path, writable=True, num_bytes=num_bytes)

    def open(self, path: Path) -> BlockFile:
        return self._open(path, writable=False)


BlockOf = Callable[[int, int], memoryview]
"""Returns the block of a section from one offset to another, which is in another file."""


def write_state(
    file: Writable,
    name: str,
    header: StateHeader,
    memories: Sequence[memoryview | BlockOf],
    cancelled: threading.Event,
) -> StateHeader:
    """Write every section of a state file, then its header.

    Args:    name: the file's name in errors.
             header: if it has a digest for a part, the part's memory must match it.
    Returns: the header as written.
    """
    offsets, _ = layout_of(header)
    blocks = [
        _write_part(file, SectionRef(name, header, index, at), memory, cancelled)
        for index, (at, memory) in enumerate(zip(offsets, memories, strict=True))
    ]
    written = header.with_blocks(BLOCK_BYTES, blocks)
    write_header(file, written, offsets)
    return written


def write_header(file: Writable, header: StateHeader, offsets: list[int]) -> None:
    """Write the header of a file whose sections, at these offsets, are complete."""
    start = encode_header(header)
    assert len(start) == offsets[0]
    file.write(memoryview(bytearray(start)), 0)


def _write_part(
    file: Writable, place: SectionRef, memory: memoryview | BlockOf, cancelled: threading.Event
) -> bytes:
    part = place.part

    def take(start: int, end: int) -> bytes:
        if isinstance(memory, memoryview):
            return checksum(memory[start:end])
        # Written here, so that no blocks wait in memory.
        block = memory(start, end)
        file.write(block, place.offset + start)
        return checksum(block)

    def put(start: int, end: int, block_checksum: bytes) -> bytes:
        if isinstance(memory, memoryview):
            file.write(memory[start:end], place.offset + start)
        return block_checksum

    checking, moving = (NUM_CHECKING, take), (DEPTH, put)
    blocks = b"".join(in_two_steps(part.num_bytes, BLOCK_BYTES, checking, moving, cancelled))
    if part.digest and combine_checksums(blocks) != part.digest:
        raise place.loss("the host copy does not match its digest", 0, part.num_bytes)
    return blocks


def read_part(
    file: Readable, place: SectionRef, memory: memoryview, cancelled: threading.Event
) -> None:
    """Fill `memory` with a part of a state file, verifying every block."""
    check_blocks(place)
    make_huge(memory[: place.part.num_bytes])

    def get(start: int, end: int) -> int:
        return file.read(memory[start:end], place.offset + start)

    def check(start: int, end: int, count: int) -> None:
        _check(place, start, memory[start:end], count)

    moving, checking = (DEPTH, get), (NUM_CHECKING, check)
    in_two_steps(place.part.num_bytes, place.header.block_bytes, moving, checking, cancelled)


def read_block(file: Readable, place: SectionRef, number: int, memory: memoryview) -> int:
    """Fill the beginning of `memory` with one verified block. Returns: the block's size."""
    check_blocks(place)
    start = number * place.header.block_bytes
    block = memory[: place.block_size(number)]
    _check(place, start, block, file.read(block, place.offset + start))
    return len(block)


def _check(place: SectionRef, start: int, block: memoryview, count: int) -> None:
    """Verify a block of which `count` bytes were read.

    Raises: ResourceError: DATA_LOSS: it is not the whole block that was written.
    """
    if count < len(block):
        raise place.loss("the file ends before them", start + count, place.part.num_bytes)
    if checksum(block) != place.checksum_of(start // place.header.block_bytes):
        raise place.loss("their checksum does not match", start, start + len(block))


def copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes between two views of the same length.

    Blocking and slow: run it in a thread. Unlike slice assignment, it releases the GIL.
    """
    assert len(target) == len(source)
    ctypes.memmove(_address(target), _address(source), len(source))


def _address(view: memoryview) -> int:
    return ctypes.addressof((ctypes.c_char * len(view)).from_buffer(view))


def main() -> None:
    directory, *preferred = sys.argv[1:]
    print(msgspec.json.encode(probe(Path(directory), *map(DiskMethod, preferred))).decode())


if __name__ == "__main__":
    main()
