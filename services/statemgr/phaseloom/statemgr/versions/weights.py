"""Weights versions: made by a policy's ranks, read by ranks of its job, brought from other nodes.

What several ranks write is in parts. Each is a version of its own under a key of its own, and goes
the same ways; the version itself is the manifest that says what they are, and is committed last.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

import msgspec

from phaseloom.common.blockhash import digest_of
from phaseloom.common.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.ids import DeploymentKey, VersionKey, check_name
from phaseloom.common.messages import Ticket
from phaseloom.common.statewire import (
    CommitParts,
    CommitVersion,
    CreateVersion,
    OpenVersion,
    VersionExtent,
)
from phaseloom.common.versionparts import (
    check_part,
    encode_manifest,
    part_of,
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
from phaseloom.statemgr.versions.manifests import Manifests
from phaseloom.statemgr.versions.mending import BadCopy, discard_if_bad, lost
from phaseloom.statemgr.versions.wire import VersionDescription

log = logging.getLogger(__name__)

MAX_VERSIONS_OF_A_RANK = 128
"""With parts and manifests: far beyond what syncs need, and far below what descriptors allow."""
_RESUME_PAUSE_S = 0.2
_NOWHERE = frozenset({Code.NOT_FOUND, Code.DATA_LOSS, Code.FAILED_PRECONDITION})
"""All sources answer, and none has it."""


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
        self._manifests = Manifests(node, hierarchy)
        self._identity = identity
        self._peer_timeout_s = peer_timeout_s
        self._site = site
        self._incoming: dict[VersionKey, Incoming] = {}
        self._bringing: WeakValueDictionary[VersionKey, asyncio.Lock] = WeakValueDictionary()

    def found(self, header: StateHeader) -> None:
        """A version that was on disk at start."""
        key = VersionKey(header.deployment, header.seq, header.part)
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
        if key.part:
            check_part(key.part, "version.part")
        table = node.layouts.read(request.tensors)
        check_layout(table, request.num_bytes)
        await self._drop_stale(key, wpg)
        version = node.versions.find(key)
        if version is not None and not version.is_committed:
            # A version that was begun and never committed, by this life or by a fetch.
            if version.incarnation != wpg.incarnation:
                raise ResourceError(f"version {key} is being brought here", code=Code.ABORTED)
            node.drop_version(version)
            version = None
        if version is not None:
            return _description(version, tensors=b""), []
        self._check_number(wpg)
        extent = await self._hierarchy.reserve(request.num_bytes, f"version {key}", pool_of(wpg))
        try:
            if wpg.is_lost:
                raise ResourceError(f"{wpg} is over", code=Code.ABORTED)
            version = node.versions.begin(key, request.num_bytes, table, extent, wpg.incarnation)
        except PhaseloomError:
            node.memory.free(extent)
            raise
        node.versions.opened(version, wpg)
        return _description(version, tensors=b""), [node.memory[extent].fd]

    async def _drop_stale(self, key: VersionKey, wpg: Wpg) -> None:
        """Parts of versions that were never committed: of those before, and of this one what an
        earlier life wrote, which another's parts may not fit."""
        versions = self._node.versions
        stale = versions.stale_parts(key.policy, key.seq)
        mine = versions.find(key)
        if mine is not None and mine.is_committed and not versions.is_readable(key):
            stale += [mine] if mine.incarnation != wpg.incarnation else []
        for version in stale:
            await self._drop(version)

    def _check_number(self, wpg: Wpg) -> None:
        """Raises: ResourceError: RESOURCE_EXHAUSTED: it makes versions without end."""
        number = self._node.versions.num_written(wpg.key, wpg.incarnation)
        limit = MAX_VERSIONS_OF_A_RANK * len(wpg.ranks)
        if number >= limit:
            raise ResourceError(
                f"{wpg} has written {number} weights versions, and parts of such, that are here",
                code=Code.RESOURCE_EXHAUSTED,
                remedy=f"at most {limit} are held: drop what nothing needs",
                details={"num_versions": str(number), "limit": str(limit)},
            )

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

    async def commit_parts(self, wpg: Wpg, request: CommitParts) -> VersionExtent:
        """All parts are committed, here and elsewhere. Idempotent.

        Raises: CallerError: PERMISSION_DENIED: not this policy's; ALREADY_EXISTS: something else;
                FAILED_PRECONDITION: a part that is here is another one. ResourceError: no room.
        """
        key = request.version
        if key.policy != wpg.key or key.seq < 1 or key.part:
            raise CallerError(
                f"{wpg} cannot make version {key}", code=Code.PERMISSION_DENIED, field="version"
            )
        lock = self._bringing.setdefault(key, asyncio.Lock())
        async with lock:
            self._manifests.check(key, request.manifest)
            content = encode_manifest(request.manifest)
            version = self._node.versions.find(key)
            is_same = version is not None and version.digest == digest_of(memoryview(content))
            if version is not None and not is_same:
                if version.incarnation == wpg.incarnation or not version.is_manifest:
                    raise CallerError(
                        f"version {key} is committed with another content",
                        code=Code.ALREADY_EXISTS,
                        field="manifest",
                    )
                # An earlier life's, which came to other bits.
                await self._drop(version)
                version = None
            if version is None:
                self._check_number(wpg)
                version = await self._manifests.write(wpg, key, content)
            return _description(version, tensors=b"")

    async def open(self, wpg: Wpg, request: OpenVersion) -> tuple[VersionExtent, list[int]]:
        """A version to read, from here or from the first source that has it; or its manifest, and
        who has the parts.

        Raises: CallerError: PERMISSION_DENIED: of another job, or a ticket of another life.
                NOT_FOUND: no source has it, or some part of it.
                ResourceError: no source could deliver it, or no host memory.
        """
        key = request.version
        check_reader(wpg, key, request.ticket)
        self._check_readable(key)
        version = await self._bring(
            key, request.sources, request.ticket, request.digest, is_doubted=request.doubted
        )
        extent = version.extent
        assert extent is not None
        self._node.versions.opened(version, wpg)
        fds = [self._node.memory[extent].read_only_fd]
        described = _description(version)
        if version.is_manifest:
            async with self._used(key):
                holders = await self._manifests.holders(
                    version, request.sources, request.ticket, self._home()
                )
                if version.is_dropped:
                    raise ResourceError(f"version {key} was dropped", code=Code.ABORTED)
            described = msgspec.structs.replace(described, sources=holders)
        return described, fds

    async def mend(
        self, key: VersionKey, sources: list[str] | None = None, ticket: Ticket | None = None
    ) -> None:
        """Who got it from here found it bad: verify it, and bring it anew where it is.

        Raises: ResourceError: DATA_LOSS: it was bad, is here no more, and to be had nowhere.
        """
        await self._until_settled()
        try:
            await self._bring(key, sources or [], ticket, is_doubted=True)
        finally:
            await self._node.keeper.record()

    async def bring(self, ticket: Ticket, sources: list[str]) -> None:
        """Have a version in host memory, with all of its parts. Raises: as `open`."""
        key = ticket.version
        check_name(key.policy.deployment, "ticket.version.policy")
        version = await self._bring(key, sources, ticket)
        if version.is_manifest:
            async with self._used(key):
                digests = self._digests_in(version)
                for part in await self._manifests.holders(version, sources, ticket, self._home()):
                    mine, digest = part_of(key, part.part), digests[part.part]
                    await self._bring(mine, part.endpoints, ticket, digest)

    async def committed_digests(self, key: VersionKey, parts: list[str]) -> dict[str, str]:
        """Of these parts, as the manifest says, which must be here.

        Raises: CallerError: NOT_FOUND: it is not, or names no such part.
        """
        if not parts:
            return {}
        known = {}
        async with self.held(key) as version:
            if version.is_manifest:
                known = self._digests_in(version)
        for part in parts:
            if part not in known:
                raise _not_here(part_of(key, part))
        return {part: known[part] for part in parts}

    def _digests_in(self, manifest: Version) -> dict[str, str]:
        return {part.part: part.digest for part in self._manifests.read(manifest).parts}

    async def digests_of(self, key: VersionKey) -> dict[str, str]:
        """By part, what of a version in parts this node can give away.

        Raises: CallerError: NOT_FOUND: none of it is here.
        """
        await self._until_settled()
        _, *parts = self._node.versions.pieces(key)
        return {part.key.part: part.digest for part in parts}

    def _check_readable(self, key: VersionKey) -> None:
        """Raises: CallerError: NOT_FOUND: a part of what is not committed as a whole."""
        if not self._node.versions.is_readable(key):
            raise CallerError(
                f"version {key.whole} is not here, or not all of it is committed",
                code=Code.NOT_FOUND,
                field="version",
                remedy="open the version, then its parts",
            )

    async def keep(self, ticket: Ticket, sources: list[str]) -> None:
        """Have a version here and on the disk. Raises: as `open`; what the disk says."""
        await self.bring(ticket, sources)
        # The manifest last: what has one on disk has its parts there.
        for piece in reversed(self._node.versions.pieces(ticket.version)):
            async with self.held(piece.key) as version:
                await self._hierarchy.versions.persist(version)

    @asynccontextmanager
    async def reading(self, key: VersionKey, may_be_incoming: bool) -> AsyncIterator[Readable]:
        """A version for another node's daemon, kept while it is being sent.

        Args:   may_be_incoming: also one that is only on its way here.
        Raises: CallerError: NOT_FOUND. ResourceError: its file is bad, or it is not known yet what
                is here.
        """
        await self._until_settled()
        self._check_readable(key)
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
        self._check_readable(key)
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
            # The manifest first: without it no part can be read.
            version = self._node.versions.find(key)
            for each in [*([version] if version else []), *self._node.versions.parts_of(key)]:
                await self._drop(each)

    async def _drop(self, version: Version) -> None:
        """From memory and from disk."""
        self._node.drop_version(version)
        if version.is_on_disk:
            await asyncio.to_thread(self._directory.remove, self._directory.version(version.key))

    def forget(self, policy: DeploymentKey) -> None:
        """Its job is over: drop every version of it from memory."""
        for version in self._node.versions.known():
            if version.key.policy == policy:
                self._node.drop_version(version)
        self._node.memory.drop_pool(str(policy))

    async def _bring(
        self,
        key: VersionKey,
        sources: list[str],
        ticket: Ticket | None,
        digest: str = "",
        *,
        is_doubted: bool = False,
    ) -> Version:
        """The committed version, in memory. Concurrent requests share one fetch."""
        lock = self._bringing.setdefault(key, asyncio.Lock())
        async with lock:
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
                    bad.give_up()
                if (bad or is_doubted) and error.info.code in _NOWHERE:
                    raise lost(key, error) from error
                raise
            if bad is not None:
                bad.replace(version)
            return version

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
        self, key: VersionKey, sources: list[str], ticket: Ticket | None, digest: str
    ) -> Version:
        if not sources:
            raise _not_here(key)
        node, home = self._node, self._home()
        version: Version | None = None

        async def place(description: VersionDescription) -> Incoming:
            nonlocal version
            if digest not in {"", description.digest}:
                raise CallerError(
                    f"it has digest {description.digest}, not {digest}",
                    code=Code.FAILED_PRECONDITION,
                    field="sources",
                )
            version = await self._begin(key, description)
            assert version.extent is not None
            memory = node.memory[version.extent].view(version.num_bytes)
            self._incoming[key] = Incoming(description, memory)
            return self._incoming[key]

        fetching = Fetching(key, ticket, home, place)
        try:
            came = await _bring_from_any(fetching, sources)
            assert version is not None
            if version.is_dropped:
                raise ResourceError(f"version {key} was dropped", code=Code.ABORTED)
            node.versions.commit(version, came)
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


def _description(version: Version, tensors: bytes | None = None) -> VersionExtent:
    return VersionExtent(
        version=version.key,
        num_bytes=version.num_bytes,
        tensors=version.table.packed if tensors is None else tensors,
        digest=version.digest,
        exists=version.is_committed,
    )
