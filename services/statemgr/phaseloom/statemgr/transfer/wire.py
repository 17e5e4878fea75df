"""The protocol by which state managers exchange weights versions and state files.

A stream (`tls.py`) begins with a request that names an object. If the request opens the object,
requests for its bytes follow:

    client → OpenVersion | OpenFile → server → Opened | Refusal
    then, as often as the client needs: client → Give | Confirm
                                        server → Given and the bytes | Confirmed | Refusal
    client → DescribeVersion → server → VersionDescription | Refusal; after a description the
                                        stream begins again: the client may open the version on it
    client → DescribeFile → server → FileDescription | Refusal
    client → KeepFiles → server → FilesKept | Refusal

The server may send any number of `Waiting` before each reply except `Opened`. Both ends have
certificates of the mesh. The scheduler's ticket says what the client may have.
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
    """An earlier version of the same policy that the client has."""

    seq: int
    digests: dict[str, str]
    """Digests of those parts of it that the client requests now, by part. They have the same layout
    in both versions."""


class OpenVersion(msgspec.Struct, frozen=True, tag=True):
    """Requests a stream that carries slices of a version's parts."""

    version: VersionKey
    ticket: Ticket | None
    parts: list[str]
    """The parts to open; empty: only list the parts that the server has."""
    site: str = ""
    """The site of the client's node; empty: none."""
    peer: Peer = Peer("", "")
    """The client, as a peer that other nodes may fetch from."""
    base: BaseVersion | None = None
    """The version that the server may send deltas of, if the client has one."""
    relay: str | None = None
    """The session of a fetch by the server. The client then receives bytes that the server has
    fetched in that session, or waits for them. None: the client receives parts that the server
    has."""


class DescribeVersion(msgspec.Struct, frozen=True, tag=True):
    """Requests the layout and digest of a version or of one part."""

    version: VersionKey
    ticket: Ticket | None


class FileName(msgspec.Struct, frozen=True):
    """A state file of a deployment."""

    kind: str
    """`seal` or `version`."""
    deployment: DeploymentKey
    seq: int
    part: str = ""
    """The part of a version that is written in parts; empty: the whole version, or its manifest."""

    def __str__(self) -> str:
        part = f" part {self.part}" if self.part else ""
        return f"{self.kind} {self.seq}{part} of {self.deployment}"


class DescribeFile(msgspec.Struct, frozen=True, tag=True):
    """Requests the header of a state file and, for a weights version, the names of its parts on the
    server."""

    name: FileName
    ticket: FilesTicket


class OpenFile(msgspec.Struct, frozen=True, tag=True):
    """Requests a stream that carries blocks of a state file. A block is a box of a tensor, whose
    name is the number of the section."""

    name: FileName
    ticket: FilesTicket


class KeepFiles(msgspec.Struct, frozen=True, tag=True):
    """Requests that the server fetch these files from the client and keep them as a copy."""

    deployment: DeploymentKey
    seal_seq: int
    versions: list[int]
    committed: int
    """The seq of the committed seal. The server keeps that seal until the one at `seal_seq` is
    committed."""
    source: str
    """The endpoint of the client."""
    ticket: FilesTicket
    rank_offset: int = 0
    """The first rank in the seal, counted over all nodes."""
    num_ranks: int = 0
    """Ranks of the deployment on all nodes: see `StateHeader.is_of`."""


# --- Requests on an open stream ------------------------------------------------------------------


class Give(msgspec.Struct, frozen=True, tag=True):
    """Requests boxes of one part."""

    part: str
    boxes: list[Box]
    num_bytes: int
    """Size of all boxes. If the server assigns chunks: the most bytes to send, not counting the
    first box."""
    failed: list[Peer] = []
    """Peers that did not deliver their share."""
    takes_delta: bool = False
    """Whether a delta of the base version is welcome instead of the bytes."""


class Confirm(msgspec.Struct, frozen=True, tag=True):
    """Asks, after everything has arrived, whether the part still has its committed bytes."""

    part: str


# --- Replies -------------------------------------------------------------------------------------


class Opened(msgspec.Struct, frozen=True, tag=True):
    digests: dict[str, str]
    """Digests of the requested parts, or of all parts that the server has; empty from a relay."""
    is_far: bool = False
    """Whether the server is on another site. If so, it assigns each byte to one node of the
    client's site."""


class VersionDescription(msgspec.Struct, frozen=True, tag=True):
    num_bytes: int
    tensors: list[TensorSlot]
    digest: str


class FileDescription(msgspec.Struct, frozen=True, tag=True):
    header: StateHeader
    parts: list[str]
    """Parts of a weights version on the server's disk. Empty for seals, parts, and versions written
    whole."""


class FilesKept(msgspec.Struct, frozen=True, tag=True):
    """Confirms that the files are on the server's disk, fsynced."""


class Shared(msgspec.Struct, frozen=True, array_like=True):
    """Boxes of a request that the client must fetch from a peer."""

    holder: Peer
    boxes: list[Fragment]
    digest: str
    """The xxh3-128 of the server's bytes of these boxes."""


class Assigned(msgspec.Struct, frozen=True, array_like=True):
    """Which boxes of a request the server sends, and which peers have the others."""

    num_boxes: int
    """How many boxes, from the first on, this answer covers. The client requests the others
    again."""
    own_boxes: list[Fragment]
    """Boxes that the server sends."""
    peer_boxes: list[Shared]


class Given(msgspec.Struct, frozen=True, tag=True):
    """Announces bytes, which follow end to end in the order of the boxes: of all requested boxes
    or, with `assigned`, of its `own_boxes`. A delta may replace them."""

    digest: str
    """The xxh3-128 of the bytes of these boxes."""
    assigned: Assigned | None = None
    delta_bytes: int = 0
    """Size of the delta (`delta.py`) that follows instead of the bytes; 0: the bytes follow."""


class Confirmed(msgspec.Struct, frozen=True, tag=True):
    """Confirms that the part still has its committed bytes."""


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """Tells the client that the server is still preparing the reply."""


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
