"""The node-local protocol between an agent and its ranks, over the agent's Unix socket.

The leader (rank 0) alone is given permits. Where it has other ranks beside it, it sends them their
part through the agent, which knows who of them is alive, and asks the agents of other nodes.
"""

from __future__ import annotations

import msgspec

from phaseloom.common.contract.base import Message
from phaseloom.common.contract.commands import Permit
from phaseloom.common.contract.errors import ErrorInfo
from phaseloom.common.contract.ids import DeploymentKey, NodeId, OperationKey
from phaseloom.common.contract.operations import Result
from phaseloom.common.contract.specs import CommandId, DeploymentSpec, DeviceKind
from phaseloom.common.contract.state_layout import VersionPart, VersionParts
from phaseloom.common.contract.state_rank import Done, Failed


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
    nodes: list[NodeId] = []
    """Of the WPG, by rank, as many ranks on each; none: all of them are on this node."""
    store_path: str = ""
    """Where the ranks of this life find each other; empty where there is one, or several nodes:
    then `MeetRanks` tells."""
    interface: str = ""
    """The network interface that the ranks' own traffic goes over; empty: the backend's choice."""
    checkpoint: str = ""
    """Start from it, where no seal is restored; empty: from the spec's seeds."""
    applied: int = 0
    """seq that the checkpoint, or the fresh state, stands for."""

    @property
    def is_over_nodes(self) -> bool:
        return len(self.nodes) > 1

    @property
    def ranks_per_node(self) -> int:
        return self.num_ranks // max(1, len(self.nodes))

    @property
    def is_first_here(self) -> bool:
        """Of the ranks on its node: it speaks for them with the node's state manager."""
        return self.rank % self.ranks_per_node == 0

    def node_of(self, rank: int) -> NodeId:
        return self.nodes[rank // self.ranks_per_node] if self.nodes else NodeId(self.node)


class MeetRanks(Message, frozen=True):
    """rank → agent, before `RankUp`, where its WPG is on several nodes. Answer: MeetAt, and beside
    it, for rank 0 alone, the socket that listens there.

    Raises: its life is over."""

    token: str


class MeetAt(Message, frozen=True):
    address: str
    """host:port, of this life alone."""


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


class DevicesFreed(Message, frozen=True):
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
    prepares: bool = False
    """The first of two calls, which changes nothing: of `publish_weights` write what this rank has
    to; of `sync_weights` bring and verify what it needs. Another follows if all ranks could."""
    manifest: VersionParts | None = None
    """Of the second call of a `publish_weights` in parts: all of them are committed."""


class PartWritten(Message, frozen=True):
    """Of `publish_weights`."""

    part: VersionPart | None
    """None: another rank writes what this one has."""


ShareResult = Result | PartWritten | Failed | None
"""Failed: of a call that prepares; nothing has changed. None: it was cancelled, or it has no result
of a share."""


class ShareDone(Message, frozen=True):
    results: list[ShareResult]
    """Of each operation."""


class SharesDone(Message, frozen=True):
    results: list[list[ShareResult]]
    """[rank − 1][operation]"""


class RollCall(Message, frozen=True):
    """leader → agent → every other rank: are all alive? Answer: Done.

    Asked when a call failed: where a rank's death is the reason, the agent kills the others instead
    of answering, so that a lost process is never taken for a failed operation.
    """


RankMessage = (
    MeetRanks
    | MeetAt
    | RankUp
    | RankFailed
    | RunPermits
    | DevicesFreed
    | CancelRun
    | RunShare
    | ShareDone
    | SharesDone
    | RollCall
    | Done
    | Failed
)
