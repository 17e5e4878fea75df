"""Weights versions as they are read, kept and dropped: by their tenant's ranks and other nodes.

`publishing` makes versions, `fetch` fetches them. A part is a version of its own under a key of its
own, and is treated as any other; the version itself is then the manifest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from phaseloom.common.contract.commands import Ticket
from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import DeploymentKey, VersionKey, check_name
from phaseloom.common.contract.state_layout import PartSources
from phaseloom.common.contract.state_rank import OpenVersion, VersionExtent
from phaseloom.common.tensors.versionparts import decode_manifest, part_of
from phaseloom.statemgr.disk.statefile import StateHeader
from phaseloom.statemgr.mesh.permission import check_reader
from phaseloom.statemgr.residency.incarnations import Wpg
from phaseloom.statemgr.transfer import wire
from phaseloom.statemgr.transfer.fetching import ask_once
from phaseloom.statemgr.transfer.served import Fetched, OpenPart, OpenParts, Served
from phaseloom.statemgr.versions.fetch import VersionFetcher
from phaseloom.statemgr.versions.versions import Version, not_here

log = logging.getLogger(__name__)


class Weights:
    def __init__(self, fetcher: VersionFetcher) -> None:
        self.fetcher = fetcher
        self._node = fetcher.node

    def found(self, header: StateHeader) -> None:
        """Add a version that was found on disk."""
        key = VersionKey(header.deployment, header.seq, header.part)
        self._node.versions.add_from_disk(key, header.num_bytes, header.tensors, header.digest)

    async def open(self, wpg: Wpg, request: OpenVersion) -> tuple[VersionExtent, list[int]]:
        """A version to read, from here or from the first source that has it. For a version in parts
        it is the manifest, and the sources of the parts that are not here.

        Raises: CallerError: PERMISSION_DENIED: the version is of another tenant, or the ticket of
                another incarnation; NOT_FOUND: no source has the version, or some part of it.
                ResourceError: no source could deliver it, or no host memory.
        """
        key = request.version
        check_reader(wpg, key, request.ticket)
        self._check_readable(key)
        version = await self.fetcher.get(
            key, request.sources, request.ticket, request.digest, is_suspect=request.is_suspect
        )
        extent = version.extent
        assert extent is not None
        self._node.versions.opened(version, wpg)
        fds = [self._node.memory[extent].read_only_fd]
        described = description_of(version)
        if version.is_manifest:
            async with self._used(key):
                holders = await self._holders(version, request.sources, request.ticket)
                version.check_kept()
            described = msgspec.structs.replace(described, sources=holders)
        return described, fds

    async def verify(
        self, key: VersionKey, sources: list[str] | None = None, ticket: Ticket | None = None
    ) -> None:
        """Verify the copy that is here, because a reader found it bad; fetch it again if it is.

        Raises: ResourceError: DATA_LOSS: the copy was bad and is dropped, and no source has a good
                one.
        """
        await self._node.until_settled(self.fetcher.home.timeout_s)
        async with self._node.change():
            await self.fetcher.get(key, sources or [], ticket, is_suspect=True)

    async def get(self, ticket: Ticket, sources: list[str]) -> None:
        """Fetch a version into host memory with all of its parts."""
        key = ticket.version
        check_name(key.policy.deployment, "ticket.version.policy")
        version = await self.fetcher.get(key, sources, ticket)
        if version.is_manifest:
            async with self._used(key):
                digests = self._digests_in(version)
                for part in await self._holders(version, sources, ticket):
                    mine, digest = part_of(key, part.part), digests[part.part]
                    await self.fetcher.get(mine, part.endpoints, ticket, digest)

    async def committed_digests(self, key: VersionKey, parts: list[str]) -> dict[str, str]:
        """The digests of these parts of a version, as its manifest says.

        Raises: CallerError: NOT_FOUND: the manifest is not here, or names no such part.
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
        """The digest of each part, by name. Raises: ResourceError: DATA_LOSS: a bad manifest."""
        found = decode_manifest(self._node.memory_of(manifest), manifest.key)
        return {part.part: part.digest for part in found.parts}

    async def _holders(
        self, manifest: Version, sources: list[str], ticket: Ticket | None
    ) -> list[PartSources]:
        """The sources that have each of the parts that are not here, in the order of `sources`.

        All sources are asked at once, because only they know which parts they have; one that does
        not answer counts as having none.
        Raises: CallerError: NOT_FOUND: all sources answer, and none has some part. ResourceError:
                none has it, and a source that may have it does not answer.
        """
        key, versions = manifest.key, self._node.versions
        here = {each.key.part for each in versions.parts_of(key) if each.is_committed}
        wanted = [part for part in self._digests_in(manifest) if part not in here]
        if not wanted:
            return []
        named = list(dict.fromkeys(sources))
        answers = await asyncio.gather(*(self._ask_parts(key, ticket, each) for each in named))
        by_source = dict(zip(named, answers, strict=True))
        errors = [each for each in answers if isinstance(each, PhaseloomError)]
        holders = [
            PartSources(
                part,
                [at for at, has in by_source.items() if isinstance(has, set) and part in has],
            )
            for part in wanted
        ]
        missing = [each.part for each in holders if not each.endpoints]
        if missing:
            raise _without(key, missing, errors)
        return holders

    async def _ask_parts(
        self, key: VersionKey, ticket: Ticket | None, source: str
    ) -> set[str] | PhaseloomError:
        asked = wire.OpenVersion(key, ticket, [])
        try:
            return set((await ask_once(source, asked, wire.Opened, self.fetcher.home)).digests)
        except PhaseloomError as error:
            log.warning("which parts of version %s are at %s: %s", key, source, error)
            return error

    async def digests_of(self, key: VersionKey) -> dict[str, str]:
        """The digests of the parts of a version that this node can give away, by part."""
        await self._node.until_settled(self.fetcher.home.timeout_s)
        if self._node.versions.find(key) is None:
            self.fetcher.suspects.check(key)
        _, *parts = self._node.versions.pieces(key)
        return {part.key.part: part.digest for part in parts}

    def _check_readable(self, key: VersionKey) -> None:
        """Check that all of the version is committed.

        Raises: CallerError: NOT_FOUND: the key is of a part, and its version is not committed.
                ResourceError: UNAVAILABLE: the version went bad, and its policy makes it again.
        """
        if not self._node.versions.is_readable(key):
            self.fetcher.suspects.check(key)
            raise CallerError(
                f"version {key.whole} is not here, or not all of it is committed",
                code=Code.NOT_FOUND,
                field="version",
                remedy="open the version, then its parts",
            )

    async def keep(self, ticket: Ticket, sources: list[str]) -> None:
        """Fetch a version and write it to this node's disk."""
        await self.get(ticket, sources)
        # The manifest last: where a manifest is on disk, the parts are, too.
        for piece in reversed(self._node.versions.pieces(ticket.version)):
            async with self.held(piece.key) as version:
                await self.fetcher.tiering.versions.persist(version)

    @asynccontextmanager
    async def open_part(self, key: VersionKey) -> AsyncIterator[OpenPart]:
        """Open a part, or a whole version, that is here; it stays in memory while it is open."""
        async with self.held(key) as version:
            yield OpenPart.of(version, self._node.memory_of(version))

    @asynccontextmanager
    async def open_fetched(self, key: VersionKey) -> AsyncIterator[Served]:
        """Open a version, a part or slices that this node has fetched or is fetching; the memory
        stays while peers take from it."""
        version = self._node.versions.find(key)
        incoming = self.fetcher.incoming(version) if version is not None else None
        if incoming is None and not key.is_copy:
            async with self.open_part(key) as part:
                yield OpenParts({key.part: part})
            return
        if incoming is None:
            raise not_here(key)
        async with self._used(key) as version:
            yield Fetched(incoming, self._node.memory_of(version))

    @asynccontextmanager
    async def held(self, key: VersionKey) -> AsyncIterator[Version]:
        """Hold a committed version that is here in host memory; it is read from disk if need be.

        Raises: CallerError: NOT_FOUND. ResourceError: the file is bad, or the daemon does not know
                yet what it holds.
        """
        await self._node.until_settled(self.fetcher.home.timeout_s)
        self._check_readable(key)
        known = self._node.versions.find(key)
        if known is None or not known.is_committed:
            # It may be on its way here, and the one that asks may be the one that fetches it.
            self.fetcher.suspects.check(key)
            raise not_here(key)
        await self.fetcher.get(key, [], None)
        async with self._used(key) as version:
            yield version

    @asynccontextmanager
    async def _used(self, key: VersionKey) -> AsyncIterator[Version]:
        version = self._node.versions.find(key)
        if version is None:
            # Dropped while it was being fetched.
            raise not_here(key)
        with self._node.using(version):
            yield version

    async def drop(self, keys: list[VersionKey]) -> None:
        """Drop versions that nobody needs any more, with their parts, from memory and disk."""
        for key in keys:
            # The manifest first: without it no part can be read.
            version = self._node.versions.find(key)
            for each in [*([version] if version else []), *self._node.versions.parts_of(key)]:
                await self.discard(each)

    async def discard(self, version: Version) -> None:
        """Remove a version from memory and from disk."""
        self._node.drop_version(version)
        if version.is_on_disk:
            directory = self._node.directory
            await asyncio.to_thread(directory.remove, directory.version(version.key))

    def forget(self, policy: DeploymentKey) -> None:
        """Drop every version of a policy whose job is over from memory."""
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


def _without(version: VersionKey, parts: list[str], errors: list[PhaseloomError]) -> PhaseloomError:
    """The error where no source has these parts. Args: errors: those of sources that failed."""
    why = "; ".join(map(str, errors)) or "no source that is named has them"
    text = f"version {version} lacks {', '.join(parts)}: {why}"
    remedy = "retry; name sources that hold the version"
    if all(error.info.code is Code.NOT_FOUND for error in errors):
        return CallerError(text, code=Code.NOT_FOUND, field="version", remedy=remedy)
    codes = {error.info.code for error in errors} - {Code.NOT_FOUND}
    code = codes.pop() if len(codes) == 1 else Code.UNAVAILABLE
    return ResourceError(text, code=code, remedy=remedy)
