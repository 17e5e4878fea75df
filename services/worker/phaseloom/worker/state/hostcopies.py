"""Copies between a rank's heap and host memory that the state manager orders.

The heap and the host extent are two mappings. A switch is one memcpy in each direction, split over
several threads; loaded bytes are hashed while they are in the cache. Extents stay mapped, because
the first touch of a page is ten times slower than a copy. On an emulated device, the extent of a
rank that trains is the memory of its heap while it is resident: an offload only unmaps it, and a
load maps and hashes it. All functions block, release the GIL, and run in the one thread in which
copies and operations exclude each other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import msgspec

from phaseloom.common.contract.errors import CallerError, Code, InternalError, ResourceError
from phaseloom.common.contract.state_layout import Role, TensorSlot, extent_bytes, host_start
from phaseloom.common.contract.state_rank import (
    Copied,
    CopyIn,
    CopyOut,
    FileSection,
    LoadStaged,
    StageState,
    VersionLayout,
)
from phaseloom.common.tensors.blockhash import digest_in_threads
from phaseloom.common.tensors.resharding import StridedRanges
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.common.transport.framing import close_fds
from phaseloom.worker.core.reading import Runs
from phaseloom.worker.state import devicememory
from phaseloom.worker.state.copying import Mapping, clear, copy, place_rows, runs
from phaseloom.worker.state.devicememory import DeviceMemory
from phaseloom.worker.state.heapfile import HeapFiles
from phaseloom.worker.state.layouts import gaps, paired


class HeapCopier:
    def __init__(self, applied: Callable[[], int], on_loaded: Callable[[], None]) -> None:
        """Args: as in `RankStateClient.connect`."""
        self.applied = applied
        self._on_loaded = on_loaded
        self.heap: DeviceMemory | None = None
        self.slots: list[TensorSlot] = []
        self.host_bytes = 0
        """Size of the state that exists only in `host_memory`."""
        self.extent: Mapping | None = None
        self.heap_fd: int | None = None
        """Descriptor of the extent if it is the memory of the heap while the rank is resident."""
        self.files = HeapFiles()
        self._source: tuple[tuple[int, int], Mapping] | None = None
        """The extent from which a frozen heap was last loaded, by (device, inode)."""
        self.runs_of: Callable[[bytes], Runs] = self._paired_runs
        """Plans how the weights of a packed version table are placed in the heap, as for a sync."""
        self._gaps: list[tuple[int, bytes]] = []
        """The offsets and bytes of what is in the heap between tensors, where a backend has put
        something there. No version has these bytes."""
        self.is_frozen = False
        self.is_filled = False
        self.is_resident = False
        self.copied: tuple[int, str] = (0, "")
        """The seq and digest of the host copy that this rank knows."""

    def register(
        self,
        heap: DeviceMemory,
        slots: list[TensorSlot],
        host_bytes: int,
        extent: Mapping | None,
        *,
        frozen: bool,
    ) -> None:
        self.heap, self.slots, self.host_bytes = heap, slots, host_bytes
        self.extent, self.is_frozen = extent, frozen

    def drop_extent(self) -> None:
        """Unmap the extent, which holds a whole state, unless switches or operations use it."""
        is_used = self.heap_fd is None and not self.is_frozen
        if self.extent is not None and not is_used:
            self.extent.close()
            self.extent = None

    def close(self) -> None:
        """Close the descriptor of the extent. Idempotent."""
        if self.heap_fd is not None:
            os.close(self.heap_fd)
            self.heap_fd = None

    def commit(self, applied: int, digest: str) -> None:
        """Record a host copy of this seq, with its digest if known."""
        self.copied = (applied, digest)
        self.is_filled = True

    @property
    def host_memory(self) -> memoryview:
        """State that never resides on the device. It starts as zeroes or with a seal's content.

        Its address stays the same while this rank lives. Only an operation may write it.
        """
        heap, extent = self.registered()
        return extent.buffer[host_start(heap.num_bytes) :]

    @property
    def weights_bytes(self) -> int:
        """Bytes of the heap up to the end of the weights, which come first in the heap."""
        ends = [s.offset + s.num_bytes for s in self.slots if s.role is Role.WEIGHT]
        return max(ends, default=0)

    def weights_replaced(self) -> None:
        """Reset the training state after a version has replaced the weights.

        Training state belonged to the old weights, so it becomes zeroes, as after a weights-only
        checkpoint. A rebuild may therefore start from this version.
        """
        heap = self.registered_heap()
        weights = [slot for slot in self.slots if slot.role is Role.WEIGHT]
        if len(weights) < len(self.slots):
            devicememory.clear(heap, self.weights_bytes)
        if self.host_bytes:
            clear(self.host_memory)
        self._on_loaded()

    def copy(self, order: CopyOut | CopyIn, fds: list[int]) -> Copied:
        """Copy the heap to or from the file or extent that came with the order, or its own
        extent."""
        if order.file is not None:
            return self._copy_file(order, order.file, fds)
        if self.is_frozen:
            return self._copy_frozen(order, fds)
        close_fds(fds)
        if isinstance(order, CopyIn):
            return self.copy_in(order.digest)
        if order.whole_at >= 0:
            return self._stay_with_copy(order)
        return self.copy_out(release=order.release)

    def _copy_frozen(self, order: CopyOut | CopyIn, fds: list[int]) -> Copied:
        """Copy a frozen heap to or from the extent that came with the order.

        No process keeps a writable mapping of that extent afterwards.
        """
        heap = self.registered_heap()
        if isinstance(order, CopyIn):
            return self._copy_in_frozen(heap, order, fds)
        if len(fds) > 1:
            close_fds(fds)
            raise InternalError(f"expected 1 extent for a copy, got {len(fds)}")
        if not fds:
            return self._stay_with_copy(order)
        self.drop_source()
        self.extent = extent = Mapping(fds[0], heap.num_bytes, writable=True)
        try:
            copied = self.copy_out(release=order.release)
            digest = digest_in_threads(extent.buffer)
            self.copied = (copied.applied, digest)
            return msgspec.structs.replace(copied, digest=digest)
        finally:
            self.extent = None
            extent.close()

    def _copy_file(self, order: CopyOut | CopyIn, section: FileSection, fds: list[int]) -> Copied:
        """Copy the heap to or from the state file that came with the order."""
        heap = self.registered_heap()
        if len(fds) != 1:
            close_fds(fds)
            raise InternalError(f"expected 1 file for a copy, got {len(fds)}")
        if isinstance(order, CopyIn):
            return self._load(heap, order.digest, lambda: self.files.read(heap, section, fds))
        started, applied = time.monotonic(), self.applied()
        checksums = self.files.write(heap, section, fds)
        num_resident = devicememory.resident_bytes(heap)
        took_s = time.monotonic() - started
        return Copied("", applied, num_resident, took_s, checksums=checksums)

    def copy_staged(self, order: StageState | LoadStaged, fds: list[int]) -> Copied:
        """Copy the state to or from the memory that came with the order, which is mapped only
        meanwhile."""
        heap = self.registered_heap()
        expected = 2 if isinstance(order, StageState) and order.version else 1
        if len(fds) != expected:
            close_fds(fds)
            raise InternalError(f"expected {expected} extents for a copy, got {len(fds)}")
        started = time.monotonic()
        if isinstance(order, StageState) and order.version is not None:
            copied = self._rearrange(heap, order.digest, order.version, fds)
            if order.becomes_copy:
                self.copied = (copied.applied, copied.digest)
            return copied
        staged = Mapping(fds[0], extent_bytes(heap.num_bytes, self.host_bytes), writable=True)
        try:
            digest = ""
            if isinstance(order, StageState):
                staged.make_huge()
                devicememory.copy_out(heap, staged.buffer)
                if self.host_bytes:
                    copy(self.host_memory, staged.buffer[host_start(heap.num_bytes) :])
            else:
                digest = devicememory.copy_in(staged.buffer, heap)
                if digest != order.digest:
                    raise ResourceError(
                        f"staged state has digest {digest}, expected {order.digest}",
                        code=Code.DATA_LOSS,
                    )
                if self.host_bytes:
                    copy(staged.buffer[host_start(heap.num_bytes) :], self.host_memory)
                self._on_loaded()
            num_resident = devicememory.resident_bytes(heap)
            return Copied(digest, self.applied(), num_resident, time.monotonic() - started)
        finally:
            staged.close()

    def _rearrange(
        self, heap: DeviceMemory, expected: str, version: VersionLayout, fds: list[int]
    ) -> Copied:
        """Write the weights of a version to memory in the layout of the heap."""
        started = time.monotonic()
        source_fd, staged_fd = fds
        try:
            source = self._mapped([source_fd])[: version.num_bytes]
        except BaseException:
            close_fds([staged_fd])
            raise
        staged = Mapping(staged_fd, heap.num_bytes, writable=True)
        try:
            staged.make_huge()
            for start, end in gaps(self.slots, heap.num_bytes):
                clear(staged.buffer[start:end])
            for start, content in self._gaps:
                staged.buffer[start : start + len(content)] = content
            runs = self.runs_of(version.tensors)
            _check_digest(place_rows(source, staged.buffer, runs), expected)
            num_resident = devicememory.resident_bytes(heap)
            digest = digest_in_threads(staged.buffer)
            return Copied(digest, self.applied(), num_resident, time.monotonic() - started)
        finally:
            staged.close()

    def _paired_runs(self, tensors: bytes) -> Runs:
        pairs = paired(TensorTable.read(tensors).tensors, self.slots)
        return [StridedRanges(*run) for run in runs(pairs)]

    def _copy_in_frozen(self, heap: DeviceMemory, order: CopyIn, fds: list[int]) -> Copied:
        """Load a frozen heap from the extent that came with the order. The memory of an emulated
        device may come after it.

        Raises: InternalError: the order brought no extent, or one that is too short.
        """
        has_memory = devicememory.is_emulated(heap) and len(fds) == 2
        heap_fd = fds.pop() if has_memory else None
        try:
            return self._copy_in_to(heap, heap_fd, order, fds)
        finally:
            close_fds([] if heap_fd is None else [heap_fd])

    def _copy_in_to(
        self, heap: DeviceMemory, heap_fd: int | None, order: CopyIn, fds: list[int]
    ) -> Copied:
        version = order.version
        num_bytes = heap.num_bytes if version is None else version.num_bytes
        source = self._mapped(fds)[:num_bytes]
        if len(source) != num_bytes:
            raise InternalError(f"expected an extent of {num_bytes} bytes, got {len(source)}")

        def move() -> str:
            if heap_fd is not None:
                # Its old content is overwritten below, before anybody reads the heap.
                devicememory.attach(heap, heap_fd)
            if version is None:
                return devicememory.copy_in(source, heap)
            for start, end in gaps(self.slots, heap.num_bytes):
                devicememory.clear(heap, start, end)
            for start, content in self._gaps:
                devicememory.write(heap, start, content)
            return devicememory.place_rows(source, heap, self.runs_of(version.tensors))

        return self._load(heap, order.digest, move)

    def _mapped(self, fds: list[int]) -> memoryview:
        """Map the received host copy and close the descriptors.

        The mapping is kept for the next load, because mapping takes a third as long as copying.
        `drop_source` unmaps it.
        """
        try:
            if len(fds) != 1:
                raise InternalError(f"expected 1 extent for a copy, got {len(fds)}")
            status = os.fstat(fds[0])
            identity = (status.st_dev, status.st_ino)
            if self._source is None or self._source[0] != identity:
                self.drop_source()
                self._source = (identity, Mapping(fds.pop(), status.st_size, writable=False))
            return self._source[1].buffer
        finally:
            close_fds(fds)

    def hold_version(self) -> None:
        """Prepare to load the heap from the version that it has, not from its old host copy."""
        self.drop_source()
        heap = self.registered_heap()
        between = [(s, devicememory.read(heap, s, e)) for s, e in gaps(self.slots, heap.num_bytes)]
        self._gaps = [(start, content) for start, content in between if any(content)]

    def drop_source(self) -> None:
        if self._source is not None:
            self._source[1].close()
            self._source = None

    def _stay_with_copy(self, order: CopyOut) -> Copied:
        """Say whether the heap has changed since its host copy, and release it if it has not."""
        heap = self.registered_heap()
        started, applied = time.monotonic(), self.applied()
        if applied != order.whole_at:
            return Copied("", applied, devicememory.resident_bytes(heap), 0.0, changed=True)
        if order.release:
            heap.release()
            self.is_resident = False
        self.copied = (applied, order.digest)
        num_resident = devicememory.resident_bytes(heap)
        return Copied(order.digest, applied, num_resident, time.monotonic() - started)

    def copy_out(self, *, release: bool) -> Copied:
        heap = self.registered_heap()
        started, applied = time.monotonic(), self.applied()
        if self.heap_fd is None:
            self.out(*self.registered())
        elif not devicememory.is_attached(heap):
            # It was loaded straight from a file, when host memory had no room.
            extent = Mapping(os.dup(self.heap_fd), heap.num_bytes, writable=True)
            self.out(heap, extent)
            extent.close()
        if release:
            heap.release()
            self.is_resident = False
        # The state manager hashes the copy while the device already works for the next rank.
        self.copied = (applied, "")
        return Copied("", applied, devicememory.resident_bytes(heap), time.monotonic() - started)

    def out(self, heap: DeviceMemory, extent: Mapping) -> None:
        # Pinned pages can no longer be moved to huge pages.
        extent.make_huge()
        self._pin(heap, extent)
        devicememory.copy_out(heap, extent.buffer)

    def _pin(self, heap: DeviceMemory, extent: Mapping) -> None:
        """Pin the extent. A frozen heap's extent is mapped for a single copy, so pinning would not
        pay."""
        if not self.is_frozen:
            devicememory.pin(heap, extent.buffer)

    def copy_in(self, expected: str) -> Copied:
        heap = self.registered_heap()

        def move() -> str:
            if self.heap_fd is not None:
                # This also maps the pages, for the operations to come.
                return digest_in_threads(devicememory.attach(heap, self.heap_fd))
            _, extent = self.registered()
            self._pin(heap, extent)
            return devicememory.copy_in(extent.buffer, heap)

        return self._load(heap, expected, move)

    def _load(self, heap: DeviceMemory, expected: str, move: Callable[[], str]) -> Copied:
        started = time.monotonic()
        try:
            digest = move()
            _check_digest(digest, expected)
            self._on_loaded()
            applied = self.applied()
        except BaseException:
            # Treat the heap as not resident after a failed load.
            heap.release()
            raise
        self.is_resident = True
        num_resident = devicememory.resident_bytes(heap)
        return Copied(digest, applied, num_resident, time.monotonic() - started)

    def registered(self) -> tuple[DeviceMemory, Mapping]:
        heap = self.registered_heap()
        if self.extent is None:
            raise CallerError("a frozen heap has no extent", code=Code.FAILED_PRECONDITION)
        return heap, self.extent

    def registered_heap(self) -> DeviceMemory:
        if self.heap is None:
            raise CallerError("no heap is registered", code=Code.FAILED_PRECONDITION)
        return self.heap


def _check_digest(digest: str, expected: str) -> None:
    if digest != expected:
        raise ResourceError(
            f"the host copy has digest {digest}, expected {expected}", code=Code.DATA_LOSS
        )
