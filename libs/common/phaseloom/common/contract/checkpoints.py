"""Checkpoints on a node's disk: router → agent, request and reply on `pl.v1.checkpoint.<node>`.

The agent passes each request on to its state manager. Nodes may have one checkpoint root: then each
of them answers, and says the same.
"""

from __future__ import annotations

from phaseloom.common.contract.api import SavedCheckpoint
from phaseloom.common.contract.codec import Message
from phaseloom.common.contract.errors import ErrorInfo
from phaseloom.common.contract.ids import DeploymentKey


class FindCheckpoints(Message, frozen=True):
    """Which checkpoints of a tenant are there? Answer: CheckpointsFound."""

    tenant: str
    job: str = ""
    """Find only the checkpoints of this job; empty: of all."""
    deployment: str = ""
    """Find only the checkpoints of deployments of this name; empty: of all."""


class CheckpointsFound(Message, frozen=True):
    checkpoints: list[SavedCheckpoint]


class DescribeCheckpoint(Message, frozen=True):
    """Describe a checkpoint, with its files. Answer: CheckpointsFound, of one.

    Raises: NOT_FOUND.
    """

    deployment: DeploymentKey
    name: str


class SetExpiry(Message, frozen=True):
    """Keep a checkpoint for `ttl_s` seconds from now. Answer: CheckpointsFound, of one.

    Raises: NOT_FOUND.
    """

    deployment: DeploymentKey
    name: str
    ttl_s: float
    """Seconds from now; 0: the checkpoint is kept until it is deleted."""


class EraseCheckpoint(Message, frozen=True):
    """Remove a checkpoint that the job does not fall back to. Answer: CheckpointErased.

    Raises: NOT_FOUND. FAILED_PRECONDITION: the job may fall back to it.
    """

    deployment: DeploymentKey
    name: str
    if_expired: bool = False
    """Whether to remove the checkpoint only if its time to live is over."""


class CheckpointErased(Message, frozen=True):
    num_bytes: int
    """The bytes of all files that were removed."""


class OpenArchive(Message, frozen=True):
    """Open a checkpoint's files as one tar file. Answer: ArchiveOpened.

    Raises: NOT_FOUND. RESOURCE_EXHAUSTED: too many archives are open.
    """

    deployment: DeploymentKey
    name: str


class ArchiveOpened(Message, frozen=True):
    archive: str
    num_bytes: int


class ReadArchivePart(Message, frozen=True):
    """Read an archive that is open. Answer: ArchiveRead.

    Raises: NOT_FOUND: the tenant has no such archive open here.
    """

    tenant: str
    archive: str
    offset: int


class ArchiveRead(Message, frozen=True):
    content: bytes


class CheckpointRefused(Message, frozen=True):
    """Answer to any request."""

    error: ErrorInfo


class FindExpired(Message, frozen=True):
    """agent → state manager: which checkpoints' time to live is over? Answer: ExpiredFound."""


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
