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
    """Revision of the node's lease that the command was issued for. The node refuses it under any
    other lease."""


class Ticket(msgspec.Struct, frozen=True):
    """Permission for nodes to fetch a weights version from other nodes, for one incarnation of its
    reader.

    It is valid as long as the version and that incarnation exist. A state manager that has seen the
    ticket of a later incarnation refuses it.
    """

    version: VersionKey
    reader: DeploymentKey
    incarnation: int
    """The reader's incarnation that the ticket is valid for."""
    nodes: list[str]
    """The nodes of the reader's ranks, named as in their certificates."""
    mac: bytes = b""
    """The scheduler's signature: see `phaseloom.common.transport.tickets`."""


class FilesTicket(msgspec.Struct, frozen=True):
    """Permission for nodes to fetch a deployment's seals and durable weights versions from other
    nodes.

    It is valid until a later incarnation of the deployment presents its own ticket.
    """

    deployment: DeploymentKey
    incarnation: int
    nodes: list[str]
    """The nodes that may fetch, named as in their certificates."""
    mac: bytes = b""
    """The scheduler's signature: see `phaseloom.common.transport.tickets`."""


class StartWpg(NodeCommand, frozen=True):
    """Start the ranks of a deployment. The new `incarnation` fences all earlier ones."""

    deployment: DeploymentKey
    incarnation: int
    spec: DeploymentSpec
    devices: list[int]
    """The device of each rank on this node."""
    seal_seq: int
    """Start from the seal at this seq; 0: from the checkpoint or, without one, from the spec's
    seeds."""
    checkpoint: str = ""
    """The checkpoint that the job fell back to; empty: none."""
    applied: int = 0
    """The seq of the last mutating operation in the checkpoint or the fresh state."""
    rank_offset: int = 0
    """The number of this node's first rank. Rank 0 is the leader."""
    nodes: list[NodeId] = []
    """The node of each rank, if the WPG spans several nodes; each node starts its own ranks. Empty:
    all ranks are on this node."""
    versions: list[int] = []
    """Weights versions of this policy that are as durable as the seal."""
    sources: list[str] = []
    """Endpoints of state managers that have the seal and the versions, if this node may lack
    them."""
    ticket: FilesTicket | None = None
    """The permission to fetch from the sources. Set whenever `sources` is not empty."""


class StopWpg(NodeCommand, frozen=True):
    """Kill the ranks of a deployment and drop its host copy. Answered by a WpgLost."""

    deployment: DeploymentKey
    incarnation: int
    forget: bool
    """Whether to delete its seals and weights versions too, because its job has ended, the
    deployment was deleted, or it has moved away. Checkpoints always stay."""


class OpenActivation(NodeCommand, frozen=True):
    """Switch a deployment in: offload the deployments that it displaces, load it, and verify
    both."""

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
    """Whether the operation runs to rebuild state. It then runs although its outcome is stored, and
    the stored outcome remains valid."""
    sources: list[str] = []
    """For an operation that reads a weights version: endpoints of the state managers that have
    it."""
    partial: bool = False
    """For `optim_step`: whether a `forward_backward` since the last step did not complete."""
    ticket: Ticket | None = None
    """For an operation that reads a weights version: the permission to fetch it from the
    sources."""
    sealing: int = 0
    """For a WPG over several nodes: the seal in progress. Each node copies its part of that seal
    before its ranks run this operation. 0: no seal is in progress."""
    ranks: list[int] = []
    """For `generate`: the ranks that run it, one per replica; empty: all."""
    tail_on: list[int] = []
    """For `generate`: the ranks on which its long tail is gathered, so that other jobs can use the
    devices of the remaining ranks. Empty: the tail is not gathered."""
    adapter: Adapter | None = None
    """For an operation that names a weights version: the adapter of that version."""
    units: list[int] = []
    """Compute units of its device that the operation may use; empty: all."""


class Permits(NodeCommand, frozen=True):
    """Permission to run several reading operations of one deployment within one activation.

    Each permit counts separately. The command has the id of the first permit.
    """

    permits: list[Permit]
    traceparents: list[str]
    """The trace of each permit's operation; an empty list: none of them is traced."""

    def __post_init__(self) -> None:
        if self.traceparents and len(self.traceparents) != len(self.permits):
            raise ValueError(
                f"expected {len(self.permits)} traceparents, got {len(self.traceparents)}"
            )


class CancelOperation(NodeCommand, frozen=True):
    """Stop a running reading operation. It ends CANCELLED, or with its result if that comes
    first."""

    operation: OperationKey
    incarnation: int
    keeps_partial: bool = False
    """Whether a `generate` completes with the tokens already sampled."""


class AdjustClaims(NodeCommand, frozen=True):
    """Change the compute units that the running operations of a deployment may use.

    The rank applies the change between two steps of its work. If several changes and permits
    arrive, the one with the newest id wins.
    """

    deployment: DeploymentKey
    incarnation: int
    units: list[int]
    """The units that the operations may use from then on; at least one."""
    shrinks: bool
    """Whether units are taken away. If so, a ClaimsAdjusted follows once the rank no longer uses
    them."""


class CloseActivation(NodeCommand, frozen=True):
    """Switch a deployment out without switching another one in."""

    deployment: DeploymentKey
    incarnation: int
    epoch: int


class SealState(NodeCommand, frozen=True):
    """Commit a copy of the whole state at `seq` and of these versions. Answered by a SealCommitted
    or a SealFailed."""

    deployment: DeploymentKey
    incarnation: int
    seq: int
    versions: list[int]
    durability: Durability = Durability.NODE
    replicas: dict[NodeId, str] = {}
    """For durability `remote`: the nodes that must have a copy on disk before the seal is committed
    → the endpoints of their state managers."""
    num_parts: int = 1
    """Number of nodes of the WPG. The seal is committed once every node has stored its part."""
    ticket: FilesTicket | None = None
    """The permission that the replicas use to fetch the seal."""


class MirrorState(NodeCommand, frozen=True):
    """Copy another node's state to this node's disk. Answered by a StateMirrored."""

    deployment: DeploymentKey
    seal_seq: int
    """The seal to fetch; 0: fetch only versions."""
    versions: list[int]
    """Weights versions of this deployment to fetch."""
    sources: list[str]
    """Endpoints of the state managers that have the seal and the versions."""
    ticket: FilesTicket
    holds: Ticket | None = None
    """The permission to fetch the version whose weights the deployment has, which may belong to
    another deployment."""
    keeps: Ticket | None = None
    """The permission to fetch a version that cannot be recomputed. The command fails if that
    version cannot be fetched."""
    rank_offset: int = 0
    """The number of the first rank that the node will have."""
    num_ranks: int = 0
    """Number of ranks of the WPG on all nodes; 0: unknown."""


class ReleaseVersions(NodeCommand, frozen=True):
    """Drop these weights versions, which are no longer needed."""

    versions: list[VersionKey]


class PrefetchState(NodeCommand, frozen=True):
    """A hint: promote a deployment's host copies from NVMe. It never evicts copies that are used
    sooner."""

    deployment: DeploymentKey
    incarnation: int
    in_s: float | None
    """Seconds until the predicted use; None: withdraw the previous hint."""


class PrefetchVersion(NodeCommand, frozen=True):
    """A hint: fetch a weights version to host memory for a waiting `sync_weights`."""

    deployment: DeploymentKey
    """The deployment that will sync the version. Its ranks know which parts of it they need."""
    incarnation: int
    sources: list[str]
    """Endpoints of the state managers that have the version."""
    ticket: Ticket
    """The permission to fetch the version from the sources."""


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
