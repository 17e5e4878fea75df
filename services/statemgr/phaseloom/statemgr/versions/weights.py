"""Weights versions as ranks make, read and drop them, and as other nodes read them. `fetch` fetches
them.

A version that several ranks write has parts. Each part is a version with its own key and is treated
like any other. The version itself is then the manifest that names the parts, and is committed last.

A rank of another layout reads slices: the boxes that it needs, from parts of several ranks. A copy
of slices is stored next to the versions, under the version's key and a name derived from the
slices, so ranks that request the same slices share one copy. It is dropped with its version. Peers
on the same site may fetch boxes from it, even while it is still being fetched.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from phaseloom.common.contract.commands import Ticket
from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import (
    COPY_PREFIX,
    JobKey,
    VersionKey,
    check_name,
)
from phaseloom.common.contract.state_layout import PartSources, VersionParts
from phaseloom.common.contract.state_rank import (
    CommitParts,
    CommitVersion,
    CreateVersion,
    OpenSlices,
    OpenVersion,
    VersionExtent,
)
from phaseloom.common.tensors.blockhash import digest_in_threads, digest_of
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.common.tensors.versionparts import (
    check_part,
    decode_manifest,
    encode_manifest,
    manifest_slots,
    part_of,
)
from phaseloom.statemgr.node.digests import has_digest
from phaseloom.statemgr.node.extents import HostMemory
from phaseloom.statemgr.node.ledger import Ledger
from phaseloom.statemgr.node.stores import VersionStore, pool_of
from phaseloom.statemgr.records.incarnations import Wpg
from phaseloom.statemgr.records.layouts import Layouts, check_layout
from phaseloom.statemgr.records.records import Records
from phaseloom.statemgr.records.stateheader import StateHeader
from phaseloom.statemgr.records.versions import Version, not_here
from phaseloom.statemgr.tiering.tiering import Tiering, VersionMoves
from phaseloom.statemgr.transfer import wire
from phaseloom.statemgr.transfer.fetching import Fetch, call_once, not_delivered
from phaseloom.statemgr.transfer.permission import check_reader
from phaseloom.statemgr.transfer.served import Fetched, Incoming, OpenPart, OpenParts, Served
from phaseloom.statemgr.transfer.tensorslices import Batch, batches, slots_of
from phaseloom.statemgr.versions.fetch import VersionFetcher, VersionRequest, count_received

log = logging.getLogger(__name__)


_TRIES = 2
"""Attempts to copy slices from a part here that proves bad."""


@dataclass
class Weights:
    ledger: Ledger
    records: Records
    versions: VersionStore
    moves: VersionMoves
    fetcher: VersionFetcher

    def add_from_disk(self, header: StateHeader) -> None:
        """Add a version that is on disk."""
        key = VersionKey(header.deployment, header.seq, header.part)
        self.records.versions.add_from_disk(key, header.num_bytes, header.tensors, header.digest)

    async def open(self, wpg: Wpg, request: OpenVersion) -> tuple[VersionExtent, list[int]]:
        """Open a version for reading, from here or from the first source that has it. A version in
        parts is opened as its manifest, with the sources of the parts that are not here.

        Raises: CallerError: PERMISSION_DENIED: the version belongs to another tenant, or the ticket
                to another incarnation; NOT_FOUND: no source has the version, or some part of it.
                ResourceError: no source could deliver it, or no host memory.
        """
        key = request.version
        check_reader(wpg, key, request.ticket)
        self._check_readable(key)
        is_verified_later = request.is_unverified or request.is_ahead
        get = self.fetcher.get if is_verified_later else self.fetcher.get_verified
        permit, is_ahead = request.permit, request.is_ahead
        version = await get(
            VersionRequest(key, request.sources, request.ticket, request.digest, permit, is_ahead)
        )
        self.records.versions.opened(version, wpg)
        fds = [self.versions.fd_of(version)]
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
        """Verify the copy that is here because a reader found it bad, and fetch it again if it is.

        Raises: ResourceError: DATA_LOSS: the copy was bad and is dropped, and no source has a good
                one.
        """
        await self.ledger.until_settled(self.fetcher.home.timeout_s)
        async with self.ledger.change():
            await self.fetcher.get(VersionRequest(key, sources or (), ticket), is_suspect=True)

    async def get(self, ticket: Ticket, sources: list[str]) -> None:
        """Fetch a version with all of its parts into host memory."""
        key = ticket.version
        check_name(key.policy.deployment, "ticket.version.policy")
        version = await self.fetcher.get(VersionRequest(key, sources, ticket))
        if version.is_manifest:
            async with self._used(key):
                digests = self._digests_in(version)
                for part in await self._holders(version, sources, ticket):
                    part_key, digest = part_of(key, part.part), digests[part.part]
                    await self.fetcher.get(VersionRequest(part_key, part.endpoints, ticket, digest))

    async def committed_digests(self, key: VersionKey, parts: list[str]) -> dict[str, str]:
        """The digests of these parts of a version according to its manifest.

        Raises: CallerError: NOT_FOUND: the manifest is not here, or names no such part.
        """
        if not parts:
            return {}
        digests = {}
        async with self.held(key) as version:
            if version.is_manifest:
                digests = self._digests_in(version)
        for part in parts:
            if part not in digests:
                raise not_here(part_of(key, part))
        return {part: digests[part] for part in parts}

    def _digests_in(self, manifest: Version) -> dict[str, str]:
        parts = decode_manifest(self.versions.bytes_of(manifest), manifest.key)
        return {part.part: part.digest for part in parts.parts}

    async def _holders(
        self, manifest: Version, sources: list[str], ticket: Ticket | None
    ) -> list[PartSources]:
        """The sources that have each of the parts that are not here, in the order of `sources`.

        Only the sources know which parts they have, so all are queried at once. A source that does
        not answer counts as having none.

        Raises: CallerError: NOT_FOUND: all sources answer, and none has some part. ResourceError:
                none has it, and a source that may have it does not answer.
        """
        key = manifest.key
        local_parts = {
            part.key.part for part in self.records.versions.parts_of(key) if part.is_committed
        }
        missing_parts = [part for part in self._digests_in(manifest) if part not in local_parts]
        if not missing_parts:
            return []
        named = list(dict.fromkeys(sources))
        answers = await asyncio.gather(*(self._ask_parts(key, ticket, source) for source in named))
        by_source = dict(zip(named, answers, strict=True))
        errors = [answer for answer in answers if isinstance(answer, PhaseloomError)]
        holders = [
            PartSources(
                part,
                [at for at, has in by_source.items() if isinstance(has, set) and part in has],
            )
            for part in missing_parts
        ]
        missing = [holder.part for holder in holders if not holder.endpoints]
        if missing:
            label = f"{', '.join(missing)} of version {key}"
            raise not_delivered(label, errors or [not_here(key)])
        return holders

    async def _ask_parts(
        self, key: VersionKey, ticket: Ticket | None, source: str
    ) -> set[str] | PhaseloomError:
        message = wire.OpenVersion(key, ticket, [])
        try:
            return set((await call_once(source, message, wire.Opened, self.fetcher.home)).digests)
        except PhaseloomError as error:
            log.warning("cannot list the parts of version %s at %s: %s", key, source, error)
            return error

    async def digests_of(self, key: VersionKey) -> dict[str, str]:
        """The digests of the parts of a version that this node can serve, by part."""
        await self.ledger.until_settled(self.fetcher.home.timeout_s)
        if self.records.versions.find(key) is None:
            self.fetcher.suspects.check(key)
        _, *parts = self.records.versions.pieces(key)
        return {part.key.part: part.digest for part in parts}

    def _check_readable(self, key: VersionKey) -> None:
        """Check that all of the version is committed.

        Raises: CallerError: NOT_FOUND: the key names a part, and its version is not committed.
                ResourceError: UNAVAILABLE: the version went bad, and its policy makes it again.
        """
        if not self.records.versions.is_readable(key):
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
        self.mark_kept(ticket.version)
        # The manifest goes last, so that the parts are on disk if the manifest is.
        for piece in reversed(self.records.versions.pieces(ticket.version)):
            async with self.held(piece.key) as version:
                await self.moves.persist(version)

    def mark_kept(self, key: VersionKey) -> None:
        """Record that the pieces of a version stay here, whether or not ranks here read them."""
        manifest = self.records.versions.find(key)
        for piece in [*([manifest] if manifest else []), *self.records.versions.parts_of(key)]:
            piece.is_kept, piece.is_ahead = True, False

    @asynccontextmanager
    async def open_part(self, key: VersionKey) -> AsyncIterator[OpenPart]:
        """Open a part, or a whole version, that is here. It stays in memory while it is open."""
        async with self.held(key) as version:
            yield OpenPart.of(version, self.versions.bytes_of(version))

    @asynccontextmanager
    async def open_fetched(self, key: VersionKey) -> AsyncIterator[Served]:
        """Open a version, a part or slices that this node has fetched or is fetching. The memory
        stays while peers fetch from it."""
        version = self.records.versions.find(key)
        incoming = self.fetcher.incoming(version) if version is not None else None
        if incoming is None and not key.is_copy:
            async with self.open_part(key) as part:
                yield OpenParts({key.part: part})
            return
        if incoming is None:
            raise not_here(key)
        async with self._used(key) as version:
            yield Fetched(incoming, self.versions.bytes_of(version))

    @asynccontextmanager
    async def held(self, key: VersionKey) -> AsyncIterator[Version]:
        """Hold a committed version in host memory, and read it from disk if necessary.

        Raises: CallerError: NOT_FOUND. ResourceError: the file is bad, or the daemon is still
                taking over.
        """
        await self.ledger.until_settled(self.fetcher.home.timeout_s)
        self._check_readable(key)
        cached = self.records.versions.find(key)
        if cached is None or not cached.is_committed:
            # Do not wait for a fetch: the caller may be the one that this node fetches from.
            self.fetcher.suspects.check(key)
            raise not_here(key)
        await self.fetcher.get(VersionRequest(key))
        async with self._used(key) as version:
            yield version

    @asynccontextmanager
    async def _used(self, key: VersionKey) -> AsyncIterator[Version]:
        version = self.records.versions.find(key)
        if version is None:
            # It was dropped while it was being fetched.
            raise not_here(key)
        with self.versions.using(version):
            yield version

    async def drop(self, keys: list[VersionKey]) -> None:
        """Drop versions that nobody needs, with their parts, from memory and disk."""
        self.fetcher.cancel(lambda request_key: request_key.whole in keys)
        for key in keys:
            # The manifest goes first, because no part can be read without it.
            version = self.records.versions.find(key)
            for piece in [*([version] if version else []), *self.records.versions.parts_of(key)]:
                await self.moves.discard(piece)

    async def leave_job(self, job: JobKey) -> None:
        """Drop the versions that ranks of a job had fetched here, once the job has no deployment
        here.

        Versions of a policy that was here stay until the policy is forgotten or they are released.
        """
        if self.records.has_job(job):
            return

        def is_gone(key: VersionKey) -> bool:
            return key.policy.job_key == job and not self.records.residency.newest(key.policy)

        self.fetcher.cancel(is_gone)
        for version in self.records.versions.known():
            if is_gone(version.key) and not version.is_kept:
                await self.moves.discard(version)

    # --- slices ---

    async def open_slices(self, wpg: Wpg, request: OpenSlices) -> tuple[VersionExtent, list[int]]:
        """Open memory with exactly the slices that a rank requests, verified.

        Raises: CallerError: PERMISSION_DENIED: the version belongs to another job, or the ticket to
                another incarnation; NOT_FOUND: a slice is of a part, and the manifest of the
                version is not here or does not name that part; a bad slice; a source has other
                bytes. ResourceError: no source could deliver some slice; DATA_LOSS; no host memory.
        """
        key = request.version
        check_reader(wpg, key, request.ticket)
        # In a thread, because there may be tens of thousands of slices.
        slots, name = await asyncio.to_thread(_slots_and_name, request)
        copy_key = part_of(key, name)
        if not request.is_ahead:
            self.fetcher.mark_needed(copy_key)
        async with self.fetcher.lock(copy_key):
            version = self.records.versions.find(copy_key)
            if version is not None and not (
                request.is_ahead or await self.fetcher.is_sound(version, request.permit)
            ):
                await self.fetcher.suspects.drop_if_bad(version)
                version = self.records.versions.find(copy_key)
            if version is None:
                with self.fetcher.requesting(copy_key):
                    version = await self._fetch_slices(copy_key, request, slots)
        return description_of(version), [self.versions.fd_of(version)]

    async def _fetch_slices(
        self, copy_key: VersionKey, request: OpenSlices, slots: TensorTable
    ) -> Version:
        key = request.version
        parts = sorted({slice_.part for slice_ in request.slices} - {""})
        incoming = Incoming(request.slices, await self.committed_digests(key, parts))
        size, label = request.num_bytes, f"slices of version {key}"
        receiving = self.fetcher.receiving(
            copy_key, slots, size, incoming, label, is_ahead=request.is_ahead
        )
        async with receiving as version:
            memory = self.versions.bytes_of(version)
            with self.fetcher.fetch(version, incoming, request.ticket, label) as fetch:
                await self._fill(fetch, memory, request)
            digest = await asyncio.to_thread(digest_in_threads, memory)
            self.records.versions.commit(version, digest)
            version.verified_for = request.permit
        return version

    async def _fill(self, fetch: Fetch, memory: memoryview, request: OpenSlices) -> None:
        sources = {part_sources.part: part_sources.endpoints for part_sources in request.sources}
        by_part: dict[str, list[Batch]] = {}
        for batch in await asyncio.to_thread(batches, request.slices):
            by_part.setdefault(batch.part, []).append(batch)
        away: list[Batch] = []
        here_bytes = 0
        for part_batches in by_part.values():
            try:
                here_bytes += await self._copy_here(fetch, memory, request, part_batches)
            except PhaseloomError as error:
                if error.info.code is not Code.NOT_FOUND:
                    raise
                away += part_batches
        fetch = await fetch.fetch_with_retry(away, sources)
        log.info(
            "fetched %s: %d bytes from other nodes, %d from here, %d from peers; %s",
            *(
                fetch.label,
                fetch.fetched_bytes,
                here_bytes,
                fetch.relayed_bytes,
                count_received(fetch),
            ),
        )

    async def _copy_here(
        self, fetch: Fetch, memory: memoryview, request: OpenSlices, part_batches: list[Batch]
    ) -> int:
        """Copy slices of a part on this node, and verify the part, which nobody does later.

        Returns: the number of bytes copied.
        Raises:  CallerError: NOT_FOUND: the part is not here. ResourceError: DATA_LOSS: the part is
                 bad, and no source has a good one.
        """
        part = part_batches[0].part
        key = part_of(request.version, part)
        sources = [
            e
            for part_sources in request.sources
            if part_sources.part == part
            for e in part_sources.endpoints
        ]
        for _ in range(_TRIES):
            async with self.open_part(key) as open_part:
                fetch.check(part, open_part.version.digest, "this node")
                num_bytes = await asyncio.to_thread(_copy, open_part, part_batches, memory)
                if await has_digest(open_part.memory, open_part.version.digest):
                    for batch in part_batches:
                        fetch.incoming.add(batch)
                    return num_bytes
            await self.verify(key, sources, request.ticket)
        raise ResourceError(f"version {key} keeps going bad here", code=Code.DATA_LOSS)


def description_of(version: Version, tensors: bytes | None = None) -> VersionExtent:
    return VersionExtent(
        version=version.key,
        num_bytes=version.num_bytes,
        tensors=version.table.packed if tensors is None else tensors,
        digest=version.digest,
        exists=version.is_committed,
    )


def _copy(part: OpenPart, batches: Sequence[Batch], memory: memoryview) -> int:
    for batch in batches:
        runs_of_boxes = (part.find(box).read() for box in batch.boxes)
        batch.put(memory, b"".join(run for runs in runs_of_boxes for run in runs))
    return sum(batch.num_bytes for batch in batches)


def _slots_and_name(request: OpenSlices) -> tuple[TensorTable, str]:
    """The layout of the reader's memory, and the name of the copy of slices, which is the same for
    all requests for these slices."""
    slots = slots_of(request.slices, request.num_bytes)
    identity = msgspec.msgpack.encode((request.num_bytes, request.slices))
    name = f"{COPY_PREFIX}{hashlib.blake2b(identity, digest_size=16).hexdigest()}"
    return TensorTable.of(slots), name


@dataclass
class Publishing:
    """Versions that a policy's ranks write."""

    layouts: Layouts
    memory: HostMemory
    versions: VersionStore
    tiering: Tiering
    fetcher: VersionFetcher

    async def create(self, wpg: Wpg, request: CreateVersion) -> tuple[VersionExtent, list[int]]:
        """Return an extent to write a version to, or only the description of a version that is
        committed.

        Raises: CallerError: PERMISSION_DENIED: the version is not this policy's; a bad layout.
                ResourceError: RESOURCE_EXHAUSTED, with the numbers; ABORTED: the version is being
                fetched, or the incarnation is over.
        """
        wpg.check_alive()
        key = request.version
        _check_maker(wpg, key)
        if key.part:
            check_part(key.part, "version.part")
        table = self.layouts.read(request.tensors)
        check_layout(table, request.num_bytes)
        await self._drop_stale(key, wpg)
        version = self.versions.records.find(key)
        if version is not None and not version.is_committed:
            # A version that this incarnation or a fetch began and never committed. No
            # operation waits for a prefetched one.
            if version.incarnation != wpg.incarnation and not version.is_ahead:
                raise ResourceError(f"version {key} is being fetched here", code=Code.ABORTED)
            self.versions.drop(version)
            version = None
        if version is not None:
            return description_of(version, tensors=b""), []
        version = await self._begin(wpg, key, request.num_bytes, table, pool_of(wpg))
        self.versions.records.opened(version, wpg)
        assert version.extent is not None
        return description_of(version, tensors=b""), [self.memory[version.extent].fd]

    async def _begin(
        self,
        wpg: Wpg,
        key: VersionKey,
        num_bytes: int,
        table: TensorTable,
        pool: str = "",
    ) -> Version:
        async with self.tiering.reserved(num_bytes, f"version {key}", pool) as extent:
            wpg.check_alive()
            return self.versions.records.begin(key, num_bytes, table, extent, wpg.incarnation)

    async def _drop_stale(self, key: VersionKey, wpg: Wpg) -> None:
        """Drop parts of earlier versions that were never committed as a whole, and this part if an
        earlier incarnation wrote it: it may not fit the parts that are written now."""
        stale = self.versions.records.stale_parts(key.policy, key.seq)
        previous = self.versions.records.find(key)
        if (
            previous is not None
            and previous.is_committed
            and not self.versions.records.is_readable(key)
        ):
            stale += [previous] if previous.incarnation != wpg.incarnation else []
        for version in stale:
            await self.tiering.versions.discard(version)

    async def commit(self, wpg: Wpg, request: CommitVersion) -> None:
        """Commit a version that a rank has written; it is immutable from now on. Idempotent.

        Its bytes are not read here. The rank has hashed them while writing, and each reader
        verifies them, on this node or another.

        Raises: CallerError: NOT_FOUND: the policy is not writing the version; ALREADY_EXISTS: it is
                committed with other bytes.
        """
        version = self.versions.records.find(request.version)
        if version is None or version.key.policy != wpg.key:
            raise CallerError(
                f"{wpg} is not writing version {request.version}",
                code=Code.NOT_FOUND,
                field="version",
            )
        self.versions.records.commit(version, request.digest)

    async def commit_parts(self, wpg: Wpg, request: CommitParts) -> VersionExtent:
        """Commit a version whose parts are committed, here and on other nodes. Idempotent.

        Raises: CallerError: PERMISSION_DENIED: the version is not this policy's; ALREADY_EXISTS: it
                is committed with other bytes; FAILED_PRECONDITION: a part that this incarnation
                wrote here differs from the manifest. ResourceError: no room.
        """
        key = request.version
        _check_maker(wpg, key, is_whole=True)
        async with self.fetcher.lock(key):
            content = encode_manifest(request.manifest)
            version = self.versions.records.find(key)
            if version is None or version.digest != digest_of(memoryview(content)):
                self._check_manifest(wpg, key, request.manifest)
                await self._discard_earlier(wpg, key, request.manifest)
                table = TensorTable.of(manifest_slots(len(content)))
                version = await self._begin(wpg, key, len(content), table)
                self.versions.bytes_of(version)[:] = content
                self.versions.records.commit(version, digest_of(memoryview(content)))
            return description_of(version, tensors=b"")

    def _check_manifest(self, wpg: Wpg, key: VersionKey, manifest: VersionParts) -> None:
        """Raises: CallerError: FAILED_PRECONDITION: a part that this incarnation wrote here
        differs."""
        for part in manifest.parts:
            check_part(part.part, "manifest.parts")
            local = self.versions.records.find(part_of(key, part.part))
            is_its_own = local is not None and local.incarnation == wpg.incarnation
            if local is not None and is_its_own and local.digest != part.digest:
                raise CallerError(
                    f"version {local.key} has digest {local.digest!r}, not {part.digest!r}",
                    code=Code.FAILED_PRECONDITION,
                    field="manifest.parts",
                )

    async def _discard_earlier(self, wpg: Wpg, key: VersionKey, manifest: VersionParts) -> None:
        """Drop the manifest of an earlier incarnation, which made other bytes, and its parts and
        slices that differ from this incarnation's.

        Raises: CallerError: ALREADY_EXISTS: the committed manifest is this incarnation's, or the
                version was written whole.
        """
        version = self.versions.records.find(key)
        if version is not None and (
            version.incarnation == wpg.incarnation or not version.is_manifest
        ):
            raise CallerError(
                f"version {key} is committed with other bytes",
                code=Code.ALREADY_EXISTS,
                field="manifest",
            )
        digests = {part.part: part.digest for part in manifest.parts}
        stale_parts = [
            part
            for part in self.versions.records.parts_of(key)
            if part.incarnation != wpg.incarnation and part.digest != digests.get(part.key.part)
        ]
        for stale in [*([version] if version else []), *stale_parts]:
            await self.tiering.versions.discard(stale)


def _check_maker(wpg: Wpg, key: VersionKey, *, is_whole: bool = False) -> None:
    if key.policy != wpg.key or key.seq < 1 or (is_whole and key.part):
        raise CallerError(
            f"{wpg} may not make version {key}", code=Code.PERMISSION_DENIED, field="version"
        )
