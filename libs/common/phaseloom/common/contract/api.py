"""Request and reply: controller and operator ↔ job API (scheduler), and sessions, results and
checkpoints (router).

Controllers call `pl.v1.api.<tenant>.<call>`, operators the subjects of nodes;
`docs/contract/asyncapi.json` lists the calls. An error is an `ApiError`.
"""

from __future__ import annotations

import msgspec

from phaseloom.common.contract.errors import ErrorInfo
from phaseloom.common.contract.ids import DeploymentKey, OperationKey
from phaseloom.common.contract.operations import Completion
from phaseloom.common.contract.specs import DeploymentSpec, JobSpec

_ENDED = frozenset({"done", "failed", "rejected"})


class SubmitJob(msgspec.Struct, frozen=True):
    """`pl.v1.api.<tenant>.job.submit`, answered with a JobStatus."""

    job: str
    spec: JobSpec


class JobRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """`pl.v1.api.<tenant>.job.{status,finish,drain}` and `.session.attach`."""

    job: str
    failed: bool = False
    """For `job.finish`: whether the controller gives up, or an operator cancels the job."""
    numbered: list[str] = []
    """For `session.attach`: deployments whose sequence numbers are given by programs behind the
    caller, which submit again what was lost. Where there are some, the job's newest session goes on
    in place of another, so that what it has stored stays valid, and holes in their numbers are left
    open. The caller sees to it that nobody else goes on with the session."""


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
    """The slots of the operations that have no outcome yet."""
    error: ErrorInfo | None = None
    moving: str = ""
    """The nodes that the deployment moves to and what it waits for, in words. Empty: it stays."""


class JobStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    job: str
    state: str
    deployments: list[DeploymentStatus] = []
    error: ErrorInfo | None = None
    placement: str = ""
    """The nodes of the job, the jobs that share them, and why, in words. Empty: it has no place."""
    device_s: dict[str, float] = {}
    """Pool → the devices' time that counts as the job's, in seconds times devices: of its own
    operations, and of those of other jobs that read its weights by their names."""
    slower: list[str] = []
    """Lines for people, one for each pair of kinds of sub-stages that is surely slower on the job's
    devices than the table of slowdowns says."""

    @property
    def has_ended(self) -> bool:
        return self.state in _ENDED


class Checkpoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """A job's last checkpoint with a controller's blob. leader → KV, router → controller."""

    deployment: str
    """The deployment that the `save_state` was sent to."""
    seq: int
    checkpoints: dict[str, str]
    """Deployment → name, for `load_state`."""
    controller_blob: bytes


