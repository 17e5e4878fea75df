"""The core's outputs, which the shell performs.

All are idempotent, because some are performed again after a restart.
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
    """Publish a command to its node."""

    command: Command


class WriteCompletion(msgspec.Struct, frozen=True):
    """Store the outcome of an operation that never ran."""

    key: OperationKey
    completion: Completion
    content_type: str


class SettleCompletion(msgspec.Struct, frozen=True):
    """Store this outcome unless one is already stored, then append the stored one to the log.

    The operation may have taken effect in an incarnation that died. The stored outcome is reported
    as an `OperationFinished` of incarnation 0.
    """

    key: OperationKey
    kind: str
    completion: Completion
    content_type: str


class SetTimer(msgspec.Struct, frozen=True):
    """Append `TimerFired` when the log's clock passes `due_s`."""

    timer: str
    due_s: float


class DeleteOperations(msgspec.Struct, frozen=True):
    """Delete operations from their tenant's stream; nothing will read them again."""

    keys: list[OperationKey]


class PutView(msgspec.Struct, frozen=True):
    """Publish a job's status for users and for `attach`."""

    job: JobKey
    status: JobStatus


class DropCheckpoint(msgspec.Struct, frozen=True):
    """Delete the controller's blob of an earlier job of this name, so that no controller resumes
    from it."""

    job: JobKey


class ForgetJob(msgspec.Struct, frozen=True):
    """Delete all data on the bus of a job that ended long ago."""

    job: JobKey
    deployments: list[str]


class Answer(msgspec.Struct, frozen=True):
    """Answer an API request, if this process received it."""

    request: str
    status: JobStatus | None = None
    explanation: Explanation | None = None
    node: NodeStatus | None = None
    error: ErrorInfo | None = None


class ComputeReplan(msgspec.Struct, frozen=True):
    """Plan worthwhile moves outside the loop, and append them as a `ReplanComputed`."""

    as_of: int
    placement: str
    """Name of the placement policy."""
    cluster: Cluster
    """Copy of the cluster."""


class PublishNotice(msgspec.Struct, frozen=True):
    """Publish a notice for users."""

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
