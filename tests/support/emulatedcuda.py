"""A CUDA driver over this machine's memory, as lazy as a GPU may be.

What enters a stream runs only when somebody waits for it, or for what is ordered after it. So a
copy that nobody ordered or waited for is not there, which a real device would often forgive.
Descriptors of its memory work between processes. It is strict where the real one is: sizes are
whole granules, memory is mapped once, pinned memory is whole pages.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from phaseloom.worker.cuda.driver import CudaError

GRANULARITY_BYTES = 64 * 1024
_MAP_FIXED = 0x10
_NO_ACCESS = 0
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
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


@dataclass
class Stream:
    work: list[Callable[[], None]] = field(default_factory=list)
    num_done: int = 0

    def run(self, count: int) -> None:
        """The first `count` of what has ever entered it."""
        while self.num_done < count:
            self.num_done += 1
            self.work[self.num_done - 1]()


class EmulatedDriver:
    """See `Driver`."""

    def __init__(self, memory_bytes: int = 2**30) -> None:
        self.device = 0
        self.granularity_bytes = GRANULARITY_BYTES
        self.can_share = True
        self.pinned: dict[int, int] = {}
        """address → bytes"""
        self.num_pins = 0
        self.num_bytes_in = 0
        """Copied from the host, ever."""
        self._free_bytes = memory_bytes
        self._handles: dict[int, int] = {}
        """handle → descriptor; the handle is another number"""
        self._mapped: dict[int, int] = {}
        self._streams = {0: Stream()}
        self._last = 1000

    # --- what a test does beside the code under test ---

    def launch(self, kernel: Callable[[], None], stream: int = 0) -> None:
        self._streams[stream].work.append(kernel)

    def bytes_at(self, address: int, num_bytes: int) -> bytes:
        return ctypes.string_at(address, num_bytes)

    # --- Driver ---

    def reserve(self, num_bytes: int) -> int:
        assert num_bytes % self.granularity_bytes == 0
        return self._place(0, num_bytes, _NO_ACCESS, -1)

    def unreserve(self, address: int, num_bytes: int) -> None:
        assert address not in self._mapped, "unreserved with its memory"
        assert _libc.munmap(address, num_bytes) == 0

    def create(self, num_bytes: int) -> int:
        assert num_bytes % self.granularity_bytes == 0
        if num_bytes > self._free_bytes:
            raise CudaError("cuMemCreate", 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")
        self._free_bytes -= num_bytes
        fd = os.memfd_create("emulated device memory", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_bytes)
        os.pwrite(fd, b"\xa5" * num_bytes, 0)
        return self._keep(fd)

    def release(self, handle: int) -> None:
        fd = self._handles.pop(handle)
        self._free_bytes += os.fstat(fd).st_size
        os.close(fd)

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        fd = self._handles[handle]
        if address in self._mapped or os.fstat(fd).st_size != num_bytes:
            raise CudaError("cuMemMap", 1, "CUDA_ERROR_INVALID_VALUE", "invalid argument")
        self._mapped[address] = num_bytes
        self._place(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, fd)

    def unmap(self, address: int, num_bytes: int) -> None:
        assert self._mapped.pop(address) == num_bytes
        assert all(s.num_done == len(s.work) for s in self._streams.values()), "still in use"
        self._place(address, num_bytes, _NO_ACCESS, -1)

    def export(self, handle: int) -> int:
        return os.dup(self._handles[handle])

    def import_(self, fd: int) -> int:
        own = os.dup(fd)
        self._free_bytes -= os.fstat(own).st_size
        return self._keep(own)

    def register(self, address: int, num_bytes: int) -> None:
        assert address % mmap.PAGESIZE == num_bytes % mmap.PAGESIZE == 0
        if address in self.pinned:
            raise CudaError("cuMemHostRegister", 712, "ALREADY_REGISTERED", "registered already")
        self.pinned[address] = num_bytes
        self.num_pins += 1

    def unregister(self, address: int) -> None:
        del self.pinned[address]

    def create_stream(self) -> int:
        self._last += 1
        self._streams[self._last] = Stream()
        return self._last

    def destroy_stream(self, stream: int) -> None:
        self.synchronize(stream)
        del self._streams[stream]

    def synchronize(self, stream: int) -> None:
        self._streams[stream].run(len(self._streams[stream].work))

    def synchronize_all(self) -> None:
        for stream in self._streams:
            self.synchronize(stream)

    def order(self, first: int, then: int) -> None:
        source, count = self._streams[first], len(self._streams[first].work)
        self.launch(lambda: source.run(count), then)

    def copy_in(self, address: int, host_address: int, num_bytes: int, stream: int) -> None:
        self.num_bytes_in += num_bytes
        self._move(address, host_address, num_bytes, stream)

    def copy_out(self, host_address: int, address: int, num_bytes: int, stream: int) -> None:
        self._move(host_address, address, num_bytes, stream)

    def copy_within(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        self._move(target, source, num_bytes, stream)

    def clear(self, address: int, num_bytes: int, stream: int) -> None:
        def work() -> None:
            ctypes.memset(address, 0, num_bytes)

        self.launch(work, stream)

    def free_bytes(self) -> int:
        return self._free_bytes

    def _move(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        def work() -> None:
            ctypes.memmove(target, source, num_bytes)

        self.launch(work, stream)

    def _keep(self, fd: int) -> int:
        self._last += 1
        self._handles[self._last] = fd
        return self._last

    def _place(self, address: int, num_bytes: int, access: int, fd: int) -> int:
        flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        fixed = _MAP_FIXED if address else 0
        placed = _libc.mmap(address, num_bytes, access, flags | fixed, fd, 0)
        assert placed not in {None, ctypes.c_void_p(-1).value}, os.strerror(ctypes.get_errno())
        return int(placed)
