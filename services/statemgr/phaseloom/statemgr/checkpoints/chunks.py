"""Blocks of a checkpoint's files on their way between disk and ranks' memory."""

from __future__ import annotations

import ctypes
import mmap
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import xxhash

from phaseloom.statemgr.checkpoints.marker import BLOCK_BYTES, FileSums

MODEL, TRAINING = "model", "training"
"""What the names of files begin with."""
CHUNK_BYTES = 8 * BLOCK_BYTES
"""Moved at once."""
DEPTH = 4
"""Chunks under way."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a file that lie together in a rank's memory."""

    file_offset: int
    memory: memoryview

    @property
    def end(self) -> int:
        return self.file_offset + len(self.memory)


def sums_of(content: bytes) -> FileSums:
    return FileSums(len(content), BLOCK_BYTES, b"".join(checksums(memoryview(content))).hex())


def checksums(chunk: memoryview) -> Iterator[bytes]:
    for start in range(0, len(chunk), BLOCK_BYTES):
        yield bytes(xxhash.xxh3_64_digest(chunk[start : start + BLOCK_BYTES]))


@contextmanager
def staging() -> Iterator[queue.SimpleQueue[memoryview]]:
    """Aligned memory for chunks, freed with the last reference to it."""
    buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
    for _ in range(DEPTH):
        buffers.put(memoryview(mmap.mmap(-1, CHUNK_BYTES)))
    yield buffers


def address(view: memoryview) -> int:
    return ctypes.addressof((ctypes.c_char * len(view)).from_buffer(view)) if len(view) else 0
