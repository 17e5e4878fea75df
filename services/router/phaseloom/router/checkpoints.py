"""The checkpoint API: queries the nodes for checkpoints on their disks and merges the answers.

Nodes may share one checkpoint root or have their own, so a checkpoint may be known to all nodes or
only to some. The router caches nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TypeVar

from phaseloom.common.contract.api import (
    ArchiveCheckpoint,
    ArchivePart,
    CheckpointDeleted,
    CheckpointList,
    CheckpointRequest,
    ExpireCheckpoint,
    ListCheckpoints,
    OpenedArchive,
    ReadArchive,
    SavedCheckpoint,
)
from phaseloom.common.contract.checkpoints import (
    ArchiveOpened,
    ArchiveRead,
    CheckpointErased,
    CheckpointRefused,
    CheckpointsFound,
    DescribeCheckpoint,
    EraseCheckpoint,
    FindCheckpoints,
    NodeCheckpointReply,
    NodeCheckpointRequest,
    OpenArchive,
    ReadArchivePart,
    SetExpiry,
)
from phaseloom.common.contract.checks import check_ttl
from phaseloom.common.contract.codec import CONTENT_TYPE, MSGPACK, content_type_of, decode, encode
from phaseloom.common.contract.errors import (
    CallerError,
    Code,
    InternalError,
    PhaseloomError,
    ResourceError,
    to_exception,
)
from phaseloom.common.contract.ids import DeploymentKey, NodeId, check_name, is_name
from phaseloom.common.contract.streams import checkpoint_subject
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.leases import nodes_up
from phaseloom.common.transport.services import request_reply

R = TypeVar("R", CheckpointsFound, CheckpointErased, ArchiveOpened, ArchiveRead)

_ANSWER_TIMEOUT_S = 4.0
"""Time limit for a node's answer; below the time that `call_api` waits for ours."""


