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

from blake3 import blake3

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.statemgr.checkpoints.files import Checkpoints
from phaseloom.statemgr.checkpoints.snapshots import Snapshot
from phaseloom.statemgr.checkpoints.staging import StagedState
from phaseloom.statemgr.disk.files import StateDirectory, find_parts, header_of
from phaseloom.statemgr.disk.statefile import Place, Section, StateHeader, data_loss, seal_header

_OPERATION_DIGITS = 16


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
            incarnation=snapshot.incarnation,
        )
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
            theirs = [path for path in paths if _is_of(header_of(path), snapshot, rank)]
            found = find_parts((theirs or paths)[0])
            if not theirs:
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
        if self._checkpoints.root is not None:
            place = self._checkpoints.directory(key, "any").parent
            self._directory.discard(*place.glob(f".*.{self._checkpoints.node}.part"))

    def _own(self, snapshot: Snapshot) -> Path:
        """The path of the file with the states of this node's ranks."""
        directory = self._checkpoints.directory(snapshot.key, snapshot.name)
        begin = _beginning(snapshot, snapshot.rank_offset)
        return directory.with_name(f"{begin}.{self._checkpoints.node}.part")

    def _others(self, snapshot: Snapshot) -> list[tuple[int, list[Path]]]:
        """The files of each other node by its first rank, newest first; each node has as many
        ranks. A node may find several files, where the ranks moved."""
        place = self._checkpoints.directory(snapshot.key, snapshot.name).parent
        found = []
        for rank in range(0, snapshot.num_ranks, len(snapshot.parts)):
            if rank != snapshot.rank_offset:
                paths = place.glob(f"{_beginning(snapshot, rank)}.*.part")
                found.append((rank, sorted(paths, key=_written_ns, reverse=True)))
        return found


def _beginning(snapshot: Snapshot, rank: int) -> str:
    """The beginning of the name of the file with the states of a node's ranks, from `rank` on."""
    digits = blake3(snapshot.operation.encode()).hexdigest()[:_OPERATION_DIGITS]
    return f".{snapshot.name}.{digits}-{rank:d}"


def _written_ns(path: Path) -> int:
    """The time of a file's last change, in ns; 0: the file has gone meanwhile."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _is_of(header: StateHeader | None, snapshot: Snapshot, rank: int) -> bool:
    """Whether a file with this header is the part, from `rank` on, of the state in a snapshot."""
    if header is None:
        return False
    is_at = (header.deployment, header.incarnation, header.seq) == (
        snapshot.key,
        snapshot.incarnation,
        snapshot.seq,
    )
    is_theirs = (header.rank_offset, header.num_ranks) == (rank, snapshot.num_ranks)
    return is_at and is_theirs and len(header.parts) == len(snapshot.parts)
