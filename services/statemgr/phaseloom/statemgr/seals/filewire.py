"""What state managers say to one another of state files, over a stream of `mesh`.

    client → FetchFile → server → FileFound | FileSame | FileRefused
    then, as often as the client likes: client → TakeBlock → server → BlockFollows and its bytes
                                                                      | FileRefused
    client → ListParts → server → PartsListed | FileRefused
    client → KeepFiles → server → FileWaiting, as often as it takes → FilesKept | FileRefused

A file crosses as its header and the blocks that this names, each with the checksum that the header
has of it: nothing is trusted that has not arrived whole. The ticket is the scheduler's leave.
"""

from __future__ import annotations

import msgspec

from phaseloom.common.contract.commands import FilesTicket
from phaseloom.common.contract.errors import ErrorInfo
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.statemgr.disk.statefile import MAX_HEADER_BYTES, StateHeader

SERVICE = "files"
MAX_REPLY_BYTES = MAX_HEADER_BYTES + 4096


class FileName(msgspec.Struct, frozen=True):
    """A state file of a deployment."""

    kind: str
    """`seal` or `version`"""
    deployment: DeploymentKey
    seq: int
    part: str = ""
    """Of a version that is written in parts; empty: all of it, or its manifest."""

    def __str__(self) -> str:
        part = f" part {self.part}" if self.part else ""
        return f"{self.kind} {self.seq}{part} of {self.deployment}"


class FetchFile(msgspec.Struct, frozen=True, tag=True):
    name: FileName
    ticket: FilesTicket
    digest: str = ""
    """Of the file as the client knows it from an earlier stream."""


class KeepFiles(msgspec.Struct, frozen=True, tag=True):
    """Fetch these from that node, and keep them as a copy of its state."""

    deployment: DeploymentKey
    seal_seq: int
    versions: list[int]
    committed: int
    """seq of the committed seal, which stays here until this one is committed."""
    source: str
    """Endpoint of the client."""
    ticket: FilesTicket
    rank_offset: int = 0
    num_ranks: int = 0
    """The seal is of these ranks: see `StateHeader.is_of`."""


class ListParts(msgspec.Struct, frozen=True, tag=True):
    """Which parts of a weights version are on the server's disk?"""

    name: FileName
    ticket: FilesTicket


class TakeBlock(msgspec.Struct, frozen=True, tag=True):
    part: int
    block: int


class FileFound(msgspec.Struct, frozen=True, tag=True):
    header: StateHeader


class FileSame(msgspec.Struct, frozen=True, tag=True):
    """It is the file that the client knows."""


class PartsListed(msgspec.Struct, frozen=True, tag=True):
    """None: it was written whole."""

    parts: list[str]


class BlockFollows(msgspec.Struct, frozen=True, tag=True):
    num_bytes: int


class FileWaiting(msgspec.Struct, frozen=True, tag=True):
    """It is still coming."""


class FilesKept(msgspec.Struct, frozen=True, tag=True):
    """They are on the server's disk, fsynced."""


class FileRefused(msgspec.Struct, frozen=True, tag=True):
    error: ErrorInfo


First = FetchFile | KeepFiles | ListParts
Found = FileFound | FileSame | FileRefused
Listed = PartsListed | FileRefused
Taken = BlockFollows | FileRefused
Kept = FileWaiting | FilesKept | FileRefused
