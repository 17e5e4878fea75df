"""The whole message contract: every type that crosses the bus, its producer and its consumers.

Conventions
- Frozen structs; unions are tagged by `type` (snake case). Unknown fields are ignored, missing
  ones refused. JSON (`application/json`) or MessagePack (`application/msgpack`), by the
  `Content-Type` header.
- `…_s` are seconds (durations, unless named `…_unix_s`), `…_bytes` bytes.
- Arrays of tokens and log-probabilities are JSON lists, or little-endian bytes (int32, float32)
  in MessagePack; `phaseloom.common.arrays` converts.
- Weights never ride the bus. Nothing is ever unpickled.

Shapes: T tokens of one sample. Losses follow one rule: position i predicts `targets[i]`, and every
loss is a plain sum over positions. With lp the learner's log-probability of the target, q the
`logprobs` given (of the sampler), A `advantages`, w `weights`, r = exp(lp − q):
    cross_entropy        −Σ w·lp
    importance_sampling  −Σ r·A
    ppo                  −Σ min(r·A, clip(r, clip_low, clip_high)·A)
    cispo                −Σ clip(r, clip_low, clip_high)·A·lp, the clipped ratio without gradient
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from enum import StrEnum
from typing import Any

import msgspec

from phaseloom.common.errors import ErrorInfo
from phaseloom.common.ids import DeploymentKey, JobKey, NodeId, OperationKey, VersionKey

Int32s = list[int] | bytes
Float32s = list[float] | bytes


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


class Message(msgspec.Struct, frozen=True, tag=_snake, tag_field="type", omit_defaults=True):
    """Base of everything that is part of a union on the wire."""


# --- Deployments -------------------------------------------------------------------------------


class ModelSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """What to build: a Hugging Face causal-LM config, initialised from a seed."""

    config: dict[str, Any]
    """The config as `config.to_dict()` gives it; `model_type` picks the architecture."""
    init_seed: int = 0
    token_texts: list[str] = []
    """The text of each token id, where operations give stop strings; else empty."""


class Layout(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a deployment is spread over its ranks; their number is dp · tp · pp · cp."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    """Experts are spread over the data-parallel ranks: divides dp · cp · tp."""

    @property
    def num_ranks(self) -> int:
        return self.dp * self.tp * self.pp * self.cp


class Batching(StrEnum):
    OPERATION = "operation"
    """Each operation is a batch of its own: its result depends on nothing else in flight."""
    SHARED = "shared"
    """Operations in flight are decoded together: faster, and the last bits of a result may depend
    on what else was."""


class OptimizerOn(StrEnum):
    DEVICE = "device"
    """The optimizer's state comes and goes with the weights."""
    HOST = "host"
    """It lives in host memory, where `optim_step` runs too: half as many bytes on the device and in
    a switch. The same numbers, a slower step where the device is faster than the host."""


class DeploymentSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """One logical model of a job. controller → job API → scheduler → agent → ranks."""

    name: str
    pool: str
    """`rollout` or `train`, or any pool name that some node declares."""
    backend: str
    """`fsdp` (trains), `sampler` (generates) or `noop` (answers at once; for benches)."""
    model: ModelSpec
    trainable: bool = False
    """Keeps gradients and optimizer state beside the weights."""
    seed: int = 0
    """Every operation seeds from (this, its seq)."""
    batching: Batching = Batching.OPERATION
    layout: Layout = Layout()
    num_nodes: int = 1
    """Its ranks are spread evenly over so many nodes of the pool."""
    host_bytes: int = 0
    """Working set in the host memory of each of its nodes; 0: not declared."""
    optimizer_on: OptimizerOn = OptimizerOn.DEVICE


# --- Operations: controller → OPS → router; payload read by the WPG leader -----------------------


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    max_tokens: int
    temperature: float = 1.0
    stop_token_ids: list[int] = []
    """Beside the end-of-sequence tokens of the model's config."""
    stop_strings: list[str] = []
    """Stop once the text of the new tokens holds one of these; needs the model's `token_texts`."""
    ignore_eos: bool = False


class Prompt(msgspec.Struct, frozen=True, omit_defaults=True):
    tokens: Int32s
    seed: int = 0
    """Sample k of this prompt draws its token i from (seed, k, i) and nothing else."""


