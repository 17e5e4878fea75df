"""Requests between the agents of a WPG that spans several nodes, over the bus.

The leader's agent involves the other nodes' ranks in each call, checks that all ranks are alive
when a call fails, and forwards cancels. The other agents ask it where the ranks meet. Every request
may be repeated: a share starts once per incarnation, even if messages are lost or duplicated. Its
answer comes in chunks. An agent answers immediately or tells the sender to retry, so nobody waits
for an answer that cannot come. An agent stops waiting when its own ranks are killed, or when
another node reports the end of the incarnation. The scheduler kills the ranks on all nodes once one
node has lost its part.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import nats.errors
from nats.aio.msg import Msg

from phaseloom.common.contract.agents import (
    CallRoll,
    CancelPart,
    FindStore,
    IncarnationOver,
    NodeReply,
    NodeRequest,
    NotYet,
    PartFailed,
    PartTaken,
    StoreFound,
    TakePart,
)
from phaseloom.common.contract.codec import CONTENT_TYPE, MSGPACK, content_type_of, decode, encode
from phaseloom.common.contract.errors import (
    Code,
    ErrorInfo,
    PhaseloomError,
    ResourceError,
    to_exception,
)
from phaseloom.common.contract.ids import DeploymentKey, NodeId, OperationKey
from phaseloom.common.contract.streams import op_subject, ops_stream, wpg_subject
from phaseloom.common.process import lifecycle
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.retry import until_done
from phaseloom.common.transport.services import answer_requests
from phaseloom.worker.rank.group import PeerShares
from phaseloom.worker.rank.wire import Payload, RunShare, SharesDone

log = logging.getLogger(__name__)

MAX_CHUNK_BYTES = 4 * 1024 * 1024
MAX_SHARE_BYTES = 1024 * 1024
"""Maximum bytes of a share without its payloads."""
MAX_RESULT_BYTES = 12 * 1024 * 1024
"""Maximum bytes of the results of one node's ranks, which must fit into a frame to the leader."""
HOLD_S = 1.0
"""Maximum seconds that an agent holds a request whose answer is not ready."""
SILENCE_S = 10.0
"""Seconds of silence at a roll call after which a node's part counts as lost. Longer than a node
lease lasts, and than a restart of the NATS server takes."""
_ANSWER_TIMEOUT_S = 4.0
_PAUSE_S = 0.1

T = TypeVar("T")
Work = Coroutine[Any, Any, T]


class IncarnationEnded(ResourceError):
    """Another node's ranks of this incarnation are dead or unreachable."""


class PeerAgents:
    """The other agents of a WPG, as seen by one of its agents.

    Args: nodes: the nodes of the WPG, by rank.
          is_over: whether this node's own ranks of the incarnation are killed.
    """

    def __init__(
        self,
        bus: Bus,
        deployment: DeploymentKey,
        incarnation: int,
        nodes: Sequence[NodeId],
        is_over: Callable[[], bool],
    ) -> None:
        self._bus = bus
        self._deployment = deployment
        self._incarnation = incarnation
        self._nodes = nodes
        self._is_over = is_over
        self._num_shares = 0
        self._open: set[int] = set()

    async def find_store(self, leader: NodeId) -> str:
        """The address of the store where the ranks meet. Raises: IncarnationEnded."""
        reply = await self._request(leader, FindStore(self._deployment, self._incarnation))
        assert isinstance(reply, StoreFound), reply
        return reply.address

    async def run_share(self, share: RunShare) -> PeerShares:
        """Run a share on the other nodes' ranks and return their results, by rank.

        Raises: IncarnationEnded. PhaseloomError: a rank's part failed.
        """
        if not self._nodes:
            return []
        operations = [msgspec.structs.replace(o, payload=b"") for o in share.operations]
        body = encode(msgspec.structs.replace(share, operations=operations))
        if len(body) > MAX_SHARE_BYTES:
            raise ResourceError(
                f"a request for {len(share.operations)} operations must have at most "
                f"{MAX_SHARE_BYTES} bytes, got {len(body)}",
                code=Code.RESOURCE_EXHAUSTED,
                remedy="send fewer operations at once",
            )
        self._num_shares += 1
        number = self._num_shares
        self._open.add(number)
        try:
            request = TakePart(
                self._deployment, self._incarnation, number, min(self._open) - 1, body
            )
            parts = await _gather_all(self._part_of(node, request) for node in self._nodes)
        finally:
            self._open.discard(number)
        return [of_rank for of_node in parts for of_rank in of_node]

    async def _part_of(self, node: NodeId, request: TakePart) -> PeerShares:
        answer = b""
        while True:
            reply = await self._request(node, msgspec.structs.replace(request, offset=len(answer)))
            assert isinstance(reply, PartTaken), reply
            answer += reply.chunk
            if len(answer) >= reply.num_bytes:
                done: SharesDone = decode(answer, SharesDone)
                return done.results

    async def call_roll(self) -> None:
        """Wait until all ranks on the other nodes are known to be alive. Raises:
        IncarnationEnded."""
        roll = CallRoll(self._deployment, self._incarnation)
        await _gather_all(self._request(node, roll, SILENCE_S) for node in self._nodes)

    async def cancel(self, operation: OperationKey, *, keeps_partial: bool) -> None:
        """Forward a cancel to the other nodes. Raises: IncarnationEnded."""
        body = CancelPart(operation, self._incarnation, keeps_partial)
        await _gather_all(self._request(node, body, SILENCE_S) for node in self._nodes)

    async def _request(
        self, node: NodeId, body: NodeRequest, silence_s: float | None = None
    ) -> NodeReply:
        """Repeat a request until the node has answered it.

        Raises: IncarnationEnded: the incarnation is over here or there, or the node was silent for
                `silence_s`. PhaseloomError: the request failed.
        """
        last_reply_s = time.monotonic()
        while not self._is_over():
            reply = await self._request_once(node, body)
            match reply:
                case None if silence_s and time.monotonic() - last_reply_s > silence_s:
                    raise IncarnationEnded(f"{node} has not answered for {silence_s:.0f} s")
                case None:
                    await asyncio.sleep(_PAUSE_S)
                case NotYet():
                    last_reply_s = time.monotonic()
                    # the receiver holds every other request for a while
                    if isinstance(body, FindStore):
                        await asyncio.sleep(_PAUSE_S)
                case IncarnationOver(error):
                    raise IncarnationEnded(f"on {node}: {error.message}", code=error.code)
                case PartFailed(error):
                    raise to_exception(error)
                case _:
                    return reply
        raise IncarnationEnded(
            f"incarnation {self._incarnation} of {self._deployment} is over here"
        )

    async def _request_once(self, node: NodeId, body: NodeRequest) -> NodeReply | None:
        """The node's reply; None if nobody answers, for example while the node restarts."""
        try:
            message = await self._bus.client.request(
                wpg_subject(node),
                encode(body),
                timeout=_ANSWER_TIMEOUT_S,
                headers={CONTENT_TYPE: MSGPACK},
            )
        except (nats.errors.Error, TimeoutError) as error:
            log.debug("%s does not answer %s: %r", node, type(body).__name__, error)
            return None
        reply: NodeReply = decode(message.data, NodeReply, content_type_of(message.headers))
        return reply


