"""The node-local protocol between an agent and its ranks, over the agent's Unix socket.

Only the leader (rank 0) receives permits. It sends the other ranks their part of a call through the
agent, which knows which of them are alive and reaches other nodes through their agents.
"""

from __future__ import annotations

import msgspec

from phaseloom.common.contract.codec import Message
from phaseloom.common.contract.commands import Permit, Ticket
from phaseloom.common.contract.errors import ErrorInfo
from phaseloom.common.contract.events import StepRun
from phaseloom.common.contract.ids import DeploymentKey, NodeId, OperationKey
from phaseloom.common.contract.operations import DrawnTokens, GenerateResult, Result
from phaseloom.common.contract.specs import CommandId, DeploymentSpec, DeviceKind
from phaseloom.common.contract.state_layout import VersionPart, VersionParts
from phaseloom.common.contract.state_rank import Done, Failed


class RankConfig(Message, frozen=True):
    """The parameters of a rank, which has its own process or shares one (`HostRank`)."""

    token: str
    """The secret of this spawn, bound to this rank of this deployment and incarnation."""
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
    nodes: list[NodeId] = msgspec.field(default_factory=list)
    """The nodes of the WPG, in rank order, with equally many ranks on each; empty: all ranks are on
    this node."""
    store_path: str = ""
    """The file through which the ranks of this incarnation find each other; empty: there is one
    rank, or the ranks are on several nodes and meet by `MeetRanks`."""
    interface: str = ""
    """The network interface for traffic between ranks; empty: the backend chooses."""
    checkpoint: str = ""
    """The checkpoint to start from if no seal is restored; empty: start from the spec's seeds."""
    applied: int = 0
    """The seq of the last mutating operation in the checkpoint or the fresh state."""
    num_units: int = 1
    """The compute units of the rank's device: the cores of an emulated one."""
    device_bytes: int = 0
    """The device's budget for managed state in bytes; 0: only the state manager knows it."""

    @property
    def is_over_nodes(self) -> bool:
        return len(self.nodes) > 1

    @property
    def ranks_per_node(self) -> int:
        return self.num_ranks // max(1, len(self.nodes))

    @property
    def is_first_here(self) -> bool:
        """Whether this is the node's first rank, which speaks to the state manager for all of
        them."""
        return self.rank % self.ranks_per_node == 0

    @property
    def is_near_leader(self) -> bool:
        """Whether the rank is on the node of rank 0."""
        return self.rank < self.ranks_per_node

    def node_of(self, rank: int) -> NodeId:
        return self.nodes[rank // self.ranks_per_node] if self.nodes else NodeId(self.node)


class HostConfig(Message, frozen=True):
    """The parameters of a process that hosts several ranks."""

    token: str
    """The secret of this process."""
    name: str
    agent_socket: str


class HostUp(Message, frozen=True):
    """Shared process → agent, its first call. Answer: Done."""

    token: str


class HostRank(Message, frozen=True):
    """Agent → shared process: host a rank, which connects like any other rank.

    Answer: Done, once the rank has ended for any reason and all of its resources are free.
    """

    config: RankConfig


class EndRank(Message, frozen=True):
    """Agent → shared process: end a rank. Harmless if it has ended.

    Answer: Done, when the rank has closed its connections. The answer to its `HostRank` reports the
    end.
    """

    token: str


class MeetRanks(Message, frozen=True):
    """Rank → agent, before `RankUp`, if its WPG spans several nodes.

    Answer: MeetAt; for rank 0 with the listening socket. Raises: the incarnation is over.
    """

    token: str


class MeetAt(Message, frozen=True):
    address: str
    """The host:port, used only by this incarnation."""


class RankUp(Message, frozen=True):
    """Rank → agent, its first call: the rank's state is in host memory. Answer: Done."""

    token: str
    state_bytes: int
    applied: int


class RankFailed(Message, frozen=True):
    """Rank → agent, instead of RankUp: the rank will exit. Answer: Done."""

    token: str
    error: ErrorInfo


class RunPermits(Message, frozen=True):
    """Agent → leader: run one permit, or several of reading operations.

    Answer: Done, once every outcome is stored and in the decision log.
    """

    permits: list[Permit]
    traceparents: list[str]
    """The traceparent of each permit; empty: none of them is traced."""


class DevicesFreed(Message, frozen=True):
    """Leader → agent: the permits of one `RunPermits` no longer need devices or state.

    Other operations may start before the answer arrives. Answer: Done.
    """

    first: CommandId
    """The id of the first permit of the `RunPermits`."""


class CancelRun(Message, frozen=True):
    """Agent → every rank: stop a reading operation, possibly before its permit arrives. Answer:
    Done."""

    operation: OperationKey
    keeps_partial: bool = False
    """Whether a `generate` completes with the tokens that it has."""


class AdjustShare(Message, frozen=True):
    """Agent → leader: use these compute units of its device from the next boundary on.

    Answer: Done, once it does.
    """

    units: list[int]
    command: CommandId
    """The command that sets the units. A command older than the newest has no effect."""


class PrefetchWeights(Message, frozen=True):
    """Agent → every rank: fetch the bytes that a coming `sync_weights` will need to host memory.

    Answer: Done, once they are there.
    """

    sources: list[str]
    """Endpoints of the state managers that have the version."""
    ticket: Ticket
    id: CommandId
    """The command that requests it. The ranks of a node share one fetch and verification per
    command."""


class Payload(msgspec.Struct, frozen=True):
    """An operation, in the bytes that its controller sent."""

    operation: OperationKey
    payload: bytes
    content_type: str


class RunShare(Message, frozen=True):
    """Leader → agent → every other rank: take part in one call of the leader's backend.

    The leader receives SharesDone, the agent ShareDone from each rank. The leader sends the next
    share after this answer, so that all ranks do the same work in the same order.
    """

    operations: list[Payload]
    """One operation, or several `generate`s that are decoded together."""
    permit: Permit
    """The permit of the first operation."""
    traceparent: str = ""
    zero_gradients: bool = False
    """Whether to drop the gradients instead of running an `optim_step` that is refused."""
    prepares: bool = False
    """Whether this is the first of two calls. It changes nothing: a `publish_weights` writes this
    rank's part, a `sync_weights` fetches and verifies its bytes, and a `generate` or `forward`
    reads the weights that it names. The second call follows if all ranks succeed."""
    gives_up: bool = False
    """Whether to drop weights prepared by the first call, because another rank could not read
    them."""
    manifest: VersionParts | None = None
    """The manifest, in the second call of a `publish_weights` in parts. All parts are committed."""
    replicas: tuple[int, ...] = ()
    """The participating ranks, one per replica, over which the `generate`s are split; empty: all
    ranks."""
    tail_share: float = 0.0
    """The fraction of open samples at which each rank sends a `TailReached`; 0: it sends none."""
    naming: tuple[Permit | None, ...] = ()
    """The permits of the operations that name weights versions, in order; empty: none names any."""
    weights: tuple[str, ...] = ()
    """The weights that the leader has read for each operation, in order. Other ranks must read the
    same ones. Empty: no operation names any."""


class TailReached(Message, frozen=True):
    """Rank → agent → leader: only the long tail of this rank's share of a `generate` remains.

    Answer: Done.
    """

    operation: OperationKey
    """The first operation of the share."""
    rank: int


class TokensDrawn(Message, frozen=True):
    """Rank → agent → leader, on the leader's node: new tokens of this rank's share of a `generate`.

    Answer: Done.
    """

    operation: OperationKey
    tokens: list[DrawnTokens]
    """The tokens, indexed by the prompts of the whole operation."""


class StopShare(Message, frozen=True):
    """Leader → agent → every other rank: end a running share of `generate` with the tokens that it
    has.

    Its open samples end as partial. Harmless if the share has ended. Answer: Done.
    """

    operation: OperationKey
    """The first operation of the share."""


class PartWritten(Message, frozen=True):
    """A rank's answer to the first call of a `publish_weights`."""

    part: VersionPart | None
    """The part that the rank has written; None: another rank writes the same slices."""


class Generated(Message, frozen=True):
    """A rank's answer to its share of a `generate`, with the steps that it took."""

    result: GenerateResult
    steps: list[StepRun]


ShareResult = Result | Generated | PartWritten | Failed | None
"""A rank's result of one operation's share. Failed: the first of two calls could not be prepared,
or
the named weights could not be read; nothing has changed. None: the operation was cancelled, or the
share has no result."""


class ShareDone(Message, frozen=True):
    results: list[ShareResult]


class SharesDone(Message, frozen=True):
    results: list[list[ShareResult]]
    """[rank − 1][operation]"""


class RollCall(Message, frozen=True):
    """Leader → agent → every other rank: check that all ranks are alive. Answer: Done.

    Sent after a call failed. If a rank has died, the agent kills the other ranks instead of
    answering, so that a lost process is never mistaken for a failed operation.
    """


RankMessage = (
    HostUp
    | HostRank
    | EndRank
    | MeetRanks
    | MeetAt
    | RankUp
    | RankFailed
    | RunPermits
    | DevicesFreed
    | CancelRun
    | AdjustShare
    | PrefetchWeights
    | RunShare
    | ShareDone
    | SharesDone
    | TailReached
    | TokensDrawn
    | StopShare
    | RollCall
    | Done
    | Failed
)
