"""A rank's device memory on an NVIDIA GPU, and memory that two processes share.

Invariants
- Addresses are reserved once, and physical memory behind them is mapped and unmapped. Tensors, the
  optimizer and captured graphs therefore stay valid after a load, as on the emulated device.
- Copies use a separate stream and pinned host memory. A copy waits for earlier work of the default
  stream, and later work of the default stream waits for the copy. Launching kernels is safe as soon
  as `copy_in` returns.
- The device is idle before memory is unmapped, so no running kernel loses its memory.

Not thread-safe, but not bound to one thread. Imports only the standard library; torch is imported
when a tensor is requested.
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
    """An address range that stays reserved while the memory behind it is mapped and unmapped."""

    def __init__(self, driver: Driver, num_bytes: int) -> None:
        """Reserve addresses. Raises: CudaError: no address space is available. ValueError: the size
        is
        negative."""
        if num_bytes < 0:
            raise ValueError(f"num_bytes must not be negative, got {num_bytes}")
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
        """Map new memory with undefined content.

        Raises: CudaError: the device is out of memory; nothing is allocated then.
        """
        self._map(self._driver.create(self.mapped_bytes))

    def adopt(self, fd: int) -> None:
        """Map memory that another range of this size exported. The caller still owns `fd`.

        Raises: CudaError: the memory belongs to another device or is smaller than this range.
        """
        self._map(self._driver.import_(fd))

    def export(self) -> int:
        """Return a descriptor for `adopt` in any process. The caller closes it.

        The memory lives while any process maps it or holds a descriptor, even after `vacate`.
        Raises: CudaUnavailable: this device's memory cannot be shared. CudaError.
        """
        if not self._driver.can_share:
            raise CudaUnavailable(f"device {self._driver.device} exports no descriptors")
        assert self._handle is not None, "nothing to export"
        return self._driver.export(self._handle)

    def vacate(self) -> None:
        """Unmap and free the memory, if any, after the device is idle."""
        if self._handle is None:
            return
        self._driver.synchronize_all()
        self._driver.unmap(self.address, self.mapped_bytes)
        handle, self._handle = self._handle, None
        self._driver.release(handle)

    def close(self) -> None:
        """Free the memory and the addresses. Nothing may use them afterwards."""
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
    """Host memory that the device accesses directly until `close`.

    Call `close` before freeing the memory. The device keeps the pinned pages, so it would otherwise
    access pages that no longer belong to the mapping.
    """

    def __init__(self, driver: Driver, memory: memoryview) -> None:
        """Pin memory.

        Args:   memory: writable; starts at the beginning of a mapping of whole pages.
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
    """`DeviceMemory` of `num_bytes` on a GPU, zero until written.

    Additional scratch memory is released together with the heap and never copied.
    """

    def __init__(self, num_bytes: int, driver: Driver, scratch_bytes: int = 0) -> None:
        """Allocate and clear the memory. Raises: CudaError: the device has too little free
        memory."""
        self.num_bytes = num_bytes
        self.scratch_bytes = scratch_bytes
        self.unpinned_because = "nothing was given to pin"
        """Why copies use the driver's slower staging buffers; empty if the host memory is
        pinned."""
        self._driver = driver
        self._pinned: PinnedMemory | None = None
        self._tensor: torch.Tensor | None = None
        self._range = DeviceRange(driver, num_bytes)
        self._scratch = DeviceRange(driver, scratch_bytes) if scratch_bytes else None
        self._stream = driver.create_stream()
        try:
            self.populate()
            driver.clear(self.address, self._range.mapped_bytes, self._stream)
            driver.order(self._stream, DEFAULT_STREAM)
            driver.synchronize(self._stream)
        except CudaError:
            self.close()
            raise

    @property
    def address(self) -> int:
        """The address of the heap, constant while the heap lives."""
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
        """A tensor over the heap's bytes, always at the same address. Use it only while memory is
        mapped."""
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

    def populate(self) -> None:
        """Allocate the missing memory. Raises: CudaError: out of memory; nothing is allocated
        then."""
        missing = [memory_range for memory_range in self._ranges if not memory_range.is_populated]
        try:
            for memory_range in missing:
                memory_range.populate()
        except CudaError:
            for memory_range in missing:
                memory_range.vacate()
            raise

    def pin(self, memory: memoryview) -> None:
        """Pin this mapping for direct copies. If pinning fails, copies still work through staging
        buffers."""
        self.unpin()
        try:
            self._pinned = PinnedMemory(self._driver, memory)
            self.unpinned_because = ""
        except CudaError as error:
            self.unpinned_because = str(error)

    def pinned(self, memory: memoryview) -> PinnedMemory | None:
        """Pin memory other than the extent; the caller closes it. None: it cannot be pinned."""
        try:
            return PinnedMemory(self._driver, memory)
        except CudaError:
            return None

    def unpin(self) -> None:
        """Unpin the mapping. Its pages may then be freed."""
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None
            self.unpinned_because = "it was unpinned"

    def copy_out(self, target: memoryview) -> None:
        """Copy out the whole heap after all launched work. The copy is complete on return."""
        self._check(target)
        self.copy_parts_out([(0, 0, self.num_bytes)], target)

    def copy_parts_out(self, parts: Sequence[Part], target: memoryview) -> None:
        """Copy parts of the heap after all launched work. The copy is complete on return.

        Args: parts: offsets in the heap and in `target`.
        """
        check_parts(parts, self.num_bytes, target.nbytes)
        self._driver.synchronize_all()
        address = host_address(target)
        for start, to, num_bytes in parts:
            self._driver.copy_out(address + to, self.address + start, num_bytes, self._stream)
        self.finish()

    def copy_parts_in(self, source: memoryview, parts: Sequence[Part]) -> None:
        """Overwrite parts of the populated heap. The caller may reuse `source` on return.

        Args: parts: offsets in `source` and in the heap.
        """
        self._start_parts(source, parts)
        self.finish()

    def copy_in(self, source: memoryview) -> None:
        """Replace the whole heap, allocating released memory first. `source` is reusable on return.

        Raises: CudaError: the device is out of memory; nothing is allocated then.
        """
        self.start_copy_in(source)
        self.finish()

    def start_copy_in(self, source: memoryview) -> None:
        """Start a `copy_in`. `source` must not change until `finish`.

        Work launched on the default stream from now on sees the new content.
        """
        self._check(source)
        self.populate()
        self._start_parts(source, [(0, 0, self.num_bytes)])

    def finish(self) -> None:
        """Wait until all started copies are done."""
        self._driver.synchronize(self._stream)

    def copy_from(self, source: DeviceRange, parts: Sequence[Part]) -> None:
        """Overwrite parts of the heap from other device memory, possibly of another process.

        The copy is complete on return.
        """
        check_parts(parts, source.num_bytes, self.num_bytes)
        self._move(source.address, self.address, parts)

    def share(self, num_bytes: int, parts: Sequence[Part]) -> int:
        """Copy parts of the heap into new, otherwise zeroed device memory.

        Any process can read it with `copy_shared_in`.

        Args:    parts: offsets in the heap and in the new memory.
        Returns: a descriptor that alone keeps the memory alive; the caller closes it.
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

    def copy_shared_in(self, fd: int, num_bytes: int, parts: Sequence[Part]) -> None:
        """Overwrite parts of the heap with memory that another process shared.

        The caller still owns `fd`.
        Args:   num_bytes: the size that the other process reported.
                parts: offsets in the shared memory and in the heap.
        Raises: CudaError: the memory belongs to another device or is smaller; nothing has changed.
        """
        shared = DeviceRange(self._driver, num_bytes)
        try:
            shared.adopt(fd)
            self.copy_from(shared, parts)
        finally:
            shared.close()

    def release(self) -> None:
        """Free the memory. Nothing may use the heap until `copy_in`.

        Also frees the memory that torch has cached, because it counts against other processes.
        """
        for memory_range in self._ranges:
            memory_range.vacate()
        if self._tensor is not None:
            from phaseloom.worker.cuda.tensors import return_cached_memory

            return_cached_memory()

    def resident_bytes(self) -> int:
        """Bytes of device memory in use by this heap, in whole granules."""
        return sum(
            memory_range.mapped_bytes for memory_range in self._ranges if memory_range.is_populated
        )

    def close(self) -> None:
        self.unpin()
        for memory_range in self._ranges:
            memory_range.close()
        self._driver.destroy_stream(self._stream)

    def _move(self, source: int, target: int, parts: Sequence[Part]) -> None:
        """Copy within device memory, after earlier and before later work of the default stream."""
        self._driver.order(DEFAULT_STREAM, self._stream)
        for start, to, num_bytes in parts:
            self._driver.copy_within(target + to, source + start, num_bytes, self._stream)
        self._driver.order(self._stream, DEFAULT_STREAM)
        self.finish()

    def _start_parts(self, source: memoryview, parts: Sequence[Part]) -> None:
        check_parts(parts, source.nbytes, self.num_bytes)
        self._driver.order(DEFAULT_STREAM, self._stream)
        address = host_address(source)
        for start, to, num_bytes in parts:
            self._driver.copy_in(self.address + to, address + start, num_bytes, self._stream)
        self._driver.order(self._stream, DEFAULT_STREAM)

    def _check(self, memory: memoryview) -> None:
        if memory.nbytes != self.num_bytes:
            raise ValueError(f"host memory must have {self.num_bytes} bytes, got {memory.nbytes}")


def check_parts(parts: Sequence[Part], source_bytes: int, target_bytes: int) -> None:
    """Check the parts of a copy. Raises: ValueError: a part is out of bounds; copy nothing then."""
    for start, to, num_bytes in parts:
        is_inside = min(start, to, num_bytes) >= 0
        if not is_inside or start + num_bytes > source_bytes or to + num_bytes > target_bytes:
            raise ValueError(
                f"copy out of bounds: {num_bytes} bytes from {start} of {source_bytes} to {to} of "
                f"{target_bytes}"
            )


def host_address(memory: memoryview) -> int:
    """The address of host memory. Args: memory: writable, contiguous, not empty."""
    return ctypes.addressof((ctypes.c_char * memory.nbytes).from_buffer(memory))
