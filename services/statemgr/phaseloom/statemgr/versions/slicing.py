"""Slices of weights versions: what a reader needs, from parts that several ranks wrote.

A copy of slices is kept beside versions, under the version's key and a name made of what it is of:
ranks that ask for the same share one. It goes with its version. Till then, also while it comes, the
nodes of the same site may have of it what they need too.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary, WeakValueDictionary

import msgspec

from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import COPY_PREFIX, VersionKey
from phaseloom.common.contract.state_rank import OpenSlices, VersionExtent
from phaseloom.common.tensors.blockhash import digest_of
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.common.tensors.versionparts import part_of
from phaseloom.statemgr.core.residency import Wpg
from phaseloom.statemgr.core.slices import Batch, batches, slots_of
from phaseloom.statemgr.core.versions import Version
from phaseloom.statemgr.mesh.permission import check_reader
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.tiers.hierarchy import Hierarchy
from phaseloom.statemgr.versions.boxes import (
    Boxes,
    Brought,
    IncomingSlices,
    OpenPart,
    OpenParts,
    gathered,
    open_part,
)
from phaseloom.statemgr.versions.bringing import filling
from phaseloom.statemgr.versions.mending import discard_if_bad
from phaseloom.statemgr.versions.slicefetching import SliceFetching
from phaseloom.statemgr.versions.weights import Weights

log = logging.getLogger(__name__)

_TRIES = 2


class Slices:
    def __init__(self, node: Node, hierarchy: Hierarchy, weights: Weights) -> None:
        self._node = node
        self._hierarchy = hierarchy
        self._weights = weights
        self._brought: WeakKeyDictionary[Version, IncomingSlices] = WeakKeyDictionary()
        """Copies that are here, or on their way; not those that the daemon before has brought."""
        self._bringing: WeakValueDictionary[VersionKey, asyncio.Lock] = WeakValueDictionary()

    async def open(self, wpg: Wpg, request: OpenSlices) -> tuple[VersionExtent, list[int]]:
        """Memory with exactly these slices.

        Raises: CallerError: PERMISSION_DENIED: of another job, or a ticket of another life; a bad
                slice; NOT_FOUND: of a part, and its version's manifest is not here; sources that
                have something else. ResourceError: nobody could deliver some, DATA_LOSS, or no
                host memory.
        """
        key = request.version
        check_reader(wpg, key, request.ticket)
        # Tens of thousands of slices: others are answered meanwhile.
        slots, name = await asyncio.to_thread(_described, request)
        mine = part_of(key, name)
        lock = self._bringing.setdefault(mine, asyncio.Lock())
        async with lock:
            version = self._node.versions.find(mine)
            if version is not None and request.doubted:
                bad = await discard_if_bad(self._node, version)
                version = None if bad is not None else version
            if version is None:
                version = await self._bring(mine, request, slots)
        assert version.extent is not None
        return (
            VersionExtent(
                version=mine,
                num_bytes=version.num_bytes,
                tensors=version.table.packed,
                digest=version.digest,
                exists=True,
            ),
            [self._node.memory[version.extent].read_only_fd],
        )

    @asynccontextmanager
    async def reading(self, key: VersionKey) -> AsyncIterator[OpenPart]:
        """A part that is here, or a version that was written whole, kept while it is read.

        Raises: CallerError: NOT_FOUND. ResourceError: its file is bad, or it is not known yet what
                is here.
        """
        async with self._weights.held(key) as version:
            assert version.extent is not None
            memory = self._node.memory[version.extent].view(version.num_bytes)
            yield open_part(version, memory)

    @asynccontextmanager
    async def brought(self, mine: VersionKey) -> AsyncIterator[Boxes]:
        """Slices, or a part, that are here or on their way, kept while neighbours are given of it.

        Raises: CallerError: NOT_FOUND.
        """
        version = self._node.versions.find(mine)
        if mine.is_copy:
            incoming = self._brought.get(version) if version else None
        else:
            incoming = self._weights.arriving(mine)
            if incoming is None:
                async with self.reading(mine) as part:
                    yield OpenParts({mine.part: part})
                return
        if incoming is None or version is None or version.extent is None:
            raise CallerError(f"{mine} is not here", code=Code.NOT_FOUND, field="relay")
        self._node.versions.acquire(version)
        try:
            yield Brought(incoming, self._node.memory[version.extent].view(version.num_bytes))
        finally:
            self._node.release_version(version)

    async def _bring(self, mine: VersionKey, request: OpenSlices, slots: TensorTable) -> Version:
        node, key = self._node, request.version
        parts = sorted({each.part for each in request.slices} - {""})
        digests = await self._weights.committed_digests(key, parts)
        size, what = request.num_bytes, f"slices of version {key}"
        async with filling(node, self._hierarchy, mine, slots, size, what=what) as version:
            assert version.extent is not None
            memory = node.memory[version.extent].view(size)
            incoming = self._brought[version] = IncomingSlices(request.slices, digests)
            try:
                await self._fill(mine, request, incoming, memory)
                digest = await asyncio.to_thread(digest_of, memory)
                version.check_kept()
                node.versions.commit(version, digest)
            finally:
                incoming.give_up()
        return version

    async def _fill(
        self,
        mine: VersionKey,
        request: OpenSlices,
        incoming: IncomingSlices,
        memory: memoryview,
    ) -> None:
        key = request.version
        by_part: dict[str, list[Batch]] = {}
        for batch in await asyncio.to_thread(batches, request.slices):
            by_part.setdefault(batch.part, []).append(batch)
        home = self._weights.home
        fetching = SliceFetching(key, request.ticket, home, mine.part, incoming, memory)
        away: list[Batch] = []
        here_bytes = 0
        sources = {each.part: each.endpoints for each in request.sources}
        for part, some in by_part.items():
            try:
                here_bytes += await self._copy_here(fetching, part, some, sources.get(part, []))
            except PhaseloomError as error:
                if error.info.code is not Code.NOT_FOUND:
                    raise
                away += some
        fetching = await fetching.bring_sound(away, sources)
        log.info(
            "slices of version %s came: %d bytes from other nodes, %d from here, %d by neighbours",
            *(key, fetching.fetched_bytes, here_bytes, fetching.relayed_bytes),
        )

    async def _copy_here(
        self, fetching: SliceFetching, part: str, batches: list[Batch], sources: list[str]
    ) -> int:
        """Slices of a part that is on this node, which is verified: nobody does so later.

        Raises: CallerError: NOT_FOUND: it is not. ResourceError: DATA_LOSS: it is bad, and to be
                had nowhere.
        """
        key = part_of(fetching.version, part)
        for _ in range(_TRIES):
            async with self.reading(key) as found:
                fetching.check(part, found.version.digest, "this node")
                num_bytes = await asyncio.to_thread(_copy, found, batches, fetching.memory)
                if await asyncio.to_thread(digest_of, found.memory) == found.version.digest:
                    for batch in batches:
                        fetching.incoming.add(batch)
                    return num_bytes
            await self._weights.mend(key, sources, fetching.ticket)
        raise ResourceError(f"version {key} goes bad again and again here", code=Code.DATA_LOSS)


def _copy(part: OpenPart, batches: Sequence[Batch], memory: memoryview) -> int:
    """Slices of a part that is on this node. Long: run it in a thread. Returns: bytes."""
    for batch in batches:
        found = (gathered(part.find(box)) for box in batch.boxes)
        batch.put(memory, b"".join(piece for pieces in found for piece in pieces))
    return sum(batch.num_bytes for batch in batches)


def _described(request: OpenSlices) -> tuple[TensorTable, str]:
    """The layout of the reader's memory, and a name. Raises: CallerError: a bad slice."""
    slots = slots_of(request.slices, request.num_bytes)
    return TensorTable.of(slots), _name_of(request)


def _name_of(request: OpenSlices) -> str:
    """The same for all who ask for the same."""
    what = msgspec.msgpack.encode((request.num_bytes, request.slices))
    return f"{COPY_PREFIX}{hashlib.blake2b(what, digest_size=16).hexdigest()}"
