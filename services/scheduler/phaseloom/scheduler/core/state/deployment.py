"""One logical model of a job: its queue, its life, its place, its seals."""

from __future__ import annotations

import bisect
from enum import StrEnum
from functools import cached_property

import msgspec

from phaseloom.common.contract.errors import ErrorInfo
from phaseloom.common.contract.ids import DeploymentKey, NodeId, OperationKey, VersionKey
from phaseloom.common.contract.specs import CommandId, DeploymentSpec
from phaseloom.scheduler.core.state.node import Node
from phaseloom.scheduler.core.state.operation import Mutation, Op
from phaseloom.scheduler.core.state.transitions import WpgState


class Span(msgspec.Struct, frozen=True):
    """What a deployment has of one node."""

    node: NodeId
    devices: list[int]
    """One a rank, in order."""


class MoveStage(StrEnum):
    WAITING = "waiting"
    """A node that it is to go to is not there: it runs on where it is."""
    BEGUN = "begun"
    """It is to be sealed as soon as nothing runs on it."""
    SEALING = "sealing"
    MIRRORING = "mirroring"
    """It runs on while its new nodes fetch what it will begin with."""
    LEAVING = "leaving"
    """It is stopped as soon as nothing runs on it."""


class Relocation(msgspec.Struct):
    """A deployment is to go elsewhere."""

    spans: list[Span]
    is_sealed: bool = False
    """Its seal was asked for: whether or not it came, once is enough."""
    is_last: bool = False
    """What it is sealed with now it leaves with: nothing runs meanwhile."""
    began_s: float = 0.0
    """When it was sealed and copied."""
    copy_s: float = 0.0
    """How long that took."""
    stage: MoveStage = MoveStage.BEGUN
    awaited: list[NodeId] = []
    """Of its new nodes, those that have not said yet that they have their copy."""
    asked: int = 0
    """Log sequence at which they were told to fetch it."""
    retry_at_s: float = 0.0
    """One of them could not: it is not asked again before."""
    failures: int = 0
    """In a row."""


class Copying(msgspec.Struct):
    """A node fetches a copy of what others have, so that one of these may be left."""

    node: NodeId
    revision: int
    """Of its lease: a later life of it fetches nothing."""
    command: CommandId
    """That it was told with."""
    part: int = 0
    """Of a seal, by the place of its node."""
    is_failed: bool = False
    """It could not: …"""
    failures: int = 0
    """… so often in a row …"""
    retry_at_s: float = 0.0
    """… and is not asked again before; another node may be."""

    def is_under_way(self, node: Node) -> bool:
        """Args: node: as it is now."""
        return not self.is_failed and node.is_up and node.revision == self.revision


