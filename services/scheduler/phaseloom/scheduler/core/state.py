"""What the scheduler knows, as one serialisable tree, and the state machines of its entities.

The tree is the fold of the decision log: nothing in it comes from anywhere else. Mappings are keyed
by the text form of a key (`str(DeploymentKey)`), so that a snapshot is plain MessagePack.
"""

from __future__ import annotations

import bisect
from enum import StrEnum
from functools import cached_property

import msgspec

from phaseloom.common.contract.errors import ErrorInfo, InternalError
from phaseloom.common.contract.events import PhaseTrace
from phaseloom.common.contract.ids import DeploymentKey, JobKey, NodeId, OperationKey, VersionKey
from phaseloom.common.contract.kinds import MUTATING_KINDS
from phaseloom.common.contract.operations import After
from phaseloom.common.contract.specs import (
    CommandId,
    DeploymentSpec,
    DeviceSpec,
    JobSpec,
    Residency,
    SchedulerConfig,
)
from phaseloom.scheduler.core.cluster import Cluster

CORE_VERSION = 5
"""Raised whenever the same log would give other commands: a snapshot of another one is refused."""
OLDEST_READABLE = 3
"""Core version from which on a final snapshot has a shape that can be taken over."""


class OpState(StrEnum):
    QUEUED = "queued"
    PERMITTED = "permitted"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class WpgState(StrEnum):
    UNPLACED = "unplaced"
    STARTING = "starting"
    RECOVERING = "recovering"
    """Its ranks are up; operations after its seal are being run again."""
    READY = "ready"
    LOST = "lost"
    """Its node is gone, or it is being killed."""
    STOPPED = "stopped"


class JobState(StrEnum):
    SUBMITTED = "submitted"
    PLACED = "placed"
    PROFILING = "profiling"
    """Placed as well, alone: its cycle is not known, and is to be measured on nodes of its own."""
    ACTIVE = "active"
    DRAINING = "draining"
    """It takes no new operations; DONE once none is open."""
    DONE = "done"
    FAILED = "failed"
    REJECTED = "rejected"
    ROLLED_BACK = "rolled_back"
    """Its state fell back to its last checkpoint; ACTIVE again once a controller attaches."""


OP_TRANSITIONS: dict[OpState, frozenset[OpState]] = {
    OpState.QUEUED: frozenset(
        {OpState.PERMITTED, OpState.FAILED, OpState.CANCELLED, OpState.EXPIRED}
    ),
    OpState.PERMITTED: frozenset(
        {OpState.QUEUED, OpState.COMPLETED, OpState.FAILED, OpState.CANCELLED, OpState.EXPIRED}
    ),
    OpState.COMPLETED: frozenset(),
    OpState.FAILED: frozenset(),
    OpState.CANCELLED: frozenset(),
    OpState.EXPIRED: frozenset(),
}

WPG_TRANSITIONS: dict[WpgState, frozenset[WpgState]] = {
    WpgState.UNPLACED: frozenset({WpgState.STARTING, WpgState.STOPPED}),
    WpgState.STARTING: frozenset(
        {WpgState.RECOVERING, WpgState.READY, WpgState.LOST, WpgState.STOPPED}
    ),
    WpgState.RECOVERING: frozenset({WpgState.READY, WpgState.LOST, WpgState.STOPPED}),
    WpgState.READY: frozenset({WpgState.LOST, WpgState.STOPPED}),
    WpgState.LOST: frozenset({WpgState.STARTING, WpgState.STOPPED}),
    WpgState.STOPPED: frozenset(),
}

JOB_TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.SUBMITTED: frozenset(
        {
            JobState.PROFILING,
            JobState.PLACED,
            JobState.REJECTED,
            JobState.DONE,
            JobState.FAILED,
        }
    ),
    JobState.PROFILING: frozenset(
        {JobState.ACTIVE, JobState.DRAINING, JobState.REJECTED, JobState.DONE, JobState.FAILED}
    ),
    JobState.PLACED: frozenset(
        {JobState.ACTIVE, JobState.DRAINING, JobState.REJECTED, JobState.DONE, JobState.FAILED}
    ),
    JobState.ACTIVE: frozenset(
        {JobState.DRAINING, JobState.DONE, JobState.FAILED, JobState.ROLLED_BACK}
    ),
    JobState.ROLLED_BACK: frozenset(
        {
            JobState.ACTIVE,
            JobState.DRAINING,
            JobState.ROLLED_BACK,
            JobState.DONE,
            JobState.FAILED,
        }
    ),
    JobState.DRAINING: frozenset({JobState.DONE, JobState.FAILED}),
    JobState.DONE: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.REJECTED: frozenset(),
}

