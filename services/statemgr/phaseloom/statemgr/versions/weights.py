"""Weights versions as they are read, kept and dropped: by ranks of their job, and for other nodes.

Who makes them is `publishing`, what brings them here `bringing`. A part is a version of its own
under a key of its own, and goes the same ways; the version itself is then its manifest.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from phaseloom.common.contract.commands import Ticket
from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.ids import DeploymentKey, VersionKey, check_name
from phaseloom.common.contract.state_rank import OpenVersion, VersionExtent
from phaseloom.common.tensors.versionparts import part_of
from phaseloom.statemgr.core.residency import Wpg
from phaseloom.statemgr.core.statefile import StateHeader
from phaseloom.statemgr.core.versions import Version
from phaseloom.statemgr.disk.files import StateDirectory
from phaseloom.statemgr.mesh.permission import check_reader
from phaseloom.statemgr.mesh.tls import Identity
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.tiers.hierarchy import Hierarchy
from phaseloom.statemgr.versions.boxes import IncomingSlices
from phaseloom.statemgr.versions.bringing import Bringing, not_here
from phaseloom.statemgr.versions.fetching import Home
from phaseloom.statemgr.versions.incoming import Readable, Whole
from phaseloom.statemgr.versions.manifests import Manifests
from phaseloom.statemgr.versions.wire import VersionDescription


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
        self._bringing = Bringing(node, directory, hierarchy, identity, peer_timeout_s, site=site)
        self._peer_timeout_s = peer_timeout_s

    def arriving(self, key: VersionKey) -> IncomingSlices | None:
        """A part that is being fetched by its boxes."""
        return self._bringing.arriving.get(key)

    @property
    def home(self) -> Home:
        """Who fetches."""
        return self._bringing.home

    def found(self, header: StateHeader) -> None:
        """A version that was on disk at start."""
        key = VersionKey(header.deployment, header.seq, header.part)
        self._node.versions.add_from_disk(key, header.num_bytes, header.tensors, header.digest)

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
        version = await self._bringing.bring(
            key, request.sources, request.ticket, request.digest, is_doubted=request.doubted
        )
        extent = version.extent
        assert extent is not None
        self._node.versions.opened(version, wpg)
        fds = [self._node.memory[extent].read_only_fd]
        described = description_of(version)
        if version.is_manifest:
            async with self._used(key):
                holders = await self._manifests.holders(
                    version, request.sources, request.ticket, self.home
                )
                version.check_kept()
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
            await self._bringing.bring(key, sources or [], ticket, is_doubted=True)
        finally:
            await self._node.keeper.record()

    async def bring(self, ticket: Ticket, sources: list[str]) -> None:
        """Have a version in host memory, with all of its parts. Raises: as `open`."""
        key = ticket.version
        check_name(key.policy.deployment, "ticket.version.policy")
        version = await self._bringing.bring(key, sources, ticket)
        if version.is_manifest:
            async with self._used(key):
                digests, home = self._digests_in(version), self.home
                for part in await self._manifests.holders(version, sources, ticket, home):
                    mine, digest = part_of(key, part.part), digests[part.part]
                    await self._bringing.bring(mine, part.endpoints, ticket, digest)

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
                raise not_here(part_of(key, part))
        return {part: known[part] for part in parts}

    def _digests_in(self, manifest: Version) -> dict[str, str]:
        return {part.part: part.digest for part in self._manifests.read(manifest).parts}

    async def digests_of(self, key: VersionKey) -> dict[str, str]:
        """By part, what of a version in parts this node can give away.

        Raises: CallerError: NOT_FOUND: none of it is here. ResourceError: as `_check_readable`.
        """
        await self._until_settled()
        if self._node.versions.find(key) is None:
            self._bringing.remaking.check(key)
        _, *parts = self._node.versions.pieces(key)
        return {part.key.part: part.digest for part in parts}

    def _check_readable(self, key: VersionKey) -> None:
        """Raises: CallerError: NOT_FOUND: a part of what is not committed as a whole.
        ResourceError: UNAVAILABLE: it was, and its policy makes it again."""
        if not self._node.versions.is_readable(key):
            self._bringing.remaking.check(key)
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
        incoming = self._bringing.incoming.get(key) if may_be_incoming else None
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
            self._bringing.remaking.check(key)
            raise not_here(key)
        await self._bringing.bring(key, [], None)
        async with self._used(key) as version:
            yield version

    @asynccontextmanager
    async def _used(self, key: VersionKey) -> AsyncIterator[Version]:
        version = self._node.versions.find(key)
        if version is None:
            # Dropped while it was on its way here.
            raise not_here(key)
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
                await self.discard(each)

    async def discard(self, version: Version) -> None:
        """From memory and from disk."""
        self._node.drop_version(version)
        if version.is_on_disk:
            await asyncio.to_thread(self._directory.remove, self._directory.version(version.key))

    def lock(self, key: VersionKey) -> asyncio.Lock:
        """Of who changes what this version is here."""
        return self._bringing.lock(key)

    def forget(self, policy: DeploymentKey) -> None:
        """Its job is over: drop every version of it from memory."""
        for version in self._node.versions.known():
            if version.key.policy == policy:
                self._node.drop_version(version)
        self._node.memory.drop_pool(str(policy))


def description_of(version: Version, tensors: bytes | None = None) -> VersionExtent:
    return VersionExtent(
        version=version.key,
        num_bytes=version.num_bytes,
        tensors=version.table.packed if tensors is None else tensors,
        digest=version.digest,
        exists=version.is_committed,
    )
