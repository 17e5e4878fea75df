"""Memory files on huge pages, where the system gives them.

A disk takes memory of ordinary pages in pieces of a page each, and so moves half as much a second.
Whether the system gives huge pages to memory files by itself is its administrator's choice
(`shmem_enabled`). When it is asked for a range (MADV_COLLAPSE, Linux 6.1), it gives them whatever
that choice is. All of this is best effort: without huge pages everything works, only more slowly.
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
    """Map a file's beginning at an address where huge pages are possible.

    Memory that is read through small pages takes twice as long to read for the first time after
    another process has written it.

    Args:    num_bytes: how much of the file to map; whole pages.
             writable: whether what is written to the mapping is written to the file. Otherwise
                 nobody may write to it, though the system would let them.
    Returns: a mapping, and where in it the file begins. The mapping ends when its last reference
             is gone.
    Raises:  OSError: the system maps no more.
    """
    if num_bytes < HUGE_BYTES:
        return mmap.mmap(fd, num_bytes, flags=_sharing(writable)), 0
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    whole = mmap.mmap(-1, num_bytes + HUGE_BYTES, flags=flags)
    address = ctypes.addressof(ctypes.c_char.from_buffer(whole))
    start = -address % HUGE_BYTES
    place_file(address + start, fd, num_bytes, writable=writable)
    return whole, start


def place_file(address: int, fd: int, num_bytes: int, *, writable: bool = True) -> None:
    """Map a file's beginning at an address, over whatever is mapped there.

    Args:   writable: see `map_file`.
    Raises: OSError: the system refuses.
    """
    if not num_bytes:
        return
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, _sharing(writable) | _MAP_FIXED
    if _libc.mmap(address, num_bytes, access, flags, fd, 0) != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _sharing(writable: bool) -> int:
    """The flag of a mapping that is written through, or only read.

    The latter is private, because ctypes takes the address of writable mappings only. Private pages
    that nobody has written are the file's own.
    """
    return mmap.MAP_SHARED if writable else mmap.MAP_PRIVATE | _MAP_NORESERVE


def make_huge(memory: memoryview) -> bool:
    """Put as much as possible of memory that `map_file` mapped on huge pages; its content stays.

    Memory that was never touched is touched by this, which takes long: run it in a thread.

    Returns: whether all of it that can be is on huge pages now; False also where there is too
             little memory for one.
    """
    if memory.readonly or len(memory) < HUGE_BYTES:
        return False
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    first = -address % HUGE_BYTES
    num_bytes = (len(memory) - first) // HUGE_BYTES * HUGE_BYTES
    if num_bytes <= 0:
        return False
    for start in range(first, first + num_bytes, HUGE_BYTES):
        # The system refuses a range of which no page is there; to read a page brings it there.
        memory[start]
    done: int = _libc.madvise(address + first, num_bytes, _MADV_COLLAPSE)
    return done == 0
