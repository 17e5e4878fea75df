"""The list of checkpoints, their descriptions, how long they are kept, their removal, and tar files
of them.

Blocking, except `Archives`: call it in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import stat
import tarfile
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiofiles

from phaseloom.common.contract.api import SavedCheckpoint
from phaseloom.common.contract.checkpoints import (
    ArchiveOpened,
    ArchiveRead,
    CheckpointErased,
    CheckpointsFound,
    DescribeCheckpoint,
    EraseCheckpoint,
    ExpiredFound,
    FindCheckpoints,
    FindExpired,
    OpenArchive,
    ReadArchivePart,
    SetExpiry,
)
from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.ids import DeploymentKey, check_name, is_name
from phaseloom.common.contract.state_rank import (
    CheckpointRemoved,
    PruneCheckpoints,
    RemoveCheckpoint,
)
from phaseloom.statemgr.checkpoints.files import (
    EXPIRY_FILE,
    Checkpoints,
    expiry_of,
    not_found,
    readable_marker,
)
from phaseloom.statemgr.checkpoints.marker import MARKER_FILE
from phaseloom.statemgr.records.incarnations import Rank

log = logging.getLogger(__name__)


class Catalogue:
    """Answers requests about all checkpoints under the root, whichever node wrote them."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints

    def find(self, request: FindCheckpoints) -> CheckpointsFound:
        """Find a tenant's checkpoints. Raises: CallerError: a bad name."""
        for part in ("tenant", "job", "deployment"):
            if name := getattr(request, part):
                check_name(name, part)
        if self._checkpoints.root is None:
            return CheckpointsFound([])
        place = self._checkpoints.root / request.tenant
        pattern = f"{request.job or '*'}/{request.deployment or '*'}/*"
        checkpoints = []
        for directory in sorted(place.glob(pattern)):
            if all(is_name(part) for part in directory.relative_to(place).parts):
                described = _described(directory)
                checkpoints += [described] if described is not None else []
        return CheckpointsFound(checkpoints)

    def describe(self, request: DescribeCheckpoint) -> CheckpointsFound:
        """Describe a checkpoint, with its files. Raises: CallerError: NOT_FOUND; a bad name."""
        key, name = request.deployment, request.name
        with self._checkpoints.locked_if_there(key, name):
            described = _described(self._checkpoints.directory(key, name), with_files=True)
        if described is None:
            raise not_found(name)
        return CheckpointsFound([described])

    def set_expiry(self, request: SetExpiry) -> CheckpointsFound:
        """Keep a checkpoint for `ttl_s` seconds from now.

        Raises: CallerError: NOT_FOUND; a bad name. ResourceError: the disk fails.
        """
        key, name = request.deployment, request.name
        self._checkpoints.set_expiry(key, name, request.ttl_s)
        return self.describe(DescribeCheckpoint(key, name))

    def erase(self, request: EraseCheckpoint) -> CheckpointErased:
        """Remove a checkpoint. Raises: CallerError: NOT_FOUND; a bad name. ResourceError: the disk
        fails."""
        key, name = request.deployment, request.name
        num_bytes = self._remove(key, name, if_expired=request.if_expired)
        if not num_bytes:
            raise not_found(name)
        return CheckpointErased(num_bytes)

    def remove(self, rank: Rank, request: RemoveCheckpoint) -> CheckpointRemoved:
        """Remove a checkpoint of a rank's deployment, if there is one. Raises: CallerError: a bad
        name. ResourceError: the disk fails."""
        return CheckpointRemoved(self._remove(rank.wpg.key, request.name))

    def _remove(self, key: DeploymentKey, name: str, *, if_expired: bool = False) -> int:
        try:
            num_bytes = self._checkpoints.remove(key, name, if_expired=if_expired)
        except OSError as error:
            raise ResourceError(
                f"checkpoint {name!r} of {key} cannot be removed: {error}"
            ) from error
        if num_bytes:
            outcome = "has expired" if if_expired else "is removed"
            log.info("checkpoint %r of %s %s: %d bytes", name, key, outcome, num_bytes)
        return num_bytes

    def prune(self, rank: Rank, request: PruneCheckpoints) -> None:
        """Remove the old checkpoints of a rank's deployment.

        Raises: CallerError: `keep` is less than one. ResourceError: the disk fails.
        """
        key, keep, needed = rank.wpg.key, request.keep, set(request.needed)
        if keep < 1:
            raise CallerError(
                f"keep must be at least 1, got {keep}", field="keep", remedy="keep one or more"
            )
        try:
            removed = self._checkpoints.prune(key, keep, needed)
        except OSError as error:
            raise ResourceError(f"old checkpoints of {key} cannot be removed: {error}") from error
        if removed:
            log.info("removed old checkpoints of %s: %s", key, ", ".join(removed))

    def find_expired(self, _: FindExpired) -> ExpiredFound:
        expired = self._checkpoints.expired()
        return ExpiredFound([DescribeCheckpoint(key, name) for key, name in expired])


def files_of(directory: Path) -> Iterator[Path]:
    """The files of a checkpoint, sorted, without links to other files. Raises: OSError."""
    for place, directories, names in os.walk(directory, onerror=_raise):
        directories.sort()
        for name in sorted(names):
            path = Path(place) / name
            is_content = name != EXPIRY_FILE and not name.startswith(".")
            if is_content and stat.S_ISREG(path.lstat().st_mode):
                yield path


def _raise(error: OSError) -> None:
    raise error


