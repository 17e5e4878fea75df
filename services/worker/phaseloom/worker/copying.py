"""Extents in a rank's memory, and copying between them and its heap.

Every byte that is written is hashed while it is in the cache: as fast as memcpy. Neither the copy
nor the hash holds the GIL; slice assignment would.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import OrderedDict
from collections.abc import Sequence

import xxhash

from phaseloom.common.errors import CallerError, Code, InternalError, ResourceError
from phaseloom.common.framing import close_fds
from phaseloom.common.statewire import TensorSlot, VersionExtent
from phaseloom.worker.heap import PAGE_BYTES, Heap, align

_CHUNK_BYTES = 512 * 1024
_MAX_MAPPED_VERSIONS = 3
"""Mappings of version extents kept for reuse; each keeps its extent's memory alive."""


class Mapping:
    """An extent in this process's memory. Unmapped when the last reference is gone."""

    def __init__(self, fd: int, num_bytes: int, *, writable: bool) -> None:
        """Takes `fd` and closes it: the mapping outlives it."""
        mapped_bytes = max(1, -(-num_bytes // PAGE_BYTES)) * PAGE_BYTES
        try:
            # Private where it is read-only: nothing is ever written through it, and ctypes takes
            # the address of writable mappings only. Unwritten private pages are the shared ones.
            flags = mmap.MAP_SHARED if writable else mmap.MAP_PRIVATE
            self.buffer = memoryview(mmap.mmap(fd, mapped_bytes, flags=flags))[:num_bytes]
        finally:
            os.close(fd)


class MappedVersions:
    """The extents of the weights versions that were used last, each mapped once."""

    def __init__(self) -> None:
        self._mappings: OrderedDict[tuple[int, int, bool], Mapping] = OrderedDict()

    def map(self, fds: list[int], num_bytes: int, *, writable: bool) -> memoryview:
        """The memory of the one extent that came: where it was mapped before, through that."""
        if len(fds) != 1:
            close_fds(fds)
            raise InternalError(f"{len(fds)} extents came for one version")
        status = os.fstat(fds[0])
        identity = (status.st_dev, status.st_ino, writable)
        mapping = self._mappings.pop(identity, None)
        if mapping is None or len(mapping.buffer) < num_bytes:
            mapping = Mapping(fds[0], num_bytes, writable=writable)
        else:
            close_fds(fds)
        self._mappings[identity] = mapping
        while len(self._mappings) > _MAX_MAPPED_VERSIONS:
            self._mappings.popitem(last=False)
        return mapping.buffer[:num_bytes]


def resident_bytes(heap: Heap) -> int:
    """What is not known counts as resident: the state manager then loads the copy back."""
    try:
        return heap.resident_bytes()
    except OSError:
        return heap.num_bytes


def copy_hashed(source: memoryview, target: memoryview) -> str:
    """Copy `source` over `target`; the xxh3-128 of what was written, in hex."""
    digest = xxhash.xxh3_128()
    _copy(source, target, digest)
    return digest.hexdigest()


def _copy(source: memoryview, target: memoryview, digest: xxhash.xxh3_128) -> None:
    source_address, target_address = _address(source), _address(target)
    for start in range(0, len(source), _CHUNK_BYTES):
        end = min(start + _CHUNK_BYTES, len(source))
        ctypes.memmove(target_address + start, source_address + start, end - start)
        digest.update(target[start:end])


def _address(view: memoryview) -> int:
    return ctypes.addressof((ctypes.c_char * len(view)).from_buffer(view)) if len(view) else 0


def gather(target: memoryview, heap: memoryview, pairs: list[tuple[TensorSlot, TensorSlot]]) -> str:
    """Copy heap slots to their places in a version; the gaps between become zeroes.

    So that equal weights have equal digests, whatever the extent held before.
    """
    digest = xxhash.xxh3_128()
    end = 0
    for slot, place in pairs:
        _clear(target[end : place.offset], digest)
        end = place.offset + place.num_bytes
        _copy(heap[slot.offset : slot.offset + slot.num_bytes], target[place.offset : end], digest)
    _clear(target[end:], digest)
    return digest.hexdigest()


def _clear(gap: memoryview, digest: xxhash.xxh3_128) -> None:
    gap[:] = bytes(len(gap))
    digest.update(gap)


def verify(source: memoryview, described: VersionExtent) -> None:
    """Raises: ResourceError: DATA_LOSS: it is not what its digest says."""
    digest = xxhash.xxh3_128(source).hexdigest()
    if digest != described.digest:
        raise ResourceError(
            f"version {described.version} has digest {digest}, not {described.digest}",
            code=Code.DATA_LOSS,
        )


def scatter(
    source: memoryview, heap: memoryview, pairs: list[tuple[TensorSlot, TensorSlot]]
) -> None:
    """Copy a version's tensors to their slots of the heap."""
    source_address, heap_address = _address(source), _address(heap)
    for place, slot in pairs:
        ctypes.memmove(heap_address + slot.offset, source_address + place.offset, slot.num_bytes)


def packed(slots: Sequence[TensorSlot]) -> tuple[list[TensorSlot], int]:
    """The same tensors one after another from offset 0, and their bytes."""
    places = []
    end = 0
    for slot in slots:
        places.append(TensorSlot(slot.name, slot.role, slot.dtype, slot.shape, end, slot.num_bytes))
        end = align(end + slot.num_bytes)
    return places, end


def paired(
    tensors: list[TensorSlot], slots: Sequence[TensorSlot]
) -> list[tuple[TensorSlot, TensorSlot]]:
    """Each slot with the version's tensor of its name. Raises: CallerError: not the same model."""
    by_name = {tensor.name: tensor for tensor in tensors}
    if by_name.keys() != {slot.name for slot in slots}:
        odd = sorted(by_name.keys() ^ {slot.name for slot in slots})
        raise CallerError(
            f"the version is of another model: {', '.join(odd[:3])} is on one side only",
            code=Code.FAILED_PRECONDITION,
            remedy="sync between deployments of one model only",
        )
    pairs = [(by_name[slot.name], slot) for slot in slots]
    for tensor, slot in pairs:
        if (tensor.dtype, tensor.shape) != (slot.dtype, slot.shape):
            raise CallerError(
                f"{slot.name} is {tensor.dtype}{tensor.shape} in the version and "
                f"{slot.dtype}{slot.shape} here",
                code=Code.FAILED_PRECONDITION,
                remedy="sync between deployments of one model only",
            )
    return pairs