class Datum(msgspec.Struct, frozen=True, omit_defaults=True):
    """One training sample; every array has the length of `tokens`."""

    tokens: Int32s
    targets: Int32s
    weights: Float32s | None = None
    logprobs: Float32s | None = None
    advantages: Float32s | None = None


class AdamParams(msgspec.Struct, frozen=True, omit_defaults=True):
    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """0: gradients are not clipped."""


class Generate(Message, frozen=True):
    """Reading. Samples `num_samples` continuations of each prompt."""

    prompts: list[Prompt]
    sampling: SamplingParams
    num_samples: int = 1
    prompt_logprobs: bool = False
    """Whether to answer the prompts' own log-probabilities too."""


class Forward(Message, frozen=True):
    """Reading. Log-probabilities of each datum's targets."""

    batch: list[Datum]


class Loss(StrEnum):
    CROSS_ENTROPY = "cross_entropy"
    IMPORTANCE_SAMPLING = "importance_sampling"
    PPO = "ppo"
    CISPO = "cispo"


class ForwardBackward(Message, frozen=True):
    """Mutating. Adds the gradients of a loss; they accumulate until `optim_step`."""

    batch: list[Datum]
    loss: Loss
    clip_low: float = 0.8
    clip_high: float = 1.2


class OptimStep(Message, frozen=True):
    """Mutating. One AdamW step on the accumulated gradients, which it then zeroes.

    Where a `forward_backward` since the last step was not completed it fails, and the gradients are
    zeroed, unless `allow_partial`: a step on a part of the batch is not what was meant.
    """

    adam: AdamParams
    allow_partial: bool = False


class SaveState(Message, frozen=True):
    """Reading. Writes a checkpoint under the tenant's root.

    With a `controller_blob` it becomes the job's last checkpoint: what `session.attach` answers
    with, and what the job falls back to where its state is lost.
    """

    name: str
    controller_blob: bytes = b""
    """The controller's own state, at most 1 MiB."""
    checkpoints: dict[str, str] = {}
    """Other deployment of the job → the name of its checkpoint that belongs to this one."""
    keep: int = 0
    """Once it is durable, those of this deployment's checkpoints that were saved with a `keep` too
    go, but for the newest so many and those that may be needed; 0: it stays, whatever is saved."""


class LoadState(Message, frozen=True):
    """Mutating. Replaces the whole state by a checkpoint of the same job."""

    name: str


class PublishWeights(Message, frozen=True):
    """Mutating. Cuts an immutable weights version, named by this deployment and this `seq`."""


class SyncWeights(Message, frozen=True):
    """Mutating. Replaces this deployment's weights by a version of the same job."""

    policy: str
    version: int
    """The `seq` of the `publish_weights`."""


Args = (
    Generate
    | Forward
    | ForwardBackward
    | OptimStep
    | SaveState
    | LoadState
    | PublishWeights
    | SyncWeights
)

MUTATING_KINDS = frozenset(
    {"forward_backward", "optim_step", "load_state", "publish_weights", "sync_weights"}
)
READING_KINDS = frozenset({"generate", "forward", "save_state"})


def kind_of(args: Args) -> str:
    """The operation kind, as in subjects, spans and traces: `forward_backward`, …"""
    return _snake(type(args).__name__)


class After(msgspec.Struct, frozen=True):
    """An operation of the same job that must be completed first."""

    deployment: str
    seq: int


