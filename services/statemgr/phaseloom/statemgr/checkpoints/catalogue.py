"""The list of checkpoints, their descriptions, how long they are kept, and their removal.

Blocking: call it in a thread.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from phaseloom.common.contract.api import SavedCheckpoint
from phaseloom.common.contract.checkpoints import (
    CheckpointErased,
    CheckpointsFound,
    DescribeCheckpoint,
    EraseCheckpoint,
    ExpiredFound,
    FindCheckpoints,
    FindExpired,
    SetExpiry,
)
from phaseloom.common.contract.errors import CallerError, ResourceError
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
    """Answers requests about the checkpoints under the root, whichever node wrote them."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints

    def find(self, request: FindCheckpoints) -> CheckpointsFound:
        """Find a tenant's checkpoints. Raises: CallerError: a bad name."""
        for field in ("tenant", "job", "deployment"):
            if name := getattr(request, field):
                check_name(name, field)
        if self._checkpoints.root is None:
            return CheckpointsFound([])
        place = self._checkpoints.root / request.tenant
        pattern = f"{request.job or '*'}/{request.deployment or '*'}/*"
        found = []
        for directory in sorted(place.glob(pattern)):
            if all(is_name(part) for part in directory.relative_to(place).parts):
                described = _described(directory)
                found += [described] if described is not None else []
        return CheckpointsFound(found)

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
            raise ResourceError(f"{name!r} of {key} stays: {error}") from error
        if num_bytes:
            why = "has expired" if if_expired else "is removed"
            log.info("checkpoint %r of %s %s: %d bytes", name, key, why, num_bytes)
        return num_bytes

    def prune(self, rank: Rank, request: PruneCheckpoints) -> None:
        """Remove the old checkpoints of a rank's deployment.

        Raises: CallerError: `keep` is less than one. ResourceError: the disk fails.
        """
        key, keep, needed = rank.wpg.key, request.keep, set(request.needed)
        if keep < 1:
            raise CallerError(f"{keep} are to stay", field="keep", remedy="keep one or more")
        try:
            gone = self._checkpoints.prune(key, keep, needed)
        except OSError as error:
            raise ResourceError(f"old checkpoints of {key} stay: {error}") from error
        if gone:
            log.info("checkpoints of %s that nobody needs are gone: %s", key, ", ".join(gone))

    def find_expired(self, _: FindExpired) -> ExpiredFound:
        expired = self._checkpoints.expired()
        return ExpiredFound([DescribeCheckpoint(key, name) for key, name in expired])


def files_of(directory: Path) -> Iterator[Path]:
    """The files of a checkpoint, sorted, without links to files elsewhere. Raises: OSError."""
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
    """The description of a checkpoint; None: the directory is none, or not any more. Blocking."""
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
    )
