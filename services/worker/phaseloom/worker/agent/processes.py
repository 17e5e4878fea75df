"""The processes of a node's ranks: most ranks have their own, those of adapters may share one.

Ranks that train or sample adapters, each alone on one device, share a process where tenant,
backend, base and device are the same: runtime and device context exist once, however many jobs
there are. Each of these ranks is started and ended by itself. A rank that does not end in time is
killed with its process, which kills the other ranks, too; each WPG recovers by itself. A deployment
that was at work twice when its process died gets a process of its own afterwards, so that an
operation that kills its process does not harm others again and again.

A shared process is forked with its first rank and ends after its last.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import defaultdict
from collections.abc import Hashable
from typing import Any, Protocol

import msgspec

from phaseloom.common.contract.errors import PhaseloomError
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.transport.framing import Peer
from phaseloom.worker.agent.forkserver import RankProcess
from phaseloom.worker.agent.interpreters import Interpreters
from phaseloom.worker.backends import SHARING
from phaseloom.worker.rank.wire import EndRank, HostConfig, HostRank, RankConfig, RankMessage

log = logging.getLogger(__name__)

MAX_FALLS = 2
"""The number of deaths of shared processes while a deployment was at work after which it gets a
process of its own."""
END_S = 30.0
"""Seconds for a hosted rank to end: the call that its device runs is waited for."""


class LivingRank(Protocol):
    """A rank that was started and may have ended."""

    ended: asyncio.Future[None]
    """Done when the rank is dead and holds nothing of the node any more."""
    was_at_work: bool
    """Whether the rank's connection ended while it ran an operation; its WPG notes it."""

    def kill(self) -> None:
        """End the rank as soon as possible. Idempotent."""
        ...


class _Process:
    """A process of ranks; where a rank has a process alone, the rank itself."""

    def __init__(self, process: RankProcess) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.was_at_work = False
        self._process = process
        loop.add_reader(process.sentinel, self._on_death)

    def kill(self) -> None:
        self._process.kill()

    def _on_death(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._process.close()
        self.ended.set_result(None)


class _SharedProcess:
    """A process that hosts ranks."""

    def __init__(self, process: _Process) -> None:
        self.process = process
        self.num_ranks = 0
        self.up: asyncio.Future[Peer[RankMessage]] = asyncio.get_running_loop().create_future()
        """The process's connection, once it is there; cancelled where the process died before."""
        process.ended.add_done_callback(lambda _: self.up.cancel())

    @property
    def is_open(self) -> bool:
        """Whether the process takes another rank."""
        return self.num_ranks > 0 and not self.process.ended.done()

    def leave(self) -> None:
        """Note that a rank has ended; the process ends after its last one."""
        self.num_ranks -= 1
        if self.num_ranks:
            return
        if self.up.done() and not self.up.cancelled():
            self.up.result().cut("its last rank has ended")  # it exits then
        else:
            self.process.kill()


class _HostedRank:
    """A rank in a shared process."""

    def __init__(self, shared: _SharedProcess, config: RankConfig) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.was_at_work = False
        self.fell = False
        """Whether the rank died with its process."""
        self._shared = shared
        self._config = config
        self._killed = asyncio.Event()

    def kill(self) -> None:
        self._killed.set()

    async def live(self) -> None:
        """Host the rank until its end."""
        shared = self._shared
        killed: asyncio.Future[Any] = asyncio.ensure_future(self._killed.wait())
        try:
            either: list[asyncio.Future[Any]] = [shared.up, killed]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if shared.up.done() and not shared.up.cancelled():
                await self._live_with(shared.up.result(), killed)
            self.fell = shared.up.cancelled()
        except (PhaseloomError, TimeoutError) as error:
            log.warning("%s falls with its process: %r", self._config.deployment, error)
            shared.process.kill()
            await shared.process.ended
            self.fell = True
        finally:
            killed.cancel()
            shared.leave()
            self.ended.set_result(None)

    async def _live_with(self, peer: Peer[RankMessage], killed: asyncio.Future[Any]) -> None:
        """Host the rank in a connected process until its end.

        Raises: ResourceError: the process is gone. TimeoutError: the rank does not end.
        """
        hosted: asyncio.Future[Any] = asyncio.ensure_future(peer.call(HostRank(self._config)))
        try:
            await asyncio.wait([hosted, killed], return_when=asyncio.FIRST_COMPLETED)
            async with asyncio.timeout(END_S):
                if not hosted.done():
                    await peer.call(EndRank(self._config.token))
                await hosted
        finally:
            hosted.cancel()


class Processes:
    def __init__(self, interpreters: Interpreters, tasks: asyncio.TaskGroup) -> None:
        """Start without a process. Args: tasks: a task group that outlives every rank."""
        self._interpreters = interpreters
        self._tasks = tasks
        self._shared: dict[Hashable, _SharedProcess] = {}
        """The newest shared process for each kind of rank (`_shared_by`)."""
        self._awaited: dict[str, _SharedProcess] = {}
        """Shared processes that have yet to connect, by their tokens."""
        self._fallen: defaultdict[DeploymentKey, list[_HostedRank]] = defaultdict(list)
        """For each deployment, its hosted ranks that died with their processes, since it last ended
        here by itself."""
        self._forking = asyncio.Lock()

    async def start(self, config: RankConfig) -> LivingRank:
        """Start a rank. Raises: ResourceError: no process can be started."""
        shared_by = _shared_by(config)
        num_falls = sum(rank.was_at_work for rank in self._fallen.get(config.deployment, ()))
        if shared_by is None or num_falls >= MAX_FALLS:
            return await self._fork(config.spec.backend, config)
        async with self._forking:
            shared = self._shared.get(shared_by)
            if shared is None or not shared.is_open:
                shared = self._shared[shared_by] = await self._fork_shared(config)
            shared.num_ranks += 1
        rank = _HostedRank(shared, config)
        self._tasks.create_task(self._host(rank, config.deployment))
        return rank

    def connected(self, token: str, peer: Peer[RankMessage]) -> bool:
        """Note the connection of a process that is to host ranks. Returns: False: the token is of
        no such process."""
        shared = self._awaited.pop(token, None)
        if shared is None or shared.up.done():
            return False
        shared.up.set_result(peer)
        return True

    async def _fork(self, backend: str, config: RankConfig | HostConfig) -> _Process:
        config_json = msgspec.json.encode(config).decode()
        return _Process(await self._interpreters.fork(backend, config_json))

    async def _fork_shared(self, config: RankConfig) -> _SharedProcess:
        """Fork a shared process for a rank of this kind."""
        backend = config.spec.backend
        name = f"{config.deployment.tenant}.{backend}"
        host = HostConfig(secrets.token_hex(16), name, config.agent_socket)
        shared = self._awaited[host.token] = _SharedProcess(await self._fork(backend, host))
        shared.process.ended.add_done_callback(lambda _: self._awaited.pop(host.token, None))
        return shared

    async def _host(self, rank: _HostedRank, deployment: DeploymentKey) -> None:
        await rank.live()
        if rank.fell:
            self._fallen[deployment].append(rank)
        else:
            self._fallen.pop(deployment, None)


def _shared_by(config: RankConfig) -> Hashable:
    """The properties that ranks of one shared process have in common; None: the rank gets a process
    alone."""
    spec = config.spec
    if (
        spec.backend not in SHARING
        or spec.model.adapter is None
        or spec.model.pinned is None
        or config.num_ranks > 1
    ):
        return None
    base = tuple(sorted((file.name, file.blake3) for file in spec.model.pinned.files))
    return config.deployment.tenant, spec.backend, config.device, base
