"""The WPGs with ranks on this node: start and stop them, serve their connections, report deaths.

Lock order: a deployment's lock first, then the lock of device state. Nobody waits for a
deployment's lock while holding the lock of device state.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence

from phaseloom.common.contract.commands import StartWpg, StopWpg
from phaseloom.common.contract.errors import CallerError, Code, ErrorInfo, PhaseloomError
from phaseloom.common.contract.events import Event, WpgLost, WpgStarted
from phaseloom.common.contract.ids import DeploymentKey, NodeId
from phaseloom.common.contract.state_agent import FetchState
from phaseloom.common.contract.state_rank import Done
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.framing import Handler, Peer, close_fds
from phaseloom.worker.agent.modelfiles import ModelFiles
from phaseloom.worker.agent.processes import Processes
from phaseloom.worker.agent.rwlock import FairReadWriteLock
from phaseloom.worker.agent.stateclient import AgentStateClient
from phaseloom.worker.agent.wpg import LocalWpg
from phaseloom.worker.config import WorkerConfig
from phaseloom.worker.rank.wire import (
    DevicesFreed,
    HostUp,
    MeetRanks,
    RankFailed,
    RankMessage,
    RankUp,
    RollCall,
    RunShare,
    StopShare,
    TailReached,
    TokensDrawn,
)

log = logging.getLogger(__name__)

_STOP_S = 3.0
"""Seconds that ranks get to exit by themselves before they are killed."""

Append = Callable[[Event, str], Awaitable[None]]
"""Appends an event with this message id to the decision log, once."""


class Wpgs:
    """All WPGs that have ranks on this node, and the locks that serialize their commands."""

    def __init__(
        self,
        settings: WorkerConfig,
        *,
        bus: Bus,
        state: AgentStateClient,
        processes: Processes,
        agent_socket: str,
        tasks: asyncio.TaskGroup,
        append: Append,
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._state = state
        self._processes = processes
        self._agent_socket = agent_socket
        self._tasks = tasks
        self._append = append
        self._models = ModelFiles(settings.node)
        self.by_deployment: dict[DeploymentKey, LocalWpg] = {}
        self.locks: defaultdict[DeploymentKey, FairReadWriteLock] = defaultdict(FairReadWriteLock)
        """Permits of reading operations share a deployment's lock. Permits of mutating operations,
        and commands that start, stop, switch, seal or mirror the deployment, hold it exclusively.
        """
        self.state_lock = asyncio.Lock()
        """Held by a command that moves state on a device: one at a time on a node."""
        self._by_token: dict[str, LocalWpg] = {}
        self._open_stops: list[StopWpg] = []
        self._is_stopping = False

    def get(self, deployment: DeploymentKey, incarnation: int) -> LocalWpg | None:
        """Return this node's ranks of an incarnation; None if they are gone or not started yet."""
        wpg = self.by_deployment.get(deployment)
        return wpg if wpg is not None and wpg.incarnation == incarnation else None

    async def stop_all(self) -> None:
        """End all ranks because the agent ends. Nothing is reported as lost."""
        self._is_stopping = True
        await asyncio.gather(*(wpg.stop(_STOP_S) for wpg in self.by_deployment.values()))

    # --- connections of ranks -------------------------------------------------------------------

    async def serve_rank(self, peer: Peer[RankMessage]) -> None:
        """Serve a connection on the agent's socket. Its first call must present a token."""

        async def answer(body: RankMessage, fds: list[int]) -> tuple[RankMessage, list[int]]:
            close_fds(fds)
            if isinstance(body, HostUp) and self._processes.connected(body.token, peer):
                return Done(), []
            token = body.token if isinstance(body, MeetRanks | RankUp | RankFailed) else ""
            wpg = self._by_token.get(token)
            if wpg is not None and isinstance(body, MeetRanks):
                return await wpg.meet(token)
            if wpg is None or not isinstance(body, RankUp | RankFailed):
                peer.cut("no rank of this agent")
                return Done(), []
            peer.handler = _handler_of(wpg, peer)
            wpg.connected(peer, body)
            return Done(), []

        peer.handler = answer
        peer.start()
        await peer.finish()

    # --- starting and stopping ------------------------------------------------------------------

    async def start(self, command: StartWpg) -> None:
        """Start the ranks of a new incarnation, and report them once all are up.

        A failure is reported as the loss of the incarnation.
        """
        key = command.deployment
        async with self.locks[key].write():
            old = self.by_deployment.get(key)
            if old is not None and old.incarnation >= command.incarnation:
                return
            if old is not None:
                old.kill(ErrorInfo(Code.ABORTED, "fenced by a newer incarnation"))
            wpg = LocalWpg(command, self._settings, self._agent_socket, self._bus, self._tasks)
            try:
                await self._prepare(command, wpg)
            except PhaseloomError as error:
                wpg.abandon()
                await self._report_lost(key, command.incarnation, error.info)
                return
            if any(
                stop.deployment == command.deployment and stop.incarnation >= command.incarnation
                for stop in self._open_stops
            ):
                # If the ranks started, they could wait forever for ranks on other nodes.
                wpg.abandon()
                return
            self.by_deployment[key] = wpg
            self._by_token |= dict.fromkeys(wpg.tokens, wpg)
            await wpg.start(self._processes)
            self._tasks.create_task(self._watch(wpg))
            try:
                await wpg.up(self._settings.start_timeout_s)
            except PhaseloomError as error:
                # `_watch` reports the loss, once all ranks are dead.
                wpg.kill(error.info)
                return
        await self._append(
            WpgStarted(
                deployment=key,
                incarnation=command.incarnation,
                node=command.node,
                state_bytes=wpg.state_bytes,
                applied=wpg.applied,
                devices=command.devices,
            ),
            f"started:{key}:{command.incarnation}:{command.node}",
        )

    async def stop(self, command: StopWpg) -> None:
        """End the ranks of an incarnation, then have the state manager drop them."""
        self._open_stops.append(command)
        try:
            await self._end(command)
        finally:
            self._open_stops.remove(command)

    async def _prepare(self, command: StartWpg, wpg: LocalWpg) -> None:
        """Bring what the ranks need to this node: model files, state, and the place to meet."""
        model = command.spec.model
        is_restored = bool(command.seal_seq or command.checkpoint) and model.adapter is None
        if model.pinned is not None and not is_restored:
            await self._models.verify(model.registered, model.pinned)
        if command.sources:
            await self._state.fetch_state(
                FetchState(
                    command.deployment,
                    command.seal_seq,
                    command.versions,
                    command.sources,
                    command.ticket,
                    rank_offset=command.rank_offset,
                    num_ranks=command.spec.layout.num_ranks,
                )
            )
        await self._state.register_wpg(
            wpg.tokens,
            command.deployment,
            command.incarnation,
            command.devices,
            command.seal_seq,
            rank_offset=wpg.rank_offset,
            num_ranks=wpg.num_ranks,
        )
        wpg.open_store()

    async def _end(self, command: StopWpg) -> None:
        wpg = self.by_deployment.get(command.deployment)
        stopped = ErrorInfo(Code.ABORTED, "stopped by the scheduler")
        was_alive = wpg is not None and wpg.incarnation <= command.incarnation
        if wpg is not None and was_alive:
            wpg.reason = stopped
            # The next deployment that is switched in must find the device empty.
            async with self.state_lock:
                if command.forget:
                    await wpg.stop(_STOP_S)
                else:
                    wpg.kill()
                    await wpg.ended()
        lock = self.locks[command.deployment]
        async with lock.write(), self.state_lock:
            await self._state.drop_wpg(
                command.deployment, command.incarnation, forget=command.forget
            )
        if command.forget and lock.is_unused:
            self.locks.pop(command.deployment, None)
        if not was_alive:
            # No `_watch` runs for these ranks, and the scheduler waits for this confirmation.
            await self._report_lost(command.deployment, command.incarnation, stopped)

    async def _watch(self, wpg: LocalWpg) -> None:
        """Report the death of a WPG after all its ranks died and the state manager dropped them."""
        await wpg.ended()
        if self._is_stopping:
            return
        for token in wpg.tokens:
            del self._by_token[token]
        if self.by_deployment.get(wpg.deployment) is wpg:
            del self.by_deployment[wpg.deployment]
        async with self.state_lock:
            await self._state.drop_wpg(wpg.deployment, wpg.incarnation, forget=False)
        await self._report_lost(wpg.deployment, wpg.incarnation, wpg.reason, wpg.culprits)

    async def _report_lost(
        self,
        deployment: DeploymentKey,
        incarnation: int,
        reason: ErrorInfo,
        culprits: Sequence[DeploymentKey] = (),
    ) -> None:
        log.warning("%s incarnation %d ended: %s", deployment, incarnation, reason.message)
        node = self._settings.node
        await self._append(
            WpgLost(deployment, incarnation, NodeId(node), reason, list(culprits)),
            f"lost:{deployment}:{incarnation}:{node}",
        )


def _handler_of(wpg: LocalWpg, peer: Peer[RankMessage]) -> Handler[RankMessage]:
    """Return the handler of the calls of a rank that has presented its token."""

    async def answer(body: RankMessage, fds: list[int]) -> tuple[RankMessage, list[int]]:
        close_fds(fds)
        if isinstance(body, TailReached | TokensDrawn):
            await wpg.forward_to_leader(body)
            return Done(), []
        if not wpg.is_leader(peer):
            raise CallerError("only a leader may call other ranks", code=Code.PERMISSION_DENIED)
        match body:
            case RunShare():
                return await wpg.share(body), []
            case StopShare():
                await wpg.stop_share(body)
                return Done(), []
            case DevicesFreed():
                wpg.devices_freed(body.first)
                return Done(), []
            case RollCall():
                await wpg.roll_call()
                return Done(), []
        raise CallerError(f"unexpected message for an agent: {type(body).__name__}", field="type")

    return answer
