"""The node's state, which all parts of the daemon share: the records of what is held, its memory,
and the ranks' connections.

Invariant (`validate`): every extent in use has as many holders as records refer to it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from phaseloom.common.contract.errors import Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import JobKey, NodeId, VersionKey
from phaseloom.common.contract.state_rank import (
    Copied,
    CopyIn,
    CopyOut,
    LoadStaged,
    StageState,
    StateMessage,
    StillMapped,
    Unmap,
    Unpin,
)
from phaseloom.common.observability import metrics
from phaseloom.common.process.error_boundary import error_boundary
from phaseloom.common.transport.framing import Peer, close_fds
from phaseloom.statemgr.disk.files import StateDirectory
from phaseloom.statemgr.disk.statefile import parts_in
from phaseloom.statemgr.node.background import Background
from phaseloom.statemgr.node.devicecopies import DeviceCopies
from phaseloom.statemgr.node.digests import Digests
from phaseloom.statemgr.node.extents import HostMemory
from phaseloom.statemgr.node.handles import HandleRegistry
from phaseloom.statemgr.node.moves import Moves
from phaseloom.statemgr.records.incarnations import HostCopy, Rank, State, Wpg
from phaseloom.statemgr.records.layouts import Layouts
from phaseloom.statemgr.records.manifest import manifest_of
from phaseloom.statemgr.records.residency import Residency
from phaseloom.statemgr.records.seals import HostSeal, HostSeals
from phaseloom.statemgr.records.snapshots import Snapshots
from phaseloom.statemgr.records.stateheader import Place
from phaseloom.statemgr.records.versions import Version, Versions

log = logging.getLogger(__name__)

_UNMAP_TIMEOUT_S = 5.0
"""Time for a rank to answer that it has unmapped memory, in seconds."""


class _Silent(ResourceError):
    """A rank did not answer in time."""


class Node:
    """One node's state: pure records, such as `residency` and `versions`, and bytes in `memory`."""

    def __init__(
        self,
        name: NodeId,
        directory: StateDirectory,
        device_budget_bytes: list[int],
        host_budget_bytes: int,
        transfer_timeout_s: float,
        *,
        frozen_bases: Mapping[str, str] | None = None,
    ) -> None:
        """Args: transfer_timeout_s: a rank that takes longer for one copy is lost.
        frozen_bases: the frozen bases that tenants may share, as BLAKE3 → name.
        """
        self.name = name
        self.directory = directory
        self.residency = Residency(device_budget_bytes, frozen_bases)
        self.host_copies = self.residency.copies
        self.versions = Versions()
        self.layouts = Layouts()
        self.device_copies = DeviceCopies(self.residency)
        self.snapshots = Snapshots()
        self.seals = HostSeals()
        self.memory = HostMemory(host_budget_bytes)
        self.endpoint = ""
        """host:port where this daemon serves weights versions."""
        self.handles = HandleRegistry(self.memory, lambda: manifest_of(self))
        self.background = Background()
        self.digests = Digests(self.background, self.residency, self.memory, self.change)
        self.moves = Moves(self.background, name, directory, self._stale_file, self.announce)
        self.ranks: dict[Rank, Peer[StateMessage]] = {}
        self.device_locks = [asyncio.Lock() for _ in device_budget_bytes]
        """One lock a device: only one switch at a time changes what is there."""
        self.settled = asyncio.Event()
        """Set once all that a killed daemon held is taken over or given up; the records may be used
        from then on."""
        self.to_compare: asyncio.Queue[HostCopy] = asyncio.Queue()
        """Frozen copies that may be equal to others; `Sharing` takes them from here."""
        self.unrecorded: set[int] = set()
        """Extents that are being filled for a record that there is not yet, or never will be."""
        self._transfer_timeout_s = transfer_timeout_s
        self._changed = asyncio.Event()

    async def ask(
        self,
        rank: Rank,
        message: CopyIn | CopyOut | StageState | LoadStaged,
        fds: Sequence[int] = (),
    ) -> Copied:
        """Have a rank copy. A rank that is gone, or does not answer in time, is lost.

        Args:   fds: descriptors of the memory to copy to or from; empty: the rank's own extent.
        Raises: ResourceError: the rank is lost, or its copy failed and was rolled back.
        """
        kept: list[int] = []
        try:
            with error_boundary(metrics.UNFORESEEN, "request"):
                async with self.change():
                    # Duplicated now: while the manifest is written, the memory may be given up,
                    # and the descriptor's number become another's.
                    for fd in fds:
                        kept.append(os.dup(fd))
                return await self._ask(rank, message, kept)
        finally:
            close_fds(kept)

    async def _ask(
        self, rank: Rank, message: CopyIn | CopyOut | StageState | LoadStaged, fds: list[int]
    ) -> Copied:
        peer = self.ranks.get(rank)
        labels = {"node": self.name, "direction": _direction(message)}
        try:
            with metrics.timed(metrics.TRANSFER_DURATION, **labels):
                answer = await self._answer(rank, message, self._transfer_timeout_s, fds)
        except _Silent:
            self.retire(rank.wpg, f"no answer within {self._transfer_timeout_s} s")
            raise
        except PhaseloomError as error:
            if peer is None or not peer.closed.done():
                raise
            self.retire(rank.wpg, "its connection ended")
            raise ResourceError(f"{rank} was lost during {type(message).__name__}") from error
        if not isinstance(answer, Copied):
            asked, answered = type(message).__name__, type(answer).__name__
            raise self.broken_protocol(rank, f"it answered {asked} with {answered}")
        if not (isinstance(message, CopyOut) and message.whole_at >= 0):
            # With `whole_at` the rank was only asked whether there is anything to copy.
            metrics.count(metrics.TRANSFER_MOVED, rank.heap_bytes, **labels)
        return answer

    async def unpin(self, rank: Rank) -> None:
        """Have a rank unpin its extent's pages, which are about to be given back; no-op for a rank
        that does not pin them."""
        if rank.pins:
            await self._answer(rank, Unpin(), self._transfer_timeout_s)

    async def unmap(self, rank: Rank) -> list[VersionKey] | None:
        """Have a rank unmap the memory that it only keeps for reuse.

        Pages are given back to the system only once nobody has them mapped.

        Returns: the versions that the rank still uses; None: the rank is gone, or does not say.
        """
        try:
            answer = await self._answer(rank, Unmap(), _UNMAP_TIMEOUT_S)
        except PhaseloomError as error:
            log.warning("%s does not unmap host memory: %r", rank, error)
            return None
        return answer.versions if isinstance(answer, StillMapped) else None

    async def _answer(
        self, rank: Rank, message: StateMessage, timeout_s: float, fds: Sequence[int] = ()
    ) -> StateMessage:
        """The answer of a rank to a message. Descriptors that come with the answer are closed,
        because no answer gives memory.

        Raises: _Silent: no answer in time. ResourceError: the rank is gone, or has failed.
        """
        peer = self.ranks.get(rank)
        if peer is None:
            raise ResourceError(f"{rank} has lost its rank")
        try:
            async with asyncio.timeout(timeout_s):
                answer, came = await peer.call(message, fds)
        except TimeoutError:
            raise _Silent(
                f"{rank} did not answer {type(message).__name__} in time",
                code=Code.DEADLINE_EXCEEDED,
            ) from None
        close_fds(came)
        return answer

    @asynccontextmanager
    async def change(self) -> AsyncIterator[AsyncExitStack]:
        """Bring the manifest up to date with all changes so far when the block ends, however it
        ends.

        This is the one place where the manifest is written. Memory and files that the older
        manifest names must outlast it: the caller gives them up by callbacks that it pushes on the
        stack, which are called once the new manifest stands.
        """
        async with AsyncExitStack() as afterwards:
            try:
                yield afterwards
            finally:
                await self.handles.record()

    @asynccontextmanager
    async def holding(self, wpg: Wpg) -> AsyncIterator[None]:
        """Keep other switches away from an incarnation's devices within the block.

        The locks are taken in the order of the devices' numbers, so that no two switches wait for
        each other.
        """
        try:
            async with AsyncExitStack() as stack:
                for device in sorted(set(wpg.devices)):
                    await stack.enter_async_context(self.device_locks[device])
                yield
        finally:
            self.announce()

    def retire(self, wpg: Wpg, reason: str) -> None:
        """End an incarnation: cut its ranks off and free what it held. Idempotent."""
        self.residency.lose(wpg)
        for rank in wpg.ranks:
            peer = self.ranks.pop(rank, None)
            if peer is not None:
                log.info("%s is over: %s", rank, reason)
                peer.cut(reason)
        for key in self.versions.unfinished(wpg.key, wpg.incarnation):
            self.drop_version(self.versions.find(key))
        self.memory.drop_pool(pool_of(wpg))
        self.settle(wpg)

    def broken_protocol(self, rank: Rank, why: str) -> ResourceError:
        """End the incarnation of a rank that broke the protocol. Returns: the error to raise."""
        self.retire(rank.wpg, why)
        return ResourceError(f"{rank} broke the protocol and was cut off")

    def settle(self, wpg: Wpg) -> None:
        """Free what an incarnation no longer needs, and wake those who wait for a change.

        This is the memory of a lost incarnation once no seal needs it, and the snapshots of a seal
        that is over.
        """
        extents, copies = self.residency.reap(wpg)
        for extent in extents:
            self.memory.free(extent)
        for copy in copies:
            self.free_copy(copy)
        self.announce()

    def copy_of(self, rank: Rank) -> memoryview:
        """The bytes of a rank's host copy, which must be in host memory; to read only."""
        assert rank.copy is not None
        return self.bytes_of(rank.copy)

    def bytes_of(self, copy: HostCopy) -> memoryview:
        """The bytes of a host copy, which must be in host memory; to read only."""
        assert copy.extent is not None
        extent = self.memory[copy.extent]
        return (extent.readable if copy.is_frozen else extent.view)(copy.num_bytes)

    def memory_of(self, version: Version) -> memoryview:
        """The bytes of a version, which must be in host memory."""
        assert version.extent is not None
        return self.memory[version.extent].view(version.num_bytes)

    def image_of(self, seal: HostSeal) -> memoryview:
        """The bytes of a seal in host memory, which are those of a state file."""
        return self.memory[seal.extent].view(seal.num_bytes)

    def host_seal_parts(self, seal: HostSeal) -> list[Place]:
        """The parts of a seal in host memory. Raises: ResourceError: DATA_LOSS: a bad header."""
        image = self.image_of(seal)
        return parts_in(lambda at, length: bytes(image[at : at + length]), seal.name)

    def file_of(self, copy: HostCopy) -> Path:
        """The file of a host copy while it is on NVMe."""
        return self.directory.host_copy(copy.number)

    def lose(self, copy: HostCopy, why: str) -> None:
        """End all incarnations that refer to a host copy whose bytes are lost."""
        for wpg in copy.wpgs:
            self.retire(wpg, why)

    def _stale_file(self, copy: HostCopy) -> Path | None:
        return None if self.host_copies.is_known(copy) else self.file_of(copy)

    def fill(self, rank: Rank, applied: int, digest: str) -> None:
        """Record that the rank's extent holds its whole state: the initial one, or a seal's."""
        self.residency.fill(rank, applied, digest)
        assert rank.copy is not None
        self.compare_later(rank.copy)

    def leave_copy(self, rank: Rank) -> None:
        """Detach a rank from its host copy; a copy without users is freed."""
        copy = self.host_copies.detach(rank)
        if copy is not None:
            self.free_copy(copy)

    def free_copy(self, copy: HostCopy) -> None:
        """Free the memory and the file of a host copy that nobody refers to."""
        self.free_memory(copy)
        self.moves.give_up(copy, self.file_of(copy))

    def free_memory(self, copy: HostCopy) -> None:
        """Free the extent of a host copy."""
        if copy.extent is not None:
            extent, copy.extent = copy.extent, None
            self.memory.free(extent)

    def vacate(self, copy: HostCopy) -> None:
        """Give back the memory of a host copy whose bytes are on NVMe. An immutable extent cannot
        be emptied, so it is freed; a rank that trains has its extent mapped, so it stays."""
        if copy.is_frozen:
            self.free_memory(copy)
        elif copy.extent is not None:
            self.memory.vacate(copy.extent)

    def compare_later(self, copy: HostCopy) -> None:
        """Queue a frozen copy that is new, or in host memory again, for comparison with others.

        Other copies are ignored, and so is one that is a version's memory.
        """
        if copy.is_frozen and copy.version is None and copy.state is State.HOST:
            self.to_compare.put_nowait(copy)

    def announce(self) -> None:
        """Wake all who wait in `until`: something has changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Wait until `predicate` holds; it is asked again at each `announce`."""
        while not predicate():
            await self._changed.wait()

    async def until_settled(self, timeout_s: float) -> None:
        """Wait until this daemon knows what it holds. Raises: ResourceError: not in time."""
        try:
            await asyncio.wait_for(self.settled.wait(), timeout_s)
        except TimeoutError:
            raise ResourceError(
                f"{self.name} does not know yet what it holds", remedy="retry, or ask another node"
            ) from None

    def drop_version(self, version: Version | None) -> None:
        """Free a version's memory now, or when its last user is done."""
        if version is not None:
            self.device_copies.drop(version.key)
            self.versions.drop(version)
            self._recycle(version)

    @contextmanager
    def using(self, version: Version) -> Iterator[None]:
        """Keep a version's memory within the block, also where the version is dropped meanwhile.

        After the last use a dropped version's memory is parked or freed.
        """
        version.users += 1
        try:
            yield
        finally:
            version.users -= 1
            self._recycle(version)

    def _recycle(self, version: Version) -> None:
        """Park the extent of a dropped version without users where it may be reused, or else free
        it.

        The writer of the extent still has it mapped. So it is reused only by the same incarnation
        of the same policy. An extent that this daemon wrote is reused by versions of the same
        policy, while its job is on this node.
        """
        extent = self.versions.reap(version)
        if extent is None:
            return
        writer = next((r.wpg for r in self.ranks if _writes(r.wpg, version)), None)
        is_nobodys = version.incarnation is not None and writer is None
        is_over = not self.has(version.key.policy.job_key)
        if not version.is_committed or version.is_bad or is_nobodys or is_over:
            self.memory.free(extent)
        else:
            self.memory.park(extent, pool_of(writer) if writer else str(version.key.policy))
        self.announce()

    def leave_job(self, job: JobKey) -> None:
        """Free the parked memory of a job's versions, once the job has no deployment here."""
        if not self.has(job):
            for pool in self.memory.pools():
                if pool.startswith(f"{job}."):
                    self.memory.drop_pool(pool)

    def has(self, job: JobKey) -> bool:
        """Whether a deployment of the job lives here."""
        return any(wpg.key.job_key == job for wpg in self.residency.alive())

    def validate(self) -> None:
        """Raises: AssertionError: the records contradict themselves or one another."""
        self.residency.validate()
        self.versions.validate()
        self.host_copies.validate()
        self.memory.validate()
        owners = Counter(
            [
                *self.residency.extents(),
                *self.versions.extents(),
                *self.host_copies.extents(),
                *(extent for each in self.snapshots.values() for extent in each.extents),
                *(seal.extent for seal in self.seals.values()),
                *self.unrecorded,
            ]
        )
        assert set(owners) == self.memory.extents_in_use(), "an extent without an owner"
        for extent, number in owners.items():
            assert number == self.memory[extent].num_holders, "an owner that holds nothing"

    def owned_bytes(self) -> tuple[int, int]:
        """Bytes of host copies and versions in both tiers, in two counts.

        Returns: the bytes counted once for each owner; the bytes that they take in fact.
        """
        owned = sum(d.host_bytes + d.nvme_bytes for d in self.residency.deployments())
        owned += sum(v.num_bytes for v in self.versions.known() if v.extent is not None)
        twice = sum(c.num_bytes * (self._num_owners(c) - 1) for c in self.host_copies.all())
        return owned, owned - twice

    def _num_owners(self, copy: HostCopy) -> int:
        version = self.versions.find(copy.version) if copy.version else None
        is_here = version is not None and version.extent == copy.extent is not None
        return len(copy.users) + is_here


def _writes(wpg: Wpg, version: Version) -> bool:
    return wpg.key == version.key.policy and wpg.incarnation == version.incarnation


def _direction(message: CopyIn | CopyOut | StageState | LoadStaged) -> str:
    match message:
        case CopyIn() | LoadStaged():
            return "load"
        case StageState():
            return "copy"
    return "offload" if message.release else "copy"


def pool_of(wpg: Wpg) -> str:
    """The name of the pool of extents that this incarnation's ranks may write."""
    return f"{wpg.key}#{wpg.incarnation}"
