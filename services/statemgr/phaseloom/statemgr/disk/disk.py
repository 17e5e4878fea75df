"""Memory to a file and back, several blocks at a time, each with its checksum.

While threads move blocks, the whole memory's digest is taken beside them: neither holds the GIL.
Blocking: call it in a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import xxhash

from phaseloom.common.errors import Code, ResourceError
from phaseloom.common.statewire import DiskPath
from phaseloom.statemgr.core.statefile import CHECKSUM_BYTES, Place, check_blocks, data_loss
from phaseloom.statemgr.disk.blockfile import BlockFile
from phaseloom.statemgr.disk.probing import opener, probe

T = TypeVar("T")

BLOCK_BYTES = 8 * 1024 * 1024
DEPTH = 4
"""Blocks between memory and disk at a time."""
_NUM_THREADS = DEPTH + 2
"""Some take checksums while others move blocks."""
_HASHED_BYTES = 1024 * 1024
"""Between looks at whether the move was cancelled."""


@dataclass(frozen=True, slots=True)
class Written:
    digest: str
    """xxh3-128 of the whole memory, in hex."""
    blocks: bytes
    """xxh3-64 of each block."""


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
        self, file: BlockFile, offset: int, memory: memoryview, cancelled: threading.Event
    ) -> Written:
        """Raises: OSError. Cancelled."""

        in_flight = threading.Semaphore(DEPTH)

        def write(start: int, end: int) -> bytes:
            block = memory[start:end]
            with in_flight:
                file.write(block, offset + start)
            return _checksum(block)

        digest, blocks = _each_block(
            len(memory), BLOCK_BYTES, write, cancelled, lambda: _digest(memory, cancelled)
        )
        return Written(digest, b"".join(blocks))

    def read(
        self, file: BlockFile, place: Place, memory: memoryview, cancelled: threading.Event
    ) -> None:
        """Fill `memory` with a part of a state file, every block verified.

        Raises: OSError. Cancelled. ResourceError: DATA_LOSS, with the place of the damage.
        """
        part = place.part
        check_blocks(place)

        in_flight = threading.Semaphore(DEPTH)

        def read(start: int, end: int) -> None:
            with in_flight:
                count = file.read(memory[start:end], place.offset + start)
            if count < end - start:
                raise place.loss("the file ends before them", start + count, part.num_bytes)
            if part.blocks:
                number = start // place.header.block_bytes
                expected = part.blocks[number * CHECKSUM_BYTES :][:CHECKSUM_BYTES]
                if _checksum(memory[start:end]) != expected:
                    raise place.loss("their checksum does not match", start, end)

        block_bytes = place.header.block_bytes or BLOCK_BYTES
        _each_block(part.num_bytes, block_bytes, read, cancelled, lambda: "")
        if not part.blocks and _digest(memory[: part.num_bytes], cancelled) != part.digest:
            raise data_loss(place.file, "the checksum of its content does not match")


def _each_block(
    num_bytes: int,
    block_bytes: int,
    work: Callable[[int, int], T],
    cancelled: threading.Event,
    beside: Callable[[], str],
) -> tuple[str, list[T]]:
    """What `beside` gives, and `work` for each block. Raises: the first failure, all at rest."""

    def unless_cancelled(start: int) -> T:
        if cancelled.is_set():
            raise Cancelled
        return work(start, min(start + block_bytes, num_bytes))

    with ThreadPoolExecutor(_NUM_THREADS, "disk") as threads:
        moves = [threads.submit(unless_cancelled, n) for n in range(0, num_bytes, block_bytes)]
        try:
            aside = beside()
            return aside, [move.result() for move in moves]
        finally:
            for move in moves:
                move.cancel()
            wait(moves)


def _checksum(block: memoryview) -> bytes:
    return bytes(xxhash.xxh3_64(block).digest())


def _digest(memory: memoryview, cancelled: threading.Event) -> str:
    digest = xxhash.xxh3_128()
    for start in range(0, len(memory), _HASHED_BYTES):
        if cancelled.is_set():
            raise Cancelled
        digest.update(memory[start : start + _HASHED_BYTES])
    return digest.hexdigest()
