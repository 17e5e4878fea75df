"""State files as the transfer engine serves them: from this node's disk, or from host memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.ids import VersionKey
from phaseloom.statemgr.disk.files import StateDirectory, find_parts
from phaseloom.statemgr.disk.receiving import page_buffer
from phaseloom.statemgr.disk.statefile import Place, StateHeader, num_blocks
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.seals.imaging import find_image_parts, read_image_block
from phaseloom.statemgr.transfer.served import Content
from phaseloom.statemgr.transfer.tensorslices import Box
from phaseloom.statemgr.transfer.wire import FileName, KeepFiles

ReadBlock = Callable[[Place, int, memoryview], int]


class StateFiles:
    def __init__(
        self,
        node: Node,
        directory: StateDirectory,
        timeout_s: float,
        keep: Callable[[KeepFiles], Awaitable[None]],
    ) -> None:
        """Args: keep: fetches what is asked for onto this node's disk."""
        self._node = node
        self._directory = directory
        self._timeout_s = timeout_s
        self._keep = keep

    async def open_file(self, name: FileName) -> tuple[StateHeader, Content]:
        """Raises: CallerError: NOT_FOUND. ResourceError: DATA_LOSS; it is not known yet what is
        here."""
        await self._until_settled()
        places, read = await self._find(name)
        return places[0].header, _File(places, read)

    async def parts_of(self, name: FileName) -> list[str]:
        """The parts of a weights version that are on this node's disk. Raises: as `open_file`."""
        await self._until_settled()
        self._existing(name)
        key = VersionKey(name.deployment, name.seq)
        return await asyncio.to_thread(self._directory.parts, key)

    async def keep(self, asked: KeepFiles) -> None:
        """Raises: PhaseloomError: they could not be fetched."""
        await self._until_settled()
        await self._keep(asked)

    async def _find(self, name: FileName) -> tuple[list[Place], ReadBlock]:
        """The file's parts, and what reads a block of one."""
        kept = self._node.seals.find(name.deployment, name.seq) if name.kind == "seal" else None
        if kept is not None:
            image = self._node.memory[kept.extent].view(kept.num_bytes)
            return find_image_parts(image, kept.name), partial(read_image_block, image)
        path = self._existing(name)
        return await asyncio.to_thread(find_parts, path), self._directory.read_block

    def _existing(self, name: FileName) -> Path:
        path = path_of(self._directory, name)
        if not path.exists():
            raise CallerError(f"{name} is not here", code=Code.NOT_FOUND, field="name")
        return path

    async def _until_settled(self) -> None:
        try:
            await asyncio.wait_for(self._node.settled.wait(), self._timeout_s)
        except TimeoutError:
            raise ResourceError(f"{self._node.name} does not know yet what it holds") from None


class _File:
    """Blocks of a state file, verified as they are read, one at a time."""

    def __init__(self, places: list[Place], read: ReadBlock) -> None:
        self._places = {str(place.index): place for place in places}
        self._read = read
        self._buffer = page_buffer(places[0].header.block_bytes)

    def find(self, part: str, box: Box) -> _Block:
        place = self._places.get(box.name)
        if place is None or part or len(box.start) != 1:
            raise CallerError(f"there is no section {box.name!r}", field="boxes")
        size = place.header.block_bytes
        number, within = divmod(box.start[0], size)
        if within or not 0 <= number < num_blocks(place.part.num_bytes, size):
            raise CallerError(
                f"there is no block at {box.start} of section {box.name}", field="boxes"
            )
        return _Block(place, number, self._read, self._buffer)

    async def until_here(self, part: str, boxes: Sequence[Box]) -> None:
        """Return at once: all of the file is here."""


class _Block(NamedTuple):
    place: Place
    number: int
    read_block: ReadBlock
    buffer: memoryview

    @property
    def num_bytes(self) -> int:
        size = self.place.header.block_bytes
        return min(size, self.place.part.num_bytes - self.number * size)

    def of(self, box: Box) -> _Block:
        raise CallerError("blocks of a file are not split", field="boxes")

    def read(self) -> list[memoryview]:
        return [self.buffer[: self.read_block(self.place, self.number, self.buffer)]]


def path_of(directory: StateDirectory, name: FileName) -> Path:
    """Raises: CallerError: no such kind, or a name that is no plain file name."""
    match name.kind:
        case "seal":
            return directory.seal(name.deployment, name.seq)
        case "version":
            return directory.version(VersionKey(name.deployment, name.seq, name.part))
    raise CallerError(f"there are no files of kind {name.kind!r}", field="name.kind")
