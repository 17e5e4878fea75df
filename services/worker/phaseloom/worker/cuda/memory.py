"""A rank's device memory on an NVIDIA GPU, and memory that two processes share.

Invariants
- Addresses are reserved once; physical memory comes and goes behind them. So tensors, the optimizer
  and captured graphs go on after a load, as on the emulated device.
- Copies run on a stream of their own, from and to pinned host memory. A copy begins after whatever
  the default stream was given before, and what the default stream is given later begins after the
  copy: when `copy_in` returns, it is safe to launch there.
- No memory is taken from under a kernel: before it is given back, the device is idle.

One thread at a time; which one does not matter. Imports the standard library only, and torch where
a tensor is asked for.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from phaseloom.worker.cuda.driver import DEFAULT_STREAM, CudaError, CudaUnavailable, Driver

if TYPE_CHECKING:
    import torch


Part = tuple[int, int, int]
"""(source offset, target offset, number of bytes)"""


class DeviceRange:
    """Addresses that stay while the memory behind them comes and goes."""

    def __init__(self, driver: Driver, num_bytes: int) -> None:
        """Reserve addresses. Raises: CudaError: no addresses are left. ValueError: the size is
        negative."""
        if num_bytes < 0:
            raise ValueError(f"{num_bytes} bytes")
        granularity = driver.granularity_bytes
        self.num_bytes = num_bytes
        self.mapped_bytes = max(1, -(-num_bytes // granularity)) * granularity
        self._driver = driver
        self._handle: int | None = None
        self.address = driver.reserve(self.mapped_bytes)

    @property
    def is_populated(self) -> bool:
        return self._handle is not None

    def populate(self) -> None:
        """Put fresh memory of undefined content there.

        Raises: CudaError: the device has none; none is taken then.
        """
        self._map(self._driver.create(self.mapped_bytes))

    def adopt(self, fd: int) -> None:
        """Put memory there that another range of this size has exported; `fd` stays the caller's.

        Raises: CudaError: the memory is of another device, or smaller than this range.
        """
        self._map(self._driver.import_(fd))

    def export(self) -> int:
        """A descriptor of the memory, for `adopt` in any process; the caller closes it.

        The memory lives while anyone maps it or holds a descriptor, also past `vacate`.

        Raises: CudaUnavailable: this device's memory cannot be shared. CudaError.
        """
        if not self._driver.can_share:
            raise CudaUnavailable(f"device {self._driver.device} exports no descriptors")
        assert self._handle is not None, "nothing to export"
        return self._driver.export(self._handle)

    def vacate(self) -> None:
        """Give the memory back, if there is any."""
        if self._handle is None:
            return
        self._driver.synchronize_all()
        self._driver.unmap(self.address, self.mapped_bytes)
        handle, self._handle = self._handle, None
        self._driver.release(handle)

    def close(self) -> None:
        """Give the addresses back, too: nothing may use them any more."""
        self.vacate()
        self._driver.unreserve(self.address, self.mapped_bytes)

    def _map(self, handle: int) -> None:
        assert self._handle is None, "populated already"
        try:
            self._driver.map(self.address, self.mapped_bytes, handle)
        except CudaError:
            self._driver.release(handle)
            raise
        self._handle = handle


class PinnedMemory:
    """Host memory that the device itself reads and writes, until `close`.

    Whoever gives the memory back to the system must `close` this first: its pages stay with the
    device, though the mapping has others by then.
    """

    def __init__(self, driver: Driver, memory: memoryview) -> None:
        """Pin memory.

        Args:   memory: writable, the beginning of a mapping of whole pages.
        Raises: CudaError: it cannot be pinned.
        """
        self.memory = memory
        self._driver = driver
        self._address = host_address(memory)
        num_pages = max(1, -(-len(memory) // mmap.PAGESIZE))
        driver.register(self._address, num_pages * mmap.PAGESIZE)

    def close(self) -> None:
        self._driver.unregister(self._address)


class CudaHeap:
    """`DeviceMemory` of `num_bytes` on a GPU, zeroes until written.

    Scratch memory beside it comes and goes with it and is never copied.
    """

    def __init__(self, num_bytes: int, driver: Driver, scratch_bytes: int = 0) -> None:
        """Allocate and clear the memory. Raises: CudaError: the device does not have so much
        free."""
        self.num_bytes = num_bytes
        self.scratch_bytes = scratch_bytes
        self.unpinned_because = "nothing was given to pin"
        """The reason why copies go through the driver's own buffers, which is slower; empty: they
        do not."""
        self._driver = driver
        self._pinned: PinnedMemory | None = None
        self._tensor: torch.Tensor | None = None
        self._range = DeviceRange(driver, num_bytes)
        self._scratch = DeviceRange(driver, scratch_bytes) if scratch_bytes else None
        self._stream = driver.create_stream()
        try:
            self._populate()
            self._clear()
        except CudaError:
            self.close()
            raise

    @property
    def address(self) -> int:
        """The address of the heap, the same for as long as the heap lives."""
        return self._range.address

    @property
    def device(self) -> int:
        return self._driver.device

    @property
    def can_share(self) -> bool:
        return self._driver.can_share

    @property
    def is_pinned(self) -> bool:
        return self._pinned is not None

    def tensor(self) -> torch.Tensor:
        """A tensor over the heap's bytes, always at the same address. Use it only while the memory
        is there."""
        if self._tensor is None:
            from phaseloom.worker.cuda.tensors import memory_tensor

            self._tensor = memory_tensor(self.address, self.num_bytes, self._driver.device)
        return self._tensor

    def scratch_tensor(self) -> torch.Tensor:
        """A tensor over the scratch memory, always at the same address."""
        from phaseloom.worker.cuda.tensors import memory_tensor

        assert self._scratch is not None, "there is no scratch memory"
        return memory_tensor(self._scratch.address, self.scratch_bytes, self._driver.device)

    @property
    def _ranges(self) -> list[DeviceRange]:
        return [self._range, *([self._scratch] if self._scratch else [])]

    def _populate(self) -> None:
        """Take the memory that is missing. Raises: CudaError: the device has no more; none is taken
        then."""
        missing = [each for each in self._ranges if not each.is_populated]
        try:
            for each in missing:
                each.populate()
        except CudaError:
            for each in missing:
                each.vacate()
            raise

    def pin(self, memory: memoryview) -> None:
        """Let copies go to and from this mapping directly; where it cannot be pinned they work,
        too."""
        self.unpin()
        try:
            self._pinned = PinnedMemory(self._driver, memory)
            self.unpinned_because = ""
        except CudaError as error:
            self.unpinned_because = str(error)

    def unpin(self) -> None:
        """Unpin the mapping, whose pages may then be given back to the system."""
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None
            self.unpinned_because = "it was unpinned"

    def copy_out(self, target: memoryview) -> None:
        """Copy out the whole heap as everything launched so far leaves it; complete on return."""
        self._check(target)
        self.copy_parts_out([(0, 0, self.num_bytes)], target)

    def copy_parts_out(self, parts: Sequence[Part], target: memoryview) -> None:
        """Copy some of the heap as everything launched so far leaves it; complete on return.

        Args: parts: offsets in the heap and in `target`.
        """
        check_parts(parts, self.num_bytes, target.nbytes)
        self._driver.synchronize_all()
        address = host_address(target)
        for start, to, num_bytes in parts:
            self._driver.copy_out(address + to, self.address + start, num_bytes, self._stream)
        self.finish()

    def copy_parts_in(self, source: memoryview, parts: Sequence[Part]) -> None:
        """Copy over some of the heap, which has its memory. `source` is free on return.

        Args: parts: offsets in `source` and in the heap.
        """
        self._begin_parts(source, parts)
        self.finish()

    def copy_in(self, source: memoryview) -> None:
        """Replace the whole heap; takes memory if it was released. `source` is free on return.

        Raises: CudaError: the device has no memory left; none is taken then.
        """
        self.begin_copy_in(source)
        self.finish()

    def begin_copy_in(self, source: memoryview) -> None:
        """Begin a `copy_in`; `source` must stay as it is until `finish`.

        What is launched on the default stream from now on sees the new content.
        """
        self._check(source)
        self._populate()
        self._begin_parts(source, [(0, 0, self.num_bytes)])

    def finish(self) -> None:
        """Wait until the copies that were begun are done."""
        self._driver.synchronize(self._stream)

    def copy_from(self, source: DeviceRange, parts: Sequence[Part]) -> None:
        """Copy over some of the heap from other device memory, maybe another process's; complete on
        return."""
        check_parts(parts, source.num_bytes, self.num_bytes)
        self._move(source.address, self.address, parts)

    def share(self, num_bytes: int, parts: Sequence[Part]) -> int:
        """Copy some of the heap to fresh device memory, with zeroes elsewhere, for `take` in any
        process.

        Args:    parts: offsets in the heap and in the fresh memory.
        Returns: a descriptor, which alone keeps the memory; the caller closes it.
        Raises:  CudaUnavailable: this device's memory cannot be shared. CudaError.
        """
        check_parts(parts, self.num_bytes, num_bytes)
        shared = DeviceRange(self._driver, num_bytes)
        try:
            shared.populate()
            self._driver.clear(shared.address, shared.mapped_bytes, self._stream)
            self._move(self.address, shared.address, parts)
            return shared.export()
        finally:
            shared.close()

    def take(self, fd: int, num_bytes: int, parts: Sequence[Part]) -> None:
        """Copy over some of the heap the memory that another process shared; `fd` stays the
        caller's.

        Args:   num_bytes: the size that the other process said.
                parts: offsets in the shared memory and in the heap.
        Raises: CudaError: the memory is of another device, or smaller; nothing has changed.
        """
        shared = DeviceRange(self._driver, num_bytes)
        try:
            shared.adopt(fd)
            self.copy_from(shared, parts)
        finally:
            shared.close()

    def release(self) -> None:
        """Give the memory back: nothing may use it until `copy_in`.

        Memory that torch keeps for its own later use is given back, too: others count it.
        """
        for each in self._ranges:
            each.vacate()
        if self._tensor is not None:
            from phaseloom.worker.cuda.tensors import return_cached_memory

            return_cached_memory()

    def resident_bytes(self) -> int:
        """The bytes of device memory that are taken now, in whole granules."""
        return sum(each.mapped_bytes for each in self._ranges if each.is_populated)

    def close(self) -> None:
        self.unpin()
        for each in self._ranges:
            each.close()
        self._driver.destroy_stream(self._stream)

    def _move(self, source: int, target: int, parts: Sequence[Part]) -> None:
        """Copy within device memory, ordered between earlier and later work of the default
        stream."""
        self._driver.order(DEFAULT_STREAM, self._stream)
        for start, to, num_bytes in parts:
            self._driver.copy_within(target + to, source + start, num_bytes, self._stream)
        self._driver.order(self._stream, DEFAULT_STREAM)
        self.finish()

    def _begin_parts(self, source: memoryview, parts: Sequence[Part]) -> None:
        check_parts(parts, source.nbytes, self.num_bytes)
        self._driver.order(DEFAULT_STREAM, self._stream)
        address = host_address(source)
        for start, to, num_bytes in parts:
            self._driver.copy_in(self.address + to, address + start, num_bytes, self._stream)
        self._driver.order(self._stream, DEFAULT_STREAM)

    def _clear(self) -> None:
        self._driver.clear(self.address, self._range.mapped_bytes, self._stream)
        self._driver.order(self._stream, DEFAULT_STREAM)
        self._driver.synchronize(self._stream)

    def _check(self, memory: memoryview) -> None:
        if memory.nbytes != self.num_bytes:
            raise ValueError(f"{memory.nbytes} bytes of host memory for {self.num_bytes}")


def check_parts(parts: Sequence[Part], source_bytes: int, target_bytes: int) -> None:
    """Check the parts of a copy. Raises: ValueError: one is out of bounds, so nothing may be
    copied."""
    for start, to, num_bytes in parts:
        is_inside = min(start, to, num_bytes) >= 0
        if not is_inside or start + num_bytes > source_bytes or to + num_bytes > target_bytes:
            raise ValueError(
                f"{num_bytes} bytes from {start} of {source_bytes} to {to} of {target_bytes}"
            )


def host_address(memory: memoryview) -> int:
    """The address of host memory. Args: memory: writable, contiguous, not empty."""
    return ctypes.addressof((ctypes.c_char * memory.nbytes).from_buffer(memory))
