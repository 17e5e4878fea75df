"""The decision log, with every event that the scheduler decides on; and notices, which only people
read.

router, agent, profiler, scheduler's shell and job API → SCHED → scheduler, standby, recorder. Each
event's text names its producer.
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
    """scheduler's shell → scheduler, profiler. The first entry of the log, repeated at each change
    of the settings."""

    config: SchedulerConfig


class NodeUp(Message, frozen=True):
    """agent → scheduler. A node's agent acquired its lease. The node has no processes or memory
    from before."""

    node: NodeId
    pool: str
    devices: list[DeviceSpec]
    host_memory_bytes: int
    revision: int
    """Revision of the node's lease. Every command names it, and the agent refuses any other."""
    state_endpoint: str
    """host:port at which this node's state manager serves weights versions."""
    exclusive_residency: Residency = Residency.SHARED
    price_per_hour: float = 1.0
    """Price of the whole node, in any currency. Placement weighs nodes by it."""
    backends: dict[str, Capabilities] = {}
    """The backends that the node's ranks can run, by name; empty: any."""


class NodeLost(Message, frozen=True):
    """agent or lease watcher → scheduler. All processes that ran under that lease have ended."""

    node: NodeId
    revision: int
    reason: str


class WpgStarted(Message, frozen=True):
    """agent → scheduler. All ranks of the WPG on this node are up. Their state is in host memory,
    as of `applied`."""

    deployment: DeploymentKey
    incarnation: int
    node: NodeId
    state_bytes: int
    applied: int
    """The seq of the last mutating operation in the state: 0, or that of the seal."""
    devices: list[int] = []
    """The device of each rank, for people who read the log."""


class WpgLost(Message, frozen=True):
    """agent → scheduler. The WPG's ranks on this node are dead and reaped. Also reports a failed
    start."""

    deployment: DeploymentKey
    incarnation: int
    node: NodeId
    error: ErrorInfo
    culprits: list[DeploymentKey] = []
    """Set if the WPG's rank died together with a process that it shared with other deployments: the
    deployments whose ranks in that process were running an operation, starting, or being switched
    in. Empty: there was no such rank, or the process was not shared."""

    @property
    def is_innocent(self) -> bool:
        """Whether another WPG, in the process that they shared, caused the death of this one."""
        # Without known culprits the WPG itself counts as the cause.
        return bool(self.culprits) and self.deployment not in self.culprits


class NodeDrainRequested(Message, frozen=True, omit_defaults=True):
    """operator API → scheduler. Move the deployments on the node to other nodes."""

    node: NodeId
    request: str
    """The id of the API request that caused the event."""
    undo: bool = False
    """Whether to cancel an earlier request instead."""
    gone: bool = False
    """Whether the node is permanently gone, with everything that only it had."""


class StateMirrored(Message, frozen=True, omit_defaults=True):
    """agent → scheduler. Answer to `MirrorState`."""

    deployment: DeploymentKey
    seq: int
    """The seq of the seal; 0: no seal was requested."""
    node: NodeId
    command: CommandId
    error: ErrorInfo | None = None
    """Why the copy is not on the node; None: it is there."""


class JobSubmitted(Message, frozen=True):
    """job API → scheduler."""

    job: JobKey
    spec: JobSpec
    request: str
    """The id of the API request that caused the event."""


class JobFinished(Message, frozen=True):
    """job API → scheduler. The controller finished or gave up, or a person cancelled the job. The
    job's state is dropped."""

    job: JobKey
    request: str
    failed: bool = False
    cancelled: bool = False


class DrainRequested(Message, frozen=True):
    """job API → scheduler. The job accepts no new operations and ends once none is open."""

    job: JobKey
    request: str


class DeploymentCreated(Message, frozen=True):
    """job API → scheduler, profiler. A running job gets another deployment."""

    job: JobKey
    spec: DeploymentSpec
    request: str


class DeploymentDeleted(Message, frozen=True):
    """job API → scheduler, profiler. The deployment's operations end ABORTED and its state is
    dropped."""

    deployment: DeploymentKey
    request: str


class SessionOpened(Message, frozen=True):
    """router → scheduler. A controller attached. Operations of older sessions that are queued after
    this log entry are refused."""

    job: JobKey
    session: int


class SessionLost(Message, frozen=True):
    """scheduler's lease watcher → scheduler. The controller's heartbeats stopped, so its devices
    are not held for it."""

    job: JobKey
    session: int


