"""The daemon's sessions: who is talking, what they may ask, and which part answers.

An agent proves the node's secret, a rank its token; nothing else is believed. Requests of one
connection run side by side; order between switches of one device is kept by its lock.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Sequence
from typing import Any

from phaseloom.common.errors import CallerError, Code, ResourceError
from phaseloom.common.framing import Peer
from phaseloom.common.statewire import (
    AgentHello,
    CommitInitial,
    CommitVersion,
    CreateVersion,
    Done,
    DropVersions,
    DropWpg,
    HeapRegistered,
    OpenVersion,
    PrepareSeal,
    RankHello,
    RegisterHeap,
    RegisterWpg,
    StateMessage,
    StatusReport,
    StatusRequest,
    SwitchIn,
    SwitchOut,
    WriteSeal,
)
from phaseloom.statemgr.core.residency import State, Wpg
from phaseloom.statemgr.memory import digest_of
from phaseloom.statemgr.node import Node
from phaseloom.statemgr.sealing import Sealer
from phaseloom.statemgr.switching import switch_in, switch_out
from phaseloom.statemgr.weights import Weights

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0

Answer = tuple[StateMessage, Sequence[int]]


class Session:
    """One connection and what it has proved to be."""

    def __init__(self, peer: Peer[StateMessage]) -> None:
        self.peer = peer
        self.is_agent = False
        self.wpg: Wpg | None = None
        self.greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def greet(self) -> None:
        if not self.greeted.done():
            self.greeted.set_result(None)


class StateManager:
    """Answers agents and ranks; owns no memory itself."""

    def __init__(
        self, node: Node, sealer: Sealer, weights: Weights, secret: str, endpoint: str
    ) -> None:
        self._node = node
        self._sealer = sealer
        self._weights = weights
        self._secret = secret
        self._endpoint = endpoint
        self._num_agents = 0

    async def session(self, peer: Peer[StateMessage]) -> None:
        """Serve one connection until it ends."""
        session = Session(peer)

        async def handle(body: StateMessage, _fds: list[int]) -> Answer:
            return await self._handle(session, body)

        peer.handler = handle
        peer.start()
        either: list[asyncio.Future[Any]] = [session.greeted, peer.closed]
        await asyncio.wait(either, timeout=HELLO_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if not session.greeted.done():
            if not peer.closed.done():
                log.warning("a peer proved nothing within %.0f s", HELLO_TIMEOUT_S)
            return
        await asyncio.wait([peer.closed])
        if session.wpg is not None:
            self._node.retire(session.wpg, peer.closed.result())
        if session.is_agent:
            self._num_agents -= 1
            if not self._num_agents:
                self._sealer.abandon()
        await peer.finish()

    async def _handle(self, session: Session, body: StateMessage) -> Answer:
        if isinstance(body, AgentHello):
            return self._greet_agent(session, body), ()
        if isinstance(body, RankHello):
            return self._greet_rank(session, body), ()
        if session.is_agent:
            return await self._handle_agent(body), ()
        if session.wpg is not None:
            return await self._handle_rank(session.wpg, body)
        raise _denied("say hello first")

    def _greet_agent(self, session: Session, hello: AgentHello) -> Done:
        if session.greeted.done() or not hmac.compare_digest(
            hello.secret.encode(), self._secret.encode()
        ):
            log.warning("an agent's hello was refused")
            raise _denied("the secret is wrong, or the second hello")
        session.is_agent = True
        self._num_agents += 1
        session.greet()
        return Done()

    def _greet_rank(self, session: Session, hello: RankHello) -> Done:
        wpg = self._node.residency.authenticate(hello.token)
        if session.greeted.done() or wpg in self._node.ranks:
            raise _denied(f"{wpg} has a rank already, or the second hello")
        session.wpg = wpg
        self._node.ranks[wpg] = session.peer
        session.greet()
        return Done()

    async def _handle_agent(self, body: StateMessage) -> StateMessage:
        match body:
            case RegisterWpg():
                self._register_wpg(body)
            case SwitchIn():
                return await switch_in(self._node, body)
            case SwitchOut():
                return await switch_out(self._node, body)
            case PrepareSeal():
                await self._sealer.prepare(body)
            case WriteSeal():
                return await self._sealer.write(body)
            case DropWpg():
                await self._drop_wpg(body)
            case DropVersions():
                await self._weights.drop(body.versions)
            case StatusRequest():
                return self._status()
            case _:
                raise _not_for("an agent", body)
        return Done()

    async def _handle_rank(self, wpg: Wpg, body: StateMessage) -> Answer:
        match body:
            case RegisterHeap():
                return await self._register_heap(wpg, body)
            case CommitInitial():
                await self._commit_initial(wpg, body)
            case CreateVersion():
                self._require_alive(wpg)
                return self._weights.create(wpg, body)
            case CommitVersion():
                await self._weights.commit(wpg, body)
            case OpenVersion():
                return await self._weights.open(wpg, body)
            case _:
                raise _not_for("a rank", body)
        return Done(), ()

    def _register_wpg(self, request: RegisterWpg) -> None:
        replaced = self._node.residency.register(
            request.token,
            request.deployment,
            request.incarnation,
            request.device,
            request.seal_seq,
        )
        if replaced is not None:
            self._node.retire(replaced, f"fenced by incarnation {request.incarnation}")

    async def _drop_wpg(self, request: DropWpg) -> None:
        node, key = self._node, request.deployment
        wpg = node.residency.drop(key, request.incarnation)
        if wpg is not None:
            node.retire(wpg, "dropped by the agent")
            await node.until(lambda: wpg.extent is None)
        if request.forget:
            await self._sealer.forget(key)
            node.residency.forget(key)

    async def _register_heap(self, wpg: Wpg, request: RegisterHeap) -> Answer:
        node = self._node
        node.residency.check_heap(wpg, request.heap_bytes, request.tensors)
        extent = node.memory.reserve(request.heap_bytes, f"the host copy of {wpg.key}")
        node.residency.register_heap(wpg, request.heap_bytes, request.tensors, extent)
        if wpg.seal_seq:
            await self._sealer.restore(wpg, wpg.seal_seq)
        if wpg.extent is None:
            raise ResourceError(f"{wpg} was dropped meanwhile", code=Code.ABORTED)
        return HeapRegistered(wpg.applied), [node.memory[wpg.extent].fd]

    async def _commit_initial(self, wpg: Wpg, request: CommitInitial) -> None:
        if wpg.state is not State.FILLING or wpg.seal_seq or wpg.extent is None:
            raise CallerError(f"{wpg} awaits no initial state", code=Code.FAILED_PRECONDITION)
        memory = self._node.memory[wpg.extent].view(wpg.heap_bytes)
        if await asyncio.to_thread(digest_of, memory) != request.digest:
            raise ResourceError(
                f"the host copy of {wpg} does not match its digest", code=Code.DATA_LOSS
            )
        self._node.residency.fill(wpg, 0, request.digest)

    def _require_alive(self, wpg: Wpg) -> None:
        if wpg.state is State.LOST:
            raise ResourceError(f"{wpg} is over", code=Code.ABORTED)

    def _status(self) -> StatusReport:
        node = self._node
        node.validate()
        budgets = node.residency.device_budget_bytes
        return StatusReport(
            device_budget_bytes=budgets,
            device_used_bytes=[node.residency.device_used_bytes(d) for d in range(len(budgets))],
            host_budget_bytes=node.memory.arena.budget_bytes,
            host_used_bytes=node.memory.arena.used_bytes,
            deployments=node.residency.deployments(),
            versions=node.versions.committed(),
            endpoint=self._endpoint,
        )


def _denied(why: str) -> CallerError:
    return CallerError(why, code=Code.PERMISSION_DENIED)


def _not_for(who: str, body: StateMessage) -> CallerError:
    return CallerError(f"{who} does not send {type(body).__name__}", field="type")
