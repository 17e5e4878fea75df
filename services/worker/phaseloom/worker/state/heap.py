"""The memory of an emulated device: a range of addresses whose memory comes and goes.

Every managed tensor of a worker is a view into its heap. Addresses never move, so the optimizer,
FSDP2 and compiled code keep working after a load. A load either fills pages of this process, which
`release` frees (`malloc` would keep them), or makes a file the heap's memory (`attach`). The file
keeps its pages after `release`: fresh pages take ten times as long as a copy.
"""

from __future__ import annotations

import ctypes
import mmap
import os

from phaseloom.common.contract.errors import Code, InternalError, ResourceError
from phaseloom.common.tensors.hugepages import HUGE_BYTES, make_huge, map_file_at, unmap_file_at

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
        spare_bytes = HUGE_BYTES if num_bytes >= HUGE_BYTES else 0  # to align the start
        try:
            self._map = mmap.mmap(
                -1, self._mapped_bytes + spare_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except (OSError, OverflowError) as error:
            raise ResourceError(
                f"cannot map the {self._mapped_bytes} bytes that the state needs: {error}",
                code=Code.RESOURCE_EXHAUSTED,
                remedy="use a smaller model, or an adapter of a lower rank",
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._start = -address % HUGE_BYTES if spare_bytes else 0
        self._address = address + self._start
        self._attached: int | None = None
        """Inode of the file that is the heap's memory now."""
        self._settled: int | None = None
        """Inode of the last file that was moved to huge pages."""

    @property
    def buffer(self) -> memoryview:
        return memoryview(self._map)[self._start :][: self.num_bytes]

    @property
    def scratch(self) -> memoryview:
        return memoryview(self._map)[self._start + self._scratch_start :][: self.scratch_bytes]

    @property
    def is_attached(self) -> bool:
        return self._attached is not None

    def attach(self, fd: int) -> None:
        """Make the beginning of a file the heap's memory, with its content. The caller closes `fd`.

        Raises: InternalError: the file is too short. OSError: the system refuses the mapping.
        """
        if os.fstat(fd).st_size < self._scratch_start:
            raise InternalError(f"expected a file of {self._scratch_start} bytes for the heap")
        map_file_at(self._address, fd, self._scratch_start)
        self._attached = os.fstat(fd).st_ino
        if self._attached != self._settled:
            # Once: the system would search again each time for pages that it did not have.
            self._settled = self._attached
            make_huge(self.buffer)

    def release(self) -> None:
        """Release the physical memory, including scratch. The content is zero afterwards.

        A file that was attached keeps its pages. `resident_bytes` shows the effect.
        """
        if self.is_attached:
            unmap_file_at(self._address, self._scratch_start)
            self._attached = None
        self._map.madvise(mmap.MADV_DONTNEED)

    def resident_bytes(self) -> int:
        """Bytes of the heap and its scratch memory in physical memory, measured by mincore."""
        vector = (ctypes.c_ubyte * (self._mapped_bytes // PAGE_BYTES))()
        if _libc.mincore(self._address, self._mapped_bytes, vector) != 0:
            raise OSError(ctypes.get_errno(), "mincore failed")
        return bytes(vector).translate(_LOWEST_BIT).count(1) * PAGE_BYTES
