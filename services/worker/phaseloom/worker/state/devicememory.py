"""A rank's device memory, emulated or GPU, and its copies to and from the rank's host extent.

The modules above this one treat both kinds alike: `heap` emulates a device with budgeted host
memory, and `cuda` drives a GPU. torch is imported only to make tensor views.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.contract.specs import DeviceKind
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.common.tensors.blockhash import digest_in_threads
from phaseloom.common.tensors.resharding import StridedRanges
from phaseloom.worker.cuda.driver import CudaError, CudaUnavailable, load
from phaseloom.worker.cuda.memory import CudaHeap
from phaseloom.worker.state import copying
from phaseloom.worker.state.copying import clear_gaps, copy, copy_hashed, runs
from phaseloom.worker.state.heap import Heap

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

DeviceMemory = Heap | CudaHeap


def allocate(kind: DeviceKind, device: int, num_bytes: int, scratch_bytes: int = 0) -> DeviceMemory:
    """Allocate zeroed memory on a device of this node.

    On a GPU, call it in the thread that will use the memory.
    Args:   device: number of the device; ignored for an emulated device.
            scratch_bytes: size of the additional memory that is never copied. Its content is
                undefined.
    Raises: ResourceError: this machine has no such device, or the device is out of memory.
    """
    if kind is DeviceKind.EMULATED:
        return Heap(num_bytes, scratch_bytes)
    try:
        heap = CudaHeap(num_bytes, load(device), scratch_bytes)
        import torch

        torch.cuda.set_device(device)  # for the allocations that torch makes in this thread
        return heap
    except (CudaError, CudaUnavailable) as error:
        if isinstance(error, CudaError) and error.is_out_of_memory:
            raise ResourceError(
                f"cannot allocate {num_bytes + scratch_bytes} bytes on device {device}: {error}",
                code=Code.RESOURCE_EXHAUSTED,
                remedy="lower the state manager's budget of the device, so that new ranks fit",
            ) from error
        raise ResourceError(
            f"cannot allocate {num_bytes + scratch_bytes} bytes on device {device}: {error}",
            code=Code.UNAVAILABLE,
            remedy="set worker.device_kind to emulated, or use a machine with a GPU",
        ) from error


def copy_out(memory: DeviceMemory, extent: memoryview) -> None:
    """Copy the whole memory to the beginning of the extent. The copy is complete on return."""
    target = extent[: memory.num_bytes]
    if isinstance(memory, Heap):
        copy(memory.buffer, target)
    else:
        memory.copy_out(target)


def copy_first_out(memory: DeviceMemory, target: memoryview) -> None:
    """Copy the first `len(target)` bytes of the memory to `target`."""
    if isinstance(memory, Heap):
        copy(memory.buffer[: len(target)], target)
    else:
        memory.copy_parts_out([(0, 0, len(target))], target)


def copy_in(extent: memoryview, memory: DeviceMemory) -> str:
    """Copy the beginning of the extent over the whole memory.

    Returns: the digest of the whole extent, including the bytes behind those copied.
    """
    if isinstance(memory, Heap):
        return copy_hashed(extent, memory.buffer, is_clear=not resident_bytes(memory))
    memory.start_copy_in(extent[: memory.num_bytes])
    try:
        return digest_in_threads(extent)
    finally:
        memory.finish()


def gather(
    memory: DeviceMemory, target: memoryview, pairs: list[tuple[TensorSlot, TensorSlot]]
) -> str:
    """Like `copying.gather`, from device memory."""
    if isinstance(memory, Heap):
        return copying.gather(target, memory.buffer, pairs)
    memory.copy_parts_out(list(runs(pairs)), target)
    clear_gaps(target, pairs)
    return digest_in_threads(target)


def scatter(
    source: memoryview, memory: DeviceMemory, pairs: list[tuple[TensorSlot, TensorSlot]]
) -> None:
    """Like `copying.scatter`, into device memory."""
    if isinstance(memory, Heap):
        copying.scatter(source, memory.buffer, pairs)
    else:
        memory.copy_parts_in(source, list(runs(pairs)))


def copy_rows(source: memoryview, memory: DeviceMemory, every: Sequence[StridedRanges]) -> None:
    """Like `copying.copy_rows`, into device memory."""
    if isinstance(memory, Heap):
        copying.copy_rows(source, memory.buffer, every)
    else:
        memory.copy_parts_in(source, [run for rows in every for run in rows.runs()])


def place_rows(source: memoryview, memory: DeviceMemory, every: Sequence[StridedRanges]) -> str:
    """Like `copying.place_rows`, into device memory."""
    if isinstance(memory, Heap):
        return copying.place_rows(source, memory.buffer, every)
    copy_rows(source, memory, every)
    return digest_in_threads(source)


def clear(memory: DeviceMemory, start: int, end: int | None = None) -> None:
    """Write zeroes from offset `start` to `end`; None: to the end of the memory."""
    if isinstance(memory, Heap):
        copying.clear(memory.buffer[start:end])
    else:
        import torch

        memory.tensor()[start:end].zero_()
        torch.cuda.current_stream().synchronize()


def write(memory: DeviceMemory, start: int, content: bytes) -> None:
    if isinstance(memory, Heap):
        memory.buffer[start : start + len(content)] = content
    else:
        memory.copy_parts_in(memoryview(bytearray(content)), [(0, start, len(content))])


def read(memory: DeviceMemory, start: int, end: int) -> bytes:
    if isinstance(memory, Heap):
        return bytes(memory.buffer[start:end])
    content = bytearray(end - start)
    memory.copy_parts_out([(start, 0, end - start)], memoryview(content))
    return bytes(content)


def close(memory: DeviceMemory) -> None:
    """Free the memory permanently. Nothing may use it afterwards."""
    if isinstance(memory, Heap):
        memory.release()
    else:
        memory.close()


def can_share(memory: DeviceMemory) -> bool:
    """Whether other processes can map parts of this memory on the device, without a host copy."""
    return isinstance(memory, CudaHeap) and memory.can_share


def share(
    memory: DeviceMemory, num_bytes: int, pairs: list[tuple[TensorSlot, TensorSlot]]
) -> int | None:
    """Copy these tensors to a version's offsets in new device memory that other processes can map.

    Returns: a descriptor of that memory; None: the device cannot share memory or has no room.
    """
    assert isinstance(memory, CudaHeap)
    try:
        return memory.share(num_bytes, list(runs(pairs)))
    except CudaError as error:
        log.info("version not shared on the device: %s", error)
        return None


def copy_shared_in(
    memory: DeviceMemory, fd: int, num_bytes: int, pairs: list[tuple[TensorSlot, TensorSlot]]
) -> bool:
    """Copy memory exported by `share` over these tensors.

    Returns: False if the memory is not available; nothing has changed then.
    """
    assert isinstance(memory, CudaHeap)
    try:
        memory.copy_shared_in(fd, num_bytes, list(runs(pairs)))
    except CudaError as error:
        log.warning("version not loaded from the device: %s", error)
        return False
    return True


def resident_bytes(memory: DeviceMemory) -> int:
    """Resident bytes. If the system cannot report them, assume that all bytes are resident."""
    try:
        return memory.resident_bytes()
    except OSError:
        return memory.num_bytes


def is_emulated(memory: DeviceMemory) -> bool:
    return isinstance(memory, Heap)


def is_attached(memory: DeviceMemory) -> bool:
    """Whether a file is the memory of an emulated device."""
    return isinstance(memory, Heap) and memory.is_attached


def attach(memory: DeviceMemory, fd: int) -> memoryview:
    """Make a file the memory of an emulated device. The caller closes `fd`. Returns: the heap."""
    assert isinstance(memory, Heap)
    memory.attach(fd)
    return memory.buffer


def is_pinning(memory: DeviceMemory) -> bool:
    """Whether the memory pins its extent's pages. Pinned pages cannot be freed until `unpin`."""
    return isinstance(memory, CudaHeap)


def pin(memory: DeviceMemory, extent: memoryview) -> None:
    """Pin the extent so that the device can access it directly. Does nothing if it is already
    pinned."""
    if isinstance(memory, CudaHeap) and not memory.is_pinned:
        memory.pin(extent)


def unpin(memory: DeviceMemory) -> None:
    if isinstance(memory, CudaHeap):
        memory.unpin()


def as_tensor(memory: DeviceMemory) -> torch.Tensor:
    """Return a tensor over the memory's bytes. It keeps neither the memory nor its content
    alive."""
    import torch

    if isinstance(memory, Heap):
        return torch.frombuffer(memory.buffer, dtype=torch.uint8)
    return memory.tensor()


def scratch_tensor(memory: DeviceMemory) -> torch.Tensor:
    """Return a uint8 tensor over the scratch memory. It keeps neither memory nor content alive.

    The content is undefined each time the memory is mapped again.
    """
    import torch

    if isinstance(memory, Heap):
        return torch.frombuffer(memory.scratch, dtype=torch.uint8)
    return memory.scratch_tensor()
