"""Snapshots: copies of ranks' states for a checkpoint, kept until the checkpoint is on disk.

Invariant: a deployment has at most one snapshot that nobody writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.statemgr.records.incarnations import Wpg


@dataclass(slots=True)
class SnapshotPart:
    """The copied state of one rank."""

    extent: int
    num_bytes: int
    table: TensorTable = field(repr=False)
    checksums: bytes | None = field(default=None, repr=False)
    """Checksums of the state's blocks (`blockhash`); None: not computed yet."""

    @property
    def tensors(self) -> list[TensorSlot]:
        return self.table.tensors


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    key: DeploymentKey
    incarnation: int
    operation: str
    name: str
    """The name of the checkpoint."""
    seq: int
    parts: list[SnapshotPart]
    """The states of this node's ranks, in order."""
    rank_offset: int = 0
    """Number of this node's first rank, counted over all nodes."""
    num_ranks: int = 0
    """Ranks on all nodes."""

    @classmethod
    def of(
        cls, wpg: Wpg, operation: str, name: str, seq: int, parts: list[SnapshotPart]
    ) -> Snapshot:
        ranks = (wpg.rank_offset, wpg.num_ranks)
        return cls(wpg.key, wpg.incarnation, operation, name, seq, parts, *ranks)

    @property
    def is_whole(self) -> bool:
        """Whether the snapshot has all ranks, so that no other node has a part of it."""
        return self.num_ranks <= len(self.parts)

    @property
    def extents(self) -> list[int]:
        return [part.extent for part in self.parts]

    def __str__(self) -> str:
        return f"the snapshot of {self.key} for checkpoint {self.name!r}"


class Snapshots(dict[tuple[DeploymentKey, str], Snapshot]):
    """Snapshots in host memory, by deployment and operation."""

    def of(self, key: DeploymentKey) -> list[Snapshot]:
        return [snapshot for snapshot in self.values() if snapshot.key == key]
