"""Checkpoints of deployments whose ranks are on several nodes.

Each node but rank 0's puts its ranks' cut as a state file under the checkpoint root, beside where
the checkpoint will be; rank 0's node reads these and makes whole tensors of all of it. So the nodes
of a deployment must share the file system of that root. Files carry the operation's name: those of
another attempt to write a checkpoint of the same name are never taken for its. They say which life
was cut: of one that was rebuilt nothing is put together with what the life before has left, for the
two may differ in bits. Blocking: call it in a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.statemgr.checkpoints.files import Checkpoints
from phaseloom.statemgr.checkpoints.snapshots import Snapshot
from phaseloom.statemgr.checkpoints.stagedstate import StagedState
from phaseloom.statemgr.disk.files import StateDirectory, find_parts
from phaseloom.statemgr.disk.statefile import (
    Place,
    Section,
    StateHeader,
    data_loss,
    seal_header,
)


class NodeParts:
    def __init__(self, checkpoints: Checkpoints, directory: StateDirectory) -> None:
        self._checkpoints = checkpoints
        self._directory = directory

    def is_written(self, cut: Snapshot) -> bool:
        """Whether this node's is there, of the same life."""
        header = _header_of(self._own(cut))
        return header is not None and header.incarnation == cut.incarnation

    def write(
        self, cut: Snapshot, ranks: Sequence[StagedState], cancelled: threading.Event
    ) -> None:
        """This node's.

        Raises: ResourceError: the disk is full, or fails; DATA_LOSS; ABORTED: cancelled.
        """
        sections = [Section(len(each.memory), each.tensors, each.digest) for each in ranks]
        header = seal_header(
            cut.key, cut.seq, sections, rank_offset=cut.rank_offset, num_ranks=cut.num_ranks
        )
        header = msgspec.structs.replace(header, incarnation=cut.incarnation)
        memories = [each.memory for each in ranks]
        self._directory.write(self._own(cut), header, memories, cancelled)

    def find(self, cut: Snapshot) -> list[Place]:
        """The ranks' of the other nodes.

        Raises: CallerError: FAILED_PRECONDITION: a node's part is not under this root.
                ResourceError: DATA_LOSS: it is bad, or of another cut.
        """
        places = []
        for rank, paths in self._others(cut):
            if not paths:
                raise CallerError(
                    f"what the ranks from {rank} on have of checkpoint {cut.name!r} is not under "
                    "this node's checkpoint root: their node has put it elsewhere",
                    code=Code.FAILED_PRECONDITION,
                    remedy="give the state managers of all nodes of the deployment one "
                    "checkpoint_root, on a file system that they share",
                )
            found = find_parts(_of_life(paths, cut.incarnation))
            if not _is_of(found[0].header, cut, rank):
                raise data_loss(found[0].file, f"it is another cut's than that at {cut.seq}")
            places += found
        return places

    def read(self, place: Place, memory: memoryview) -> None:
        """Verified. Raises: ResourceError: DATA_LOSS."""
        self._directory.read(place, memory)

    def discard(self, cut: Snapshot) -> None:
        """Nobody needs the others' any more."""
        self._directory.discard(*(path for _, paths in self._others(cut) for path in paths))

    def forget(self, key: DeploymentKey) -> None:
        """Of a deployment that is here no more: what this node has left, if nobody took it."""
        self._directory.discard(*self._checkpoints.parts_left(key))

    def _own(self, cut: Snapshot) -> Path:
        return self._checkpoints.part(cut.key, cut.name, cut.operation, cut.rank_offset)

    def _others(self, cut: Snapshot) -> list[tuple[int, list[Path]]]:
        """By the first of their ranks: as many are on each node."""
        return [
            (rank, self._checkpoints.parts_of(cut.key, cut.name, cut.operation, rank))
            for rank in range(0, cut.num_ranks, len(cut.parts))
            if rank != cut.rank_offset
        ]


def _of_life(paths: list[Path], incarnation: int) -> Path:
    """The newest that is of this life; where none is, the newest."""
    for path in paths:
        header = _header_of(path)
        if header is not None and header.incarnation == incarnation:
            return path
    return paths[0]


def _header_of(path: Path) -> StateHeader | None:
    """None: it is not there, or bad."""
    try:
        return find_parts(path)[0].header
    except PhaseloomError:
        return None


def _is_of(header: StateHeader, cut: Snapshot, rank: int) -> bool:
    """Whether it is the part from this rank on of the state that was cut."""
    is_at = (header.deployment, header.incarnation, header.seq) == (
        cut.key,
        cut.incarnation,
        cut.seq,
    )
    is_theirs = (header.rank_offset, header.num_ranks) == (rank, cut.num_ranks)
    return is_at and is_theirs and len(header.parts) == len(cut.parts)
