"""Extents mapped into a rank's memory, and copies between them and the rank's heap.

Large copies use several threads, because page faults of fresh memory limit a single thread. If
bytes are both hashed and copied, each chunk is hashed first: hashing brings it into the cache, so
the copy takes no longer than without a hash. Hashing the target after the copy would read freshly
written memory and take a quarter longer. Copies and hashes release the GIL; slice assignment would
hold it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

import xxhash

from phaseloom.common.contract.errors import InternalError
from phaseloom.common.contract.ids import VersionKey
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.common.tensors.blockhash import BLOCK_BYTES, combine_checksums, map_parts
from phaseloom.common.tensors.hugepages import make_huge, map_file
from phaseloom.common.tensors.resharding import StridedRanges
from phaseloom.common.transport.framing import close_fds
from phaseloom.worker.state.heap import ALIGNMENT_BYTES, PAGE_BYTES

_CHUNK_BYTES = 512 * 1024
"""Bytes hashed and copied at a time. A chunk must still be in a core's cache when it is copied."""
_ZEROES = ctypes.create_string_buffer(_CHUNK_BYTES)
_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_PART_BYTES = 64 * 1024 * 1024
"""Bytes of one memmove, large enough for stores that bypass the cache."""
_BATCH_BYTES = 8 * 1024 * 1024
"""Bytes of tensors that a thread copies before it takes more work, small enough that all threads
finish together."""
_MAX_MAPPED_VERSIONS = 3
"""Versions whose mappings are kept for reuse. Each mapping keeps its extent's memory alive."""


_Tile = tuple[int, int, int | None]
"""[start, end) of a target, and the distance to the source's bytes. Distance None: write zeroes."""