def saved_s(directory: Path) -> float:
    """The time at which a checkpoint became durable, in Unix seconds. Raises: OSError."""
    marker = directory / MARKER_FILE
    return (marker if marker.is_file() else directory).stat().st_mtime


def _described(directory: Path, *, with_files: bool = False) -> SavedCheckpoint | None:
    """Describe a checkpoint; None: the directory is not a checkpoint, or was removed. Blocking."""
    job, deployment, name = directory.parts[-3:]
    try:
        files = {
            str(path.relative_to(directory)): path.stat().st_size for path in files_of(directory)
        }
        at_s = saved_s(directory)
    except OSError:
        return None
    expiry_s, marker = expiry_of(directory), readable_marker(directory)
    return SavedCheckpoint(
        job,
        deployment,
        name,
        sum(files.values()),
        at_s,
        seq=marker.seq if marker else 0,
        weights_sha256=marker.result.weights_sha256 if marker else "",
        keep=marker.keep if marker else 0,
        expires_in_s=None if expiry_s is None else max(0.0, expiry_s - time.time()),
        files=files if with_files else {},
        model=marker.model if marker else "",
        adapter=marker.adapter if marker else None,
    )


PART_BYTES = 2**20
"""Most bytes in one answer."""
IDLE_S = 60.0
_READ_IDLE_S = 1.0
"""As `IDLE_S`, for an archive that was read to its end."""
MAX_OPEN = 64
_BLOCK_BYTES = tarfile.BLOCKSIZE


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes of a tar file: in memory, or the content of an open file."""

    start: int
    num_bytes: int
    source: bytes | int

    async def read(self, offset: int, num_bytes: int) -> bytes:
        if isinstance(self.source, bytes):
            return self.source[offset : offset + num_bytes]
        # Opened again, because each reader needs a position of its own.
        async with aiofiles.open(f"/proc/self/fd/{self.source}", "rb", buffering=0) as file:
            await file.seek(offset)
            return await file.read(num_bytes)


@dataclass(slots=True)
class _Archive:
    tenant: str
    pieces: Sequence[_Piece]
    """All bytes of the tar file, in order."""
    num_readers: int = 0
    is_read: bool = False
    """Whether its end was read."""
    expiry: asyncio.TimerHandle | None = field(default=None, repr=False)

    @property
    def num_bytes(self) -> int:
        return self.pieces[-1].start + self.pieces[-1].num_bytes

    async def read(self, offset: int) -> bytes:
        """The bytes from an offset on. Raises: OSError, EOFError."""
        parts: list[bytes] = []
        remaining = min(PART_BYTES, self.num_bytes - offset)
        number = bisect_right(self.pieces, offset, key=lambda piece: piece.start) - 1
        while remaining > 0:
            piece = self.pieces[number]
            within = offset - piece.start
            if within == piece.num_bytes:
                number += 1
                continue
            part = await piece.read(within, min(remaining, piece.num_bytes - within))
            if not part:
                raise EOFError
            parts.append(part)
            offset += len(part)
            remaining -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        for piece in self.pieces:
            if isinstance(piece.source, int):
                os.close(piece.source)


class Archives:
    """Checkpoints as tar files, read piece by piece.

    An open archive holds its files open, so its content is complete and stays the same even if the
    checkpoint is deleted. It is closed after a minute without a reader.
    """

    def __init__(self, checkpoints: Checkpoints, idle_s: float = IDLE_S) -> None:
        self._checkpoints = checkpoints
        self._idle_s = idle_s
        self._open: dict[str, _Archive] = {}

    async def open(self, request: OpenArchive) -> ArchiveOpened:
        """Open a checkpoint's files as one tar file, or one of them as it is.

        Raises: CallerError: NOT_FOUND; a bad name. ResourceError: RESOURCE_EXHAUSTED: too many
                archives are open; UNAVAILABLE: the disk fails.
        """
        if len(self._open) >= MAX_OPEN:
            raise ResourceError(
                f"too many archives are open: {len(self._open)}",
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
                f"offset must be from 0 to {archive.num_bytes}, got {request.offset}",
                field="offset",
                remedy=f"use 0 to {archive.num_bytes}",
            )
        archive.num_readers += 1
        try:
            content = await archive.read(request.offset)
            archive.is_read = request.offset + len(content) == archive.num_bytes
            return ArchiveRead(content)
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
        idle_s = min(self._idle_s, _READ_IDLE_S) if archive.is_read else self._idle_s
        archive.expiry = loop.call_later(idle_s, self._expire, id, archive)

    def _expire(self, id: str, archive: _Archive) -> None:
        if archive.num_readers:
            self._expire_later(id, archive)
        elif self._open.pop(id, None) is not None:
            archive.close()

    def _pieces(self, request: OpenArchive) -> list[_Piece]:
        """Open the requested files of a checkpoint. Blocking. Raises: as `open`; OSError."""
        pieces: list[_Piece] = []
        key, name = request.deployment, request.name
        directory = self._checkpoints.directory(key, name)
        try:
            with self._checkpoints.locked_if_there(key, name):
                modified_s = saved_s(directory)
                for path in files_of(directory):
                    if request.file in ("", str(path.relative_to(directory))):
                        self._add(pieces, directory, path, modified_s)
        except BaseException:
            _Archive("", pieces).close()
            raise
        if request.file:
            if not pieces:
                raise CallerError(
                    f"checkpoint {name!r} has no file {request.file!r}",
                    code=Code.NOT_FOUND,
                    field="file",
                    remedy="name one of the files that `checkpoint.show` lists",
                )
            return [replace(pieces[1], start=0)]
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
