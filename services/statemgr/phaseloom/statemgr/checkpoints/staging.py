"""Staging buffers: copies of ranks' states in separate memory, on the way to or from files.

A snapshot is copied between two operations. Its checksums are taken right after that, while the
ranks continue, and are part of the node's manifest. So the files have exactly the copied bytes,
even if the next daemon writes them. Memory is parked while the incarnation lives, so that the next
snapshot finds it touched already.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.common.contract.state_rank import StageState, TakeSnapshot
from phaseloom.common.observability import metrics
from phaseloom.common.process.error_boundary import error_boundary
from phaseloom.common.tensors.blockhash import BLOCK_BYTES, CHECKSUM_BYTES, combine_checksums
from phaseloom.statemgr.disk.disk import copy
from phaseloom.statemgr.disk.files import NEVER
from phaseloom.statemgr.node.background import Background
from phaseloom.statemgr.node.digests import bad_copy, checksums_of, has_digest
from phaseloom.statemgr.node.extents import HostMemory
from phaseloom.statemgr.node.ledger import Ledger
from phaseloom.statemgr.node.ranks import Ranks
from phaseloom.statemgr.node.stores import HostCopyStore, pool_of
from phaseloom.statemgr.records.incarnations import Rank, State, Wpg
from phaseloom.statemgr.records.records import Records
from phaseloom.statemgr.records.snapshots import Snapshot, SnapshotPart
from phaseloom.statemgr.records.stateheader import names_within
from phaseloom.statemgr.tiering.sharing import FrozenCopies
from phaseloom.statemgr.tiering.switching import on_each_device
from phaseloom.statemgr.tiering.tiering import Tiering

log = logging.getLogger(__name__)


@dataclass
class Staging:
    """Copies ranks' states into staging buffers."""

    ledger: Ledger
    records: Records
    memory: HostMemory
    ranks: Ranks
    tiering: Tiering
    copies: HostCopyStore
    frozen: FrozenCopies
    background: Background
    _under_way: dict[Snapshot, asyncio.Future[None]] = field(default_factory=dict, init=False)
    """Snapshots whose checksums are being taken."""

    @asynccontextmanager
    async def room(
        self, sizes: Iterable[tuple[int, str]], wpg: Wpg | None = None
    ) -> AsyncIterator[list[int]]:
        """A list with an extent for each state. Extents that are still in the list at the end of
        the block are freed.

        Args: sizes: the bytes of each state, and the name of its memory in errors.
              wpg: the incarnation that the states belong to, whose parked memory is reused.
        """
        pool = "" if wpg is None else pool_of(wpg)
        extents: list[int] = []
        try:
            for num_bytes, label in sizes:
                extents.append(await self.tiering.reserve(num_bytes, label, pool))
                self.memory.unrecorded.add(extents[-1])
            yield extents
        finally:
            for extent in extents:
                self.memory.unrecorded.discard(extent)
                self._give_up(extent, wpg)
            self.ledger.announce()

    def room_for(self, wpg: Wpg) -> AbstractAsyncContextManager[list[int]]:
        """Room for the states of an incarnation's ranks."""
        label = "a copy of {} for a checkpoint"
        return self.room(((r.extent_bytes, label.format(r.owner)) for r in wpg.ranks), wpg)

    def view(self, extent: int, num_bytes: int) -> memoryview:
        return self.memory[extent].view(num_bytes)

    async def snapshot(self, wpg: Wpg, request: TakeSnapshot) -> Snapshot:
        """Copy every rank's state, then take the checksums in the background."""
        async with self.room_for(wpg) as extents:
            await self._copy_all(wpg, extents, request.seq)
            wpg.check_alive()
            parts = [
                SnapshotPart(extent, rank.extent_bytes, rank.table)
                for rank, extent in zip(wpg.ranks, extents, strict=True)
            ]
            extents.clear()  # the snapshot owns them now
            snapshot = Snapshot.of(wpg, request.operation, request.name, request.seq, parts)
            self.records.snapshots[snapshot.key, snapshot.operation] = snapshot
            for part in parts:
                self.memory.unrecorded.discard(part.extent)
        self._begin_checksums(snapshot)
        return snapshot

    def free(self, snapshot: Snapshot) -> None:
        wpg = self.records.residency.find(snapshot.key)
        is_same = wpg is not None and wpg.incarnation == snapshot.incarnation
        self.records.snapshots.pop((snapshot.key, snapshot.operation), None)
        for extent in snapshot.extents:
            self._give_up(extent, wpg if is_same else None)
        self.ledger.announce()

    def _give_up(self, extent: int, wpg: Wpg | None) -> None:
        if wpg is None or wpg.is_lost:
            self.memory.free(extent)
        else:
            self.memory.park(extent, pool_of(wpg))

    async def _copy_all(self, wpg: Wpg, extents: list[int], seq: int) -> None:
        targets = dict(zip(wpg.ranks, extents, strict=True))

        async def stage(rank: Rank) -> None:
            extent = self.memory[targets[rank]]
            if rank.state is State.RESIDENT:
                applied = (await self.ranks.order(rank, StageState(), [extent.fd])).applied
            elif rank.has_other_layout:
                applied = (await self.frozen.write_copy(rank, extent.fd)).applied
            else:
                applied = rank.applied
                source, target = self.copies.bytes_for(rank), extent.view(rank.extent_bytes)
                await asyncio.to_thread(copy, target, source)
                if rank.digest and not await has_digest(target, rank.digest):
                    raise bad_copy(rank, "it is not what its digest says")
            if applied != seq:
                raise CallerError(
                    f"{rank} has applied {applied}, not {seq}",
                    code=Code.FAILED_PRECONDITION,
                    field="seq",
                    remedy="take the snapshot between operations, at the seq that was applied last",
                )

        async with self.tiering.in_host(wpg), self.ranks.holding(wpg):
            self.records.residency.check_ready(wpg)
            await on_each_device(wpg.ranks, stage)

    # --- Checksums -------------------------------------------------------------------------------

    async def until_proved(self, snapshot: Snapshot) -> None:
        """Wait for the snapshot's checksums."""
        if any(part.checksums is None for part in snapshot.parts):
            # The daemon that made it may have been killed before taking them.
            under_way = self._under_way.get(snapshot)
            await asyncio.shield(under_way or self._begin_checksums(snapshot))

    def _begin_checksums(self, snapshot: Snapshot) -> asyncio.Future[None]:
        # The views are made now: when the task runs, the snapshot may be freed.
        memories = [self.memory[p.extent].view(p.num_bytes) for p in snapshot.parts]
        ended = self._under_way[snapshot] = asyncio.get_running_loop().create_future()
        self.background.start(self._take_checksums(snapshot, memories, ended))
        return ended

    async def _take_checksums(
        self, snapshot: Snapshot, memories: list[memoryview], ended: asyncio.Future[None]
    ) -> None:
        stopped = self.background.stopped
        try:
            with error_boundary(metrics.UNFORESEEN, "checkpoint"):
                async with self.ledger.change():
                    for part, memory in zip(snapshot.parts, memories, strict=True):
                        checksums = await asyncio.to_thread(checksums_of, memory, stopped)
                        if stopped.is_set():
                            raise ResourceError(
                                f"{snapshot} is not written because this daemon is stopping"
                            )
                        part.checksums = checksums
            log.info("%s has its checksums", snapshot)
            ended.set_result(None)
        except PhaseloomError as error:
            ended.set_exception(error)
            # The write may never come: the exception counts as retrieved.
            ended.exception()
        finally:
            memories.clear()
            del self._under_way[snapshot]


