"""Checkpoints on disk: a directory appears whole, and says which operation wrote it.

`<root>/<tenant>/<job>/<deployment>/<name>`. A rank may die after the rename and before its outcome
is stored; the operation then runs again, finds its own work done and answers the same.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec

from phaseloom.common.errors import CallerError, Code
from phaseloom.common.ids import DeploymentKey, check_name
from phaseloom.common.messages import SaveStateResult

MARKER_FILE = "operation.json"


class Marker(msgspec.Struct, frozen=True):
    """Who wrote a checkpoint, and what it was answered."""

    operation_id: str
    result: SaveStateResult


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Those of one deployment."""

    root: Path
    deployment: DeploymentKey

    def directory(self, name: str) -> Path:
        key = self.deployment
        return self.root / key.tenant / key.job / key.deployment / name

    def draft(self, name: str) -> Path:
        """Where ranks write it before it has its name."""
        return self.directory(name).with_name(f".{name}.draft")

    def existing(self, name: str) -> Path:
        """Raises: CallerError: NOT_FOUND, or no name."""
        directory = self.directory(check_name(name, "args.name"))
        if not directory.is_dir():
            raise CallerError(
                f"checkpoint {name!r} does not exist",
                code=Code.NOT_FOUND,
                field="args.name",
                remedy="name one that save_state has written",
            )
        return directory

    def written_by(self, operation_id: str, name: str) -> SaveStateResult | None:
        """What this operation was answered when it wrote the checkpoint; None: it has yet to.

        Raises: CallerError: ALREADY_EXISTS, another wrote it; or no name.
        """
        directory = self.directory(check_name(name, "args.name"))
        if not directory.exists():
            return None
        try:
            marker = msgspec.json.decode((directory / MARKER_FILE).read_bytes(), type=Marker)
        except (OSError, msgspec.DecodeError):
            marker = None
        if marker is None or marker.operation_id != operation_id:
            raise CallerError(
                f"checkpoint {name!r} exists",
                code=Code.ALREADY_EXISTS,
                field="args.name",
                remedy="choose another name",
            )
        return marker.result

    def begin(self, name: str) -> None:
        """Make an empty draft; what a rank that died left of one goes."""
        draft = self.draft(name)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)

    def commit(self, name: str, operation_id: str, weights_sha256: str) -> SaveStateResult:
        """Give the draft its name, once every byte of it is on disk."""
        key, draft = self.deployment, self.draft(name)
        result = SaveStateResult(f"{key.job}/{key.deployment}/{name}", weights_sha256)
        marker = msgspec.json.encode(Marker(operation_id, result))
        (draft / MARKER_FILE).write_bytes(marker)
        for path in [*draft.iterdir(), draft]:
            _sync(path)
        draft.rename(self.directory(name))
        _sync(draft.parent)
        return result


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
