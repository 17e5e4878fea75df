"""A process of ranks: one rank, or several of a tenant that train or sample adapters on one base.

A process of one rank exits with it. One of several is told by the agent which ranks to host; each
has an agent's and a state manager's connection, a heap and a device thread of its own, so it starts
and ends by itself. Both exit at once when they lose their agent, because nobody could fence their
ranks any more.
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
from phaseloom.worker.rank.life import Rank, Surroundings
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
"""Seconds for which the backend's Python code may keep the interpreter from the event loop."""

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_KEPT_BYTES = 64 * 2**20
"""The bytes that tensors have freed and that a process of one rank keeps for the next ones, in each
thread that computes."""
_LARGEST_KEPT_BYTES = 32 * 2**20
"""Larger tensors are given back to the system, each as it is freed; malloc allows no more."""


def main(config_json: str) -> None:
    """Entry point of the process; returns only by exiting."""
    settings: RankConfig | HostConfig = msgspec.json.decode(
        config_json, type=RankConfig | HostConfig
    )
    name = str(settings.deployment) if isinstance(settings, RankConfig) else settings.name
    lifecycle.start_logging(f"worker:{name}")
    flush = telemetry.setup("worker", config.load(telemetry.TelemetryConfig, "telemetry"))
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    if isinstance(settings, RankConfig):  # in a process of several, each thread would keep as much
        keep_freed_memory()

    async def run_and_exit() -> None:
        surroundings = Surroundings(f"worker {name}")
        try:
            if isinstance(settings, RankConfig):
                await Rank(settings, surroundings).run()
            else:
                await Host(settings, surroundings).run()
        finally:
            flush()
            # Nothing may keep a rank whose agent is gone: not the device thread, which may be in a
            # long call, nor the bus connection, whose reconnecting can outlast a cancellation.
            os._exit(0)

    uvloop.run(run_and_exit())


def keep_freed_memory() -> None:
    """Have malloc keep for one pass of a model what the last one has freed.

    By itself it gives much of that back to the system and asks for it again, how much depends on
    the order of the calls: the page faults took up to a tenth of an operation on a CPU.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        # Without this a thread gives back its last 64 MiB as soon as all of them are free.
        mallopt(_M_TOP_PAD, _KEPT_BYTES)


class Host:
    """A process that several ranks share."""

    def __init__(self, settings: HostConfig, surroundings: Surroundings) -> None:
        self._settings = settings
        self._surroundings = surroundings
        self._running: dict[str, tuple[Rank, asyncio.Task[None]]] = {}
        """Token → a rank and the task of its `run`."""

    async def run(self) -> None:
        """Host ranks until the agent is gone."""
        agent: Peer[RankMessage] = await Peer.connect(
            self._settings.agent_socket, RankMessage, self._answer
        )
        await agent.call(HostUp(self._settings.token))
        log.info("process of several ranks starts, pid %d", os.getpid())
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
                raise InternalError(f"a process of ranks does not answer {type(body).__name__}")
        return Done(), []

    async def _host(self, settings: RankConfig) -> None:
        """Run a rank to its end."""
        rank = Rank(settings, self._surroundings)
        running = asyncio.create_task(rank.run())
        self._running[settings.token] = rank, running
        await asyncio.wait([running])
        del self._running[settings.token]
        if not running.cancelled() and (error := running.exception()) is not None:
            is_known = isinstance(error, PhaseloomError)
            log.warning("%s ends: %r", settings.deployment, error, exc_info=not is_known)
        await rank.end()
        del rank, running
        # Its mappings go with the last reference.
        gc.collect()
