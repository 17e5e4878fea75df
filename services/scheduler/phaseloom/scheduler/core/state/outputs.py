"""The outputs of the core, which its shell performs.

Each is idempotent: a restart performs some again.
"""

from __future__ import annotations

import msgspec

from phaseloom.common.contract.api import Explanation, JobStatus, NodeStatus
from phaseloom.common.contract.commands import Command
from phaseloom.common.contract.errors import ErrorInfo
from phaseloom.common.contract.ids import JobKey, OperationKey
from phaseloom.common.contract.operations import Completion
from phaseloom.scheduler.core.state.cluster import Cluster


class SendCommand(msgspec.Struct, frozen=True):
    """Publish to the node's permits."""

    command: Command


class WriteCompletion(msgspec.Struct, frozen=True):
    """Write the outcome of an operation that never ran."""

    key: OperationKey
    completion: Completion
    content_type: str


class SettleCompletion(msgspec.Struct, frozen=True):
    """Write this outcome unless one is stored, and append what is stored then.

    The operation may have taken effect in an incarnation that died. An `OperationFinished` of
    incarnation 0 tells what is stored.
    """

    key: OperationKey
    kind: str
    completion: Completion
    content_type: str


class SetTimer(msgspec.Struct, frozen=True):
    """Append `TimerFired` once the clock of the log has passed `due_s`."""

    timer: str
    due_s: float


class DeleteOperations(msgspec.Struct, frozen=True):
    """Take operations off their tenant's stream: nothing will read them again."""

    keys: list[OperationKey]


class PutView(msgspec.Struct, frozen=True):
    """Project a job's status for people and for `attach`."""

    job: JobKey
    status: JobStatus


class DropCheckpoint(msgspec.Struct, frozen=True):
    """An earlier job of this name left a controller's blob that nobody may go on from."""

    job: JobKey


class ForgetJob(msgspec.Struct, frozen=True):
    """Delete what the bus keeps of a job that ended long ago."""

    job: JobKey
    deployments: list[str]


class Answer(msgspec.Struct, frozen=True):
    """Answer an API request, if it is this process that holds it."""

    request: str
    status: JobStatus | None = None
    explanation: Explanation | None = None
    node: NodeStatus | None = None
    error: ErrorInfo | None = None


class ComputeReplan(msgspec.Struct, frozen=True):
    """Compute what is worth moving, beside the loop, and append it as a `ReplanComputed`."""

    as_of: int
    placement: str
    """The name of the placement policy."""
    cluster: Cluster
    """A copy of the cluster with the jobs that can be moved."""


class PublishNotice(msgspec.Struct, frozen=True):
    """Publish a notice for people."""

    title: str
    reason: str
    subject: str = ""


Output = (
    SendCommand
    | WriteCompletion
    | SettleCompletion
    | SetTimer
    | DeleteOperations
    | PutView
    | DropCheckpoint
    | ForgetJob
    | Answer
    | ComputeReplan
    | PublishNotice
)
