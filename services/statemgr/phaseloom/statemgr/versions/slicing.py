"""Slices of weights versions: what a reader needs, from parts that several ranks wrote.

A copy of slices is kept beside versions, under the version's key and a name made of what it is of:
ranks that ask for the same share one. It goes with its version.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

import msgspec

from phaseloom.common.blockhash import digest_of
from phaseloom.common.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.ids import COPY_PREFIX, VersionKey
from phaseloom.common.statewire import OpenSlices, VersionExtent
from phaseloom.common.tensortable import TensorTable
from phaseloom.common.versionparts import part_of
from phaseloom.statemgr.core.residency import Wpg
from phaseloom.statemgr.core.slices import Batch, batches, slots_of
from phaseloom.statemgr.core.versions import Version
from phaseloom.statemgr.mesh.permission import check_reader
from phaseloom.statemgr.mesh.tls import Identity
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.tiers.hierarchy import Hierarchy
from phaseloom.statemgr.versions.mending import discard_if_bad
from phaseloom.statemgr.versions.slicefetching import SliceFetching, copy_here
from phaseloom.statemgr.versions.sliceserving import OpenPart, open_part
from phaseloom.statemgr.versions.weights import Weights

log = logging.getLogger(__name__)

_TRIES = 2


class Slices:
    def __init__(
        self,
        node: Node,
        hierarchy: Hierarchy,
        weights: Weights,
        identity: Identity,
        peer_timeout_s: float,
    ) -> None:
        self._node = node
        self._hierarchy = hierarchy
        self._weights = weights
        self._identity = identity
        self._peer_timeout_s = peer_timeout_s
        self._contents: dict[VersionKey, str] = {}
        """What the parts were, of copies that are here."""
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
        self._forget_unused()
        assert version.extent is not None
        return (
            VersionExtent(
                version=mine,
                num_bytes=version.num_bytes,
                tensors=version.table.packed,
                digest=version.digest,
                exists=True,
                content=self._contents.get(mine, ""),
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

    async def _bring(self, mine: VersionKey, request: OpenSlices, slots: TensorTable) -> Version:
        node = self._node
        extent = await self._hierarchy.reserve(
            request.num_bytes, f"slices of version {request.version}", str(mine.policy)
        )
        try:
            version = node.versions.begin(mine, request.num_bytes, slots, extent)
        except CallerError:
            node.memory.free(extent)
            raise
        node.versions.acquire(version)
        try:
            memory = node.memory[extent].view(request.num_bytes)
            self._contents[mine] = await self._fill(request, memory)
            digest = await asyncio.to_thread(digest_of, memory)
            if version.is_dropped:
                raise ResourceError(f"version {request.version} was dropped", code=Code.ABORTED)
            node.versions.commit(version, digest)
        except BaseException:
            if not version.is_dropped:
                node.drop_version(version)
            raise
        finally:
            node.release_version(version)
        return version

    async def _fill(self, request: OpenSlices, memory: memoryview) -> str:
        """Returns: what the parts are that it came from."""
        key = request.version
        by_part: dict[str, list[Batch]] = {}
        for batch in await asyncio.to_thread(batches, request.slices):
            by_part.setdefault(batch.part, []).append(batch)
        digests = await self._weights.committed_digests(key, [part for part in by_part if part])
        fetching = SliceFetching(
            key, request.ticket, self._identity, self._peer_timeout_s, memory, digests
        )
        away: list[Batch] = []
        here_bytes = 0
        sources = {each.part: each.endpoints for each in request.sources}
        for part, mine in by_part.items():
            try:
                here_bytes += await self._copy_here(fetching, part, mine, sources.get(part, []))
            except PhaseloomError as error:
                if error.info.code is not Code.NOT_FOUND:
                    raise
                away += mine
        try:
            await fetching.bring(away, sources)
        except ResourceError as error:
            if error.info.code is not Code.DATA_LOSS:
                raise
            # A source that found its memory bad has mended it, or has that part no more.
            log.warning("%s; once more", error)
            fetching = fetching.again()
            try:
                await fetching.bring(away, sources)
            except PhaseloomError as failed:
                raise error from failed
        log.info(
            "slices of version %s came: %d bytes from other nodes, %d from here",
            *(key, fetching.fetched_bytes, here_bytes),
        )
        return hashlib.blake2b(
            msgspec.msgpack.encode(sorted(fetching.digests.items())), digest_size=16
        ).hexdigest()

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
                num_bytes = await asyncio.to_thread(copy_here, found, batches, fetching.memory)
                if await asyncio.to_thread(digest_of, found.memory) == found.version.digest:
                    return num_bytes
            await self._weights.mend(key, sources, fetching.ticket)
        raise ResourceError(f"version {key} goes bad again and again here", code=Code.DATA_LOSS)

    def _forget_unused(self) -> None:
        """Names of copies that went with their versions."""
        for key in [k for k in self._contents if self._node.versions.find(k) is None]:
            del self._contents[key]


def _described(request: OpenSlices) -> tuple[TensorTable, str]:
    """The layout of the reader's memory, and a name. Raises: CallerError: a bad slice."""
    slots = slots_of(request.slices, request.num_bytes)
    return TensorTable.of(slots), _name_of(request)


def _name_of(request: OpenSlices) -> str:
    """The same for all who ask for the same."""
    what = msgspec.msgpack.encode((request.num_bytes, request.slices))
    return f"{COPY_PREFIX}{hashlib.blake2b(what, digest_size=16).hexdigest()}"
