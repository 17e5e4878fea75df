"""The manifest of a weights version in parts, written last and read first; and who holds the parts,
which is asked of each node, because only it knows."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from phaseloom.common.contract.commands import Ticket
from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import VersionKey
from phaseloom.common.contract.state_layout import PartSources, VersionParts
from phaseloom.common.tensors.blockhash import digest_of
from phaseloom.common.tensors.versionparts import (
    check_part,
    decode_manifest,
    manifest_slots,
    part_of,
)
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.residency.residency import Wpg
from phaseloom.statemgr.tiering.tiering import Tiering
from phaseloom.statemgr.transfer import wire
from phaseloom.statemgr.transfer.fetching import Home, ask_once
from phaseloom.statemgr.versions.versions import Version

log = logging.getLogger(__name__)


class Manifests:
    """Reads and writes manifests; the caller holds the version's lock."""

    def __init__(self, node: Node, tiering: Tiering) -> None:
        self._node = node
        self._tiering = tiering

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
        extent = await self._tiering.reserve(size, f"version {key}")
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
        """The content of a manifest in host memory. Raises: ResourceError: DATA_LOSS."""
        assert version.extent is not None
        memory = self._node.memory[version.extent].view(version.num_bytes)
        return decode_manifest(memory, version.key)

    async def holders(
        self, manifest: Version, sources: list[str], ticket: Ticket | None, home: Home
    ) -> list[PartSources]:
        """Who has each of the parts that are not here.

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
        found = await _ask_holders(key, ticket, sources, home)
        holders = [PartSources(part, found.holders_of(part)) for part in wanted]
        missing = [each.part for each in holders if not each.endpoints]
        if missing:
            raise found.without(missing)
        return holders

    def _is_here(self, key: VersionKey) -> bool:
        version = self._node.versions.find(key)
        return version is not None and version.is_committed


@dataclass
class _Holders:
    version: VersionKey
    by_source: dict[str, set[str]] = field(default_factory=dict)
    errors: list[PhaseloomError] = field(default_factory=list)
    """The errors of sources that did not answer, or refused."""

    def holders_of(self, part: str) -> list[str]:
        """The endpoints that have a part, in the order in which the sources were named."""
        return [source for source, parts in self.by_source.items() if part in parts]

    def without(self, parts: list[str]) -> PhaseloomError:
        """The error where nobody has these parts."""
        why = "; ".join(map(str, self.errors)) or "no source that is named has them"
        text = f"version {self.version} lacks {', '.join(parts)}: {why}"
        remedy = "retry; name sources that hold the version"
        if all(error.info.code is Code.NOT_FOUND for error in self.errors):
            return CallerError(text, code=Code.NOT_FOUND, field="version", remedy=remedy)
        codes = {error.info.code for error in self.errors} - {Code.NOT_FOUND}
        code = codes.pop() if len(codes) == 1 else Code.UNAVAILABLE
        return ResourceError(text, code=code, remedy=remedy)


async def _ask_holders(
    version: VersionKey, ticket: Ticket | None, sources: list[str], home: Home
) -> _Holders:
    """Ask all sources at once; one that does not answer holds nothing for now."""
    named = list(dict.fromkeys(sources))
    answers = await asyncio.gather(*(_ask(version, ticket, source, home) for source in named))
    found = _Holders(version)
    for source, answer in zip(named, answers, strict=True):
        if isinstance(answer, PhaseloomError):
            log.warning("which parts of version %s are at %s: %s", version, source, answer)
            found.errors.append(answer)
        else:
            found.by_source[source] = answer
    return found


async def _ask(
    version: VersionKey, ticket: Ticket | None, source: str, home: Home
) -> set[str] | PhaseloomError:
    try:
        opened = await ask_once(source, wire.OpenVersion(version, ticket, []), wire.Opened, home)
        return set(opened.digests)
    except PhaseloomError as error:
        return error