class Attached(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to `session.attach`: from now on older sessions of this job are refused."""

    session: int
    status: JobStatus
    checkpoint: Checkpoint | None = None


class Heartbeat(msgspec.Struct, frozen=True):
    """`pl.v1.api.<tenant>.session.heartbeat`: the controller lives. Answered with a Beat."""

    job: str
    session: int


class JobReport(msgspec.Struct, frozen=True):
    """`pl.v1.api.<tenant>.job.report`, answered with a Reported: what a controller measures, for
    people; nothing is decided on it. router → REPORTS → console."""

    job: str
    step: int
    """The step of the job that the values belong to, from 0. Where a name has several values at one
    step, people see the last."""
    values: dict[str, float]
    """A finite number for each name: `reward`, `loss`, … Names are as those of jobs, and may have
    `/`, `.` and `:` in them."""


class Reported(msgspec.Struct, frozen=True):
    """The report is stored."""


class Beat(msgspec.Struct, frozen=True):
    within_s: float
    """Seconds within which the next heartbeat is expected."""


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
    """Whether a `generate` that runs ends COMPLETED with the tokens that it has. An unfinished
    sample has the stop_reason `partial`."""


class DrainNode(msgspec.Struct, frozen=True, omit_defaults=True):
    """`pl.v1.node.{drain,status}`, called by operators, answered with a NodeStatus. A `status` call
    changes nothing."""

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
    """The deployments that are on the node, or on their way to it."""
    waits_for: list[str] = []
    """One line for each deployment that is to leave and has not, and for each copy that only this
    node has."""


class Explanation(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to `operation.explain`, and to `operation.cancel` (as it stands then)."""

    key: OperationKey
    kind: str
    """The operation's kind; empty where the operation has ended and its outcome does not tell the
    kind."""
    state: str
    """`queued` or `permitted`; for an operation that has ended, its outcome."""
    waits_for: list[str] = []
    """One line for each operation, WPG, busy device or held phase that it waits for."""
    place: int = 0
    """The operation's place among the ready ones of its device: 1 is next; 0: it is not ready."""
    predicted_start_s: float = -1.0
    """Seconds from now; -1: not known."""
    why: str = ""
    """The policy's reason for the choice."""


class UsageRequest(msgspec.Struct, frozen=True):
    """`pl.v1.api.<tenant>.tenant.usage`. router, controller → scheduler. Answered with a Usage."""


class Usage(msgspec.Struct, frozen=True):
    """The operations that a tenant has open."""

    open_operations: int
    """The operations that are queued or permitted, and those that were refused behind a gap, until
    the gap is closed."""
    sequence: int
    """The place in the decision log up to which operations are counted."""


class ResultRequest(msgspec.Struct, frozen=True):
    """`pl.v1.api.<tenant>.result.get`: by key, after a gap or a restart."""

    job: str
    deployment: str
    slot: str


class ResultReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """`completion` is None while the operation runs; `stored_id` is None if it is unknown."""

    stored_id: str | None = None
    completion: Completion | None = None


class ListCheckpoints(msgspec.Struct, frozen=True, omit_defaults=True):
    """`pl.v1.api.<tenant>.checkpoint.list`, answered with a CheckpointList."""

    job: str = ""
    """List only the checkpoints of this job; empty: of all jobs, also of those that have ended."""
    deployment: str = ""
    """List only the checkpoints of deployments of this name; empty: of all."""


class CheckpointRequest(msgspec.Struct, frozen=True):
    """`pl.v1.api.<tenant>.checkpoint.{show,delete,archive}`, answered with a SavedCheckpoint, a
    CheckpointDeleted and an OpenedArchive.

    `delete` is refused for what the job falls back to. Deployments that have loaded the checkpoint,
    and archives of it that are being read, keep its files until they need them no more.
    """

    job: str
    deployment: str
    """The deployment that saved it."""
    name: str


class ExpireCheckpoint(msgspec.Struct, frozen=True):
    """`pl.v1.api.<tenant>.checkpoint.expire`, answered with a SavedCheckpoint."""

    job: str
    deployment: str
    name: str
    ttl_s: float
    """How long the checkpoint is kept, in seconds from now; 0: until it is deleted."""


class SavedCheckpoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """A checkpoint that is on disk."""

    job: str
    deployment: str
    name: str
    num_bytes: int
    """The bytes of all its files."""
    saved_s: float
    """When it became durable, in Unix seconds of its node's clock."""
    seq: int = 0
    """The seq of the last mutating operation in it; 0: none, or another program wrote the files."""
    weights_sha256: str = ""
    """As in `SaveStateResult`; empty: another program wrote the files."""
    keep: int = 0
    """The `keep` that it was saved with."""
    expires_in_s: float | None = None
    """Seconds for which the checkpoint is still kept; None: until it is deleted."""
    files: dict[str, int] = {}
    """The bytes of each file; empty in a list."""


class CheckpointList(msgspec.Struct, frozen=True, omit_defaults=True):
    checkpoints: list[SavedCheckpoint]
    """The checkpoints by the time at which they became durable, the newest last."""
    silent_nodes: list[str] = []
    """The nodes that gave no answer: checkpoints that they alone have are not in the list."""


class CheckpointDeleted(msgspec.Struct, frozen=True):
    num_bytes: int
    """The bytes of all files that were removed."""


class OpenedArchive(msgspec.Struct, frozen=True):
    """A checkpoint as a tar file, whose content does not change, whatever becomes of the
    checkpoint. It is closed when nothing was read for a minute."""

    archive: str
    """The name of the archive in `checkpoint.read`."""
    num_bytes: int


class ReadArchive(msgspec.Struct, frozen=True):
    """`pl.v1.api.<tenant>.checkpoint.read`, answered with an ArchivePart."""

    archive: str
    offset: int


class ArchivePart(msgspec.Struct, frozen=True):
    content: bytes
    """The bytes of the tar file from the offset on, 1 MiB at most; empty: it ends there."""


class ApiError(msgspec.Struct, frozen=True):
    """The answer of an API call that fails; the NATS service error header tells it apart."""

    error: ErrorInfo
