"""State files between nodes: fetched from other nodes' disks, and served to other nodes.

Files are served from this node's disk, or from host memory. Their blocks come by the transfer
engine, and each is verified by its checksum in the file's header. A file gets its name once all of
it is on the disk. Memory: one block for each stream.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import xxhash

from phaseloom.common.contract.commands import FilesTicket
from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import VersionKey
from phaseloom.common.contract.state_layout import Slice
from phaseloom.common.tensors.blockhash import BLOCK_BYTES, checksum
from phaseloom.statemgr.disk.disk import PAGE_BYTES, MemoryFile, read_block
from phaseloom.statemgr.disk.files import Draft, StateDirectory, find_parts
from phaseloom.statemgr.disk.statefile import encode_header
from phaseloom.statemgr.node.stores import HostSealStore
from phaseloom.statemgr.records.layouts import rounded
from phaseloom.statemgr.records.stateheader import Place, StateHeader
from phaseloom.statemgr.transfer import wire
from phaseloom.statemgr.transfer.fetching import Fetch, Home, LocalError, call_once
from phaseloom.statemgr.transfer.served import Incoming, Served
from phaseloom.statemgr.transfer.tensorslices import (
    MAX_BATCH_BOXES,
    MAX_BATCH_BYTES,
    Batch,
    Box,
    Piece,
    box_of,
)
from phaseloom.statemgr.transfer.tls import Stream
from phaseloom.statemgr.transfer.wire import FileName

log = logging.getLogger(__name__)

_PAUSE_S = 0.2
_NOT_THERE = frozenset({Code.NOT_FOUND, Code.DATA_LOSS})
"""The codes that a source answers with where it will not have the whole file later either."""


@dataclass(frozen=True)
class RemoteFile:
    """A state file that other nodes have."""

    name: FileName
    ticket: FilesTicket
    sources: list[str]
    home: Home

    async def fetch(
        self, directory: StateDirectory, *, ranks: tuple[int, int] = (0, 0)
    ) -> StateHeader:
        """Fetch the file onto this node's disk. Returns: its header.

        Args:   ranks: (first rank, number of ranks on all nodes) of the state that the file is to
                hold: see `StateHeader.is_of`.
        Raises: ResourceError: DATA_LOSS: every source answers, and none has the whole file;
                UNAVAILABLE: a source does not answer; RESOURCE_EXHAUSTED: this node's disk is full;
                the disk fails.
        """
        header = (await self.describe(ranks)).header
        path = path_of(directory, self.name)
        draft = await asyncio.to_thread(Draft, directory, path, header)
        try:
            num_bytes = await self._fetch_blocks(draft, header)
            await asyncio.to_thread(draft.write, memoryview(encode_header(header)), 0)
            await asyncio.to_thread(draft.finish)
        except BaseException:
            draft.abandon()
            raise
        log.info("%s came: %d bytes", self.name, num_bytes)
        return header

    async def _fetch_blocks(self, draft: Draft, header: StateHeader) -> int:
        """Fetch all blocks. Returns: the number of bytes that came."""
        size = header.block_bytes
        places = [Place(str(self.name), header, i, at) for i, at in enumerate(draft.offsets)]
        slices: list[Slice] = []
        for place in places:
            for block in range(place.blocks):
                num_bytes, at = place.block_size(block), len(slices) * size
                box = ([block * size], [num_bytes])
                slices.append(Slice("", str(place.index), "uint8", *box, at, num_bytes))

        def open_with(parts: list[str], session: str | None) -> wire.OpenFile:
            return wire.OpenFile(self.name, self.ticket)

        # Sites share nothing of a file: every replica has it on its own disk.
        home, incoming = replace(self.home, site=""), Incoming(slices, {"": header.digest})
        fetch = Fetch(str(self.name), open_with, home, incoming, _Disk(draft, places))
        batches = [Batch("", [Piece(each, box_of(each))]) for each in slices]
        try:
            await fetch.fetch_all(batches, {"": self.sources})
        except LocalError as failure:
            raise failure.error from None
        except PhaseloomError as error:
            raise _given_up(self.name, list(fetch.errors.values()) or [error]) from error
        return fetch.fetched_bytes

    async def describe(self, ranks: tuple[int, int] = (0, 0)) -> wire.FileDescription:
        """The description of the file by the first source with a good answer. All sources are asked
        again and again for one timeout."""
        asked = wire.DescribeFile(self.name, self.ticket)
        started_s = time.monotonic()
        while True:
            errors: list[PhaseloomError] = []
            for source in self.sources:
                try:
                    found = await call_once(source, asked, wire.FileDescription, self.home)
                    _check(self.name, ranks, found.header)
                    return found
                except PhaseloomError as error:
                    log.warning("%s from %s: %s", self.name, source, error)
                    errors.append(error)
            is_late = time.monotonic() - started_s > self.home.timeout_s
            if is_late or all(error.info.code in _NOT_THERE for error in errors):
                raise _given_up(self.name, errors)
            await asyncio.sleep(_PAUSE_S)


class _Disk:
    """A sink that writes to this node's disk, one block at a time."""

    base: memoryview | None = None
    """Always None: a file is never sent as a delta."""

    def __init__(self, draft: Draft, places: list[Place]) -> None:
        self._draft = draft
        self._places = places
        self._block_bytes = places[0].header.block_bytes
        self._free: list[memoryview] = []
        """Buffers that no stream uses."""

    async def receive(
        self, stream: Stream, batch: Batch, timeout_s: float, delta_bytes: int = 0
    ) -> str:
        assert not delta_bytes, "nobody asked for a delta"
        ((_, box),) = batch.pieces
        place, block = self._places[int(box.name)], box.start[0] // self._block_bytes
        buffer = self._free.pop() if self._free else _page_buffer(self._block_bytes)
        view, digest = buffer[: batch.num_bytes], xxhash.xxh3_128()
        await stream.receive_into(view, timeout_s, digest.update)
        if await asyncio.to_thread(checksum, view) != place.checksum_of(block):
            raise ResourceError(
                f"block {block} of section {place.index} is bad on arrival", code=Code.DATA_LOSS
            )
        try:
            await asyncio.to_thread(self._draft.write, view, place.offset + box.start[0])
        except PhaseloomError as error:
            raise LocalError(error) from error
        self._free.append(buffer)
        return digest.hexdigest()

    async def is_sound(self) -> bool | None:
        """Always true: each block was verified by the file's header when it came."""
        return True


