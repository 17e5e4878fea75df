"""The one protocol in which state managers move weights versions and state files between nodes.

A stream of `mesh` begins with a request that names an object, and goes on with requests for its
bytes where it was opened:

    client → OpenVersion | OpenFile → server → Opened | Refusal
    then, as often as the client likes: client → Give | Confirm
                                        server → Given and the bytes | Confirmed | Refusal
    client → DescribeVersion → server → VersionDescription | Refusal
    client → DescribeFile → server → FileDescription | Refusal
    client → KeepFiles → server → FilesKept | Refusal

`Waiting` may come before any reply but `Opened`, as often as it takes. Both ends have certificates
of the mesh; the scheduler's ticket says what the client may have.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from phaseloom.common.contract.commands import FilesTicket, Ticket
from phaseloom.common.contract.errors import CallerError, ErrorInfo
from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.statemgr.disk.statefile import MAX_HEADER_BYTES, StateHeader
from phaseloom.statemgr.transfer.assignment import Peer
from phaseloom.statemgr.transfer.tensorslices import Box, Fragment

SERVICE = "transfer"
MAX_REPLY_BYTES = MAX_HEADER_BYTES + 4096


# --- First requests of a stream ------------------------------------------------------------------


class OpenVersion(msgspec.Struct, frozen=True, tag=True):
    """Asks for a stream that brings slices of a version's parts."""

    version: VersionKey
    ticket: Ticket | None
    parts: list[str]
    """None: the client asks only which parts are there."""
    site: str = ""
    """The site of the client's node; empty: it has none."""
    peer: Peer = Peer("", "")
    """The client."""
    relay: str | None = None
    """The session of a peer, where the client asks for what the server has brought for that session
    or is about to bring. None: it asks for parts that the server holds."""


class DescribeVersion(msgspec.Struct, frozen=True, tag=True):
    """Asks for the layout and digest of a version, or of a part of one."""

    version: VersionKey
    ticket: Ticket | None


class FileName(msgspec.Struct, frozen=True):
    """A state file of a deployment."""

    kind: str
    """`seal` or `version`"""
    deployment: DeploymentKey
    seq: int
    part: str = ""
    """The part, where the version is written in parts; empty: all of it, or its manifest."""

    def __str__(self) -> str:
        part = f" part {self.part}" if self.part else ""
        return f"{self.kind} {self.seq}{part} of {self.deployment}"


class DescribeFile(msgspec.Struct, frozen=True, tag=True):
    """Asks for the header of a state file, and which parts of the version are there."""

    name: FileName
    ticket: FilesTicket


class OpenFile(msgspec.Struct, frozen=True, tag=True):
    """Asks for a stream that brings blocks of a state file: boxes of tensors that are named after
    the numbers of its sections."""

    name: FileName
    ticket: FilesTicket


class KeepFiles(msgspec.Struct, frozen=True, tag=True):
    """Asks the server to fetch these files from the client, and to keep them as a copy."""

    deployment: DeploymentKey
    seal_seq: int
    versions: list[int]
    committed: int
    """seq of the committed seal, which stays at the server until this one is committed."""
    source: str
    """Endpoint of the client."""
    ticket: FilesTicket
    rank_offset: int = 0
    num_ranks: int = 0
    """The ranks that the seal holds: see `StateHeader.is_of`."""


# --- Requests on an open stream ------------------------------------------------------------------


class Give(msgspec.Struct, frozen=True, tag=True):
    """Asks for boxes of one part."""

    part: str
    boxes: list[Box]
    num_bytes: int
    """The bytes of all boxes; where the server assigns chunks: the bytes that it may send at most,
    apart from the first box."""
    failed: list[Peer] = []
    """Peers that did not deliver what they were assigned."""


class Confirm(msgspec.Struct, frozen=True, tag=True):
    """Asks, after everything came, whether the part still is what was committed."""

    part: str


# --- Replies -------------------------------------------------------------------------------------


class Opened(msgspec.Struct, frozen=True, tag=True):
    digests: dict[str, str]
    """The digest of each part that was asked for, or that is there; none from a relay."""
    is_far: bool = False
    """Whether the server is on another site than the client: it assigns each byte of what it holds
    to one node of the client's site."""


class VersionDescription(msgspec.Struct, frozen=True, tag=True):
    num_bytes: int
    tensors: list[TensorSlot]
    digest: str


class FileDescription(msgspec.Struct, frozen=True, tag=True):
    header: StateHeader
    parts: list[str]
    """The parts of a weights version that are on the server's disk; none: it was written whole."""


class FilesKept(msgspec.Struct, frozen=True, tag=True):
    """The files are on the server's disk, fsynced."""


Cut = tuple[int, list[int], list[int]]
"""A box inside a box that was asked for: the number of that one, start and size; both empty: all of
it."""


class Shared(msgspec.Struct, frozen=True, array_like=True):
    """What a peer brings."""

    holder: Peer
    boxes: list[Cut]
    digest: str
    """xxh3-128 of these boxes, as the server has them."""


class Assigned(msgspec.Struct, frozen=True, array_like=True):
    """Which way the boxes of a request come."""

    num_boxes: int
    """This tells of the first so many boxes; the others are to be asked for again."""
    here: list[Cut]
    elsewhere: list[Shared]


class Given(msgspec.Struct, frozen=True, tag=True):
    """The bytes follow end to end, each box in the order of its tensor: all that was asked for, or
    what `assigned` says comes from here."""

    digest: str
    """xxh3-128 of the bytes that follow."""
    assigned: Assigned | None = None


class Confirmed(msgspec.Struct, frozen=True, tag=True):
    """The part is what was committed."""


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """The server is alive, and still works on the reply or waits for what it is to send."""


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


def cuts_of(fragments: list[Fragment], boxes: Sequence[Box]) -> list[Cut]:
    return [
        (number, [], []) if box == boxes[number] else (number, box.start, box.size)
        for number, box in fragments
    ]


def fragments_of(cuts: list[Cut], boxes: Sequence[Box]) -> list[Fragment]:
    """Raises: CallerError: the cuts are of other boxes."""
    found = []
    for number, start, size in cuts:
        if not 0 <= number < len(boxes):
            raise CallerError(f"box {number} of {len(boxes)}", field="boxes")
        whole = boxes[number]
        found.append((number, Box(whole.name, start, size) if size else whole))
    return found
