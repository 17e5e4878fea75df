"""Pins: a deployment can read again what it has loaded, even if the checkpoint is gone.

A rebuild may have to repeat a `load_state` with the same bits after the checkpoint was deleted,
overwritten or has expired. So each load links the checkpoint's files in a directory of its own,
`<root>/<tenant>/<job>/.<deployment>.loaded/<number>-<load>/<name>`. A rebuild starts at the newest
load that took effect. The two newest pins are kept, because the newest load may still fail. Links
use no space; the bytes of a deleted checkpoint are freed with the last pin.

All functions are blocking: call them in a thread.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.statemgr.checkpoints.files import EXPIRY_FILE, Checkpoints, not_found
from phaseloom.statemgr.disk.files import make_directory, sync_directory

log = logging.getLogger(__name__)

_NUM_KEPT = 2
_LOAD_DIGITS = 16


class Pin(NamedTuple):
    directory: Path
    """The directory to read."""
    is_new: bool
    """Whether this call has pinned the files."""


def pin(
    checkpoints: Checkpoints, loader: DeploymentKey, saved: DeploymentKey, name: str, load: str
) -> Pin:
    """Pin a checkpoint for a load. The same load always gets the same files.

    If links cannot be made, because of the file system or because the files are links themselves,
    the checkpoint is read in place.

    Args:   loader: the deployment that loads.
            saved: the deployment that saved.
            load: the name of the load.
    Raises: CallerError: NOT_FOUND; a bad name.
    """
    directory = checkpoints.directory(saved, name)
    place = _place(checkpoints, loader)
    digits = blake3(load.encode()).hexdigest()[:_LOAD_DIGITS]
    try:
        with checkpoints.locked(loader, *([saved] if directory.parent.is_dir() else [])):
            pins = _pins(place)
            for path in pins:
                if path.name.endswith(f"-{digits}"):
                    return Pin(path / name, is_new=False)
            if not directory.is_dir():
                raise not_found(name)
            number = 1 + (_number(pins[-1]) if pins else 0)
            pinned = place / f"{number}-{digits}"
            _link(directory, place / f"{number}-{digits}.{checkpoints.node}.draft", pinned, name)
            return Pin(pinned / name, is_new=True)
    except OSError as error:
        log.warning(
            "%s is loaded in place and must not be removed, because it cannot be linked: %s",
            directory,
            error,
        )
        if not directory.is_dir():
            raise not_found(name) from error
        return Pin(directory, is_new=False)


def prune(checkpoints: Checkpoints, loader: DeploymentKey) -> None:
    """Drop all pins but the newest ones, after a load that took effect."""
    for old in _pins(_place(checkpoints, loader))[:-_NUM_KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def unpin(pinned: Pin) -> None:
    """Drop the pin of a load that was refused, if it is new."""
    if pinned.is_new:
        shutil.rmtree(pinned.directory.parent, ignore_errors=True)


def forget(checkpoints: Checkpoints, loader: DeploymentKey) -> None:
    """Drop the pins of a deployment that has ended."""
    if checkpoints.root is not None:
        shutil.rmtree(_place(checkpoints, loader), ignore_errors=True)


def _place(checkpoints: Checkpoints, loader: DeploymentKey) -> Path:
    deployment = checkpoints.directory(loader, "any").parent
    return deployment.with_name(f".{deployment.name}.loaded")


def _pins(place: Path) -> list[Path]:
    paths = [path for path in place.glob("*-*") if "." not in path.name]
    return sorted(paths, key=_number)


def _number(path: Path) -> int:
    return int(path.name.partition("-")[0])


def _link(directory: Path, draft: Path, pinned: Path, name: str) -> None:
    """Raises: OSError: a file is no plain file, or cannot be linked."""
    shutil.rmtree(draft, ignore_errors=True)
    make_directory(draft / name)
    try:
        for path in directory.iterdir():
            if path.name != EXPIRY_FILE and not path.is_dir():
                if path.is_symlink():
                    raise OSError(f"{path} is a link")
                os.link(path, draft / name / path.name)
        sync_directory(draft / name)
        sync_directory(draft)
        draft.rename(pinned)
        sync_directory(pinned.parent)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        raise
