"""The digest of managed memory, computed by blocks, so that several threads can share the work.

    digest = xxh3-128 (hex) of the xxh3-64 of each block of 8 MiB, 8 bytes each

The last block may be shorter. State files carry the checksums of the blocks, and the digest follows
from these: memory that was hashed to be written need not be hashed again. The digest finds what
hardware and stray writes do to memory; it is no proof against somebody who means harm. Hashing
releases the GIL. The state manager and ranks use it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import xxhash

BLOCK_BYTES = 8 * 1024 * 1024
CHECKSUM_BYTES = 8
_MAX_THREADS = 4
"""The most threads that work on memory at a time; more of them do not move memory faster."""

T = TypeVar("T")


def checksum(block: memoryview | bytes) -> bytes:
    return bytes(xxhash.xxh3_64(block).digest())


def combined(checksums: bytes) -> str:
    """The digest of memory whose blocks have these checksums, one after another."""
    return xxhash.xxh3_128(checksums).hexdigest()


def digest_of(memory: memoryview) -> str:
    """The digest, computed in this thread: it takes 0.1 s a GB and more."""
    size = BLOCK_BYTES
    blocks = (memory[start : start + size] for start in range(0, len(memory), size))
    return combined(b"".join(map(checksum, blocks)))


def digest_in_threads(memory: memoryview) -> str:
    """The digest, computed by several threads: for callers whom somebody waits for."""
    checksums = each_part(len(memory), BLOCK_BYTES, lambda at, end: checksum(memory[at:end]))
    return combined(b"".join(checksums))


def num_threads() -> int:
    """The number of threads that may work on memory at a time in this process."""
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


def each_part(num_bytes: int, part_bytes: int, work: Callable[[int, int], T]) -> list[T]:
    """Call `work(start, end)` for each part, in several threads where there are several parts.

    Returns: the results, in the order of the parts.
    Raises:  the exception of the first part that failed; no other part is under way by then.
    """
    starts = range(0, num_bytes, part_bytes)

    def part(start: int) -> T:
        return work(start, min(start + part_bytes, num_bytes))

    threads = min(num_threads(), len(starts))
    if threads <= 1:
        return [part(start) for start in starts]
    with ThreadPoolExecutor(threads, "memory") as pool:
        return list(pool.map(part, starts))
