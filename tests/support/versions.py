"""What ranks write of a weights version and take from one, without a state manager between."""

from __future__ import annotations

from collections.abc import Sequence

from phaseloom.common.contract.state_layout import Role, TensorSlot, VersionPart, VersionParts
from phaseloom.common.tensors.resharding import holding_of, tensors_of
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.common.tensors.versionparts import part_name
from phaseloom.worker.backends.base import Backend
from phaseloom.worker.core.reading import Reader, fetches_of_whole, from_part, needs
from phaseloom.worker.state.copying import clear, copy_runs, gather
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
    count = len(parts)
    tables = [packed(weights_of(each))[0] for each in slots]
    named = [
        VersionPart(part_name(rank, count), 0, "", TensorTable.of(table).packed)
        for rank, table in enumerate(tables)
    ]
    manifest = VersionParts("", named)
    reader = Reader([holding_of(whole)], 0, [0], tensors_of(whole), whole)
    version = bytearray(align(whole[-1].offset + whole[-1].num_bytes))
    for part, fetches in needs(manifest, reader).whole_parts.items():
        rank = next(i for i, each in enumerate(named) if each.part == part)
        runs = from_part(tables[rank], fetches, reader)
        copy_runs(memoryview(bytearray(parts[rank])), memoryview(version), runs)
    return bytes(version)


def take(backend: Backend, heap: Heap, rank: int, version: bytes) -> None:
    """Replace a rank's weights by its part of a whole version."""
    whole = backend.version_slots
    own = weights_of(backend.slots)
    reader = Reader(backend.holdings, rank, [rank], tensors_of(whole), own)
    runs = from_part(whole, fetches_of_whole(reader), reader)
    copy_runs(memoryview(bytearray(version)), heap.buffer, runs)
    clear(heap.buffer[max(slot.offset + slot.num_bytes for slot in own) :])
    backend.weights_changed()
