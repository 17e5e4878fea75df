"""The digest of managed memory, computed per block so that several threads can share the work.

    digest = xxh3-128 (hex) of the concatenated xxh3-64 (8 bytes each) of all blocks of 8 MiB

The last block may be shorter. State files contain the checksums of their blocks, from which the
digest follows, so memory hashed for writing need not be hashed again. The digest detects
corruption by hardware and stray writes. It does not protect against deliberate changes. Hashing
releases the GIL. Used by the state manager and the ranks.
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
"""Maximum number of threads that process memory at a time. More do not increase the throughput."""

T = TypeVar("T")


def checksum(block: memoryview | bytes) -> bytes:
    return bytes(xxhash.xxh3_64(block).digest())


def combine_checksums(checksums: bytes) -> str:
    """Return the digest of memory whose blocks have these concatenated checksums."""
    return xxhash.xxh3_128(checksums).hexdigest()


def digest_of(memory: memoryview) -> str:
    """Compute the digest in this thread, which takes at least 0.1 s per GB."""
    size = BLOCK_BYTES
    blocks = (memory[start : start + size] for start in range(0, len(memory), size))
    return combine_checksums(b"".join(map(checksum, blocks)))


def digest_in_threads(memory: memoryview) -> str:
    """Compute the digest in several threads, for callers that block other work."""
    checksums = map_parts(len(memory), BLOCK_BYTES, lambda at, end: checksum(memory[at:end]))
    return combine_checksums(b"".join(checksums))


def num_threads() -> int:
    """Number of threads that may process memory at a time in this process."""
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


def map_parts(num_bytes: int, part_bytes: int, work: Callable[[int, int], T]) -> list[T]:
    """Call `work(start, end)` for each part, in several threads if there are several parts.

    Returns: the results, in the order of the parts.
    Raises:  the exception of the first part that failed, after all other parts have ended.
    """
    starts = range(0, num_bytes, part_bytes)

    def part(start: int) -> T:
        return work(start, min(start + part_bytes, num_bytes))

    threads = min(num_threads(), len(starts))
    if threads <= 1:
        return [part(start) for start in starts]
    with ThreadPoolExecutor(threads, "memory") as pool:
        return list(pool.map(part, starts))
