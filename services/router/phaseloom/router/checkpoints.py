"""The API of checkpoints: nodes are asked for what their disks have, and their answers merged.

Nodes may have one checkpoint root or one each, so a checkpoint may be known to all nodes or to
some. A router keeps nothing of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TypeVar

from phaseloom.common.contract.api import (
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

_ANSWER_S = 4.0
"""A node that gives no answer within this time is silent: less than `call_api` waits."""


class Checkpoints:
    """Answers a tenant's calls about its checkpoints."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def find(self, tenant: str, request: ListCheckpoints) -> CheckpointList:
        """The tenant's checkpoints on all nodes, and the nodes that do not answer.

        Raises: CallerError: a bad name.
        """
        for field in ("job", "deployment"):
            if name := getattr(request, field):
                check_name(name, field)
        nodes = await nodes_up(self._bus)
        asked = FindCheckpoints(tenant, request.job, request.deployment)
        answers = await asyncio.gather(
            *(self._try(node, asked, CheckpointsFound) for node in nodes)
        )
        silent = [n for n, a in zip(nodes, answers, strict=True) if isinstance(a, PhaseloomError)]
        found = (each for a in answers if isinstance(a, CheckpointsFound) for each in a.checkpoints)
        return CheckpointList(merged(found), silent)

    async def show(self, tenant: str, request: CheckpointRequest) -> SavedCheckpoint:
        """Describe a checkpoint, with its files.

        Raises: CallerError: NOT_FOUND; a bad name. ResourceError: a node is silent.
        """
        key, name = _named(tenant, request)
        asked = DescribeCheckpoint(key, name)
        answers = await self._first(asked, CheckpointsFound)
        return answers.checkpoints[0]

    async def expire(self, tenant: str, request: ExpireCheckpoint) -> SavedCheckpoint:
        """Set how long a checkpoint is kept from now on.

        Raises: CallerError: NOT_FOUND; a bad name or time. ResourceError: a node is silent.
        """
        key, name = _named(tenant, request)
        check_ttl(request.ttl_s, "ttl_s")
        answer = await self._first(SetExpiry(key, name, request.ttl_s), CheckpointsFound)
        return answer.checkpoints[0]

    async def delete(self, tenant: str, request: CheckpointRequest) -> CheckpointDeleted:
        """Delete a checkpoint that its job does not fall back to.

        Raises: CallerError: NOT_FOUND; FAILED_PRECONDITION: the job falls back to it; a bad name.
                ResourceError: a node is silent.
        """
        key, name = _named(tenant, request)
        answer = await self._first(EraseCheckpoint(key, name), CheckpointErased)
        return CheckpointDeleted(answer.num_bytes)

    async def archive(self, tenant: str, request: CheckpointRequest) -> OpenedArchive:
        """Open a checkpoint as a tar file on a node that has it.

        Raises: CallerError: NOT_FOUND; a bad name. ResourceError: too many archives are open; a
                node is silent.
        """
        key, name = _named(tenant, request)
        answer = await self._first(OpenArchive(key, name), ArchiveOpened)
        return OpenedArchive(answer.archive, answer.num_bytes)

    async def read(self, tenant: str, request: ReadArchive) -> ArchivePart:
        """Read a part of an open archive, from the node that has it open.

        Raises: CallerError: NOT_FOUND: there is no such archive, or not any more. ResourceError:
                the node is silent, or its disk fails.
        """
        node = request.archive.partition(".")[0]
        if not is_name(node):
            raise CallerError(
                f"{request.archive!r} names no archive",
                code=Code.NOT_FOUND,
                field="archive",
                remedy="name the one that `checkpoint.archive` was answered with",
            )
        asked = ReadArchivePart(tenant, request.archive, request.offset)
        return ArchivePart((await self._ask(node, asked, ArchiveRead)).content)

    async def _first(self, asked: NodeCheckpointRequest, kind: type[R]) -> R:
        """The answer of the first node that has the checkpoint.

        Nodes are asked one after another, so that nothing is done twice.

        Raises: CallerError: NOT_FOUND: all nodes answer, and none has it; FAILED_PRECONDITION.
                ResourceError: UNAVAILABLE: a node that may have it is silent.
        """
        missing: PhaseloomError | None = None
        silent: PhaseloomError | None = None
        for node in await nodes_up(self._bus):
            answer = await self._try(node, asked, kind)
            if not isinstance(answer, PhaseloomError):
                return answer
            if isinstance(answer, CallerError) and answer.info.code is not Code.NOT_FOUND:
                raise answer
            if isinstance(answer, CallerError):
                missing = answer
            else:
                silent = answer
        raise silent or missing or ResourceError("no node is up", remedy="try again")

    async def _try(
        self, node: str, asked: NodeCheckpointRequest, kind: type[R]
    ) -> R | PhaseloomError:
        try:
            return await self._ask(node, asked, kind)
        except PhaseloomError as error:
            return error

    async def _ask(self, node: str, asked: NodeCheckpointRequest, kind: type[R]) -> R:
        message = await request_reply(
            self._bus.client,
            checkpoint_subject(NodeId(node)),
            encode(asked),
            timeout_s=_ANSWER_S,
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


def merged(found: Iterable[SavedCheckpoint]) -> list[SavedCheckpoint]:
    """The checkpoints of all nodes, the newest last.

    Of several with one name the newest counts: nodes with one root name the same checkpoint, and a
    job that has moved may have saved anew.
    """
    newest: dict[tuple[str, str, str], SavedCheckpoint] = {}
    for each in found:
        key = (each.job, each.deployment, each.name)
        if key not in newest or newest[key].saved_s < each.saved_s:
            newest[key] = each
    return sorted(newest.values(), key=lambda each: (each.saved_s, each.job, each.name))


def _named(tenant: str, request: CheckpointRequest | ExpireCheckpoint) -> tuple[DeploymentKey, str]:
    for field in ("job", "deployment", "name"):
        check_name(getattr(request, field), field)
    return DeploymentKey(tenant, request.job, request.deployment), request.name
