"""A checkpoint into ranks' memory, from the nearest whole copy of it.

That is what was written last, while its memory is idle; a seal of the same bytes; or the files. All
ranks' parts are read and verified into memory of their own before the first rank is touched.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence

from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.contract.state_rank import (
    CheckpointRead,
    CopyFrom,
    LoadedFrom,
    ReadCheckpoint,
)
from phaseloom.common.tensors.blockhash import digest_of
from phaseloom.statemgr.checkpoints.apart import Apart
from phaseloom.statemgr.checkpoints.files import Checkpoints
from phaseloom.statemgr.checkpoints.savedstate import SavedState
from phaseloom.statemgr.core.residency import Rank, State, Wpg
from phaseloom.statemgr.disk.disk import Disk
from phaseloom.statemgr.disk.files import NEVER
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.seals.sealedcopies import SealedCopies, SealedCopy
from phaseloom.statemgr.tiers import sharing
from phaseloom.statemgr.tiers.switching import on_each_device

log = logging.getLogger(__name__)


class Loader:
    def __init__(
        self, node: Node, disk: Disk, checkpoints: Checkpoints, apart: Apart, sealed: SealedCopies
    ) -> None:
        """Args: disk: the checkpoint root's."""
        self._node = node
        self._disk = disk
        self._checkpoints = checkpoints
        self._apart = apart
        self._sealed = sealed

    async def read(self, rank: Rank, request: ReadCheckpoint) -> CheckpointRead:
        """Raises: as `ReadCheckpoint` says."""
        wpg = rank.wpg
        directory = await self._checkpoints.existing(wpg.key, request.name)
        saved = await SavedState.open(self._disk, directory)
        sha256 = saved.marker.result.weights_sha256 if saved.marker is not None else ""
        if rank.state is State.FILLING:
            source, digest = await self._fill(rank, saved)
            return CheckpointRead(sha256, digest, source)
        if rank.index:
            raise CallerError(
                f"{rank} is not the leader, which alone loads", code=Code.PERMISSION_DENIED
            )
        saved.check_fits(slot for each in wpg.ranks for slot in each.tensors)
        async with self._apart.taken_back(wpg, saved.marker) as kept:
            if kept is not None:
                await self._load(wpg, kept.cut.extents, kept.digests)
                return CheckpointRead(sha256, source=LoadedFrom.CUT)
        async with self._apart.room(wpg) as extents:
            both = zip(wpg.ranks, extents, strict=True)
            memories = {each: self._apart.view(each, extent) for each, extent in both}
            source, digests = await self._filled(saved, memories)
            memories.clear()
            await self._load(wpg, extents, digests)
        log.info("checkpoint %r of %s is loaded from %s", request.name, wpg.key, source)
        return CheckpointRead(sha256, source=source)

    async def _fill(self, rank: Rank, saved: SavedState) -> tuple[LoadedFrom, str]:
        """A rank that has no state yet: straight into its extent."""
        if rank.wpg.seal_seq or rank.extent is None:
            raise CallerError(f"{rank} awaits no initial state", code=Code.FAILED_PRECONDITION)
        saved.check_fits(rank.tensors)
        memory = self._apart.view(rank, rank.extent)
        source, (digest,) = await self._filled(saved, {rank: memory})
        return source, digest

    async def _filled(
        self, saved: SavedState, memories: dict[Rank, memoryview]
    ) -> tuple[LoadedFrom, list[str]]:
        """Fill ranks' memories from the nearest whole copy. Returns that, and their digests.

        Raises: ResourceError: DATA_LOSS: the files are bad, and there is no other.
        """
        (wpg, *_), marker = [rank.wpg for rank in memories], saved.marker
        digests = [] if marker is None else marker.digests
        seq = 0 if marker is None else marker.seq
        for copy in await self._sealed.find(wpg, seq, digests):
            reads = [
                asyncio.to_thread(_read, copy, digests[rank.index], rank.index, memory)
                for rank, memory in memories.items()
            ]
            try:
                return copy.source, await _all(reads)
            except ResourceError as error:
                log.warning("%s; there may be another copy", error)
        fills = [asyncio.to_thread(_fill, saved, rank, m) for rank, m in memories.items()]
        return LoadedFrom.FILES, await _all(fills)

    async def _load(self, wpg: Wpg, extents: list[int], digests: list[str]) -> None:
        """All ranks or none: where one fails, nobody knows what the others hold."""
        node = self._node
        sources = dict(zip(wpg.ranks, zip(extents, digests, strict=True), strict=True))

        async def load(rank: Rank) -> None:
            extent, digest = sources[rank]
            await node.ask(rank, CopyFrom(digest), [node.memory[extent].fd])

        async with node.holding(lambda: set(wpg.devices)):
            for rank in wpg.ranks:
                if rank.state is not State.RESIDENT:
                    raise CallerError(f"{rank} is {rank.state}", code=Code.FAILED_PRECONDITION)
                await sharing.make_room(node, rank)
            try:
                await on_each_device(wpg.ranks, load)
            except PhaseloomError:
                node.retire(wpg, "a checkpoint was loaded in part")
                raise


async def _all(works: Sequence[Awaitable[str]]) -> list[str]:
    """Raises: the first failure, once none is under way any more."""
    digests = []
    for ended in await asyncio.gather(*works, return_exceptions=True):
        if isinstance(ended, BaseException):
            raise ended
        digests.append(ended)
    return digests


def _fill(saved: SavedState, rank: Rank, memory: memoryview) -> str:
    """Returns the memory's digest. In a thread."""
    saved.fill(rank.tensors, memory, NEVER)
    return digest_of(memory)


def _read(copy: SealedCopy, digest: str, index: int, memory: memoryview) -> str:
    """Returns the memory's digest. In a thread."""
    copy.read(copy.places[index], memory)
    return digest
