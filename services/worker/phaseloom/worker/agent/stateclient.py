"""The agent's client of its node's state manager. It sends orders and keeps the daemon's handles.

The client survives restarts of the daemon (see `StateLink`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from nats.aio.msg import Msg

from phaseloom.common.contract.checkpoints import (
    ArchiveOpened,
    ArchiveRead,
    CheckpointErased,
    CheckpointsFound,
    ExpiredFound,
    FindExpired,
    NodeCheckpointReply,
    NodeCheckpointRequest,
)
from phaseloom.common.contract.codec import encode
from phaseloom.common.contract.commands import FilesTicket
from phaseloom.common.contract.errors import CallerError, PhaseloomError
from phaseloom.common.contract.ids import DeploymentKey, NodeId, VersionKey
from phaseloom.common.contract.specs import Durability
from phaseloom.common.contract.state_agent import (
    AgentHello,
    DropVersions,
    DropWpg,
    FetchState,
    FinishHandover,
    HandOver,
    HandoverFinished,
    KeepHandles,
    Prefetch,
    PrepareSeal,
    RegisterWpg,
    Sealed,
    StatusReport,
    StatusRequest,
    Switched,
    SwitchIn,
    SwitchOut,
    Welcome,
    WriteSeal,
)
from phaseloom.common.contract.state_rank import Done, StateMessage
from phaseloom.common.contract.streams import state_subject
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.framing import MAX_FDS, Peer, close_fds
from phaseloom.worker.state.link import RECONNECT_S, StateLink, ask

log = logging.getLogger(__name__)


class AgentStateClient:
    """Sends orders to the node's state manager. Every call raises the error in the answer.

    The client keeps the daemon's memory handles and passes them to the next daemon.
    """

    def __init__(self, path: str | Path, secret: str, reconnect_s: float) -> None:
        self._secret = secret
        self._index = ""
        self._handles: dict[int, int] = {}
        """Handle → descriptor."""
        self._link = StateLink(path, self._greet, self._handle, reconnect_s)

    @classmethod
    async def connect(
        cls, path: str | Path, secret: str, *, reconnect_s: float = RECONNECT_S
    ) -> AgentStateClient:
        """Connect and authenticate as the agent.

        Raises: ResourceError: nobody listens on the socket. CallerError: PERMISSION_DENIED.
        """
        client = cls(path, secret, reconnect_s)
        await client._link.connect()
        return client

    @property
    def closed(self) -> asyncio.Future[str]:
        """Completes when the state manager is permanently gone."""
        return self._link.closed

    async def close(self) -> None:
        await self._link.close()
        close_fds(self._handles.values())
        self._handles.clear()

    async def _greet(self, peer: Peer[StateMessage]) -> None:
        welcome = await ask(peer, AgentHello(self._secret, self._index), Welcome)
        if not welcome.needs_handles:
            return
        handles = list(self._handles)
        for start in range(0, len(handles), MAX_FDS):
            batch = handles[start : start + MAX_FDS]
            await peer.call(HandOver(batch), [self._handles[handle] for handle in batch])
        finished = await ask(peer, FinishHandover(), HandoverFinished)
        for deployment in finished.lost:
            log.warning("%s was lost with the state manager", deployment)

    async def _handle(
        self, body: StateMessage, fds: list[int]
    ) -> tuple[StateMessage, Sequence[int]]:
        if not isinstance(body, KeepHandles) or len(body.keep) != len(fds):
            close_fds(fds)
            raise CallerError(
                f"unexpected message for an agent: {type(body).__name__}", field="type"
            )
        if body.index != self._index:
            close_fds(self._handles.values())
            self._handles.clear()
            self._index = body.index
        close_fds(self._handles.pop(handle) for handle in body.drop if handle in self._handles)
        self._handles.update(zip(body.keep, fds, strict=True))
        return Done(), ()

    async def register_wpg(
        self,
        tokens: list[str],
        deployment: DeploymentKey,
        incarnation: int,
        devices: list[int],
        seal_seq: int,
        *,
        rank_offset: int = 0,
        num_ranks: int = 0,
    ) -> None:
        """Announce this node's ranks of one incarnation, in rank order. Older incarnations are
        fenced.

        Raises: ResourceError: ABORTED: the incarnation is fenced. CallerError: a token or device is
                invalid.
        """
        message = RegisterWpg(
            tokens, deployment, incarnation, devices, seal_seq, rank_offset, num_ranks
        )
        await self._link.ask(message, Done)

    async def switch_in(
        self,
        deployment: DeploymentKey,
        incarnation: int,
        epoch: int,
        displaces: list[DeploymentKey],
        *,
        ranks: list[int] | None = None,
        traceparent: str = "",
    ) -> Switched:
        """Offload the displaced deployments and load this one.

        Raises: ResourceError: there is no room, the order is stale, or the switch failed and was
                 undone.
        """
        message = SwitchIn(deployment, incarnation, epoch, displaces, ranks or [], traceparent)
        return await self._link.ask(message, Switched)

    async def switch_out(self, deployment: DeploymentKey, incarnation: int, epoch: int) -> Switched:
        return await self._link.ask(SwitchOut(deployment, incarnation, epoch), Switched)

    async def prepare_seal(self, deployment: DeploymentKey, incarnation: int, seq: int) -> None:
        """Copy the state for a seal, between operations. The deployment may continue afterwards."""
        await self._link.ask(PrepareSeal(deployment, incarnation, seq), Done)

    async def write_seal(
        self,
        deployment: DeploymentKey,
        incarnation: int,
        seq: int,
        versions: list[int],
        *,
        committed: int = 0,
        durability: Durability = Durability.NODE,
        replicas: dict[NodeId, str] | None = None,
        ticket: FilesTicket | None = None,
    ) -> Sealed:
        """Write a prepared seal.

        Args: committed: the seq of the newest committed seal, which is kept.
        """
        message = WriteSeal(
            deployment,
            incarnation,
            seq,
            versions,
            committed,
            durability,
            replicas or {},
            ticket,
        )
        return await self._link.ask(message, Sealed)

    async def fetch_state(self, request: FetchState) -> None:
        """Fetch another node's state. Raises: ResourceError: part of it cannot be fetched."""
        await self._link.ask(request, Done)

    async def drop_wpg(
        self, deployment: DeploymentKey, incarnation: int, *, forget: bool = False
    ) -> None:
        """Drop the state of ranks that are dead and reaped."""
        await self._link.ask(DropWpg(deployment, incarnation, forget), Done)

    async def prefetch(
        self, deployment: DeploymentKey, incarnation: int, in_s: float | None
    ) -> None:
        """Report when the deployment is predicted to be used next; None withdraws the
        prediction."""
        await self._link.ask(Prefetch(deployment, incarnation, in_s), Done)

    async def drop_versions(self, versions: list[VersionKey]) -> None:
        await self._link.ask(DropVersions(versions), Done)

    async def checkpoints(self, request: NodeCheckpointRequest) -> NodeCheckpointReply:
        """Forward a request about the node's checkpoints. Raises: the error in the answer."""
        answer, fds = await self._link.call(request)
        close_fds(fds)
        assert isinstance(
            answer, CheckpointsFound | CheckpointErased | ArchiveOpened | ArchiveRead
        ), answer
        return answer

    async def expired_checkpoints(self) -> ExpiredFound:
        return await self._link.ask(FindExpired(), ExpiredFound)

    async def status(self) -> StatusReport:
        return await self._link.ask(StatusRequest(), StatusReport)


async def serve_state(bus: Bus, node: NodeId, state: AgentStateClient) -> None:
    """Answer requests on the bus for the status of this node's state manager.

    Requests are answered one at a time until the bus is closed.
    """

    async def answer(message: Msg) -> None:
        try:
            report = await state.status()
        except PhaseloomError as error:
            # Send no answer; the requester times out.
            log.warning("cannot report the state of %s: %s", node, error)
            return
        await message.respond(encode(report))

    await bus.client.subscribe(state_subject(node), cb=answer)
