"""Checkpoints on disk: directories that appear whole, and record which operation wrote them.

A checkpoint is the directory `<root>/<tenant>/<job>/<deployment>/<name>`. While it is being written
it is a draft, `.<name>.<node>.draft`, because other nodes may have the same root. If the daemon
dies between the rename and its answer, the operation is delivered again, finds its work done and
gets the same answer. Code that removes a name, or needs all files under it, holds the deployment's
lock, `<root>/<tenant>/<job>/.<deployment>.lock`.

Pins let a deployment read again what it has loaded, even if the checkpoint is gone. A rebuild may
have to repeat a `load_state` with the same bits after the checkpoint was deleted, overwritten or
has expired. So each load links the checkpoint's files in a directory of its own,
`<root>/<tenant>/<job>/.<deployment>.loaded/<number>-<load>/<name>`. A rebuild starts at the newest
load that took effect. The two newest pins are kept, because the newest load may still fail. Links
use no space; the bytes of a deleted checkpoint are freed with the last pin.

A program may overwrite a file in place, and a link would then show the new bytes. Files that
`save_state` wrote have checksums, so a rebuild reports the change as DATA_LOSS. Files of other
programs have none, so they are copied. The copy shares their blocks if the file system can.

Blocking: call it in a thread, so that file, fsync and rename are not interleaved with other work.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.ids import (
    DeploymentKey,
    NodeId,
    check_key,
    check_name,
    is_name,
)
from phaseloom.statemgr.checkpoints.marker import MARKER_FILE, Marker, decode_marker, superseded
from phaseloom.statemgr.disk import files
from phaseloom.statemgr.disk.files import sync_directory

log = logging.getLogger(__name__)

_NUM_PINS = 2
_STAT_BLOCK_BYTES = 512
_LOAD_DIGITS = 16
EXPIRY_FILE = "expires"
"""Has the time at which a checkpoint expires, in Unix seconds. Without it the checkpoint is
kept."""
_REPLACED, _GONE = "replaced", "gone"
"""Why a directory is renamed."""
_COPY_BYTES = 2**24
_CANNOT_SHARE = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
"""Errors of file systems between which the kernel does not copy by itself."""
_TAKEN = {errno.EEXIST, errno.ENOTEMPTY}


class Pin(NamedTuple):
    directory: Path
    """The directory to read."""
    is_new: bool
    """Whether this call has pinned the files."""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    root: Path | None
    """The directory of all checkpoints; None: not configured."""
    node: NodeId

    def directory(self, key: DeploymentKey, name: str) -> Path:
        """The directory of a checkpoint. Raises: CallerError: a bad name, or there is no root."""
        if self.root is None:
            raise CallerError(
                "this node has no directory for checkpoints",
                code=Code.FAILED_PRECONDITION,
                remedy="configure the state manager's checkpoint_root",
            )
        check_key(key)
        place = self.root / key.tenant / key.job / key.deployment
        return place / check_name(name, "args.name")

    def existing(self, key: DeploymentKey, name: str) -> Path:
        """The directory of an existing checkpoint. Raises: CallerError: NOT_FOUND; a bad name."""
        directory = self.directory(key, name)
        if not directory.is_dir():
            raise not_found(name)
        return directory

    def written_by(
        self, operation: str, key: DeploymentKey, name: str, *, overwrite: bool = False
    ) -> Marker | None:
        """The marker of a checkpoint that this operation wrote; None: the name is available.

        Args:   overwrite: whether the name of another operation's checkpoint is available.
        Raises: CallerError: ALREADY_EXISTS: another operation wrote the checkpoint; a bad name.
        """
        directory = self.directory(key, name)
        if not directory.exists():
            return None
        marker = readable_marker(directory)
        if marker is not None and marker.operation_id == operation:
            return marker
        if not overwrite:
            raise name_taken(name)
        return None

    def begin(self, key: DeploymentKey, name: str) -> Path:
        """Make an empty draft, replacing an earlier one."""
        draft = self._draft(key, name)
        with writing():
            shutil.rmtree(draft, ignore_errors=True)
            files.make_directory(draft)
        return draft

    def commit(
        self,
        key: DeploymentKey,
        name: str,
        marker: Marker,
        *,
        ttl_s: float = 0.0,
        overwrite: bool = False,
    ) -> None:
        """Give a draft the name of its checkpoint. The files are on disk already, each fsynced.

        If the daemon is killed before the new checkpoint has its name, the old one gets it back.

        Args:   ttl_s, overwrite: see `SaveState`.
        Raises: CallerError: ALREADY_EXISTS: a checkpoint has the name. ResourceError: the disk is
                full, or fails.
        """
        draft, directory = self._draft(key, name), self.directory(key, name)
        replaced = self._draft(key, name, _REPLACED)
        with writing():
            write_synced(draft / MARKER_FILE, marker.encode())
            if ttl_s:
                write_synced(draft / EXPIRY_FILE, f"{time.time() + ttl_s:.3f}\n".encode())
            sync_directory(draft)
            if overwrite:
                with self.locked(key):
                    shutil.rmtree(replaced, ignore_errors=True)
                    with suppress(FileNotFoundError):
                        directory.rename(replaced)
                    try:
                        draft.rename(directory)
                    except OSError:
                        with suppress(FileNotFoundError):
                            replaced.rename(directory)
                        raise
            else:
                try:
                    draft.rename(directory)
                except OSError as error:
                    if error.errno in _TAKEN:
                        raise name_taken(name) from error
                    raise
            sync_directory(directory.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    def drop(self, key: DeploymentKey, name: str) -> None:
        """Remove the draft of a checkpoint."""
        shutil.rmtree(self._draft(key, name), ignore_errors=True)

    def next_number(self, key: DeploymentKey) -> int:
        """The number of the deployment's next checkpoint. Raises: OSError."""
        return 1 + max((marker.number for _, marker in self._markers(key)), default=0)

    def prune(self, key: DeploymentKey, keep: int, needed: set[str]) -> list[str]:
        """Remove old checkpoints, except the newest `keep` of those that may be removed, and the
        needed ones.

        Returns: the removed names.
        Raises:  OSError.
        """
        removed = superseded(self._markers(key), keep, needed)
        for name in removed:
            self.remove(key, name)
        return removed

    def remove(self, key: DeploymentKey, name: str, *, if_expired: bool = False) -> int:
        """Remove a checkpoint. It loses its name first, so that it is never loaded in part.

        Args:    if_expired: remove it only if its time to live has passed.
        Returns: the bytes of its files; 0: there was none.
        Raises:  CallerError: a bad name. OSError.
        """
        directory, nameless = self.directory(key, name), self._draft(key, name, _GONE)
        if not directory.is_dir():
            return 0
        with self.locked(key):
            if not directory.is_dir() or (if_expired and not is_expired(directory)):
                return 0
            shutil.rmtree(nameless, ignore_errors=True)
            directory.rename(nameless)
            sync_directory(nameless.parent)
        num_bytes = sum(path.stat().st_size for path in nameless.rglob("*") if path.is_file())
        shutil.rmtree(nameless, ignore_errors=True)
        return num_bytes

    def set_expiry(self, key: DeploymentKey, name: str, ttl_s: float) -> None:
        """Keep a checkpoint for `ttl_s` seconds from now; 0: until it is deleted.

        Raises: CallerError: NOT_FOUND; a bad name. ResourceError: the disk is full, or fails.
        """
        directory = self.directory(key, name)
        with writing(), self.locked_if_there(key, name):
            if ttl_s:
                draft = directory / f".{EXPIRY_FILE}"
                write_synced(draft, f"{time.time() + ttl_s:.3f}\n".encode())
                draft.rename(directory / EXPIRY_FILE)
            else:
                (directory / EXPIRY_FILE).unlink(missing_ok=True)
            sync_directory(directory)

    def expired(self) -> list[tuple[DeploymentKey, str]]:
        """The checkpoints whose time to live has passed."""
        expired = []
        for path in self.root.glob(f"*/*/*/*/{EXPIRY_FILE}") if self.root is not None else ():
            *_, tenant, job, deployment, name = path.parent.parts
            if all(map(is_name, (tenant, job, deployment, name))) and is_expired(path.parent):
                expired.append((DeploymentKey(tenant, job, deployment), name))
        return expired

    @contextmanager
    def locked_if_there(self, key: DeploymentKey, name: str) -> Iterator[None]:
        """Lock the deployment so that this checkpoint cannot be renamed or removed.

        Raises: CallerError: NOT_FOUND; a bad name. OSError.
        """
        directory = self.directory(key, name)
        if directory.parent.is_dir():
            with self.locked(key):
                if directory.is_dir():
                    yield
                    return
        raise not_found(name)

    @contextmanager
    def locked(self, *keys: DeploymentKey) -> Iterator[None]:
        """Lock deployments against all nodes, so that none of their checkpoints is renamed or
        removed. Blocking. Raises: OSError."""
        with ExitStack() as locks:
            for key in sorted({*keys}):
                path = self.directory(key, "any").parent
                files.make_directory(path.parent)
                fd = os.open(
                    path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                )
                locks.callback(os.close, fd)
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield

    # --- pins ---

    def pin(self, loader: DeploymentKey, saved: DeploymentKey, name: str, load: str) -> Pin:
        """Pin a checkpoint for a load. The same load always gets the same files.

        If a checkpoint with checksums can neither be linked nor copied, it is read in place.

        Args:   loader: the deployment that loads.
                saved: the deployment that saved.
                load: the name of the load.
        Raises: CallerError: NOT_FOUND; a bad name. ResourceError: files of another program cannot
                be copied, or change meanwhile.
        """
        directory = self.directory(saved, name)
        place = self._pin_root(loader)
        digits = blake3(load.encode()).hexdigest()[:_LOAD_DIGITS]
        try:
            with self.locked(loader, *([saved] if directory.parent.is_dir() else [])):
                pins = _pins(place)
                for path in pins:
                    if path.name.endswith(f"-{digits}"):
                        return Pin(path / name, is_new=False)
                if not directory.is_dir():
                    raise not_found(name)
                number = 1 + (_number(pins[-1]) if pins else 0)
                pinned = place / f"{number}-{digits}"
                _keep_files(directory, place / f"{number}-{digits}.{self.node}.draft", pinned, name)
                return Pin(pinned / name, is_new=True)
        except OSError as error:
            if not directory.is_dir():
                raise not_found(name) from error
            if not (directory / MARKER_FILE).exists():
                with writing():
                    raise
            log.warning(
                "%s is loaded in place and must not be removed, because it cannot be linked: %s",
                directory,
                error,
            )
            return Pin(directory, is_new=False)

    def prune_pins(self, loader: DeploymentKey) -> None:
        """Drop all pins but the newest ones, after a load that took effect."""
        for old in _pins(self._pin_root(loader))[:-_NUM_PINS]:
            shutil.rmtree(old, ignore_errors=True)

    def forget_pins(self, loader: DeploymentKey) -> None:
        """Drop the pins of a deployment that has ended."""
        if self.root is not None:
            shutil.rmtree(self._pin_root(loader), ignore_errors=True)

    def _pin_root(self, loader: DeploymentKey) -> Path:
        deployment = self.directory(loader, "any").parent
        return deployment.with_name(f".{deployment.name}.loaded")

    # --- housekeeping ---

    def num_bytes(self, tenant: str) -> int:
        """Return the disk space of a tenant's checkpoints, with linked files once, and without
        what this node is writing."""
        assert self.root is not None
        writing = f".{self.node}.draft", f".{self.node}.part"
        sizes: dict[tuple[int, int], int] = {}
        for directory, subdirectories, names in os.walk(self.root / tenant):
            subdirectories[:] = [name for name in subdirectories if not name.endswith(writing)]
            for name in names:
                with suppress(FileNotFoundError):  # it has just been removed
                    found = os.lstat(os.path.join(directory, name))
                    if not name.endswith(writing):
                        sizes[found.st_dev, found.st_ino] = found.st_blocks * _STAT_BLOCK_BYTES
        return sum(sizes.values())

    def sweep(self) -> None:
        """Remove the drafts that an earlier daemon of this node left. A checkpoint that was being
        replaced gets its name back, unless the new one has it."""
        if self.root is None:
            return
        for draft in self.root.glob(f"*/*/*/.*.{self.node}.draft"):
            _, name, *reason, _, _ = draft.name.split(".")
            if reason == [_REPLACED]:
                with suppress(OSError):  # the new one has the name
                    draft.rename(draft.with_name(name))
            shutil.rmtree(draft, ignore_errors=True)
        for draft in self.root.glob(f"*/*/.*.loaded/*.{self.node}.draft"):
            shutil.rmtree(draft, ignore_errors=True)

    def _draft(self, key: DeploymentKey, name: str, reason: str = "") -> Path:
        """The path of a nameless directory. Args: reason: why it lost its name; empty: it has none
        yet."""
        stem = f"{name}.{reason}" if reason else name
        return self.directory(key, name).with_name(f".{stem}.{self.node}.draft")

    def _markers(self, key: DeploymentKey) -> list[tuple[str, Marker]]:
        named = sorted(self.directory(key, "any").parent.glob("[!.]*"))
        markers = [(directory.name, readable_marker(directory)) for directory in named]
        return [(name, marker) for name, marker in markers if marker is not None]