class Deployment(msgspec.Struct, dict=True):
    key: DeploymentKey
    spec: DeploymentSpec
    spans: list[Span] = []
    """Where its ranks are, in their order: the first is the leader's. Empty: it has no place."""
    moving: Relocation | None = None
    left: list[NodeId] = []
    """Nodes that it was on and that keep its seal for it, until it has made one where it is."""
    state: WpgState = WpgState.UNPLACED
    awaited: list[NodeId] = []
    """Of its nodes, those that have still to say so: that its ranks are up, while it is STARTING;
    that they are dead, while it is LOST; of several, that its activation is open, while it has
    one."""
    incarnation: int = 0
    state_bytes: int = 0
    epoch: int = 0
    """Of its open activation; 0: none."""
    opening_s: float = 0.0
    """When that was decided."""
    lead_s: float = 0.0
    """How long its activations take from then until they are open, at the most, of late."""
    running: list[OperationKey] = []
    """Permitted in this incarnation and not ended: a mutating one, or reading ones."""
    idle_since_s: float = 0.0
    """When the last that ran ended."""
    operations: dict[int, Op] = {}
    """Ordered ones without an outcome, by seq; above `next_seq` ended ones too."""
    unordered: dict[str, Op] = {}
    first_seq: int = 1
    """Lower ones were of an earlier deployment of this name."""
    next_seq: int = 1
    """The lowest seq without an outcome: it may run, and so may the reading ones that follow it if
    it only reads too."""
    not_completed: list[int] = []
    """Seqs whose outcome was not COMPLETED, sorted."""
    awaited_seq: int = 0
    """The highest seq of this deployment that an operation ever named in `after`."""
    queued_syncs: dict[int, VersionKey] = {}
    """Weights version that each open `sync_weights` brings, by seq."""
    missing_gradients: list[int] = []
    """Seqs of `forward_backward`s since the last step that were not completed."""
    applied: int = 0
    """seq of the last mutating operation in the state of this incarnation."""
    cuts: list[int] = []
    """Seqs of ordered `save_state`s that are cut and have no outcome yet, sorted."""
    history: list[Mutation] = []
    replay: list[int] = []
    """Mutating operations still to be run again in this incarnation."""
    holds: VersionKey | None = None
    base: int = 0
    """The seal that this incarnation was started from."""
    checkpoint: str = ""
    """What it starts from where it has no seal; empty: its seeds."""
    origin_seq: int = 0
    """seq that the checkpoint, or the fresh state, stands for."""
    seal_seq: int = 0
    copies: list[list[NodeId]] = []
    """Of the newest seal: which nodes have the part of each of its nodes, by rank. Those that are
    no nodes of its own hold it until the next seal is committed."""
    copying: list[Copying] = []
    """Nodes that fetch a part of it, since one that has it is left."""
    sealing: int = 0
    """seq of the seal under way; 0: none."""
    seal_asked: int = 0
    """seq of the last seal that was asked for; 0: it failed."""
    seal_parts: dict[NodeId, list[int]] = {}
    """Of several nodes, those that have committed their part of it, and the weights versions."""
    part_copies: dict[NodeId, list[NodeId]] = {}
    """Of those, which other nodes have the part, too."""
    since_seal: int = 0
    """Mutating operations that took effect since the last seal, or the last try."""
    since_seal_bytes: int = 0
    changed_s: float = 0.0
    """When the first of them took effect."""
    hinted_s: float = -1.0
    """Its next use, as its state managers were told while it is off its devices; -1: nothing."""
    durable_versions: list[int] = []
    unfinished_versions: list[int] = []
    """Weights versions that were being published when the job fell back to its checkpoint: they may
    be there all the same, until the next incarnation has started."""
    retry_at_s: float = 0.0
    """Until then nothing of it runs: its activation was refused, or the weights version that its
    next operation brings was out of reach."""
    losses: int = 0
    """Deaths of the WPG at the current `next_seq` (or in its start)."""
    refusals: int = 0
    """Switch-ins in a row that were refused for good while it is rebuilt."""
    is_trial: bool = False
    """Added to a job that was placed already, and not up yet: if it cannot start, it ends alone."""
    error: ErrorInfo | None = None

    @cached_property
    def _passed_seq(self) -> int:
        """Below it, `head_seq` need not look; no part of the tree."""
        return 0

    @cached_property
    def name(self) -> str:
        return str(self.key)

    @cached_property
    def job_name(self) -> str:
        return str(self.key.job_key)

    @property
    def node(self) -> NodeId | None:
        """Its leader's."""
        return self.spans[0].node if self.spans else None

    @property
    def nodes(self) -> list[NodeId]:
        return [span.node for span in self.spans]

    @property
    def devices(self) -> list[int]:
        """Of each rank, on its node."""
        return [index for span in self.spans for index in span.devices]

    @property
    def places(self) -> list[tuple[NodeId, int]]:
        """(node, device) of each rank."""
        return [(span.node, index) for span in self.spans for index in span.devices]

    @property
    def is_opening(self) -> bool:
        """Whether its activation is not open yet on all of its nodes."""
        return self.epoch > 0 and bool(self.awaited)

    def is_done(self, seq: int) -> bool:
        """Whether this ordered operation has an outcome."""
        op = self.operations.get(seq)
        return seq < self.next_seq or (op is not None and op.has_ended)

    def was_not_completed(self, seq: int) -> bool:
        index = bisect.bisect_left(self.not_completed, seq)
        return index < len(self.not_completed) and self.not_completed[index] == seq

    def open_operation(self, key: OperationKey) -> Op | None:
        seq = key.seq
        return self.unordered.get(key.slot) if seq is None else self.operations.get(seq)

    @property
    def head_seq(self) -> int:
        """The lowest seq that those behind it have to wait for: one that is cut lets them go on.

        What has ended or is cut stays so until it is off the books: the search goes on where the
        last one stopped.
        """
        seq = max(self.next_seq, self._passed_seq)
        while (op := self.operations.get(seq)) is not None and (op.has_ended or op.is_cut):
            seq += 1
        self._passed_seq = seq
        return seq

    @property
    def last_seq(self) -> int:
        """The last seq that was ever used, as far as is known."""
        return max(self.next_seq - 1, self.applied, max(self.operations, default=0))

    @property
    def last_kind(self) -> str:
        return self.history[-1].kind if self.history else ""
