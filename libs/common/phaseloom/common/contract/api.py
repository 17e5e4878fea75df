"""Request and reply: controller and operator ↔ job API (scheduler), sessions and results (router).

Controllers call `pl.v1.api.<tenant>.<call>`, operators the subjects of nodes; `contract.schema`
lists the calls. An error is an `ApiError`.
"""

from __future__ import annotations

import msgspec

from phaseloom.common.contract.errors import ErrorInfo
from phaseloom.common.contract.ids import DeploymentKey, OperationKey
from phaseloom.common.contract.operations import Completion
from phaseloom.common.contract.specs import DeploymentSpec, JobSpec


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
    """Slots that have no outcome yet."""
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
    """`pl.v1.api.<tenant>.operation.explain`."""

    job: str
    deployment: str
    slot: str


class CancelRequest(OperationRequest, frozen=True, omit_defaults=True):
    """`pl.v1.api.<tenant>.operation.cancel`."""

    keeps_partial: bool = False
    """Whether a `generate` that runs shall end COMPLETED, with the tokens that it has: those of a
    sample that was not done have the stop_reason `partial`."""


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
    """The operation's kind; empty where it has ended and its outcome does not tell."""
    state: str
    """`queued` or `permitted`; its outcome where it has ended."""
    waits_for: list[str] = []
    """One line for each operation, WPG, busy device or held phase that it waits for."""
    place: int = 0
    """The operation's place among the ready ones of its device: 1 is next; 0: it is not ready."""
    predicted_start_s: float = -1.0
    """Seconds from now; -1: not known."""
    why: str = ""
    """Why the policy chose so."""


class UsageRequest(msgspec.Struct, frozen=True):
    """`pl.v1.api.<tenant>.tenant.usage`. router, controller → scheduler. Answered with a Usage."""


class Usage(msgspec.Struct, frozen=True):
    """The operations that a tenant has open."""

    open_operations: int
    """Queued or permitted; also those that were refused behind a gap, until it is closed."""
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


class ApiError(msgspec.Struct, frozen=True):
    """The answer of an API call that fails; the NATS service error header tells it apart."""

    error: ErrorInfo
