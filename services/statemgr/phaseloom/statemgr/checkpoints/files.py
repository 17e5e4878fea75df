"""Checkpoints on disk: a directory appears whole, and says which operation wrote it.

A *marker* beside the tensors has that operation, and the checksums of the files.

A checkpoint is the directory `<root>/<tenant>/<job>/<deployment>/<name>`. While it is being written
it is a draft, `.<name>.<node>.draft`: other nodes may have the same root. The daemon may die after
the rename and before it answers; the operation then comes again, finds its own work done and gets
the same answer.

Methods that only read are asynchronous. Methods that write are blocking, to be called in a thread,
so that nothing else comes between a file, its fsync and the rename.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import aiofiles
import aiofiles.os
import msgspec
import xxhash

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.ids import DeploymentKey, NodeId, check_key, check_name
from phaseloom.common.contract.operations import SaveStateResult
from phaseloom.common.tensors.blockhash import CHECKSUM_BYTES
from phaseloom.statemgr.disk import files
from phaseloom.statemgr.disk.files import sync_directory

MARKER_FILE = "operation.json"
BLOCK_BYTES = 1024 * 1024
_FIELD = b',"checksum":"'
_TAKEN = {errno.EEXIST, errno.ENOTEMPTY}


class FileSums(msgspec.Struct, frozen=True):
    num_bytes: int
    block_bytes: int
    blocks: str
    """The xxh3-64 of each block of the file, in hex, one after the other."""

    def of_block(self, number: int) -> bytes:
        digits = 2 * CHECKSUM_BYTES
        return bytes.fromhex(self.blocks[number * digits : (number + 1) * digits])

    @property
    def is_whole(self) -> bool:
        if self.block_bytes <= 0 or self.num_bytes < 0:
            return False
        num_blocks = -(-self.num_bytes // self.block_bytes)
        return len(self.blocks) == 2 * CHECKSUM_BYTES * num_blocks


class Marker(msgspec.Struct, frozen=True):
    """The content of a checkpoint's `operation.json`."""

    operation_id: str
    result: SaveStateResult
    """The answer to the operation."""
    seq: int
    """The seq of the last mutating operation in the checkpoint."""
    number: int
    """The number of the checkpoint: a later one of the deployment has a higher number."""
    keep: int
    """The `keep` of the `save_state`; 0: the checkpoint stays, whatever is saved after it."""
    files: dict[str, FileSums]

    def encode(self) -> bytes:
        """The content of the file: JSON whose last field is a checksum of all before it."""
        body = msgspec.json.encode(self)
        return body[:-1] + _signature(body)


def decode_marker(text: bytes) -> Marker:
    """The marker in the text of a file.

    Raises: ValueError: the text is no marker, or its checksum does not match.
    """
    body = text[: -len(_signature(b""))] + b"}"
    if not text.endswith(_signature(body)):
        raise ValueError("its checksum does not match")
    try:
        marker = msgspec.json.decode(body, type=Marker)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if not all(sums.is_whole for sums in marker.files.values()):
        raise ValueError("it has not a checksum for each block")
    return marker


def _signature(body: bytes) -> bytes:
    """The field that ends the JSON: the xxh3-128 of the body, in hex."""
    return _FIELD + xxhash.xxh3_128_hexdigest(body).encode() + b'"}'


def superseded(markers: Iterable[tuple[str, Marker]], keep: int, needed: set[str]) -> list[str]:
    """The names of the checkpoints to remove, so that of those that may go the newest `keep` stay.

    Args: markers: (name, marker) of each checkpoint; those with a `keep` of 0 may not go.
          needed: names that stay in any case; they count among the newest.
    """
    may_go = [(marker.number, name) for name, marker in markers if marker.keep]
    newest = sorted(may_go, reverse=True)
    return [name for _, name in newest[keep:] if name not in needed]


