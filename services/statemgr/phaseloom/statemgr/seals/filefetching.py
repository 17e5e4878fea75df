"""Fetches a state file from other nodes' state managers onto this node's disk.

Blocks that the newest seal here has are not fetched: the new file refers to them, as a file that is
written here does. The rest come by the transfer engine, each verified by the checksum that the
file's header has of it. The file has its name once all of it is on the disk. Memory: a block a
stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import xxhash

from phaseloom.common.contract.commands import FilesTicket
from phaseloom.common.contract.errors import Code, PhaseloomError, ResourceError
from phaseloom.common.contract.state_layout import Slice
from phaseloom.common.tensors.blockhash import CHECKSUM_BYTES, checksum
from phaseloom.common.tensors.versionparts import check_part
from phaseloom.statemgr.disk.files import StateDirectory
from phaseloom.statemgr.disk.receiving import Receiving, page_buffer
from phaseloom.statemgr.disk.statefile import StateHeader, num_blocks
from phaseloom.statemgr.mesh.tls import Stream
from phaseloom.statemgr.seals.fileserving import path_of
from phaseloom.statemgr.transfer import wire
from phaseloom.statemgr.transfer.fetching import Fetch, Home, LocalError, ask_once
from phaseloom.statemgr.transfer.served import Incoming
from phaseloom.statemgr.transfer.tensorslices import Batch, Piece, box_of
from phaseloom.statemgr.transfer.wire import FileName

log = logging.getLogger(__name__)

T = TypeVar("T")

_PAUSE_S = 0.2
_NOT_THERE = frozenset({Code.NOT_FOUND, Code.DATA_LOSS})
"""What a source answers that will not have the file whole later either."""


@dataclass(frozen=True)
class RemoteFile:
    """A state file that other nodes have."""

    name: FileName
    ticket: FilesTicket
    sources: list[str]
    home: Home

    async def fetch(
        self,
        directory: StateDirectory,
        *,
        ranks: tuple[int, int] = (0, 0),
        before: Path | None = None,
    ) -> StateHeader:
        """The header of the file, which is on this node's disk then.

        Args:   ranks: the ranks whose state it is to hold: see `StateHeader.is_of`.
                before: a seal that is here; its blocks are not fetched.
        Raises: ResourceError: DATA_LOSS: every source answers, and none has the file whole;
                UNAVAILABLE: one does not answer; RESOURCE_EXHAUSTED, or what else this node's disk
                says.
        """
        asked, check = wire.DescribeFile(self.name, self.ticket), partial(_check, self.name, ranks)
        header = (await self._from_any(asked, wire.FileDescription, check)).header
        path = path_of(directory, self.name)
        receiving = await asyncio.to_thread(Receiving, directory, path, header, before)
        try:
            num_bytes = await self._fetch_blocks(receiving, header)
            await asyncio.to_thread(receiving.finish)
        except BaseException:
            receiving.abandon()
            raise
        log.info("%s came: %d bytes", self.name, num_bytes)
        return header

    async def parts(self) -> list[str]:
        """The parts of the weights version, by the first source that has it. Raises: as `fetch`."""
        listed = await self._from_any(wire.ListFileParts(self.name, self.ticket), wire.FileParts)
        return [check_part(part, "part") for part in listed.parts]

    async def _fetch_blocks(self, receiving: Receiving, header: StateHeader) -> int:
        """All blocks that are missing. Returns: how many bytes came."""
        size = header.block_bytes
        slices: list[Slice] = []
        for section, block in receiving.missing:
            num_bytes, at = receiving.size_of(section, block), len(slices) * size
            box = ([block * size], [num_bytes])
            slices.append(Slice("", str(section), "uint8", *box, at, num_bytes))

        def open_with(parts: list[str], session: str | None) -> wire.OpenFile:
            return wire.OpenFile(self.name, self.ticket)

        # Sites share nothing of a file: every replica has it on its own disk.
        home, incoming = replace(self.home, site=""), Incoming(slices, {"": header.digest})
        fetch = Fetch(str(self.name), open_with, home, incoming, _Disk(receiving, size))
        batches = [Batch("", [Piece(each, box_of(each))]) for each in slices]
        try:
            await fetch.bring(batches, {"": self.sources})
        except LocalError as failure:
            raise failure.error from None
        except PhaseloomError as error:
            raise _given_up(self.name, list(fetch.errors.values()) or [error]) from error
        return fetch.fetched_bytes

    async def _from_any(
        self, asked: wire.First, answer: type[T], check: Callable[[T], None] = lambda answer: None
    ) -> T:
        """The first good answer; for one timeout all sources are asked again and again.

        Raises: as `fetch`.
        """
        started_s = time.monotonic()
        while True:
            errors: list[PhaseloomError] = []
            for source in self.sources:
                try:
                    found = await ask_once(source, asked, answer, self.home)
                    check(found)
                    return found
                except PhaseloomError as error:
                    log.warning("%s from %s: %s", self.name, source, error)
                    errors.append(error)
            is_late = time.monotonic() - started_s > self.home.timeout_s
            if is_late or all(error.info.code in _NOT_THERE for error in errors):
                raise _given_up(self.name, errors)
            await asyncio.sleep(_PAUSE_S)


class _Disk:
    """A sink on this node's disk, for a block at a time."""

    def __init__(self, receiving: Receiving, block_bytes: int) -> None:
        self._receiving = receiving
        self._block_bytes = block_bytes
        self._free: list[memoryview] = []
        """Buffers that no stream uses."""

    async def receive(self, stream: Stream, batch: Batch, timeout_s: float) -> str:
        ((_, box),) = batch.pieces
        section, block = int(box.name), box.start[0] // self._block_bytes
        buffer = self._free.pop() if self._free else page_buffer(self._block_bytes)
        view, digest = buffer[: batch.num_bytes], xxhash.xxh3_128()
        await stream.receive_into(view, timeout_s, digest.update)
        expected = self._receiving.checksum_of(section, block)
        if await asyncio.to_thread(checksum, view) != expected:
            raise ResourceError(
                f"block {block} of section {section} is bad on arrival", code=Code.DATA_LOSS
            )
        try:
            await asyncio.to_thread(self._receiving.write, section, block, view)
        except PhaseloomError as error:
            raise LocalError(error) from error
        self._free.append(buffer)
        return digest.hexdigest()

    async def is_sound(self) -> bool | None:
        """Each block was verified by the file's header."""
        return True


def _check(name: FileName, ranks: tuple[int, int], described: wire.FileDescription) -> None:
    """Raises: ResourceError: DATA_LOSS: it is another file than the one that is meant, or none."""
    header = described.header
    is_meant = name == FileName(header.kind, header.deployment, header.seq, header.part)
    has_checksums = header.block_bytes > 0 and all(
        len(part.blocks) == CHECKSUM_BYTES * num_blocks(part.num_bytes, header.block_bytes)
        for part in header.parts
    )
    if not header.is_of(*ranks):
        raise ResourceError(f"its {name} is of other ranks", code=Code.DATA_LOSS)
    if not (is_meant and has_checksums):
        raise ResourceError(f"it sent something else than {name}", code=Code.DATA_LOSS)


def _given_up(name: FileName, errors: list[PhaseloomError]) -> ResourceError:
    is_lost = all(error.info.code in _NOT_THERE for error in errors)
    why = "; ".join(str(error) for error in errors) or "no node has it"
    return ResourceError(
        f"{name} could not be brought: {why}",
        code=Code.DATA_LOSS if is_lost else Code.UNAVAILABLE,
        remedy="bring the nodes back that have it",
    )
