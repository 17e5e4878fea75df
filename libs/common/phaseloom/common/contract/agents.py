"""One WPG over several nodes: agent ↔ agent, request and reply on `pl.v1.wpg.<node>`."""

from __future__ import annotations

from phaseloom.common.contract.codec import Message
from phaseloom.common.contract.errors import ErrorInfo
from phaseloom.common.contract.ids import DeploymentKey, OperationKey


class FindStore(Message, frozen=True):
    """agent → agent of rank 0's node: where do the ranks of this incarnation meet?

    Answer: StoreFound; NotYet.
    """

    deployment: DeploymentKey
    incarnation: int


class TakePart(Message, frozen=True):
    """agent of the leader's node → agent of each other node: have your ranks take part in one call
    of the leader's backend.

    Asked again until it is answered: it begins once. Answer: NotYet; PartTaken; PartFailed.
    """

    deployment: DeploymentKey
    incarnation: int
    number: int
    """The number of the call in this incarnation, counted from 1."""
    num_ended: int
    """The number of the newest call whose answer is not asked for again."""
    share: bytes
    """The command to the ranks (`phaseloom.worker.rank.wire.RunShare`), as MessagePack, without the
    payloads: the agent reads these from the operation stream."""
    offset: int = 0
    """The number of bytes of the answer that the asking agent has."""


class CallRoll(Message, frozen=True):
    """Asked like `TakePart`: are your ranks of this incarnation alive? Answer: Present."""

    deployment: DeploymentKey
    incarnation: int


class CancelPart(Message, frozen=True):
    """Asked like `TakePart`: stop your part of a reading operation, begun or not. Answer:
    Present."""

    operation: OperationKey
    incarnation: int
    keeps_partial: bool = False
    """As in `CancelOperation`."""


NodeRequest = FindStore | TakePart | CallRoll | CancelPart


class StoreFound(Message, frozen=True):
    address: str
    """host:port"""


class NotYet(Message, frozen=True):
    """The answer is not there yet: ask again."""


class PartTaken(Message, frozen=True):
    num_bytes: int
    """Size of the whole answer: as MessagePack, the answer of each rank of the node, in order
    (`phaseloom.worker.rank.wire.ShareDone`)."""
    chunk: bytes
    """The bytes of the answer from the offset on."""


class PartFailed(Message, frozen=True):
    error: ErrorInfo


class Present(Message, frozen=True):
    """All ranks of this incarnation on the node are alive."""


class IncarnationOver(Message, frozen=True):
    """Answer to any request: no rank of this incarnation is alive here, nor will be."""

    error: ErrorInfo


NodeReply = StoreFound | NotYet | PartTaken | PartFailed | Present | IncarnationOver
