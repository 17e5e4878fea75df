"""Assembles whole tensors from the slices that ranks hold, as runs of bytes. Pure.

A slice is a box of the whole tensor. A replica is the same box on another rank.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.common.tensors.resharding import box_runs
from phaseloom.common.tensors.safetensors import item_bytes, tensor_bytes
from phaseloom.statemgr.transfer.tensorslices import Box, subtract


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes that are contiguous in the whole tensor and in a rank's memory."""

    whole_offset: int
    """Offset in the whole tensor."""
    rank: int
    offset: int
    """Offset in the rank's memory."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """A whole tensor, and one holder of each of its slices."""

    name: str
    role: Role
    dtype: str
    shape: tuple[int, ...]
    slices: list[tuple[int, TensorSlot]]
    """As (rank that holds the slice, its slot there)."""

    @property
    def num_bytes(self) -> int:
        return tensor_bytes(self.dtype, self.shape)

    def runs(self) -> Iterator[Run]:
        """The runs of the tensor, in order."""
        if len(self.slices) == 1:
            return slot_runs(*self.slices[0])
        runs_by_slice = [slot_runs(rank, slot) for rank, slot in self.slices]
        return heapq.merge(*runs_by_slice, key=lambda run: run.whole_offset)


def global_shape(slot: TensorSlot) -> tuple[int, ...]:
    return tuple(slot.global_shape or slot.shape)


def assemble(ranks: Sequence[Sequence[TensorSlot]]) -> list[WholeTensor]:
    """Assemble all whole tensors of a deployment, sorted by name.

    Args:   ranks: the slots that each rank holds.
    Raises: CallerError: the slices of a tensor are incomplete or contradict one another.
    """
    slices_of: dict[str, list[tuple[int, TensorSlot]]] = {}
    for rank, slots in enumerate(ranks):
        for slot in slots:
            slices_of.setdefault(slot.name, []).append((rank, slot))
    return [_assemble(name, slices) for name, slices in sorted(slices_of.items())]


def _assemble(name: str, slices: list[tuple[int, TensorSlot]]) -> WholeTensor:
    first = slices[0][1]
    shape = global_shape(first)
    holders: dict[str, tuple[int, TensorSlot]] = {}
    uncovered = [Box(name, [0] * len(shape), [*shape])] if math.prod(shape) else []
    for rank, slot in slices:
        same = (slot.role, slot.dtype, global_shape(slot)) == (first.role, first.dtype, shape)
        if not same or not is_sound(slot):
            raise _contradiction(
                name, f"rank {rank} describes it differently from rank {slices[0][0]}"
            )
        if math.prod(slot.shape):
            holders.setdefault(f"{slot.start} + {slot.shape}", (rank, slot))
    for _, slot in holders.values():
        uncovered = subtract(uncovered, Box(name, _start(slot), slot.shape))
    num_elements = sum(math.prod(slot.shape) for _, slot in holders.values())
    if num_elements != math.prod(shape):
        raise _contradiction(name, "its slices do not cover the whole tensor")
    if uncovered:
        raise _contradiction(name, "its slices overlap")
    return WholeTensor(name, first.role, first.dtype, shape, list(holders.values()))


def is_sound(slot: TensorSlot) -> bool:
    """Whether a slot is a box inside the whole tensor and has as many bytes as that box. Memory
    access relies on it."""
    if bool(slot.global_shape) != bool(slot.start):
        return False
    shape = global_shape(slot)
    start = slot.start or [0] * len(shape)
    fits = len(start) == len(slot.shape) == len(shape) and all(
        at >= 0 and size >= 0 and at + size <= extent
        for at, size, extent in zip(start, slot.shape, shape, strict=True)
    )
    try:
        return fits and tensor_bytes(slot.dtype, slot.shape) == slot.num_bytes
    except ValueError:
        return False


def _start(slot: TensorSlot) -> list[int]:
    return slot.start or [0] * len(slot.shape)


def slot_runs(rank: int, slot: TensorSlot) -> Iterator[Run]:
    """The longest runs of bytes of a slice, in the order of the whole tensor."""
    if not math.prod(slot.shape):
        return
    shape, item = slot.shape, item_bytes(slot.dtype)
    offsets, length = box_runs(shape, item, _start(slot), global_shape(slot))
    for number, at in enumerate(offsets):
        yield Run(at, rank, slot.offset + number * length, length)


def _contradiction(name: str, reason: str) -> CallerError:
    return CallerError(f"{name}: {reason}", code=Code.FAILED_PRECONDITION, field=f"tensors[{name}]")
