"""Commands to a node: scheduler → PERMITS → the node's agent."""

from __future__ import annotations

import msgspec

from phaseloom.common.contract.codec import Message
from phaseloom.common.contract.ids import DeploymentKey, NodeId, OperationKey, VersionKey
from phaseloom.common.contract.specs import Adapter, CommandId, DeploymentSpec, Durability


class NodeCommand(Message, frozen=True):
    id: CommandId
    node: NodeId
    revision: int
    """The revision of the node's lease that the command is meant for; under another lease it is
    refused."""


class Ticket(msgspec.Struct, frozen=True):
    """Permission for nodes to fetch a weights version from other nodes, for one incarnation of its
    reader.

    It lasts as long as that incarnation and the version: a state manager that has seen the ticket
    of a later incarnation refuses it.
    """

    version: VersionKey
    reader: DeploymentKey
    incarnation: int
    """The incarnation of the reader that the ticket is for."""
    nodes: list[str]
    """The nodes of the reader's ranks, as their certificates name them."""
    mac: bytes = b""
    """The scheduler's signature: see `phaseloom.common.transport.tickets`."""


class FilesTicket(msgspec.Struct, frozen=True):
    """Permission for nodes to fetch a deployment's seals and durable weights versions from other
    nodes.

    It lasts until a later incarnation of the deployment asks.
    """

    deployment: DeploymentKey
    incarnation: int
    nodes: list[str]
    """The nodes that may fetch, as their certificates name them."""
    mac: bytes = b""
    """The scheduler's signature: see `phaseloom.common.transport.tickets`."""


class StartWpg(NodeCommand, frozen=True):
    """Start the ranks of a deployment; `incarnation` fences all earlier ones."""

    deployment: DeploymentKey
    incarnation: int
    spec: DeploymentSpec
    devices: list[int]
    """The device of each rank on this node."""
    seal_seq: int
    """Start from the seal at this seq; 0: from the checkpoint, or the spec's seeds."""
    checkpoint: str = ""
    """The checkpoint that the job fell back to; empty: none."""
    applied: int = 0
    """The seq of the last mutating operation in the checkpoint or the fresh state."""
    rank_offset: int = 0
    """The number of this node's first rank; rank 0 leads."""
    nodes: list[NodeId] = []
    """The node of each rank of the WPG, where it is spread over several nodes; each of them starts
    its own ranks. Empty: all ranks are on this node."""
    versions: list[int] = []
    """Weights versions of this policy that are as durable as the seal."""
    sources: list[str] = []
    """Endpoints of the state managers that have the seal and the versions, where this node may
    lack them."""
    ticket: FilesTicket | None = None
    """The permission to fetch from the sources; it is given wherever there are any."""


class StopWpg(NodeCommand, frozen=True):
    """Kill the ranks of a deployment and drop its host copy; answered by a WpgLost."""

    deployment: DeploymentKey
    incarnation: int
    forget: bool
    """Whether its seals and weights versions are deleted too, because its job has ended, it was
    deleted, or it has moved away. Checkpoints always stay."""


class OpenActivation(NodeCommand, frozen=True):
    """Switch a deployment in: offload what it displaces from its devices, load it, verify both."""

    deployment: DeploymentKey
    incarnation: int
    epoch: int
    displaces: list[DeploymentKey]
    is_speculative: bool = False
    """Whether the activation is opened for an operation that is only predicted."""
    ranks: list[int] = []
    """The ranks to switch in; empty: all."""


class Permit(NodeCommand, frozen=True):
    """Permission to run one operation within an activation."""

    operation: OperationKey
    operation_id: str
    kind: str
    incarnation: int
    epoch: int
    prev: int
    """The seq of the last mutating operation that took effect."""
    replay: bool = False
    """Whether the operation rebuilds state: it runs although its outcome is stored, and that
    outcome stands."""
    sources: list[str] = []
    """For an operation that reads a weights version: endpoints of the state managers that have
    it."""
    partial: bool = False
    """For `optim_step`: whether a `forward_backward` since the last step was not completed."""
    ticket: Ticket | None = None
    """For an operation that reads a weights version: the permission to fetch it from the
    sources."""
    sealing: int = 0
    """For a WPG over several nodes: the seal that is being made of it. Each node copies its part of
    that seal before its ranks run this operation. 0: none is being made."""
    ranks: list[int] = []
    """For `generate`: the ranks that run it, one for each replica; empty: all."""
    tail_on: list[int] = []
    """For `generate`: the ranks on which its long tail is gathered, because other jobs can use the
    devices of the rest. Empty: it is not gathered."""
    adapter: Adapter | None = None
    """For an operation that names a weights version: the adapter that the version is."""
    units: list[int] = []
    """The compute units of its device that the operation may use; empty: all."""


