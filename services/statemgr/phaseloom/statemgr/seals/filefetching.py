"""Fetches a state file from other nodes' state managers onto this node's disk.

What the newest seal here has is not fetched: the new file refers to it, as one that is written here
does. A few streams to one source take block after block of the rest; each is verified by the
checksum that the file's header has of it, and written where it belongs. A broken stream is opened
again, a source that has not the file whole is followed by the next; what is verified stays. The
file has its name once all of it is on the disk. Memory: a block a stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from phaseloom.common.contract.commands import FilesTicket
from phaseloom.common.contract.errors import (
    CallerError,
    Code,
    PhaseloomError,
    ResourceError,
    to_exception,
)
from phaseloom.common.tensors.blockhash import CHECKSUM_BYTES, checksum
from phaseloom.common.tensors.versionparts import check_part
from phaseloom.statemgr.disk.files import StateDirectory
from phaseloom.statemgr.disk.receiving import Receiving, page_buffer
from phaseloom.statemgr.disk.statefile import StateHeader, num_blocks
from phaseloom.statemgr.mesh import tls
from phaseloom.statemgr.mesh.tls import Identity, Stream
from phaseloom.statemgr.seals.fileserving import path_of
from phaseloom.statemgr.seals.filewire import (
    MAX_REPLY_BYTES,
    SERVICE,
    FetchFile,
    FileFound,
    FileName,
    FileRefused,
    FileSame,
    Found,
    Listed,
    ListParts,
    TakeBlock,
    Taken,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

_STREAMS = 4
_MAX_FAILURES = 3
"""Of one stream, without a block in between."""
_PAUSE_S = 0.2
_FAILURES = (OSError, TimeoutError, msgspec.DecodeError, PhaseloomError)
_NOT_THERE = frozenset({Code.NOT_FOUND, Code.DATA_LOSS})
"""What a source says that will not have the file whole later either."""

Block = tuple[int, int]
"""(part, number)"""


class _LocalFailure(Exception):
    """This node's disk: no other source helps."""

    def __init__(self, error: PhaseloomError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass
class FileFetching:
    """One file, from one source after another. `bring` once."""

    name: FileName
    ticket: FilesTicket
    directory: StateDirectory
    identity: Identity
    timeout_s: float
    """Of each step; and for so long all sources are tried again though nothing comes."""
    ranks: tuple[int, int] = (0, 0)
    """Whose it is to be: see `StateHeader.is_of`."""
    before: Path | None = None
    """A seal that is here: what it has is not fetched."""
    num_bytes: int = 0
    """That came over the wire."""
    _receiving: Receiving | None = None
    _header: StateHeader | None = None
    _missing: deque[Block] = field(default_factory=deque)
    _progress_s: float = field(default_factory=time.monotonic)

    async def bring(self, sources: list[str]) -> StateHeader:
        """Raises: ResourceError: DATA_LOSS: every source answers, and none has it whole;
        UNAVAILABLE: one does not answer; RESOURCE_EXHAUSTED, or what else this node's disk says.
        """
        try:
            while True:
                errors: list[PhaseloomError] = []
                for source in sources:
                    try:
                        return await self._from(source)
                    except PhaseloomError as error:
                        log.warning("%s from %s: %s", self.name, source, error)
                        errors.append(error)
                is_late = time.monotonic() - self._progress_s > self.timeout_s
                if is_late or all(error.info.code in _NOT_THERE for error in errors):
                    raise _given_up(self.name, errors)
                await asyncio.sleep(_PAUSE_S)
        except _LocalFailure as failure:
            raise failure.error from None
        finally:
            if self._receiving is not None:
                self._receiving.abandon()

    async def _from(self, source: str) -> StateHeader:
        """All that is missing. Raises: PhaseloomError: this source cannot bring it."""
        stream = await self._open(source)
        assert self._header is not None
        assert self._receiving is not None
        streams = [self._stream(source, stream)]
        num_more = min(_STREAMS, len(self._missing)) - 1
        streams += [self._stream(source, None) for _ in range(num_more)]
        failures = await asyncio.gather(*streams, return_exceptions=True)
        for failure in failures:
            if isinstance(failure, _LocalFailure):
                raise failure
        for failure in failures:
            if failure is not None and self._missing:
                raise failure
        receiving, self._receiving = self._receiving, None
        await _locally(receiving.finish)
        return self._header

    async def _open(self, source: str) -> Stream:
        """A stream to a source that has the file as it is known here."""
        known = "" if self._header is None else self._header.digest
        stream = await tls.connect(source, SERVICE, self.identity, self.timeout_s)
        try:
            asked = FetchFile(self.name, self.ticket, known)
            found: Found = await _ask(stream, source, asked, Found, self.timeout_s)
            match found:
                case FileRefused(error):
                    raise to_exception(error)
                case FileFound(header):
                    await self._begin(header)
                case FileSame():
                    pass
        except BaseException:
            stream.close()
            raise
        return stream

    async def _begin(self, header: StateHeader) -> None:
        """What to fetch is known. Raises: ResourceError: DATA_LOSS: it is another file than the one
        that was begun, or none."""
        is_meant = self.name == FileName(header.kind, header.deployment, header.seq, header.part)
        sizes = [num_blocks(part.num_bytes, header.block_bytes) for part in header.parts]
        has_checksums = all(
            len(part.blocks) == CHECKSUM_BYTES * count
            for part, count in zip(header.parts, sizes, strict=True)
        )
        if not header.is_of(*self.ranks):
            raise ResourceError(f"its {self.name} is of other ranks", code=Code.DATA_LOSS)
        if not (is_meant and header.block_bytes and has_checksums):
            raise ResourceError(f"it sent something else than {self.name}", code=Code.DATA_LOSS)
        if self._header is not None:
            raise ResourceError(f"its {self.name} is another one", code=Code.DATA_LOSS)
        path = path_of(self.directory, self.name)
        # What the source's file refers to is there, and not here.
        whole = header.alone()
        self._receiving = await _locally(Receiving, self.directory, path, whole, self.before)
        self._header = header
        self._missing = deque(self._receiving.missing)

    async def _stream(self, source: str, stream: Stream | None) -> None:
        """Until nothing is missing. Raises: PhaseloomError: it broke once too often."""
        failures = 0
        assert self._header is not None
        try:
            buffer = page_buffer(self._header.block_bytes)
            while self._missing:
                try:
                    stream = stream or await self._open(source)
                    await self._take_next(stream, source, buffer)
                    failures = 0
                except _FAILURES as error:
                    failures += 1
                    if failures > _MAX_FAILURES or isinstance(error, CallerError):
                        raise
                    log.warning("%s from %s: %s", self.name, source, error)
                    if stream is not None:
                        stream.close()
                        stream = None
                    await asyncio.sleep(_PAUSE_S)
        finally:
            if stream is not None:
                stream.close()

    async def _take_next(self, stream: Stream, source: str, buffer: memoryview) -> None:
        if not self._missing:
            return
        missing, block = self._missing, self._missing.popleft()
        try:
            await self._take(stream, source, block, buffer)
        except BaseException:
            missing.append(block)
            raise

    async def _take(self, stream: Stream, source: str, block: Block, buffer: memoryview) -> None:
        part, number = block
        assert self._receiving is not None
        size = self._receiving.size_of(part, number)
        view = buffer[:size]
        try:
            async with asyncio.timeout(self.timeout_s):
                await stream.send(TakeBlock(part, number))
                payload = await stream.receive(MAX_REPLY_BYTES)
            taken: Taken = msgspec.msgpack.decode(payload, type=Taken)
            if isinstance(taken, FileRefused):
                raise to_exception(taken.error)
            if taken.num_bytes != size:
                raise ConnectionError(f"a block of {taken.num_bytes} bytes, not {size}")
            await stream.receive_into(view, self.timeout_s)
        except (OSError, TimeoutError, msgspec.DecodeError) as error:
            raise tls.explained(error, source, self.timeout_s) from error
        if await asyncio.to_thread(checksum, view) != self._receiving.checksum_of(part, number):
            raise ResourceError(f"block {block} is bad on arrival", code=Code.DATA_LOSS)
        await _locally(self._receiving.write, part, number, view)
        self.num_bytes += size
        self._progress_s = time.monotonic()


@dataclass
class PartListing:
    """Which parts of a weights version there are, by the first source that has it."""

    name: FileName
    ticket: FilesTicket
    identity: Identity
    timeout_s: float
    """Of each step; and for so long all sources are asked again."""

    async def ask(self, sources: list[str]) -> list[str]:
        """Raises: as `FileFetching.bring`."""
        started_s = time.monotonic()
        while True:
            errors: list[PhaseloomError] = []
            for source in sources:
                try:
                    return await self._ask(source)
                except PhaseloomError as error:
                    log.warning("parts of %s from %s: %s", self.name, source, error)
                    errors.append(error)
            is_late = time.monotonic() - started_s > self.timeout_s
            if is_late or all(error.info.code in _NOT_THERE for error in errors):
                raise _given_up(self.name, errors)
            await asyncio.sleep(_PAUSE_S)

    async def _ask(self, source: str) -> list[str]:
        stream = await tls.connect(source, SERVICE, self.identity, self.timeout_s)
        try:
            asked = ListParts(self.name, self.ticket)
            listed: Listed = await _ask(stream, source, asked, Listed, self.timeout_s)
        finally:
            stream.close()
        if isinstance(listed, FileRefused):
            raise to_exception(listed.error)
        return [check_part(part, "part") for part in listed.parts]


async def _ask(
    stream: Stream, source: str, asked: FetchFile | ListParts, answer: Any, timeout_s: float
) -> Any:
    """Raises: ResourceError: it breaks off, or says nothing."""
    try:
        async with asyncio.timeout(timeout_s):
            await stream.send(asked)
            payload = await stream.receive(MAX_REPLY_BYTES)
        return msgspec.msgpack.decode(payload, type=answer)
    except (OSError, TimeoutError, msgspec.DecodeError) as error:
        raise tls.explained(error, source, timeout_s) from error


def _given_up(name: FileName, errors: list[PhaseloomError]) -> ResourceError:
    is_lost = all(error.info.code in _NOT_THERE for error in errors)
    why = "; ".join(str(error) for error in errors) or "no node has it"
    return ResourceError(
        f"{name} could not be brought: {why}",
        code=Code.DATA_LOSS if is_lost else Code.UNAVAILABLE,
        remedy="bring the nodes back that have it",
    )


async def _locally(work: Callable[..., T], *args: object) -> T:
    """On this node's disk, in a thread."""
    try:
        return await asyncio.to_thread(work, *args)
    except PhaseloomError as error:
        raise _LocalFailure(error) from error
