"""The node-local protocol between an agent and its ranks, over the agent's Unix socket.

The leader (rank 0) alone is given permits. Where it has other ranks beside it, it sends them their
part through the agent, which knows who of them is alive.
"""

from __future__ import annotations

import msgspec

from phaseloom.common.errors import ErrorInfo
from phaseloom.common.ids import DeploymentKey, OperationKey
from phaseloom.common.messages import CommandId, DeploymentSpec, Message, Permit, Result
from phaseloom.common.statewire import Done, Failed
from phaseloom.worker.config import DeviceKind


class RankConfig(msgspec.Struct, frozen=True):
    """What a rank is started with, as JSON on its only argument."""

    token: str
    """Per spawn, bound to this rank of this deployment and incarnation."""
    deployment: DeploymentKey
    incarnation: int
    spec: DeploymentSpec
    node: str
    device: int
    agent_socket: str
    state_socket: str
    device_kind: DeviceKind = DeviceKind.EMULATED
    rank: int = 0
    num_ranks: int = 1
    store_path: str = ""
    """Where the ranks of this life find each other; empty where there is one."""
    checkpoint: str = ""
    """Start from it, where no seal is restored; empty: from the spec's seeds."""
    applied: int = 0
    """seq that the checkpoint, or the fresh state, stands for."""


class RankUp(Message, frozen=True):
    """rank → agent, its first call: its state is in host memory. Answer: Done."""

    token: str
    state_bytes: int
    applied: int


class RankFailed(Message, frozen=True):
    """rank → agent, instead of RankUp: it will exit. Answer: Done."""

    token: str
    error: ErrorInfo


class RunPermits(Message, frozen=True):
    """agent → leader: one, or several of reading operations. Answer: Done, once every outcome is
    stored and in the decision log."""

    permits: list[Permit]
    traceparents: list[str]
    """Of each permit; an empty list: none of them is traced."""


class RunsApart(Message, frozen=True):
    """leader → agent: of the permits of this `RunPermits` each has ended, or needs neither devices
    nor state any more. Others may go on before it is answered. Answer: Done."""

    first: CommandId
    """Of its first permit."""


class CancelRun(Message, frozen=True):
    """agent → every rank. Stop a reading operation: the permit may be yet to come. Answer: Done."""

    operation: OperationKey


class Payload(msgspec.Struct, frozen=True):
    """An operation as its controller sent it."""

    operation: OperationKey
    payload: bytes
    content_type: str


class RunShare(Message, frozen=True):
    """leader → agent → every other rank: take part in one call of the leader's backend.

    From the leader the answer is SharesDone, from a rank ShareDone. The leader sends the next when
    this one is answered, so that all ranks do the same in the same order.
    """

    operations: list[Payload]
    """One; or several of `generate`, which are decoded together."""
    permit: Permit
    """Of the first."""
    traceparent: str = ""
    zero_gradients: bool = False
    """Of an `optim_step` that is refused: forget the gradients instead."""


class ShareDone(Message, frozen=True):
    results: list[Result | None]
    """Of each operation; None: it was cancelled, or it has no result of a share."""


class SharesDone(Message, frozen=True):
    results: list[list[Result | None]]
    """[rank − 1][operation]"""


class RollCall(Message, frozen=True):
    """leader → agent → every other rank: are all alive? Answer: Done.

    Asked when a call failed: where a rank's death is the reason, the agent kills the others instead
    of answering, so that a lost process is never taken for a failed operation.
    """


RankMessage = (
    RankUp
    | RankFailed
    | RunPermits
    | RunsApart
    | CancelRun
    | RunShare
    | ShareDone
    | SharesDone
    | RollCall
    | Done
    | Failed
)
