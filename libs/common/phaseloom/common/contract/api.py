"""Request and reply: controllers and operators ↔ the job API (scheduler) and the router, which
serves sessions, results and checkpoints.

Controllers call `pl.v1.api.<tenant>.<call>`; operators call the node subjects.
`docs/contract/asyncapi.json` lists the calls. An error is returned as an `ApiError`.
"""

from __future__ import annotations

import msgspec

from phaseloom.common.contract.errors import ErrorInfo
from phaseloom.common.contract.ids import DeploymentKey, OperationKey
from phaseloom.common.contract.operations import Completion
from phaseloom.common.contract.specs import Adapter, DeploymentSpec, JobSpec

_ENDED = frozenset({"done", "failed", "cancelled", "rejected"})


class SubmitJob(msgspec.Struct, frozen=True):
    """`pl.v1.api.<tenant>.job.submit`, answered with a JobStatus."""

    job: str
    spec: JobSpec


class JobRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """`pl.v1.api.<tenant>.job.{status,finish,drain}` and `.session.attach`."""

    job: str
    failed: bool = False
    """For `job.finish`: whether the controller gives up."""
    numbered: list[str] = []
    """For `session.attach`: deployments whose operations are numbered by clients of the caller,
    which resubmit lost operations. If any are given, the job's newest session is resumed instead of
    replaced: its stored operations stay valid, and missing numbers stay free. The caller must make
    sure that no other program uses the session."""
    cancelled: bool = False
    """For `job.finish`: whether a person cancels the job."""


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
    """The lowest seq without an outcome. From `session.attach`: the next seq to use."""
    open_operations: list[str] = []
    """Slots of the operations without an outcome. Empty in the bucket `view`."""
    error: ErrorInfo | None = None
    moving: str = ""
    """For people: the nodes that the deployment is moving to and what the move waits for. Empty: it
    is not moving."""


class JobStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    job: str
    state: str
    deployments: list[DeploymentStatus] = []
    error: ErrorInfo | None = None
    placement: str = ""
    """For people: the nodes of the job, the jobs that share them, and the reason. Empty: the job is
    not placed."""
    device_s: dict[str, float] = {}
    """Pool → device time charged to the job, in device-seconds. It covers the job's own operations
    and those of other jobs that read its weights by name."""
    slower: list[str] = []
    """For people: one line for each pair of sub-stage kinds that is significantly slower on the
    job's devices than the slowdown table says."""
    run: str = ""
    """The present run of the job: its start in UTC, such as `20261128-195553`. A name that is
    submitted again after its job has ended starts another run."""
    submitted_s: float = 0.0
    """When the run was submitted, in Unix seconds."""
    ended_s: float = 0.0
    """When the run ended, in Unix seconds; 0: it has not ended."""
    config: dict = {}  # type: ignore[type-arg]  # JSON
    """See `JobSpec.config`."""
    tags: list[str] = []
    """See `JobSpec.tags`."""

    @property
    def has_ended(self) -> bool:
        return self.state in _ENDED


class Checkpoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """A job's latest checkpoint with a controller blob. leader → KV, router → controller."""

    deployment: str
    """The deployment that ran the `save_state`."""
    seq: int
    checkpoints: dict[str, str]
    """Deployment → name, for `load_state`."""
    controller_blob: bytes