class PhaseDeclared(Message, frozen=True):
    """job API → scheduler, profiler. The controller began or ended a phase on a pool."""

    job: JobKey
    session: int
    pool: str
    is_open: bool


class CancelRequested(Message, frozen=True, omit_defaults=True):
    """job API → scheduler. End an operation without a permit, or stop a running reading
    operation."""

    key: OperationKey
    request: str
    """The id of the API request that caused the event."""
    keeps_partial: bool = False
    """Whether a running `generate` completes with the tokens already sampled."""


class QueuedOperation(Message, frozen=True, omit_defaults=True):
    """router → scheduler: an operation's header without its payload."""

    key: OperationKey
    id: str
    kind: str
    after: list[After] = []
    version: VersionKey | None = None
    """For `sync_weights`: the version to install. For reading operations: the version whose weights
    they use instead of the deployment's own."""
    payer: str = ""
    """For reading operations: the job to charge the device time to, because the operation names its
    weights; empty: its own job."""
    ttl_s: float = 0.0
    """For `publish_weights`: seconds for which operations can name the version."""
    size: int = 0
    """Upper bound of the operation's tokens (prompt and new ones, over all samples), for readers of
    the log. The scheduler estimates by kind instead."""
    content_type: str = "application/msgpack"
    """The encoding of the operation, and therefore of its outcome."""
    session: int = 0
    timeout_s: float = 0.0
    num_bytes: int = 0
    """Size of the stored payload."""
    error: ErrorInfo | None = None
    """Set if the operation was refused. It becomes a failed operation, so that its number is not
    missing."""


class OperationsQueued(Message, frozen=True, omit_defaults=True):
    """router → scheduler, profiler. Several operations that were appended together.

    Each one counts as a separate event, in this order.
    """

    operations: list[QueuedOperation]
    traceparents: list[str] = []
    """The trace of each operation; an empty list: none of them is traced."""


MAX_STEP_RUNS = 16
"""Maximum number of step runs in an OperationFinished, over all replicas."""


