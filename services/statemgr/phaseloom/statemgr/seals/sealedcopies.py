"""The whole copies of a state that a deployment's own seals are, for whoever knows it by digest.

A `seq` does not tell a state: a life that was rebuilt may have come to it by other rounding. So a
seal counts only where each rank's section has the digest that is asked for, and its layout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from phaseloom.common.contract.errors import PhaseloomError
from phaseloom.common.contract.state_rank import LoadedFrom
from phaseloom.statemgr.core.residency import Rank, Wpg
from phaseloom.statemgr.core.statefile import Place, Section, check_restorable
from phaseloom.statemgr.disk.files import StateDirectory, find_parts
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.seals.imaging import find_image_parts, read_image


@dataclass(frozen=True)
class SealedCopy:
    source: LoadedFrom
    places: list[Place]
    """Of every rank."""
    read: Callable[[Place, memoryview], None]
    """Fills memory with a section, verified. Blocking. Raises: ResourceError: DATA_LOSS."""


class SealedCopies:
    def __init__(self, node: Node, directory: StateDirectory) -> None:
        self._node = node
        self._directory = directory

    async def find(self, wpg: Wpg, seq: int, digests: Sequence[str]) -> list[SealedCopy]:
        """The nearest first.

        Args: digests: of each rank's state, as it lies in memory.
        """
        kept = self._node.seals.find(wpg.key, seq)
        # Now, and not in the thread: a view keeps the memory, though the seal may be dropped.
        image = None
        if kept is not None:
            image = (kept.name, self._node.memory[kept.extent].view(kept.num_bytes))
        path = self._directory.seal(wpg.key, seq)

        def found() -> list[SealedCopy]:
            copies = self._in(image, path)
            return [copy for copy in copies if _is_of(copy, wpg, digests)]

        return await asyncio.to_thread(found)

    def _in(self, kept: tuple[str, memoryview] | None, path: Path) -> Iterator[SealedCopy]:
        if kept is not None:
            name, image = kept
            places = _found(partial(find_image_parts, image, name))
            yield SealedCopy(LoadedFrom.HOST_SEAL, places, partial(read_image, image))
        if path.exists():
            places = _found(partial(find_parts, path))
            yield SealedCopy(LoadedFrom.NVME_SEAL, places, self._directory.read)


def _found(find: Callable[[], list[Place]]) -> list[Place]:
    """None where its header is bad."""
    try:
        return find()
    except PhaseloomError:
        return []


def _is_of(copy: SealedCopy, wpg: Wpg, digests: Sequence[str]) -> bool:
    if not copy.places or len(digests) != len(wpg.ranks):
        return False
    return all(
        _holds(copy.places[0], rank, digest)
        for rank, digest in zip(wpg.ranks, digests, strict=True)
    )


def section_of(rank: Rank, first: Place) -> Section:
    """A rank's, of the seal that begins there. Raises: PhaseloomError: it is of another layout."""
    return check_restorable(
        first.header,
        rank.index,
        len(rank.wpg.ranks),
        heap_bytes=rank.extent_bytes,
        tensors=rank.tensors,
        file=first.file,
        rank_offset=rank.wpg.rank_offset,
        num_ranks_of_all=rank.wpg.num_ranks,
    )


def _holds(first: Place, rank: Rank, digest: str) -> bool:
    try:
        part = section_of(rank, first)
    except PhaseloomError:
        return False
    return part.blocks != b"" and part.digest == digest
