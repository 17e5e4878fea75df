"""Host memory for states that are apart from their ranks: being cut, cut, or about to be loaded.

Memory that is needed no more is parked while the life lasts: its next cut finds it touched already.
Until somebody else needs it, what was written last can be loaded from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.tensors.blockhash import digest_of
from phaseloom.statemgr.core.cuts import Cut
from phaseloom.statemgr.core.marker import Marker
from phaseloom.statemgr.core.residency import Rank, Wpg
from phaseloom.statemgr.node.node import Node, pool_of
from phaseloom.statemgr.tiers.hierarchy import Hierarchy


@dataclass(slots=True)
class Kept:
    """What was written last, in memory that is idle."""

    cut: Cut
    digests: list[str]
    parkings: list[int]


class Apart:
    def __init__(self, node: Node, hierarchy: Hierarchy) -> None:
        self._node = node
        self._hierarchy = hierarchy
        self._kept: dict[DeploymentKey, Kept] = {}

    @asynccontextmanager
    async def room(self, wpg: Wpg) -> AsyncIterator[list[int]]:
        """An extent for each rank's state; those that are in the list at the end are freed.

        Raises: ResourceError: no host memory, with the numbers.
        """
        extents: list[int] = []
        try:
            for rank in wpg.ranks:
                what = f"a copy of {rank.owner} for a checkpoint"
                extent = await self._hierarchy.reserve(rank.extent_bytes, what, pool_of(wpg))
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

    def free(self, cut: Cut, digests: list[str] | None = None) -> None:
        """Args: digests: of its parts, where it is on disk: to find it in idle memory again."""
        wpg = self._node.residency.find(cut.key)
        is_same = wpg is not None and wpg.incarnation == cut.incarnation
        self._node.cuts.remove(cut)
        for extent in cut.extents:
            self._give_up(extent, wpg if is_same else None)
        if digests is not None:
            parkings = [self._node.memory.arena.parking(extent) for extent in cut.extents]
            self._kept[cut.key] = Kept(cut, digests, parkings)
        self._node.announce()

    @asynccontextmanager
    async def taken_back(self, wpg: Wpg, marker: Marker | None) -> AsyncIterator[Kept | None]:
        """What was written last, verified; idle again at the end.

        None: it is another checkpoint, or another life's, or its memory was needed, or is bad.
        """
        kept = self._kept.get(wpg.key)
        if kept is None or marker is None or not _is_of(kept.cut, wpg, marker):
            yield None
            return
        arena, extents = self._node.memory.arena, kept.cut.extents
        both = zip(extents, kept.parkings, strict=True)
        taken = [extent for extent, parking in both if arena.take_back(extent, parking)]
        for extent in taken:
            self._node.cuts.lend(extent)
        is_sound = False
        try:
            if taken == extents:
                views = [self.view(*each) for each in zip(wpg.ranks, extents, strict=True)]
                found = await asyncio.to_thread(lambda: [*map(digest_of, views)])
                is_sound = found == kept.digests
            yield kept if is_sound else None
        finally:
            for extent in taken:
                self._node.cuts.give_back(extent)
                self._give_up(extent, wpg if is_sound else None)
            kept.parkings = [arena.parking(extent) for extent in extents]
            self._node.announce()

    def forget(self, key: DeploymentKey) -> None:
        self._kept.pop(key, None)

    def _give_up(self, extent: int, wpg: Wpg | None) -> None:
        if wpg is None or wpg.is_lost:
            self._node.memory.free(extent)
        else:
            self._node.memory.park(extent, pool_of(wpg))


def _is_of(cut: Cut, wpg: Wpg, marker: Marker) -> bool:
    """Whether the checkpoint is this cut, and these are the ranks that were cut."""
    is_same = cut.incarnation == wpg.incarnation and cut.operation == marker.operation_id
    return is_same and [part.table for part in cut.parts] == [r.table for r in wpg.ranks]
