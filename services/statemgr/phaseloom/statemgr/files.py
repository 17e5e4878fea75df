"""Seals, persisted weights versions and spilled host copies on disk. Blocking: call it in a thread.

The bytes go as `disk` finds that they go best.

`<directory>/<tenant>/<job>/<deployment>/seal-<seq>.state`, `version-<seq>.state`, and
`spill-<incarnation>-<rank>.state`, the host copy of one rank. A file appears
under its name whole and fsynced, or not at all; what a crash left half-written is a `.partial`,
removed at the next start.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

from phaseloom.common.errors import Code, PhaseloomError, ResourceError
from phaseloom.common.ids import DeploymentKey, VersionKey, check_name
from phaseloom.statemgr.core.statefile import (
    CHECKSUM_BYTES,
    PREFIX_BYTES,
    Place,
    StateHeader,
    data_loss,
    decode_header,
    encode_header,
    header_bytes,
    num_blocks,
    part_offsets,
)
from phaseloom.statemgr.disk.blockfile import BlockFile
from phaseloom.statemgr.disk.disk import BLOCK_BYTES, Disk
from phaseloom.statemgr.disk.probing import PROBE_PREFIX

log = logging.getLogger(__name__)

_NAME = re.compile(r"(seal|version)-([1-9][0-9]{0,17})\.state\Z")
_SPILL = re.compile(r"spill-[0-9]+-[0-9]+\.state\Z")
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
NEVER = threading.Event()
"""For a move that nobody cancels."""


class StateDirectory:
    """Names files safely under one root and reads and writes them."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.disk = Disk(root)

    def seal(self, key: DeploymentKey, seq: int) -> Path:
        return self._path("seal", key, seq)

    def version(self, key: VersionKey) -> Path:
        return self._path("version", key.policy, key.seq)

    def spill(self, key: DeploymentKey, incarnation: int, rank: int) -> Path:
        return self._directory(key) / f"spill-{incarnation:d}-{rank:d}.state"

    def spilled(self) -> set[Path]:
        """The host copies that are here, whole, of whatever life."""
        return {path for path in self._root.glob("*/*/*/*.state") if _SPILL.match(path.name)}

    def _path(self, kind: str, key: DeploymentKey, seq: int) -> Path:
        return self._directory(key) / f"{kind}-{seq:d}.state"

    def _directory(self, key: DeploymentKey) -> Path:
        """Raises: CallerError: a name that is no plain file name."""
        path = self._root
        for name in (key.tenant, key.job, key.deployment):
            path = path / check_name(name, "deployment")
        return path

    def scan(self) -> Iterator[tuple[Path, StateHeader]]:
        """Every readable state file; unreadable ones are left alone and logged."""
        for partial in self._root.glob("*/*/*/*.partial"):
            partial.unlink()
        for probe in self._root.glob(f"{PROBE_PREFIX}*"):
            shutil.rmtree(probe)
        # Only now, when no writer can be about to use one.
        for depth in ("*/*/*", "*/*", "*"):
            for directory in self._root.glob(f"{depth}/"):
                with contextlib.suppress(OSError):
                    directory.rmdir()
        for path in sorted(self._root.glob("*/*/*/*.state")):
            if not _NAME.match(path.name):
                continue
            try:
                header = find_parts(path)[0].header
                if path != self._path(header.kind, header.deployment, header.seq):
                    raise data_loss(str(path), "its header names another file")
            except PhaseloomError as error:
                log.warning("left out: %s", error)
                continue
            yield path, header

    def write(
        self,
        path: Path,
        header: StateHeader,
        memories: list[memoryview],
        cancelled: threading.Event = NEVER,
    ) -> None:
        """Put a file in place, whole and fsynced.

        Args:   memories: of each of the header's parts.
        Raises: ResourceError: RESOURCE_EXHAUSTED: the disk is full; DATA_LOSS: the memory is not
                what the header's digest says; UNAVAILABLE: anything else the disk refuses;
                ABORTED: cancelled. What was there before stands.
        """
        partial = path.with_suffix(".partial")
        try:
            self._make_directory(path.parent)
            try:
                self._write_synced(partial, header, memories, path, cancelled)
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

    def read(self, place: Place, memory: memoryview, cancelled: threading.Event = NEVER) -> None:
        """Fill `memory` with a part of a file, verified.

        Raises: ResourceError: DATA_LOSS, saying where; ABORTED: cancelled.
        """
        try:
            with contextlib.closing(self.disk.open(Path(place.file))) as file:
                self.disk.read(file, place, memory, cancelled)
        except OSError as error:
            raise data_loss(place.file, error.strerror or repr(error)) from error

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def clear(self, key: DeploymentKey) -> None:
        """Remove every state file of a deployment, readable or not."""
        directory = self._directory(key)
        if directory.is_dir():
            for path in directory.iterdir():
                if _NAME.match(path.name) or _SPILL.match(path.name):
                    self.remove(path)

    def _write_synced(
        self,
        partial: Path,
        header: StateHeader,
        memories: list[memoryview],
        path: Path,
        cancelled: threading.Event,
    ) -> None:
        # As long as the real one: what it will say of the blocks has the same length.
        blank = [
            bytes(CHECKSUM_BYTES * num_blocks(part.num_bytes, BLOCK_BYTES)) for part in header.parts
        ]
        start = encode_header(header.with_blocks(BLOCK_BYTES, blank))
        offsets = part_offsets(header, len(start) - PREFIX_BYTES)
        end = offsets[-1] + header.parts[-1].num_bytes
        with contextlib.closing(self.disk.create(partial, end)) as file:
            blocks = [
                self._write_part(file, Place(str(path), header, index, at), memory, cancelled)
                for index, (at, memory) in enumerate(zip(offsets, memories, strict=True))
            ]
            whole = encode_header(header.with_blocks(BLOCK_BYTES, blocks))
            assert len(whole) == len(start)
            file.write(memoryview(whole), 0)
            file.finish(end)

    def _write_part(
        self, file: BlockFile, place: Place, memory: memoryview, cancelled: threading.Event
    ) -> bytes:
        part = place.part
        written = self.disk.write(file, place.offset, memory[: part.num_bytes], cancelled)
        if written.digest != part.digest:
            raise place.loss("the host copy is not what its digest says", 0, part.num_bytes)
        return written.blocks

    def _make_directory(self, directory: Path) -> None:
        missing = [d for d in (directory, *directory.parents) if not d.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        for made in missing:
            _sync_directory(made.parent)


def find_parts(path: Path) -> list[Place]:
    """The parts of a state file, whose header is checked. Raises: ResourceError: DATA_LOSS."""
    try:
        with path.open("rb") as file:
            prefix = file.read(PREFIX_BYTES)
            length = header_bytes(prefix, str(path))
            header = decode_header(prefix, file.read(length), str(path))
            offsets = part_offsets(header, length)
            return [Place(str(path), header, index, at) for index, at in enumerate(offsets)]
    except OSError as error:
        raise data_loss(str(path), error.strerror or repr(error)) from error


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
