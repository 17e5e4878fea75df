"""States that were copied aside for a checkpoint, until it is on disk.

Invariant: of a deployment at most one is there that nobody writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.common.tensors.tensortable import TensorTable


@dataclass(slots=True)
class SnapshotPart:
    """The state of one rank."""

    extent: int
    num_bytes: int
    table: TensorTable = field(repr=False)
    checksums: bytes | None = field(default=None, repr=False)
    """Of its blocks (`blockhash`), taken right after the cut; None: yet to be taken."""

    @property
    def tensors(self) -> list[TensorSlot]:
        return self.table.tensors


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    key: DeploymentKey
    incarnation: int
    operation: str
    name: str
    """Of the checkpoint that it is for."""
    seq: int
    parts: list[SnapshotPart]
    """Of this node's ranks, in order."""
    rank_offset: int = 0
    """Of the first of them."""
    num_ranks: int = 0
    """On all nodes."""

    @property
    def is_whole(self) -> bool:
        """No other node has a part of it."""
        return self.num_ranks <= len(self.parts)

    @property
    def has_checksums(self) -> bool:
        return all(part.checksums is not None for part in self.parts)

    @property
    def extents(self) -> list[int]:
        return [part.extent for part in self.parts]

    def __str__(self) -> str:
        return f"the cut of {self.key} for checkpoint {self.name!r}"


class Snapshots:
    def __init__(self) -> None:
        self._cuts: dict[tuple[DeploymentKey, str], Snapshot] = {}
        self._lent: set[int] = set()

    def add(self, cut: Snapshot) -> None:
        self._cuts[(cut.key, cut.operation)] = cut

    def find(self, key: DeploymentKey, operation: str) -> Snapshot | None:
        return self._cuts.get((key, operation))

    def of(self, key: DeploymentKey) -> list[Snapshot]:
        return [cut for cut in self._cuts.values() if cut.key == key]

    def remove(self, cut: Snapshot) -> None:
        self._cuts.pop((cut.key, cut.operation), None)

    def every(self) -> list[Snapshot]:
        return list(self._cuts.values())

    def lend(self, extent: int) -> None:
        """A copy is being made in it, which is no cut yet, or never will be."""
        self._lent.add(extent)

    def give_back(self, extent: int) -> None:
        self._lent.discard(extent)

    def extents(self) -> list[int]:
        held = [extent for cut in self._cuts.values() for extent in cut.extents]
        return [*held, *self._lent]
