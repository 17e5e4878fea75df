"""Memory files on huge pages, if the system provides them.

A disk transfers memory of ordinary pages one page at a time, which halves the throughput. The
administrator decides whether memory files get huge pages automatically (`shmem_enabled`). An
explicit request for a range (MADV_COLLAPSE, Linux 6.1) works independently of that setting. All of
this is best effort: without huge pages everything works, but more slowly.
"""

from __future__ import annotations

import ctypes
import mmap
import os

HUGE_BYTES = 2 * 1024 * 1024
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_file(fd: int, num_bytes: int, *, writable: bool = True) -> tuple[mmap.mmap, int]:
    """Map the beginning of a file at an address that allows huge pages.

    After another process has written memory, the first read through small pages takes twice as
    long.

    Args:    num_bytes: how much of the file to map; a multiple of the page size.
             writable: whether writes to the mapping go to the file. If not, the caller must not
                 write to it, although the system would permit it.
    Returns: a mapping, and the offset in it at which the file begins. The mapping ends with its
            last reference.
    Raises:  OSError: the system refuses the mapping.
    """
    if num_bytes < HUGE_BYTES:
        return mmap.mmap(fd, num_bytes, flags=_sharing(writable)), 0
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    # Reserve one huge page more than needed, to be able to align the start.
    mapping = mmap.mmap(-1, num_bytes + HUGE_BYTES, flags=flags)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    start = -address % HUGE_BYTES
    map_file_at(address + start, fd, num_bytes, writable=writable)
    return mapping, start


def map_file_at(address: int, fd: int, num_bytes: int, *, writable: bool = True) -> None:
    """Map the beginning of a file at an address, replacing existing mappings there.

    Args:   writable: see `map_file`.
    Raises: OSError: the system refuses the mapping.
    """
    if not num_bytes:
        return
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, _sharing(writable) | _MAP_FIXED
    if _libc.mmap(address, num_bytes, access, flags, fd, 0) != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def unmap_file_at(address: int, num_bytes: int) -> None:
    """Replace existing mappings at an address by memory of this process, which has no pages yet.

    Raises: OSError: the system refuses the mapping.
    """
    access = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    if _libc.mmap(address, num_bytes, access, flags, -1, 0) != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _sharing(writable: bool) -> int:
    """Return the mmap flags for a mapping that is written to the file, or only read.

    A read-only mapping is private and writable, because ctypes takes the address of writable
    mappings only. Private pages that are never written are the file's own.
    """
    return mmap.MAP_SHARED if writable else mmap.MAP_PRIVATE | _MAP_NORESERVE


def make_huge(memory: memoryview) -> bool:
    """Move as much as possible of memory mapped by `map_file` to huge pages. The content stays.

    This touches memory that was never touched, which takes long, so call it in a thread.

    Returns: whether everything that can be is now on huge pages. False if the memory is too small
            for a huge page.
    """
    if memory.readonly or len(memory) < HUGE_BYTES:
        return False
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    first = -address % HUGE_BYTES
    num_bytes = (len(memory) - first) // HUGE_BYTES * HUGE_BYTES
    if num_bytes <= 0:
        return False
    for start in range(first, first + num_bytes, HUGE_BYTES):
        # The system refuses a range without any present page. Reading one byte makes it present.
        memory[start]
    done: int = _libc.madvise(address + first, num_bytes, _MADV_COLLAPSE)
    return done == 0
