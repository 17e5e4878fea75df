"""The memory of an emulated device: one private anonymous mapping whose pages can be released.

Every managed tensor of a worker is a view into its heap, so an offload copies the bytes away and
calls `release`. Addresses never move, so the optimizer, FSDP2 and compiled code keep working after
a load. `malloc` would keep freed memory and reduce the resident size unreliably.
"""

from __future__ import annotations

import ctypes
import mmap

from phaseloom.common.contract.errors import Code, ResourceError

PAGE_BYTES = mmap.PAGESIZE
ALIGNMENT_BYTES = 64

_LOWEST_BIT = bytes(byte & 1 for byte in range(256))
"""Maps each byte that mincore writes for a page to its lowest bit, the only bit that is defined."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def align(offset_bytes: int) -> int:
    """Round up to a multiple of 64. Bit-equal results require the same alignment in every
    process."""
    return (offset_bytes + ALIGNMENT_BYTES - 1) // ALIGNMENT_BYTES * ALIGNMENT_BYTES


class Heap:
    """Memory of `num_bytes`, zero until written, writable through `buffer` and never resized.

    Scratch memory (`scratch`) lies behind it. It is released together with the heap and never
    copied.
    """

    def __init__(self, num_bytes: int, scratch_bytes: int = 0) -> None:
        """Raises: ResourceError: RESOURCE_EXHAUSTED: the system cannot map this many bytes."""
        self.num_bytes = num_bytes
        self.scratch_bytes = scratch_bytes
        self._scratch_start = max(1, -(-num_bytes // PAGE_BYTES)) * PAGE_BYTES
        self._mapped_bytes = self._scratch_start + -(-scratch_bytes // PAGE_BYTES) * PAGE_BYTES
        try:
            self._map = mmap.mmap(
                -1, self._mapped_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except (OSError, OverflowError) as error:
            raise ResourceError(
                f"cannot map the {self._mapped_bytes} bytes that the state needs: {error}",
                code=Code.RESOURCE_EXHAUSTED,
                remedy="use a smaller model, or an adapter of a lower rank",
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)

    @property
    def buffer(self) -> memoryview:
        return memoryview(self._map)[: self.num_bytes]

    @property
    def scratch(self) -> memoryview:
        return memoryview(self._map)[self._scratch_start :][: self.scratch_bytes]

    def release(self) -> None:
        """Release the physical memory, including scratch. The content is zero afterwards.

        `resident_bytes` shows the effect.
        """
        self._map.madvise(mmap.MADV_DONTNEED)

    def resident_bytes(self) -> int:
        """Bytes of the heap and its scratch memory in physical memory, measured by mincore."""
        vector = (ctypes.c_ubyte * (self._mapped_bytes // PAGE_BYTES))()
        anchor = (ctypes.c_char * self._mapped_bytes).from_buffer(self._map)
        if _libc.mincore(ctypes.addressof(anchor), self._mapped_bytes, vector) != 0:
            raise OSError(ctypes.get_errno(), "mincore failed")
        return bytes(vector).translate(_LOWEST_BIT).count(1) * PAGE_BYTES
