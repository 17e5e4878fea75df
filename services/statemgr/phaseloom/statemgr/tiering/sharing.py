"""Host copies of frozen ranks, which are shared, with copy on write.

Only `load_state` and `sync_weights` change a frozen rank's heap. As long as the heap is at the seq
of its host copy, there is nothing to copy out. After a sync the version's own memory is the host
copy, whatever its layout: the rank loads its tensors from it as the sync did. After a `load_state`
the heap is copied out to new memory, which becomes another copy. Frozen copies are hashed in the
background, and equal ones are merged.

Nothing here overwrites a frozen copy, because any of its users may be reading it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from blake3 import blake3

from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import VersionKey
from phaseloom.common.contract.state_rank import Copied, CopyOut, StageState, VersionLayout
from phaseloom.statemgr.node.background import Background
from phaseloom.statemgr.node.digests import has_digest
from phaseloom.statemgr.node.extents import HostMemory
from phaseloom.statemgr.node.ledger import Ledger
from phaseloom.statemgr.node.ranks import Ranks
from phaseloom.statemgr.node.stores import HostCopyStore
from phaseloom.statemgr.records.incarnations import ON_NVME, HostCopy, Rank, State
from phaseloom.statemgr.records.records import Records
from phaseloom.statemgr.records.versions import Version
from phaseloom.statemgr.records.ways import Way
from phaseloom.statemgr.tiering.heapfiles import HeapFiles
from phaseloom.statemgr.transfer.permission import check_reader

log = logging.getLogger(__name__)

Reserve = Callable[[int, str], Awaitable[int]]
"""Reserves an extent that can be made immutable. Takes its size in bytes and its name in errors,
and returns its number."""
_MOVING = frozenset({State.DEMOTING, State.PROMOTING})
_HASHED_BYTES = 16 * 1024 * 1024
"""Bytes to hash between two checks of whether to stop."""
_FREEZE_TRIES = 20
_FREEZE_PAUSE_S = 0.05
"""Pause between two attempts: a rank's thread may keep a mapping a moment longer than the rank's
answer says."""


@dataclass
class FrozenCopies:
    """Brings host copies up to date; those of frozen ranks only if their heap has changed."""

    records: Records
    memory: HostMemory
    copies: HostCopyStore
    ranks: Ranks
    reserve: Reserve
    heap_files: HeapFiles

    async def make_room(self, rank: Rank, version: Version | None = None) -> None:
        """Reserve memory for the next host copy of a frozen rank that is about to write its heap.
        Nothing is reserved if the copy can go straight to NVMe.

        Args: version: the version that the heap becomes. Nothing is reserved if the version's
              memory can be the rank's host copy.
        """
        is_covered = version is not None and not version.is_manifest
        if rank.frozen and rank.copy is not None and not is_covered:
            try:
                await self.reserve_copy(rank)
            except ResourceError as error:
                is_short = error.info.code is Code.RESOURCE_EXHAUSTED
                if not is_short or await self.heap_files.choose(rank) is Way.HOST:
                    raise

    async def reserve_copy(self, rank: Rank) -> int:
        """Reserve memory for a new host copy of a frozen rank: `new_extent` until `settle_copy`.

        Returns: the number of the extent; if the rank has a `new_extent` already, that one.
        Raises:  ResourceError: RESOURCE_EXHAUSTED with the numbers; ABORTED: the rank's incarnation
                 is over, or another call was faster.
        """
        if rank.new_extent is not None:
            return rank.new_extent
        label = f"the host copy of {rank.owner}"
        extent = await self.reserve(rank.extent_bytes, label)
        if rank.state is State.LOST or rank.new_extent is not None:
            self.memory.free(extent)
            raise ResourceError(f"{rank} was lost, or sent the request twice", code=Code.ABORTED)
        rank.new_extent = extent
        return extent

    def drop_copy(self, rank: Rank) -> None:
        """Free the memory that `reserve_copy` has reserved for the rank, if any."""
        if rank.new_extent is not None:
            self.memory.free(rank.new_extent)
            rank.new_extent = None

    def settle_copy(self, rank: Rank, applied: int, digest: str) -> None:
        """Make the bytes in a frozen rank's `new_extent` its host copy, in place of the old one.

        The new copy is compared with others later. It is not shared while a process has the extent
        mapped writable.

        Args:   applied: the seq of the state in the extent.
                digest: the digest of the bytes in the extent.
        """
        self.copies.detach(rank)
        self.copies.compare_later(self.records.residency.take_new(rank, applied, digest))

    async def copy_out(self, rank: Rank, *, release: bool) -> Copied:
        """Bring the host copy of a resident rank up to date.

        A frozen rank first says whether its heap has changed since its host copy. Only then memory
        is reserved and the heap copied.
        """
        if not rank.frozen:
            if rank.is_below:
                return await self.heap_files.copy_out(rank, release=release)
            return await self.ranks.order(rank, CopyOut(release))
        self._take_held_version(rank)
        rank.is_copying = True
        try:
            order = CopyOut(release, whole_at=rank.applied, digest=rank.digest)
            copied = await self.ranks.order(rank, order)
            if copied.changed and await self.heap_files.choose(rank) is Way.STRAIGHT:
                return await self.heap_files.copy_out(rank, release=release)
            if copied.changed:
                return await self._to_new_copy(
                    rank, lambda fd: self.ranks.order(rank, CopyOut(release), [fd])
                )
            if (copied.applied, copied.digest) != (rank.applied, rank.digest):
                raise self.ranks.broken_protocol(rank, "it reported another host copy")
            self.drop_copy(rank)
            return copied
        finally:
            rank.is_copying = False

    async def _to_new_copy(self, rank: Rank, write: Callable[[int], Awaitable[Copied]]) -> Copied:
        extent = await self.reserve_copy(rank)
        try:
            copied = await write(self.memory[extent].fd)
            if not copied.digest:
                raise self.ranks.broken_protocol(rank, "it copied out without a digest")
            if rank.state is State.LOST:
                raise ResourceError(f"{rank} was lost after it copied out")
        except PhaseloomError:
            self.drop_copy(rank)
            raise
        self.settle_copy(rank, copied.applied, copied.digest)
        return copied

    def source_of(self, rank: Rank) -> list[int]:
        """The descriptors that go with an order to copy in: that of a frozen rank's host copy; none
        for other ranks, which have their extent mapped."""
        if not rank.frozen:
            return []
        assert rank.copy is not None
        assert rank.copy.extent is not None
        return [self.memory[rank.copy.extent].read_only_fd]

    def hold_version(self, rank: Rank, key: VersionKey, applied: int) -> None:
        """Record that a frozen rank has this version, whose memory becomes the rank's host copy.

        If the version was dropped, the heap is copied out as any other. While a seal is prepared or
        a copy is under way, the host copy stays as it is; the version replaces it when the next
        copy begins, if the heap still has the version.

        Raises: CallerError: PERMISSION_DENIED: the version belongs to another job; the seq is
                negative.
        """
        check_reader(rank.wpg, key, None)
        if applied < 0:
            raise CallerError(
                f"seq must not be negative, got {applied}",
                field="applied",
                remedy="use zero or more",
            )
        if rank.state is State.RESIDENT and rank.frozen and not key.part:
            rank.held_version = (key, applied)
            self._take_held_version(rank)

    def _take_held_version(self, rank: Rank) -> None:
        if rank.held_version is None or rank.wpg.prepared is not None or rank.is_copying:
            return
        (key, applied), rank.held_version = rank.held_version, None
        version = self.records.versions.find(key)
        if version is None or not version.is_committed or version.is_manifest:
            return
        if version.extent is None:
            return
        self.drop_copy(rank)
        self.copies.detach(rank)
        rank.applied = applied
        if self.records.host_copies.of_version(key, version.extent) is None:
            self.memory.hold(version.extent)
        self.records.host_copies.add_version(rank, version)

    async def rearrange(self, rank: Rank) -> None:
        """Give a frozen rank a host copy in the layout of its heap, for a seal, which has no other.

        Raises: ResourceError: no host memory; DATA_LOSS; the rank is lost.
        """
        if rank.has_other_layout:
            await self._to_new_copy(rank, partial(self.write_copy, rank, becomes_copy=True))

    async def write_copy(self, rank: Rank, fd: int, *, becomes_copy: bool = False) -> Copied:
        """Have a rank write its host copy, which has another layout, to memory in the layout of its
        heap. The heap is not used."""
        order = StageState(rank.digest, layout_of(rank), becomes_copy)
        return await self.ranks.order(rank, order, [*self.source_of(rank), fd])


def layout_of(rank: Rank) -> VersionLayout | None:
    """The layout of a rank's host copy; None: that of its heap."""
    if rank.copy is None or not rank.has_other_layout:
        return None
    return VersionLayout(rank.copy.num_bytes, rank.copy.table.packed)


