"""Host copies of frozen ranks: shared copies, which are copied only when they are written.

A frozen rank's heap changes by `load_state` and `sync_weights` only. As long as its seq is that of
its host copy there is nothing to copy out; what it has written goes to memory of its own, which
becomes another shared copy. Shared copies are hashed in the background; equal ones become one.

Nothing here overwrites a shared copy: whoever refers to it may be reading.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable

from blake3 import blake3

from phaseloom.common.contract.errors import (
    CallerError,
    Code,
    PhaseloomError,
    ResourceError,
)
from phaseloom.common.contract.ids import VersionKey
from phaseloom.common.contract.state_rank import Copied, CopyOut
from phaseloom.common.tensors.blockhash import digest_of
from phaseloom.statemgr.mesh.permission import check_reader
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.residency.incarnations import SharedCopy
from phaseloom.statemgr.residency.residency import ON_NVME, Rank, State
from phaseloom.statemgr.versions.versions import Version

log = logging.getLogger(__name__)

Reserve = Callable[[int, str], Awaitable[int]]
"""Gives so many bytes of memory that can be made immutable, named so in a refusal."""
_MOVING = frozenset({State.DEMOTING, State.PROMOTING})
_HASHED_BYTES = 16 * 1024 * 1024
"""Between looks at whether to stop."""
_FREEZE_TRIES = 20
_FREEZE_PAUSE_S = 0.05
"""A rank's thread may hold its mapping a moment longer than its answer is under way."""


async def make_room(
    node: Node, reserve: Reserve, rank: Rank, version: Version | None = None
) -> None:
    """A frozen rank is about to write: what it will have to copy out has its place from now on.

    Args:   version: what its heap becomes; it needs no place where that is what it will refer to.
    Raises: as `reserve_copy`, before anything is written.
    """
    if rank.content is None or (version is not None and _is_copy_of(version, rank)):
        return
    await reserve_copy(node, reserve, rank)


async def reserve_copy(node: Node, reserve: Reserve, rank: Rank) -> int:
    """Memory for a new host copy of a frozen rank, as its `extent` until `settle_copy`.

    Raises: ResourceError: RESOURCE_EXHAUSTED with the numbers; its incarnation is over.
    """
    if rank.extent is not None:
        return rank.extent
    what = f"the host copy of {rank.owner}"
    extent = await reserve(rank.extent_bytes, what)
    if rank.state is State.LOST or rank.extent is not None:
        node.memory.free(extent)
        raise ResourceError(f"{rank} was lost, or asked twice", code=Code.ABORTED)
    rank.extent = extent
    return extent


def drop_copy(node: Node, rank: Rank) -> None:
    """Give the memory up that `reserve_copy` has reserved, if it has."""
    if rank.extent is not None:
        node.memory.free(rank.extent)
        rank.extent = None


def settle_copy(node: Node, rank: Rank, applied: int, digest: str) -> None:
    """What its `extent` holds now is the rank's host copy, in place of the one before.

    Args: digest: of what is there. Where a process of a rank has it mapped still, it is not shared.
    """
    assert rank.extent is not None
    node.leave_shared(rank)
    extent, rank.extent = rank.extent, None
    rank.copied(applied, digest)
    rank.held_version = None
    content = node.contents.add(rank, extent)
    node.contents.attach(rank, content)
    node.compare_later(content)


async def copy_out(node: Node, reserve: Reserve, rank: Rank, *, release: bool) -> Copied:
    """Bring the host copy of a resident frozen rank up to date.

    Raises: ResourceError: no memory for what it has written; as `Node.ask`.
    """
    _take_held_version(node, rank)
    rank.is_copying = True
    try:
        return await _copied_out(node, reserve, rank, release=release)
    finally:
        rank.is_copying = False


async def _copied_out(node: Node, reserve: Reserve, rank: Rank, *, release: bool) -> Copied:
    order = CopyOut(release, whole_at=rank.applied, digest=rank.digest)
    copied = await node.ask(rank, order)
    if not copied.changed:
        if (copied.applied, copied.digest) != (rank.applied, rank.digest):
            node.retire(rank.wpg, "it took its host copy for another one")
            raise ResourceError(f"{rank} broke the protocol and was cut off")
        drop_copy(node, rank)
        return copied
    extent = await reserve_copy(node, reserve, rank)
    try:
        copied = await node.ask(rank, CopyOut(release), [node.memory[extent].fd])
        if not copied.digest:
            node.retire(rank.wpg, "it copied out without a digest")
            raise ResourceError(f"{rank} broke the protocol and was cut off")
        if rank.state is State.LOST:
            raise ResourceError(f"{rank} was lost as it had copied out")
    except PhaseloomError:
        drop_copy(node, rank)
        raise
    settle_copy(node, rank, copied.applied, copied.digest)
    return copied


def source_of(node: Node, rank: Rank) -> list[int]:
    """The descriptor that an order to copy in brings where the rank keeps nothing mapped."""
    if not rank.frozen:
        return []
    assert rank.content is not None
    assert rank.content.extent is not None
    return [node.memory[rank.content.extent].read_only_fd]


def hold_version(node: Node, rank: Rank, key: VersionKey, applied: int) -> None:
    """The heap of a frozen rank is what this version is: its memory becomes the host copy.

    Not where the version has another layout, or is gone: then it is copied out as anything else.
    While a seal is prepared, or a copy is under way, the host copy stays what it was; the version
    is taken after that, if it is what the heap holds then.

    Raises: CallerError: PERMISSION_DENIED: the version is of another job; no seq.
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
    node.leave_shared(rank)
    rank.copied(applied, version.digest)
    content = node.contents.of_version(key, version.extent)
    if content is None:
        node.memory.hold(version.extent)
        content = node.contents.add(rank, version.extent, version=key)
    node.contents.attach(rank, content)


def _is_copy_of(version: Version, rank: Rank) -> bool:
    """Whether a rank that has this version could have its bytes for its host copy."""
    return (version.num_bytes, version.table) == (rank.extent_bytes, rank.table)


class Sharing:
    """Finds shared copies that are equal. `start` it in a task group."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._worker: asyncio.Task[None] | None = None
        self._stopped = threading.Event()

    def start(self, tasks: asyncio.TaskGroup) -> None:
        self._worker = tasks.create_task(self._run())

    def stop(self) -> None:
        self._stopped.set()
        if self._worker is not None:
            self._worker.cancel()

    async def _run(self) -> None:
        """One at a time: hashing is nobody's hurry, and takes one core at most."""
        while True:
            await self._identify(await self._node.to_compare.get())

    async def _identify(self, content: SharedCopy) -> None:
        """What of it is not done as it goes down begins again as it comes up."""
        if not await self._freeze(content):
            log.warning("%s is mapped by somebody still: it is not shared", content)
            return
        if not content.hash:
            await self._take_hash(content)
        async with self._node.change():
            if content.hash:
                await self._merge(content)

    async def _freeze(self, content: SharedCopy) -> bool:
        """Only what can never change any more has a hash."""
        for _ in range(_FREEZE_TRIES):
            if not self._is_above(content) or content.is_immutable:
                return True
            assert content.extent is not None
            content.is_immutable = self._node.memory[content.extent].freeze()
            if not content.is_immutable:
                await asyncio.sleep(_FREEZE_PAUSE_S)
        return content.is_immutable

    async def _take_hash(self, content: SharedCopy) -> None:
        if self._is_above(content) and content.is_immutable:
            memory = self._node.shared_memory(content)
            known = await asyncio.to_thread(_hash, memory, self._stopped)
            # What a rank said of it is verified before others come to depend on it.
            if known and await asyncio.to_thread(digest_of, memory) != content.digest:
                for wpg in content.wpgs:
                    self._node.retire(wpg, "its host copy is not what its digest says")
            else:
                content.hash = known

    def _is_above(self, content: SharedCopy) -> bool:
        return self._node.contents.is_known(content) and content.state not in ON_NVME

    async def _merge(self, content: SharedCopy) -> None:
        node, contents = self._node, self._node.contents
        while contents.is_known(content) and (twin := contents.twin(content)) is not None:
            pair = (content, twin)
            if any(each.state in _MOVING for each in pair):
                await node.until(lambda pair=pair: not _is_moving(node, pair))  # type: ignore[misc]
                continue
            kept, gone = pair if content.state is State.HOST else (twin, content)
            if twin.state is State.HOST:
                kept, gone = twin, content
            moved = contents.merge(gone, kept)
            node.free_shared(gone)
            # Ranks keep what they loaded last mapped, and with it its memory. One that does not
            # answer keeps it until it loads again, or is gone.
            for rank in moved:
                await node.unmap(rank)
            log.info("%s is the same as %s: held once", gone, kept)
            content = kept
            node.announce()


def _is_moving(node: Node, contents: tuple[SharedCopy, ...]) -> bool:
    return any(c.state in _MOVING and node.contents.is_known(c) for c in contents)


def _hash(memory: memoryview, stopped: threading.Event) -> str:
    """Empty: stopped."""
    taken = blake3()
    for start in range(0, len(memory), _HASHED_BYTES):
        if stopped.is_set():
            return ""
        taken.update(memory[start : start + _HASHED_BYTES])
    return taken.hexdigest()