class Attached(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to `session.attach`: older sessions of this job are refused from now on."""

    session: int
    status: JobStatus
    checkpoint: Checkpoint | None = None


class Heartbeat(msgspec.Struct, frozen=True):
    """`pl.v1.api.<tenant>.session.heartbeat`: the controller is alive. Answered with a Beat."""

    job: str
    session: int


class JobReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """`pl.v1.api.<tenant>.job.report`: values that a controller measured, for people to see. The
    mesh makes no decision on them. router → REPORTS → console. Answered with a Reported."""

    job: str
    step: int
    """The step of the job that the values belong to, from 0. If a name has several values at one
    step, the last one is shown."""
    values: dict[str, float]
    """A finite number for each name, such as `reward` or `loss`. Names follow the rules of job
    names and may also contain `/`, `.` and `:`."""
    run: str = ""
    """The run that the values belong to; empty: the job's present one."""


class Reported(msgspec.Struct, frozen=True):
    """The report is stored."""


class Beat(msgspec.Struct, frozen=True):
    within_s: float
    """Send the next heartbeat within this many seconds."""


class PhaseRequest(msgspec.Struct, frozen=True):
    """`pl.v1.api.<tenant>.phase.declare`. Answered with a JobStatus."""

    job: str
    session: int
    pool: str
    is_open: bool


class OperationRequest(msgspec.Struct, frozen=True):
    """`pl.v1.api.<tenant>.operation.explain`."""

    job: str
    deployment: str
    slot: str


class CancelRequest(OperationRequest, frozen=True, omit_defaults=True):
    """`pl.v1.api.<tenant>.operation.cancel`."""

    keeps_partial: bool = False
    """Whether a running `generate` ends COMPLETED with the tokens already sampled. An unfinished
    sample has the stop_reason `partial`."""


class DrainNode(msgspec.Struct, frozen=True, omit_defaults=True):
    """`pl.v1.node.{drain,status}`, called by operators. `status` changes nothing. Answered with a
    NodeStatus."""

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
    """The deployments on the node or on their way to it."""
    waits_for: list[str] = []
    """For people: one line for each deployment that must still leave, and for each copy that exists
    only on this node."""


class Explanation(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to `operation.explain`, and to `operation.cancel` (the state at that time)."""

    key: OperationKey
    kind: str
    """The operation's kind. Empty if the operation has ended and its outcome does not show the
    kind."""
    state: str
    """`queued`, `permitted`, or the outcome of an operation that has ended."""
    waits_for: list[str] = []
    """One line for each operation, WPG, busy device or held phase that the operation waits for."""
    place: int = 0
    """Position among the ready operations of its device: 1 is next; 0: the operation is not
    ready."""
    predicted_start_s: float = -1.0
    """Seconds from now until the predicted start; -1: unknown."""
    why: str = ""
    """The ordering policy's reason for this position."""


class UsageRequest(msgspec.Struct, frozen=True):
    """`pl.v1.api.<tenant>.tenant.usage`. router, controller → scheduler. Answered with a Usage."""


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """The open operations and stored outcomes of a tenant."""

    open_operations: int
    """Number of queued and permitted operations, plus refused ones behind a gap in the numbers
    until the gap closes."""
    sequence: int
    """The decision-log sequence up to which operations are counted."""
    outcome_bytes: int = 0
    """Bytes of stored outcomes."""


class ResultRequest(msgspec.Struct, frozen=True):
    """`pl.v1.api.<tenant>.result.get`: look up an outcome by key, after lost messages or a
    restart."""

    job: str
    deployment: str
    slot: str


class ResultReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """`completion` is None while the operation runs. `stored_id` is None if the operation is
    unknown."""

    stored_id: str | None = None
    completion: Completion | None = None


class ListCheckpoints(msgspec.Struct, frozen=True, omit_defaults=True):
    """`pl.v1.api.<tenant>.checkpoint.list`, answered with a CheckpointList."""

    job: str = ""
    """List only the checkpoints of this job; empty: of all jobs, including those that have
    ended."""
    deployment: str = ""
    """List only the checkpoints of deployments with this name; empty: of all deployments."""


class CheckpointRequest(msgspec.Struct, frozen=True):
    """`pl.v1.api.<tenant>.checkpoint.{show,delete}`, answered with a SavedCheckpoint and a
    CheckpointDeleted.

    `delete` is refused if the job may fall back to the checkpoint. Deployments that have loaded the
    checkpoint, and open archives of it, keep its files until they no longer need them.
    """

    job: str
    deployment: str
    """The deployment that saved it."""
    name: str


class ArchiveCheckpoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """`pl.v1.api.<tenant>.checkpoint.archive`, answered with an OpenedArchive."""

    job: str
    deployment: str
    """The deployment that saved it."""
    name: str
    file: str = ""
    """The only file to open, by its name in `SavedCheckpoint.files`, without tar headers. Empty: a
    tar file of all files."""


class ExpireCheckpoint(msgspec.Struct, frozen=True):
    """`pl.v1.api.<tenant>.checkpoint.expire`, answered with a SavedCheckpoint."""

    job: str
    deployment: str
    name: str
    ttl_s: float
    """How long to keep the checkpoint, in seconds from now; 0: until it is deleted."""


class SavedCheckpoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """A checkpoint on disk."""

    job: str
    deployment: str
    name: str
    num_bytes: int
    """Total size of its files."""
    saved_s: float
    """When it became durable, in Unix seconds by its node's clock."""
    seq: int = 0
    """The seq of the last mutating operation in it. 0: there was none, or another program wrote the
    files."""
    weights_sha256: str = ""
    """See `SaveStateResult`. Empty: another program wrote the files."""
    keep: int = 0
    """The `keep` that it was saved with."""
    expires_in_s: float | None = None
    """Seconds until it expires; None: it is kept until it is deleted."""
    files: dict[str, int] = {}
    """File name → size in bytes. Empty in a CheckpointList."""
    model: str = ""
    """Name of the registered model that the weights are of, or that the adapter is on. Empty: there
    is none, or another program wrote the files."""
    adapter: Adapter | None = None
    """The adapter that the checkpoint has instead of all weights."""


class CheckpointList(msgspec.Struct, frozen=True, omit_defaults=True):
    checkpoints: list[SavedCheckpoint]
    """The checkpoints in the order in which they became durable, newest last."""
    silent_nodes: list[str] = []
    """Nodes that did not answer. Checkpoints that only these nodes have are missing from the
    list."""


class CheckpointDeleted(msgspec.Struct, frozen=True):
    num_bytes: int
    """Total size of the removed files."""


class OpenedArchive(msgspec.Struct, frozen=True):
    """A checkpoint opened as a tar file. Later changes to the checkpoint do not affect it. It
    closes after a minute without reads."""

    archive: str
    """The name of the archive for `checkpoint.read`."""
    num_bytes: int


class ReadArchive(msgspec.Struct, frozen=True):
    """`pl.v1.api.<tenant>.checkpoint.read`, answered with an ArchivePart."""

    archive: str
    offset: int


class ArchivePart(msgspec.Struct, frozen=True):
    content: bytes
    """At most 1 MiB of the tar file, from the offset on; empty: the end of the file."""


class ApiError(msgspec.Struct, frozen=True):
    """The answer of a failed API call, marked by the NATS service error header."""

    error: ErrorInfo
