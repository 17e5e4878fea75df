"""Seals, persisted weights versions and demoted host copies on disk. Blocking: call it in a thread.

The module `disk` moves the bytes.

Files are in `<directory>/<tenant>/<job>/<deployment>/`: `seal-<seq>.state`, `version-<seq>.state`
(for a part `version-<seq>-2of4.state`), and `demoted-<incarnation>-<rank>.state`, which is the host
copy of one rank. A file appears under its name whole and fsynced, or not at all; a file that a
crash left half-written is a `.partial`, and is removed at the next start.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from phaseloom.common.contract.errors import Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import DeploymentKey, VersionKey, check_name
from phaseloom.common.tensors.blockhash import BLOCK_BYTES, CHECKSUM_BYTES, combined
from phaseloom.common.tensors.versionparts import check_part
from phaseloom.statemgr.disk.bases import BASE_SUFFIX, Base, worth_referring
from phaseloom.statemgr.disk.blockfile import PROBE_PREFIX, BlockFile
from phaseloom.statemgr.disk.disk import Disk, Files
from phaseloom.statemgr.disk.statefile import (
    PREFIX_BYTES,
    Place,
    StateHeader,
    check_blocks,
    data_loss,
    decode_header,
    encode_header,
    header_bytes,
    num_blocks,
    part_offsets,
)

log = logging.getLogger(__name__)

_NAME = re.compile(r"(seal|version)-([1-9][0-9]{0,17})(-[0-9]+of[0-9]+)?\.state\Z")
_SHARED = ".shared"
"""The directory of shared copies, which may belong to several tenants; no tenant has this name."""
_BASE = re.compile(r"seal-[0-9]+\.[0-9a-f]+\.base\Z")
_DEMOTED = re.compile(r"demoted-[0-9]+-[0-9]+\.state\Z")
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
NEVER = threading.Event()
"""The event for a move that nobody cancels: it is never set."""


class StateDirectory:
    """Names files safely under one root and reads and writes them."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.disk = Disk(root)

    def seal(self, key: DeploymentKey, seq: int) -> Path:
        return self._path("seal", key, seq)

    def version(self, key: VersionKey) -> Path:
        """The file of a whole version, of its manifest, or of a part."""
        part = check_part(key.part, "version.part") if key.part else ""
        return self._path("version", key.policy, key.seq, part)

    def parts(self, key: VersionKey) -> list[str]:
        """The names of the parts of a version that are on this disk."""
        pattern = f"version-{key.seq:d}-*of*.state"
        found = [_NAME.match(path.name) for path in self._directory(key.policy).glob(pattern)]
        return sorted(name[3].removeprefix("-") for name in found if name)

    def demoted(self, key: DeploymentKey, incarnation: int, rank: int) -> Path:
        return self._directory(key) / f"demoted-{incarnation:d}-{rank:d}.state"

    def shared_copy(self, number: int) -> Path:
        return self._root / _SHARED / f"shared-{number:d}.state"

    def shared_copies(self) -> set[Path]:
        """The whole files of shared copies on this disk, whichever daemon wrote them."""
        return {p for p in (self._root / _SHARED).glob("shared-*.state") if p.is_file()}

    def all_demoted(self) -> set[Path]:
        """The whole files of host copies on this disk, of whichever incarnation."""
        every = self._root.glob("*/*/*/*.state")
        return {path for path in every if _DEMOTED.match(path.name) and path.is_file()}

    def _path(self, kind: str, key: DeploymentKey, seq: int, part: str = "") -> Path:
        return self._directory(key) / f"{kind}-{seq:d}{'-' if part else ''}{part}.state"

    def _directory(self, key: DeploymentKey) -> Path:
        """The directory of a deployment. Raises: CallerError: a name is no plain file name."""
        path = self._root
        for name in (key.tenant, key.job, key.deployment):
            path = path / check_name(name, "deployment")
        return path

    def scan(self) -> Iterator[tuple[Path, StateHeader]]:
        """Every readable seal and version, with its header, after the leavings of a crash are
        removed. Unreadable files, and paths that are no plain file, are left alone and logged."""
        self._clear_leftovers()
        for path in sorted(self._root.glob("*/*/*/*.state")):
            if not _NAME.match(path.name) or not _is_file(path):
                continue
            try:
                header = find_parts(path)[0].header
                if path != self._path(header.kind, header.deployment, header.seq, header.part):
                    raise data_loss(str(path), "its header names another file")
            except PhaseloomError as error:
                log.warning("left out: %s", error)
                continue
            yield path, header

    def _clear_leftovers(self) -> None:
        """Remove half-written files, unused links, probes and empty directories of a crash."""
        for pattern in ("*/*/*/*.partial", f"{_SHARED}/*.partial"):
            for half_written in filter(_is_file, self._root.glob(pattern)):
                half_written.unlink()
        for link in filter(_is_file, self._root.glob(f"*/*/*/*{BASE_SUFFIX}")):
            if link.name not in bases_named(link.with_name(f"{link.name.split('.')[0]}.state")):
                link.unlink()
        for probe in self._root.glob(f"{PROBE_PREFIX}*"):
            if probe.is_dir():
                shutil.rmtree(probe)
            else:
                log.warning("left out: %s is no directory", probe)
        # Only now, when no writer can be about to use one.
        for depth in ("*/*/*", "*/*", "*"):
            for directory in self._root.glob(f"{depth}/"):
                with contextlib.suppress(OSError):
                    directory.rmdir()

    def write(
        self,
        path: Path,
        header: StateHeader,
        memories: Sequence[memoryview],
        cancelled: threading.Event = NEVER,
    ) -> StateHeader:
        """Put a file in place, whole and fsynced.

        Args:    header: where it has a digest for a part, the part's memory must have that digest.
                 memories: the memory of each of the header's parts.
        Returns: the header as written, with the digests of the written memory.
        Raises:  ResourceError: RESOURCE_EXHAUSTED: the disk is full; DATA_LOSS: the memory is not
                 what the header's digest says; UNAVAILABLE: the disk fails otherwise; ABORTED:
                 cancelled. After an error the file that was there before stands.
        """
        return self._put(path, header, memories, cancelled, None)

    def read(self, place: Place, memory: memoryview, cancelled: threading.Event = NEVER) -> None:
        """Fill `memory` with a part of a file, verified.

        Raises: ResourceError: DATA_LOSS, saying where; ABORTED: cancelled.
        """
        try:
            with self._opened(place) as files:
                self.disk.read(files, place, memory, cancelled)
        except OSError as error:
            raise data_loss(place.file, error.strerror or repr(error)) from error

    def read_block(self, place: Place, block: int, memory: memoryview) -> int:
        """Fill the beginning of `memory` with one verified block of a part.

        Returns: the block's size.
        Raises:  ResourceError: DATA_LOSS, saying where.
        """
        try:
            with self._opened(place, {place.part.source_of(block)}) as files:
                return self.disk.read_block(files, place, block, memory)
        except OSError as error:
            raise data_loss(place.file, error.strerror or repr(error)) from error

    @contextlib.contextmanager
    def _opened(self, place: Place, sources: set[int] | None = None) -> Iterator[Files]:
        """The open file of a part, and the open files that it refers to, by source number.

        Args:   sources: the sources to open; None: all that the part has blocks in.
        Raises: OSError. ResourceError: DATA_LOSS.
        """
        check_blocks(place)
        if sources is None:
            sources = set(place.part.sources) or {0}
        with contextlib.ExitStack() as stack:
            files = {}
            for source in sources:
                at = place if source == 0 else _base_of(place, source)
                file = self.disk.open(Path(at.file))
                files[source] = (stack.enter_context(contextlib.closing(file)), at.offset)
            yield files

    def write_seal(
        self, path: Path, header: StateHeader, memories: Sequence[memoryview], before: Path | None
    ) -> tuple[StateHeader, int]:
        """Write a seal as `write` does, except blocks that the seal `before` has already.

        Returns: the header as written, and the number of bytes of memory that were written.
        """
        base = None if before is None else self.base_before(header, before)
        if base is not None and not base.has_some(header, memories):
            base = None
        written = self._put(path, header, memories, NEVER, base)
        return written, written.bytes_from(0)

    def _put(
        self,
        path: Path,
        header: StateHeader,
        memories: Sequence[memoryview],
        cancelled: threading.Event,
        base: Base | None,
    ) -> StateHeader:
        half_written = path.with_suffix(".partial")
        try:
            self.make_directory(path.parent)
            try:
                if base is not None:
                    base.link(path)
                    sync_directory(path.parent)
                written = self._write_synced(path, header, memories, cancelled, base)
                half_written.rename(path)
            except BaseException:
                half_written.unlink(missing_ok=True)
                if base is not None:
                    self.unlink_bases(path, kept=bases_named(path))
                raise
            if base is not None:
                self.unlink_bases(path, kept={base.names[s - 1] for s in _sources(written)})
            sync_directory(path.parent)
            return written
        except OSError as error:
            raise unwritable(path, header, error) from error

    def base_before(self, header: StateHeader, before: Path) -> Base | None:
        """The blocks of the seal `before` that a file with this header can refer to; None: it can
        refer to nothing."""
        try:
            found = find_parts(before)[0].header
            files = {0: before}
            for source in _sources(found):
                file = before.with_name(found.bases[source - 1])
                if worth_referring(found, source, find_parts(file)[0].header):
                    files[source] = file
        except PhaseloomError as error:
            log.warning("%s; the next seal refers to nothing of it", error)
            return None
        base = Base(found, files)
        return base if base.is_like(header) else None

    def unlink_bases(self, path: Path, kept: set[str]) -> None:
        for link in path.parent.glob(f"{path.stem}.*{BASE_SUFFIX}"):
            if link.name not in kept:
                link.unlink(missing_ok=True)

    def remove(self, path: Path) -> None:
        """Remove a file, and the hard links that belong to it."""
        path.unlink(missing_ok=True)
        self.unlink_bases(path, kept=set())

    def discard(self, *paths: Path) -> None:
        """Remove files that nobody needs any more. A file that cannot be removed is logged, and
        does no harm."""
        for path in paths:
            try:
                self.remove(path)
            except OSError as error:
                log.warning("%s stays: %s", path, error)

    def clear(self, key: DeploymentKey) -> None:
        """Remove every state file of a deployment, readable or not."""
        directory = self._directory(key)
        if directory.is_dir():
            for path in filter(Path.is_file, directory.iterdir()):
                if any(known.match(path.name) for known in (_NAME, _DEMOTED, _BASE)):
                    self.remove(path)

    def _write_synced(
        self,
        path: Path,
        header: StateHeader,
        memories: Sequence[memoryview],
        cancelled: threading.Event,
        base: Base | None,
    ) -> StateHeader:
        half_written = path.with_suffix(".partial")
        # As long as the final header: blank checksums take as many bytes as the real ones.
        blank = [
            bytes(CHECKSUM_BYTES * num_blocks(part.num_bytes, BLOCK_BYTES)) for part in header.parts
        ]
        if base is not None:
            header = header.referring(base.names, [bytes(len(b) // CHECKSUM_BYTES) for b in blank])
        start = encode_header(header.with_blocks(BLOCK_BYTES, blank))
        offsets = part_offsets(header, len(start) - PREFIX_BYTES)
        end = offsets[-1] + header.parts[-1].num_bytes
        # Blocks that are left out take no room, and how many these are is not known yet.
        with contextlib.closing(self.disk.create(half_written, end if base is None else 0)) as file:
            if base is not None:
                # File systems write one block at a time where each makes the file longer.
                os.truncate(half_written, end)
            blocks = [
                self._write_part(file, Place(str(path), header, index, at), memory, cancelled, base)
                for index, (at, memory) in enumerate(zip(offsets, memories, strict=True))
            ]
            if base is not None:
                header = header.referring(base.names, [base.sources(*b) for b in enumerate(blocks)])
            written = header.with_blocks(BLOCK_BYTES, blocks)
            whole = encode_header(written)
            assert len(whole) == len(start)
            file.write(memoryview(whole), 0)
            file.finish(end)
        return written

    def _write_part(
        self,
        file: BlockFile,
        place: Place,
        memory: memoryview,
        cancelled: threading.Event,
        base: Base | None,
    ) -> bytes:
        part = place.part
        if base is not None and base.has_all(part, place.index):
            return base.blocks(place.index)
        blocks = self.disk.write(
            file,
            place.offset,
            memory,
            part.num_bytes,
            cancelled=cancelled,
            has=None if base is None else partial(base.has, place.index),
        )
        if part.digest and combined(blocks) != part.digest:
            raise place.loss("the host copy is not what its digest says", 0, part.num_bytes)
        return blocks

    def make_directory(self, directory: Path) -> None:
        missing = [d for d in (directory, *directory.parents) if not d.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        for made in missing:
            sync_directory(made.parent)


def _is_file(path: Path) -> bool:
    """Whether the path is a plain file: reading a pipe, for one, might never end."""
    if path.is_file():
        return True
    log.warning("left out: %s is no file", path)
    return False


def _sources(header: StateHeader) -> set[int]:
    """The numbers of the sources of a file besides the file itself."""
    return {source for part in header.parts for source in part.sources} - {0}


def bases_named(path: Path) -> set[str]:
    """The names of the links that the seal at `path` refers to; empty: it cannot be read."""
    try:
        return set(find_parts(path)[0].header.bases)
    except PhaseloomError:
        return set()


def _base_of(place: Place, source: int) -> Place:
    """The place of the same part in a file that this part refers to, by source number.

    Raises: ResourceError: DATA_LOSS: that file is bad, or another one.
    """
    path = Path(place.file).with_name(place.header.bases[source - 1])
    places = find_parts(path)
    if place.index >= len(places) or places[place.index].part.num_bytes != place.part.num_bytes:
        raise data_loss(str(path), f"it is not what {place.file} refers to")
    return places[place.index]


def unwritable(path: Path, header: StateHeader, error: OSError) -> ResourceError:
    return ResourceError(
        f"{path} cannot be written: {error.strerror}",
        code=Code.RESOURCE_EXHAUSTED if error.errno in _FULL else Code.UNAVAILABLE,
        details={"file": str(path), "num_bytes": str(header.num_bytes)},
        remedy="free space on the node's state directory",
    )


def find_parts(path: Path) -> list[Place]:
    """The parts of a state file, whose header is verified. Raises: ResourceError: DATA_LOSS."""
    if path.exists() and not path.is_file():
        raise data_loss(str(path), "it is no file")
    try:
        with path.open("rb") as file:
            prefix = file.read(PREFIX_BYTES)
            length = header_bytes(prefix, str(path))
            header = decode_header(prefix, file.read(length), str(path))
            offsets = part_offsets(header, length)
            return [Place(str(path), header, index, at) for index, at in enumerate(offsets)]
    except OSError as error:
        raise data_loss(str(path), error.strerror or repr(error)) from error


def sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
