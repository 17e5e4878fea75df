"""A rank's device memory, of either kind, and the copies between it and the rank's host extent.

Everything above this module is the same for an emulated device (`heap`: memory of this machine with
a budget) and for a GPU (`cuda`). torch is imported only for the view as a tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.contract.specs import DeviceKind
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.common.tensors.blockhash import digest_in_threads
from phaseloom.common.tensors.resharding import Rows
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
    """Zeroed memory on a device of this node. On a GPU, call it in the thread that will use the
    memory.

    Args:   device: the number of the device, which does not matter for an emulated one.
            scratch_bytes: the size of memory beside it that is never copied; its content is
                undefined.
    Raises: ResourceError: this machine has no such device, or the device has no memory left.
    """
    if kind is DeviceKind.EMULATED:
        return Heap(num_bytes, scratch_bytes)
    try:
        heap = CudaHeap(num_bytes, load(device), scratch_bytes)
        _use_device(device)
        return heap
    except (CudaError, CudaUnavailable) as error:
        if isinstance(error, CudaError) and error.is_out_of_memory:
            raise ResourceError(
                f"{num_bytes + scratch_bytes} bytes of device {device}: {error}",
                code=Code.RESOURCE_EXHAUSTED,
                remedy="give the state manager less of the device, so that new ranks find room",
            ) from error
        raise ResourceError(
            f"{num_bytes + scratch_bytes} bytes of device {device}: {error}",
            code=Code.UNAVAILABLE,
            remedy="set worker.device_kind to emulated, or use a machine with a GPU",
        ) from error


def _use_device(device: int) -> None:
    """Have torch allocate on this device in this thread."""
    import torch

    torch.cuda.set_device(device)


def copy_out(memory: DeviceMemory, extent: memoryview) -> None:
    """Copy all of the memory to the beginning of the extent; the copy is complete on return."""
    target = extent[: memory.num_bytes]
    if isinstance(memory, Heap):
        copy(memory.buffer, target)
    else:
        memory.copy_out(target)


def copy_first_out(memory: DeviceMemory, target: memoryview) -> None:
    """Copy the first bytes of the memory, as many as the target has."""
    if isinstance(memory, Heap):
        copy(memory.buffer[: len(target)], target)
    else:
        memory.copy_parts_out([(0, 0, len(target))], target)


def copy_in(extent: memoryview, memory: DeviceMemory) -> str:
    """Copy the beginning of the extent over all of the memory.

    Returns: the digest of the whole extent: the bytes copied and those behind them.
    """
    if isinstance(memory, Heap):
        return copy_hashed(extent, memory.buffer)
    memory.begin_copy_in(extent[: memory.num_bytes])
    try:
        return digest_in_threads(extent)
    finally:
        memory.finish()


def gather(
    memory: DeviceMemory, target: memoryview, pairs: list[tuple[TensorSlot, TensorSlot]]
) -> str:
    """As `copying.gather`, out of device memory."""
    if isinstance(memory, Heap):
        return copying.gather(target, memory.buffer, pairs)
    memory.copy_parts_out(list(runs(pairs)), target)
    clear_gaps(target, pairs)
    return digest_in_threads(target)


def scatter(
    source: memoryview, memory: DeviceMemory, pairs: list[tuple[TensorSlot, TensorSlot]]
) -> None:
    """As `copying.scatter`, into device memory."""
    if isinstance(memory, Heap):
        copying.scatter(source, memory.buffer, pairs)
    else:
        memory.copy_parts_in(source, list(runs(pairs)))


def copy_rows(source: memoryview, memory: DeviceMemory, every: Sequence[Rows]) -> None:
    """As `copying.copy_rows`, into device memory."""
    if isinstance(memory, Heap):
        copying.copy_rows(source, memory.buffer, every)
    else:
        memory.copy_parts_in(source, [run for rows in every for run in rows.runs()])


def clear(memory: DeviceMemory, start: int) -> None:
    """Zero the bytes from `start` on."""
    if isinstance(memory, Heap):
        copying.clear(memory.buffer[start:])
    else:
        import torch

        memory.tensor()[start:].zero_()
        torch.cuda.current_stream().synchronize()


def close(memory: DeviceMemory) -> None:
    """Give the memory back for good: nothing may use it any more."""
    if isinstance(memory, Heap):
        memory.release()
    else:
        memory.close()


def can_share(memory: DeviceMemory) -> bool:
    """Whether the memory can be given in part to other processes on its device, without the
    host."""
    return isinstance(memory, CudaHeap) and memory.can_share


def share(
    memory: DeviceMemory, num_bytes: int, pairs: list[tuple[TensorSlot, TensorSlot]]
) -> int | None:
    """Put these tensors at a version's offsets in device memory that other processes can map.

    Returns: a descriptor of that memory; None: the device cannot share, or has no room.
    """
    assert isinstance(memory, CudaHeap)
    try:
        return memory.share(num_bytes, list(runs(pairs)))
    except CudaError as error:
        log.info("a version is not shared on the device: %s", error)
        return None


def take(
    memory: DeviceMemory, fd: int, num_bytes: int, pairs: list[tuple[TensorSlot, TensorSlot]]
) -> bool:
    """Copy the memory that `share` made over these tensors.

    Returns: False: it cannot be had; nothing has changed.
    """
    assert isinstance(memory, CudaHeap)
    try:
        memory.take(fd, num_bytes, list(runs(pairs)))
    except CudaError as error:
        log.warning("a version cannot be taken on the device: %s", error)
        return False
    return True


def resident_bytes(memory: DeviceMemory) -> int:
    """The bytes that are resident; all of them where that is not known: the copy is loaded back
    then."""
    try:
        return memory.resident_bytes()
    except OSError:
        return memory.num_bytes


def is_pinning(memory: DeviceMemory) -> bool:
    """Whether the memory pins its extent's pages, which cannot be given back until `unpin`."""
    return isinstance(memory, CudaHeap)


def pin(memory: DeviceMemory, extent: memoryview) -> None:
    """Let the device itself read and write the extent; no-op where it can already."""
    if isinstance(memory, CudaHeap) and not memory.is_pinned:
        memory.pin(extent)


def unpin(memory: DeviceMemory) -> None:
    if isinstance(memory, CudaHeap):
        memory.unpin()


def as_tensor(memory: DeviceMemory) -> torch.Tensor:
    """A tensor over the memory's bytes, which keeps neither their memory nor their content
    alive."""
    import torch

    if isinstance(memory, Heap):
        return torch.frombuffer(memory.buffer, dtype=torch.uint8)
    return memory.tensor()


def scratch_tensor(memory: DeviceMemory) -> torch.Tensor:
    """A tensor, uint8, over the scratch memory, whose content is undefined whenever the memory
    comes back. It keeps neither memory nor content alive."""
    import torch

    if isinstance(memory, Heap):
        return torch.frombuffer(memory.scratch, dtype=torch.uint8)
    return memory.scratch_tensor()
