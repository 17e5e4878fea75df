"""Seals of this node's state, copies of other nodes' state, and dropping of versions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from weakref import WeakValueDictionary

from phaseloom.common.contract.commands import MirrorState, SealState
from phaseloom.common.contract.errors import PhaseloomError
from phaseloom.common.contract.events import Event, SealCommitted, SealFailed, StateMirrored
from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.contract.state_agent import FetchState
from phaseloom.worker.agent.rwlock import FairReadWriteLock
from phaseloom.worker.agent.sealrecords import SealRecords
from phaseloom.worker.agent.stateclient import AgentStateClient
from phaseloom.worker.agent.wpg import LocalWpg

log = logging.getLogger(__name__)


class Sealing:
    """Directs the state manager to seal, copy and drop state as the scheduler commands."""

    def __init__(
        self,
        state: AgentStateClient,
        records: SealRecords,
        *,
        wpgs: Mapping[DeploymentKey, LocalWpg],
        locks: Mapping[DeploymentKey, FairReadWriteLock],
        state_lock: asyncio.Lock,
        append: Callable[[Event, str], Awaitable[None]],
    ) -> None:
        """Args: locks: the agent's locks, one per deployment.
        state_lock: the agent's lock for moving state on a device.
        append: appends an event with this id to the decision log."""
        self._state = state
        self._records = records
        self._wpgs = wpgs
        self._locks = locks
        self._state_lock = state_lock
        self._append = append
        self._sealing: WeakValueDictionary[DeploymentKey, asyncio.Lock] = WeakValueDictionary()
        """Held until a deployment's seal is written. Each deployment has a separate lock, because a
        seal
        that waits for another node must not delay other deployments."""

    async def mirror(self, command: MirrorState) -> None:
        """Fetch a copy of another node's state, so that its deployment can continue here."""
        key, error = command.deployment, None
        request = FetchState(
            key,
            command.seal_seq,
            command.versions,
            command.sources,
            command.ticket,
            command.holds,
            command.keeps,
            command.rank_offset,
            command.num_ranks,
        )
        try:
            async with self._locks[key].write():
                await self._state.fetch_state(request)
        except PhaseloomError as failure:
            error = failure.info
        done = StateMirrored(key, command.seal_seq, command.node, command.id, error)
        await self._append(done, f"mirrored:{key}:{command.id}")

    async def seal(self, command: SealState) -> None:
        """Commit a seal: copy the state now, and write it while the deployment continues."""
        key = command.deployment
        sealing = self._sealing_of(key)
        try:
            async with self._locks[key].write():
                await sealing.acquire()
                try:
                    async with self._state_lock:
                        await self._state.prepare_seal(key, command.incarnation, command.seq)
                except BaseException:
                    sealing.release()
                    raise
                finally:
                    wpg = self._wpgs.get(key)
                    if wpg is not None and wpg.incarnation == command.incarnation:
                        wpg.record_sealed(command.seq)
            try:
                await self._write_seal(command)
            finally:
                sealing.release()
        except PhaseloomError as error:
            await self._append(
                SealFailed(key, command.seq, command.node, error.info),
                f"seal-failed:{key}:{command.id}",
            )

    def _sealing_of(self, policy: DeploymentKey) -> asyncio.Lock:
        return self._sealing.setdefault(policy, asyncio.Lock())

    async def release(self, versions: list[VersionKey]) -> None:
        """Drop versions after running seals that may still write them."""
        async with asyncio.TaskGroup() as tasks:
            for policy in {version.policy for version in versions}:
                tasks.create_task(self._release_of(policy, versions))

    async def _release_of(self, policy: DeploymentKey, versions: list[VersionKey]) -> None:
        async with self._sealing_of(policy):
            await self._state.drop_versions([v for v in versions if v.policy == policy])

    async def _write_seal(self, command: SealState) -> None:
        key = command.deployment
        committed = await self._records.newest(key)
        sealed = await self._state.write_seal(
            key,
            command.incarnation,
            command.seq,
            command.versions,
            committed=committed,
            durability=command.durability,
            replicas=command.replicas,
            ticket=command.ticket,
        )
        log.info("sealed %s at %d in %s", key, command.seq, sealed.file or "host memory")
        copies = list(command.replicas)
        event = SealCommitted(key, command.seq, command.node, command.versions, copies)
        await self._records.commit(event, command.num_parts)
        await self._append(event, f"sealed:{key}:{command.seq}:{command.node}")
