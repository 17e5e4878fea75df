"""The processes of one deployment on this node, in one incarnation: all of its ranks, or those that
are this node's.

A rank is forked from a server process that has torch imported already. It proves who it is by the
token of its spawn, and it exits when its connection to the agent ends: a killed agent leaves no
rank behind. A WPG lives and dies whole: where one rank dies or cannot start, the others are killed,
on this node; the scheduler has those on other nodes killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from opentelemetry.trace import SpanContext

from phaseloom.common.contract.agents import NodeReply, TakePart
from phaseloom.common.contract.commands import StartWpg
from phaseloom.common.contract.errors import Code, ErrorInfo, ResourceError, to_exception
from phaseloom.common.contract.ids import OperationKey
from phaseloom.common.contract.specs import CommandId
from phaseloom.common.process import lifecycle
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.framing import Peer
from phaseloom.worker.agent.forkserver import run_rank
from phaseloom.worker.agent.nodes import LifeEnded, OtherNodes, Parts, Work
from phaseloom.worker.config import WorkerConfig
from phaseloom.worker.rank.wire import (
    CancelRun,
    MeetAt,
    RankConfig,
    RankFailed,
    RankMessage,
    RankUp,
    RollCall,
    RunPermits,
    RunShare,
    ShareDone,
    SharesDone,
)

T = TypeVar("T")
Rest = TypeVar("Rest")

_DIED = ErrorInfo(Code.UNAVAILABLE, "the worker process died")


class _Rank:
    """One process: its token before it has started, its connection once it is there."""

    def __init__(self, config: RankConfig) -> None:
        self.config = config
        self.peer: Peer[RankMessage] | None = None
        self.process: BaseProcess | None = None
        self.up: RankUp | None = None

    def kill(self) -> None:
        if self.process is not None and self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)


class Wpg:
    """One life of a deployment's ranks. `start`, then `ended` says when all are dead and reaped."""

    def __init__(
        self,
        command: StartWpg,
        settings: WorkerConfig,
        agent_socket: str,
        bus: Bus,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self.deployment = command.deployment
        self.incarnation = command.incarnation
        self.devices = command.devices
        self.rank_offset = command.rank_offset
        self.epoch = 0
        """Of the activation opened last."""
        self.refused_epoch = 0
        self.last_span: SpanContext | None = None
        """Of the operation permitted last: what a switch that displaces it links to."""
        self.reason = _DIED
        """Why it ended, where more is known than that it did."""
        loop = asyncio.get_running_loop()
        self._up: asyncio.Future[None] = loop.create_future()
        self._is_killed = False
        self._apart: dict[CommandId, asyncio.Future[None]] = {}
        self._dead: asyncio.Future[None] = loop.create_future()
        self._num_left = len(command.devices)
        self._store = _store_directory(command, settings)
        self._ranks = [
            _Rank(config) for config in _rank_configs(command, settings, agent_socket, self._store)
        ]
        self._host = settings.rank_host
        self._listener: socket.socket | None = None
        """Where the ranks of all nodes meet; on rank 0's."""
        self._nodes = command.nodes
        others = [node for node in command.nodes if node != settings.node]
        self._others = OtherNodes(
            bus, command.deployment, command.incarnation, others, lambda: self._is_killed
        )
        self._parts = Parts(tasks)
        self._sealed = 0
        """Up to this seq no seal that was asked for is still to be prepared."""
        self._has_sealed = asyncio.Event()

    @property
    def tokens(self) -> list[str]:
        """Of this node's ranks, in order."""
        return [rank.config.token for rank in self._ranks]

    @property
    def num_ranks(self) -> int:
        """On all nodes."""
        return self._ranks[0].config.num_ranks

    @property
    def is_killed(self) -> bool:
        """It is over, though some of its processes may not be reaped yet."""
        return self._is_killed

    @property
    def is_up(self) -> bool:
        return self._up.done() and self._up.exception() is None

    @property
    def state_bytes(self) -> int:
        """Of managed state on each of its devices, once it is up."""
        return max(rank.up.state_bytes for rank in self._ranks if rank.up)

    @property
    def applied(self) -> int:
        """seq that its state is at, once it is up."""
        assert self._ranks[0].up is not None
        return self._ranks[0].up.applied

    def open_store(self) -> None:
        """Where there are other nodes, listen for their ranks on rank 0's. Before `start`.

        Raises: ResourceError: this node has no such address.
        """
        if len(self._nodes) < 2 or self.rank_offset:
            return
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            self._listener = socket.create_server((self._host, 0), family=family)
        except OSError as error:
            raise ResourceError(
                f"ranks of other nodes cannot come to {self._host!r}: {error}",
                remedy="set the worker's rank_host to an address of this node",
            ) from error

    async def start(self, context: ForkServerContext) -> None:
        for rank in self._ranks:
            if self._is_killed:
                self._leave()
                continue
            config = msgspec.json.encode(rank.config).decode()
            process = context.Process(target=run_rank, args=(config,), daemon=True)
            # The first start waits for the fork server to import torch.
            await asyncio.to_thread(process.start)
            rank.process = process
            asyncio.get_running_loop().add_reader(process.sentinel, self._on_death, process)
            if self._is_killed:
                rank.kill()

    def abandon(self) -> None:
        """Instead of `start`."""
        self._is_killed = True
        for _ in self._ranks:
            self._leave()

    def _on_death(self, process: BaseProcess) -> None:
        asyncio.get_running_loop().remove_reader(process.sentinel)
        process.join()
        self.kill()
        self._leave()

    def _leave(self) -> None:
        self._num_left -= 1
        if self._num_left == 0:
            if self._store is not None:
                shutil.rmtree(self._store, ignore_errors=True)
            if self._listener is not None:
                self._listener.close()
                self._listener = None
            self._dead.set_result(None)

    async def ended(self) -> None:
        """Returns once every process is dead and reaped."""
        await asyncio.shield(self._dead)

    async def stop(self, timeout_s: float) -> None:
        """Let the ranks go: they exit by themselves when their agent leaves, or are killed."""
        await asyncio.gather(*(rank.peer.close() for rank in self._ranks if rank.peer is not None))
        try:
            await asyncio.wait_for(self.ended(), timeout_s)
        except TimeoutError:
            self.kill()
            await self.ended()

    async def up(self, timeout_s: float) -> None:
        """Until all ranks are. Raises: PhaseloomError: why they did not come up."""
        try:
            await asyncio.wait_for(asyncio.shield(self._up), timeout_s)
        except TimeoutError:
            raise ResourceError(f"its workers were not up within {timeout_s:.0f} s") from None

    def kill(self, reason: ErrorInfo | None = None) -> None:
        """All of them; the first reason that is given counts."""
        if reason is not None and self.reason is _DIED:
            self.reason = reason
        self._is_killed = True
        if not self._up.done():
            self._up.set_exception(to_exception(self.reason))
            # Nobody may have begun to wait for it.
            self._up.exception()
        for rank in self._ranks:
            rank.kill()

    # --- talking --------------------------------------------------------------------------------

    def connected(self, peer: Peer[RankMessage], message: RankUp | RankFailed) -> None:
        """A rank has presented its token."""
        rank = next(r for r in self._ranks if r.config.token == message.token)
        rank.peer = peer
        if isinstance(message, RankFailed):
            self.kill(message.error)
            return
        rank.up = message
        if not all(r.up for r in self._ranks) or self._up.done():
            return
        if len({r.up.applied for r in self._ranks if r.up}) > 1:
            self.kill(ErrorInfo(Code.DATA_LOSS, "its ranks are at different operations"))
        else:
            self._up.set_result(None)

    def is_leader(self, peer: Peer[RankMessage]) -> bool:
        return self._ranks[0].peer is peer and not self.rank_offset

    # --- over several nodes ---------------------------------------------------------------------

    @property
    def store_address(self) -> str:
        """Where the ranks meet; empty: not on this node, or not yet."""
        if self._listener is None:
            return ""
        return f"{self._host}:{self._listener.getsockname()[1]}"

    async def meet(self, token: str) -> tuple[MeetAt, list[int]]:
        """What one of its ranks is told. Raises: LifeEnded."""
        if self._listener is None:
            return MeetAt(await self._others.find_store(self._nodes[0])), []
        is_first = self._ranks[0].config.token == token
        return MeetAt(self.store_address), [self._listener.fileno()] if is_first else []

    async def take(
        self, request: TakePart, run: Callable[[RunShare], Work[SharesDone]]
    ) -> NodeReply:
        """What the leader, on another node, asks of its ranks here."""
        return await self._parts.take(request, run)

    def note_sealed(self, seq: int) -> None:
        """The seal at `seq` is prepared here, or never will be."""
        self._sealed = max(self._sealed, seq)
        self._has_sealed.set()

    async def until_sealed(self, seq: int) -> None:
        """Until its part of the seal at `seq` is apart from what the ranks do next. Raises:
        LifeEnded."""
        while self._sealed < seq:
            self._has_sealed.clear()
            has_sealed = asyncio.ensure_future(self._has_sealed.wait())
            either: list[asyncio.Future[Any]] = [has_sealed, self._dead]
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            finally:
                has_sealed.cancel()
            if self._dead.done():
                raise LifeEnded(self.reason.message)

    # --- one operation --------------------------------------------------------------------------

    async def run(self, permits: RunPermits) -> None:
        """Returns once every outcome is stored. Raises: PhaseloomError: it cannot go on."""
        leader = self._ranks[0].peer
        assert leader is not None
        await leader.call(permits)

    async def until_apart(self, permits: RunPermits, running: asyncio.Task[None]) -> None:
        """Returns once none of them needs devices or state: they have ended, or are being saved.

        Args: running: `run` of them, just begun.
        """
        first = permits.permits[0].id
        apart = self._apart[first] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait({running, apart}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._apart[first]

    def are_apart(self, first: CommandId) -> None:
        """The leader says so."""
        apart = self._apart.get(first)
        if apart is not None and not apart.done():
            apart.set_result(None)

    async def cancel(self, operation: OperationKey) -> None:
        """Raises: PhaseloomError: a rank is gone."""
        await self.cancel_here(operation)
        await self._others.cancel(operation)

    async def cancel_here(self, operation: OperationKey) -> None:
        """Raises: PhaseloomError: a rank is gone."""
        peers = [rank.peer for rank in self._ranks if rank.peer is not None]
        await asyncio.gather(*(peer.call(CancelRun(operation)) for peer in peers))

    async def share(self, share: RunShare) -> SharesDone:
        """Let every rank but the leader do its part. Raises: PhaseloomError: one has failed."""
        here, others = await self._all(self.share_here(share), self._others.take_part(share))
        return SharesDone([*here.results, *others])

    async def share_here(self, share: RunShare) -> SharesDone:
        """Of this node's ranks. Raises: LifeEnded; PhaseloomError: one has failed."""
        answers = await self._ask_ranks(share)
        return SharesDone([a.results for a in answers if isinstance(a, ShareDone)])

    async def roll_call(self) -> None:
        """Returns where all ranks are alive."""
        await self._all(self.roll_call_here(), self._others.call_roll())

    async def roll_call_here(self) -> None:
        """Returns where all of this node's are alive. Raises: LifeEnded."""
        await self._ask_ranks(RollCall())

    async def _all(self, here: Work[T], others: Work[Rest]) -> tuple[T, Rest]:
        """Both, for the leader. Never returns where a rank has died: the WPG dies with it, the
        leader too."""
        works = asyncio.ensure_future(here), asyncio.ensure_future(others)
        try:
            return await asyncio.gather(*works)
        except LifeEnded as error:
            self.kill(error.info)
            await self.ended()
            raise
        finally:
            await lifecycle.end(works)

    async def _ask_ranks(self, body: RankMessage) -> list[RankMessage]:
        """Every rank on this node but the leader.

        Raises: LifeEnded, once they are all dead: a rank has died. PhaseloomError: one has failed.
        """
        ranks = [rank for rank in self._ranks if rank.config.rank != 0]
        peers = [rank.peer for rank in ranks if rank.peer is not None]
        calls = [asyncio.ensure_future(peer.call(body)) for peer in peers]
        try:
            answers = await asyncio.gather(*calls)
        except ResourceError:
            if any(peer.closed.done() for peer in peers):
                self.kill()
                await self.ended()
                raise LifeEnded(self.reason.message) from None
            raise
        finally:
            for call in calls:
                call.cancel()
        return [answer for answer, _ in answers]


def _rank_configs(
    command: StartWpg, settings: WorkerConfig, agent_socket: str, store: Path | None
) -> list[RankConfig]:
    return [
        RankConfig(
            token=secrets.token_hex(16),
            deployment=command.deployment,
            incarnation=command.incarnation,
            spec=command.spec,
            node=settings.node,
            device=device,
            device_kind=settings.device_kind,
            agent_socket=agent_socket,
            state_socket=settings.state_socket,
            rank=command.rank_offset + index,
            num_ranks=command.spec.layout.num_ranks if command.nodes else len(command.devices),
            nodes=command.nodes,
            store_path="" if store is None else str(store / "store"),
            interface=settings.rank_interface,
            checkpoint=command.checkpoint,
            applied=command.applied,
        )
        for index, device in enumerate(command.devices)
    ]


def _store_directory(command: StartWpg, settings: WorkerConfig) -> Path | None:
    """Of this life alone: ranks of another must never be found there."""
    if command.nodes or len(command.devices) == 1:
        return None
    return Path(
        tempfile.mkdtemp(prefix=f"{_store_prefix(settings)}-", dir=settings.runtime_directory)
    )


def _store_prefix(settings: WorkerConfig) -> str:
    return f"ranks-{settings.node}"


def remove_old_stores(settings: WorkerConfig) -> None:
    """What an agent that was killed left behind; its ranks are dead."""
    for path in Path(settings.runtime_directory).glob(f"{_store_prefix(settings)}-*"):
        shutil.rmtree(path, ignore_errors=True)