class LeaderShares:
    """The shares that the leader, on another node, has requested from this node's ranks.

    Covers one incarnation. Each share starts once, however often it is requested.
    """

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._shares: dict[int, asyncio.Task[NodeReply | bytes]] = {}
        self._num_ended = 0

    async def answer(
        self, request: TakePart, run: Callable[[RunShare], Work[SharesDone]]
    ) -> NodeReply:
        """Return the next chunk of a share's answer, and start the share at the first request."""
        self._num_ended = max(self._num_ended, request.num_ended)
        for number in [number for number in self._shares if number <= self._num_ended]:
            del self._shares[number]
        if request.number <= self._num_ended:
            return NotYet()  # a duplicate that arrived after a newer request
        part = self._shares.get(request.number)
        if part is None:
            share: RunShare = decode(request.share, RunShare)
            part = self._tasks.create_task(_outcome(run(share)))
            self._shares[request.number] = part
        await asyncio.wait([part], timeout=HOLD_S)
        if not part.done():
            return NotYet()
        outcome = part.result()
        if not isinstance(outcome, bytes):
            return outcome
        chunk = outcome[request.offset : request.offset + MAX_CHUNK_BYTES]
        return PartTaken(len(outcome), chunk)


async def _outcome(run: Work[SharesDone]) -> NodeReply | bytes:
    try:
        answer = encode(await run)
    except IncarnationEnded as error:
        return IncarnationOver(error.info)
    except PhaseloomError as error:
        return PartFailed(error.info)
    if len(answer) > MAX_RESULT_BYTES:
        text = (
            f"the results of one node's ranks must have at most {MAX_RESULT_BYTES} bytes, got "
            f"{len(answer)}"
        )
        remedy = "send fewer operations or samples at once"
        return PartFailed(ErrorInfo(Code.RESOURCE_EXHAUSTED, text, remedy=remedy))
    return answer


async def with_payloads(bus: Bus, share: RunShare) -> RunShare:
    """Add the payloads of the operations to a share; agents omit them between nodes.

    Raises: ResourceError: DATA_LOSS: a payload is not in its stream.
    """
    keys = [entry.operation for entry in share.operations]
    stream = ops_stream(keys[0].tenant)
    subjects = [op_subject(key) for key in keys]
    read = partial(bus.stored.get_all, stream, subjects, must_exist=True)
    stored = await until_done(read, "read payloads")
    operations = []
    for key, subject in zip(keys, subjects, strict=True):
        payload = stored.get(subject)
        if payload is None:
            raise ResourceError(f"the payload of {key} is not in its stream", code=Code.DATA_LOSS)
        operations.append(Payload(key, payload.payload, content_type_of(payload.headers)))
    return msgspec.structs.replace(share, operations=operations)


async def serve_nodes(
    bus: Bus, node: NodeId, answer: Callable[[NodeRequest], Awaitable[NodeReply]]
) -> None:
    """Answer requests of other nodes' agents concurrently, until cancelled."""

    async def reply(message: Msg) -> NodeReply:
        try:
            return await answer(decode(message.data, NodeRequest, content_type_of(message.headers)))
        except PhaseloomError as error:
            return PartFailed(error.info)

    await answer_requests(bus.client, wpg_subject(node), reply)


async def _gather_all(works: Any) -> list[Any]:
    """Return the results in the order of `works`.

    Raises: the first failure, after cancelling the other works.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await lifecycle.end(tasks)
