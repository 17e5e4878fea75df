"""What ranks write of a weights version and take from one, without a state manager between."""

from __future__ import annotations

from collections.abc import Sequence

from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.common.tensors.resharding import holding_of, plan_fetches, tensors_of
from phaseloom.worker.backends.base import Backend
from phaseloom.worker.core.reading import Reader, fetches_of_full_version, runs_from_part
from phaseloom.worker.state.copying import clear, copy_rows, gather
from phaseloom.worker.state.heap import Heap, align
from phaseloom.worker.state.layouts import packed


def weights_of(slots: Sequence[TensorSlot]) -> list[TensorSlot]:
    return [slot for slot in slots if slot.role is Role.WEIGHT]


def written(backend: Backend, heap: Heap) -> bytes:
    """This rank's part, over memory that held something else."""
    slots = weights_of(backend.slots)
    places, num_bytes = packed(slots)
    memory = bytearray(b"\xff" * num_bytes)
    gather(memoryview(memory), heap.buffer, list(zip(slots, places, strict=True)))
    return bytes(memory)


def assembled(
    parts: Sequence[bytes], slots: Sequence[Sequence[TensorSlot]], whole: Sequence[TensorSlot]
) -> bytes:
    """The whole version from those of all ranks, as a rank that needs everything puts it together.

    Args: slots: of each rank's heap. whole: `Backend.version_slots`.
    """
    tables = [packed(weights_of(each))[0] for each in slots]
    model, wanted = tensors_of(whole), holding_of(whole)
    reader = Reader([wanted], 0, [0], model, whole)
    version = bytearray(align(whole[-1].offset + whole[-1].num_bytes))
    for fetch in plan_fetches(model, [holding_of(table) for table in tables], {0: wanted}):
        runs = runs_from_part(tables[fetch.part], [fetch], reader)
        copy_rows(memoryview(bytearray(parts[fetch.part])), memoryview(version), runs)
    return bytes(version)


def take(backend: Backend, heap: Heap, rank: int, version: bytes) -> None:
    """Replace a rank's weights by its part of a whole version."""
    whole = backend.version_slots
    own = weights_of(backend.slots)
    reader = Reader(backend.holdings, rank, [rank], tensors_of(whole), own)
    runs = runs_from_part(whole, fetches_of_full_version(reader), reader)
    copy_rows(memoryview(bytearray(version)), heap.buffer, runs)
    clear(heap.buffer[max(slot.offset + slot.num_bytes for slot in own) :])
    backend.weights_changed()