@dataclass
class Sharing:
    """The background worker that finds equal frozen copies and merges them."""

    ledger: Ledger
    memory: HostMemory
    copies: HostCopyStore
    ranks: Ranks
    background: Background

    async def run(self) -> None:
        """Compare queued copies one at a time. Hashing is not urgent, so it uses at most one
        core."""
        while True:
            await self._identify(await self.copies.to_compare.get())

    async def _identify(self, copy: HostCopy) -> None:
        """Freeze and hash a frozen copy, and merge it with its equals.

        A copy that is demoted meanwhile is queued again when it is promoted.
        """
        if not await self._freeze(copy):
            log.warning("%s is still mapped writable by a process, so it is not shared", copy)
            return
        if not copy.hash:
            await self._take_hash(copy)
        async with self.ledger.change():
            if copy.hash:
                await self._merge(copy)

    async def _freeze(self, copy: HostCopy) -> bool:
        """Make a copy immutable. Returns: False: a process has it mapped writable."""
        for _ in range(_FREEZE_TRIES):
            if not self._is_above(copy) or copy.is_immutable:
                return True
            assert copy.extent is not None
            copy.is_immutable = self.memory[copy.extent].freeze()
            if not copy.is_immutable:
                await asyncio.sleep(_FREEZE_PAUSE_S)
        return copy.is_immutable

    async def _take_hash(self, copy: HostCopy) -> None:
        if self._is_above(copy) and copy.is_immutable:
            memory = self.copies.bytes_of(copy)
            hash_ = await asyncio.to_thread(_hash, memory, self.background.stopped)
            # The digest comes from a rank, so it is verified before other ranks depend on the copy.
            if hash_ and not await has_digest(memory, copy.digest):
                self.ranks.lose(copy, "its host copy does not match its digest")
            else:
                copy.hash = hash_

    def _is_above(self, copy: HostCopy) -> bool:
        return self.copies.records.is_known(copy) and copy.state not in ON_NVME

    async def _merge(self, copy: HostCopy) -> None:
        records = self.copies.records
        while records.is_known(copy) and (twin := records.twin(copy)) is not None:
            pair = (copy, twin)
            if any(either.state in _MOVING for either in pair):
                await self.ledger.until(partial(self._is_settled, pair))
                continue
            keeper, merged = pair if copy.state is State.HOST else (twin, copy)
            if twin.state is State.HOST:
                keeper, merged = twin, copy
            moved = records.merge(merged, keeper)
            self.copies.free(merged)
            # A rank keeps the copy that it loaded last mapped, and so its memory. A rank that
            # does not answer keeps that memory until it loads again or ends.
            for rank in moved:
                await self.ranks.unmap(rank)
            log.info("%s is equal to %s: merged", merged, keeper)
            copy = keeper
            self.ledger.announce()

    def _is_settled(self, copies: tuple[HostCopy, ...]) -> bool:
        return not any(c.state in _MOVING and self.copies.records.is_known(c) for c in copies)


def _hash(memory: memoryview, stopped: threading.Event) -> str:
    """The BLAKE3 of the memory in hex; empty: it was stopped. Blocking."""
    hasher = blake3()
    for start in range(0, len(memory), _HASHED_BYTES):
        if stopped.is_set():
            return ""
        hasher.update(memory[start : start + _HASHED_BYTES])
    return hasher.hexdigest()
