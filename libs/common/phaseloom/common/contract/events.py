"""The decision log: every event that the scheduler decides on; and notices, which only people read.

router, agent, profiler, scheduler's shell and job API → SCHED → scheduler, standby, recorder. Each
event names its own producer.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import msgspec

from phaseloom.common.contract.codec import Message
from phaseloom.common.contract.errors import ErrorInfo
from phaseloom.common.contract.ids import DeploymentKey, JobKey, NodeId, OperationKey, VersionKey
from phaseloom.common.contract.operations import After, Outcome
from phaseloom.common.contract.specs import (
    Capabilities,
    CommandId,
    DeploymentSpec,
    DeviceSpec,
    JobSpec,
    Residency,
    SchedulerConfig,
    Segment,
)


class SchedulerConfigured(Message, frozen=True):
    """scheduler's shell → scheduler, profiler. First in the log, and at each change."""

    config: SchedulerConfig


class NodeUp(Message, frozen=True):
    """agent → scheduler. A node's agent took its lease; nothing from before survives on it."""

    node: NodeId
    pool: str
    devices: list[DeviceSpec]
    host_memory_bytes: int
    revision: int
    """The revision of the node's lease: every command names it, and an agent refuses any other."""
    state_endpoint: str
    """host:port where this node's state manager serves weights versions."""
    exclusive_residency: Residency = Residency.SHARED
    price_per_hour: float = 1.0
    """The price of the whole node, in any currency: placement weighs nodes by it."""
    backends: dict[str, Capabilities] = {}
    """The backends that the node's ranks can run, by name; empty: any."""


class NodeLost(Message, frozen=True):
    """agent or lease watcher → scheduler. No process from under that lease runs any more."""

    node: NodeId
    revision: int
    reason: str


class WpgStarted(Message, frozen=True):
    """agent → scheduler. All ranks on it are up; state is in host memory, as of `applied`."""

    deployment: DeploymentKey
    incarnation: int
    node: NodeId
    state_bytes: int
    applied: int
    """The seq of the last mutating operation in the state: 0, or the seal's."""
    devices: list[int] = []
    """The device of each rank; for people who read the log."""


class WpgLost(Message, frozen=True):
    """agent → scheduler. The WPG's ranks on it are dead and reaped (a failed start included)."""

    deployment: DeploymentKey
    incarnation: int
    node: NodeId
    error: ErrorInfo
    culprits: list[DeploymentKey] = []
    """Where the WPG's rank died with a process that it shared: the deployments whose ranks in it
    were running an operation, starting, or being switched in. Empty: none was, or the rank had a
    process alone."""

    @property
    def is_innocent(self) -> bool:
        """Whether the WPG died of what another one did in the process that they shared."""
        return bool(self.culprits) and self.deployment not in self.culprits


class NodeDrainRequested(Message, frozen=True, omit_defaults=True):
    """operator API → scheduler. The deployments on the node are to move to others."""

    node: NodeId
    request: str
    """The id of the API request that caused the event."""
    undo: bool = False
    """Whether an earlier request is taken back instead."""
    gone: bool = False
    """Whether the node is gone for good, with all that it alone had."""


class StateMirrored(Message, frozen=True, omit_defaults=True):
    """agent → scheduler. Answer to `MirrorState`."""

    deployment: DeploymentKey
    seq: int
    """The seq of the seal; 0: no seal was asked for."""
    node: NodeId
    command: CommandId
    error: ErrorInfo | None = None
    """The reason why the copy is not on the node; None: it is."""


class JobSubmitted(Message, frozen=True):
    """job API → scheduler."""

    job: JobKey
    spec: JobSpec
    request: str
    """The id of the API request that caused the event."""


class JobFinished(Message, frozen=True):
    """job API → scheduler. The controller is done, or gave up; its state is dropped."""

    job: JobKey
    request: str
    failed: bool = False


class DrainRequested(Message, frozen=True):
    """job API → scheduler. The job takes no new operations, and ends once none is open."""

    job: JobKey
    request: str


class DeploymentCreated(Message, frozen=True):
    """job API → scheduler, profiler. One more deployment of a job that runs."""

    job: JobKey
    spec: DeploymentSpec
    request: str


class DeploymentDeleted(Message, frozen=True):
    """job API → scheduler, profiler. Its operations end ABORTED and its state is dropped."""

    deployment: DeploymentKey
    request: str


class SessionOpened(Message, frozen=True):
    """router → scheduler. A controller attached. Operations of older sessions that are queued after
    this entry of the log are refused."""

    job: JobKey
    session: int


class SessionLost(Message, frozen=True):
    """scheduler's lease watcher → scheduler. The controller's heartbeat ended: its devices are not
    kept for it."""

    job: JobKey
    session: int


class PhaseDeclared(Message, frozen=True):
    """job API → scheduler, profiler. The controller began or ended a phase on a pool."""

    job: JobKey
    session: int
    pool: str
    is_open: bool