class Operation(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a controller publishes on `pl.v1.op.<tenant>.<job>.<deployment>.<seq>`."""

    id: str
    """Chosen by the client, unique: tells a resend from another session's operation."""
    session: int
    args: Args
    after: list[After] = []
    timeout_s: float = 0.0
    """It ends EXPIRED where it has no permit so long after it was queued; 0: it waits."""


# --- Outcomes: WPG leader or scheduler → DONE, republished to controllers ------------------------


class Sequence(msgspec.Struct, frozen=True):
    """One continuation. tokens (T,) int32, logprobs (T,) float32, stop token included."""

    tokens: Int32s
    logprobs: Float32s
    stop_reason: str
    """`stop` or `length`."""


class GenerateResult(Message, frozen=True):
    sequences: list[list[Sequence]]
    """[prompt][sample]"""
    prompt_logprobs: list[Float32s] = []
    """Where asked for, one (T,) array a prompt; the first token's is 0."""


class ForwardResult(Message, frozen=True):
    logprobs: list[Float32s]
    """One (T,) array a datum."""


class ForwardBackwardResult(Message, frozen=True):
    metrics: dict[str, float]
    """`loss:sum`, `num_tokens:sum` (positions with a nonzero weight or advantage), …"""


class OptimStepResult(Message, frozen=True):
    metrics: dict[str, float]
    """`grad_norm:mean` before clipping."""


class SaveStateResult(Message, frozen=True):
    path: str
    """Under the tenant's root: `<job>/<deployment>/<name>`."""
    weights_sha256: str
    """Over (name, dtype, shape, little-endian bytes) of every weight, sorted by name."""
    checkpoints: dict[str, str] = {}
    """Where it carried a controller's blob: deployment → checkpoint, this one's too."""


class LoadStateResult(Message, frozen=True):
    weights_sha256: str


class PublishWeightsResult(Message, frozen=True):
    version: int
    digest: str
    num_bytes: int


class SyncWeightsResult(Message, frozen=True):
    version: int
    digest: str


Result = (
    GenerateResult
    | ForwardResult
    | ForwardBackwardResult
    | OptimStepResult
    | SaveStateResult
    | LoadStateResult
    | PublishWeightsResult
    | SyncWeightsResult
)


def result_kind(result: Result) -> str:
    """The kind of the operation that this is the result of."""
    return _snake(type(result).__name__).removesuffix("_result")


def checkpoints_of(completion: Completion) -> dict[str, str]:
    """What a completed `save_state` with a controller's blob made the job's last checkpoint."""
    result = completion.result
    return result.checkpoints if isinstance(result, SaveStateResult) else {}


class Outcome(StrEnum):
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class Progress(msgspec.Struct, frozen=True, omit_defaults=True):
    """WPG leader → controller, on `pl.v1.out.<key>.progress`: how far a long operation is.

    Not stored, and nothing is decided on it.
    """

    key: OperationKey
    num_done: int
    num_total: int
    """Tokens at most; the operation may end before."""


class Completion(msgspec.Struct, frozen=True, omit_defaults=True):
    """An operation's one outcome, on `pl.v1.done.…`; the first stored decides."""

    id: str
    outcome: Outcome
    result: Result | None = None
    error: ErrorInfo | None = None


# --- Decision log: everything the scheduler decides on ------------------------------------------


class SchedulerConfig(msgspec.Struct, frozen=True):
    placement: str
    ordering: str
    idle_grace_s: float
    """How long a device with nothing ready is kept for its job while another waits."""
    quantum_s: float
    """For how long a job's ready operations go before another's on the device that it holds; then
    the others' go first. 0: the ordering policy alone decides."""
    seal_every: int
    """Mutating operations between two seals of a trainable deployment; 0: never."""
    max_losses: int
    """A WPG lost this often at one seq fails that operation."""
    max_reading: int
    """Reading operations of one activation that run at once."""
    phase_hold_s: float
    """For how long at most a phase that the controller declared keeps a device that others wait
    for, after its last operation there; 0: not at all."""
    early_switch: bool
    """Whether activations are opened on idle devices before the operation that is predicted."""
    seal_bytes: int = 128 * 2**20
    """Payloads of mutating operations since the last seal that call for the next one."""
    seal_age_s: float = 600.0
    """So old, a seal is made again where anything changed since."""
    max_open_operations: int = 10_000
    """Of one deployment, without an outcome; more are refused."""
    outcome_retention_s: float = 86_400.0
    """How long the outcomes of an ended job, and the job's name, are kept."""
    max_group_jobs: int = 5
    """Of one node group."""
    duty_limit: float = 0.5
    """Share of its cycle that a member of a group may be predicted to wait, at most."""
    switch_s: float = 0.0
    """Planned for each phase of a shared group, by policies that promise an SLO."""
    node_grace_s: float = 30.0
    """A node that is away for longer loses what can be rebuilt elsewhere, if it can move."""
    node_gone_s: float = 1800.0
    """A node that is away for longer counts as gone for good: what it alone had is lost, and the
    jobs that need it fall back or fail. 0: only an operator can say so."""


class SchedulerConfigured(Message, frozen=True):
    """scheduler's shell → scheduler, profiler. First in the log, and at each change."""

    config: SchedulerConfig


class DeviceSpec(msgspec.Struct, frozen=True):
    memory_bytes: int
    """Budget for managed state: weights, gradients, optimizer."""


class Residency(StrEnum):
    SHARED = "shared"
    """Working sets of several jobs stay side by side while they fit."""
    JOB = "job"
    """Opening an activation offloads whatever another job left on the device."""


class NodeUp(Message, frozen=True):
    """agent → scheduler. A node's agent took its lease; nothing of an earlier life survives."""

    node: NodeId
    pool: str
    devices: list[DeviceSpec]
    host_memory_bytes: int
    revision: int
    """Of the node lease: every command names it, and an agent refuses another's."""
    state_endpoint: str
    """host:port where this node's state manager serves weights versions."""
    exclusive_residency: Residency = Residency.SHARED
    price_per_hour: float = 1.0
    """Of the whole node, in any currency: placement weighs nodes by it."""
    can_move: bool = False
    """Whether deployments can be moved between this node and others that say so."""


class NodeLost(Message, frozen=True):
    """agent or lease watcher → scheduler. No process of that life of the node runs any more."""

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
    """seq of the last mutating operation in the state: 0, or the seal's."""
    devices: list[int] = []
    """Of each rank; for whoever reads the log."""


class WpgLost(Message, frozen=True):
    """agent → scheduler. The WPG's ranks on it are dead and reaped (a failed start included)."""

    deployment: DeploymentKey
    incarnation: int
    node: NodeId
    error: ErrorInfo


class CommandId(msgspec.Struct, frozen=True, order=True):
    """The decision-log sequence of the event that caused a command, and its place in the answer."""

    sequence: int
    index: int

    def __str__(self) -> str:
        return f"{self.sequence}:{self.index}"


class NodeDrainRequested(Message, frozen=True, omit_defaults=True):
    """operator API → scheduler. What is on the node is to go to others."""

    node: NodeId
    request: str
    """Id of the API request that this answers."""
    undo: bool = False
    """It is not to be drained any more."""
    gone: bool = False
    """It is gone for good, with all that it alone had."""


class StateMirrored(Message, frozen=True, omit_defaults=True):
    """agent → scheduler. Answer to `MirrorState`."""

    deployment: DeploymentKey
    seq: int
    """Of the seal; 0: none was asked for."""
    node: NodeId
    command: CommandId
    error: ErrorInfo | None = None
    """It is not here, and why."""


class Segment(msgspec.Struct, frozen=True, omit_defaults=True):
    """A run of operations of one job on one pool: seconds from the start of its cycle."""

    pool: str
    offset_s: float
    duration_s: float
    worst_s: float = 0.0
    """Where every sample reaches its token limit; 0: as `duration_s`."""


class Cycle(msgspec.Struct, frozen=True):
    """What a job does again and again while it runs alone, each pool's segments in order."""

    period_s: float
    segments: list[Segment]
    num_optim_steps: int = 1
    """Of all deployments, in one period."""


class Durability(StrEnum):
    """What a committed seal survives. Above it the operation stream is kept."""

    HOST = "host"
    """The death of every process; kept in its node's memory."""
    NODE = "node"
    """A restart of its node, too: on its disk, fsynced."""
    REMOTE = "remote"
    """The loss of its node: on the disk of another one as well."""


class JobSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    slo: float = 0.0
    """Slowdown over running alone that the job tolerates, at least 1; 0: best effort."""
    deployments: list[DeploymentSpec] = []
    cycle: Cycle | None = None
    """As an earlier run measured it, or as the owner estimates it; None: it is profiled first."""
    duration_s: float = 0.0
    """How long it would run alone; 0: not known. Only reservations of others go by it."""
    may_wait: bool = True
    """Whether it waits for a place that is not there now, or is refused."""
    durability: Durability = Durability.NODE
    """Of the seals of its deployments."""


class JobSubmitted(Message, frozen=True):
    """job API → scheduler."""

    job: JobKey
    spec: JobSpec
    request: str
    """Id of the API request that this answers."""


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
    """router → scheduler. A controller attached: operations of older sessions that are queued
    behind this in the log are refused."""

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


class CancelRequested(Message, frozen=True):
    """job API → scheduler. Ends what has no permit; a reading operation that runs is stopped."""

    key: OperationKey
    request: str
    """Id of the API request that this answers."""


class QueuedOperation(Message, frozen=True, omit_defaults=True):
    """router → scheduler: an operation's header, never its payload."""

    key: OperationKey
    id: str
    kind: str
    after: list[After] = []
    version: VersionKey | None = None
    """Of `sync_weights`: what it will bring."""
    size: int = 0
    """Tokens at most (prompt and new tokens, over all samples), for whoever reads the log: the
    scheduler's estimates go by kind."""
    content_type: str = "application/msgpack"
    """As the operation came, so is its outcome written."""
    session: int = 0
    timeout_s: float = 0.0
    num_bytes: int = 0
    """Of the payload, as it is stored."""
    error: ErrorInfo | None = None
    """Set where the operation was refused: it becomes a failed operation, not a gap."""


class OperationsQueued(Message, frozen=True, omit_defaults=True):
    """router → scheduler, profiler. Several that one append brought; each counts as one of its
    own, in this order."""

    operations: list[QueuedOperation]
    traceparents: list[str] = []
    """Of each operation; an empty list: none of them is traced."""


class OperationFinished(Message, frozen=True, omit_defaults=True):
    """WPG leader → scheduler, profiler. Its DONE is stored."""

    key: OperationKey
    kind: str
    outcome: Outcome
    epoch: int
    incarnation: int
    started_unix_s: float
    duration_s: float
    replay: bool = False
    dirty: bool = False
    """An error inside a mutating operation: this incarnation must be rebuilt without it."""
    error: ErrorInfo | None = None
    num_tokens: int = 0
    """Tokens that it worked on: prompts and new ones of a `generate`, else those of the batch."""
    checkpoints: dict[str, str] = {}
    """Of a `save_state` with a controller's blob: deployment → checkpoint, this one's too."""


class OperationsFinished(Message, frozen=True):
    """WPG leader → scheduler, profiler. Several that one append brought; each counts as one of its
    own, in this order."""

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
    early: bool = False
    """Opened for an operation that was only predicted."""


class ActivationRefused(Message, frozen=True):
    """agent → scheduler. The switch-in was rolled back, or what it brings does not fit."""

    deployment: DeploymentKey
    epoch: int
    node: NodeId
    error: ErrorInfo


class PermitReturned(Message, frozen=True):
    """WPG leader → scheduler. Not run, nothing changed: what it needs cannot be reached now."""

    key: OperationKey
    epoch: int
    incarnation: int
    error: ErrorInfo


class StateCut(Message, frozen=True):
    """WPG leader → scheduler. What a `save_state` saves is apart from the devices now: others may
    go on while it is written."""

    key: OperationKey
    epoch: int
    incarnation: int


class SealCommitted(Message, frozen=True):
    """agent → scheduler. A whole-state copy at `seq` survives the loss of every process; of a WPG
    on several nodes, this one's part of it."""

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
    """Median of the recent ones."""
    next_gap_s: float
    """Median time until the same job's next operation on this pool is ready; -1: not known."""
    count: int
    p95_s: float = 0.0
    """95th percentile of the recent durations."""
    worst_s: float = 0.0
    """As long as it may take where every sample reaches its token limit."""
    gap_p10_s: float = -1.0
    gap_p90_s: float = -1.0
    """10th and 90th percentile of the gap; -1: not known."""


class PhaseTrace(Message, frozen=True):
    """profiler → scheduler, people. A job's cycle as measured."""

    job: JobKey
    period_s: float
    """0: no cycle found yet."""
    segments: list[Segment]
    estimates: list[KindEstimate]
    worst_period_s: float = 0.0
    """The period where every operation takes its `worst_s`."""
    drift: float = 0.0
    """Relative change of the period against the one that was told before; 0: none to speak of."""
    num_optim_steps: int = 1
    """Of all deployments, in one period."""


class PlannedMove(msgspec.Struct, frozen=True, omit_defaults=True):
    """A job of a node group goes to another."""

    job: JobKey
    group: str
    """Empty: a new one."""
    nodes: dict[str, list[NodeId]]
    """By pool: those that it is pinned to there; free ones among them join the group."""
    why: str = ""
    shift_s: float = 0.0


class ReplanComputed(Message, frozen=True):
    """scheduler's shell → scheduler. What is worth moving, of the groups as they were."""

    as_of: int
    """Sequence of the log's entry after which this was asked."""
    moves: list[PlannedMove]
    """In order: each may build on those before it."""
    num_groups: int
    """Ever made until then: the k-th of the moves to a new group makes `g<num_groups + k>`."""
    versions: dict[str, int]
    """Of the groups that the moves touch: one that has changed since is left alone."""


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
    | StateCut
    | SealCommitted
    | SealFailed
    | StateMirrored
    | PhaseTrace
    | ReplanComputed
    | TimerFired
)