@dataclass(frozen=True, slots=True)
class StagedState:
    """The state of one rank in a staging buffer."""

    rank: int
    """The rank's number, counted over all nodes."""
    tensors: list[TensorSlot]
    memory: memoryview
    checksums: bytes = field(repr=False)
    """Checksums of the state's blocks, taken when it arrived here."""

    @property
    def digest(self) -> str:
        return combine_checksums(self.checksums)


def check(key: DeploymentKey, states: Sequence[StagedState]) -> None:
    """Verify that the staged states have not changed, so that everything read from them is good.
    Blocking: call it in a thread.

    Raises: ResourceError: DATA_LOSS, naming the rank, the bytes and their tensors.
    """
    for state in states:
        checksums = checksums_of(state.memory, NEVER)
        for at in range(0, len(state.checksums), CHECKSUM_BYTES):
            if checksums[at : at + CHECKSUM_BYTES] != state.checksums[at : at + CHECKSUM_BYTES]:
                start = at // CHECKSUM_BYTES * BLOCK_BYTES
                end = min(start + BLOCK_BYTES, len(state.memory))
                raise ResourceError(
                    f"{key} rank {state.rank}, bytes {start} to {end} of its state "
                    f"({names_within(state.tensors, start, end)}): the copy for a checkpoint has "
                    "changed in host memory since it was made",
                    code=Code.DATA_LOSS,
                    remedy="save again; if this happens again, check the node's memory",
                    details={"deployment": key, "rank": state.rank, "offset": start},
                )
