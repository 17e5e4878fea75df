"""The node-local protocol between an agent and its ranks, over the agent's Unix socket.

Only the leader (rank 0) is given permits. It sends the other ranks their part of a call through the
agent, which knows which of them are alive, and asks the agents of other nodes.
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
    """The parameters of a rank, which has a process of its own or is hosted by one (`HostRank`)."""

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
    """The nodes of the WPG, by rank, with as many ranks on each; empty: all ranks are on this
    node."""
    store_path: str = ""
    """The file where the ranks of this incarnation find each other; empty: there is one rank, or
    the ranks are on several nodes and meet by `MeetRanks`."""
    interface: str = ""
    """The network interface for the ranks' own traffic; empty: the backend chooses."""
    checkpoint: str = ""
    """The checkpoint to start from, where no seal is restored; empty: start from the spec's
    seeds."""
    applied: int = 0
    """The seq of the last mutating operation in the checkpoint or the fresh state."""
    num_units: int = 1
    """The compute units of its device: the cores of an emulated one."""
    device_bytes: int = 0
    """The budget of its device for managed state; 0: the state manager alone knows it."""

    @property
    def is_over_nodes(self) -> bool:
        return len(self.nodes) > 1

    @property
    def ranks_per_node(self) -> int:
        return self.num_ranks // max(1, len(self.nodes))

    @property
    def is_first_here(self) -> bool:
        """Whether the rank is the first of its node, which speaks for the node's ranks with the
        state manager."""
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
    """The process's name in logs."""
    agent_socket: str


class HostUp(Message, frozen=True):
    """A process of several ranks → agent, its first call. Answer: Done."""

    token: str


class HostRank(Message, frozen=True):
    """agent → a process of several ranks: host a rank, which connects as any other does.

    Answer: Done, once the rank has ended, for whatever reason, and nothing of it is left.
    """

    config: RankConfig


class EndRank(Message, frozen=True):
    """agent → a process of several ranks: end a rank. Harmless where it has ended. Answer: Done,
    when the rank speaks with nobody any more; the answer to its `HostRank` tells its end."""

    token: str


class MeetRanks(Message, frozen=True):
    """rank → agent, before `RankUp`, where its WPG is on several nodes.

    Answer: MeetAt; for rank 0 also the socket that listens there.
    Raises: the incarnation is over.
    """

    token: str


class MeetAt(Message, frozen=True):
    address: str
    """The host:port, used by this incarnation alone."""


class RankUp(Message, frozen=True):
    """rank → agent, its first call: the rank's state is in host memory. Answer: Done."""

    token: str
    state_bytes: int
    applied: int


class RankFailed(Message, frozen=True):
    """rank → agent, instead of RankUp: the rank will exit. Answer: Done."""

    token: str
    error: ErrorInfo


class RunPermits(Message, frozen=True):
    """agent → leader: run one permit, or several of reading operations.

    Answer: Done, once every outcome is stored and in the decision log.
    """

    permits: list[Permit]
    traceparents: list[str]
    """The traceparent of each permit; empty: none of them is traced."""


class DevicesFreed(Message, frozen=True):
    """leader → agent: each permit of one `RunPermits` has ended, or needs no devices and no state
    any more. Others may go on before it is answered. Answer: Done."""

    first: CommandId
    """The id of the first permit of the `RunPermits`."""


class CancelRun(Message, frozen=True):
    """agent → every rank: stop a reading operation, whose permit may be yet to come.
    Answer: Done."""

    operation: OperationKey
    keeps_partial: bool = False
    """Whether a `generate` completes with the tokens that it has."""


class AdjustShare(Message, frozen=True):
    """agent → leader: use these compute units of its device from the next boundary on.
    Answer: Done, once it does."""

    units: list[int]
    command: CommandId
    """The command that sets the units; a command that is older than the newest has no effect."""


class PrefetchWeights(Message, frozen=True):
    """agent → every rank: have what the rank needs of a weights version fetched to host memory; a
    `sync_weights` will ask for it. Answer: Done, once it is there."""

    sources: list[str]
    """Endpoints of the state managers that have the version."""
    ticket: Ticket
    id: CommandId
    """The command that asks for it: the ranks of a node share one fetch and one verification."""


class Payload(msgspec.Struct, frozen=True):
    """An operation, in the bytes in which its controller sent it."""

    operation: OperationKey
    payload: bytes
    content_type: str


class RunShare(Message, frozen=True):
    """leader → agent → every other rank: take part in one call of the leader's backend.

    From the leader the answer is SharesDone, from a rank ShareDone. The leader sends the next share
    when this one is answered, so that all ranks do the same in the same order.
    """

    operations: list[Payload]
    """One operation, or several `generate`s that are decoded together."""
    permit: Permit
    """The permit of the first operation."""
    traceparent: str = ""
    zero_gradients: bool = False
    """Whether to drop the gradients instead of running an `optim_step` that is refused."""
    prepares: bool = False
    """Whether this is the first of two calls, which changes nothing: a `publish_weights` writes
    this rank's part, a `sync_weights` fetches and verifies what it needs, a `generate` or `forward`
    reads the weights that it names. The second call follows if all ranks could."""
    gives_up: bool = False
    """Whether another rank could not read the weights that this one has prepared: nobody needs them
    any more."""
    manifest: VersionParts | None = None
    """The manifest, in the second call of a `publish_weights` in parts: all parts are committed."""
    replicas: tuple[int, ...] = ()
    """The ranks of this call, one for each replica, over which its `generate`s are cut; empty: all
    ranks."""
    tail_share: float = 0.0
    """The share of its samples at which each rank sends a `TailReached`; 0: it sends none."""
    naming: tuple[Permit | None, ...] = ()
    """The permits of the operations that name weights versions, in their places; empty: none names
    any."""
    weights: tuple[str, ...] = ()
    """The weights that the leader has read for each operation that names some, in their places;
    another rank takes part with the same ones only. Empty: none names any."""


class TailReached(Message, frozen=True):
    """rank → agent → leader: only the long tail of this rank's share of a `generate` is left.
    Answer: Done."""

    operation: OperationKey
    """The first operation of the share."""
    rank: int


class TokensDrawn(Message, frozen=True):
    """rank → agent → leader, on the leader's node: new tokens of this rank's share of a `generate`.
    Answer: Done."""

    operation: OperationKey
    drawn: list[DrawnTokens]
    """The tokens, by the places of the prompts in the operation that the share was cut from."""


class StopShare(Message, frozen=True):
    """leader → agent → every other rank: end a running share of `generate` with the tokens that it
    has, its open samples as partial; harmless once it has ended. Answer: Done."""

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
or the weights that the operation names could not be read, and nothing has changed. None: the
operation was cancelled, or the share has no result."""


class ShareDone(Message, frozen=True):
    results: list[ShareResult]
    """The result of each operation."""


class SharesDone(Message, frozen=True):
    results: list[list[ShareResult]]
    """[rank − 1][operation]"""


class RollCall(Message, frozen=True):
    """leader → agent → every other rank: are all alive? Answer: Done.

    Asked when a call failed. Where a rank's death is the reason, the agent kills the other ranks
    instead of answering, so that a lost process is never taken for a failed operation.
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