class CancelRequested(Message, frozen=True, omit_defaults=True):
    """job API → scheduler. An operation without a permit ends; a reading operation that runs is
    stopped."""

    key: OperationKey
    request: str
    """The id of the API request that caused the event."""
    keeps_partial: bool = False
    """Whether a `generate` that runs completes with the tokens that it has."""


class QueuedOperation(Message, frozen=True, omit_defaults=True):
    """router → scheduler: an operation's header, never its payload."""

    key: OperationKey
    id: str
    kind: str
    after: list[After] = []
    version: VersionKey | None = None
    """For `sync_weights`: the version that it installs. For an operation that only reads: the
    version that it names."""
    payer: str = ""
    """For an operation that only reads: the job whose weights it names, which the device time is
    counted for; empty: its own job."""
    ttl_s: float = 0.0
    """For `publish_weights`: seconds for which its version can be named."""
    size: int = 0
    """The most tokens of the operation (prompt and new tokens, over all samples), for readers of
    the log; the scheduler estimates by kind."""
    content_type: str = "application/msgpack"
    """How the operation was encoded, and how its outcome is written."""
    session: int = 0
    timeout_s: float = 0.0
    num_bytes: int = 0
    """The size of the payload as it is stored."""
    error: ErrorInfo | None = None
    """Set where the operation was refused: it becomes a failed operation, not a gap."""


class OperationsQueued(Message, frozen=True, omit_defaults=True):
    """router → scheduler, profiler. Several operations that were appended together.

    Each counts as one of its own, in this order.
    """

    operations: list[QueuedOperation]
    traceparents: list[str] = []
    """The trace of each operation; an empty list: none of them is traced."""


MAX_STEP_RUNS = 16
"""The most runs of steps that the end of an operation tells, of all replicas together."""


