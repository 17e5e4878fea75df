"""What a cut becomes on disk: the files of a checkpoint, or this node's part of one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.contract.operations import SaveStateResult
from phaseloom.common.contract.state_rank import WriteCheckpoint
from phaseloom.statemgr.checkpoints.files import Checkpoints, writing
from phaseloom.statemgr.checkpoints.marker import Marker
from phaseloom.statemgr.checkpoints.nodeparts import NodeParts
from phaseloom.statemgr.checkpoints.shards import Written, write_state
from phaseloom.statemgr.checkpoints.snapshots import Snapshot
from phaseloom.statemgr.checkpoints.stagedstate import SnapshotSums, StagedState, check
from phaseloom.statemgr.disk.files import StateDirectory
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.tiering.tiering import Tiering


class SnapshotFiles:
    def __init__(
        self,
        node: Node,
        tiering: Tiering,
        directory: StateDirectory,
        checkpoints: Checkpoints,
        sums: SnapshotSums,
        *,
        file_bytes: int,
    ) -> None:
        """Args: directory, file_bytes: as `Exporter`."""
        self._node = node
        self._tiering = tiering
        self._disk = directory.disk
        self._checkpoints = checkpoints
        self._node_parts = NodeParts(checkpoints, directory)
        self._sums = sums
        self._file_bytes = file_bytes
        self._numbering = asyncio.Lock()
        """From a checkpoint's number to its commit: no two have the same."""

    async def write(
        self, cut: Snapshot, request: WriteCheckpoint, cancelled: threading.Event
    ) -> str:
        """Returns the SHA-256 of the weights; empty: this was a part.

        Raises: CallerError: ALREADY_EXISTS. ResourceError: RESOURCE_EXHAUSTED, the disk or host
                memory is full; DATA_LOSS; ABORTED: cancelled. Nothing of it is left then.
        """
        async with self._of_other_nodes(cut) as others:
            await self._sums.taken(cut)
            ranks = self._held(cut)
            if cut.rank_offset:
                await asyncio.to_thread(self._leave_part, cut, ranks, cancelled)
                return ""
            return await self._write(cut, request, [*ranks, *others], cancelled)

    async def has_left_part(self, cut: Snapshot) -> bool:
        """Whether this node's part of another's checkpoint is on disk already.

        Args: cut: it may have no parts any more.
        """
        return await asyncio.to_thread(self._node_parts.is_written, cut)

    async def forget(self, key: DeploymentKey) -> None:
        """What this node has left of a deployment's, if nobody took it."""
        await asyncio.to_thread(self._node_parts.forget, key)

    @asynccontextmanager
    async def _of_other_nodes(self, cut: Snapshot) -> AsyncIterator[list[StagedState]]:
        """What rank 0's node needs of the others to make whole tensors.

        Raises: PhaseloomError: it is not there, or there is no host memory for it.
        """
        extents: list[int] = []
        held: list[StagedState] = []
        try:
            if not cut.is_whole and not cut.rank_offset:
                for place in await asyncio.to_thread(self._node_parts.find, cut):
                    num_bytes = place.part.num_bytes
                    extent = await self._tiering.reserve(num_bytes, f"other ranks' part of {cut}")
                    self._node.cuts.lend(extent)
                    extents.append(extent)
                    memory = self._node.memory[extent].view(num_bytes)
                    await asyncio.to_thread(self._node_parts.read, place, memory)
                    index = place.header.rank_offset + place.index
                    held.append(StagedState(index, place.part.tensors, memory, place.part.blocks))
            yield held
        finally:
            held.clear()
            for extent in extents:
                self._node.cuts.give_back(extent)
                self._node.memory.free(extent)
            self._node.announce()

    def _leave_part(
        self, cut: Snapshot, ranks: list[StagedState], cancelled: threading.Event
    ) -> None:
        check(cut.key, ranks)
        self._node_parts.write(cut, ranks, cancelled)

    async def _write(
        self,
        cut: Snapshot,
        request: WriteCheckpoint,
        held: list[StagedState],
        cancelled: threading.Event,
    ) -> str:
        """Returns the SHA-256 of the weights."""
        path = f"{cut.key.job}/{cut.key.deployment}/{cut.name}"
        try:
            written = await asyncio.to_thread(self._draft, cut, held, request.config, cancelled)
            async with self._numbering:
                with writing():
                    number = await self._checkpoints.next_number(cut.key)
                marker = Marker(
                    operation_id=cut.operation,
                    result=SaveStateResult(path, written.weights_sha256),
                    seq=cut.seq,
                    number=number,
                    keep=request.keep,
                    files=written.files,
                )
                await asyncio.to_thread(self._checkpoints.commit, cut.key, cut.name, marker)
        except BaseException:
            await asyncio.to_thread(self._checkpoints.drop, cut.key, cut.name)
            raise
        await asyncio.to_thread(self._node_parts.discard, cut)
        return written.weights_sha256

    def _draft(
        self, cut: Snapshot, held: list[StagedState], config: str, cancelled: threading.Event
    ) -> Written:
        """In a thread."""
        written = write_state(
            self._disk,
            self._checkpoints.begin(cut.key, cut.name),
            [(each.tensors, each.memory) for each in held],
            config,
            file_bytes=self._file_bytes,
            cancelled=cancelled,
        )
        # All that was written was read by now: what is still whole was whole then.
        check(cut.key, held)
        return written

    def _held(self, cut: Snapshot) -> list[StagedState]:
        """Its checksums are in."""
        held = []
        for index, part in enumerate(cut.parts, cut.rank_offset):
            assert part.checksums is not None
            memory = self._node.memory[part.extent].view(part.num_bytes)
            held.append(StagedState(index, part.tensors, memory, part.checksums))
        return held