def parts(event: Event) -> Seq[Event]:
    """What an entry of the decision log stands for: one event, or several in order."""
    if isinstance(event, OperationsQueued | OperationsFinished):
        return event.operations
    return (event,)


# --- Commands to a node: scheduler → PERMITS → agent ---------------------------------------------


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
    """Of the scheduler that permits the read; see `phaseloom.common.tickets`."""


class FilesTicket(msgspec.Struct, frozen=True):
    """Leave for nodes to fetch a deployment's seals and durable weights versions from others.

    It lasts until a later life of the deployment asks.
    """

    deployment: DeploymentKey
    incarnation: int
    nodes: list[str]
    """Who may have them, as their certificates name them."""
    mac: bytes = b""
    """Of the scheduler; see `phaseloom.common.tickets`."""


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


# --- One WPG over several nodes: agent ↔ agent, request and reply on `pl.v1.wpg.<node>` -----------


class FindStore(Message, frozen=True):
    """agent → agent of rank 0's node: where do the ranks of this life meet?

    Answer: StoreFound; NotYet.
    """

    deployment: DeploymentKey
    incarnation: int


class TakePart(Message, frozen=True):
    """agent of the leader's node → agent of each other node: have your ranks take part in one call
    of the leader's backend.

    Asked again until it is answered: it begins once. Answer: NotYet; PartTaken; PartFailed.
    """

    deployment: DeploymentKey
    incarnation: int
    number: int
    """Of the call in this life, from 1."""
    num_ended: int
    """Calls up to this one are not asked for again."""
    share: bytes
    """As MessagePack, what agents tell ranks (`phaseloom.worker.rankwire.RunShare`), but that the
    payloads are left out: they are read from the operation stream."""
    offset: int = 0
    """How much of the answer has come."""


