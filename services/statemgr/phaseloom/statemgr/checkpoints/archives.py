"""Checkpoints as tar files, read piece by piece.

An open archive holds its files open: what is read is whole and the same, whatever becomes of the
checkpoint meanwhile. It is closed when nobody has read it for a minute.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import tarfile
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phaseloom.common.contract.checkpoints import (
    ArchiveOpened,
    ArchiveRead,
    OpenArchive,
    ReadArchivePart,
)
from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.statemgr.checkpoints.catalogue import files_of, saved_s
from phaseloom.statemgr.checkpoints.files import Checkpoints

PART_BYTES = 2**20
"""The most bytes of one answer."""
IDLE_S = 60.0
MAX_OPEN = 64
_BLOCK_BYTES = tarfile.BLOCKSIZE


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes of a tar file that are in memory, or the content of an open file."""

    start: int
    num_bytes: int
    source: bytes | int

    def read(self, offset: int, num_bytes: int) -> bytes:
        if isinstance(self.source, bytes):
            return self.source[offset : offset + num_bytes]
        return os.pread(self.source, num_bytes, offset)


@dataclass(slots=True)
class _Archive:
    tenant: str
    pieces: Sequence[_Piece]
    """All bytes of the tar file, in order."""
    num_readers: int = 0
    expiry: asyncio.TimerHandle | None = field(default=None, repr=False)

    @property
    def num_bytes(self) -> int:
        return self.pieces[-1].start + self.pieces[-1].num_bytes

    def read(self, offset: int) -> bytes:
        """The bytes from an offset on; blocking. Raises: OSError, EOFError."""
        parts: list[bytes] = []
        left = min(PART_BYTES, self.num_bytes - offset)
        number = bisect_right(self.pieces, offset, key=lambda piece: piece.start) - 1
        while left > 0:
            piece = self.pieces[number]
            within = offset - piece.start
            if within == piece.num_bytes:
                number += 1
                continue
            part = piece.read(within, min(left, piece.num_bytes - within))
            if not part:
                raise EOFError
            parts.append(part)
            offset += len(part)
            left -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        for piece in self.pieces:
            if isinstance(piece.source, int):
                os.close(piece.source)


class Archives:
    """The archives that are open on this node."""

    def __init__(self, checkpoints: Checkpoints, idle_s: float = IDLE_S) -> None:
        self._checkpoints = checkpoints
        self._idle_s = idle_s
        self._open: dict[str, _Archive] = {}

    async def open(self, request: OpenArchive) -> ArchiveOpened:
        """Open a checkpoint's files as one tar file.

        Raises: CallerError: NOT_FOUND; a bad name. ResourceError: RESOURCE_EXHAUSTED: too many
                archives are open; UNAVAILABLE: the disk fails.
        """
        if len(self._open) >= MAX_OPEN:
            raise ResourceError(
                f"{len(self._open)} archives are open",
                code=Code.RESOURCE_EXHAUSTED,
                remedy=f"try again in {self._idle_s:.0f} s",
            )
        try:
            pieces = await asyncio.to_thread(self._pieces, request)
        except OSError as error:
            raise ResourceError(f"{request.name!r} cannot be read: {error}") from error
        archive = _Archive(request.deployment.tenant, pieces)
        id = f"{self._checkpoints.node}.{secrets.token_hex(16)}"
        self._open[id] = archive
        self._expire_later(id, archive)
        return ArchiveOpened(id, archive.num_bytes)

    async def read(self, request: ReadArchivePart) -> ArchiveRead:
        """Read a part of an open archive.

        Raises: CallerError: NOT_FOUND: the tenant has no such archive open here, or the offset is
                outside it. ResourceError: the disk fails.
        """
        archive = self._open.get(request.archive)
        if archive is None or archive.tenant != request.tenant:
            raise CallerError(
                f"no archive {request.archive!r} is open",
                code=Code.NOT_FOUND,
                field="archive",
                remedy="open it again, and read it without long pauses",
            )
        if not 0 <= request.offset <= archive.num_bytes:
            raise CallerError(
                f"{request.offset} is outside the archive",
                field="offset",
                remedy=f"use 0 to {archive.num_bytes}",
            )
        archive.num_readers += 1
        try:
            return ArchiveRead(await asyncio.to_thread(archive.read, request.offset))
        except (OSError, EOFError) as error:
            raise ResourceError(f"the archive cannot be read: {error!r}") from error
        finally:
            archive.num_readers -= 1
            self._expire_later(request.archive, archive)

    def close(self) -> None:
        for archive in self._open.values():
            if archive.expiry is not None:
                archive.expiry.cancel()
            archive.close()
        self._open.clear()

    def _expire_later(self, id: str, archive: _Archive) -> None:
        if archive.expiry is not None:
            archive.expiry.cancel()
        loop = asyncio.get_running_loop()
        archive.expiry = loop.call_later(self._idle_s, self._expire, id, archive)

    def _expire(self, id: str, archive: _Archive) -> None:
        if archive.num_readers:
            self._expire_later(id, archive)
        elif self._open.pop(id, None) is not None:
            archive.close()

    def _pieces(self, request: OpenArchive) -> list[_Piece]:
        """Open all files of a checkpoint. Blocking. Raises: as `open`; OSError."""
        pieces: list[_Piece] = []
        key, name = request.deployment, request.name
        directory = self._checkpoints.directory(key, name)
        try:
            with self._checkpoints.locked_if_there(key, name):
                modified_s = saved_s(directory)
                for path in files_of(directory):
                    self._add(pieces, directory, path, modified_s)
        except BaseException:
            _Archive("", pieces).close()
            raise
        start = sum(piece.num_bytes for piece in pieces)
        return [*pieces, _Piece(start, 2 * _BLOCK_BYTES, bytes(2 * _BLOCK_BYTES))]

    def _add(self, pieces: list[_Piece], directory: Path, path: Path, modified_s: float) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        num_bytes = os.fstat(fd).st_size
        member = tarfile.TarInfo(str(path.relative_to(directory.parent)))
        member.size, member.mtime = num_bytes, int(modified_s)
        header, padding = member.tobuf(), bytes(-num_bytes % _BLOCK_BYTES)
        start = pieces[-1].start + pieces[-1].num_bytes if pieces else 0
        for size, source in ((len(header), header), (num_bytes, fd), (len(padding), padding)):
            pieces.append(_Piece(start, size, source))
            start += size
