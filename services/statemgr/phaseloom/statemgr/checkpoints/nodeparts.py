"""Parts of checkpoints: the states that each node of a deployment leaves for rank 0's node.

Where the ranks of a deployment are on several nodes, each node but rank 0's writes its ranks'
states as a state file under the checkpoint root, beside the place of the checkpoint. Rank 0's node
reads these files and makes whole tensors of all states. So the nodes of a deployment must share the
file system of that root. The name of such a file has a hash of the operation's id, and the
incarnation that was copied: two incarnations may differ in bits, and are never mixed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.statemgr.checkpoints.files import Checkpoints
from phaseloom.statemgr.checkpoints.staging import StagedState
from phaseloom.statemgr.disk.files import StateDirectory, find_parts, header_of
from phaseloom.statemgr.records.seals import seal_header
from phaseloom.statemgr.records.snapshots import Snapshot
from phaseloom.statemgr.records.stateheader import Place, Section

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
        return header_of(self._own(snapshot)) is not None

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
        memories = [each.memory for each in ranks]
        self._directory.write(self._own(snapshot), header, memories, cancelled)

    def find(self, snapshot: Snapshot) -> list[Place]:
        """The places of the states of the other nodes' ranks.

        Raises: CallerError: FAILED_PRECONDITION: a node's part is not under this root.
                ResourceError: DATA_LOSS: a part is bad.
        """
        place = self._checkpoints.directory(snapshot.key, snapshot.name).parent
        places: list[Place] = []
        for rank in range(len(snapshot.parts), snapshot.num_ranks, len(snapshot.parts)):
            path = next(place.glob(f"{_beginning(snapshot, rank)}.*.part"), None)
            if path is None:
                raise CallerError(
                    f"what the ranks from {rank} on have of checkpoint {snapshot.name!r} is not "
                    "under this node's checkpoint root: their node has put it elsewhere",
                    code=Code.FAILED_PRECONDITION,
                    remedy="give the state managers of all nodes of the deployment one "
                    "checkpoint_root, on a file system that they share",
                )
            places += find_parts(path)
        return places

    def discard(self, snapshot: Snapshot) -> None:
        """Remove the parts of the other nodes, which nobody needs any more."""
        place = self._checkpoints.directory(snapshot.key, snapshot.name).parent
        self._directory.discard(*place.glob(f"{_prefix(snapshot)}-*.part"))

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


def _prefix(snapshot: Snapshot) -> str:
    """The beginning of the names of all files for an operation's checkpoint."""
    digits = blake3(snapshot.operation.encode()).hexdigest()[:_OPERATION_DIGITS]
    return f".{snapshot.name}.{digits}"


def _beginning(snapshot: Snapshot, rank: int) -> str:
    """The beginning of the name of the file with the states of a node's ranks, from `rank` on."""
    return f"{_prefix(snapshot)}-{snapshot.incarnation:d}-{rank:d}"
