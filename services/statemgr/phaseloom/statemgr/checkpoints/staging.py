"""Host memory for states that are apart from their ranks: being cut, cut, or about to be loaded.

Memory that is needed no more is parked while the life lasts: its next cut finds it touched already.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from phaseloom.statemgr.checkpoints.snapshots import Snapshot
from phaseloom.statemgr.node.node import Node, pool_of
from phaseloom.statemgr.residency.residency import Rank, Wpg
from phaseloom.statemgr.tiering.tiering import Tiering


class Staging:
    def __init__(self, node: Node, tiering: Tiering) -> None:
        self._node = node
        self._tiering = tiering

    @asynccontextmanager
    async def room(self, wpg: Wpg) -> AsyncIterator[list[int]]:
        """An extent for each rank's state; those that are in the list at the end are freed.

        Raises: ResourceError: no host memory, with the numbers.
        """
        extents: list[int] = []
        try:
            for rank in wpg.ranks:
                what = f"a copy of {rank.owner} for a checkpoint"
                extent = await self._tiering.reserve(rank.extent_bytes, what, pool_of(wpg))
                self._node.cuts.lend(extent)
                extents.append(extent)
            yield extents
        finally:
            for extent in extents:
                self._node.cuts.give_back(extent)
                self._give_up(extent, wpg)
            self._node.announce()

    def view(self, rank: Rank, extent: int) -> memoryview:
        return self._node.memory[extent].view(rank.extent_bytes)

    def free(self, cut: Snapshot) -> None:
        wpg = self._node.residency.find(cut.key)
        is_same = wpg is not None and wpg.incarnation == cut.incarnation
        self._node.cuts.remove(cut)
        for extent in cut.extents:
            self._give_up(extent, wpg if is_same else None)
        self._node.announce()

    def _give_up(self, extent: int, wpg: Wpg | None) -> None:
        if wpg is None or wpg.is_lost:
            self._node.memory.free(extent)
        else:
            self._node.memory.park(extent, pool_of(wpg))
