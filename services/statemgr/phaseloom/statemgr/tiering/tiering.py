"""The tier below host memory: host copies that nothing needs are demoted to NVMe and promoted
later.

A host copy is demoted when something else needs its memory. Its file is written, verified and
fsynced, then the manifest names the file, and only then the memory is given back. A copy is
promoted before it is loaded or sealed, or on a hint. At every moment the file or the memory is
complete, so the next daemon finds one of them after a kill. A copy stays in host memory while its
rank is on a device, or while it is being switched, sealed or moved.

`node.stores.Moves` resolves two moves of one copy that meet.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar
from weakref import WeakValueDictionary

from phaseloom.common.contract.errors import Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import VersionKey
from phaseloom.common.contract.state_agent import Prefetch
from phaseloom.common.observability import metrics
from phaseloom.common.process.error_boundary import error_boundary
from phaseloom.statemgr.disk.files import StateDirectory, find_parts, header_of
from phaseloom.statemgr.node.digests import Digests
from phaseloom.statemgr.node.extents import Extent, HostMemory
from phaseloom.statemgr.node.ledger import Ledger
from phaseloom.statemgr.node.ranks import Ranks
from phaseloom.statemgr.node.stores import HostCopyStore, Move, VersionStore
from phaseloom.statemgr.records.incarnations import (
    ON_DEVICE,
    ON_NVME,
    HostCopy,
    Rank,
    State,
    Step,
    Wpg,
)
from phaseloom.statemgr.records.layouts import rounded
from phaseloom.statemgr.records.residency import Residency
from phaseloom.statemgr.records.stateheader import Section, StateHeader, data_loss
from phaseloom.statemgr.records.versions import Version
from phaseloom.statemgr.records.ways import Room, Way

log = logging.getLogger(__name__)


T = TypeVar("T")
Victim = HostCopy | Version
"""A host copy or weights version that may leave host memory to make room."""


@dataclass
class Tiering:
    """Promotion and demotion of host copies, and reservations of host memory."""

    ledger: Ledger
    memory: HostMemory
    copies: HostCopyStore
    versions: VersionMoves
    ranks: Ranks
    residency: Residency
    digests: Digests
    nvme_budget_bytes: int

    # --- what the other parts ask for ---

    async def reserve(
        self,
        num_bytes: int,
        label: str,
        pool: str = "",
        *,
        may_freeze: bool = False,
        after_s: float = -math.inf,
    ) -> int:
        """Reserve an extent. Copies and versions that nothing needs leave memory to make room.

        Args:    label: the name of the memory in errors.
                 pool: reuse an idle extent of this pool if it has the size.
                 may_freeze: whether the extent can be made immutable later.
                 after_s: demote only copies with a predicted use after this time; infinite: demote
                 nothing.
        Returns: the number of the extent.
        Raises:  ResourceError: RESOURCE_EXHAUSTED, with the numbers of both tiers.
        """
        return await self._with_room(
            lambda: self.memory.reserve(num_bytes, label, pool, may_freeze=may_freeze), after_s
        )

    @asynccontextmanager
    async def reserved(
        self,
        num_bytes: int,
        label: str,
        pool: str = "",
        *,
        may_freeze: bool = False,
        after_s: float = -math.inf,
    ) -> AsyncIterator[int]:
        """Reserve an extent, as `reserve` does, for a record that exists by the end of the block.
        If the block fails, the extent is freed."""
        extent = await self.reserve(num_bytes, label, pool, may_freeze=may_freeze, after_s=after_s)
        self.memory.unrecorded.add(extent)
        try:
            yield extent
        except BaseException:
            self.memory.free(extent)
            raise
        finally:
            self.memory.unrecorded.discard(extent)

    async def reserve_frozen(self, num_bytes: int, label: str) -> int:
        return await self.reserve(num_bytes, label, may_freeze=True)

    @asynccontextmanager
    async def in_host(
        self, wpg: Wpg, *neighbours: Wpg, or_straight: bool = False
    ) -> AsyncIterator[None]:
        """Promote the incarnation's host copies and keep them in host memory within the block.

        Copies of `neighbours` that are in host memory stay there too, but are not promoted. The
        copies of ranks on a device are not promoted either, because they are older than the heaps.

        Args:   or_straight: leave copies on NVMe whose way is straight.
        Raises: ResourceError: RESOURCE_EXHAUSTED: no room for the copies; DATA_LOSS: the file of
                one is bad and no seal has its bytes, so the incarnation is over.
        """
        with self.residency.using(wpg, *neighbours):
            for rank in wpg.ranks:
                is_older = rank.state in ON_DEVICE and not rank.has_other_layout
                if rank.copy is not None and not is_older:
                    await self._bring_up(rank, rank.copy, or_straight=or_straight)
            yield

    async def _bring_up(self, rank: Rank, copy: HostCopy, *, or_straight: bool) -> None:
        await self.copies.moves.until_settled(copy)
        is_sealing = any(wpg.prepared is not None for wpg in copy.wpgs)
        if or_straight and copy.state is State.DEMOTED:
            # A seal reads the file, which a promotion would remove.
            if is_sealing or self.way_of(rank, is_leaving=False) is Way.STRAIGHT:
                return
        elif is_sealing and copy.state is State.DEMOTED:
            await self.ledger.until(lambda: all(wpg.prepared is None for wpg in copy.wpgs))
        try:
            await self._promote(copy)
        except ResourceError as error:
            is_short = error.info.code is Code.RESOURCE_EXHAUSTED
            if not (is_short and or_straight) or _needs_host(rank):
                raise

    def way_of(self, rank: Rank, *, is_leaving: bool) -> Way:
        """The way by which a rank would leave or enter its device now, without the memory that its
        copy has."""
        needs_host = (_needs_host(rank) and not is_leaving) or rank.host_bytes > 0
        return self.room(rank).choose(
            rounded(rank.extent_bytes), is_leaving=is_leaving, needs_host=needs_host
        )

    def describe_way(self, wpg: Wpg) -> str:
        """Describe the way of the first rank that would go straight now, for people."""
        for rank in wpg.ranks:
            if rank.is_below or not rank.has_memory:
                leaving, entering = (
                    self.way_of(rank, is_leaving=is_leaving) for is_leaving in (True, False)
                )
                if Way.STRAIGHT in {leaving, entering}:
                    return (
                        f"leaves {leaving}, enters {entering}: its copy has {rank.extent_bytes} "
                        f"bytes, {self.room(rank)}"
                    )
        return f"leaves and enters {Way.HOST}" if wpg.heap_bytes else ""

    def room(self, rank: Rank) -> Room:
        leaving = {*self._victims(-math.inf), *self._going_down()}
        used_bytes = self.copies.records.nvme_used_bytes() - rank.is_below * rank.copy_bytes
        return Room(
            self.memory.free_bytes,
            sum(rounded(victim.num_bytes) for victim in leaving),
            self.nvme_budget_bytes - used_bytes,
        )

    def check_nvme(self, rank: Rank) -> None:
        """Raises: ResourceError: RESOURCE_EXHAUSTED: NVMe has no room for the rank's copy."""
        nvme_bytes = self.room(rank).nvme_bytes
        if rank.extent_bytes > nvme_bytes:
            raise ResourceError(
                f"{rank} needs {rank.extent_bytes} bytes of NVMe: {nvme_bytes} of "
                f"{self.nvme_budget_bytes} are free",
                code=Code.RESOURCE_EXHAUSTED,
            )

    def hint(self, wpg: Wpg, hint: Prefetch) -> None:
        """Record a prediction of the deployment's next use, and start promotions in the background.

        A hint without a time withdraws the prediction; started promotions continue.
        """
        if hint.in_s is None:
            wpg.next_use_s = math.inf
            return
        wpg.next_use_s = time.monotonic() + hint.in_s
        for rank in wpg.ranks:
            is_promotable = wpg.prepared is None and rank.state not in ON_DEVICE and rank.is_whole
            if rank.copy is not None and rank.copy.state is State.DEMOTED and is_promotable:
                self.copies.moves.hint(rank.copy, self._read_up)

    async def sweep(self) -> None:
        """Remove the files of host copies that no longer exist. Called once, after the handover."""
        needed = {self.copies.file_of(c) for c in self.copies.records.all() if c.state in ON_NVME}
        stale = self.copies.directory.host_copies() - needed
        await asyncio.to_thread(self.copies.directory.discard, *stale)

    def is_demoted(self, copy: HostCopy, digest: str) -> bool:
        """Whether a whole file of the host copy is on NVMe; reading it verifies its blocks.
        Blocking."""
        header = header_of(self.copies.file_of(copy))
        stored = (header.digest, header.num_bytes) if header is not None else ("", 0)
        return bool(digest) and stored == (digest, copy.num_bytes)

    # --- moves ---

    async def _with_room(self, take: Callable[[], T], after_s: float = -math.inf) -> T:
        failed: set[Victim] = set()
        while True:
            try:
                return take()
            except ResourceError as error:
                if error.info.code is not Code.RESOURCE_EXHAUSTED:
                    raise
                if after_s == math.inf:
                    raise self._with_numbers(error) from None
                refusal = error
            below = [victim for victim in self._victims(after_s) if victim not in failed]
            going = self._going_down()
            room_bytes = sum(rounded(leaving.num_bytes) for leaving in [*below, *going])
            if not (below or going) or room_bytes < _shortage_bytes(refusal):
                raise self._with_numbers(refusal)
            if not below:
                # These moves are for other callers, but may free enough for all.
                await asyncio.wait(going.values(), return_when=asyncio.FIRST_COMPLETED)
                continue
            victim = below[0]
            try:
                if isinstance(victim, Version):
                    await self.versions.make_room(victim)
                else:
                    await self._demote(victim)
            except PhaseloomError as error:
                log.warning("%s stays in host memory: %s", victim, error)
                failed.add(victim)

    def _victims(self, after_s: float) -> list[Victim]:
        """The copies and versions that may leave host memory, in this order:

        1. versions that can leave at once
        2. prefetched versions, even while they are being fetched; not for a hint (`after_s`)
        3. host copies, the one with the latest need first
        4. versions that must wait for ranks or a disk; not for a hint
        """
        copies = [copy for copy in self._demotable() if copy.next_use_s > after_s]
        first = self.versions.unread(at_once=True)
        if after_s != -math.inf:
            return [*first, *copies]
        ahead, last = self.versions.ahead(), self.versions.unread(at_once=False)
        return [*first, *ahead, *copies, *last]

    def _going_down(self) -> dict[Victim, asyncio.Future[None]]:
        """The copies and versions that will make room by themselves, each with its move's end:
        those on their way down, and copies that may be demoted once their promotion has ended."""
        arriving = {*self.copies.records.demotable()}
        going: dict[Victim, asyncio.Future[None]] = {}
        going.update({version: end for version, end in self.versions.under_way.items()})
        for move in self.copies.moves.under_way():
            if not move.is_up or move.copy in arriving:
                going[move.copy] = move.done
        return going

    def _demotable(self) -> list[HostCopy]:
        """The host copies that can be demoted now, the one with the latest need first.

        Excludes copies that are being moved, and copies whose memory has another holder: of memory
        shared with a weights version, the version leaves first.
        """
        return sorted(
            (
                copy
                for copy in self.copies.records.demotable()
                if copy.extent
                and self.memory[copy.extent].num_holders == 1
                and copy not in self.copies.moves
            ),
            # Those without a prediction first, then the latest predicted use, then the oldest use.
            key=lambda copy: (-copy.next_use_s, copy.last_used),
        )

    def _with_numbers(self, refusal: ResourceError) -> ResourceError:
        info = refusal.info
        used, budget = self.copies.records.nvme_used_bytes(), self.nvme_budget_bytes
        return ResourceError(
            f"{info.message}; nothing more can go to NVMe, where {used} of {budget} are in use",
            code=info.code,
            remedy=info.remedy,
            details={**info.details, "nvme_used_bytes": used, "nvme_budget_bytes": budget},
        )

    async def _demote(self, copy: HostCopy) -> None:
        used = self.copies.records.nvme_used_bytes()
        if used + copy.num_bytes > self.nvme_budget_bytes:
            raise ResourceError(
                f"{copy} needs {copy.num_bytes} bytes of NVMe: {used} of "
                f"{self.nvme_budget_bytes} are in use",
                code=Code.RESOURCE_EXHAUSTED,
            )
        # Before the first await, so that no two callers choose the same copy.
        self.copies.records.step(copy, Step.DEMOTE_BEGUN)
        await self.copies.moves.move(copy, self._write_down, is_up=False)

    async def _write_down(self, move: Move) -> None:
        copy = move.copy
        self._check_needed(copy)
        with self._failing(copy, Step.DEMOTE_FAILED, "its host copy is bad"):
            (rank, *_), memory = copy.users, self.copies.bytes_of(copy)
            table = copy.table if len(copy.table) else rank.table
            section = Section(copy.num_bytes, table.tensors, copy.digest)
            header = StateHeader("copy", copy.owner, rank.applied, [section])
            path, write = self.copies.file_of(copy), self.copies.directory.write
            written = await asyncio.to_thread(write, path, header, [memory], move.cancelled)
            for rank in [*copy.users]:
                await self.ranks.unpin(rank)
        self._check_needed(copy)
        async with self.ledger.change():
            self.copies.records.step(copy, Step.DEMOTE_VERIFIED)
            copy.digest, copy.is_dirty, copy.version = written.digest, False, None
        # Free the memory only after the manifest names NVMe.
        async with self.ledger.change():
            for rank in [*copy.users]:
                await (self.ranks.unmap(rank) if copy.is_frozen else self.digests.until_ended(rank))
            self._check_needed(copy)
            self.copies.vacate(copy)

    async def _promote(self, copy: HostCopy) -> None:
        await self.copies.moves.until_settled(copy)
        if copy.state is State.DEMOTED and self.copies.records.is_known(copy):
            await self.copies.moves.move(copy, self._read_up, is_up=True)

    async def _read_up(self, move: Move) -> None:
        copy = move.copy
        self._check_needed(copy)
        await self._take_memory(copy, copy.next_use_s if move.is_hint else -math.inf)
        self.copies.records.step(copy, Step.PROMOTE_BEGUN)
        assert copy.extent is not None
        memory = self.memory[copy.extent]
        try:
            with self._failing(copy, Step.PROMOTE_FAILED, "its state on NVMe is bad"):
                await asyncio.to_thread(self._read, copy, memory, move.cancelled)
        except PhaseloomError:
            if self.copies.records.is_known(copy):
                self.copies.vacate(copy)
            raise
        self._check_needed(copy)
        if copy.is_frozen:
            is_frozen = memory.freeze()
            assert is_frozen, "nobody else has ever seen it"
        async with self.ledger.change() as afterwards:
            self.copies.records.step(copy, Step.PROMOTE_VERIFIED)
            afterwards.push_async_callback(self.copies.moves.discard, self.copies.file_of(copy))
        self.copies.compare_later(copy)

    async def _take_memory(self, copy: HostCopy, after_s: float) -> None:
        """Reserve memory for a demoted copy: its own extent's or, if it is frozen, a new extent.
        Each order to copy in brings the descriptor, so ranks do not notice a new extent."""
        label = f"the host copy of {copy.users[0].owner}"
        if copy.is_frozen:
            extent = await self.reserve(copy.num_bytes, label, may_freeze=True, after_s=after_s)
            if self.copies.records.is_known(copy):
                copy.extent = extent
            else:
                self.memory.free(extent)
        else:

            def occupy() -> None:
                self._check_needed(copy)
                assert copy.extent is not None
                self.memory.occupy(copy.extent, label)

            await self._with_room(occupy, after_s)
        self._check_needed(copy)

    def _check_needed(self, copy: HostCopy) -> None:
        if not self.copies.records.is_known(copy):
            raise ResourceError(f"{copy} is no longer needed")

    @contextmanager
    def _failing(self, copy: HostCopy, back: Step, reason: str) -> Iterator[None]:
        """If the block fails, record that the copy is where it was. If it fails with DATA_LOSS, no
        good bytes are left, so all incarnations that refer to the copy are over."""
        try:
            with error_boundary(metrics.UNFORESEEN, "move"):
                yield
        except PhaseloomError as error:
            if error.info.code is Code.DATA_LOSS:
                self.ranks.lose(copy, f"{reason}: {error}")
            elif self.copies.records.is_known(copy):
                self.copies.records.step(copy, back)
                self.copies.compare_later(copy)
            raise

    def _read(self, copy: HostCopy, extent: Extent, cancelled: threading.Event) -> None:
        """Read a host copy from its file. Blocking.

        No view of the memory outlives the call, so that the extent can be frozen afterwards.

        Raises: ResourceError: DATA_LOSS: the file is bad.
        """
        (place,) = find_parts(self.copies.file_of(copy))
        if place.part.digest != copy.digest:
            raise data_loss(place.file, f"it does not have the newest state of {copy}")
        try:
            self.copies.directory.read(place, extent.view(copy.num_bytes), cancelled)
        except ResourceError as error:
            # The traceback's frames hold views of the memory.
            raise error.with_traceback(None) from None


