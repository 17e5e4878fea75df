"""The files that a snapshot becomes: those of a checkpoint, or this node's part of one.

Where the ranks of a deployment are on several nodes, each node but rank 0's writes its ranks'
states as a state file under the checkpoint root, beside the place of the checkpoint. Rank 0's node
reads these files and makes whole tensors of all states. So the nodes of a deployment must share the
file system of that root. The name of such a file has a hash of the operation's id, so that a file
for another operation's checkpoint of the same name is never taken for it. The file says which
incarnation was copied, because two incarnations may differ in bits.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.contract.operations import SaveStateResult
from phaseloom.common.contract.state_rank import WriteCheckpoint
from phaseloom.statemgr.checkpoints.files import Checkpoints, writing
from phaseloom.statemgr.checkpoints.marker import Marker
from phaseloom.statemgr.checkpoints.shards import Written, write_state
from phaseloom.statemgr.checkpoints.snapshots import Snapshot
from phaseloom.statemgr.checkpoints.staging import StagedState, Staging, check
from phaseloom.statemgr.disk.files import StateDirectory, find_parts
from phaseloom.statemgr.disk.statefile import (
    Place,
    Section,
    StateHeader,
    data_loss,
    seal_header,
)


class SnapshotFiles:
    def __init__(
        self,
        directory: StateDirectory,
        checkpoints: Checkpoints,
        staging: Staging,
        *,
        file_bytes: int,
    ) -> None:
        """Args: directory: the state directory at the checkpoint root. file_bytes: the most bytes
        of a file of a checkpoint, unless one tensor is larger."""
        self._node = staging.node
        self._directory = directory
        self._checkpoints = checkpoints
        self.node_parts = NodeParts(checkpoints, directory)
        self._staging = staging
        self._file_bytes = file_bytes
        self._numbering = asyncio.Lock()
        """Held from the choice of a checkpoint's number to its commit, so that no two checkpoints
        have the same number."""

    async def write(
        self, snapshot: Snapshot, request: WriteCheckpoint, cancelled: threading.Event
    ) -> str:
        """Write the files of a snapshot.

        Returns: the SHA-256 of the weights; empty: this node wrote only its part.
        Raises:  CallerError: ALREADY_EXISTS: a checkpoint has the name. ResourceError:
                 RESOURCE_EXHAUSTED: the disk or host memory is full; DATA_LOSS; ABORTED: cancelled.
                 After an error no half-written file is left.
        """
        async with self._of_other_nodes(snapshot) as others:
            await self._staging.until_proved(snapshot)
            ranks = self._staged(snapshot)
            if snapshot.rank_offset:
                await asyncio.to_thread(self.node_parts.write, snapshot, ranks, cancelled)
                return ""
            return await self._write(snapshot, request, [*ranks, *others], cancelled)

    @asynccontextmanager
    async def _of_other_nodes(self, snapshot: Snapshot) -> AsyncIterator[list[StagedState]]:
        """The states of other nodes' ranks, which rank 0's node needs to make whole tensors; empty
        on other nodes.

        Raises: PhaseloomError: a state is not there, or there is no host memory for it.
        """
        extents: list[int] = []
        staged: list[StagedState] = []
        try:
            if not snapshot.is_whole and not snapshot.rank_offset:
                for place in await asyncio.to_thread(self.node_parts.find, snapshot):
                    num_bytes = place.part.num_bytes
                    extent = await self._staging.tiering.reserve(
                        num_bytes, f"other ranks' part of {snapshot}"
                    )
                    self._node.unrecorded.add(extent)
                    extents.append(extent)
                    memory = self._node.memory[extent].view(num_bytes)
                    await asyncio.to_thread(self._directory.read, place, memory)
                    index = place.header.rank_offset + place.index
                    staged.append(StagedState(index, place.part.tensors, memory, place.part.blocks))
            yield staged
        finally:
            staged.clear()
            for extent in extents:
                self._node.unrecorded.discard(extent)
                self._node.memory.free(extent)
            self._node.announce()

    async def _write(
        self,
        snapshot: Snapshot,
        request: WriteCheckpoint,
        staged: list[StagedState],
        cancelled: threading.Event,
    ) -> str:
        """Write a checkpoint from all ranks' states. Returns: the SHA-256 of the weights."""
        path = f"{snapshot.key.job}/{snapshot.key.deployment}/{snapshot.name}"
        try:
            written = await asyncio.to_thread(
                self._draft, snapshot, staged, request.config, cancelled
            )
            async with self._numbering:
                with writing():
                    number = await self._checkpoints.next_number(snapshot.key)
                marker = Marker(
                    operation_id=snapshot.operation,
                    result=SaveStateResult(path, written.weights_sha256),
                    seq=snapshot.seq,
                    number=number,
                    keep=request.keep,
                    files=written.files,
                )
                await asyncio.to_thread(
                    self._checkpoints.commit, snapshot.key, snapshot.name, marker
                )
        except BaseException:
            await asyncio.to_thread(self._checkpoints.drop, snapshot.key, snapshot.name)
            raise
        await asyncio.to_thread(self.node_parts.discard, snapshot)
        return written.weights_sha256

    def _draft(
        self, snapshot: Snapshot, staged: list[StagedState], config: str, cancelled: threading.Event
    ) -> Written:
        """Write the draft of a checkpoint, then verify the states that were written. Blocking: call
        it in a thread."""
        written = write_state(
            self._directory.disk,
            self._checkpoints.begin(snapshot.key, snapshot.name),
            [(each.tensors, each.memory) for each in staged],
            config,
            file_bytes=self._file_bytes,
            cancelled=cancelled,
        )
        # All states were read by now: a state that is still whole was whole when it was read.
        check(snapshot.key, staged)
        return written

    def _staged(self, snapshot: Snapshot) -> list[StagedState]:
        """The staged states of this node's ranks in a snapshot, whose checksums are taken."""
        staged = []
        for index, part in enumerate(snapshot.parts, snapshot.rank_offset):
            assert part.checksums is not None
            memory = self._node.memory[part.extent].view(part.num_bytes)
            staged.append(StagedState(index, part.tensors, memory, part.checksums))
        return staged


