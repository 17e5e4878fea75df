"""The content that a state manager serves to other nodes: parts in its memory, and slices that it
has fetched or is still fetching."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.state_layout import Slice, TensorSlot
from phaseloom.statemgr.records.versions import Version
from phaseloom.statemgr.transfer.tensorslices import (
    Batch,
    Box,
    box_of,
    bytes_of,
    contains,
    overlap,
    raw_slot,
    relative_to,
    runs,
    slot_of,
    subtract,
)

_FEW_BYTES = 64 * 1024
"""Shorter runs than this are copied together before they are sent."""


class Found(Protocol):
    """A box of the served content."""

    @property
    def num_bytes(self) -> int:
        """Size of the box. Raises: CallerError: there is no such box."""

    def of(self, box: Box) -> Found:
        """A box inside this one."""

    def read(self) -> list[memoryview]:
        """The bytes of the box, end to end. Slow: run it in a thread.

        Raises: ResourceError: DATA_LOSS: the bytes are bad.
        """


class Served(Protocol):
    """The content that one stream serves."""

    def find(self, part: str, box: Box) -> Found:
        """Find a box of a part. Raises: CallerError: the content has no such box."""

    async def until_arrived(self, part: str, boxes: Sequence[Box]) -> None:
        """Wait until the boxes are here. Raises: ResourceError: they will not arrive."""


class MemoryBox(NamedTuple):
    """A box in memory."""

    memory: memoryview
    tensor: TensorSlot
    box: Box
    """In coordinates of the tensor."""

    @property
    def num_bytes(self) -> int:
        return bytes_of(self.tensor, self.box)

    def of(self, box: Box) -> MemoryBox:
        return self._replace(box=box)

    def read(self) -> list[memoryview]:
        """Return long runs of the box in place, and copy short runs end to end."""
        tensor = self.tensor
        offsets, length = runs(tensor, self.box)
        source = self.memory[tensor.offset : tensor.offset + tensor.num_bytes]
        if length >= _FEW_BYTES:
            return [source[at : at + length] for at in offsets]
        copied = bytearray(length * len(offsets))
        for number, at in enumerate(offsets):
            copied[number * length : (number + 1) * length] = source[at : at + length]
        return [memoryview(copied)]


@dataclass(frozen=True)
class OpenPart:
    """A part in host memory, which stays there while it is open."""

    version: Version
    memory: memoryview
    tensors: dict[str, TensorSlot]

    @classmethod
    def of(cls, version: Version, memory: memoryview) -> OpenPart:
        return cls(version, memory, {slot.name: slot for slot in version.tensors})

    def find(self, box: Box) -> MemoryBox:
        """Find the box of a tensor. Raises: CallerError: the part has no such tensor."""
        tensor = self.tensors.get(box.name) or raw_slot(box.name, len(self.memory))
        if tensor is None:
            raise CallerError(f"{box.name} is not in version {self.version.key}", field="boxes")
        return MemoryBox(self.memory, tensor, box)


class OpenParts(dict[str, OpenPart]):
    """The open parts of a version, by name."""

    def __init__(self, parts: Mapping[str, OpenPart] | None = None) -> None:
        super().__init__(parts or {})
        self.bases: dict[str, OpenPart] = {}
        """Parts of an earlier version that both this node and the client have, by name. Each has
        the layout of the part in this version."""

    def find(self, part: str, box: Box) -> MemoryBox:
        open_part = self.get(part)
        if open_part is None:
            raise CallerError(f"part {part!r} is not open on this stream", field="part")
        return open_part.find(box)

    async def until_arrived(self, part: str, boxes: Sequence[Box]) -> None:
        """Return at once: parts in memory are complete."""


@dataclass
class Incoming:
    """The slices of one fetch, and which of their bytes have arrived."""

    slices: Sequence[Slice]
    digests: dict[str, str]
    """Expected digest of each part: from the version's manifest, or else from the first source."""
    _by_tensor: dict[tuple[str, str], list[Slice]] = field(default_factory=dict)
    """Slices by part and tensor."""
    _missing: dict[int, list[Box]] = field(default_factory=dict)
    """Disjoint boxes of each slice that have not arrived, by the slice's offset."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _is_given_up: bool = False

    def __post_init__(self) -> None:
        for slice_ in self.slices:
            self._by_tensor.setdefault((slice_.part, slice_.name), []).append(slice_)
            self._missing[slice_.offset] = [box_of(slice_)]

    @property
    def is_whole(self) -> bool:
        return not self._missing

    def find(self, part: str, box: Box) -> Slice | None:
        """The slice that contains the box."""
        candidates = self._by_tensor.get((part, box.name), [])
        return next(
            (candidate for candidate in candidates if contains(box_of(candidate), box)), None
        )

    def add(self, batch: Batch) -> None:
        """Record that a batch has arrived and is verified."""
        for slice_, box in batch.pieces:
            missing = subtract(self._missing.pop(slice_.offset, []), box)
            if missing:
                self._missing[slice_.offset] = missing
        self._announce()

    def forget(self, batch: Batch) -> None:
        """Record that an arrived batch is bad and must be fetched again."""
        for slice_, box in batch.pieces:
            self._missing[slice_.offset] = [
                *subtract(self._missing.get(slice_.offset, []), box),
                box,
            ]

    def give_up(self) -> None:
        """Record that nothing more will arrive, and fail everyone who waits for more."""
        self._is_given_up = True
        self._announce()

    async def until_arrived(self, slice_: Slice, box: Box) -> None:
        """Wait for a box of a slice. Raises: ResourceError: it will not arrive."""
        while any(overlap(missing, box) for missing in self._missing.get(slice_.offset, ())):
            if self._is_given_up:
                raise ResourceError(f"{box} will not arrive here", code=Code.UNAVAILABLE)
            await self._changed.wait()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass(frozen=True)
class Fetched:
    """Slices that were fetched or are being fetched; the memory stays while they are open."""

    incoming: Incoming
    memory: memoryview

    def find(self, part: str, box: Box) -> MemoryBox:
        slice_ = self._slice_with(part, box)
        return MemoryBox(self.memory, slot_of(slice_), relative_to(slice_, box))

    async def until_arrived(self, part: str, boxes: Sequence[Box]) -> None:
        for box in boxes:
            await self.incoming.until_arrived(self._slice_with(part, box), box)

    def _slice_with(self, part: str, box: Box) -> Slice:
        slice_ = self.incoming.find(part, box)
        if slice_ is None:
            raise CallerError(
                f"{box} of part {part or 'all'} is not here", code=Code.NOT_FOUND, field="boxes"
            )
        return slice_
