"""Tensor slices of weights versions: the boxes that a reader needs, from parts of several ranks.

A copy of slices is kept beside versions, under the version's key and a name made from the slices:
ranks that ask for the same slices share one copy. The copy is dropped with its version. Until then,
also while it is being fetched, peers on the same site may take from it the boxes that they need.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence

import msgspec

from phaseloom.common.contract.errors import Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import COPY_PREFIX, VersionKey
from phaseloom.common.contract.state_rank import OpenSlices, VersionExtent
from phaseloom.common.tensors.blockhash import digest_of
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.common.tensors.versionparts import part_of
from phaseloom.statemgr.mesh.permission import check_reader
from phaseloom.statemgr.node.digests import has_digest
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.residency.incarnations import Wpg
from phaseloom.statemgr.transfer.fetching import Fetch
from phaseloom.statemgr.transfer.served import Incoming, OpenPart
from phaseloom.statemgr.transfer.tensorslices import Batch, batches, slots_of
from phaseloom.statemgr.versions.fetch import counted
from phaseloom.statemgr.versions.versions import Version
from phaseloom.statemgr.versions.weights import Weights, description_of

log = logging.getLogger(__name__)

_TRIES = 2


class Slices:
    def __init__(self, node: Node, weights: Weights) -> None:
        self._node = node
        self._weights = weights
        self._fetcher = weights.fetcher

    async def open(self, wpg: Wpg, request: OpenSlices) -> tuple[VersionExtent, list[int]]:
        """Memory with exactly the slices that a rank asks for.

        Raises: CallerError: PERMISSION_DENIED: the version is of another job, or the ticket of
                another incarnation; NOT_FOUND: a slice is of a part, and the manifest of the
                version is not here or does not name that part; a bad slice; a source has another
                content. ResourceError: no source could deliver some slice; DATA_LOSS; no host
                memory.
        """
        key = request.version
        check_reader(wpg, key, request.ticket)
        # Tens of thousands of slices: others are answered meanwhile.
        slots, name = await asyncio.to_thread(_described, request)
        mine = part_of(key, name)
        async with self._fetcher.lock(mine):
            version = self._node.versions.find(mine)
            if version is not None and request.is_suspect:
                is_bad = await self._fetcher.suspects.drop_if_bad(version)
                version = None if is_bad else version
            if version is None:
                version = await self._fetch(mine, request, slots)
        assert version.extent is not None
        return description_of(version), [self._node.memory[version.extent].read_only_fd]

    async def _fetch(self, mine: VersionKey, request: OpenSlices, slots: TensorTable) -> Version:
        key = request.version
        parts = sorted({each.part for each in request.slices} - {""})
        incoming = Incoming(request.slices, await self._weights.committed_digests(key, parts))
        size, what = request.num_bytes, f"slices of version {key}"
        async with self._fetcher.coming(mine, slots, size, incoming, what) as version:
            memory = self._node.memory_of(version)
            with self._fetcher.fetch(version, incoming, request.ticket, what) as fetch:
                await self._fill(fetch, memory, request)
            digest = await asyncio.to_thread(digest_of, memory)
            self._node.versions.commit(version, digest)
        return version

    async def _fill(self, fetch: Fetch, memory: memoryview, request: OpenSlices) -> None:
        """Fill the memory from parts that are on this node, and the rest from other nodes."""
        sources = {each.part: each.endpoints for each in request.sources}
        by_part: dict[str, list[Batch]] = {}
        for batch in await asyncio.to_thread(batches, request.slices):
            by_part.setdefault(batch.part, []).append(batch)
        away: list[Batch] = []
        here_bytes = 0
        for some in by_part.values():
            try:
                here_bytes += await self._copy_here(fetch, memory, request, some)
            except PhaseloomError as error:
                if error.info.code is not Code.NOT_FOUND:
                    raise
                away += some
        fetch = await fetch.fetch_sound(away, sources)
        log.info(
            "%s came: %d bytes from other nodes, %d from here, %d by peers; %s",
            *(fetch.what, fetch.fetched_bytes, here_bytes, fetch.relayed_bytes, counted(fetch)),
        )

    async def _copy_here(
        self, fetch: Fetch, memory: memoryview, request: OpenSlices, some: list[Batch]
    ) -> int:
        """Copy slices of a part that is on this node, and verify the part: nobody does so later.

        Returns: the number of bytes that were copied.
        Raises:  CallerError: NOT_FOUND: the part is not here. ResourceError: DATA_LOSS: the part is
                 bad, and no source has a good one.
        """
        part = some[0].part
        key = part_of(request.version, part)
        sources = [e for each in request.sources if each.part == part for e in each.endpoints]
        for _ in range(_TRIES):
            async with self._weights.open_part(key) as found:
                fetch.check(part, found.version.digest, "this node")
                num_bytes = await asyncio.to_thread(_copy, found, some, memory)
                if await has_digest(found.memory, found.version.digest):
                    for batch in some:
                        fetch.incoming.add(batch)
                    return num_bytes
            await self._weights.verify(key, sources, request.ticket)
        raise ResourceError(f"version {key} goes bad again and again here", code=Code.DATA_LOSS)


def _copy(part: OpenPart, batches: Sequence[Batch], memory: memoryview) -> int:
    """Copy slices of a part that is on this node. This takes long: run it in a thread.

    Returns: the number of bytes that were copied.
    """
    for batch in batches:
        found = (part.find(box).read() for box in batch.boxes)
        batch.put(memory, b"".join(run for runs in found for run in runs))
    return sum(batch.num_bytes for batch in batches)


def _described(request: OpenSlices) -> tuple[TensorTable, str]:
    """The layout of the reader's memory, and the name of the copy of slices."""
    slots = slots_of(request.slices, request.num_bytes)
    return TensorTable.of(slots), _name_of(request)


def _name_of(request: OpenSlices) -> str:
    """The name of a copy of slices: equal for all requests for the same slices."""
    what = msgspec.msgpack.encode((request.num_bytes, request.slices))
    return f"{COPY_PREFIX}{hashlib.blake2b(what, digest_size=16).hexdigest()}"
