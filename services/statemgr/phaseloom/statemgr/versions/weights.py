"""Weights versions: made by a policy's rank, read by ranks of its job, brought from other nodes."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from phaseloom.common.blockhash import digest_of
from phaseloom.common.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.ids import DeploymentKey, VersionKey, check_name
from phaseloom.common.messages import Ticket
from phaseloom.common.statewire import (
    CommitVersion,
    CreateVersion,
    OpenVersion,
    TensorSlot,
    VersionExtent,
)
from phaseloom.statemgr.core.layout import check_layout
from phaseloom.statemgr.core.residency import Wpg
from phaseloom.statemgr.core.statefile import StateHeader
from phaseloom.statemgr.core.versions import Version
from phaseloom.statemgr.disk.files import StateDirectory, find_parts
from phaseloom.statemgr.mesh.permission import check_reader
from phaseloom.statemgr.mesh.tls import Identity
from phaseloom.statemgr.node.node import Node, pool_of
from phaseloom.statemgr.tiers.hierarchy import Hierarchy
from phaseloom.statemgr.versions.fetching import Fetching, Home
from phaseloom.statemgr.versions.incoming import Incoming, Readable, Whole
from phaseloom.statemgr.versions.wire import VersionDescription

log = logging.getLogger(__name__)

_RESUME_PAUSE_S = 0.2
_PART = re.compile(r"(0|[1-9][0-9]{0,5})of[1-9][0-9]{0,5}\Z")
_PARTS = "count parts from 0: `2of4` is the third of four"


class Weights:
    def __init__(
        self,
        node: Node,
        directory: StateDirectory,
        hierarchy: Hierarchy,
        identity: Identity,
        peer_timeout_s: float,
        *,
        site: str = "",
    ) -> None:
        self._node = node
        self._directory = directory
        self._hierarchy = hierarchy
        self._identity = identity
        self._peer_timeout_s = peer_timeout_s
        self._site = site
        self._incoming: dict[VersionKey, Incoming] = {}
        self._bringing: WeakValueDictionary[VersionKey, asyncio.Lock] = WeakValueDictionary()

    def found(self, header: StateHeader) -> None:
        """A version that was on disk at start."""
        key = VersionKey(header.deployment, header.seq)
        self._node.versions.add_from_disk(key, header.num_bytes, header.tensors, header.digest)

    async def create(self, wpg: Wpg, request: CreateVersion) -> tuple[VersionExtent, list[int]]:
        """An extent to write a version into, or word that it exists.

        Raises: CallerError: PERMISSION_DENIED: not this policy's; a bad layout.
                ResourceError: RESOURCE_EXHAUSTED with the numbers.
        """
        node, key = self._node, request.version
        if key.policy != wpg.key or key.seq < 1:
            raise CallerError(
                f"{wpg} cannot make version {key}", code=Code.PERMISSION_DENIED, field="version"
            )
        if key.part and not _PART.match(key.part):
            raise CallerError(f"{key.part!r} is no part", field="version.part", remedy=_PARTS)
        check_layout(request.tensors, request.num_bytes)
        version = node.versions.find(key)
        if version is not None and not version.is_committed:
            # A version that was begun and never committed, by this life or by a fetch.
            if version.incarnation != wpg.incarnation:
                raise ResourceError(f"version {key} is being brought here", code=Code.ABORTED)
            node.drop_version(version)
            version = None
        if version is not None:
            return _description(version, tensors=[]), []
        extent = await self._hierarchy.reserve(request.num_bytes, f"version {key}", pool_of(wpg))
        try:
            if wpg.is_lost:
                raise ResourceError(f"{wpg} is over", code=Code.ABORTED)
            version = node.versions.begin(
                key, request.num_bytes, request.tensors, extent, wpg.incarnation
            )
        except PhaseloomError:
            node.memory.free(extent)
            raise
        node.versions.opened(version, wpg)
        return _description(version, tensors=[]), [node.memory[extent].fd]

    async def commit(self, wpg: Wpg, request: CommitVersion) -> None:
        """Verify what the rank has written; it is immutable from now on. Idempotent.

        Raises: CallerError: NOT_FOUND; ALREADY_EXISTS with another content.
                ResourceError: DATA_LOSS: the extent is not what the digest says.
        """
        node = self._node
        version = node.versions.find(request.version)
        if version is None or version.key.policy != wpg.key or version.extent is None:
            raise CallerError(
                f"{wpg} is not writing version {request.version}",
                code=Code.NOT_FOUND,
                field="version",
            )
        node.versions.acquire(version)
        try:
            memory = node.memory[version.extent].view(version.num_bytes)
            if await asyncio.to_thread(digest_of, memory) != request.digest:
                raise ResourceError(
                    f"version {version.key} does not match its digest", code=Code.DATA_LOSS
                )
            if version.is_dropped:
                raise ResourceError(f"version {version.key} was dropped", code=Code.ABORTED)
            node.versions.commit(version, request.digest)
        finally:
            node.release_version(version)

    async def open(self, wpg: Wpg, request: OpenVersion) -> tuple[VersionExtent, list[int]]:
        """A version to read, from here or from the first source that has it.

        Raises: CallerError: PERMISSION_DENIED: of another job, or a ticket of another life.
                NOT_FOUND: no source has it.
                ResourceError: no source could deliver it, or no host memory.
        """
        key = request.version
        check_reader(wpg, key, request.ticket)
        version = await self._bring(key, request.sources, request.ticket)
        assert version.extent is not None
        self._node.versions.opened(version, wpg)
        return _description(version), [self._node.memory[version.extent].read_only_fd]

    async def bring(self, ticket: Ticket, sources: list[str]) -> None:
        """Have a version in host memory. Raises: as `open`."""
        check_name(ticket.version.policy.deployment, "ticket.version.policy")
        await self._bring(ticket.version, sources, ticket)

    @asynccontextmanager
    async def reading(self, key: VersionKey, may_be_incoming: bool) -> AsyncIterator[Readable]:
        """A version for another node's daemon, kept while it is being sent.

        Args:   may_be_incoming: also one that is only on its way here.
        Raises: CallerError: NOT_FOUND. ResourceError: its file is bad, or it is not known yet what
                is here.
        """
        await self._until_settled()
        incoming = self._incoming.get(key) if may_be_incoming else None
        async with self._used(key) if incoming else self.held(key) as version:
            assert version.extent is not None
            description = VersionDescription(version.num_bytes, version.tensors, version.digest)
            memory = self._node.memory[version.extent].view(version.num_bytes)
            yield incoming or Whole(description, memory)

    @asynccontextmanager
    async def held(self, key: VersionKey) -> AsyncIterator[Version]:
        """A committed version that is here, in host memory for as long as it is held.

        Raises: CallerError: NOT_FOUND. ResourceError: its file is bad, or it is not known yet what
                is here.
        """
        await self._until_settled()
        known = self._node.versions.find(key)
        if known is None or not known.is_committed:
            # It may be on its way here: whoever brings it may be the one who asks.
            raise _not_here(key)
        await self._bring(key, [], None)
        async with self._used(key) as version:
            yield version

    @asynccontextmanager
    async def _used(self, key: VersionKey) -> AsyncIterator[Version]:
        version = self._node.versions.find(key)
        if version is None:
            # Dropped while it was on its way here.
            raise _not_here(key)
        self._node.versions.acquire(version)
        try:
            yield version
        finally:
            self._node.release_version(version)

    async def _until_settled(self) -> None:
        node = self._node
        try:
            await asyncio.wait_for(node.settled.wait(), self._peer_timeout_s)
        except TimeoutError:
            raise ResourceError(
                f"{node.name} does not know yet what it holds", remedy="retry, or ask another node"
            ) from None

    async def drop(self, keys: list[VersionKey]) -> None:
        """Nothing needs these any more, in memory or on disk."""
        for key in keys:
            for part in self._node.versions.parts_of(key):
                self._node.drop_version(part)
            version = self._node.versions.find(key)
            self._node.drop_version(version)
            if version is not None and version.is_on_disk:
                await asyncio.to_thread(self._directory.remove, self._directory.version(key))

    def forget(self, policy: DeploymentKey) -> None:
        """Its job is over: drop every version of it from memory."""
        for version in self._node.versions.known():
            if version.key.policy == policy:
                self._node.drop_version(version)

    async def _bring(self, key: VersionKey, sources: list[str], ticket: Ticket | None) -> Version:
        """The committed version, in memory. Concurrent requests share one fetch."""
        lock = self._bringing.setdefault(key, asyncio.Lock())
        async with lock:
            version = self._node.versions.find(key)
            if version is not None and not version.is_committed:
                raise CallerError(f"version {key} is not committed yet", code=Code.NOT_FOUND)
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
            return await self._fetch_from_any(key, sources, ticket)

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
            if not place.part.blocks:
                # Of an older release: its digest is not what those who read it will reckon.
                version.digest = await asyncio.to_thread(digest_of, memory)
        except PhaseloomError:
            node.drop_version(version)
            raise
        finally:
            node.release_version(version)
        if version.is_dropped:
            raise ResourceError(f"version {key} was dropped", code=Code.ABORTED)

    async def _fetch_from_any(
        self, key: VersionKey, sources: list[str], ticket: Ticket | None
    ) -> Version:
        if not sources:
            raise _not_here(key)
        node, home = self._node, self._home()
        version: Version | None = None

        async def place(description: VersionDescription) -> Incoming:
            nonlocal version
            version = await self._begin(key, description)
            assert version.extent is not None
            memory = node.memory[version.extent].view(version.num_bytes)
            self._incoming[key] = Incoming(description, memory)
            return self._incoming[key]

        fetching = Fetching(key, ticket, home, place)
        try:
            digest = await _bring_from_any(fetching, sources)
            assert version is not None
            if version.is_dropped:
                raise ResourceError(f"version {key} was dropped", code=Code.ABORTED)
            node.versions.commit(version, digest)
        except BaseException:
            if version is not None and not version.is_dropped:
                node.drop_version(version)
            raise
        finally:
            if version is not None:
                self._incoming.pop(key).give_up()
                node.release_version(version)
        log.info(
            "version %s came: %d bytes from its source, %d from neighbours",
            *(key, fetching.from_source_bytes, fetching.relayed_bytes),
        )
        return version

    async def _begin(self, key: VersionKey, description: VersionDescription) -> Version:
        """Room for it, in use until it is released."""
        node, size = self._node, description.num_bytes
        check_layout(description.tensors, size)
        extent = await self._hierarchy.reserve(size, f"version {key}", str(key.policy))
        try:
            version = node.versions.begin(key, size, description.tensors, extent)
        except CallerError:
            node.memory.free(extent)
            raise
        node.versions.acquire(version)
        return version

    def _home(self) -> Home:
        node = self._node
        return Home(self._identity, node.endpoint, self._site, self._peer_timeout_s)


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
            raise ResourceError(
                f"version {fetching.version} could not be brought: "
                f"{'; '.join(str(error) for error in errors)}",
                code=_common_code(errors),
                remedy="retry; name sources that hold the version",
            )
        await asyncio.sleep(_RESUME_PAUSE_S)


def _common_code(errors: list[PhaseloomError]) -> Code:
    """What all sources say; where they differ, whether it may be otherwise later."""
    codes = {error.info.code for error in errors}
    return codes.pop() if len(codes) == 1 else Code.UNAVAILABLE


def _not_here(key: VersionKey) -> CallerError:
    return CallerError(f"version {key} is not here", code=Code.NOT_FOUND, field="version")


def _description(version: Version, tensors: list[TensorSlot] | None = None) -> VersionExtent:
    return VersionExtent(
        version=version.key,
        num_bytes=version.num_bytes,
        tensors=version.tensors if tensors is None else tensors,
        digest=version.digest,
        exists=version.is_committed,
    )
