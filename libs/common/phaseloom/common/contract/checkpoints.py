"""Checkpoints on a node's disk: router → agent, request and reply on `pl.v1.checkpoint.<node>`.

The agent forwards each request to its state manager. If several nodes share a checkpoint root, all
of them give the same answer.
"""

from __future__ import annotations

from phaseloom.common.contract.api import SavedCheckpoint
from phaseloom.common.contract.codec import Message
from phaseloom.common.contract.errors import ErrorInfo
from phaseloom.common.contract.ids import DeploymentKey


class FindCheckpoints(Message, frozen=True):
    """List the checkpoints of a tenant. Answer: CheckpointsFound."""

    tenant: str
    job: str = ""
    """Find only the checkpoints of this job; empty: of all jobs."""
    deployment: str = ""
    """Find only the checkpoints of deployments with this name; empty: of all deployments."""


class CheckpointsFound(Message, frozen=True):
    checkpoints: list[SavedCheckpoint]


class DescribeCheckpoint(Message, frozen=True):
    """Describe a checkpoint and its files. Answer: CheckpointsFound with one entry.

    Raises: NOT_FOUND.
    """

    deployment: DeploymentKey
    name: str


class SetExpiry(Message, frozen=True):
    """Keep a checkpoint for `ttl_s` seconds from now. Answer: CheckpointsFound with one entry.

    Raises: NOT_FOUND.
    """

    deployment: DeploymentKey
    name: str
    ttl_s: float
    """Seconds from now; 0: keep the checkpoint until it is deleted."""


class EraseCheckpoint(Message, frozen=True):
    """Remove a checkpoint, unless the job may fall back to it. Answer: CheckpointErased.

    Raises: NOT_FOUND. FAILED_PRECONDITION: the job may fall back to it.
    """

    deployment: DeploymentKey
    name: str
    if_expired: bool = False
    """Whether to remove the checkpoint only if it has expired."""


class CheckpointErased(Message, frozen=True):
    num_bytes: int
    """Total size of the removed files."""


class OpenArchive(Message, frozen=True):
    """Open a checkpoint's files as one tar file. Answer: ArchiveOpened.

    Raises: NOT_FOUND. RESOURCE_EXHAUSTED: too many archives are open.
    """

    deployment: DeploymentKey
    name: str
    file: str = ""
    """The only file to open, by its name in the checkpoint, without tar headers. Empty: all."""


class ArchiveOpened(Message, frozen=True):
    archive: str
    num_bytes: int


class ReadArchivePart(Message, frozen=True):
    """Read a part of an open archive. Answer: ArchiveRead.

    Raises: NOT_FOUND: the tenant has no such open archive on this node.
    """

    tenant: str
    archive: str
    offset: int


class ArchiveRead(Message, frozen=True):
    content: bytes


class CheckpointRefused(Message, frozen=True):
    """Error answer to any request."""

    error: ErrorInfo


class FindExpired(Message, frozen=True):
    """agent → state manager: list the expired checkpoints. Answer: ExpiredFound."""


class ExpiredFound(Message, frozen=True):
    checkpoints: list[DescribeCheckpoint]


NodeCheckpointRequest = (
    FindCheckpoints
    | DescribeCheckpoint
    | SetExpiry
    | EraseCheckpoint
    | OpenArchive
    | ReadArchivePart
)
NodeCheckpointReply = (
    CheckpointsFound | CheckpointErased | ArchiveOpened | ArchiveRead | CheckpointRefused
)
