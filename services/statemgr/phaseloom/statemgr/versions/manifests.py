"""What a weights version in parts consists of: its manifest, written last and read first."""

from __future__ import annotations

from phaseloom.common.contract.commands import Ticket
from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.ids import VersionKey
from phaseloom.common.contract.state_layout import PartSources, VersionParts
from phaseloom.common.tensors.blockhash import digest_of
from phaseloom.common.tensors.versionparts import (
    check_part,
    decode_manifest,
    manifest_slots,
    part_of,
)
from phaseloom.statemgr.core.residency import Wpg
from phaseloom.statemgr.core.versions import Version
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.tiers.hierarchy import Hierarchy
from phaseloom.statemgr.versions.fetching import Home
from phaseloom.statemgr.versions.holdings import ask_holdings


class Manifests:
    """Reads and writes them; when that may be is for who holds the version's lock to say."""

    def __init__(self, node: Node, hierarchy: Hierarchy) -> None:
        self._node = node
        self._hierarchy = hierarchy

    def check(self, wpg: Wpg, key: VersionKey, manifest: VersionParts) -> None:
        """Raises: CallerError: FAILED_PRECONDITION: it has written another part here."""
        for part in manifest.parts:
            check_part(part.part, "manifest.parts")
            here = self._node.versions.find(part_of(key, part.part))
            is_its_own = here is not None and here.incarnation == wpg.incarnation
            if here is not None and is_its_own and here.digest != part.digest:
                raise CallerError(
                    f"version {here.key} has digest {here.digest!r}, not {part.digest!r}",
                    code=Code.FAILED_PRECONDITION,
                    field="manifest.parts",
                )

    async def write(self, wpg: Wpg, key: VersionKey, content: bytes) -> Version:
        """Commit it: from now on the parts can be read.

        Raises: ResourceError: no room; its life is over.
        """
        node, size = self._node, len(content)
        extent = await self._hierarchy.reserve(size, f"version {key}")
        node.memory[extent].view(size)[:] = content
        if wpg.is_lost:
            node.memory.free(extent)
            raise ResourceError(f"{wpg} is over", code=Code.ABORTED)
        slots = manifest_slots(size)
        try:
            version = node.versions.begin(key, size, slots, extent, wpg.incarnation)
        except CallerError:
            # Begun as a whole one while this waited for room.
            node.memory.free(extent)
            raise
        node.versions.commit(version, digest_of(memoryview(content)))
        return version

    def read(self, version: Version) -> VersionParts:
        """Of one that is in host memory. Raises: ResourceError: DATA_LOSS."""
        assert version.extent is not None
        memory = self._node.memory[version.extent].view(version.num_bytes)
        return decode_manifest(memory, version.key)

    async def holders(
        self, manifest: Version, sources: list[str], ticket: Ticket | None, home: Home
    ) -> list[PartSources]:
        """Of the parts that are not here, who has each.

        Raises: CallerError: NOT_FOUND: nobody has one. ResourceError: who may have it is away.
        """
        key = manifest.key
        wanted = [
            part.part
            for part in self.read(manifest).parts
            if not self._is_here(part_of(key, part.part))
        ]
        if not wanted:
            return []
        found = await ask_holdings(key, ticket, sources, home)
        holders = [PartSources(part, found.holders_of(part)) for part in wanted]
        missing = [each.part for each in holders if not each.endpoints]
        if missing:
            raise found.without(missing)
        return holders

    def _is_here(self, key: VersionKey) -> bool:
        version = self._node.versions.find(key)
        return version is not None and version.is_committed
