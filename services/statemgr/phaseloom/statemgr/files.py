"""Seals and persisted weights versions on disk. Blocking: call it in a thread.

`<directory>/<tenant>/<job>/<deployment>/seal-<seq>.state` and `version-<seq>.state`. A file appears
under its name whole and fsynced, or not at all; what a crash left half-written is a `.partial`,
removed at the next start.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

import xxhash

from phaseloom.common.errors import Code, PhaseloomError, ResourceError
from phaseloom.common.ids import DeploymentKey, VersionKey, check_name
from phaseloom.statemgr.core.statefile import (
    PREFIX_BYTES,
    Section,
    StateHeader,
    data_loss,
    decode_header,
    encode_header,
    gap_bytes,
    header_bytes,
    part_offsets,
)

log = logging.getLogger(__name__)

_CHUNK_BYTES = 8 * 1024 * 1024
_NAME = re.compile(r"(seal|version)-([1-9][0-9]{0,17})\.state\Z")
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class StateDirectory:
    """Names files safely under one root and reads and writes them."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def seal(self, key: DeploymentKey, seq: int) -> Path:
        return self._path("seal", key, seq)

    def version(self, key: VersionKey) -> Path:
        return self._path("version", key.policy, key.seq)

    def _path(self, kind: str, key: DeploymentKey, seq: int) -> Path:
        """Raises: CallerError: a name that is no plain file name."""
        path = self._root
        for name in (key.tenant, key.job, key.deployment):
            path = path / check_name(name, "deployment")
        return path / f"{kind}-{seq:d}.state"

    def scan(self) -> Iterator[tuple[Path, StateHeader]]:
        """Every readable state file; unreadable ones are left alone and logged."""
        for partial in self._root.glob("*/*/*/*.partial"):
            partial.unlink()
        # Only now, when no writer can be about to use one.
        for depth in ("*/*/*", "*/*", "*"):
            for directory in self._root.glob(f"{depth}/"):
                with contextlib.suppress(OSError):
                    directory.rmdir()
        for path in sorted(self._root.glob("*/*/*/*.state")):
            if not _NAME.match(path.name):
                continue
            try:
                header, _ = read_header(path)
                if path != self._path(header.kind, header.deployment, header.seq):
                    raise data_loss(str(path), "its header names another file")
            except PhaseloomError as error:
                log.warning("left out: %s", error)
                continue
            yield path, header

    def write(self, path: Path, header: StateHeader, memories: list[memoryview]) -> None:
        """Put a file in place, whole and fsynced.

        Args:   memories: of each of the header's parts.
        Raises: ResourceError: RESOURCE_EXHAUSTED: the disk is full; DATA_LOSS: the memory is not
                what the header's digest says; UNAVAILABLE: anything else the disk refuses. What
                was there before stands.
        """
        partial = path.with_suffix(".partial")
        try:
            self._make_directory(path.parent)
            try:
                _write_synced(partial, header, memories, str(path))
                partial.rename(path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
            _sync_directory(path.parent)
        except OSError as error:
            raise ResourceError(
                f"{path} cannot be written: {error.strerror}",
                code=Code.RESOURCE_EXHAUSTED if error.errno in _FULL else Code.UNAVAILABLE,
                details={"file": str(path), "num_bytes": str(header.num_bytes)},
                remedy="free space on the node's state directory",
            ) from error

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def clear(self, key: DeploymentKey) -> None:
        """Remove every state file of a deployment, readable or not."""
        directory = self.seal(key, 1).parent
        if directory.is_dir():
            for path in directory.iterdir():
                if _NAME.match(path.name):
                    self.remove(path)

    def _make_directory(self, directory: Path) -> None:
        missing = [d for d in (directory, *directory.parents) if not d.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        for made in missing:
            _sync_directory(made.parent)


def read_header(path: Path) -> tuple[StateHeader, list[int]]:
    """The header, checked, and the offset of each part. Raises: ResourceError: DATA_LOSS."""
    try:
        with path.open("rb") as file:
            prefix = file.read(PREFIX_BYTES)
            length = header_bytes(prefix, str(path))
            header = decode_header(prefix, file.read(length), str(path))
            return header, part_offsets(header, length)
    except OSError as error:
        raise data_loss(str(path), error.strerror or repr(error)) from error


def read_memory(path: Path, part: Section, offset: int, memory: memoryview) -> None:
    """Fill `memory` from the file and verify it. Raises: ResourceError: DATA_LOSS."""
    digest = xxhash.xxh3_128()
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            done = 0
            while done < part.num_bytes:
                count = file.readinto(memory[done : min(done + _CHUNK_BYTES, part.num_bytes)])
                if not count:
                    raise data_loss(str(path), f"it ends {part.num_bytes - done} bytes early")
                digest.update(memory[done : done + count])
                done += count
    except OSError as error:
        raise data_loss(str(path), error.strerror or repr(error)) from error
    if digest.hexdigest() != part.digest:
        raise data_loss(str(path), "the checksum of its content does not match")


def _write_synced(
    partial: Path, header: StateHeader, memories: list[memoryview], name: str
) -> None:
    with partial.open("wb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(encode_header(header)))
        for part, memory in zip(header.parts, memories, strict=True):
            _write_all(file.fileno(), memoryview(bytes(gap_bytes(file.tell()))))
            if _write_hashed(file.fileno(), memory[: part.num_bytes]) != part.digest:
                raise ResourceError(
                    f"the host copy for {name} is not what its digest says", code=Code.DATA_LOSS
                )
        os.fsync(file.fileno())


def _write_hashed(fd: int, memory: memoryview) -> str:
    digest = xxhash.xxh3_128()
    for start in range(0, len(memory), _CHUNK_BYTES):
        chunk = memory[start : start + _CHUNK_BYTES]
        digest.update(chunk)
        _write_all(fd, chunk)
    return digest.hexdigest()


def _write_all(fd: int, chunk: memoryview) -> None:
    while chunk:
        chunk = chunk[os.write(fd, chunk) :]


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
