"""The processes of a node's ranks. Most ranks have their own process; adapter ranks may share one.

Ranks that train or sample adapters share a process if each is alone on one device and tenant,
backend, base model and device are equal. Runtime and device context then exist only once, however
many jobs there are. Each hosted rank starts and ends independently. A rank that does not end in
time is killed with its process, which kills the other ranks too; each WPG recovers separately.

The culprits of a death are the deployments that were working in the process, or the one that did
not end. A deployment that was a culprit twice gets its own process afterwards, so that an operation
that crashes its process cannot harm others repeatedly. A shared process is forked with its first
rank and ends after its last.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import msgspec

from phaseloom.common.contract.errors import PhaseloomError
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.process.forkserver import ForkedProcess
from phaseloom.common.transport.framing import Peer
from phaseloom.worker.agent.interpreters import Interpreters
from phaseloom.worker.backends import SHARING
from phaseloom.worker.rank.wire import EndRank, HostConfig, HostRank, RankConfig, RankMessage

log = logging.getLogger(__name__)

MAX_CRASHES = 2
"""Deaths of shared processes with the same culprit after which that deployment gets its own
process."""
END_S = 30.0
"""Seconds for a hosted rank to end, which includes finishing the call on its device."""


class StartedRank(Protocol):
    """A rank that was started and may have ended."""

    ended: asyncio.Future[None]
    """Completes when the rank is dead and no longer holds resources of the node."""
    culprits: list[DeploymentKey]
    """The deployments to blame if the rank died with its shared process; empty if none was working
    or the process was not shared."""

    def kill(self) -> None:
        """End the rank as soon as possible. Idempotent."""
        ...


class _Process:
    """A process of ranks. If the process is not shared, this is also its rank."""

    def __init__(self, process: ForkedProcess) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.culprits: list[DeploymentKey] = []
        self._process = process
        loop.add_reader(process.sentinel, self._on_death)

    def kill(self) -> None:
        self._process.kill()

    def _on_death(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._process.close()
        self.ended.set_result(None)


class _SharedProcess:
    """A process that hosts several ranks."""

    def __init__(self, process: _Process) -> None:
        self.process = process
        self.ranks: list[_HostedRank] = []
        self._culprits: list[DeploymentKey] = []
        self.up: asyncio.Future[Peer[RankMessage]] = asyncio.get_running_loop().create_future()
        """The process's connection when it is up; cancelled if the process died before."""
        process.ended.add_done_callback(lambda _: self.up.cancel())

    @property
    def is_open(self) -> bool:
        """Whether the process accepts another rank."""
        return bool(self.ranks) and not self.process.ended.done()

    def kill(self, culprit: DeploymentKey) -> None:
        """Kill the process because a rank of this deployment does not end otherwise."""
        if not self.process.ended.done():
            self._culprits = [culprit]
        self.process.kill()

    def culprits(self) -> list[DeploymentKey]:
        """The deployments to blame for the process's death. Call it before the rank leaves."""
        if not self._culprits:
            self._culprits = [rank.deployment for rank in self.ranks if rank.is_at_work()]
        return self._culprits

    def remove(self, rank: _HostedRank) -> None:
        """Remove an ended rank; the process ends after its last one."""
        self.ranks.remove(rank)
        if self.ranks:
            return
        if self.up.done() and not self.up.cancelled():
            # the process exits when its connection closes
            self.up.result().cut("its last rank has ended")
        else:
            self.process.kill()


class _HostedRank:
    """A rank in a shared process."""

    def __init__(
        self, shared: _SharedProcess, config: RankConfig, is_at_work: Callable[[], bool]
    ) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.culprits: list[DeploymentKey] = []
        self.deployment = config.deployment
        self.is_at_work = is_at_work
        self.has_crashed = False
        """Whether the rank died with its process."""
        self._shared = shared
        self._config = config
        self._killed = asyncio.Event()

    def kill(self) -> None:
        self._killed.set()

    async def run(self) -> None:
        """Host the rank until it ends."""
        shared = self._shared
        killed: asyncio.Future[Any] = asyncio.ensure_future(self._killed.wait())
        try:
            either: list[asyncio.Future[Any]] = [shared.up, killed]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if shared.up.done() and not shared.up.cancelled():
                await self._run_in(shared.up.result(), killed)
            self.has_crashed = shared.up.cancelled()
        except TimeoutError:
            log.warning("rank of %s does not end; killing its process", self.deployment)
            shared.kill(self.deployment)
            await shared.process.ended
            self.has_crashed = True
        except PhaseloomError as error:
            log.warning("rank of %s died with its process: %s", self.deployment, error)
            shared.process.kill()
            await shared.process.ended
            self.has_crashed = True
        finally:
            killed.cancel()
            if self.has_crashed:
                self.culprits = shared.culprits()
            shared.remove(self)
            self.ended.set_result(None)

    async def _run_in(self, peer: Peer[RankMessage], killed: asyncio.Future[Any]) -> None:
        """Host the rank in a connected process until it ends.

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
        """Args: tasks: a task group that outlives every rank."""
        self._interpreters = interpreters
        self._tasks = tasks
        self._shared: dict[Hashable, _SharedProcess] = {}
        """The newest shared process for each kind of rank (`_shared_by`)."""
        self._unconnected: dict[str, _SharedProcess] = {}
        """Shared processes that have not connected yet, by token."""
        self._num_crashes: Counter[DeploymentKey] = Counter()
        """Deaths of shared processes caused by each deployment since its last regular end here."""
        self._forking = asyncio.Lock()

    async def start(self, config: RankConfig, is_at_work: Callable[[], bool]) -> StartedRank:
        """Start a rank.

        Args:   is_at_work: whether the rank is starting, being switched in, or running an
                 operation; for a
                    dead rank, whether it was when it died.
        Raises: ResourceError: no process can be started.
        """
        shared_by = _shared_by(config)
        if shared_by is None or self._num_crashes[config.deployment] >= MAX_CRASHES:
            return await self._fork(config.spec.backend, config)
        async with self._forking:
            shared = self._shared.get(shared_by)
            if shared is None or not shared.is_open:
                shared = self._shared[shared_by] = await self._fork_shared(config)
            rank = _HostedRank(shared, config, is_at_work)
            shared.ranks.append(rank)
        self._tasks.create_task(self._host(rank))
        return rank

    def connected(self, token: str, peer: Peer[RankMessage]) -> bool:
        """Accept the connection of a shared process. Return False if the token belongs to none."""
        shared = self._unconnected.pop(token, None)
        if shared is None or shared.up.done():
            return False
        shared.up.set_result(peer)
        return True

    async def _fork(self, backend: str, config: RankConfig | HostConfig) -> _Process:
        config_json = msgspec.json.encode(config).decode()
        return _Process(await self._interpreters.fork(backend, config_json))

    async def _fork_shared(self, config: RankConfig) -> _SharedProcess:
        backend = config.spec.backend
        name = f"{config.deployment.tenant}.{backend}"
        host = HostConfig(secrets.token_hex(16), name, config.agent_socket)
        shared = self._unconnected[host.token] = _SharedProcess(await self._fork(backend, host))
        shared.process.ended.add_done_callback(lambda _: self._unconnected.pop(host.token, None))
        return shared

    async def _host(self, rank: _HostedRank) -> None:
        await rank.run()
        if not rank.has_crashed:
            self._num_crashes.pop(rank.deployment, None)
        elif rank.deployment in rank.culprits:
            self._num_crashes[rank.deployment] += 1


def _shared_by(config: RankConfig) -> Hashable:
    """The properties common to ranks of one shared process; None if the rank needs its own
    process."""
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