JOB_ENDED = frozenset({JobState.DONE, JobState.FAILED, JobState.REJECTED})


class InvalidTransition(InternalError):
    """An entity was asked to go where its table has no arrow."""

    def __init__(self, entity: str, before: StrEnum, after: StrEnum, sequence: int) -> None:
        super().__init__(f"{entity}: {before} -> {after} at log sequence {sequence}")


class Op(msgspec.Struct):
    """An operation that has no outcome yet."""

    key: OperationKey
    id: str
    kind: str
    after: list[After]
    version: VersionKey | None
    content_type: str
    arrival: int
    """Log sequence of its QueuedOperation: breaks ties."""
    queued_s: float
    state: OpState = OpState.QUEUED
    eligible_s: float = -1.0
    """When the last thing it waits for on other deployments was done; -1: not yet."""
    uncertain: bool = False
    """Its WPG died while it was permitted: it may have taken effect in the dead incarnation."""
    refusals: int = 0
    expires_s: float = 0.0
    """It ends EXPIRED where it has no permit by then; 0: it waits."""
    is_cancelled: bool = False
    """Whoever made it wants it no more: it is not permitted again."""
    is_settling: bool = False
    """Its outcome is being found out: what is stored decides."""
    permitted_s: float = 0.0
    """When it was permitted last."""
    num_bytes: int = 0
    """Of its payload."""
    is_cut: bool = False
    """Of a `save_state`: it needs neither devices nor state any more, and is being written; where
    its WPG died meanwhile, it is run again in its place among the mutations."""

    @property
    def is_mutating(self) -> bool:
        return self.kind in MUTATING_KINDS

    @property
    def has_ended(self) -> bool:
        return self.state not in (OpState.QUEUED, OpState.PERMITTED)

    @property
    def ready_s(self) -> float:
        """Since when it could run, as far as other deployments go."""
        return max(self.queued_s, self.eligible_s)


class Mutation(msgspec.Struct, frozen=True):
    """A mutating operation that took effect, above the purge floor."""

    seq: int
    kind: str
    num_bytes: int = 0
    version: VersionKey | None = None
    """That it brought: it is needed as long as this may have to be run again."""
    duration_s: float = 0.0
    """That it took."""


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


class Closing(StrEnum):
    """Why a node is to be left."""

    DRAIN = "drain"
    """On request: what is on it goes elsewhere."""
    AWAY = "away"
    """It has not come back for a while: what can be rebuilt without it is."""
    GONE = "gone"
    """It will not come back: what it alone had is lost."""


class Leave(msgspec.Struct):
    """A node that is to be left."""

    why: Closing
    is_drained: bool = False
    """An operator has asked for it: it holds until that is undone, whatever becomes of the node."""
    is_told: bool = False
    """People know that nothing is on it any more."""


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


class Job(msgspec.Struct):
    key: JobKey
    spec: JobSpec
    state: JobState = JobState.SUBMITTED
    submitted_s: float = 0.0
    submitted_sequence: int = 0
    session: int = 0
    """The newest: operations of older ones are refused."""
    has_controller: bool = True
    """Until its newest session's heartbeat has ended."""
    published: list[VersionKey] = []
    """Weights versions that exist."""
    phases: dict[str, int] = {}
    """Pool → session whose controller declared a phase there that is open."""
    follows: dict[str, str] = {}
    """`<deployment>.<kind>` → deployment that ran next on its pool, last time after a gap."""
    began_s: float = -1.0
    """When its first operation was ready; -1: none has begun."""
    round: int = 0
    """Of its group's meta-iterations, under a policy that serves them: the last that it began."""
    lag_s: float = 0.0
    """For how long, since then, others or a switch kept its operations from running."""
    early_misses: int = 0
    """Activations opened early for it, in a row, that were displaced before their operation."""
    early_skips: int = 0
    """Gaps still to pass before an activation is opened early for it again."""
    checkpoint: str = ""
    """Name of the newest checkpoint with a controller's blob."""
    checkpoints: dict[str, str] = {}
    """Deployment -> its checkpoint that belongs to that one."""
    ended_session: int = -1
    """Sessions up to this one ended with a roll-back: what they send is refused."""
    last_seqs: dict[str, int] = {}
    """Deployment that was deleted, or of an earlier job of this name -> the last seq that it
    used."""
    incarnations: dict[str, int] = {}
    """Deployment that was deleted, or of an earlier job of this name -> its last incarnation."""
    orphans: dict[str, list[NodeId]] = {}
    """Weights version of a deleted policy that others need → the nodes that have it."""
    copying: dict[str, Copying] = {}
    """Of those, the ones that another node fetches."""
    why_here: str = ""
    """Why placement chose its place."""
    error: ErrorInfo | None = None


