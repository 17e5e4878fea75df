"""Moves memory to a state file and back, several blocks at a time, each with its checksum.

Some threads do nothing but move blocks, so that the disk has its next block as soon as one is done;
others take checksums meanwhile. Neither holds the GIL. Blocking: call it in a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.contract.state_agent import DiskPath
from phaseloom.common.tensors.blockhash import BLOCK_BYTES, checksum, combined
from phaseloom.common.tensors.hugepages import make_huge
from phaseloom.statemgr.disk.blockfile import BlockFile, probe, way_to
from phaseloom.statemgr.disk.statefile import (
    Place,
    StateHeader,
    check_blocks,
    encode_header,
    layout_of,
)

S = TypeVar("S")
T = TypeVar("T")


class Writable(Protocol):
    def write(self, block: memoryview, offset: int) -> None: ...


class Readable(Protocol):
    def read(self, block: memoryview, offset: int) -> int: ...


DEPTH = 4
"""The number of blocks that move between memory and disk at a time."""
_NUM_CHECKING = 2
"""The number of threads that take checksums: each is faster than a disk."""


class Cancelled(ResourceError):
    """Nobody wants this move any more."""

    def __init__(self) -> None:
        super().__init__("the move was cancelled", code=Code.ABORTED)


class Disk:
    """The disk of a directory, which opens files in the fastest way that works there."""

    def __init__(self, directory: Path) -> None:
        self.path: DiskPath = probe(directory)
        self._open = way_to(self.path)

    def create(self, path: Path, num_bytes: int) -> BlockFile:
        """An empty file with room for `num_bytes` bytes. Raises: OSError: the disk has none."""
        return self._open(path, writable=True, num_bytes=num_bytes)

    def open(self, path: Path) -> BlockFile:
        return self._open(path, writable=False)


def write_state(
    file: Writable,
    name: str,
    header: StateHeader,
    memories: Sequence[memoryview],
    cancelled: threading.Event,
) -> StateHeader:
    """Write all that a state file holds: every section, then the header.

    Args:    name: the file's name, for errors.
             header: where it has a digest for a part, the part's memory must have that digest.
    Returns: the header as written.
    """
    offsets, _ = layout_of(header)
    blocks = [
        _write_part(file, Place(name, header, index, at), memory, cancelled)
        for index, (at, memory) in enumerate(zip(offsets, memories, strict=True))
    ]
    written = header.with_blocks(BLOCK_BYTES, blocks)
    start = encode_header(written)
    assert len(start) == offsets[0]
    file.write(memoryview(bytearray(start)), 0)
    return written


def _write_part(
    file: Writable, place: Place, memory: memoryview, cancelled: threading.Event
) -> bytes:
    """Write the memory of a part. Returns: the checksums of its blocks."""
    part = place.part

    def take(start: int, end: int) -> bytes:
        return checksum(memory[start:end])

    def put(start: int, end: int, taken: bytes) -> bytes:
        file.write(memory[start:end], place.offset + start)
        return taken

    checking, moving = (_NUM_CHECKING, take), (DEPTH, put)
    blocks = b"".join(_in_two_steps(part.num_bytes, BLOCK_BYTES, checking, moving, cancelled))
    if part.digest and combined(blocks) != part.digest:
        raise place.loss("the host copy is not what its digest says", 0, part.num_bytes)
    return blocks


def read_part(file: Readable, place: Place, memory: memoryview, cancelled: threading.Event) -> None:
    """Fill `memory` with a part of a state file, every block verified."""
    check_blocks(place)
    make_huge(memory[: place.part.num_bytes])

    def get(start: int, end: int) -> int:
        return file.read(memory[start:end], place.offset + start)

    def check(start: int, end: int, count: int) -> None:
        _check(place, start, memory[start:end], count)

    moving, checking = (DEPTH, get), (_NUM_CHECKING, check)
    _in_two_steps(place.part.num_bytes, place.header.block_bytes, moving, checking, cancelled)


def read_block(file: Readable, place: Place, number: int, memory: memoryview) -> int:
    """Fill the beginning of `memory` with one verified block. Returns: the block's size."""
    check_blocks(place)
    start = number * place.header.block_bytes
    block = memory[: place.block_size(number)]
    _check(place, start, block, file.read(block, place.offset + start))
    return len(block)


def _check(place: Place, start: int, block: memoryview, count: int) -> None:
    """Verify a block of which `count` bytes were read.

    Raises: ResourceError: DATA_LOSS: it is not the whole block that was written.
    """
    if count < len(block):
        raise place.loss("the file ends before them", start + count, place.part.num_bytes)
    if checksum(block) != place.checksum_of(start // place.header.block_bytes):
        raise place.loss("their checksum does not match", start, start + len(block))


def _in_two_steps(
    num_bytes: int,
    block_bytes: int,
    first: tuple[int, Callable[[int, int], S]],
    then: tuple[int, Callable[[int, int, S], T]],
    cancelled: threading.Event,
) -> list[T]:
    """Run two steps over all blocks: `first(start, end)`, then `then(start, end, result of first)`.

    Args:    first, then: the number of threads for the step, and its function. Each thread takes
             the next block.
    Returns: the results of `then`, in the order of the blocks.
    Raises:  the error of the first block that failed, once no thread works any more.
    """

    def begin(start: int) -> Future[T]:
        unless_cancelled()
        end = min(start + block_bytes, num_bytes)
        return behind.submit(finish, start, end, first[1](start, end))

    def finish(start: int, end: int, made: S) -> T:
        unless_cancelled()
        return then[1](start, end, made)

    def unless_cancelled() -> None:
        if cancelled.is_set():
            raise Cancelled

    with threads(then[0]) as behind, threads(first[0]) as ahead:
        begun = [ahead.submit(begin, start) for start in range(0, num_bytes, block_bytes)]
        return [each.result().result() for each in begun]


@contextmanager
def threads(number: int) -> Iterator[ThreadPoolExecutor]:
    """A pool of threads. On leaving, work that has begun is waited for and other work is
    cancelled."""
    pool = ThreadPoolExecutor(number, "disk")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
