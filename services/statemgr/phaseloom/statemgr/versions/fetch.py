"""Fetches weights versions into host memory, from this node's disk or from other nodes. `Suspects`
drops versions that a reader found bad."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

from phaseloom.common.contract.commands import Ticket
from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import VersionKey
from phaseloom.common.contract.specs import CommandId
from phaseloom.common.observability import metrics
from phaseloom.common.tensors.hugepages import make_huge
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.statemgr.disk.files import StateDirectory, find_parts
from phaseloom.statemgr.node.digests import has_digest
from phaseloom.statemgr.node.ranks import Ranks
from phaseloom.statemgr.node.stores import VersionStore
from phaseloom.statemgr.records.layouts import check_layout
from phaseloom.statemgr.records.records import Records
from phaseloom.statemgr.records.versions import Version, not_here
from phaseloom.statemgr.tiering.tiering import Tiering
from phaseloom.statemgr.transfer import wire
from phaseloom.statemgr.transfer.assignment import Peer
from phaseloom.statemgr.transfer.delta import is_available
from phaseloom.statemgr.transfer.fetching import (
    Fetch,
    Home,
    Memory,
    connect_and_call,
    not_delivered,
)
from phaseloom.statemgr.transfer.served import Incoming
from phaseloom.statemgr.transfer.tensorslices import batches, slices_of_part
from phaseloom.statemgr.transfer.tls import Stream, closed_on_failure

log = logging.getLogger(__name__)

_NOWHERE = frozenset({Code.NOT_FOUND, Code.DATA_LOSS, Code.FAILED_PRECONDITION})
"""Codes with which a source says that it does not have the version."""


class VersionRequest(NamedTuple):
    """A version that must be in host memory, and where to get it."""

    key: VersionKey
    sources: Sequence[str] = ()
    ticket: Ticket | None = None
    digest: str = ""
    """The digest that a source must have; empty: any."""
    permit: CommandId | None = None
    """The permit of the operation that reads the version. All of its ranks copy the same memory, so
    requests with one permit share one verification."""
    is_ahead: bool = False
    """Whether this is a prefetch; see `OpenVersion`."""


@dataclass
class VersionFetcher:
    versions: VersionStore
    suspects: Suspects
    tiering: Tiering
    directory: StateDirectory
    home: Home
    _incoming: WeakKeyDictionary[Version, Incoming] = field(
        default_factory=WeakKeyDictionary, init=False
    )
    """Slices of each version that is being fetched, and of each copy of slices."""
    _requested: set[VersionKey] = field(default_factory=set, init=False)
    """Versions, parts and copies of slices that other nodes are being asked for."""
    _cancelled: set[VersionKey] = field(default_factory=set, init=False)
    """Members of `_requested` that were dropped since."""
    _verifying: WeakKeyDictionary[Version, asyncio.Lock] = field(
        default_factory=WeakKeyDictionary, init=False
    )
    """Held while a version's memory is verified for a reader."""
    _locks: WeakValueDictionary[VersionKey, asyncio.Lock] = field(
        default_factory=WeakValueDictionary, init=False
    )

    def lock(self, key: VersionKey) -> asyncio.Lock:
        """The lock of a version. Hold it to fetch, verify or commit the version."""
        return self._locks.setdefault(key, asyncio.Lock())

    def incoming(self, version: Version) -> Incoming | None:
        """The slices of a version that is being fetched, or of a copy of slices, and which of their
        bytes have arrived; None: it is neither."""
        return self._incoming.get(version)

    def cancel(self, is_gone: Callable[[VersionKey], bool]) -> None:
        """Cancel requests to other nodes that have not reserved memory yet. A fetch with memory
        ends with its version (`Version.end_fetch`)."""
        self._cancelled.update(filter(is_gone, self._requested))

    @contextmanager
    def requesting(self, key: VersionKey) -> Iterator[None]:
        """Mark a version, part or copy of slices as requested from other nodes within the block."""
        self._requested.add(key)
        try:
            yield
        finally:
            self._requested.discard(key)
            self._cancelled.discard(key)

    def mark_needed(self, key: VersionKey) -> None:
        """Record that an operation waits for a version or copy of slices, even if a prefetch
        fetches it."""
        version = self.versions.records.find(key)
        if version is not None:
            version.is_ahead = False

    async def get_verified(self, request: VersionRequest) -> Version:
        """Return the committed version, in memory and verified. If it was bad, it is read or
        fetched again.

        Raises: as `get`.
        """
        version = await self.get(request)
        if await self.is_sound(version, request.permit):
            return version
        log.warning("opening version %s again", request.key)
        return await self.get(request, is_suspect=True)

    async def is_sound(self, version: Version, permit: CommandId | None) -> bool:
        """Whether a version in host memory still has its committed bytes, and was not dropped.

        Does not need the version's lock, so other requests continue meanwhile.
        """
        with self.versions.using(version):
            async with self._verifying.setdefault(version, asyncio.Lock()):
                if permit is None or version.verified_for != permit:
                    if not await has_digest(self.versions.bytes_of(version), version.digest):
                        return False
                    version.verified_for = permit
        return not version.is_dropped

    async def get(self, request: VersionRequest, *, is_suspect: bool = False) -> Version:
        """Return the committed version, in memory. Concurrent requests share one fetch.

        Args:   is_suspect: first verify the copy that is here, and drop it if it is bad.
        Raises: CallerError: NOT_FOUND: the version is not committed here yet, or no source has it.
                ResourceError: no source could deliver it; DATA_LOSS; no host memory; UNAVAILABLE:
                its policy makes it again.
        """
        key = request.key
        if not request.is_ahead:
            self.mark_needed(key)
        async with self.lock(key):
            version = self.versions.records.find(key)
            if version is not None and not version.is_committed:
                raise CallerError(f"version {key} is not committed yet", code=Code.NOT_FOUND)
            bad: Version | None = None
            # Manifests are small, and this daemon reads them itself, so they are always verified.
            if version is not None and (is_suspect or version.is_manifest):
                bad = version if await self.suspects.drop_if_bad(version) else None
            if bad is not None:
                # All readers must get the same bytes.
                request = request._replace(digest=request.digest or bad.digest)
            try:
                return await self._read_or_fetch(request)
            except PhaseloomError as error:
                if bad is not None:
                    await self.suspects.rebuild(bad)
                if error.info.code in _NOWHERE:
                    self.suspects.check(key)
                    if bad is not None or is_suspect:
                        raise _lost(key, error) from error
                raise

    async def _read_or_fetch(self, request: VersionRequest) -> Version:
        """Return the version from memory, else from disk, else from another node. The latter two
        verify it."""
        version = self.versions.records.find(request.key)
        if version is not None and version.extent is None:
            try:
                await self._read(version, is_ahead=request.is_ahead)
                version.verified_for = request.permit
            except PhaseloomError as error:
                if not (version.is_dropped and request.sources):
                    raise
                log.warning("%s; fetching it from another node", error)
                version = None
        if version is not None:
            return version
        if not request.sources:
            raise not_here(request.key)
        with self.requesting(request.key):
            endpoint, stream, described = await self._describe(request)
            with closing(stream):
                version = await self._fetch(request, {endpoint: stream}, described)
        version.verified_for = request.permit
        return version

    async def _read(self, version: Version, *, is_ahead: bool) -> None:
        key = version.key
        path = self.directory.version(key)
        label, pool, after_s = f"version {key}", str(key.policy), _after_s(is_ahead=is_ahead)
        async with self.tiering.reserved(version.num_bytes, label, pool, after_s=after_s) as extent:
            version.check_kept()
            version.extent = extent
        with self.versions.using(version):
            try:
                place = (await asyncio.to_thread(find_parts, path))[0]
                await asyncio.to_thread(self.directory.read, place, self.versions.bytes_of(version))
            except PhaseloomError:
                self.versions.drop(version)
                raise
        version.check_kept()

    async def _fetch(
        self,
        request: VersionRequest,
        idle_streams: dict[str, Stream],
        described: wire.VersionDescription,
    ) -> Version:
        key = request.key
        size, digest = described.num_bytes, described.digest
        table = TensorTable.of(described.tensors)
        check_layout(table, size)
        slices = slices_of_part(key.part, described.tensors, size)
        incoming = Incoming(slices, {key.part: digest})
        label = f"version {key}"
        receiving = self.receiving(key, table, size, incoming, label, is_ahead=request.is_ahead)
        async with receiving as version:
            everything = await asyncio.to_thread(batches, slices)
            with self.fetch(version, incoming, request.ticket, label, digest) as first:
                first.idle_streams = idle_streams
                fetch = await first.fetch_with_retry(everything, {key.part: list(request.sources)})
            self.versions.records.commit(version, digest)
        log.info(
            "fetched version %s: %d bytes from its source, %d from peers; %s",
            *(key, fetch.fetched_bytes, fetch.relayed_bytes, count_received(fetch)),
        )
        return version

    @contextmanager
    def fetch(
        self,
        version: Version,
        incoming: Incoming,
        ticket: Ticket | None,
        label: str,
        digest: str = "",
    ) -> Iterator[Fetch]:
        """Make a fetch of a version or slices into memory. Sources may send deltas of an earlier
        version of the same layout, which stays in memory within the block.

        Args: digest: of the whole, if known.
        """
        key, home = version.key, self.home
        memory = Memory(self.versions.bytes_of(version), digest)
        with ExitStack() as stack:
            base = self._base(version)
            if base is not None:
                earlier, _ = base
                stack.enter_context(self.versions.using(earlier))
                memory.base = self.versions.bytes_of(earlier)

            def open_with(parts: list[str], session: str | None) -> wire.OpenVersion:
                me = Peer(home.endpoint, key.part)
                named = base[1] if base is not None else None
                return wire.OpenVersion(key.whole, ticket, parts, home.site, me, named, session)

            fetch = Fetch(label, open_with, home, incoming, memory)
            version.check_kept()
            version.end_fetch = fetch.end
            try:
                yield fetch
            finally:
                version.end_fetch = memory.base = None

    def _base(self, version: Version) -> tuple[Version, wire.BaseVersion] | None:
        if not is_available():
            return None
        for earlier in self.versions.records.bases_of(version):
            digests = {earlier.key.part: earlier.digest}
            if earlier.key.is_copy:
                incoming = self._incoming.get(earlier)
                digests = incoming.digests if incoming is not None else {}
            if digests:
                return earlier, wire.BaseVersion(earlier.key.seq, dict(digests))
        return None

    @asynccontextmanager
    async def receiving(
        self,
        key: VersionKey,
        table: TensorTable,
        num_bytes: int,
        incoming: Incoming,
        label: str,
        *,
        is_ahead: bool,
    ) -> AsyncIterator[Version]:
        """Reserve memory for a version, a part, or slices to fetch within the block. They are
        dropped if they are not committed at its end. Call this within `requesting`.

        Args: is_ahead: for a prefetch, which takes free memory only.
        """
        pool, after_s = str(key.policy), _after_s(is_ahead=is_ahead)
        async with self.tiering.reserved(num_bytes, label, pool, after_s=after_s) as extent:
            if key in self._cancelled:
                raise ResourceError(f"{label} was dropped", code=Code.ABORTED)
            version = self.versions.records.begin(key, num_bytes, table, extent)
            version.is_ahead, version.is_kept = is_ahead, False
        self._incoming[version] = incoming
        with self.versions.using(version):
            try:
                # Huge pages make receiving and reading twice as fast.
                await asyncio.to_thread(make_huge, self.versions.bytes_of(version))
                yield version
            finally:
                incoming.give_up()
                if not key.is_copy:
                    # From now on committed parts are served from the version itself.
                    del self._incoming[version]
                if not version.is_committed and not version.is_dropped:
                    self.versions.drop(version)

    async def _describe(
        self, request: VersionRequest
    ) -> tuple[str, Stream, wire.VersionDescription]:
        """Get the description of a version from the first source that has the required digest.

        Returns: the source; a stream to it, on which the version may be opened; the description.
        """
        key, digest, errors = request.key, request.digest, list[PhaseloomError]()
        message = wire.DescribeVersion(key, request.ticket)
        for endpoint in request.sources:
            try:
                answer = wire.VersionDescription
                stream, described = await connect_and_call(endpoint, message, answer, self.home)
                with closed_on_failure(stream):
                    if digest not in {"", described.digest}:
                        raise CallerError(
                            f"it has digest {described.digest}, not {digest}",
                            code=Code.FAILED_PRECONDITION,
                            field="sources",
                        )
                return endpoint, stream, described
            except PhaseloomError as error:
                log.warning("version %s from %s: %s", key, endpoint, error)
                errors.append(error)
        raise not_delivered(f"version {key}", errors)


