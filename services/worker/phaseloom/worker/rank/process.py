"""A process with one rank, or with several ranks of a tenant that use adapters on one base model.

A process with one rank exits with it. A shared process receives the ranks to host from the agent.
Each hosted rank has its own connections to the agent and the state manager, its own heap and device
thread, and starts and ends independently. Both kinds exit immediately when they lose their agent,
because their ranks could no longer be fenced.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import sys

import msgspec
import uvloop

from phaseloom.common.contract.errors import InternalError, PhaseloomError
from phaseloom.common.contract.state_rank import Done
from phaseloom.common.observability import telemetry
from phaseloom.common.process import config, lifecycle
from phaseloom.common.transport.framing import Peer, close_fds
from phaseloom.worker.rank.life import ProcessResources, RankRunner
from phaseloom.worker.rank.wire import (
    EndRank,
    HostConfig,
    HostRank,
    HostUp,
    RankConfig,
    RankMessage,
)

log = logging.getLogger(__name__)

_SWITCH_INTERVAL_S = 0.0005
"""Seconds before a thread running the backend's Python code must yield to the event loop."""

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_KEPT_BYTES = 64 * 2**20
"""Freed tensor bytes that a process of one rank keeps for later allocations, per computing
thread."""
_LARGEST_KEPT_BYTES = 32 * 2**20
"""Larger tensors go back to the system when they are freed. This is the maximum that malloc
allows."""


def main(config_json: str) -> None:
    """Run the process. Never returns: the process exits."""
    settings: RankConfig | HostConfig = msgspec.json.decode(
        config_json, type=RankConfig | HostConfig
    )
    name = str(settings.deployment) if isinstance(settings, RankConfig) else settings.name
    lifecycle.start_logging(f"worker:{name}")
    flush = telemetry.setup("worker", config.load(telemetry.TelemetryConfig, "telemetry"))
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    # in a shared process, each rank's threads would keep this much
    if isinstance(settings, RankConfig):
        keep_freed_memory()

    async def run_and_exit() -> None:
        resources = ProcessResources(f"worker {name}")
        try:
            if isinstance(settings, RankConfig):
                await RankRunner(settings, resources).run()
            else:
                await RankHost(settings, resources).run()
        finally:
            flush()
            # A rank without its agent must not linger. Exit without waiting for the device thread,
            # which may be in a long call, or the bus connection, whose reconnecting can outlast a
            # cancellation.
            os._exit(0)

    uvloop.run(run_and_exit())


def keep_freed_memory() -> None:
    """Make malloc keep the memory freed by one pass of a model for the next.

    By default it returns much of that memory to the system, depending on the order of calls, and
    requests it again. The page faults took up to a tenth of an operation on a CPU.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        # Otherwise a thread returns its last 64 MiB as soon as all of them are free.
        mallopt(_M_TOP_PAD, _KEPT_BYTES)


class RankHost:
    """A process shared by several ranks."""

    def __init__(self, settings: HostConfig, resources: ProcessResources) -> None:
        self._settings = settings
        self._resources = resources
        self._running: dict[str, tuple[RankRunner, asyncio.Task[None]]] = {}
        """Token → a rank and the task of its `run`."""

    async def run(self) -> None:
        """Host ranks until the agent is gone."""
        agent: Peer[RankMessage] = await Peer.connect(
            self._settings.agent_socket, RankMessage, self._answer
        )
        await agent.call(HostUp(self._settings.token))
        log.info("shared rank process starts, pid %d", os.getpid())
        await asyncio.wait([agent.closed])

    async def _answer(self, body: RankMessage, fds: list[int]) -> tuple[RankMessage, list[int]]:
        close_fds(fds)
        match body:
            case HostRank():
                await self._host(body.config)
            case EndRank():
                if body.token in self._running:
                    rank, running = self._running[body.token]
                    await rank.stop()
                    await lifecycle.end([running])
            case _:
                raise InternalError(
                    f"unexpected message for a shared rank process: {type(body).__name__}"
                )
        return Done(), []

    async def _host(self, settings: RankConfig) -> None:
        rank = RankRunner(settings, self._resources)
        running = asyncio.create_task(rank.run())
        self._running[settings.token] = rank, running
        await asyncio.wait([running])
        del self._running[settings.token]
        if not running.cancelled() and (error := running.exception()) is not None:
            is_known = isinstance(error, PhaseloomError)
            log.warning("rank of %s failed: %r", settings.deployment, error, exc_info=not is_known)
        await rank.end()
        del rank, running
        # Drop the last references to the rank's mappings.
        gc.collect()
