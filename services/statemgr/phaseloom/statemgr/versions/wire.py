"""What state managers say to one another of weights versions, over a stream of `mesh`.

    client → FetchRequest → server → VersionDescription | Refusal
                                     Waiting, then Sound | Refusal, where it doubts what came
    then, as often as the client likes: client → Next | Again | Take
                                        server → Part and its bytes | Elsewhere | Over | Refusal
                                                 Waiting, before any of them

On a stream of the service for slices:

    client → SlicesRequest → server → Holding | Refusal
    then, as often as the client likes: client → Give | Confirm
                                        server → Given and the bytes | Confirmed | Refusal
                                                 Waiting, before any of them

Both ends have certificates of the mesh; what the client may read says its permit's ticket.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import xxhash

from phaseloom.common.contract.commands import Ticket
from phaseloom.common.contract.errors import CallerError, ErrorInfo
from phaseloom.common.contract.ids import VersionKey
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.statemgr.core.dealing import Fetcher
from phaseloom.statemgr.core.slices import Box, Fragment
from phaseloom.statemgr.mesh.tls import Stream

SERVICE = "versions"
SLICES = "slices"
MAX_REPLY_BYTES = 16 * 1024 * 1024


class FetchRequest(msgspec.Struct, frozen=True):
    version: VersionKey
    ticket: Ticket | None
    endpoint: str
    """Where the client serves what it gets."""
    site: str
    """Of the client's node; empty: it names none."""
    session: str
    """All streams of one fetch say the same."""
    is_relay: bool
    """It asks for blocks that the server may only be about to get."""
    doubted: bool = False
    """What came was not the version: the server is to verify its own. Answer: Sound, no more."""


class VersionDescription(msgspec.Struct, frozen=True, tag="version"):
    num_bytes: int
    tensors: list[TensorSlot]
    digest: str


class Sound(msgspec.Struct, frozen=True, tag="sound"):
    """The server's memory is what was committed, or is so again."""


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    error: ErrorInfo


class Next(msgspec.Struct, frozen=True, tag="next"):
    """A block that nobody of the client's group was given."""

    seen: int
    """How much of the news it knows."""


class Again(msgspec.Struct, frozen=True, tag="again"):
    """A block that this endpoint did not deliver."""

    block: int
    failed: str


class Take(msgspec.Struct, frozen=True, tag="take"):
    """Of a relay: this block, as soon as it is there."""

    block: int


class Part(msgspec.Struct, frozen=True, tag="part"):
    """The block's bytes follow."""

    block: int
    digest: str
    seen: int
    given: list[tuple[int, str]]
    """Blocks that others were given, and where they serve them."""


class Waiting(msgspec.Struct, frozen=True, tag="waiting"):
    """To Take, and to Give of a relay: it is still on its way to the server; to Confirm: it is
    being reckoned. Another reply follows."""


class Elsewhere(msgspec.Struct, frozen=True, tag="elsewhere"):
    """The block is to be had there by now."""

    block: int
    endpoint: str


class Over(msgspec.Struct, frozen=True, tag="over"):
    """Every block was given to somebody."""

    seen: int
    given: list[tuple[int, str]]


class SlicesRequest(msgspec.Struct, frozen=True):
    """First of a stream that is to bring slices. Answer: Holding."""

    version: VersionKey
    ticket: Ticket | None
    parts: list[str]
    """None: it asks what there is."""
    site: str = ""
    """Of the client's node; empty: it names none."""
    fetcher: Fetcher = Fetcher("", "")
    """What it fetches for: all streams of it say the same, also when it begins anew."""
    relay: str = ""
    """It asks for what the server, as a fetcher of this session, has brought or is about to get."""


class Holding(msgspec.Struct, frozen=True, tag="holding"):
    digests: dict[str, str]
    """By part, of all that were asked for, or that are there; none where a relay is asked."""
    is_far: bool = False
    """On another site than the client: it deals out what it has, each byte to one node there."""


class Give(msgspec.Struct, frozen=True, tag="give"):
    """Boxes of one part. Answer: Given, and bytes."""

    part: str
    boxes: list[Box]
    num_bytes: int
    """That they have; of a server that deals: that are to follow, at most, but for one box."""
    failed: list[Fetcher] = []
    """Who did not deliver what they were given."""


Cut = tuple[int, list[int], list[int]]
"""Number of a box, and start and size of what of it is meant; both empty: all of it."""


class Shared(msgspec.Struct, frozen=True, array_like=True):
    """What is to be had from a neighbour."""

    holder: Fetcher
    boxes: list[Cut]
    digest: str
    """xxh3-128 of all of them, as the server has them."""


class Dealt(msgspec.Struct, frozen=True, array_like=True):
    """How boxes come that are dealt out."""

    num_boxes: int
    """Of so many, the first ones, this tells; the others are to be asked for again."""
    here: list[Cut]
    elsewhere: list[Shared]


class Given(msgspec.Struct, frozen=True, tag="given"):
    """What was asked for, or what of it is `here`, follows end to end, each box in the order of its
    tensor."""

    digest: str
    """xxh3-128 of what follows."""
    dealt: Dealt | None = None


class Confirm(msgspec.Struct, frozen=True, tag="confirm"):
    """All is here: is the part still what was committed? Answer: Confirmed."""

    part: str


class Confirmed(msgspec.Struct, frozen=True, tag="confirmed"):
    """It is."""


SlicesAsk = Give | Confirm
SlicesReply = Holding | Given | Waiting | Confirmed | Refusal
Request = Next | Again | Take
Reply = Part | Waiting | Elsewhere | Over | Refusal


def cuts_of(fragments: list[Fragment], boxes: Sequence[Box]) -> list[Cut]:
    return [
        (number, [], []) if box == boxes[number] else (number, box.start, box.size)
        for number, box in fragments
    ]


def fragments_of(cuts: list[Cut], boxes: Sequence[Box]) -> list[Fragment]:
    """Raises: CallerError: they are of other boxes."""
    found = []
    for number, start, size in cuts:
        if not 0 <= number < len(boxes):
            raise CallerError(f"box {number} of {len(boxes)}", field="boxes")
        whole = boxes[number]
        found.append((number, Box(whole.name, start, size) if size else whole))
    return found


def digest_of_block(memory: memoryview, block: int) -> str:
    """xxh3-128 in hex, seeded with the block's number: no block passes for another."""
    return xxhash.xxh3_128(memory, seed=block).hexdigest()


async def receive_block(stream: Stream, memory: memoryview, block: int, timeout_s: float) -> str:
    """Fill the memory of a block; returns the digest of what came.

    Raises: ConnectionError: broken off. TimeoutError: nothing came for this long.
    """
    digest = xxhash.xxh3_128(seed=block)
    await stream.receive_into(memory, timeout_s, digest.update)
    return digest.hexdigest()