@dataclass(frozen=True, slots=True)
class Checkpoints:
    root: Path | None
    """The directory of all checkpoints; None: no directory is configured."""
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

    async def existing(self, key: DeploymentKey, name: str) -> Path:
        """The directory of a checkpoint that exists. Raises: CallerError: NOT_FOUND, a bad name."""
        directory = self.directory(key, name)
        if not await aiofiles.os.path.isdir(directory):
            raise CallerError(
                f"checkpoint {name!r} does not exist",
                code=Code.NOT_FOUND,
                field="args.name",
                remedy="name one that save_state has written",
            )
        return directory

    async def written_by(self, operation: str, key: DeploymentKey, name: str) -> Marker | None:
        """The marker of a checkpoint that this operation wrote; None: no checkpoint has the name.

        Raises: CallerError: ALREADY_EXISTS: another operation wrote the checkpoint; a bad name.
        """
        directory = self.directory(key, name)
        if not await aiofiles.os.path.exists(directory):
            return None
        marker = await _readable_marker(directory)
        if marker is None or marker.operation_id != operation:
            raise name_taken(name)
        return marker

    def begin(self, key: DeploymentKey, name: str) -> Path:
        """Make an empty draft, and remove an earlier one."""
        draft = self._draft(key, name)
        with writing():
            shutil.rmtree(draft, ignore_errors=True)
            files.make_directory(draft)
        return draft

    def commit(self, key: DeploymentKey, name: str, marker: Marker) -> None:
        """Give a draft the name of its checkpoint. The files are on disk already, each fsynced.

        Raises: CallerError: ALREADY_EXISTS: a checkpoint has the name. ResourceError: the disk is
                full, or fails.
        """
        draft, directory = self._draft(key, name), self.directory(key, name)
        with writing():
            write_synced(draft / MARKER_FILE, marker.encode())
            sync_directory(draft)
            try:
                draft.rename(directory)
            except OSError as error:
                if error.errno in _TAKEN:
                    raise name_taken(name) from error
                raise
            sync_directory(directory.parent)

    def drop(self, key: DeploymentKey, name: str) -> None:
        """Remove the draft of a checkpoint."""
        shutil.rmtree(self._draft(key, name), ignore_errors=True)

    async def next_number(self, key: DeploymentKey) -> int:
        """The number of the deployment's next checkpoint. Raises: OSError."""
        return 1 + max((marker.number for _, marker in await self._markers(key)), default=0)

    async def prune(self, key: DeploymentKey, keep: int, needed: set[str]) -> list[str]:
        """Remove old checkpoints: of those that may go, the newest `keep` stay, and so do those
        that are needed.

        Returns: the names that were removed. Raises: OSError.
        """
        gone = superseded(await self._markers(key), keep, needed)
        for name in gone:
            await asyncio.to_thread(self._remove, key, name)
        return gone

    async def remove(self, key: DeploymentKey, name: str) -> int:
        """Remove a checkpoint. Returns: the bytes of its files; 0: there was none.

        Raises: CallerError: a bad name. OSError.
        """
        directory = self.directory(key, name)
        if not await aiofiles.os.path.isdir(directory):
            return 0
        return await asyncio.to_thread(self._remove, key, name)

    def _remove(self, key: DeploymentKey, name: str) -> int:
        """Remove a checkpoint: it loses its name first, so that it is never loaded in part.

        Returns: the bytes of its files.
        """
        nameless = self._draft(key, name)
        shutil.rmtree(nameless, ignore_errors=True)
        self.directory(key, name).rename(nameless)
        num_bytes = sum(path.stat().st_size for path in nameless.rglob("*") if path.is_file())
        shutil.rmtree(nameless, ignore_errors=True)
        return num_bytes

    def sweep(self) -> None:
        """Remove the drafts that an earlier daemon of this node left."""
        if self.root is not None:
            for draft in self.root.glob(f"*/*/*/.*.{self.node}.draft"):
                shutil.rmtree(draft, ignore_errors=True)

    def _draft(self, key: DeploymentKey, name: str) -> Path:
        return self.directory(key, name).with_name(f".{name}.{self.node}.draft")

    async def _markers(self, key: DeploymentKey) -> list[tuple[str, Marker]]:
        """The readable markers of a deployment's checkpoints: (name, marker), sorted by name."""
        place = self.directory(key, "any").parent
        if not await aiofiles.os.path.isdir(place):
            return []
        found = []
        for name in sorted(await aiofiles.os.listdir(place)):
            marker = None if name.startswith(".") else await _readable_marker(place / name)
            if marker is not None:
                found.append((name, marker))
        return found


async def marker_of(directory: Path) -> Marker | None:
    """The marker of a checkpoint; None: it has none. Raises: OSError; ValueError: a bad marker."""
    try:
        async with aiofiles.open(directory / MARKER_FILE, "rb") as file:
            return decode_marker(await file.read())
    except FileNotFoundError:
        return None


async def _readable_marker(directory: Path) -> Marker | None:
    try:
        return await marker_of(directory)
    except (OSError, ValueError):
        return None


def name_taken(name: str) -> CallerError:
    return CallerError(
        f"checkpoint {name!r} exists",
        code=Code.ALREADY_EXISTS,
        field="args.name",
        remedy="choose another name",
    )


def writing() -> AbstractContextManager[None]:
    """Turn an OSError of a write into a typed error. Raises: as `disk.files.writing`."""
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
