"""Boxes of a weights version's parts as they are read: of a part that is here, or of slices that
this node has brought, or is bringing, for its own ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.state_layout import Slice, TensorSlot
from phaseloom.statemgr.core.slices import (
    Batch,
    Box,
    box_of,
    bytes_of,
    contains,
    inside,
    left_of,
    overlap,
    raw_slot,
    runs,
    slot_of,
)
from phaseloom.statemgr.core.versions import Version

_FEW_BYTES = 64 * 1024
"""Shorter runs are copied together before they are sent."""


class Place(NamedTuple):
    """Where a box lies."""

    memory: memoryview
    tensor: TensorSlot
    box: Box
    """In the tensor."""

    @property
    def num_bytes(self) -> int:
        """Raises: CallerError: there is no such box in the tensor."""
        return bytes_of(self.tensor, self.box)


def gathered(place: Place) -> list[memoryview]:
    """The bytes of a box: in place where they lie together, else copied.

    Raises: CallerError: there is no such box in the tensor.
    """
    tensor = place.tensor
    offsets, length = runs(tensor, place.box)
    source = place.memory[tensor.offset : tensor.offset + tensor.num_bytes]
    if length >= _FEW_BYTES:
        return [source[at : at + length] for at in offsets]
    copied = bytearray(length * len(offsets))
    for number, at in enumerate(offsets):
        copied[number * length : (number + 1) * length] = source[at : at + length]
    return [memoryview(copied)]


class Boxes(Protocol):
    """What is served of a version."""

    def find(self, part: str, box: Box) -> Place:
        """Raises: CallerError: it is not of what is served."""

    async def until_here(self, part: str, boxes: Sequence[Box]) -> None:
        """Raises: ResourceError: they will not come."""


@dataclass(frozen=True)
class OpenPart:
    """A part that stays while it is open."""

    version: Version
    memory: memoryview
    tensors: dict[str, TensorSlot]

    def find(self, box: Box) -> Place:
        """Raises: CallerError: it has no such tensor."""
        tensor = self.tensors.get(box.name) or raw_slot(box.name, len(self.memory))
        if tensor is None:
            raise CallerError(f"{box.name} is not in version {self.version.key}", field="boxes")
        return Place(self.memory, tensor, box)


def open_part(version: Version, memory: memoryview) -> OpenPart:
    return OpenPart(version, memory, {slot.name: slot for slot in version.tensors})


class OpenParts(dict[str, OpenPart]):
    """Whole parts, by name."""

    def find(self, part: str, box: Box) -> Place:
        found = self.get(part)
        if found is None:
            raise CallerError(f"part {part!r} was not asked for", field="part")
        return found.find(box)

    async def until_here(self, part: str, boxes: Sequence[Box]) -> None:
        """They are."""


@dataclass
class IncomingSlices:
    """Which slices a node brings for its ranks, and what of them is there."""

    slices: Sequence[Slice]
    digests: dict[str, str]
    """By part: as the version's manifest says; of one without any, as its sources say."""
    _by_tensor: dict[tuple[str, str], list[Slice]] = field(default_factory=dict)
    """By part and tensor."""
    _missing: dict[int, list[Box]] = field(default_factory=dict)
    """By a slice's offset, what of it has not come: disjoint boxes."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _is_given_up: bool = False

    def __post_init__(self) -> None:
        for each in self.slices:
            self._by_tensor.setdefault((each.part, each.name), []).append(each)
            self._missing[each.offset] = [box_of(each)]

    @property
    def is_whole(self) -> bool:
        return not self._missing

    def find(self, part: str, box: Box) -> Slice | None:
        """The slice that the box is of."""
        known = self._by_tensor.get((part, box.name), [])
        return next((each for each in known if contains(box_of(each), box)), None)

    def add(self, batch: Batch) -> None:
        """It is there and verified."""
        for of, box in batch.pieces:
            left = left_of(self._missing.pop(of.offset, []), box)
            if left:
                self._missing[of.offset] = left
        self._announce()

    def forget(self, batch: Batch) -> None:
        """What came is not what it should be."""
        for of, box in batch.pieces:
            self._missing[of.offset] = [*left_of(self._missing.get(of.offset, []), box), box]

    def give_up(self) -> None:
        """Nothing more will come."""
        self._is_given_up = True
        self._announce()

    async def until_here(self, of: Slice, box: Box) -> None:
        """Raises: ResourceError: it will not come."""
        while any(overlap(each, box) for each in self._missing.get(of.offset, ())):
            if self._is_given_up:
                raise ResourceError(f"{box} did not come here", code=Code.UNAVAILABLE)
            await self._changed.wait()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass(frozen=True)
class Brought:
    """Slices with their memory, which stays while they are open."""

    incoming: IncomingSlices
    memory: memoryview

    def find(self, part: str, box: Box) -> Place:
        of = self._slice_with(part, box)
        return Place(self.memory, slot_of(of), inside(of, box))

    async def until_here(self, part: str, boxes: Sequence[Box]) -> None:
        for box in boxes:
            await self.incoming.until_here(self._slice_with(part, box), box)

    def _slice_with(self, part: str, box: Box) -> Slice:
        of = self.incoming.find(part, box)
        if of is None:
            raise CallerError(
                f"{box} of part {part or 'all'} is not here", code=Code.NOT_FOUND, field="boxes"
            )
        return of