class StepRun(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive forward steps of an operation with similar numbers of tokens."""

    steps: int
    tokens: int
    """Total tokens of the steps: prefilled ones, plus one per step for each decoding row."""
    duration_s: float
    """Seconds from the end of the step before the first one to the end of the last one."""
    replica: int = 0
    """The data-parallel replica that ran the steps."""


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
    """Whether an error inside a mutating operation left the state unusable. The WPG must then be
    rebuilt without the operation."""
    error: ErrorInfo | None = None
    num_tokens: int = 0
    """Number of tokens that the operation processed: prompt and new tokens of a `generate`,
    otherwise those of the batch."""
    share: float = 1.0
    """Fraction of `duration_s` charged to this operation if others ran on its devices at the same
    time. At each moment the time is divided in proportion to the numbers of sequences."""
    checkpoints: dict[str, str] = {}
    """For a `save_state` with a controller blob: deployment → checkpoint, including its own."""
    steps: list[StepRun] = []
    """The forward steps of a `generate` in order, one replica after the other; at most
    `MAX_STEP_RUNS`. If other operations shared the steps, their tokens are included."""
    outcome_bytes: int = 0
    """Size of the stored outcome."""


class OperationsFinished(Message, frozen=True):
    """WPG leader → scheduler, profiler. Several operations whose ends were appended together.

    Each one counts as a separate event, in this order.
    """

    operations: list[OperationFinished]


class ActivationOpened(Message, frozen=True):
    """agent → scheduler, profiler. A switch-in is complete and verified."""

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
    """agent → scheduler. The switch-in was rolled back, or the deployment does not fit on the
    device."""

    deployment: DeploymentKey
    epoch: int
    node: NodeId
    error: ErrorInfo


class PermitReturned(Message, frozen=True):
    """WPG leader → scheduler. The operation did not run and nothing changed, because a resource
    that it needs is unreachable."""

    key: OperationKey
    epoch: int
    incarnation: int
    error: ErrorInfo


class StateSnapshotTaken(Message, frozen=True):
    """WPG leader → scheduler. The snapshot of a `save_state` has been copied from the devices.

    Other operations may run while the checkpoint is written.
    """

    key: OperationKey
    epoch: int
    incarnation: int


class TailGathered(Message, frozen=True):
    """WPG leader → scheduler. The only running operations are these `generate`s, and their long
    tail continues on some of the WPG's ranks. The other ranks are idle until they end."""

    operations: list[OperationKey]
    epoch: int
    incarnation: int
    freed: list[int]
    """The idle ranks."""


class ClaimsAdjusted(Message, frozen=True):
    """agent → scheduler. Answer to an `AdjustClaims` that shrinks: the rank no longer uses any
    other compute units of its device."""

    deployment: DeploymentKey
    incarnation: int
    node: NodeId
    command: CommandId


class SealCommitted(Message, frozen=True):
    """agent → scheduler. A copy of the whole state at `seq` survives the loss of every process.

    If the WPG spans several nodes, each node reports its part.
    """

    deployment: DeploymentKey
    seq: int
    node: NodeId
    versions: list[int]
    """Weights versions of this policy that are as durable as the seal."""
    copies: list[NodeId] = []
    """Other nodes that have a complete copy on their disks."""


class SealRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """agents → KV `seals`: the commit record of a deployment's newest seal.

    Each node of a WPG adds its part by compare and swap. The seal is committed once the last part
    is there.
    """

    seq: int
    num_parts: int = 1
    parts: list[SealCommitted] = []
    committed: int = 0
    """The seq of the previously committed seal, which stays valid until this one is complete; 0:
    none."""

    @property
    def is_whole(self) -> bool:
        # Records written before seals had parts list none.
        return not self.parts or len(self.parts) == self.num_parts

    @property
    def newest(self) -> int:
        """The seq of the newest committed seal; 0: none."""
        return self.seq if self.is_whole else self.committed


class SealFailed(Message, frozen=True):
    """agent → scheduler. The seal was not written; the previous one stays valid."""

    deployment: DeploymentKey
    seq: int
    node: NodeId
    error: ErrorInfo


class KindEstimate(msgspec.Struct, frozen=True):
    deployment: str
    kind: str
    duration_s: float
    """Median of the recent durations."""
    next_gap_s: float
    """Median time until the same job's next operation on this pool is ready; -1: unknown."""
    count: int
    p95_s: float = 0.0
    """95th percentile of the recent durations."""
    worst_s: float = 0.0
    """The longest duration, in which every sample reaches its token limit."""
    gap_p10_s: float = -1.0
    gap_p90_s: float = -1.0
    """10th and 90th percentiles of the gap; -1: unknown."""
    sub_stages: tuple[StepRun, ...] = ()
    """The sub-stages that most recent operations went through, with median values, one replica
    after the other. Empty: the kind reports no forward steps."""


class PhaseTrace(Message, frozen=True):
    """profiler → scheduler, people. A job's cycle as measured."""

    job: JobKey
    period_s: float
    """The period in seconds; 0: no cycle has been detected yet."""
    segments: list[Segment]
    estimates: list[KindEstimate]
    worst_period_s: float = 0.0
    """The period if every operation takes its `worst_s`."""
    drift: float = 0.0
    """Relative change of the period since the previous trace; 0: too small to matter."""
    num_optim_steps: int = 1
    """Number of `optim_step`s of all deployments in one period."""


class PlannedMove(msgspec.Struct, frozen=True, omit_defaults=True):
    """A move of a job from its node group to another one."""

    job: JobKey
    group: str
    """The group to move to; empty: a new one."""
    nodes: dict[str, list[NodeId]]
    """Pool → the nodes that the job will be pinned to. Free nodes among them join the group."""
    why: str = ""
    shift_s: float = 0.0
    takes_turns: bool = False
    """Whether its rollouts alternate with those of other jobs on their node."""


class ReplanComputed(Message, frozen=True):
    """scheduler's shell → scheduler. The moves whose gain exceeds their cost, computed from the
    groups as of log entry `as_of`."""

    as_of: int
    """Sequence of the log entry after which the plan was requested."""
    moves: list[PlannedMove]
    """The moves in order. Each one may depend on those before it."""
    num_groups: int
    """Number of groups created so far. The k-th move to a new group creates `g<num_groups + k>`."""
    versions: dict[str, int]
    """The version of each group that the moves affect. A group that has changed since then is not
    touched."""


class OutcomesDropped(Message, frozen=True):
    """scheduler's shell → scheduler. A tenant's outcomes that were stored before a time, and that
    no rebuild needs, have been deleted early, to keep the tenant within its bytes."""

    tenant: str
    before_s: float
    """Unix seconds."""


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
    | OutcomesDropped
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


_BatchedEvents = OperationsQueued | OperationsFinished


def parts(event: Event) -> Seq[Event]:
    """Return the events of a decision-log entry, in order: one, or several that were appended
    together."""
    if isinstance(event, _BatchedEvents):
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
