"""Verify a registered model's files on this node before ranks read them.

Each file is hashed once per identity (device, inode, size, times). The process caches
the digests, so an unchanged file is not read again for the next deployment.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.specs import ModelDirectory, ModelFile
from phaseloom.common.tensors.modelfiles import file_blake3

_Identity = tuple[int, int, int, int, int]


class ModelFiles:
    def __init__(self, node: str) -> None:
        self._node = node
        self._digests: dict[Path, tuple[_Identity, str]] = {}
        self._hashing = asyncio.Lock()
        """Held while files are hashed, so that deployments that start together hash each file
        once."""

    async def verify(self, name: str, directory: ModelDirectory) -> None:
        """Check that a model's files on this node match their registration.

        Args:   name: the model's name.
        Raises: CallerError: NOT_FOUND: the directory or a file is missing. ResourceError:
                 DATA_LOSS: a file
                has changed; UNAVAILABLE: the disk fails.
        """
        async with self._hashing:
            for file in directory.files:
                await asyncio.to_thread(self._verify, name, Path(directory.path), file)

    def _verify(self, name: str, directory: Path, file: ModelFile) -> None:
        path = directory / file.name
        try:
            digest = self._digest(path)
        except (FileNotFoundError, NotADirectoryError):
            raise CallerError(
                f"node {self._node} has no {path}, which belongs to the registered model {name!r}",
                code=Code.NOT_FOUND,
                field="model.registered",
                remedy="put the model's directory at the same path on every node of the pool",
            ) from None
        except OSError as error:
            raise ResourceError(
                f"node {self._node} cannot read {path} of the registered model {name!r}: "
                f"{error.strerror or error!r}",
                field="model.registered",
                remedy="make the file readable for the worker",
            ) from error
        if digest != file.blake3:
            raise ResourceError(
                f"{path} on node {self._node} differs from the file registered for "
                f"the model {name!r}",
                code=Code.DATA_LOSS,
                field="model.registered",
                remedy="restore the file, or register the directory under another name",
            )

    def _digest(self, path: Path) -> str:
        status = os.stat(path)
        # A program can set the modification time back, but not the time of change.
        times = (status.st_mtime_ns, status.st_ctime_ns)
        identity = (status.st_dev, status.st_ino, status.st_size, *times)
        cached = self._digests.get(path)
        if cached is not None and cached[0] == identity:
            return cached[1]
        digest = file_blake3(path)
        self._digests[path] = (identity, digest)
        return digest
