"""Loads a checkpoint's files into ranks' memory.

The states of all ranks are read into staging buffers and verified before the first rank is changed.
A rank without state is filled directly.
"""

from __future__ import annotations

import asyncio
import logging

from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError
from phaseloom.common.contract.ids import saved_by
from phaseloom.common.contract.state_rank import CheckpointRead, LoadStaged, ReadCheckpoint
from phaseloom.common.tensors.blockhash import digest_of
from phaseloom.statemgr.checkpoints.files import Checkpoints
from phaseloom.statemgr.checkpoints.savedstate import SavedState
from phaseloom.statemgr.checkpoints.staging import Staging
from phaseloom.statemgr.disk.disk import Disk
from phaseloom.statemgr.residency.incarnations import Rank, State, Wpg
from phaseloom.statemgr.sharing import sharing
from phaseloom.statemgr.tiering.switching import on_each_device

log = logging.getLogger(__name__)


class Loader:
    def __init__(self, disk: Disk, checkpoints: Checkpoints, staging: Staging) -> None:
        """Args: disk: the disk of the checkpoint root."""
        self._disk = disk
        self._checkpoints = checkpoints
        self._staging = staging

    async def read(self, rank: Rank, request: ReadCheckpoint) -> CheckpointRead:
        """Load a checkpoint: for a rank that has no state yet into that rank, else, asked by the
        leader, into all ranks. Raises: as `ReadCheckpoint` says."""
        wpg = rank.wpg
        key = saved_by(wpg.key, request.source)
        directory = await self._checkpoints.existing(key, request.name)
        saved = await SavedState.open(self._disk, directory, has_training=request.optimizer)
        sha256 = saved.marker.result.weights_sha256 if saved.marker is not None else ""
        if rank.state is State.FILLING:
            return CheckpointRead(sha256, await self._fill(rank, saved))
        if rank.index:
            raise CallerError(
                f"{rank} is not the leader, which alone loads", code=Code.PERMISSION_DENIED
            )
        saved.check_fits(slot for each in wpg.ranks for slot in each.tensors)
        async with self._staging.room_for(wpg) as extents:
            both = zip(wpg.ranks, extents, strict=True)
            memories = {each: self._staging.view(each, extent) for each, extent in both}
            digests = await _filled(saved, memories)
            memories.clear()
            await self._load(wpg, extents, digests)
        log.info("checkpoint %r of %s is loaded", request.name, wpg.key)
        return CheckpointRead(sha256)

    async def _fill(self, rank: Rank, saved: SavedState) -> str:
        """Fill the extent of a rank that has no state yet. Returns: the digest of its memory."""
        if rank.wpg.seal_seq or rank.extent is None:
            raise CallerError(f"{rank} awaits no initial state", code=Code.FAILED_PRECONDITION)
        saved.check_fits(rank.tensors)
        memory = self._staging.view(rank, rank.extent)
        (digest,) = await _filled(saved, {rank: memory})
        return digest

    async def _load(self, wpg: Wpg, extents: list[int], digests: list[str]) -> None:
        """Have all ranks load their staged states. Where one fails, the incarnation is over: nobody
        knows what the other ranks hold."""
        node = self._staging.node
        sources = dict(zip(wpg.ranks, zip(extents, digests, strict=True), strict=True))

        async def load(rank: Rank) -> None:
            extent, digest = sources[rank]
            await node.ask(rank, LoadStaged(digest), [node.memory[extent].fd])

        async with node.holding(lambda: set(wpg.devices)):
            for rank in wpg.ranks:
                if rank.state is not State.RESIDENT:
                    raise CallerError(f"{rank} is {rank.state}", code=Code.FAILED_PRECONDITION)
                await sharing.make_room(node, self._staging.tiering.reserve_frozen, rank)
            try:
                await on_each_device(wpg.ranks, load)
            except PhaseloomError:
                node.retire(wpg, "a checkpoint was loaded in part")
                raise


async def _filled(saved: SavedState, memories: dict[Rank, memoryview]) -> list[str]:
    """Fill the memories of ranks from a checkpoint. Returns: the digest of each.

    Raises: ResourceError: the first failure, once no thread fills memory any more.
    """
    fills = [asyncio.to_thread(_fill, saved, rank, m) for rank, m in memories.items()]
    digests = []
    for ended in await asyncio.gather(*fills, return_exceptions=True):
        if isinstance(ended, BaseException):
            raise ended
        digests.append(ended)
    return digests


def _fill(saved: SavedState, rank: Rank, memory: memoryview) -> str:
    """Fill the memory of a rank. Returns: the memory's digest. Blocking: call it in a thread."""
    saved.fill(rank.tensors, memory)
    return digest_of(memory)