class Mapping:
    """An extent mapped into this process. Dropping the last reference unmaps it."""

    def __init__(self, fd: int, num_bytes: int, *, writable: bool) -> None:
        """Map an extent and close `fd`, which the mapping does not need."""
        mapped_bytes = max(1, -(-num_bytes // PAGE_BYTES)) * PAGE_BYTES
        try:
            self._map, self._start = map_file(fd, mapped_bytes, writable=writable)
            self._num_bytes = num_bytes
            self.buffer = self._view()
        finally:
            os.close(fd)
        self.is_settled = not writable
        """Whether `make_huge` has run or is unnecessary because the mapping is read-only."""

    def _view(self) -> memoryview:
        return memoryview(self._map)[self._start : self._start + self._num_bytes]

    def make_huge(self) -> None:
        """Move the mapping to huge pages. Call this before it is pinned.

        Runs once per mapping: the kernel synchronises all cores before each attempt, and would
        search again at every switch for the huge pages that it could not provide. It is slow, so
        run it in a thread.
        """
        if not self.is_settled:
            self.is_settled = True
            # A view of its own: `try_close` may release `buffer` in the meantime.
            make_huge(self._view())

    def close(self) -> None:
        """Unmap the extent now, or when its last reference is dropped."""
        self.buffer.release()
        with contextlib.suppress(BufferError):
            self._map.close()

    def when_unmapped(self, call: Callable[[], object]) -> None:
        """Call `call` once, in an arbitrary thread, when the extent is unmapped."""
        weakref.finalize(self._map, call).atexit = False

    def try_close(self) -> bool:
        """Unmap the extent now. Return False and keep the mapping if something still refers to
        it."""
        self.buffer.release()
        try:
            self._map.close()
        except BufferError:
            self.buffer = self._view()
            return False
        return True


class MappedVersions:
    """The extents of the most recently used weights versions, each mapped once."""

    def __init__(self) -> None:
        self._mappings: OrderedDict[tuple[int, int, bool], Mapping] = OrderedDict()
        self._keys: dict[Mapping, VersionKey] = {}

    def map(self, key: VersionKey, fds: list[int], num_bytes: int, *, writable: bool) -> Mapping:
        """Return a mapping of the received extent, reusing an earlier mapping of the same file."""
        if len(fds) != 1:
            close_fds(fds)
            raise InternalError(f"expected 1 extent for a version, got {len(fds)}")
        status = os.fstat(fds[0])
        identity = (status.st_dev, status.st_ino, writable)
        mapping = self._mappings.pop(identity, None)
        if mapping is not None and len(mapping.buffer) < num_bytes:
            del self._keys[mapping]
            mapping = None
        if mapping is None:
            mapping = Mapping(fds[0], num_bytes, writable=writable)
        else:
            close_fds(fds)
        self._mappings[identity] = mapping
        self._keys[mapping] = key
        recent: set[VersionKey] = set()
        older = []
        for old_identity, old_mapping in reversed(self._mappings.items()):
            recent.add(self._keys[old_mapping].whole)
            if len(recent) > _MAX_MAPPED_VERSIONS:
                older.append(old_identity)
        self._close(older)
        return mapping

    def unmap_unused(self) -> list[VersionKey]:
        """Unmap the unreferenced extents and return the versions whose mappings remain."""
        self._close(list(self._mappings))
        return list(self._keys.values())

    def _close(self, identities: list[tuple[int, int, bool]]) -> None:
        for identity in identities:
            if self._mappings[identity].try_close():
                del self._keys[self._mappings.pop(identity)]


def copy(source: memoryview, target: memoryview) -> None:
    _move(_address(source), _address(target), len(source))


def _move(source_address: int, target_address: int, num_bytes: int) -> None:
    if num_bytes <= _PART_BYTES:
        ctypes.memmove(target_address, source_address, num_bytes)
        return

    def part(start: int, end: int) -> None:
        ctypes.memmove(target_address + start, source_address + start, end - start)

    map_parts(num_bytes, _PART_BYTES, part)


def copy_hashed(source: memoryview, target: memoryview, *, is_clear: bool = False) -> str:
    """Copy the first `len(target)` bytes of `source` to `target`.

    Args:    is_clear: whether the target holds only zeroes. Chunks of zeroes, such as gradients
                 after an `optim_step`, then need neither a copy nor pages.
    Returns: the digest of the whole `source`.
    """
    source_address, target_address = _address(source), _address(target)

    def block(start: int, end: int) -> bytes:
        hasher = xxhash.xxh3_64()
        for at in range(start, end, _CHUNK_BYTES):
            until = min(at + _CHUNK_BYTES, end)
            hasher.update(source[at:until])
            if at < len(target):
                num_bytes = min(until, len(target)) - at
                if not (is_clear and _is_zero(source_address + at, num_bytes)):
                    ctypes.memmove(target_address + at, source_address + at, num_bytes)
        return bytes(hasher.digest())

    return combine_checksums(b"".join(map_parts(len(source), BLOCK_BYTES, block)))


def _is_zero(address: int, num_bytes: int) -> bool:
    return not _libc.memcmp(address, _ZEROES, num_bytes)


def _address(view: memoryview) -> int:
    return ctypes.addressof((ctypes.c_char * len(view)).from_buffer(view)) if len(view) else 0


def gather(target: memoryview, heap: memoryview, pairs: list[tuple[TensorSlot, TensorSlot]]) -> str:
    """Copy heap slots to their offsets in a version and fill the gaps between them with zeroes.

    The zeroes give equal weights equal digests, regardless of the extent's earlier content.
    Args:    pairs: slots of the heap with their slots in the version, ordered by offset in the
             version.
    Returns: the digest of the version.
    """
    heap_address, address = _address(heap), _address(target)
    tiles = list(_tiles(pairs, len(target)))
    ends = [end for _, end, _ in tiles]

    def block(start: int, end: int) -> bytes:
        hasher = xxhash.xxh3_64()
        for at in range(start, end, _CHUNK_BYTES):
            until = min(at + _CHUNK_BYTES, end)
            for first, last, shift in _within(tiles, ends, at, until):
                if shift is None:
                    target[first:last] = bytes(last - first)
                    hasher.update(target[first:last])
                else:
                    hasher.update(heap[first + shift : last + shift])
                    ctypes.memmove(address + first, heap_address + first + shift, last - first)
        return bytes(hasher.digest())

    return combine_checksums(b"".join(map_parts(len(target), BLOCK_BYTES, block)))


def _tiles(pairs: list[tuple[TensorSlot, TensorSlot]], num_bytes: int) -> Iterator[_Tile]:
    """Yield ordered tiles that cover a version of this size.

    Tensors that are adjacent in both memories share a tile.
    """
    start = end = shift = 0
    for slot, place in pairs:
        is_next = place.offset == end and slot.offset - place.offset == shift
        if not is_next:
            if end > start:
                yield start, end, shift
            if place.offset > end:
                yield end, place.offset, None
            start, shift = place.offset, slot.offset - place.offset
        end = place.offset + place.num_bytes
    if end > start:
        yield start, end, shift
    if num_bytes > end:
        yield end, num_bytes, None


def _within(tiles: list[_Tile], ends: list[int], at: int, until: int) -> Iterator[_Tile]:
    """Yield the intersection of [at, until) with each tile. Args: ends: the end of each tile."""
    for number in range(bisect_right(ends, at), len(tiles)):
        start, end, shift = tiles[number]
        if start >= until:
            return
        yield max(at, start), min(until, end), shift


def clear(target: memoryview) -> None:
    ctypes.memset(_address(target), 0, len(target))


def clear_gaps(target: memoryview, pairs: list[tuple[TensorSlot, TensorSlot]]) -> None:
    """Write zeroes between the tensors of a version, which are the second element of each pair."""
    end = 0
    for _, place in pairs:
        if place.offset > end:
            target[end : place.offset] = bytes(place.offset - end)
        end = place.offset + place.num_bytes
    if len(target) > end:
        target[end:] = bytes(len(target) - end)


def scatter(
    source: memoryview, target: memoryview, pairs: list[tuple[TensorSlot, TensorSlot]]
) -> None:
    """Copy tensors from the first slot of each pair in `source` to the second slot in `target`.

    Tensors that are adjacent in both memories are copied together.
    """
    copy_rows(source, target, (StridedRanges(*run) for run in runs(pairs)))


def copy_rows(source: memoryview, target: memoryview, all_rows: Iterable[StridedRanges]) -> None:
    """Copy these bytes and no others, in several threads."""
    batches = list(_batches(all_rows))

    def move(first: int, last: int) -> None:
        for batch in batches[first:last]:
            _move_rows(source, target, batch)

    map_parts(len(batches), 1, move)


def place_rows(source: memoryview, target: memoryview, all_rows: Iterable[StridedRanges]) -> str:
    """Copy these bytes, each right after its block of the source was hashed.

    Returns: the digest of the whole source.
    """
    by_block: dict[int, list[StridedRanges]] = {}
    for rows in all_rows:
        for piece in _pieces(rows):
            by_block.setdefault(piece.source // BLOCK_BYTES, []).append(piece)

    def block(start: int, end: int) -> bytes:
        checksum = bytes(xxhash.xxh3_64(source[start:end]).digest())
        _move_rows(source, target, by_block.get(start // BLOCK_BYTES, ()))
        return checksum

    return combine_checksums(b"".join(map_parts(len(source), BLOCK_BYTES, block)))


def _move_rows(source: memoryview, target: memoryview, all_rows: Iterable[StridedRanges]) -> None:
    source_address, target_address = _address(source), _address(target)
    for rows in all_rows:
        if rows.num_rows > 1:
            _copy_rows(source, target, rows)
        else:
            start, to = source_address + rows.source, target_address + rows.target
            ctypes.memmove(to, start, rows.num_bytes)


def _copy_rows(source: memoryview, target: memoryview, rows: StridedRanges) -> None:
    import numpy as np  # imported here, because hundreds of ranks never compute anything

    shape, byte = (rows.num_rows, rows.num_bytes), np.uint8
    source_rows = np.ndarray(shape, byte, source, rows.source, (rows.source_stride, 1))
    np.ndarray(shape, byte, target, rows.target, (rows.target_stride, 1))[:] = source_rows


def _batches(all_rows: Iterable[StridedRanges]) -> Iterator[list[StridedRanges]]:
    batch: list[StridedRanges] = []
    batch_bytes = 0
    for rows in all_rows:
        for piece in _pieces(rows):
            batch.append(piece)
            batch_bytes += piece.num_rows * piece.num_bytes
            if batch_bytes >= _BATCH_BYTES:
                yield batch
                batch, batch_bytes = [], 0
    if batch:
        yield batch


def _pieces(rows: StridedRanges) -> Iterator[StridedRanges]:
    if 0 < rows.num_bytes <= _BATCH_BYTES:
        rows_per_piece = _BATCH_BYTES // rows.num_bytes
        for first in range(0, rows.num_rows, rows_per_piece):
            yield rows.subset(first, min(rows_per_piece, rows.num_rows - first))
        return
    for start, to, num_bytes in rows.runs():
        for at in range(0, num_bytes, _BATCH_BYTES):
            yield StridedRanges(start + at, to + at, min(_BATCH_BYTES, num_bytes - at))


def runs(pairs: Iterable[tuple[TensorSlot, TensorSlot]]) -> Iterator[tuple[int, int, int]]:
    """Yield (source offset, target offset, number of bytes) of each run of adjacent tensors.

    A run includes the padding between neighbours if it is equal on both sides.
    """
    start = to = num_bytes = 0
    for place, slot in pairs:
        gap = place.offset - start - num_bytes
        if num_bytes and slot.offset - to == place.offset - start and 0 <= gap < ALIGNMENT_BYTES:
            num_bytes += gap + slot.num_bytes
            continue
        if num_bytes:
            yield start, to, num_bytes
        start, to, num_bytes = place.offset, slot.offset, slot.num_bytes
    if num_bytes:
        yield start, to, num_bytes