def _check(name: FileName, ranks: tuple[int, int], header: StateHeader) -> None:
    """Check a header that a source sent.

    Raises: ResourceError: DATA_LOSS: it is of another file or of other ranks, or lacks checksums.
    """
    is_meant = name == FileName(header.kind, header.deployment, header.seq, header.part)
    is_blocked = bool(header.parts) and header.block_bytes == BLOCK_BYTES
    has_checksums = is_blocked and all(part.has_checksums(BLOCK_BYTES) for part in header.parts)
    if not header.is_of(*ranks):
        raise ResourceError(f"its {name} is of other ranks", code=Code.DATA_LOSS)
    if not (is_meant and has_checksums):
        raise ResourceError(f"it sent something else than {name}", code=Code.DATA_LOSS)


def _given_up(name: FileName, errors: list[PhaseloomError]) -> ResourceError:
    is_lost = all(error.info.code in _NOT_THERE for error in errors)
    why = "; ".join(str(error) for error in errors) or "no node has it"
    return ResourceError(
        f"{name} could not be fetched: {why}",
        code=Code.DATA_LOSS if is_lost else Code.UNAVAILABLE,
        remedy="start the nodes again that have it",
    )


# --- Served --------------------------------------------------------------------------------------

ReadBlock = Callable[[Place, int, memoryview], int]


async def open_file(
    host_seals: HostSealStore, directory: StateDirectory, name: FileName
) -> tuple[StateHeader, Served]:
    """The header and the blocks of a file that is on this node's disk, or of a seal in memory."""
    kept = host_seals.records.get((name.deployment, name.seq))
    if name.kind == "seal" and kept is not None:
        image = MemoryFile(host_seals.bytes_of(kept))
        places, read = host_seals.parts_of(kept), partial(read_block, image)
        return places[0].header, _File(places, read)
    path = path_of(directory, name)
    if not path.exists():
        raise CallerError(f"{name} is not here", code=Code.NOT_FOUND, field="name")
    places = await asyncio.to_thread(find_parts, path)
    return places[0].header, _File(places, directory.read_block)


async def parts_of(directory: StateDirectory, name: FileName) -> list[str]:
    """The parts of a weights version that are on this disk; empty for other files."""
    if name.kind != "version" or name.part:
        return []
    return await asyncio.to_thread(directory.parts, VersionKey(name.deployment, name.seq))


class _File:
    """The blocks of a state file, which are read and verified one at a time."""

    def __init__(self, places: list[Place], read: ReadBlock) -> None:
        self._places = {str(place.index): place for place in places}
        self._read = read
        self._buffer = _page_buffer(MAX_BATCH_BYTES + MAX_BATCH_BOXES * PAGE_BYTES)
        """Memory for the blocks of one request, each at a page of its own."""
        self._taken = 0
        """The bytes of the buffer that the request's blocks have taken so far."""

    def find(self, part: str, box: Box) -> _Block:
        place = self._places.get(box.name)
        if place is None or part or len(box.start) != 1:
            raise CallerError(f"there is no section {box.name!r}", field="boxes")
        number, within = divmod(box.start[0], place.header.block_bytes)
        if within or not 0 <= number < place.blocks:
            raise CallerError(
                f"there is no block at {box.start} of section {box.name}", field="boxes"
            )
        return _Block(self, place, number)

    async def until_arrived(self, part: str, boxes: Sequence[Box]) -> None:
        """Return at once: all of the file is here. The blocks of the request before are sent."""
        self._taken = 0

    def read(self, block: _Block) -> memoryview:
        memory = self._buffer[self._taken : self._taken + block.num_bytes]
        self._taken += rounded(block.num_bytes)
        self._read(block.place, block.number, memory)
        return memory


class _Block(NamedTuple):
    file: _File
    place: Place
    number: int

    @property
    def num_bytes(self) -> int:
        return self.place.block_size(self.number)

    def of(self, box: Box) -> _Block:
        raise CallerError("blocks of a file are not split", field="boxes")

    def read(self) -> list[memoryview]:
        return [self.file.read(self)]


def _page_buffer(num_bytes: int) -> memoryview:
    """Memory that a disk takes directly; freed with the last reference to it."""
    return memoryview(mmap.mmap(-1, num_bytes))


def path_of(directory: StateDirectory, name: FileName) -> Path:
    """The path of a state file in a directory.

    Raises: CallerError: there is no such kind, or a name is no plain file name.
    """
    match name.kind:
        case "seal":
            return directory.seal(name.deployment, name.seq)
        case "version":
            return directory.version(VersionKey(name.deployment, name.seq, name.part))
    raise CallerError(f"there are no files of kind {name.kind!r}", field="name.kind")