class NodeParts:
    """The files with nodes' parts of checkpoints that rank 0's node writes. Blocking: call it in a
    thread."""

    def __init__(self, checkpoints: Checkpoints, directory: StateDirectory) -> None:
        self._checkpoints = checkpoints
        self._directory = directory

    def is_written(self, snapshot: Snapshot) -> bool:
        """Whether this node's part of another node's checkpoint is on disk, and of the snapshot's
        incarnation.

        Args: snapshot: its `parts` may be empty.
        """
        header = _header_of(self._own(snapshot))
        return header is not None and header.incarnation == snapshot.incarnation

    def write(
        self, snapshot: Snapshot, ranks: Sequence[StagedState], cancelled: threading.Event
    ) -> None:
        """Write this node's part of a checkpoint.

        Raises: ResourceError: the disk is full, or fails; DATA_LOSS; ABORTED: cancelled.
        """
        sections = [Section(len(each.memory), each.tensors, each.digest) for each in ranks]
        header = seal_header(
            snapshot.key,
            snapshot.seq,
            sections,
            rank_offset=snapshot.rank_offset,
            num_ranks=snapshot.num_ranks,
        )
        header = msgspec.structs.replace(header, incarnation=snapshot.incarnation)
        memories = [each.memory for each in ranks]
        self._directory.write(self._own(snapshot), header, memories, cancelled)

    def find(self, snapshot: Snapshot) -> list[Place]:
        """The places of the states of the other nodes' ranks.

        Raises: CallerError: FAILED_PRECONDITION: a node's part is not under this root.
                ResourceError: DATA_LOSS: a part is bad, or of another snapshot.
        """
        places = []
        for rank, paths in self._others(snapshot):
            if not paths:
                raise CallerError(
                    f"what the ranks from {rank} on have of checkpoint {snapshot.name!r} is not "
                    "under this node's checkpoint root: their node has put it elsewhere",
                    code=Code.FAILED_PRECONDITION,
                    remedy="give the state managers of all nodes of the deployment one "
                    "checkpoint_root, on a file system that they share",
                )
            found = find_parts(_of_incarnation(paths, snapshot.incarnation))
            if not _is_of(found[0].header, snapshot, rank):
                raise data_loss(
                    found[0].file, f"it is another snapshot's than that at {snapshot.seq}"
                )
            places += found
        return places

    def discard(self, snapshot: Snapshot) -> None:
        """Remove the parts of the other nodes, which nobody needs any more."""
        self._directory.discard(*(path for _, paths in self._others(snapshot) for path in paths))

    def forget(self, key: DeploymentKey) -> None:
        """Remove the parts that this node has left for checkpoints of a deployment that is gone."""
        self._directory.discard(*self._checkpoints.parts_left(key))

    def _own(self, snapshot: Snapshot) -> Path:
        return self._checkpoints.part(
            snapshot.key, snapshot.name, snapshot.operation, snapshot.rank_offset
        )

    def _others(self, snapshot: Snapshot) -> list[tuple[int, list[Path]]]:
        """The files of each other node by its first rank; each node has as many ranks."""
        return [
            (
                rank,
                self._checkpoints.parts_of(snapshot.key, snapshot.name, snapshot.operation, rank),
            )
            for rank in range(0, snapshot.num_ranks, len(snapshot.parts))
            if rank != snapshot.rank_offset
        ]


def _of_incarnation(paths: list[Path], incarnation: int) -> Path:
    """The newest file of an incarnation; where there is none, the newest of all. Args: paths: the
    newest first."""
    for path in paths:
        header = _header_of(path)
        if header is not None and header.incarnation == incarnation:
            return path
    return paths[0]


def _header_of(path: Path) -> StateHeader | None:
    """The header of a state file; None: the file is not there, or bad."""
    try:
        return find_parts(path)[0].header
    except PhaseloomError:
        return None


def _is_of(header: StateHeader, snapshot: Snapshot, rank: int) -> bool:
    """Whether a file with this header is the part, from `rank` on, of the state in a snapshot."""
    is_at = (header.deployment, header.incarnation, header.seq) == (
        snapshot.key,
        snapshot.incarnation,
        snapshot.seq,
    )
    is_theirs = (header.rank_offset, header.num_ranks) == (rank, snapshot.num_ranks)
    return is_at and is_theirs and len(header.parts) == len(snapshot.parts)
