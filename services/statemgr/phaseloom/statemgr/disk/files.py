"""Seals, persisted weights versions and demoted host copies on disk. Blocking: call it in a thread.

Files are in `<directory>/<tenant>/<job>/<deployment>/`: `seal-<seq>.state` and
`version-<seq>.state` (for a part `version-<seq>-2of4.state`). Host copies, which may belong to
several tenants, are in `<directory>/.copies/`. A file appears under its name whole and fsynced, or
not at all. A crash may leave a half-written `.partial`, which the next start removes.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from phaseloom.common.contract.errors import Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import DeploymentKey, VersionKey, check_key
from phaseloom.common.contract.state_agent import DiskMethod
from phaseloom.common.tensors.blockfile import FULL, BlockFile
from phaseloom.common.tensors.versionparts import check_part
from phaseloom.statemgr.disk.disk import (
    PROBE_PREFIX,
    BlockOf,
    Disk,
    read_block,
    read_part,
    write_state,
)
from phaseloom.statemgr.disk.statefile import layout_of, parts_in
from phaseloom.statemgr.records.stateheader import SectionRef, StateHeader, data_loss

log = logging.getLogger(__name__)

_NAME = re.compile(r"(seal|version)-([1-9][0-9]{0,17})(-[0-9]+of[0-9]+)?\.state\Z")
_COPIES = ".copies"
"""Directory of demoted host copies; no tenant can have this name."""
NEVER = threading.Event()
"""For a move that nobody cancels: this event is never set."""


class StateDirectory:
    """Names files safely under one root, and reads and writes them."""

    def __init__(self, root: Path, preferred: DiskMethod = DiskMethod.DIRECT) -> None:
        self._root = root
        self.disk = Disk(root, preferred)

    def seal(self, key: DeploymentKey, seq: int) -> Path:
        return self._path("seal", key, seq)

    def version(self, key: VersionKey) -> Path:
        """The file of a whole version, of its manifest, or of a part."""
        part = check_part(key.part, "version.part") if key.part else ""
        return self._path("version", key.policy, key.seq, part)

    def parts(self, key: VersionKey) -> list[str]:
        """The names of the parts of a version that are on this disk."""
        pattern = f"version-{key.seq:d}-*of*.state"
        matches = [_NAME.match(path.name) for path in self._directory(key.policy).glob(pattern)]
        return sorted(name[3].removeprefix("-") for name in matches if name)

    def host_copy(self, number: int) -> Path:
        return self._root / _COPIES / f"copy-{number:d}.state"

    def host_copies(self) -> set[Path]:
        """The whole files of host copies on this disk, whichever daemon wrote them."""
        return {p for p in (self._root / _COPIES).glob("copy-*.state") if p.is_file()}

    def _path(self, kind: str, key: DeploymentKey, seq: int, part: str = "") -> Path:
        return self._directory(key) / f"{kind}-{seq:d}{'-' if part else ''}{part}.state"

    def _directory(self, key: DeploymentKey) -> Path:
        """Raises: CallerError: a name is not a plain file name."""
        check_key(key)
        return self._root / key.tenant / key.job / key.deployment

    def scan(self) -> Iterator[tuple[Path, StateHeader]]:
        """Remove leftovers of a crash, then yield every readable seal and version with its header.
        Unreadable files, and paths that are not regular files, are left alone and logged."""
        self._clear_leftovers()
        for path in sorted(self._root.glob("*/*/*/*.state")):
            if not _NAME.match(path.name) or not _is_file(path):
                continue
            try:
                header = find_parts(path)[0].header
                if path != self._path(header.kind, header.deployment, header.seq, header.part):
                    raise data_loss(str(path), "its header names another file")
            except PhaseloomError as error:
                log.warning("ignoring a state file: %s", error)
                continue
            yield path, header

    def _clear_leftovers(self) -> None:
        for pattern in ("*/*/*/*.partial", f"{_COPIES}/*.partial"):
            for half_written in filter(_is_file, self._root.glob(pattern)):
                half_written.unlink()
        for probe in self._root.glob(f"{PROBE_PREFIX}*"):
            if probe.is_dir():
                shutil.rmtree(probe)
            else:
                log.warning("ignoring %s: it is not a directory", probe)
        # Safe here: no writer exists yet that could be about to use one.
        for depth in ("*/*/*", "*/*", "*"):
            for directory in self._root.glob(f"{depth}/"):
                with contextlib.suppress(OSError):
                    directory.rmdir()

    def write(
        self,
        path: Path,
        header: StateHeader,
        memories: Sequence[memoryview | BlockOf],
        cancelled: threading.Event = NEVER,
    ) -> StateHeader:
        """Write a file, whole and fsynced.

        Args:    header: if it has a digest for a part, the part's memory must match it.
                 memories: the memory of each of the header's parts, or its blocks in another file.
        Returns: the header as written, with the digests of the written memory.
        Raises:  ResourceError: RESOURCE_EXHAUSTED: the disk is full; DATA_LOSS: the memory does not
                 match the header's digest; UNAVAILABLE: the disk fails otherwise; ABORTED:
                 cancelled. After an error an earlier file of this name is unchanged.
        """
        draft = Draft(self, path, header)
        try:
            written = write_state(draft, str(path), header, memories, cancelled)
            draft.finish()
        except BaseException:
            draft.abandon()
            raise
        return written

    def read(
        self, place: SectionRef, memory: memoryview, cancelled: threading.Event = NEVER
    ) -> None:
        """Fill `memory` with a part of a file, verified.

        Raises: ResourceError: DATA_LOSS, with the position; ABORTED: cancelled.
        """
        with self._opened(place) as file:
            read_part(file, place, memory, cancelled)

    def blocks_of(self, place: SectionRef) -> BlockOf:
        """The verified blocks of a part of a file, for `write`."""

        def block(start: int, end: int) -> memoryview:
            memory = memoryview(mmap.mmap(-1, end - start))
            self.read_block(place, start // place.header.block_bytes, memory)
            return memory

        return block

    def read_block(self, place: SectionRef, block: int, memory: memoryview) -> int:
        """Fill the beginning of `memory` with one verified block of a part.

        Returns: the block's size.
        """
        with self._opened(place) as file:
            return read_block(file, place, block, memory)

    @contextlib.contextmanager
    def _opened(self, place: SectionRef) -> Iterator[BlockFile]:
        try:
            with contextlib.closing(self.disk.open(Path(place.file))) as file:
                yield file
        except OSError as error:
            raise data_loss(place.file, error.strerror or repr(error)) from error

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def discard(self, *paths: Path) -> None:
        """Remove files that nobody needs. A file that cannot be removed is logged and is
        harmless."""
        for path in paths:
            try:
                self.remove(path)
            except OSError as error:
                log.warning("%s cannot be removed: %s", path, error)

    def clear(self, key: DeploymentKey) -> None:
        """Remove every state file of a deployment, readable or not."""
        directory = self._directory(key)
        if directory.is_dir():
            for path in filter(Path.is_file, directory.iterdir()):
                if _NAME.match(path.name):
                    self.remove(path)


class Draft:
    """A state file under a temporary name. Blocking: call it in a thread.

    The caller writes all of it and calls `finish`, or calls `abandon`. All methods but `abandon`
    raise ResourceError: RESOURCE_EXHAUSTED: the disk is full; UNAVAILABLE: it fails.
    """

    def __init__(self, directory: StateDirectory, path: Path, header: StateHeader) -> None:
        """Create the file and reserve its space."""
        self.offsets, self._end = layout_of(header)
        """`offsets` are those at which the parts begin."""
        self._path = path
        self._partial = path.with_suffix(".partial")
        self._header = header
        self._file: BlockFile | None = None
        try:
            with self._typed():
                make_directory(path.parent)
                self._file = directory.disk.create(self._partial, self._end)
        except ResourceError:
            self.abandon()
            raise

    def duplicate(self) -> int:
        """A descriptor of the file, for a process that fills a part. The caller closes it."""
        with self._typed():
            return os.open(self._partial, os.O_RDWR | os.O_CLOEXEC)

    def write(self, block: memoryview, offset: int) -> None:
        assert self._file is not None
        with self._typed():
            self._file.write(block, offset)

    def finish(self) -> None:
        """Give the whole file its name, replacing an earlier file."""
        assert self._file is not None
        with self._typed():
            self._file.finish(self._end)
            self._close()
            self._partial.rename(self._path)
            sync_directory(self._path.parent)

    def abandon(self) -> None:
        self._close()
        with contextlib.suppress(OSError):
            self._partial.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def _typed(self) -> AbstractContextManager[None]:
        details = {"file": self._path, "num_bytes": self._header.num_bytes}
        remedy = "free space on the node's state directory"
        return writing(str(self._path), remedy, remedy, details)


def _is_file(path: Path) -> bool:
    """Whether the path is a plain file. Reading a pipe, for example, might never end."""
    if path.is_file():
        return True
    log.warning("ignoring %s: it is not a plain file", path)
    return False


@contextlib.contextmanager
def writing(
    label: str, if_full: str, if_not: str, details: Mapping[str, object] | None = None
) -> Iterator[None]:
    """Convert an OSError of a write into a typed error.

    Args:   if_full, if_not: the remedies if the disk is full, and if it fails otherwise.
    Raises: ResourceError: RESOURCE_EXHAUSTED: the disk is full; UNAVAILABLE: it fails otherwise.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        is_full = error.errno in FULL
        path = f"{error.filename}: " if error.filename else ""
        raise ResourceError(
            f"{label} cannot be written: {path}{reason}",
            code=Code.RESOURCE_EXHAUSTED if is_full else Code.UNAVAILABLE,
            details=details,
            remedy=if_full if is_full else if_not,
        ) from error


def find_parts(path: Path) -> list[SectionRef]:
    """The parts of a state file, whose header is verified. Raises: ResourceError: DATA_LOSS."""
    if path.exists() and not path.is_file():
        raise data_loss(str(path), "it is not a plain file")
    try:
        with path.open("rb") as file:

            def read(offset: int, num_bytes: int) -> bytes:
                file.seek(offset)
                return file.read(num_bytes)

            return parts_in(read, str(path))
    except OSError as error:
        raise data_loss(str(path), error.strerror or repr(error)) from error


def header_of(path: Path) -> StateHeader | None:
    """The header of a state file; None: there is no file, or its header is bad."""
    try:
        return find_parts(path)[0].header
    except PhaseloomError:
        return None


def make_directory(directory: Path) -> None:
    """Make a directory and its parents, each fsynced. The target of a dangling link on the way is
    created. Raises: OSError."""
    directory = directory.resolve()
    missing = [d for d in (directory, *directory.parents) if not d.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for parent in missing:
        sync_directory(parent.parent)


def sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
