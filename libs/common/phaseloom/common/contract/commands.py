"""Commands to a node: scheduler → PERMITS → the node's agent."""

from __future__ import annotations

import msgspec

from phaseloom.common.contract.base import Message
from phaseloom.common.contract.ids import DeploymentKey, NodeId, OperationKey, VersionKey
from phaseloom.common.contract.specs import CommandId, DeploymentSpec, Durability


class NodeCommand(Message, frozen=True):
    id: CommandId
    node: NodeId
    revision: int
    """The node's life this is meant for."""


class Ticket(msgspec.Struct, frozen=True):
    """Leave for nodes to fetch a weights version from others, for one life of one deployment.

    It lasts as long as that life and the version: a state manager that has seen the ticket of a
    later life refuses it.
    """

    version: VersionKey
    reader: DeploymentKey
    incarnation: int
    """Of the reader."""
    nodes: list[str]
    """Where the reader's ranks are; certificates name nodes so."""
    mac: bytes = b""
    """Of the scheduler that permits the read; see `phaseloom.common.transport.tickets`."""


class FilesTicket(msgspec.Struct, frozen=True):
    """Leave for nodes to fetch a deployment's seals and durable weights versions from others.

    It lasts until a later life of the deployment asks.
    """

    deployment: DeploymentKey
    incarnation: int
    nodes: list[str]
    """Who may have them, as their certificates name them."""
    mac: bytes = b""
    """Of the scheduler; see `phaseloom.common.transport.tickets`."""


class StartWpg(NodeCommand, frozen=True):
    """Start the ranks of a deployment; `incarnation` fences all earlier ones."""

    deployment: DeploymentKey
    incarnation: int
    spec: DeploymentSpec
    devices: list[int]
    """Of each rank on this node."""
    seal_seq: int
    """Start from the seal at this seq; 0: from the checkpoint, or the spec's seeds."""
    checkpoint: str = ""
    """Where the job fell back to one."""
    applied: int = 0
    """seq that the checkpoint, or the fresh state, stands for."""
    rank_offset: int = 0
    """Of this node's first rank; rank 0 leads."""
    nodes: list[NodeId] = []
    """Of the whole WPG, by rank, where it is spread over several; each starts its own ranks."""
    versions: list[int] = []
    """Weights versions of this policy that are as durable as the seal."""
    sources: list[str] = []
    """Endpoints of the state managers that have the seal and the versions, where this node may
    lack them."""
    ticket: FilesTicket | None = None
    """With sources."""


class StopWpg(NodeCommand, frozen=True):
    """Kill the ranks of a deployment and drop its host copy; answered by a WpgLost."""

    deployment: DeploymentKey
    incarnation: int
    forget: bool
    """Its job has ended, it was deleted, or it has moved away: seals and weights versions go too
    (checkpoints stay)."""


class OpenActivation(NodeCommand, frozen=True):
    """Switch a deployment in: offload what it displaces, load it, verify both."""

    deployment: DeploymentKey
    incarnation: int
    epoch: int
    displaces: list[DeploymentKey]
    early: bool = False
    """No operation waits for it yet."""


class Permit(NodeCommand, frozen=True):
    """Leave to run one operation within an activation."""

    operation: OperationKey
    operation_id: str
    kind: str
    incarnation: int
    epoch: int
    prev: int
    """seq of the last mutating operation that took effect."""
    replay: bool = False
    """Rebuilding: run it even if its DONE is stored, whose result stands."""
    sources: list[str] = []
    """Of `sync_weights`: endpoints of the state managers that have the version."""
    partial: bool = False
    """Of `optim_step`: a `forward_backward` since the last one was not completed."""
    ticket: Ticket | None = None
    """Of `sync_weights`: what the sources ask for."""
    sealing: int = 0
    """Of a WPG over several nodes: the seal that is being made of it. Each node has its part of
    that seal apart before its ranks run this; 0: none is being made."""


class Permits(NodeCommand, frozen=True):
    """Leave to run several reading operations of one deployment within one activation; each counts
    as one of its own. Its id is the first one's."""

    permits: list[Permit]
    traceparents: list[str]
    """Of each permit; an empty list: none of them is traced."""

    def __post_init__(self) -> None:
        if self.traceparents and len(self.traceparents) != len(self.permits):
            raise ValueError(f"{len(self.permits)} permits, {len(self.traceparents)} traceparents")


class CancelOperation(NodeCommand, frozen=True):
    """Stop a reading operation that runs; it ends CANCELLED, or as it would have."""

    operation: OperationKey
    incarnation: int


class CloseActivation(NodeCommand, frozen=True):
    """Switch a deployment out without another coming in."""

    deployment: DeploymentKey
    incarnation: int
    epoch: int


class SealState(NodeCommand, frozen=True):
    """Commit a copy of the whole state at `seq`, and these versions."""

    deployment: DeploymentKey
    incarnation: int
    seq: int
    versions: list[int]
    durability: Durability = Durability.NODE
    replicas: dict[NodeId, str] = {}
    """Of `remote`: nodes whose disks get a copy before it is committed, and the endpoints of their
    state managers."""
    num_parts: int = 1
    """Nodes of the WPG: the seal is committed with the last one's part."""
    ticket: FilesTicket | None = None
    """Of the replicas."""


class MirrorState(NodeCommand, frozen=True):
    """Bring a copy of another node's state to this node's disk; answered by a StateMirrored."""

    deployment: DeploymentKey
    seal_seq: int
    """0: only versions."""
    versions: list[int]
    """Its own."""
    sources: list[str]
    """Endpoints of the state managers that have them."""
    ticket: FilesTicket
    holds: Ticket | None = None
    """For the version that it holds, which may be another deployment's."""
    keeps: Ticket | None = None
    """For a version that nobody can make again: it is to be here, or this has failed."""
    rank_offset: int = 0
    """Of the first rank that the node is to have,"""
    num_ranks: int = 0
    """of so many on all nodes; 0: not said."""


class ReleaseVersions(NodeCommand, frozen=True):
    """Nothing needs these weights versions any more."""

    versions: list[VersionKey]


class PrefetchState(NodeCommand, frozen=True):
    """A hint: bring a deployment's host copies up from NVMe, and keep what is used sooner."""

    deployment: DeploymentKey
    incarnation: int
    in_s: float | None
    """Seconds from now to its predicted use; None: the hint before is withdrawn."""


Command = (
    StartWpg
    | StopWpg
    | OpenActivation
    | Permit
    | Permits
    | CancelOperation
    | CloseActivation
    | SealState
    | MirrorState
    | ReleaseVersions
    | PrefetchState
)