class Permits(NodeCommand, frozen=True):
    """Permission to run several reading operations of one deployment within one activation.

    Each permit counts as one of its own; the id of the command is the first permit's.
    """

    permits: list[Permit]
    traceparents: list[str]
    """The trace of each permit's operation; an empty list: none of them is traced."""

    def __post_init__(self) -> None:
        if self.traceparents and len(self.traceparents) != len(self.permits):
            raise ValueError(f"{len(self.permits)} permits, {len(self.traceparents)} traceparents")


class CancelOperation(NodeCommand, frozen=True):
    """Stop a reading operation that runs; it ends CANCELLED, or with its result if that comes
    first."""

    operation: OperationKey
    incarnation: int
    keeps_partial: bool = False
    """Whether a `generate` completes with the tokens that it has."""


class AdjustClaims(NodeCommand, frozen=True):
    """Change the compute units that the running operations of a deployment may use.

    The rank changes them between two steps of its work. Of several changes, and permits, the one
    with the newest id counts.
    """

    deployment: DeploymentKey
    incarnation: int
    units: list[int]
    """The units that the operations may use from then on; at least one."""
    shrinks: bool
    """Whether units are taken away. If so, a ClaimsAdjusted answers once the rank does not use them
    any more."""


class CloseActivation(NodeCommand, frozen=True):
    """Switch a deployment out without another coming in."""

    deployment: DeploymentKey
    incarnation: int
    epoch: int


class SealState(NodeCommand, frozen=True):
    """Commit a copy of the whole state at `seq`, and these versions. Answered by a SealCommitted or
    a SealFailed."""

    deployment: DeploymentKey
    incarnation: int
    seq: int
    versions: list[int]
    durability: Durability = Durability.NODE
    replicas: dict[NodeId, str] = {}
    """For `remote`: the nodes whose disks get a copy before the seal is committed, with the
    endpoints of their state managers."""
    num_parts: int = 1
    """The number of nodes of the WPG: the seal is committed with the last node's part."""
    ticket: FilesTicket | None = None
    """The permission by which the replicas fetch the seal."""


class MirrorState(NodeCommand, frozen=True):
    """Bring a copy of another node's state to this node's disk; answered by a StateMirrored."""

    deployment: DeploymentKey
    seal_seq: int
    """The seal to fetch; 0: only versions are fetched."""
    versions: list[int]
    """Weights versions of this deployment to fetch."""
    sources: list[str]
    """Endpoints of the state managers that have them."""
    ticket: FilesTicket
    holds: Ticket | None = None
    """The permission to fetch the version that the deployment holds, which may be another
    deployment's."""
    keeps: Ticket | None = None
    """The permission to fetch a version that nobody can make again: without it the command
    fails."""
    rank_offset: int = 0
    """The number of the first rank that the node is to have."""
    num_ranks: int = 0
    """The number of the WPG's ranks on all nodes; 0: not known."""


class ReleaseVersions(NodeCommand, frozen=True):
    """Drop these weights versions: nothing needs them any more."""

    versions: list[VersionKey]


class PrefetchState(NodeCommand, frozen=True):
    """A hint: promote a deployment's host copies from NVMe; copies that are used sooner stay."""

    deployment: DeploymentKey
    incarnation: int
    in_s: float | None
    """Seconds until the predicted use; None: the hint before is withdrawn."""


class PrefetchVersion(NodeCommand, frozen=True):
    """A hint: fetch a weights version to host memory, for a `sync_weights` that waits."""

    deployment: DeploymentKey
    """The deployment that will sync the version: its ranks know which parts of it they need."""
    incarnation: int
    sources: list[str]
    """Endpoints of the state managers that have the version."""
    ticket: Ticket
    """The permission to fetch it from them."""


Command = (
    StartWpg
    | StopWpg
    | OpenActivation
    | Permit
    | Permits
    | CancelOperation
    | AdjustClaims
    | CloseActivation
    | SealState
    | MirrorState
    | ReleaseVersions
    | PrefetchState
    | PrefetchVersion
)