def _after_s(*, is_ahead: bool) -> float:
    return math.inf if is_ahead else -math.inf


def count_received(fetch: Fetch) -> str:
    """Count received bytes by the form in which they were sent.

    Returns: the share of deltas, for the log.
    """
    whole_bytes = fetch.fetched_bytes - fetch.rebuilt_bytes + fetch.relayed_bytes
    metrics.count(metrics.VERSION_RECEIVED, whole_bytes, form="whole")
    metrics.count(metrics.VERSION_RECEIVED, fetch.delta_bytes, form="delta")
    metrics.count(metrics.VERSION_REBUILT, fetch.rebuilt_bytes)
    return f"{fetch.rebuilt_bytes} of them as deltas of {fetch.delta_bytes} bytes"


@dataclass
class Suspects:
    """Weights versions that a reader found bad in host memory.

    Bad bytes are dropped, and the version is read again from disk or fetched from another node. A
    rank that has the memory mapped keeps its pages, but no other reader gets them. Incarnations
    whose host copy is that memory are over. If neither disk nor another node has the version, and
    no seal either, the incarnation of its policy is over too: the next one makes the version again
    from seal and log.
    """

    records: Records
    versions: VersionStore
    ranks: Ranks
    directory: StateDirectory
    _lost: dict[VersionKey, int] = field(default_factory=dict, init=False)
    """Versions that their policy will make again, with the incarnation of the policy that ended."""

    async def drop_if_bad(self, version: Version) -> bool:
        """Verify the bytes of a committed version in host memory, and drop them if they are bad.

        Returns: whether they were bad. The version is then at most on this node's disk.
        """
        extent = version.extent
        if extent is None:
            return False
        with self.versions.using(version):
            is_good = await has_digest(self.versions.bytes_of(version), version.digest)
            version.check_kept()
            if is_good:
                return False
            log.error("version %s is bad in host memory", version.key)
            version.is_bad = True
            host_copies = [c for c in self.records.host_copies.all() if c.extent == extent]
            self.versions.drop(version)
            if version.is_on_disk:
                self.records.versions.add_from_disk(
                    version.key, version.num_bytes, version.tensors, version.digest
                )
            for wpg in {wpg for copy in host_copies for wpg in copy.wpgs}:
                self.ranks.retire(wpg, f"its host copy is the memory of {version}, which is bad")
        return True

    async def rebuild(self, version: Version) -> None:
        """End the incarnation that made a bad version which no node has, so that the next one makes
        it again. All pieces of the version here are dropped. Does nothing if a seal has the
        version."""
        records, policy, key = self.records, version.key.policy, version.key.whole
        if version.is_on_disk or any(seal.seq >= key.seq for seal in records.seals.of(policy)):
            return
        if version.key.is_copy or not records.residency.is_alive(policy, version.incarnation):
            return
        manifest = records.versions.find(key)
        pieces = [*([manifest] if manifest else []), *records.versions.parts_of(key)]
        for piece in pieces:
            self.versions.drop(piece)
        maker = records.residency.find(policy)
        assert maker is not None
        self.ranks.retire(maker, f"{version}, which no seal has, is bad")
        self._lost[key] = maker.incarnation
        paths = [self.directory.version(piece.key) for piece in pieces if piece.is_on_disk]
        await asyncio.to_thread(self.directory.discard, *paths)

    def check(self, key: VersionKey) -> None:
        """Raises: ResourceError: UNAVAILABLE: the version's policy will make it again."""
        incarnation = self._lost.get(key.whole)
        if incarnation is None:
            return
        if self.records.residency.newest(key.policy) != incarnation:
            # The next incarnation is here; the scheduler has its readers wait for it.
            del self._lost[key.whole]
            return
        raise ResourceError(
            f"version {key.whole} went bad in host memory before it was sealed: its policy is "
            "being rebuilt and will make it again",
            remedy="sync it again",
        )


def _lost(key: VersionKey, error: PhaseloomError) -> ResourceError:
    part = f"part {key.part} of version {key.whole}" if key.part else f"version {key}"
    return ResourceError(
        f"{part} went bad in host memory, and no other node has it: {error.info.message}",
        code=Code.DATA_LOSS,
        remedy="publish the weights again as a new version, and sync that",
        details={"version": key.whole, "part": key.part},
    )
