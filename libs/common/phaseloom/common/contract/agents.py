"""One WPG over several nodes: agent ↔ agent, request and reply on `pl.v1.wpg.<node>`."""

from __future__ import annotations

from phaseloom.common.contract.base import Message
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
    """Of the call in this incarnation, from 1."""
    num_ended: int
    """Calls up to this one are not asked for again."""
    share: bytes
    """As MessagePack, what agents tell ranks (`phaseloom.worker.rank.wire.RunShare`), but that the
    payloads are left out: they are read from the operation stream."""
    offset: int = 0
    """How much of the answer has come."""


class CallRoll(Message, frozen=True):
    """Asked like `TakePart`: are your ranks of this incarnation alive? Answer: Present."""

    deployment: DeploymentKey
    incarnation: int


class CancelPart(Message, frozen=True):
    """Asked like `TakePart`: stop your part of a reading operation, begun or not. Answer:
    Present."""

    operation: OperationKey
    incarnation: int


NodeRequest = FindStore | TakePart | CallRoll | CancelPart


class StoreFound(Message, frozen=True):
    address: str
    """host:port"""


class NotYet(Message, frozen=True):
    """Ask again."""


class PartTaken(Message, frozen=True):
    num_bytes: int
    """Of the whole answer: as MessagePack, what each rank of the node said, in order
    (`phaseloom.worker.rank.wire.ShareDone`)."""
    chunk: bytes
    """Of it, from the offset on."""


class PartFailed(Message, frozen=True):
    error: ErrorInfo


class Present(Message, frozen=True):
    """All of them are alive."""


class IncarnationOver(Message, frozen=True):
    """Answer to any of them: no rank of this incarnation is alive here, nor will be."""

    error: ErrorInfo


NodeReply = StoreFound | NotYet | PartTaken | PartFailed | Present | IncarnationOver