class Expected(msgspec.Struct):
    """When a job's next operation on a device is predicted, after one that ended."""

    after: str
    """`<deployment>.<kind>`."""
    ended_s: float
    soonest_s: float
    """10th percentile, where the profiler knows it."""
    at_s: float
    late_s: float
    """From then on the prediction counts as wrong."""
    is_tried: bool = False
    """An activation was opened for it, or deliberately not: once a gap is enough."""
    is_told: bool = False
    """State managers have had a hint."""


class Phase(msgspec.Struct):
    """A run of one job's operations on a device."""

    job: str = ""
    kinds: list[str] = []
    """`<deployment>.<kind>` of each that began in it."""
    began_s: float = 0.0


class Device(msgspec.Struct):
    memory_bytes: int
    resident: list[str] = []
    """Deployments whose state is on it, least recently used first."""
    placed: list[str] = []
    ready: dict[str, str] = {}
    """Of those placed, the ones with a ready operation → their job."""
    holder: str = ""
    """Job that used it last."""
    held_since_s: float = 0.0
    """When the holder took it."""
    running: str = ""
    """Deployment whose operations run on it now, or will once its activation is open."""
    used_by: str = ""
    """Deployment that used it last, …"""
    used_since_s: float = 0.0
    """… and since when no other did."""
    is_let_go: bool = False
    """The holder has said that its phase here is over: it is not kept for it."""
    early: str = ""
    """Deployment whose activation was opened before its operation, which has not come yet."""
    expected: dict[str, Expected] = {}
    """Job → its next operation here, where predicted."""
    last: str = ""
    """`<deployment>.<kind>` of what ended last: what the profiler's gap is looked up by."""
    idle_since_s: float = 0.0
    phase: Phase = msgspec.field(default_factory=Phase)
    """That it is in, or was in last."""
    served: dict[str, int] = {}
    """Job → log sequence at which its operations last began here."""
    rounds: dict[str, int] = {}
    """Job → the last round of which it began a phase here."""
    timer: str = ""


class Node(msgspec.Struct):
    node: NodeId
    pool: str
    devices: list[Device]
    host_memory_bytes: int
    revision: int
    state_endpoint: str
    residency: Residency
    is_up: bool = True
    claims: list[str] = []
    """Deployments that were chosen and wait until all of their devices are free, in that order:
    any two are in the same one on every node that they share."""


class State(msgspec.Struct):
    sequence: int = 0
    now_s: float = 0.0
    config: SchedulerConfig | None = None
    nodes: dict[str, Node] = {}
    jobs: dict[str, Job] = {}
    deployments: dict[str, Deployment] = {}
    traces: dict[str, PhaseTrace] = {}
    switch_s: dict[str, tuple[float, float]] = {}
    """Newest (offload, load) seconds by deployment."""
    timers: dict[str, float] = {}
    """When each is due."""
    waiters: dict[str, list[str]] = {}
    """Operation key -> the operations that wait for it."""
    cluster: Cluster = msgspec.field(default_factory=Cluster)
    """What placement knows: nodes, groups, and the jobs that have a place or wait for one."""
    replanning: int = 0
    """Sequence of the step that asked for moves and has no answer yet; 0: none."""
    is_replan_due: bool = False
    """A job has come or left since."""
    moving: list[str] = []
    """Deployments that are to go elsewhere, in the order in which that was decided."""
    closing: dict[NodeId, Leave] = {}
    """Nodes that are drained, or do not come back."""
    crowded: list[NodeId] = []
    """Nodes whose host memory may not hold the states of all that are placed on them."""
    stopping: dict[str, dict[str, int]] = {}
    """Node -> deployments of ended jobs that it has not confirmed to have forgotten, and in which
    incarnation it was told."""


class SnapshotHead(msgspec.Struct, frozen=True):
    """What every core version can read of another's."""

    core_version: int


class Snapshot(SnapshotHead, frozen=True):
    state: State


def new_devices(specs: list[DeviceSpec]) -> list[Device]:
    return [Device(memory_bytes=spec.memory_bytes) for spec in specs]
