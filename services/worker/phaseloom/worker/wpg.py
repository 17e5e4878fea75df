"""The processes of one deployment on this node, in one incarnation.

A rank is forked from a server process that has torch imported already. It proves who it is by the
token of its spawn, and it exits when its connection to the agent ends: a killed agent leaves no
rank behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import secrets
import signal
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess

import msgspec
from opentelemetry.trace import SpanContext

from phaseloom.common.errors import Code, ErrorInfo, ResourceError, to_exception
from phaseloom.common.framing import Peer
from phaseloom.common.messages import StartWpg
from phaseloom.worker.config import WorkerConfig
from phaseloom.worker.rankwire import RankConfig, RankFailed, RankMessage, RankUp


def fork_server() -> ForkServerContext:
    """The context whose processes fork from a preloaded server, which begins to import now."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["phaseloom.worker.preload"])
    forkserver.ensure_running()
    return context


class Wpg:
    """One life of a deployment's ranks. `start`, then `ended` says when it is dead and reaped."""

    def __init__(self, command: StartWpg, settings: WorkerConfig, agent_socket: str) -> None:
        self.deployment = command.deployment
        self.incarnation = command.incarnation
        self.device = command.devices[0]
        self.token = secrets.token_hex(16)
        self.epoch = 0
        """Of the activation opened last."""
        self.refused_epoch = 0
        self.last_span: SpanContext | None = None
        """Of the operation permitted last: what a switch that displaces it links to."""
        self.peer: Peer[RankMessage] | None = None
        self.reason = ErrorInfo(Code.UNAVAILABLE, "the worker process died")
        """Why it ended, where more is known than that it did."""
        loop = asyncio.get_running_loop()
        self._up: asyncio.Future[RankUp] = loop.create_future()
        self._is_killed = False
        self._dead: asyncio.Future[None] = loop.create_future()
        self._process: BaseProcess | None = None
        self._config = RankConfig(
            token=self.token,
            deployment=command.deployment,
            incarnation=command.incarnation,
            spec=command.spec,
            node=settings.node,
            device=command.devices[0],
            agent_socket=agent_socket,
            state_socket=settings.state_socket,
            checkpoint_root=settings.checkpoint_root,
        )

    async def start(self, context: ForkServerContext) -> None:
        from phaseloom.worker import spawn

        process = context.Process(
            target=spawn.rank, args=(msgspec.json.encode(self._config).decode(),), daemon=True
        )
        # The first start waits for the fork server to import torch.
        await asyncio.to_thread(process.start)
        self._process = process
        if self._is_killed:
            process.kill()
        asyncio.get_running_loop().add_reader(process.sentinel, self._on_death, process)

    def _on_death(self, process: BaseProcess) -> None:
        asyncio.get_running_loop().remove_reader(process.sentinel)
        process.join()
        if not self._up.done():
            self._up.set_exception(to_exception(self.reason))
        self._dead.set_result(None)

    async def ended(self) -> None:
        """Returns once the process is dead and reaped."""
        await asyncio.shield(self._dead)

    async def stop(self, timeout_s: float) -> None:
        """Let the rank go: it exits by itself when its agent leaves, or is killed."""
        if self.peer is not None:
            await self.peer.close()
        try:
            await asyncio.wait_for(self.ended(), timeout_s)
        except TimeoutError:
            self.kill()
            await self.ended()

    async def up(self, timeout_s: float) -> RankUp:
        """Raises: PhaseloomError: why it did not come up."""
        try:
            return await asyncio.wait_for(asyncio.shield(self._up), timeout_s)
        except TimeoutError:
            raise ResourceError(f"its worker was not up within {timeout_s:.0f} s") from None

    def kill(self, reason: ErrorInfo | None = None) -> None:
        if reason is not None:
            self.reason = reason
        self._is_killed = True
        if self._process is not None and self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    def connected(self, peer: Peer[RankMessage], message: RankUp | RankFailed) -> None:
        """Its rank has presented the token."""
        self.peer = peer
        if isinstance(message, RankFailed):
            self.reason = message.error
        elif not self._up.done():
            self._up.set_result(message)