class StepRun(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive forward steps of an operation over about equally many tokens."""

    steps: int
    tokens: int
    """The tokens of all the steps: prefilled ones, and one for each row that decodes."""
    duration_s: float
    """The seconds from the end of the step before the first to the end of the last."""
    replica: int = 0
    """The data-parallel replica that ran them."""


class OperationFinished(Message, frozen=True, omit_defaults=True):
    """WPG leader → scheduler, profiler. The operation's outcome is stored in DONE."""

    key: OperationKey
    kind: str
    outcome: Outcome
    epoch: int
    incarnation: int
    started_unix_s: float
    duration_s: float
    replay: bool = False
    dirty: bool = False
    """Whether an error inside a mutating operation left the state unusable: this incarnation must
    be rebuilt without the operation."""
    error: ErrorInfo | None = None
    num_tokens: int = 0
    """The number of tokens that it worked on: prompts and new tokens of a `generate`, else those of
    the batch."""
    share: float = 1.0
    """The part of `duration_s` that counts as its own, where others ran on its devices at the same
    time: at each moment theirs are in proportion to their sequences."""
    checkpoints: dict[str, str] = {}
    """For a `save_state` with a controller's blob: deployment → checkpoint, its own included."""
    steps: list[StepRun] = []
    """The forward steps of a `generate` in their order, each replica's behind those of the one
    before; at most `MAX_STEP_RUNS`. Where other operations shared its steps, their tokens count
    too."""


class OperationsFinished(Message, frozen=True):
    """WPG leader → scheduler, profiler. Several operations whose ends were appended together.

    Each counts as one of its own, in this order.
    """

    operations: list[OperationFinished]


class ActivationOpened(Message, frozen=True):
    """agent → scheduler, profiler. A switch-in is done and verified."""

    deployment: DeploymentKey
    epoch: int
    node: NodeId
    started_unix_s: float
    offload_s: float
    load_s: float
    bytes_out: int
    bytes_in: int
    displaced: list[DeploymentKey] = []
    is_speculative: bool = False
    """Whether the activation was opened for an operation that was only predicted."""


class ActivationRefused(Message, frozen=True):
    """agent → scheduler. The switch-in was rolled back, or the deployment does not fit."""

    deployment: DeploymentKey
    epoch: int
    node: NodeId
    error: ErrorInfo


class PermitReturned(Message, frozen=True):
    """WPG leader → scheduler. The operation was not run and nothing changed, because a resource
    that it needs is out of reach now."""

    key: OperationKey
    epoch: int
    incarnation: int
    error: ErrorInfo


class StateSnapshotTaken(Message, frozen=True):
    """WPG leader → scheduler. The snapshot of a `save_state` is copied from the devices.

    Other operations may go on while the checkpoint is written.
    """

    key: OperationKey
    epoch: int
    incarnation: int


class TailGathered(Message, frozen=True):
    """WPG leader → scheduler. The long tail of these `generate`s, which are all that run, continues
    on some of the WPG's ranks: the other ranks have nothing to do until they end."""

    operations: list[OperationKey]
    epoch: int
    incarnation: int
    freed: list[int]
    """The ranks with nothing to do."""


class ClaimsAdjusted(Message, frozen=True):
    """agent → scheduler. Answer to an `AdjustClaims` that shrinks: the rank uses no other units of
    its device any more."""

    deployment: DeploymentKey
    incarnation: int
    node: NodeId
    command: CommandId


class SealCommitted(Message, frozen=True):
    """agent → scheduler. A copy of the whole state at `seq` survives the loss of every process.

    Where the WPG is on several nodes, each node reports its part.
    """

    deployment: DeploymentKey
    seq: int
    node: NodeId
    versions: list[int]
    """Weights versions of this policy that are as durable as the seal."""
    copies: list[NodeId] = []
    """Other nodes that have all of this on their disks."""


class SealRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """agents → KV `seals`: the commit record of a deployment's newest seal.

    Each node of a WPG adds its part, by compare and swap; with the last one the seal is committed.
    """

    seq: int
    num_parts: int = 1
    parts: list[SealCommitted] = []
    committed: int = 0
    """seq of the committed seal before, which stands until this one is whole; 0: none does."""

    @property
    def is_whole(self) -> bool:
        # One of before there were parts names none.
        return not self.parts or len(self.parts) == self.num_parts

    @property
    def newest(self) -> int:
        """seq of the newest committed seal; 0: there is none."""
        return self.seq if self.is_whole else self.committed


class SealFailed(Message, frozen=True):
    """agent → scheduler. The previous seal stands."""

    deployment: DeploymentKey
    seq: int
    node: NodeId
    error: ErrorInfo


class KindEstimate(msgspec.Struct, frozen=True):
    deployment: str
    kind: str
    duration_s: float
    """The median of the recent durations, in seconds."""
    next_gap_s: float
    """Median time until the same job's next operation on this pool is ready; -1: not known."""
    count: int
    p95_s: float = 0.0
    """95th percentile of the recent durations."""
    worst_s: float = 0.0
    """The longest duration, where every sample reaches its token limit."""
    gap_p10_s: float = -1.0
    gap_p90_s: float = -1.0
    """10th and 90th percentile of the gap; -1: not known."""
    sub_stages: tuple[StepRun, ...] = ()
    """The sub-stages that recent operations went through in most cases, with medians: each
    replica's behind those of the one before. Empty: it tells no forward steps."""


class PhaseTrace(Message, frozen=True):
    """profiler → scheduler, people. A job's cycle as measured."""

    job: JobKey
    period_s: float
    """The period in seconds; 0: no cycle was found yet."""
    segments: list[Segment]
    estimates: list[KindEstimate]
    worst_period_s: float = 0.0
    """The period where every operation takes its `worst_s`."""
    drift: float = 0.0
    """The relative change of the period against the trace before; 0: too small to matter."""
    num_optim_steps: int = 1
    """`optim_step`s of all deployments in one period."""


class PlannedMove(msgspec.Struct, frozen=True, omit_defaults=True):
    """A move of a job from its node group to another one."""

    job: JobKey
    group: str
    """The group that it moves to; empty: a new one."""
    nodes: dict[str, list[NodeId]]
    """Pool → the nodes that the job is pinned to there; free nodes among them join the group."""
    why: str = ""
    shift_s: float = 0.0
    takes_turns: bool = False
    """Whether its rollouts take turns with those of others on their node."""


class ReplanComputed(Message, frozen=True):
    """scheduler's shell → scheduler. The moves that are worth their price, computed from the groups
    as they were at entry `as_of`."""

    as_of: int
    """The sequence of the log's entry after which the plan was asked for."""
    moves: list[PlannedMove]
    """The moves in order: each may build on those before it."""
    num_groups: int
    """The number of groups made until then: the k-th move to a new group makes `g<num_groups +
    k>`."""
    versions: dict[str, int]
    """The version of each group that the moves touch: a group that has changed since is left
    alone."""


class TimerFired(Message, frozen=True):
    """scheduler's shell → scheduler."""

    timer: str


Event = (
    SchedulerConfigured
    | NodeUp
    | NodeLost
    | NodeDrainRequested
    | WpgStarted
    | WpgLost
    | JobSubmitted
    | JobFinished
    | DrainRequested
    | DeploymentCreated
    | DeploymentDeleted
    | SessionOpened
    | SessionLost
    | PhaseDeclared
    | CancelRequested
    | QueuedOperation
    | OperationsQueued
    | OperationFinished
    | OperationsFinished
    | ActivationOpened
    | ActivationRefused
    | PermitReturned
    | StateSnapshotTaken
    | TailGathered
    | ClaimsAdjusted
    | SealCommitted
    | SealFailed
    | StateMirrored
    | PhaseTrace
    | ReplanComputed
    | TimerFired
)


_Several = OperationsQueued | OperationsFinished


def parts(event: Event) -> Seq[Event]:
    """The events that an entry of the decision log stands for: one, or several in order."""
    if isinstance(event, _Several):
        return event.operations
    return (event,)


class Notice(msgspec.Struct, frozen=True, omit_defaults=True):
    """every service → EVENTS → people. Something was dropped, refused, retried, restarted or rolled
    back."""

    source: str
    what: str
    reason: str
    subject: str = ""
    """The operation, deployment, node or service that the notice is about."""
