"""Parts of checkpoints: the states that each node of a deployment leaves for rank 0's node.

Where the ranks of a deployment are on several nodes, each node but rank 0's writes its ranks'
states as a state file under the checkpoint root, beside the place of the checkpoint. Rank 0's node
reads these files and makes whole tensors of all states. So the nodes of a deployment must share the
file system of that root. The name of such a file has a hash of the operation's id, so that a file
for another operation's checkpoint of the same name is never taken for it. The file says which
incarnation was copied, because two incarnations may differ in bits.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.statemgr.checkpoints.files import Checkpoints
from phaseloom.statemgr.checkpoints.snapshots import Snapshot
from phaseloom.statemgr.checkpoints.staging import StagedState
from phaseloom.statemgr.disk.files import StateDirectory, find_parts, header_of
from phaseloom.statemgr.disk.statefile import (
    Place,
    Section,
    StateHeader,
    data_loss,
    seal_header,
)


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
        header = header_of(self._own(snapshot))
        return header is not None and header.incarnation == snapshot.incarnation

    def write(
        self, snapshot: Snapshot, ranks: Sequence[StagedState], cancelled: threading.Event
    ) -> None:
        """Write this node's part of a checkpoint."""
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
        header = header_of(path)
        if header is not None and header.incarnation == incarnation:
            return path
    return paths[0]


def _is_of(header: StateHeader, snapshot: Snapshot, rank: int) -> bool:
    """Whether a file with this header is the part, from `rank` on, of the state in a snapshot."""
    is_at = (header.deployment, header.incarnation, header.seq) == (
        snapshot.key,
        snapshot.incarnation,
        snapshot.seq,
    )
    is_theirs = (header.rank_offset, header.num_ranks) == (rank, snapshot.num_ranks)
    return is_at and is_theirs and len(header.parts) == len(snapshot.parts)