class Checkpoints:
    """Serves a tenant's checkpoint calls."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def find(self, tenant: str, request: ListCheckpoints) -> CheckpointList:
        """List the tenant's checkpoints on all nodes, and the nodes that did not answer.

        Raises: CallerError: an invalid name.
        """
        for field in ("job", "deployment"):
            if name := getattr(request, field):
                check_name(name, field)
        nodes = await nodes_up(self._bus)
        node_request = FindCheckpoints(tenant, request.job, request.deployment)
        answers = await asyncio.gather(
            *(self._try(node, node_request, CheckpointsFound) for node in nodes)
        )
        silent = [n for n, a in zip(nodes, answers, strict=True) if isinstance(a, PhaseloomError)]
        checkpoints = (
            saved for a in answers if isinstance(a, CheckpointsFound) for saved in a.checkpoints
        )
        return CheckpointList(merged(checkpoints), silent)

    async def show(self, tenant: str, request: CheckpointRequest) -> SavedCheckpoint:
        """Describe a checkpoint and its files.

        Raises: CallerError: NOT_FOUND, or an invalid name. ResourceError: a node did not answer.
        """
        key, name = _named(tenant, request)
        node_request = DescribeCheckpoint(key, name)
        answers = await self._first(node_request, CheckpointsFound)
        return answers.checkpoints[0]

    async def expire(self, tenant: str, request: ExpireCheckpoint) -> SavedCheckpoint:
        """Set a checkpoint's time to live, counted from now.

        Raises: CallerError: NOT_FOUND, or an invalid name or time. ResourceError: a node did not
                answer.
        """
        key, name = _named(tenant, request)
        check_ttl(request.ttl_s, "ttl_s")
        answer = await self._first(SetExpiry(key, name, request.ttl_s), CheckpointsFound)
        return answer.checkpoints[0]

    async def delete(self, tenant: str, request: CheckpointRequest) -> CheckpointDeleted:
        """Delete a checkpoint, unless its job may still fall back to it.

        Raises: CallerError: NOT_FOUND, an invalid name, or FAILED_PRECONDITION: the job may fall
                back to it. ResourceError: a node did not answer.
        """
        key, name = _named(tenant, request)
        answer = await self._first(EraseCheckpoint(key, name), CheckpointErased)
        return CheckpointDeleted(answer.num_bytes)

    async def archive(self, tenant: str, request: ArchiveCheckpoint) -> OpenedArchive:
        """Open a checkpoint as a tar file, or one of its files, on a node that has it.

        Raises: CallerError: NOT_FOUND, or an invalid name. ResourceError: too many archives are
                open, or a node did not answer.
        """
        key, name = _named(tenant, request)
        answer = await self._first(OpenArchive(key, name, request.file), ArchiveOpened)
        return OpenedArchive(answer.archive, answer.num_bytes)

    async def read(self, tenant: str, request: ReadArchive) -> ArchivePart:
        """Read part of an open archive from the node that opened it.

        Raises: CallerError: NOT_FOUND: the archive does not exist or was closed. ResourceError: the
                node did not answer, or its disk failed.
        """
        node = request.archive.partition(".")[0]
        if not is_name(node):
            raise CallerError(
                f"there is no open archive {request.archive!r}",
                code=Code.NOT_FOUND,
                field="archive",
                remedy="use the archive name that `checkpoint.archive` returned",
            )
        node_request = ReadArchivePart(tenant, request.archive, request.offset)
        return ArchivePart((await self._request(node, node_request, ArchiveRead)).content)

    async def _first(self, node_request: NodeCheckpointRequest, kind: type[R]) -> R:
        """Return the answer of the first node that has the checkpoint.

        Requests go to one node after another, so that no action is performed twice.

        Raises: CallerError: NOT_FOUND: all nodes answered and none has it; FAILED_PRECONDITION.
                ResourceError: UNAVAILABLE: a node that may have it did not answer.
        """
        missing: PhaseloomError | None = None
        silent: PhaseloomError | None = None
        for node in await nodes_up(self._bus):
            answer = await self._try(node, node_request, kind)
            if not isinstance(answer, PhaseloomError):
                return answer
            if isinstance(answer, CallerError) and answer.info.code is not Code.NOT_FOUND:
                raise answer
            if isinstance(answer, CallerError):
                missing = answer
            else:
                silent = answer
        raise silent or missing or ResourceError("no node is up", remedy="try again later")

    async def _try(
        self, node: str, node_request: NodeCheckpointRequest, kind: type[R]
    ) -> R | PhaseloomError:
        try:
            return await self._request(node, node_request, kind)
        except PhaseloomError as error:
            return error

    async def _request(self, node: str, node_request: NodeCheckpointRequest, kind: type[R]) -> R:
        message = await request_reply(
            self._bus.client,
            checkpoint_subject(NodeId(node)),
            encode(node_request),
            timeout_s=_ANSWER_TIMEOUT_S,
            headers={CONTENT_TYPE: MSGPACK},
        )
        answer: NodeCheckpointReply = decode(
            message.data, NodeCheckpointReply, content_type_of(message.headers)
        )
        if isinstance(answer, CheckpointRefused):
            raise to_exception(answer.error)
        if not isinstance(answer, kind):
            raise InternalError(f"expected {kind.__name__}, got {type(answer).__name__}")
        return answer


def merged(checkpoints: Iterable[SavedCheckpoint]) -> list[SavedCheckpoint]:
    """Merge the nodes' checkpoints into one list, newest last.

    Of several with one name, the newest wins: nodes with a shared root report the same checkpoint,
    and a job that moved may have saved the name again.
    """
    newest: dict[tuple[str, str, str], SavedCheckpoint] = {}
    for saved in checkpoints:
        key = (saved.job, saved.deployment, saved.name)
        if key not in newest or newest[key].saved_s < saved.saved_s:
            newest[key] = saved
    return sorted(newest.values(), key=lambda saved: (saved.saved_s, saved.job, saved.name))


def _named(
    tenant: str, request: CheckpointRequest | ArchiveCheckpoint | ExpireCheckpoint
) -> tuple[DeploymentKey, str]:
    for field in ("job", "deployment", "name"):
        check_name(getattr(request, field), field)
    return DeploymentKey(tenant, request.job, request.deployment), request.name
