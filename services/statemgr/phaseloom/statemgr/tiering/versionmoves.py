"""Weights versions that nobody reads give their host memory back when it is short.

A version is written to disk, unless it is there already, and dropped from memory; it is read again
when somebody asks for it. What was fetched ahead of the operation that is to read it is dropped
altogether, also while it is being fetched: the operation fetches it again.

A rank that has a version mapped keeps its pages whatever is done here, so the ranks are asked to
unmap it first. A version stays in memory where a rank uses it, or where its extent has another
holder.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from phaseloom.common.contract.errors import ResourceError
from phaseloom.common.contract.ids import VersionKey
from phaseloom.statemgr.disk.files import StateDirectory
from phaseloom.statemgr.node.ledger import Ledger
from phaseloom.statemgr.node.ranks import Ranks
from phaseloom.statemgr.node.stores import VersionStore
from phaseloom.statemgr.records.incarnations import Wpg
from phaseloom.statemgr.records.stateheader import Section, StateHeader
from phaseloom.statemgr.records.versions import Version

log = logging.getLogger(__name__)


@dataclass
class VersionMoves:
    """The way of weights versions out of host memory and onto disk."""

    ledger: Ledger
    versions: VersionStore
    ranks: Ranks
    directory: StateDirectory
    under_way: dict[Version, asyncio.Future[None]] = field(default_factory=dict, init=False)
    """Versions that are leaving memory, with a future that is done when the move has ended, whether
    the version left or stays."""
    _writing: WeakValueDictionary[VersionKey, asyncio.Lock] = field(
        default_factory=WeakValueDictionary, init=False
    )
    """A seal and a lack of memory may want a version on disk at once."""

    def unread(self, *, at_once: bool) -> list[Version]:
        """The versions that may leave host memory, as far as is known here; the oldest first.

        Args: at_once: True: those for which neither a disk nor a rank has to be waited for; False:
              the others.
        """
        return [
            version
            for version in self.versions.records.unused()
            if version not in self.under_way
            and not version.is_ahead
            and version.extent is not None
            and self.versions.is_only_holder(version)
            and at_once == (version.is_on_disk and not _alive(version))
        ]

    def ahead(self) -> list[Version]:
        """The versions, and copies of slices, that were fetched ahead of an operation, or are being
        fetched; the oldest first."""
        known = self.versions.records.ahead()
        return [version for version in known if version not in self.under_way]

    async def make_room(self, version: Version) -> None:
        """Free the memory of a version. Raises: ResourceError: the version stays in memory."""
        await (self._give_up(version) if version.is_ahead else self._leave(version))

    async def _give_up(self, version: Version) -> None:
        """Drop what was fetched ahead, whether all of it has come or not."""
        ended = self.under_way[version] = asyncio.get_running_loop().create_future()
        try:
            await self._until_unmapped(version)
            if not version.is_ahead:
                raise ResourceError(f"version {version.key} is asked for by now")
            log.info("%s was fetched ahead, and is dropped: host memory is short", version)
            self.versions.drop(version)
            await self.ledger.until(lambda: not version.users)
        finally:
            del self.under_way[version]
            ended.set_result(None)

    async def _leave(self, version: Version) -> None:
        """Put a version on disk and free its memory. Raises: as `make_room`."""
        ended = self.under_way[version] = asyncio.get_running_loop().create_future()
        try:
            with self.versions.using(version):
                await self._until_unmapped(version)
                await self.persist(version)
        finally:
            del self.under_way[version]
            ended.set_result(None)
        if version.is_dropped:
            return
        if version.users or _alive(version):
            raise ResourceError(f"version {version.key} is being read")
        async with self.ledger.change():
            self.versions.leave_memory(version)
        log.info("version %s is on disk only: host memory is short", version.key)

    async def persist(self, version: Version) -> None:
        """Write a version to disk, unless it is there already."""
        lock = self._writing.setdefault(version.key, asyncio.Lock())
        async with lock:
            if not version.is_on_disk and not version.is_dropped:
                await self._write(version)

    async def _write(self, version: Version) -> None:
        key = version.key
        section = Section(version.num_bytes, version.tensors, version.digest)
        header = StateHeader("version", key.policy, key.seq, [section], part=key.part)
        memory = self.versions.bytes_of(version)
        path = self.directory.version(key)
        with self.versions.using(version):
            await asyncio.to_thread(self.directory.write, path, header, [memory])
            version.is_on_disk = True
        if version.is_dropped:
            await asyncio.to_thread(self.directory.remove, path)

    async def discard(self, version: Version) -> None:
        """Remove a version from memory and from disk."""
        self.versions.drop(version)
        if version.is_on_disk:
            await asyncio.to_thread(self.directory.remove, self.directory.version(version.key))

    async def _until_unmapped(self, version: Version) -> None:
        """Ask all readers to unmap the version, and forget them.

        Raises: ResourceError: a rank uses the version, or opened it meanwhile.
        """
        readers, openings = _alive(version), version.num_openings
        still = [wpg for wpg in readers if not await self._unmaps(wpg, version)]
        if still or version.num_openings != openings:
            raise ResourceError(f"version {version.key} is being read")
        version.readers.clear()

    async def _unmaps(self, wpg: Wpg, version: Version) -> bool:
        for rank in wpg.ranks:
            used = await self.ranks.unmap(rank)
            if used is None:
                return wpg.is_lost
            if version.key in used:
                return False
        return True


def _alive(version: Version) -> list[Wpg]:
    return [wpg for wpg in version.readers if not wpg.is_lost]
