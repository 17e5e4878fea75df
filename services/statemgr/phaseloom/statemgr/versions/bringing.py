"""Brings weights versions into host memory: from disk, else from another node that has them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from weakref import WeakValueDictionary

from phaseloom.common.contract.commands import Ticket
from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import VersionKey
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.common.tensors.blockhash import digest_of
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.statemgr.core.layout import check_layout
from phaseloom.statemgr.core.slices import all_of, batches
from phaseloom.statemgr.core.versions import Version
from phaseloom.statemgr.disk.files import StateDirectory, find_parts
from phaseloom.statemgr.mesh.tls import Identity
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.tiers.hierarchy import Hierarchy
from phaseloom.statemgr.versions.boxes import IncomingSlices
from phaseloom.statemgr.versions.fetching import Connection, Fetching, Home
from phaseloom.statemgr.versions.incoming import Incoming
from phaseloom.statemgr.versions.mending import BadCopy, Remaking, discard_if_bad, lost
from phaseloom.statemgr.versions.slicefetching import SliceFetching
from phaseloom.statemgr.versions.wire import VersionDescription

log = logging.getLogger(__name__)

_RESUME_PAUSE_S = 0.2
_NOWHERE = frozenset({Code.NOT_FOUND, Code.DATA_LOSS, Code.FAILED_PRECONDITION})
"""All sources answer, and none has it."""


class Bringing:
    def __init__(
        self,
        node: Node,
        directory: StateDirectory,
        hierarchy: Hierarchy,
        identity: Identity,
        peer_timeout_s: float,
        *,
        site: str,
    ) -> None:
        self._node = node
        self._directory = directory
        self._hierarchy = hierarchy
        self._identity = identity
        self._peer_timeout_s = peer_timeout_s
        self._site = site
        self.remaking = Remaking(node)
        self.incoming: dict[VersionKey, Incoming] = {}
        """What is being fetched in blocks."""
        self.arriving: dict[VersionKey, IncomingSlices] = {}
        """Parts that are being fetched by their boxes."""
        self._locks: WeakValueDictionary[VersionKey, asyncio.Lock] = WeakValueDictionary()

    def lock(self, key: VersionKey) -> asyncio.Lock:
        """Of who brings, mends or commits this version."""
        return self._locks.setdefault(key, asyncio.Lock())

    @property
    def home(self) -> Home:
        node = self._node
        return Home(self._identity, node.endpoint, self._site, self._peer_timeout_s)

    async def bring(
        self,
        key: VersionKey,
        sources: list[str],
        ticket: Ticket | None,
        digest: str = "",
        *,
        is_doubted: bool = False,
    ) -> Version:
        """The committed version, in memory. Concurrent requests share one fetch.

        Args:   digest: what it must have to be fetched; empty: whatever it has there.
                is_doubted: verify first what is here; where it is bad, bring it anew.
        Raises: CallerError: NOT_FOUND: it is not committed here yet, or nobody has it.
                ResourceError: nobody could deliver it; DATA_LOSS; no host memory; UNAVAILABLE: its
                policy makes it again.
        """
        async with self.lock(key):
            version = self._node.versions.find(key)
            if version is not None and not version.is_committed:
                raise CallerError(f"version {key} is not committed yet", code=Code.NOT_FOUND)
            bad: BadCopy | None = None
            # A manifest is small, and read here before its reader could doubt it.
            if version is not None and (is_doubted or version.is_manifest):
                bad = await discard_if_bad(self._node, version)
            if bad is not None:
                # Host copies of its bytes are to go on with the same.
                digest = digest or bad.version.digest
            try:
                version = await self._had(key, sources, ticket, digest)
            except PhaseloomError as error:
                if bad is not None:
                    await self._give_up(bad)
                if error.info.code in _NOWHERE:
                    self.remaking.check(key)
                if (bad or is_doubted) and error.info.code in _NOWHERE:
                    raise lost(key, error) from error
                raise
            if bad is not None:
                bad.replace(version)
            return version

    async def _give_up(self, bad: BadCopy) -> None:
        """It is to be had nowhere."""
        on_disk = bad.give_up()
        if on_disk is not None:
            self.remaking.begin(bad.version)
            paths = [self._directory.version(piece.key) for piece in on_disk]
            await asyncio.to_thread(self._directory.discard, *paths)

    async def _had(
        self, key: VersionKey, sources: list[str], ticket: Ticket | None, digest: str
    ) -> Version:
        """From memory, else from disk, else from another node."""
        version = self._node.versions.find(key)
        if version is not None and version.extent is None:
            try:
                await self._read(version)
            except PhaseloomError as error:
                if not (version.is_dropped and sources):
                    raise
                log.warning("%s; bringing it from another node", error)
                version = None
        if version is not None:
            return version
        return await self._fetch_from_any(key, sources, ticket, digest)

    async def _read(self, version: Version) -> None:
        """From disk into an extent."""
        node, key = self._node, version.key
        path = self._directory.version(key)
        extent = await self._hierarchy.reserve(version.num_bytes, f"version {key}", str(key.policy))
        if version.is_dropped:
            node.memory.free(extent)
            raise ResourceError(f"version {key} was dropped", code=Code.ABORTED)
        version.extent = extent
        node.versions.acquire(version)
        try:
            place = (await asyncio.to_thread(find_parts, path))[0]
            memory = node.memory[extent].view(version.num_bytes)
            await asyncio.to_thread(self._directory.read, place, memory)
        except PhaseloomError:
            node.drop_version(version)
            raise
        finally:
            node.release_version(version)
        version.check_kept()

    async def _fetch_from_any(
        self, key: VersionKey, sources: list[str], ticket: Ticket | None, digest: str
    ) -> Version:
        if not sources:
            raise not_here(key)
        if key.part and self._site:
            return await self._fetch_part(key, sources, ticket, digest)
        node, home = self._node, self.home
        version: Version | None = None
        async with AsyncExitStack() as coming:

            async def place(description: VersionDescription) -> Incoming:
                nonlocal version
                _check_digest(description, digest)
                version = await coming.enter_async_context(self._filling(key, description))
                assert version.extent is not None
                memory = node.memory[version.extent].view(version.num_bytes)
                incoming = self.incoming[key] = Incoming(description, memory)
                coming.callback(lambda: self.incoming.pop(key).give_up())
                return incoming

            fetching = Fetching(key, ticket, home, place)
            came = await _bring_from_any(fetching, sources)
            assert version is not None
            version.check_kept()
            node.versions.commit(version, came)
        log.info(
            "version %s came: %d bytes from its source, %d from neighbours",
            *(key, fetching.from_source_bytes, fetching.relayed_bytes),
        )
        return version

    async def _fetch_part(
        self, key: VersionKey, sources: list[str], ticket: Ticket | None, digest: str
    ) -> Version:
        """All of it as slices: nodes of a site share these with those that need only some."""
        description = await _described(key, sources, ticket, self.home, digest)
        slices = all_of(key.part, description.tensors, description.num_bytes)
        incoming = IncomingSlices(slices, {key.part: description.digest})
        async with self._filling(key, description) as version:
            assert version.extent is not None
            memory = self._node.memory[version.extent].view(version.num_bytes)
            self.arriving[key] = incoming
            fetching = SliceFetching(key.whole, ticket, self.home, key.part, incoming, memory)
            try:
                everything = await asyncio.to_thread(batches, slices)
                fetching = await fetching.bring_sound(everything, {key.part: sources})
                if await asyncio.to_thread(digest_of, memory) != description.digest:
                    raise ResourceError(f"version {key} is not what came", code=Code.DATA_LOSS)
                version.check_kept()
                self._node.versions.commit(version, description.digest)
            finally:
                del self.arriving[key]
                incoming.give_up()
        log.info(
            "version %s came: %d bytes from its source, %d from neighbours",
            *(key, fetching.fetched_bytes, fetching.relayed_bytes),
        )
        return version

    def _filling(
        self, key: VersionKey, description: VersionDescription
    ) -> AbstractAsyncContextManager[Version]:
        size = description.num_bytes
        check_layout(description.tensors, size)
        node, hierarchy, what = self._node, self._hierarchy, f"version {key}"
        return filling(node, hierarchy, key, description.tensors, size, what=what)


@asynccontextmanager
async def filling(
    node: Node,
    hierarchy: Hierarchy,
    key: VersionKey,
    tensors: TensorTable | list[TensorSlot],
    num_bytes: int,
    *,
    what: str,
) -> AsyncIterator[Version]:
    """A version, or part, or slices, that come here, in use meanwhile; who is done commits them,
    else they are dropped.

    Args:   what: it is, for who looks for memory.
    Raises: ResourceError: RESOURCE_EXHAUSTED. CallerError: ALREADY_EXISTS.
    """
    extent = await hierarchy.reserve(num_bytes, what, str(key.policy))
    try:
        version = node.versions.begin(key, num_bytes, tensors, extent)
    except CallerError:
        node.memory.free(extent)
        raise
    node.versions.acquire(version)
    try:
        yield version
    finally:
        if not version.is_committed and not version.is_dropped:
            node.drop_version(version)
        node.release_version(version)


async def _bring_from_any(fetching: Fetching, sources: list[str]) -> str:
    """The version's digest, once it is here; what a source has brought, none brings again.

    Raises: PhaseloomError: none can bring it, or bring the rest of it.
    """
    while True:
        errors: list[PhaseloomError] = []
        for endpoint in sources:
            try:
                return await fetching.bring(endpoint)
            except PhaseloomError as error:
                log.warning("%s", error)
                errors.append(error)
        if not fetching.may_resume:
            raise _unbrought(fetching.version, errors)
        await asyncio.sleep(_RESUME_PAUSE_S)


async def _described(
    key: VersionKey, sources: list[str], ticket: Ticket | None, home: Home, digest: str
) -> VersionDescription:
    """By the first source that has it, with this digest. Raises: ResourceError: none does."""
    errors: list[PhaseloomError] = []
    for endpoint in sources:
        try:
            connection = await Connection.open(endpoint, key, ticket, home)
            connection.close()
            _check_digest(connection.description, digest)
            return connection.description
        except PhaseloomError as error:
            log.warning("version %s from %s: %s", key, endpoint, error)
            errors.append(error)
    raise _unbrought(key, errors)


def _check_digest(description: VersionDescription, digest: str) -> None:
    if digest not in {"", description.digest}:
        raise CallerError(
            f"it has digest {description.digest}, not {digest}",
            code=Code.FAILED_PRECONDITION,
            field="sources",
        )


def _unbrought(key: VersionKey, errors: list[PhaseloomError]) -> ResourceError:
    return ResourceError(
        f"version {key} could not be brought: {'; '.join(str(error) for error in errors)}",
        code=_common_code(errors),
        remedy="retry; name sources that hold the version",
    )


def _common_code(errors: list[PhaseloomError]) -> Code:
    """What all sources say; where they differ, whether it may be otherwise later."""
    codes = {error.info.code for error in errors}
    return codes.pop() if len(codes) == 1 else Code.UNAVAILABLE


def not_here(key: VersionKey) -> CallerError:
    return CallerError(f"version {key} is not here", code=Code.NOT_FOUND, field="version")