class CallRoll(Message, frozen=True):
    """Asked like `TakePart`: are your ranks of this life alive? Answer: Present."""

    deployment: DeploymentKey
    incarnation: int


class CancelPart(Message, frozen=True):
    """Asked like `TakePart`: stop your part of a reading operation, begun or not. Answer:
    Present."""

    operation: OperationKey
    incarnation: int


NodeRequest = FindStore | TakePart | CallRoll | CancelPart


class StoreFound(Message, frozen=True):
    address: str
    """host:port"""


class NotYet(Message, frozen=True):
    """Ask again."""


class PartTaken(Message, frozen=True):
    num_bytes: int
    """Of the whole answer: as MessagePack, what each rank of the node said, in order
    (`phaseloom.worker.rankwire.ShareDone`)."""
    chunk: bytes
    """Of it, from the offset on."""


class PartFailed(Message, frozen=True):
    error: ErrorInfo


class Present(Message, frozen=True):
    """All of them are alive."""


class LifeOver(Message, frozen=True):
    """Answer to any of them: no rank of this life is alive here, nor will be."""

    error: ErrorInfo


NodeReply = StoreFound | NotYet | PartTaken | PartFailed | Present | LifeOver


# --- API: controller ↔ job API (scheduler), sessions and results (router) -------------------------