def _needs_host(rank: Rank) -> bool:
    """Whether the rank can only be loaded from host memory."""
    return rank.host_bytes > 0 or rank.has_other_layout


def _shortage_bytes(refusal: ResourceError) -> int:
    """Bytes of host memory that were lacking; 0: something else was refused."""
    details = refusal.info.details
    if "needed_bytes" not in details:
        return 0
    free = int(details["budget_bytes"]) - int(details["used_bytes"])
    return int(details["needed_bytes"]) - free


@dataclass
class VersionMoves:
    """Weights versions that nobody reads give up their host memory when it is short.

    A version is written to disk, unless it is there already, and dropped from memory; the next
    reader reads it again. A prefetched version is dropped altogether, even while it is being
    fetched: its operation fetches it again. A rank that has a version mapped keeps its pages, so
    the ranks are asked to unmap it first. A version stays in memory if a rank uses it, or if its
    extent has another holder.
    """

    ledger: Ledger
    versions: VersionStore
    ranks: Ranks
    directory: StateDirectory
    under_way: dict[Version, asyncio.Future[None]] = field(default_factory=dict, init=False)
    """Versions that are leaving memory, each with a future that completes when the move ends,
    whether or not the version left."""
    _writing: WeakValueDictionary[VersionKey, asyncio.Lock] = field(
        default_factory=WeakValueDictionary, init=False
    )
    """A seal and a lack of memory may want a version on disk at once."""

    def unread(self, *, at_once: bool) -> list[Version]:
        """Versions that may leave host memory, oldest first.

        Args: at_once: True: those that need wait neither for a disk nor for a rank; False: the
              others.
        """
        return [
            version
            for version in self.versions.records.unused()
            if version not in self.under_way
            and not version.is_ahead
            and version.extent is not None
            and self.versions.is_only_holder(version)
            and at_once == (version.is_on_disk and not _alive(version))
        ]

    def ahead(self) -> list[Version]:
        """Prefetched versions and copies of slices, or those being prefetched, oldest first."""
        prefetched = self.versions.records.ahead()
        return [version for version in prefetched if version not in self.under_way]

    async def make_room(self, version: Version) -> None:
        """Free the memory of a version. Raises: ResourceError: the version stays in memory."""
        await (self._give_up(version) if version.is_ahead else self._leave(version))

    async def _give_up(self, version: Version) -> None:
        ended = self.under_way[version] = asyncio.get_running_loop().create_future()
        try:
            await self._until_unmapped(version)
            if not version.is_ahead:
                raise ResourceError(f"version {version.key} is now needed")
            log.info("dropping %s, which was prefetched, because host memory is short", version)
            self.versions.drop(version)
            await self.ledger.until(lambda: not version.users)
        finally:
            del self.under_way[version]
            ended.set_result(None)

    async def _leave(self, version: Version) -> None:
        ended = self.under_way[version] = asyncio.get_running_loop().create_future()
        try:
            with self.versions.using(version):
                await self._until_unmapped(version)
                await self.persist(version)
        finally:
            del self.under_way[version]
            ended.set_result(None)
        if version.is_dropped:
            return
        if version.users or _alive(version):
            raise ResourceError(f"version {version.key} is being read")
        async with self.ledger.change():
            self.versions.leave_memory(version)
        log.info("version %s is now on disk only, because host memory is short", version.key)

    async def persist(self, version: Version) -> None:
        """Write a version to disk, unless it is there already."""
        lock = self._writing.setdefault(version.key, asyncio.Lock())
        async with lock:
            if version.is_on_disk or version.is_dropped:
                return
            key = version.key
            section = Section(version.num_bytes, version.tensors, version.digest)
            header = StateHeader("version", key.policy, key.seq, [section], part=key.part)
            memory, path = self.versions.bytes_of(version), self.directory.version(key)
            with self.versions.using(version):
                await asyncio.to_thread(self.directory.write, path, header, [memory])
                version.is_on_disk = True
            if version.is_dropped:
                await asyncio.to_thread(self.directory.remove, path)

    async def discard(self, version: Version) -> None:
        """Remove a version from memory and disk."""
        self.versions.drop(version)
        if version.is_on_disk:
            await asyncio.to_thread(self.directory.remove, self.directory.version(version.key))

    async def _until_unmapped(self, version: Version) -> None:
        """Have all readers unmap the version, and forget them.

        Raises: ResourceError: a rank uses the version, or opened it meanwhile.
        """
        readers, openings = _alive(version), version.num_openings
        still = [wpg for wpg in readers if not await self._unmaps(wpg, version)]
        if still or version.num_openings != openings:
            raise ResourceError(f"version {version.key} is being read")
        version.readers.clear()

    async def _unmaps(self, wpg: Wpg, version: Version) -> bool:
        for rank in wpg.ranks:
            used = await self.ranks.unmap(rank)
            if used is None:
                return wpg.is_lost
            if version.key in used:
                return False
        return True


def _alive(version: Version) -> list[Wpg]:
    return [wpg for wpg in version.readers if not wpg.is_lost]
