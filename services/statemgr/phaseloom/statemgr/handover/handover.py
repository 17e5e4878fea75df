"""Handover: takes over the state of a killed state manager, from the handles that its agent kept.

The manifest lists the former contents of memory. All of it is verified before use:

- A weights version is adopted if its digest matches.
- Each rank of a deployment returns and reports where its state is. Only the rank knows its heap. A
  host copy must match its digest; the digest of a dirty copy is computed now.
- If a rank does not return or a copy is bad, the deployment is lost and its ranks are disconnected.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import asdict

from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.contract.state_layout import extent_bytes
from phaseloom.common.contract.state_rank import RankResume, StateMessage
from phaseloom.common.transport.framing import Peer, close_fds
from phaseloom.statemgr.node.digests import Digests, bad_copy, has_digest
from phaseloom.statemgr.node.extents import HostMemory
from phaseloom.statemgr.node.ledger import INDEX_HANDLES, Ledger
from phaseloom.statemgr.node.ranks import Ranks
from phaseloom.statemgr.node.stores import HostCopyStore, HostSealStore
from phaseloom.statemgr.records.incarnations import (
    ON_NVME,
    HostCopy,
    PreparedSeal,
    Rank,
    State,
    Wpg,
)
from phaseloom.statemgr.records.manifest import (
    CopyEntry,
    RankEntry,
    VersionEntry,
    WpgEntry,
    decode_manifest,
    newest_record,
)
from phaseloom.statemgr.records.records import Records
from phaseloom.statemgr.records.seals import HostSeal
from phaseloom.statemgr.records.snapshots import Snapshot
from phaseloom.statemgr.records.versions import Version
from phaseloom.statemgr.tiering.sharing import FrozenCopies
from phaseloom.statemgr.tiering.tiering import Tiering

log = logging.getLogger(__name__)


@dataclass
class Handover:
    """One handover: `take` every handle, `restore`, let the ranks `resume`, then `finish`."""

    ledger: Ledger
    records: Records
    memory: HostMemory
    ranks: Ranks
    tiering: Tiering
    copies: HostCopyStore
    frozen: FrozenCopies
    host_seals: HostSealStore
    digests: Digests
    index: str
    """Names of the handles that the agent kept."""
    _handles: dict[int, int] = field(default_factory=dict, init=False)
    _missing: set[Rank] = field(default_factory=set, init=False)
    """Ranks that have memory and have not returned yet."""
    _lost: list[DeploymentKey] = field(default_factory=list, init=False)
    _copies: dict[int, HostCopy] = field(default_factory=dict, init=False)
    """Host copies whose memory or file exists, by number."""

    def accept(self, handles: list[int], fds: list[int]) -> None:
        """Accept handles of the previous daemon, each with its descriptor.

        Raises: CallerError: the numbers of handles and descriptors differ, or a handle occurs
                 twice.
        """
        if len(handles) != len(fds) or self._handles.keys() & set(handles):
            close_fds(fds)
            raise CallerError(
                f"expected one descriptor for each of the new handles {handles}, got {len(fds)}",
                field="handles",
            )
        self._handles.update(zip(handles, fds, strict=True))

    async def restore(self, agent: Peer[StateMessage]) -> str:
        """Rebuild the node's records from the manifest, and verify the memory that it names.

        If the manifest is missing or cannot be read, nothing is taken over.

        Returns: the endpoint at which the previous daemon served versions; empty: unknown.
        """
        kept_handles = set(self._handles)
        try:
            index = [self._handles.pop(handle) for handle in INDEX_HANDLES]
        except KeyError:
            return self._give_up(agent, "its agent has no index")
        record = newest_record([os.pread(fd, os.fstat(fd).st_size, 0) for fd in index])
        try:
            manifest = decode_manifest(record[1] if record else b"")
        except msgspec.DecodeError as error:
            close_fds(index)
            return self._give_up(agent, f"its index cannot be read: {error}")
        for key, incarnation in manifest.fences:
            self.records.residency.fence(key, incarnation)
        # In parallel, because agent and ranks wait for it.
        await asyncio.gather(*map(self._restore_copy, manifest.host_copies))
        for wpg in manifest.wpgs:
            self._restore_wpg(wpg)
        # Manifests before parts: without a manifest a part counts as never committed.
        for is_part in (False, True):
            versions = [
                version for version in manifest.versions if bool(version.key.part) is is_part
            ]
            await asyncio.gather(*map(self._restore_version, versions))
        # After the versions: an unused copy may be the memory of a version.
        for copy in self._copies.values():
            if not self.records.host_copies.is_known(copy):
                self.copies.free_memory(copy)
        for alive in self.records.residency.alive():
            await self._check_prepared(alive)
        for snapshot in manifest.snapshots:
            self._restore_snapshot(snapshot)
        for seal in manifest.seals:
            self._restore_seal(seal)
        close_fds(self._handles.values())
        self._handles.clear()
        # Last, because until now a recorded manifest would be incomplete.
        self.ledger.take_over(agent, self.index, index, record[0] if record else 0, kept_handles)
        return manifest.endpoint

    def _give_up(self, agent: Peer[StateMessage], reason: str) -> str:
        log.error("nothing can be taken over from the previous daemon: %s", reason)
        close_fds(self._handles.values())
        self._handles.clear()
        self.ledger.attach(agent)
        return ""

    def _restore_wpg(self, entry: WpgEntry) -> None:
        wpg = Wpg(entry.key, entry.incarnation, entry.seal_seq, epoch=entry.epoch)
        wpg.sealed = entry.sealed
        wpg.rank_offset = entry.rank_offset
        wpg.num_ranks = entry.num_ranks or len(entry.ranks)
        if entry.prepared is not None:
            wpg.prepared = PreparedSeal(entry.prepared)
        for index, rank_entry in enumerate(entry.ranks):
            wpg.ranks.append(Rank(wpg, index, rank_entry.device, rank_entry.token))
        if max(wpg.devices) >= len(self.records.residency.device_budget_bytes):
            self._lose(wpg, "its device is no longer configured")
            return
        self.records.residency.take_over(wpg)
        for rank, rank_entry in zip(wpg.ranks, entry.ranks, strict=True):
            if not self._restore_rank(rank, rank_entry):
                self.records.residency.end_seal(wpg)
                self._lose(wpg, "its memory does not match the index")
                return

    def _restore_rank(self, rank: Rank, entry: RankEntry) -> bool:
        rank.scratch_bytes = entry.scratch_bytes
        is_filling = entry.state is State.FILLING
        if entry.copy is None and entry.new_extent is None and not is_filling:
            return True
        copy = None if entry.copy is None else self._copies.get(entry.copy)
        if copy is None and entry.copy is not None:
            return False
        name, num_bytes = rank.owner, extent_bytes(entry.heap_bytes, entry.host_bytes)
        if entry.new_extent and not self._take_extent(entry.new_extent, num_bytes, name):
            return False
        for _, loan in entry.loans:
            if not self._take_extent(loan.extent, loan.num_bytes, f"what {name} has borrowed"):
                return False
        for name in entry.__struct_fields__:
            if name not in {"copy", "loans", "snapshot"}:
                setattr(rank, name, getattr(entry, name))
        rank.loans = dict(entry.loans)
        if rank.is_in_extent and rank.wpg.prepared is not None and entry.snapshot is not None:
            if not self._take_extent(entry.snapshot, num_bytes, rank.owner, is_uncounted=True):
                return False
            rank.snapshot = entry.snapshot
        if copy is not None:
            host_copies = self.records.host_copies
            if not host_copies.is_known(copy):
                host_copies.take_over(copy)
            host_copies.attach(rank, copy)
        self._missing.add(rank)
        return True

    async def _restore_copy(self, entry: CopyEntry) -> None:
        """Find an intact host copy. A kill during a move leaves it intact in host memory or on
        NVMe.

        The copy of a training rank is verified when the rank returns, because it may have changed
        since.
        """
        copy = HostCopy(**asdict(entry))
        is_above = entry.state not in ON_NVME
        extent, name, size = copy.extent, str(copy), copy.num_bytes
        if not copy.is_frozen:
            if extent and self._take_extent(extent, size, name, is_vacated=not is_above):
                self._copies[copy.number] = copy
            return
        if is_above and extent and self._take_extent(extent, size, name):
            if await has_digest(self.copies.bytes_of(copy), copy.digest):
                copy.state = State.HOST
                copy.is_immutable = self.memory[extent].is_frozen
                self._copies[copy.number] = copy
                return
            self.memory.free(extent)
        copy.extent = None
        copy.state = State.DEMOTED
        if await asyncio.to_thread(self.tiering.is_demoted, copy, copy.digest):
            self._copies[copy.number] = copy
        else:
            log.error("%s cannot be taken over", copy)

    def _restore_seal(self, seal: HostSeal) -> None:
        if not self._take_extent(seal.extent, seal.num_bytes, seal.name):
            return
        try:
            self.host_seals.parts_of(seal)
        except ResourceError as error:
            log.error("%s", error)
            self.memory.free(seal.extent)
            return
        self.host_seals.records[seal.key, seal.seq] = seal

    def _restore_snapshot(self, snapshot: Snapshot) -> None:
        adopted_extents: list[int] = []
        for part in snapshot.parts:
            if not self._take_extent(part.extent, part.num_bytes, str(snapshot)):
                for extent in adopted_extents:
                    self.memory.free(extent)
                return
            adopted_extents.append(part.extent)
        self.records.snapshots[snapshot.key, snapshot.operation] = snapshot

    def _take_extent(
        self,
        extent: int,
        num_bytes: int,
        name: str,
        *,
        is_vacated: bool = False,
        is_uncounted: bool = False,
    ) -> bool:
        """Adopt the memory of an extent, or add a holder if it is already adopted.

        Args:    num_bytes: the expected size.
                 is_vacated: whether the extent's bytes are on NVMe.
                 is_uncounted: see `HostMemory.reserve_uncounted`.
        Returns: False: the memory was not handed over, or does not match the manifest.
        """
        if extent in self.memory.extents_in_use():
            self.memory.hold(extent)
            return True
        fd = self._handles.get(extent)
        if fd is None:
            log.error("the memory for %s was not handed over", name)
            return False
        try:
            kind = {"is_vacated": is_vacated, "is_uncounted": is_uncounted}
            self.memory.take_over(extent, fd, num_bytes, name, **kind)
        except ResourceError as error:
            log.error("%s", error)
            return False
        del self._handles[extent]
        return True

    async def _restore_version(self, entry: VersionEntry) -> None:
        if await self._is_version_kept(entry):
            return
        log.error("version %s cannot be taken over from memory", entry.key)
        if entry.key.is_copy:
            return  # a node that needs the copy fetches it again
        # # Only its policy can make it again, from the log; syncs of the version wait for that.
        policy = self.records.residency.find(entry.key.policy)
        if policy is not None and entry.digest and self.records.versions.find(entry.key) is None:
            self._lose(policy, f"version {entry.key} is bad and not on disk")

    async def _is_version_kept(self, entry: VersionEntry) -> bool:
        if not self._take_extent(entry.extent, entry.num_bytes, f"version {entry.key}"):
            return False
        if entry.digest:
            memory = self.memory[entry.extent].view(entry.num_bytes)
            is_good = await has_digest(memory, entry.digest)
        else:
            # Not committed: its writer continues, or is lost together with the version.
            is_good = self.records.residency.is_alive(entry.key.policy, entry.incarnation)
        version = Version(**asdict(entry))
        # Any rank of the job may have it mapped.
        job = entry.key.policy.job_key
        version.readers = {wpg for wpg in self.records.residency.alive() if wpg.key.job_key == job}
        if is_good and self.records.versions.take_over(version):
            return True
        self.memory.free(entry.extent)
        return False

    async def _check_prepared(self, wpg: Wpg) -> None:
        if wpg.prepared is None:
            return
        for rank in wpg.ranks:
            # Snapshots of host-only state are not kept, and the rank may have changed that state.
            is_kept = rank.is_dirty or rank.frozen or rank.snapshot is not None
            if rank.copy is not None and rank.is_below:
                is_kept = await asyncio.to_thread(self.tiering.is_demoted, rank.copy, rank.digest)
            elif not is_kept:
                is_kept = await has_digest(self.copies.bytes_for(rank), rank.digest)
            if rank.host_bytes or not is_kept:
                self.records.residency.end_seal(wpg)
                return

    async def resume(self, message: RankResume) -> Rank:
        """Readmit a rank, which reports where its state is.

        Raises: CallerError: PERMISSION_DENIED: the rank is not awaited. FAILED_PRECONDITION: its
                 heap
                is not the same as before; its incarnation ends. ResourceError: DATA_LOSS: its host
                    copy
                is bad; its incarnation ends.
        """
        rank = self.records.residency.known(message.token)
        if rank not in self._missing:
            raise CallerError(f"{rank} is not expected", code=Code.PERMISSION_DENIED, field="token")
        heap = (message.heap_bytes, message.host_bytes, message.tensors)
        if heap != (rank.heap_bytes, rank.host_bytes, rank.table.packed):
            self._lose(rank.wpg, "it came back with another heap")
            raise CallerError(f"{rank} came back with another heap", code=Code.FAILED_PRECONDITION)
        if rank.frozen:
            await self._resume_frozen(rank, message)
        elif not message.filled:
            self.records.residency.resume(rank, State.FILLING)
        elif message.resident:
            self._settle_above(rank, in_extent=message.in_extent)
            self.records.residency.resume(rank, State.RESIDENT)
        else:
            digest = message.digest or rank.digest
            await self._find_tier(rank, digest)
            rank.copied(message.applied, digest)
            self.records.residency.resume(rank, State.HOST)
            self.digests.begin([rank])
        self._missing.discard(rank)
        self.ledger.announce()
        return rank

    async def _resume_frozen(self, rank: Rank, message: RankResume) -> None:
        """Readmit a frozen rank. Its host copy is the extent that it last copied out to if that
        copy is
        complete, or else the previous one."""
        digest = message.digest or rank.digest
        state = State.HOST
        if rank.copy is None and not message.filled:
            state = State.FILLING
        elif message.filled and not message.resident and await self._has_copied(rank, digest):
            self.frozen.settle_copy(rank, message.applied, digest)
        elif rank.copy is not None and (message.resident or rank.copy.digest == digest):
            self.frozen.drop_copy(rank)
            state = State.RESIDENT if message.resident else State.HOST
        else:
            raise self._bad_copy(rank)
        self.records.residency.resume(rank, state)

    def _bad_copy(self, rank: Rank) -> ResourceError:
        self._lose(rank.wpg, "its host copy cannot be verified")
        return bad_copy(rank, "it cannot be verified")

    async def _has_copied(self, rank: Rank, digest: str) -> bool:
        if rank.new_extent is None:
            return False
        memory = self.memory[rank.new_extent]
        return await has_digest(memory.readable(rank.extent_bytes), digest)

    def _settle_above(self, rank: Rank, *, in_extent: bool) -> None:
        """Record the tier of a resident rank's host copy, which is older than its heap. A copy
        without host memory has none until the rank leaves the device.

        Args:   in_extent: as in `RankResume`.
        Raises: ResourceError: part of the state was in memory that was given back. The incarnation
                ends.
        """
        copy = rank.copy
        assert copy is not None
        is_below = copy.state in ON_NVME
        copy.state = State.DEMOTED if is_below else State.HOST
        if is_below and (rank.host_bytes or in_extent):
            self._lose(rank.wpg, "part of its state was in memory that was given back")
            raise ResourceError(f"the host memory of {rank} was given back", code=Code.DATA_LOSS)

    async def _find_tier(self, rank: Rank, digest: str) -> None:
        """Record the tier that stores the intact host copy of a rank. A kill during a demotion
        leaves it
        intact in one of the two.

        Raises: ResourceError: DATA_LOSS: neither tier has an intact copy. The incarnation ends.
        """
        copy = rank.copy
        assert copy is not None
        is_below = copy.state in ON_NVME
        copy.state = State.HOST
        if not is_below and (not digest or await has_digest(self.copies.bytes_of(copy), digest)):
            # # Without a digest the copy is dirty: complete but not hashed yet.
            return
        if not await asyncio.to_thread(self.tiering.is_demoted, copy, digest):
            raise self._bad_copy(rank)
        if not is_below:
            self.copies.vacate(copy)
        copy.state = State.DEMOTED

    def begin_again(self, token: str) -> None:
        """Free the extent of a rank that connects for the first time: the rank never received
        it."""
        rank = self.records.residency.known(token)
        if rank in self._missing:
            self._missing.discard(rank)
            self.copies.detach(rank)
            extent = self.records.residency.reset(rank)
            if extent is not None:
                self.memory.free(extent)
            self.ledger.announce()

    async def finish(self, timeout_s: float) -> list[DeploymentKey]:
        """Wait for the ranks. A rank that does not return in time is lost.

        Returns: the deployments that are lost in this handover.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self.ledger.until(lambda: not self._awaited_ranks())
        except TimeoutError:
            for wpg in {rank.wpg for rank in self._awaited_ranks()}:
                self._lose(wpg, f"not all of its ranks came back within {timeout_s:.0f} s")
        for copy in self.records.host_copies.all():
            self.copies.compare_later(copy)
        return self._lost

    def _awaited_ranks(self) -> list[Rank]:
        return [rank for rank in self._missing if rank.state is not State.LOST]

    def _lose(self, wpg: Wpg, reason: str) -> None:
        log.error("%s is lost with the previous daemon: %s", wpg, reason)
        self._lost.append(wpg.key)
        self.ranks.retire(wpg, reason)