class SubmitJob(msgspec.Struct, frozen=True):
    """`pl.v1.api.<tenant>.job.submit`, answered with a JobStatus."""

    job: str
    spec: JobSpec


class JobRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """`pl.v1.api.<tenant>.job.{status,finish,drain}` and `.session.attach`."""

    job: str
    failed: bool = False
    """Of `job.finish`: the controller gives up, or an operator cancels the job."""


class CreateDeployment(msgspec.Struct, frozen=True):
    """`pl.v1.api.<tenant>.deployment.create`, answered with a JobStatus."""

    job: str
    spec: DeploymentSpec


class DeploymentRequest(msgspec.Struct, frozen=True):
    """`pl.v1.api.<tenant>.deployment.delete`, answered with a JobStatus."""

    job: str
    deployment: str


class DeploymentStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    pool: str
    node: str
    state: str
    incarnation: int
    next_seq: int
    """The lowest seq that has no outcome yet; from `session.attach`: the next one to use."""
    open_operations: list[str] = []
    """Slots that have no outcome yet."""
    error: ErrorInfo | None = None
    moving: str = ""
    """Where it is on its way to, and what it waits for, in words; empty: it stays where it is."""


class JobStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    job: str
    state: str
    deployments: list[DeploymentStatus] = []
    error: ErrorInfo | None = None
    placement: str = ""
    """Where it is, with whom and why, in words; empty: it has no place."""


class Checkpoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """A job's last checkpoint with a controller's blob. leader → KV, router → controller."""

    deployment: str
    """That the `save_state` was sent to."""
    seq: int
    checkpoints: dict[str, str]
    """Deployment → name, for `load_state`."""
    controller_blob: bytes


class Attached(msgspec.Struct, frozen=True, omit_defaults=True):
    """Answer to `session.attach`: from now on older sessions of this job are refused."""

    session: int
    status: JobStatus
    checkpoint: Checkpoint | None = None


class Heartbeat(msgspec.Struct, frozen=True):
    """`pl.v1.api.<tenant>.session.heartbeat`: the controller lives. Answered with a Beat."""

    job: str
    session: int


class Beat(msgspec.Struct, frozen=True):
    within_s: float
    """The next one is expected within so many seconds."""


class PhaseRequest(msgspec.Struct, frozen=True):
    """`pl.v1.api.<tenant>.phase.declare`. Answered with a JobStatus."""

    job: str
    session: int
    pool: str
    is_open: bool


class OperationRequest(msgspec.Struct, frozen=True):
    """`pl.v1.api.<tenant>.operation.{cancel,explain}`."""

    job: str
    deployment: str
    slot: str


class DrainNode(msgspec.Struct, frozen=True, omit_defaults=True):
    """`pl.v1.node.{drain,status}`, of operators: answered with a NodeStatus. `status` changes
    nothing."""

    node: str
    undo: bool = False
    gone: bool = False


class NodeStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """A node as the scheduler sees it."""

    node: str
    is_up: bool
    is_draining: bool = False
    is_gone: bool = False
    deployments: list[DeploymentKey] = []
    """That are on it, or on their way to it."""
    waits_for: list[str] = []
    """Why those that are to leave have not left, and which copies still count on it; one line
    each."""


class Explanation(msgspec.Struct, frozen=True, omit_defaults=True):
    """Answer to `operation.explain`, and to `operation.cancel` (as it stands then)."""

    key: OperationKey
    kind: str
    """Empty where it has ended and its outcome does not tell."""
    state: str
    """`queued` or `permitted`; its outcome where it has ended."""
    waits_for: list[str] = []
    """One line each: an operation, a WPG, a device that is busy, a phase that is held."""
    place: int = 0
    """1: next on its device; 0: it is not among what is ready."""
    predicted_start_s: float = -1.0
    """From now; -1: not known."""
    why: str = ""
    """Why the policy chose so."""


class UsageRequest(msgspec.Struct, frozen=True):
    """`pl.v1.api.<tenant>.tenant.usage`. router, controller → scheduler. Answered with a Usage."""


class Usage(msgspec.Struct, frozen=True):
    """What a tenant has open."""

    open_operations: int
    """Queued or permitted; also those that were refused behind a gap, until it is closed."""
    sequence: int
    """Of the decision log: what stands behind it is not counted."""


class ResultRequest(msgspec.Struct, frozen=True):
    """`pl.v1.api.<tenant>.result.get`: by key, after a gap or a restart."""

    job: str
    deployment: str
    slot: str


class ResultReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """`completion` is None while the operation runs; `stored_id` is None if it is unknown."""

    stored_id: str | None = None
    completion: Completion | None = None


class ApiError(msgspec.Struct, frozen=True):
    """What an API call answers when it fails; told apart by the NATS service error header."""

    error: ErrorInfo


# --- Events for people: all → EVENTS; nothing is decided on them ----------------------------------


class Notice(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something dropped, refused, retried, restarted, rolled back: with its reason."""

    source: str
    what: str
    reason: str
    subject: str = ""
    """What it is about: an operation, a deployment, a node, a service."""
