"""The one protocol in which state managers move weights versions and state files between nodes.

A stream of `mesh` begins with a request that names an object. Where the request opens the object,
requests for its bytes follow:

    client → OpenVersion | OpenFile → server → Opened | Refusal
    then, as often as the client needs: client → Give | Confirm
                                        server → Given and the bytes | Confirmed | Refusal
    client → DescribeVersion → server → VersionDescription | Refusal; after a description the
                                        stream begins again: the client may open the version on it
    client → DescribeFile → server → FileDescription | Refusal
    client → KeepFiles → server → FilesKept | Refusal

`Waiting` may come before any reply but `Opened`, any number of times. Both ends have certificates
of the mesh; the scheduler's ticket says what the client may have.
"""

from __future__ import annotations

import msgspec

from phaseloom.common.contract.commands import FilesTicket, Ticket
from phaseloom.common.contract.errors import ErrorInfo
from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.statemgr.records.stateheader import MAX_HEADER_BYTES, StateHeader
from phaseloom.statemgr.transfer.assignment import Peer
from phaseloom.statemgr.transfer.tensorslices import Box, Fragment

MAX_REPLY_BYTES = MAX_HEADER_BYTES + 4096


# --- First requests of a stream ------------------------------------------------------------------


class BaseVersion(msgspec.Struct, frozen=True, array_like=True):
    """An earlier version of the same policy, of which the client has what it asks for now."""

    seq: int
    digests: dict[str, str]
    """The digests of its parts, by part, in the layout of the parts that are asked for."""


class OpenVersion(msgspec.Struct, frozen=True, tag=True):
    """Asks for a stream that carries slices of a version's parts."""

    version: VersionKey
    ticket: Ticket | None
    parts: list[str]
    """The parts that are wanted; empty: the client asks only which parts are there."""
    site: str = ""
    """The site of the client's node; empty: the node has none."""
    peer: Peer = Peer("", "")
    """The client, as a peer that others may fetch from."""
    base: BaseVersion | None = None
    """The version that the server may send deltas of; None: the client has none."""
    relay: str | None = None
    """The session of a fetch of the server, where the client asks for bytes that the server has
    fetched in that session or is about to fetch. None: the client asks for parts that the server
    holds."""


class DescribeVersion(msgspec.Struct, frozen=True, tag=True):
    """Asks for the layout and digest of a version, or of a part of one."""

    version: VersionKey
    ticket: Ticket | None


class FileName(msgspec.Struct, frozen=True):
    """A state file of a deployment."""

    kind: str
    """The kind of the file: `seal` or `version`."""
    deployment: DeploymentKey
    seq: int
    part: str = ""
    """The part, where the version is written in parts; empty: the whole version, or its
    manifest."""

    def __str__(self) -> str:
        part = f" part {self.part}" if self.part else ""
        return f"{self.kind} {self.seq}{part} of {self.deployment}"


class DescribeFile(msgspec.Struct, frozen=True, tag=True):
    """Asks for the header of a state file and, of a weights version, which parts are there."""

    name: FileName
    ticket: FilesTicket


class OpenFile(msgspec.Struct, frozen=True, tag=True):
    """Asks for a stream that carries blocks of a state file. On that stream a block is a box of a
    tensor that has the number of the section as its name."""

    name: FileName
    ticket: FilesTicket


class KeepFiles(msgspec.Struct, frozen=True, tag=True):
    """Asks the server to fetch these files from the client, and to keep them as a copy."""

    deployment: DeploymentKey
    seal_seq: int
    versions: list[int]
    committed: int
    """The seq of the committed seal, which stays at the server until the seal at `seal_seq` is
    committed."""
    source: str
    """The endpoint of the client."""
    ticket: FilesTicket
    rank_offset: int = 0
    """The first of the ranks that the seal holds, among those of all nodes."""
    num_ranks: int = 0
    """The number of the deployment's ranks on all nodes: see `StateHeader.is_of`."""


# --- Requests on an open stream ------------------------------------------------------------------


class Give(msgspec.Struct, frozen=True, tag=True):
    """Asks for boxes of one part."""

    part: str
    boxes: list[Box]
    num_bytes: int
    """The bytes of all boxes. Where the server assigns chunks: the most bytes that it may send,
    apart from the first box."""
    failed: list[Peer] = []
    """Peers that did not deliver what they were assigned."""
    takes_delta: bool = False
    """Whether the bytes may come as a delta of the base version that the stream was opened with."""


class Confirm(msgspec.Struct, frozen=True, tag=True):
    """Asks, once everything has come, whether the part still is what was committed."""

    part: str


# --- Replies -------------------------------------------------------------------------------------


class Opened(msgspec.Struct, frozen=True, tag=True):
    digests: dict[str, str]
    """The digests by part: of the parts that were asked for, or of all parts that are there; empty
    from a relay."""
    is_far: bool = False
    """Whether the server is on another site than the client. If so, the server assigns each byte to
    one node of the client's site."""


class VersionDescription(msgspec.Struct, frozen=True, tag=True):
    num_bytes: int
    tensors: list[TensorSlot]
    digest: str


class FileDescription(msgspec.Struct, frozen=True, tag=True):
    header: StateHeader
    parts: list[str]
    """The parts of a weights version that are on the server's disk; empty: the version was written
    whole, or the file is a part or a seal."""


class FilesKept(msgspec.Struct, frozen=True, tag=True):
    """Says that the files are on the server's disk, fsynced."""


class Shared(msgspec.Struct, frozen=True, array_like=True):
    """The boxes of a request that the client is to take from a peer."""

    holder: Peer
    boxes: list[Fragment]
    digest: str
    """The xxh3-128 of the bytes of these boxes, as the server has them."""


class Assigned(msgspec.Struct, frozen=True, array_like=True):
    """The chunk assignment of a request: which boxes the server sends, and which peers have the
    others."""

    num_boxes: int
    """The number of boxes that are answered, from the first on; the client asks for the others
    again."""
    own_boxes: list[Fragment]
    """The boxes that the server sends."""
    peer_boxes: list[Shared]
    """The boxes that peers have."""


class Given(msgspec.Struct, frozen=True, tag=True):
    """Comes before the bytes, which follow end to end, each box in the order of its tensor: all
    boxes that were asked for or, where there is `assigned`, its `here`. A delta of these bytes may
    follow in their place."""

    digest: str
    """The xxh3-128 of the bytes of these boxes."""
    assigned: Assigned | None = None
    delta_bytes: int = 0
    """The number of bytes that follow, where they are a delta (`delta.py`) of the boxes' bytes in
    the base version; 0: the boxes' own bytes follow."""


class Confirmed(msgspec.Struct, frozen=True, tag=True):
    """Says that the part is what was committed."""


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """Says that the server still works on the reply, or waits for the bytes that it is to send."""


class Refusal(msgspec.Struct, frozen=True, tag=True):
    error: ErrorInfo


First = OpenVersion | DescribeVersion | OpenFile | DescribeFile | KeepFiles
Ask = Give | Confirm
Reply = (
    Opened
    | VersionDescription
    | FileDescription
    | FilesKept
    | Given
    | Confirmed
    | Waiting
    | Refusal
)
