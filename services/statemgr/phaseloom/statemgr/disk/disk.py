"""Memory to a file and back, several blocks at a time, each with its checksum.

While some threads move blocks, others take checksums: neither holds the GIL. Blocking: call it in a
thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

import xxhash

from phaseloom.common.blockhash import BLOCK_BYTES, CHECKSUM_BYTES, Source, checksum
from phaseloom.common.errors import Code, ResourceError
from phaseloom.common.hugepages import make_huge
from phaseloom.common.statewire import DiskPath
from phaseloom.statemgr.core.statefile import Place, check_blocks, data_loss
from phaseloom.statemgr.disk.blockfile import BlockFile
from phaseloom.statemgr.disk.probing import opener, probe

T = TypeVar("T")

Files = Mapping[int, tuple[BlockFile, int]]
"""By source: what holds the blocks of a part, and where the part begins there."""

DEPTH = 4
"""Blocks between memory and disk at a time."""
_NUM_THREADS = DEPTH + 2
"""Some take checksums while others move blocks."""


class Cancelled(ResourceError):
    """Nobody wants this move any more."""

    def __init__(self) -> None:
        super().__init__("the move was cancelled", code=Code.ABORTED)


class Disk:
    def __init__(self, directory: Path) -> None:
        self.path: DiskPath = probe(directory)
        self._open = opener(self.path)

    def create(self, path: Path, num_bytes: int) -> BlockFile:
        """An empty file with room for as many bytes. Raises: OSError: there is none."""
        return self._open(path, True, num_bytes)

    def open(self, path: Path) -> BlockFile:
        return self._open(path, False, 0)

    def write(
        self,
        file: BlockFile,
        offset: int,
        memory: Source,
        num_bytes: int,
        cancelled: threading.Event,
        *,
        has: Callable[[int, bytes], bool] | None = None,
    ) -> bytes:
        """The beginning of `memory`. Returns: the checksums of its blocks. Raises: OSError.
        Cancelled.

        Args: has: whether a block, by number and checksum, is on the disk already.
        """

        in_flight = threading.Semaphore(DEPTH)

        def write(start: int, end: int) -> bytes:
            block = memory[start:end]
            taken = checksum(block) if has is not None else b""
            if has is not None and has(start // BLOCK_BYTES, taken):
                return taken
            with in_flight:
                file.write(block, offset + start)
            return taken or checksum(block)

        return b"".join(_each_block(num_bytes, BLOCK_BYTES, write, cancelled))

    def read(
        self, files: Files, place: Place, memory: memoryview, cancelled: threading.Event
    ) -> None:
        """Fill `memory` with a part of a state file, every block verified.

        Raises: OSError. Cancelled. ResourceError: DATA_LOSS, with the place of the damage.
        """
        part = place.part
        check_blocks(place)
        make_huge(memory[: part.num_bytes])
        in_flight = threading.Semaphore(DEPTH)
        block_bytes = place.header.block_bytes or BLOCK_BYTES

        def read(start: int, end: int) -> None:
            block = memory[start:end]
            file, offset = files[part.source_of(start // block_bytes)]
            with in_flight:
                count = file.read(block, offset + start)
            _check(place, start, block, count)

        _each_block(part.num_bytes, block_bytes, read, cancelled)
        is_older = not place.header.block_bytes
        if is_older and xxhash.xxh3_128(memory[: part.num_bytes]).hexdigest() != part.digest:
            raise data_loss(place.file, "the checksum of its content does not match")

    def read_block(self, files: Files, place: Place, number: int, memory: memoryview) -> int:
        """Fill the beginning of `memory` with one block of a file that has checksums of each;
        returns its size. Raises: as `read`."""
        check_blocks(place)
        start = number * place.header.block_bytes
        size = min(place.header.block_bytes, place.part.num_bytes - start)
        block = memory[:size]
        file, offset = files[place.part.source_of(number)]
        _check(place, start, block, file.read(block, offset + start))
        return size


def _check(place: Place, start: int, block: memoryview, count: int) -> None:
    """Raises: ResourceError: DATA_LOSS: what was read is not the whole block that was written."""
    part, end = place.part, start + len(block)
    if count < len(block):
        raise place.loss("the file ends before them", start + count, part.num_bytes)
    if part.blocks:
        number = start // place.header.block_bytes
        if checksum(block) != part.blocks[number * CHECKSUM_BYTES :][:CHECKSUM_BYTES]:
            raise place.loss("their checksum does not match", start, end)


def _each_block(
    num_bytes: int,
    block_bytes: int,
    work: Callable[[int, int], T],
    cancelled: threading.Event,
) -> list[T]:
    """Raises: the first failure, all at rest."""

    def unless_cancelled(start: int) -> T:
        if cancelled.is_set():
            raise Cancelled
        return work(start, min(start + block_bytes, num_bytes))

    with ThreadPoolExecutor(_NUM_THREADS, "disk") as threads:
        moves = [threads.submit(unless_cancelled, n) for n in range(0, num_bytes, block_bytes)]
        try:
            return [move.result() for move in moves]
        finally:
            for move in moves:
                move.cancel()
            wait(moves)
