"""Host copies of frozen ranks, which are shared, with copy on write.

A frozen rank's heap changes by `load_state` and `sync_weights` only. While its heap is at the seq
of its host copy there is nothing to copy out. A heap that was written since is copied out to new
memory, which becomes another copy. Frozen copies are hashed in the background, and equal ones are
merged.

Nothing here overwrites a frozen copy: any of its users may be reading it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable

from blake3 import blake3

from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import VersionKey
from phaseloom.common.contract.state_rank import Copied, CopyOut
from phaseloom.statemgr.node.digests import has_digest
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.records.incarnations import ON_NVME, HostCopy, Rank, State
from phaseloom.statemgr.records.versions import Version
from phaseloom.statemgr.transfer.permission import check_reader

log = logging.getLogger(__name__)

Reserve = Callable[[int, str], Awaitable[int]]
"""Reserves an extent that can be made immutable; takes its size in bytes and its name in a
refusal, and returns its number."""
_MOVING = frozenset({State.DEMOTING, State.PROMOTING})
_HASHED_BYTES = 16 * 1024 * 1024
"""Bytes hashed between two looks at whether to stop."""
_FREEZE_TRIES = 20
_FREEZE_PAUSE_S = 0.05
"""Pause between two tries, in seconds: a rank's thread may keep a mapping a moment longer than the
rank's answer says."""


async def make_room(
    node: Node, reserve: Reserve, rank: Rank, version: Version | None = None
) -> None:
    """Reserve the memory for the next host copy of a frozen rank that is about to write its heap.

    Args:   version: the version that the heap becomes. Where the rank can take the version's
                memory for its host copy, nothing is reserved.
    """
    if not rank.frozen or rank.copy is None or (version is not None and _is_copy_of(version, rank)):
        return
    await reserve_copy(node, reserve, rank)


async def reserve_copy(node: Node, reserve: Reserve, rank: Rank) -> int:
    """Reserve memory for a new host copy of a frozen rank: its `new_extent` until `settle_copy`.

    Returns: the number of the extent; the one that the rank has, where it has one.
    Raises:  ResourceError: RESOURCE_EXHAUSTED with the numbers; ABORTED: the rank's incarnation
             is over, or another call was faster.
    """
    if rank.new_extent is not None:
        return rank.new_extent
    what = f"the host copy of {rank.owner}"
    extent = await reserve(rank.extent_bytes, what)
    if rank.state is State.LOST or rank.new_extent is not None:
        node.memory.free(extent)
        raise ResourceError(f"{rank} was lost, or asked twice", code=Code.ABORTED)
    rank.new_extent = extent
    return extent


def drop_copy(node: Node, rank: Rank) -> None:
    """Free the memory that `reserve_copy` has reserved for the rank, if there is any."""
    if rank.new_extent is not None:
        node.memory.free(rank.new_extent)
        rank.new_extent = None


def settle_copy(node: Node, rank: Rank, applied: int, digest: str) -> None:
    """Make the bytes in a frozen rank's `new_extent` its host copy, in place of the one before.

    The new copy is compared with others later. While a process has the extent mapped writable, it
    is not shared.

    Args:   applied: the seq of the state in the extent.
            digest: the digest of the bytes in the extent.
    """
    node.leave_copy(rank)
    node.compare_later(node.residency.take_new(rank, applied, digest))


async def copy_out(node: Node, reserve: Reserve, rank: Rank, *, release: bool) -> Copied:
    """Bring the host copy of a resident frozen rank up to date.

    The rank is first asked whether its heap has changed since its host copy; only then is memory
    reserved, and the heap copied.
    """
    _take_held_version(node, rank)
    rank.is_copying = True
    try:
        order = CopyOut(release, whole_at=rank.applied, digest=rank.digest)
        copied = await node.ask(rank, order)
        if copied.changed:
            return await _copied_out(node, reserve, rank, release=release)
        if (copied.applied, copied.digest) != (rank.applied, rank.digest):
            raise node.broken_protocol(rank, "it took its host copy for another one")
        drop_copy(node, rank)
        return copied
    finally:
        rank.is_copying = False


async def _copied_out(node: Node, reserve: Reserve, rank: Rank, *, release: bool) -> Copied:
    extent = await reserve_copy(node, reserve, rank)
    try:
        copied = await node.ask(rank, CopyOut(release), [node.memory[extent].fd])
        if not copied.digest:
            raise node.broken_protocol(rank, "it copied out without a digest")
        if rank.state is State.LOST:
            raise ResourceError(f"{rank} was lost as it had copied out")
    except PhaseloomError:
        drop_copy(node, rank)
        raise
    settle_copy(node, rank, copied.applied, copied.digest)
    return copied


def source_of(node: Node, rank: Rank) -> list[int]:
    """The descriptors that go with an order to copy in: that of the host copy for a frozen rank;
    none for other ranks, which have their extent mapped."""
    if not rank.frozen:
        return []
    assert rank.copy is not None
    assert rank.copy.extent is not None
    return [node.memory[rank.copy.extent].read_only_fd]


def hold_version(node: Node, rank: Rank, key: VersionKey, applied: int) -> None:
    """Note that the heap of a frozen rank equals this version, whose memory becomes its host copy.

    Where the version has another layout, or is gone, the heap is copied out as any other. While a
    seal is prepared or a copy is under way, the host copy stays as it was. The version is taken
    when the next copy begins, if the heap still equals it.

    Raises: CallerError: PERMISSION_DENIED: the version belongs to another job; the seq is negative.
    """
    check_reader(rank.wpg, key, None)
    if applied < 0:
        raise CallerError(f"seq {applied}", field="applied", remedy="use zero or more")
    if rank.state is State.RESIDENT and rank.frozen and not key.part:
        rank.held_version = (key, applied)
        _take_held_version(node, rank)


def _take_held_version(node: Node, rank: Rank) -> None:
    if rank.held_version is None or rank.wpg.prepared is not None or rank.is_copying:
        return
    (key, applied), rank.held_version = rank.held_version, None
    version = node.versions.find(key)
    if version is None or not version.is_committed or version.extent is None:
        return
    if not _is_copy_of(version, rank):
        return
    drop_copy(node, rank)
    node.leave_copy(rank)
    rank.applied = applied
    copy = node.host_copies.of_version(key, version.extent)
    if copy is None:
        node.memory.hold(version.extent)
        node.host_copies.add(rank, version.extent, version.digest, key)
    else:
        node.host_copies.attach(rank, copy)


def _is_copy_of(version: Version, rank: Rank) -> bool:
    """Whether the version has the rank's size and layout, so that its bytes can be the rank's host
    copy."""
    return (version.num_bytes, version.table) == (rank.extent_bytes, rank.table)


class Sharing:
    """The background worker that finds equal frozen copies and merges them."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def run(self) -> None:
        """Compare the queued copies one at a time: hashing is not urgent, so it takes one core at
        most."""
        while True:
            await self._identify(await self._node.to_compare.get())

    async def _identify(self, copy: HostCopy) -> None:
        """Freeze and hash a frozen copy, and merge it with its equals.

        A copy that is demoted meanwhile is queued again when it is promoted.
        """
        if not await self._freeze(copy):
            log.warning("%s is mapped by somebody still: it is not shared", copy)
            return
        if not copy.hash:
            await self._take_hash(copy)
        async with self._node.change():
            if copy.hash:
                await self._merge(copy)

    async def _freeze(self, copy: HostCopy) -> bool:
        """Make a copy immutable, which it must be before it is hashed.

        Returns: False: a process has it mapped writable still.
        """
        for _ in range(_FREEZE_TRIES):
            if not self._is_above(copy) or copy.is_immutable:
                return True
            assert copy.extent is not None
            copy.is_immutable = self._node.memory[copy.extent].freeze()
            if not copy.is_immutable:
                await asyncio.sleep(_FREEZE_PAUSE_S)
        return copy.is_immutable

    async def _take_hash(self, copy: HostCopy) -> None:
        if self._is_above(copy) and copy.is_immutable:
            memory = self._node.bytes_of(copy)
            known = await asyncio.to_thread(_hash, memory, self._node.background.stopped)
            # The digest is a rank's word: it is verified before other ranks depend on the copy.
            if known and not await has_digest(memory, copy.digest):
                for wpg in copy.wpgs:
                    self._node.retire(wpg, "its host copy is not what its digest says")
            else:
                copy.hash = known

    def _is_above(self, copy: HostCopy) -> bool:
        return self._node.host_copies.is_known(copy) and copy.state not in ON_NVME

    async def _merge(self, copy: HostCopy) -> None:
        node, copies = self._node, self._node.host_copies
        while copies.is_known(copy) and (twin := copies.twin(copy)) is not None:
            pair = (copy, twin)
            if any(each.state in _MOVING for each in pair):
                await node.until(lambda pair=pair: not _is_moving(node, pair))  # type: ignore[misc]
                continue
            kept, gone = pair if copy.state is State.HOST else (twin, copy)
            if twin.state is State.HOST:
                kept, gone = twin, copy
            moved = copies.merge(gone, kept)
            node.free_copy(gone)
            # A rank keeps the copy that it loaded last mapped, and with it its memory. A rank that
            # does not answer keeps that memory until it loads again, or is gone.
            for rank in moved:
                await node.unmap(rank)
            log.info("%s is the same as %s: held once", gone, kept)
            copy = kept
            node.announce()


def _is_moving(node: Node, copies: tuple[HostCopy, ...]) -> bool:
    return any(c.state in _MOVING and node.host_copies.is_known(c) for c in copies)


def _hash(memory: memoryview, stopped: threading.Event) -> str:
    """The BLAKE3 of the memory in hex; empty where it was stopped. Blocking: called in a thread."""
    taken = blake3()
    for start in range(0, len(memory), _HASHED_BYTES):
        if stopped.is_set():
            return ""
        taken.update(memory[start : start + _HASHED_BYTES])
    return taken.hexdigest()
