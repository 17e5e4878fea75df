"""One WPG over several nodes: agent ↔ agent, request and reply on `pl.v1.wpg.<node>`."""

from __future__ import annotations

from phaseloom.common.contract.codec import Message
from phaseloom.common.contract.errors import ErrorInfo
from phaseloom.common.contract.ids import DeploymentKey, OperationKey


class FindStore(Message, frozen=True):
    """agent → agent of rank 0's node: where do the ranks of this incarnation rendezvous?

    Answer: StoreFound or NotYet.
    """

    deployment: DeploymentKey
    incarnation: int


class TakePart(Message, frozen=True):
    """agent of the leader's node → agent of each other node: run your ranks' part of one call of
    the leader's backend.

    The leader's agent repeats the request until it gets an answer; the part starts only once.
    Answer: NotYet, PartTaken or PartFailed.
    """

    deployment: DeploymentKey
    incarnation: int
    number: int
    """The number of the call in this incarnation, counted from 1."""
    num_ended: int
    """The newest call whose answer will not be requested again."""
    share: bytes
    """The command to the ranks (`phaseloom.worker.rank.wire.RunShare`), as MessagePack, without the
    payloads. The agent reads the payloads from the operation stream."""
    offset: int = 0
    """Number of bytes of the answer that the requesting agent already has."""


class CallRoll(Message, frozen=True):
    """Sent by and to the same agents as `TakePart`: are your ranks of this incarnation alive?
    Answer: Present."""

    deployment: DeploymentKey
    incarnation: int


class CancelPart(Message, frozen=True):
    """Sent by and to the same agents as `TakePart`: stop your part of a reading operation, whether
    it has started or not. Answer: Present."""

    operation: OperationKey
    incarnation: int
    keeps_partial: bool = False
    """See `CancelOperation`."""


NodeRequest = FindStore | TakePart | CallRoll | CancelPart


class StoreFound(Message, frozen=True):
    address: str
    """host:port"""


class NotYet(Message, frozen=True):
    """There is no answer yet: send the request again."""


class PartTaken(Message, frozen=True):
    num_bytes: int
    """Size of the whole answer: MessagePack with the answer of each rank of the node, in order
    (`phaseloom.worker.rank.wire.ShareDone`)."""
    chunk: bytes
    """The bytes of the answer from the requested offset on."""


class PartFailed(Message, frozen=True):
    error: ErrorInfo


class Present(Message, frozen=True):
    """All ranks of this incarnation on the node are alive."""


class IncarnationOver(Message, frozen=True):
    """Answer to any request: no rank of this incarnation is or will be alive on this node."""

    error: ErrorInfo


NodeReply = StoreFound | NotYet | PartTaken | PartFailed | Present | IncarnationOver
