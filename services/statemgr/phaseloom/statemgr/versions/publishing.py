"""Weights versions as a policy's ranks make them: an extent to write to, and the commit.

A version that several ranks write has parts. Each part is a version with its own key. The version
itself is the manifest that names the parts, and is committed last.
"""

from __future__ import annotations

from dataclasses import dataclass

from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.ids import VersionKey
from phaseloom.common.contract.state_layout import VersionParts
from phaseloom.common.contract.state_rank import (
    CommitParts,
    CommitVersion,
    CreateVersion,
    VersionExtent,
)
from phaseloom.common.tensors.blockhash import digest_of
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.common.tensors.versionparts import (
    check_part,
    encode_manifest,
    manifest_slots,
    part_of,
)
from phaseloom.statemgr.node.extents import HostMemory
from phaseloom.statemgr.node.stores import VersionStore, pool_of
from phaseloom.statemgr.records.incarnations import Wpg
from phaseloom.statemgr.records.layouts import Layouts, check_layout
from phaseloom.statemgr.records.versions import Version
from phaseloom.statemgr.tiering.tiering import Tiering
from phaseloom.statemgr.versions.fetch import VersionFetcher
from phaseloom.statemgr.versions.weights import description_of


@dataclass
class Publishing:
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
        """Check a manifest against the parts that this incarnation wrote here.

        Raises: CallerError: FAILED_PRECONDITION: a part here has another digest.
        """
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
            f"{wpg} cannot make version {key}", code=Code.PERMISSION_DENIED, field="version"
        )