def marker_of(directory: Path) -> Marker | None:
    """The marker of a checkpoint, if any. Raises: OSError; ValueError: a bad marker."""
    try:
        return decode_marker((directory / MARKER_FILE).read_bytes())
    except FileNotFoundError:
        return None


def readable_marker(directory: Path) -> Marker | None:
    """The marker of a checkpoint; None: there is none, or it cannot be read."""
    try:
        return marker_of(directory)
    except (OSError, ValueError):
        return None


def expiry_of(directory: Path) -> float | None:
    """The time at which a checkpoint expires, in Unix seconds; None: it is kept."""
    try:
        return float((directory / EXPIRY_FILE).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("%s is kept because its expiry cannot be read: %s", directory, error)
        return None


def is_expired(directory: Path) -> bool:
    at_s = expiry_of(directory)
    return at_s is not None and at_s <= time.time()


def not_found(name: str) -> CallerError:
    return CallerError(
        f"checkpoint {name!r} does not exist",
        code=Code.NOT_FOUND,
        field="args.name",
        remedy="name one that `phaseloom checkpoint list` shows",
    )


def name_taken(name: str) -> CallerError:
    return CallerError(
        f"checkpoint {name!r} exists",
        code=Code.ALREADY_EXISTS,
        field="args.name",
        remedy="choose another name, or save with overwrite",
    )


def writing() -> AbstractContextManager[None]:
    """Convert an OSError of a write into a typed error. Raises: as `disk.files.writing`."""
    return files.writing(
        "the checkpoint",
        "free space under the checkpoint root, or save with a `keep`",
        "let checkpoint_root be a directory that the state manager may write",
    )


def write_synced(path: Path, content: bytes) -> None:
    """Write a small file and fsync it. Raises: OSError."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def unpin(pinned: Pin) -> None:
    """Drop the pin of a load that was refused, if it is new."""
    if pinned.is_new:
        shutil.rmtree(pinned.directory.parent, ignore_errors=True)


def _pins(place: Path) -> list[Path]:
    paths = [path for path in place.glob("*-*") if "." not in path.name]
    return sorted(paths, key=_number)


def _number(path: Path) -> int:
    return int(path.name.partition("-")[0])


def _keep_files(directory: Path, draft: Path, pinned: Path, name: str) -> None:
    """Link a checkpoint's files, or copy those that must not or cannot be linked.

    Raises: OSError: a file can neither be linked nor copied. ResourceError: it changes meanwhile.
    """
    has_checksums = (directory / MARKER_FILE).exists()
    shutil.rmtree(draft, ignore_errors=True)
    files.make_directory(draft / name)
    try:
        for path in directory.iterdir():
            if path.name == EXPIRY_FILE or not path.is_file():
                continue
            target = draft / name / path.name
            if has_checksums and not path.is_symlink():
                with suppress(OSError):  # the file system has no links
                    os.link(path, target)
            if not target.exists():
                _copy(path, target)
        sync_directory(draft / name)
        sync_directory(draft)
        draft.rename(pinned)
        sync_directory(pinned.parent)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _copy(path: Path, target: Path) -> None:
    """Copy a file. Raises: OSError; ResourceError: it changes meanwhile."""
    with path.open("rb") as source, target.open("xb") as copy:
        before = _identity(source.fileno())
        try:
            while os.copy_file_range(source.fileno(), copy.fileno(), _COPY_BYTES):
                pass
        except OSError as error:
            if error.errno not in _CANNOT_SHARE or copy.tell():
                raise
            shutil.copyfileobj(source, copy, _COPY_BYTES)
        copy.flush()
        os.fsync(copy.fileno())
        if _identity(source.fileno()) != before:
            raise ResourceError(
                f"{path} changed while it was read",
                field="args.name",
                remedy="load the checkpoint once it is complete",
            )


def _identity(fd: int) -> tuple[int, int, int]:
    status = os.fstat(fd)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns
