"""Taking over what a killed state manager held, from the handles that its agent kept.

The index says what was in memory; nothing is believed that cannot be verified. Weights versions are
there when their digest is right. Of a deployment each rank comes back and says where its state is:
in its heap, which it alone knows, or in its host copy, whose digest must be right. A deployment of
which a rank stays away, or whose copy is bad, is lost: its ranks are cut off.
"""

from __future__ import annotations

import asyncio
import logging
import os

import msgspec

from phaseloom.common.errors import CallerError, Code, ResourceError
from phaseloom.common.framing import Peer, close_fds
from phaseloom.common.ids import DeploymentKey
from phaseloom.common.statewire import RankResume, StateMessage
from phaseloom.statemgr.core.books import Books, RankBook, VersionBook, WpgBook, newest_record
from phaseloom.statemgr.core.layout import unpack
from phaseloom.statemgr.core.residency import ON_NVME, PreparedSeal, Rank, State, Wpg
from phaseloom.statemgr.core.versions import Version
from phaseloom.statemgr.hierarchy import Hierarchy
from phaseloom.statemgr.keeping import INDEX_HANDLES
from phaseloom.statemgr.memory import digest_of
from phaseloom.statemgr.node import Node

log = logging.getLogger(__name__)


class Adoption:
    """`take` every handle, `restore`, let the ranks `resume`, then `finish`."""

    def __init__(self, node: Node, hierarchy: Hierarchy, index: str) -> None:
        self._node = node
        self._hierarchy = hierarchy
        self._index = index
        self._handles: dict[int, int] = {}
        self._missing: set[Rank] = set()
        """They have memory, and did not come back yet."""
        self._lost: list[DeploymentKey] = []

    def take(self, handles: list[int], fds: list[int]) -> None:
        """Raises: CallerError: not one descriptor for each handle, or a handle twice."""
        if len(handles) != len(fds) or self._handles.keys() & set(handles):
            close_fds(fds)
            raise CallerError(f"{len(fds)} descriptors for handles {handles}", field="handles")
        self._handles.update(zip(handles, fds, strict=True))

    async def restore(self, agent: Peer[StateMessage]) -> str:
        """Rebuild the books. Returns the endpoint at which the daemon before served versions."""
        held = set(self._handles)
        try:
            index = [self._handles.pop(handle) for handle in INDEX_HANDLES]
        except KeyError:
            return self._give_up(agent, "its agent keeps no index")
        found = newest_record([os.pread(fd, os.fstat(fd).st_size, 0) for fd in index])
        try:
            books = msgspec.msgpack.decode(found[1] if found else b"", type=Books)
        except msgspec.DecodeError as error:
            close_fds(index)
            return self._give_up(agent, f"its index cannot be read: {error}")
        for key, incarnation in books.fences:
            self._node.residency.fence(key, incarnation)
        for wpg in books.wpgs:
            self._restore_wpg(wpg)
        for version in books.versions:
            await self._restore_version(version)
        for alive in self._node.residency.alive():
            await self._check_prepared(alive)
        close_fds(self._handles.values())
        self._handles.clear()
        # Only now: before, the books that would be recorded were not whole.
        self._node.keeper.take_over(agent, self._index, index, found[0] if found else 0, held)
        return books.endpoint

    def _give_up(self, agent: Peer[StateMessage], why: str) -> str:
        log.error("nothing can be taken over from the daemon before: %s", why)
        close_fds(self._handles.values())
        self._handles.clear()
        self._node.keeper.attach(agent)
        return ""

    def _restore_wpg(self, book: WpgBook) -> None:
        wpg = Wpg(book.key, book.incarnation, book.seal_seq, epoch=book.epoch)
        wpg.sealed = set(book.sealed)
        if book.prepared is not None:
            wpg.prepared = PreparedSeal(book.prepared)
        for index, described in enumerate(book.ranks):
            wpg.ranks.append(Rank(wpg, index, described.device, described.token))
        if max(wpg.devices) >= len(self._node.residency.device_budget_bytes):
            self._lose(wpg, "its device is no longer configured")
            return
        self._node.residency.adopt(wpg)
        for rank, described in zip(wpg.ranks, book.ranks, strict=True):
            if not self._restore_rank(rank, described):
                self._node.residency.end_seal(wpg)
                self._lose(wpg, "its memory is not what the index says")
                return

    def _restore_rank(self, rank: Rank, book: RankBook) -> bool:
        if book.extent is None:
            return True
        name, is_below = f"the host copy of {rank.owner}", book.state in ON_NVME
        if not self._adopt_extent(book.extent, book.heap_bytes, name, is_vacated=is_below):
            return False
        self._node.residency.restore(rank, book.heap_bytes, unpack(book.tensors), book.extent)
        rank.state, rank.applied, rank.digest = book.state, book.applied, book.digest
        self._missing.add(rank)
        return True

    def _adopt_extent(
        self, extent: int, num_bytes: int, name: str, *, is_vacated: bool = False
    ) -> bool:
        fd = self._handles.get(extent)
        if fd is None:
            log.error("the memory for %s was not handed over", name)
            return False
        try:
            self._node.memory.adopt(extent, fd, num_bytes, name, is_vacated=is_vacated)
        except ResourceError as error:
            log.error("%s", error)
            return False
        del self._handles[extent]
        return True

    async def _restore_version(self, book: VersionBook) -> None:
        node = self._node
        if await self._is_version_kept(book):
            return
        log.error("version %s cannot be taken over from memory", book.key)
        # Only its policy can make it again, from the log: whoever syncs it waits for that.
        policy = node.residency.find(book.key.policy)
        if policy is not None and book.digest and node.versions.find(book.key) is None:
            self._lose(policy, f"version {book.key} is bad, and on no disk")

    async def _is_version_kept(self, book: VersionBook) -> bool:
        node = self._node
        if not self._adopt_extent(book.extent, book.num_bytes, f"version {book.key}"):
            return False
        if book.digest:
            memory = node.memory[book.extent].view(book.num_bytes)
            is_good = await asyncio.to_thread(digest_of, memory) == book.digest
        else:
            # Its writer goes on, or is lost and it with it.
            is_good = node.residency.is_alive(book.key.policy, book.incarnation)
        version = Version(
            key=book.key,
            num_bytes=book.num_bytes,
            tensors=unpack(book.tensors),
            digest=book.digest,
            extent=book.extent,
            incarnation=book.incarnation,
        )
        if is_good and node.versions.adopt(version):
            return True
        node.memory.free(book.extent)
        return False

    async def _check_prepared(self, wpg: Wpg) -> None:
        if wpg.prepared is None:
            return
        for rank in wpg.ranks:
            if not await self._is_whole(rank, rank.digest):
                self._node.residency.end_seal(wpg)
                return

    async def _is_whole(self, rank: Rank, digest: str) -> bool:
        assert rank.extent is not None
        memory = self._node.memory[rank.extent].view(rank.heap_bytes)
        return bool(digest) and await asyncio.to_thread(digest_of, memory) == digest

    async def resume(self, message: RankResume) -> Rank:
        """A rank is back. Its word counts for where its state is.

        Raises: CallerError: PERMISSION_DENIED: it is not awaited; FAILED_PRECONDITION: it has
                another heap. ResourceError: DATA_LOSS: its host copy is bad; its life is over.
        """
        node = self._node
        rank = node.residency.known(message.token)
        if rank not in self._missing:
            raise CallerError(f"{rank} is not awaited", code=Code.PERMISSION_DENIED, field="token")
        if (message.heap_bytes, message.tensors) != (rank.heap_bytes, rank.tensors):
            self._lose(rank.wpg, "it came back with another heap")
            raise CallerError(f"{rank} had another heap", code=Code.FAILED_PRECONDITION)
        if not message.filled:
            node.residency.resume(rank, State.FILLING)
        elif message.resident:
            self._occupy(rank)
            node.residency.resume(rank, State.RESIDENT)
        else:
            digest = message.digest or rank.digest
            tier = await self._tier_of(rank, digest)
            if tier is None:
                self._lose(rank.wpg, "its host copy cannot be verified")
                raise ResourceError(f"the host copy of {rank} is bad", code=Code.DATA_LOSS)
            rank.applied, rank.digest = message.applied, digest
            node.residency.resume(rank, tier)
        self._missing.discard(rank)
        node.announce()
        return rank

    def _occupy(self, rank: Rank) -> None:
        """Its heap is where the state is, so its host copy needs its memory again."""
        if rank.state not in ON_NVME or rank.extent is None:
            return
        try:
            self._node.memory.occupy(rank.extent, f"the host copy of {rank.owner}")
        except ResourceError:
            self._lose(rank.wpg, "there is no memory for its host copy any more")
            raise

    async def _tier_of(self, rank: Rank, digest: str) -> State | None:
        """Where its host copy is whole. A kill in the middle of a spill leaves either place."""
        is_below = rank.state in ON_NVME
        if not is_below and await self._is_whole(rank, digest):
            return State.HOST
        if not await asyncio.to_thread(self._hierarchy.is_spilled, rank, digest):
            return None
        if not is_below and rank.extent is not None:
            self._node.memory.vacate(rank.extent)
        return State.SPILLED

    def begin_again(self, token: str) -> None:
        """A rank that has not heard of its extent says hello: it has none."""
        rank = self._node.residency.known(token)
        if rank in self._missing:
            self._missing.discard(rank)
            self._node.memory.free(self._node.residency.reset(rank))
            self._node.announce()

    async def finish(self, timeout_s: float) -> list[DeploymentKey]:
        """Wait for the ranks. Returns the deployments that are lost."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._node.until(lambda: not self._awaited())
        except TimeoutError:
            for wpg in {rank.wpg for rank in self._awaited()}:
                self._lose(wpg, f"not all of its ranks came back within {timeout_s:.0f} s")
        return self._lost

    def _awaited(self) -> list[Rank]:
        return [rank for rank in self._missing if rank.state is not State.LOST]

    def _lose(self, wpg: Wpg, why: str) -> None:
        log.error("%s is lost with the daemon before: %s", wpg, why)
        self._lost.append(wpg.key)
        self._node.retire(wpg, why)
