"""Weights versions on this node: immutable copies of weights, in host memory, on disk, or both.

Invariants (`validate`): a version is readable only when committed; a committed version never
changes; a version that is in use (being read, sent or written to disk) keeps its memory until its
last user is done, also after it was dropped. Where a version is written in parts, its manifest has
the version's key, and a part is readable only where the manifest is committed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.ids import VersionKey
from phaseloom.common.contract.specs import CommandId
from phaseloom.common.contract.state_agent import VersionState
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.common.tensors.versionparts import is_manifest
from phaseloom.statemgr.records.incarnations import Wpg


@dataclass(slots=True, eq=False, weakref_slot=True)
class Version:
    key: VersionKey
    num_bytes: int
    table: TensorTable = field(repr=False)
    digest: str = ""
    """The digest of the content; empty until the version is committed."""
    extent: int | None = None
    """The extent of host memory that holds the version; None: it is on disk only."""
    incarnation: int | None = None
    """The incarnation of the policy that writes, or wrote, the version here; None: it was fetched
    or read from disk."""
    is_on_disk: bool = False
    users: int = 0
    """The number of tasks that use the memory now."""
    is_dropped: bool = False
    is_bad: bool = False
    """Whether the memory is not what was committed; nobody uses that memory again."""
    readers: set[Wpg] = field(default_factory=set, repr=False)
    """Incarnations whose ranks were given the memory and have not unmapped it."""
    num_openings: int = 0
    """The number of times that the memory was given to a reader."""
    verified_for: CommandId | None = None
    """The permit for which the memory was verified last."""
    is_ahead: bool = False
    """Whether the version was fetched ahead, and no operation has asked for it yet."""
    is_kept: bool = True
    """Whether the version stays until it is released; False: ranks here have it fetched, so that it
    may go with the last of them."""
    end_fetch: Callable[[], None] | None = field(default=None, repr=False)
    """Ends the fetch that fills the memory; None: none does."""

    def __str__(self) -> str:
        return f"version {self.key}"

    @property
    def tensors(self) -> list[TensorSlot]:
        return self.table.tensors

    @property
    def is_committed(self) -> bool:
        return self.digest != ""

    @property
    def is_manifest(self) -> bool:
        return len(self.table) == 1 and is_manifest(self.tensors)

    def check_kept(self) -> None:
        """Check that the version is still here. Raises: ResourceError: ABORTED: it was dropped."""
        if self.is_dropped:
            raise ResourceError(f"{self} was dropped", code=Code.ABORTED)


@dataclass(slots=True)
class Versions:
    _versions: dict[VersionKey, Version] = field(default_factory=dict)
    _leaving: set[Version] = field(default_factory=set)
    """Dropped versions that are still in use."""

    def find(self, key: VersionKey) -> Version | None:
        return self._versions.get(key)

    def is_above(self, key: VersionKey) -> bool:
        """Whether the version is whole and in host memory. False for a version in parts: its
        manifest does not say which of them belong on this node."""
        version = self._versions.get(key)
        if version is None or version.is_manifest:
            return False
        return version.is_committed and version.extent is not None

    def begin(
        self,
        key: VersionKey,
        num_bytes: int,
        table: TensorTable,
        extent: int,
        incarnation: int | None = None,
    ) -> Version:
        """Add a version that is to be filled.

        Raises: CallerError: ALREADY_EXISTS: the version is here already.
        """
        if key in self._versions:
            raise CallerError(f"version {key} is here already", code=Code.ALREADY_EXISTS)
        version = Version(key, num_bytes, table, extent=extent, incarnation=incarnation)
        self._versions[key] = version
        return version

    def add_from_disk(
        self, key: VersionKey, num_bytes: int, tensors: list[TensorSlot], digest: str
    ) -> None:
        """Add a committed version that was found on disk at start."""
        self._versions[key] = Version(
            key, num_bytes, TensorTable.of(tensors), digest, is_on_disk=True
        )

    def take_over(self, version: Version) -> bool:
        """Add a verified version in memory that the previous daemon had; it may be on disk too.

        Returns: False where the version on disk has other bytes; then that one stays.
        """
        on_disk = self._versions.get(version.key)
        if on_disk is not None and on_disk.digest != version.digest:
            return False
        version.is_on_disk = on_disk is not None
        self._versions[version.key] = version
        return True

    def parts_of(self, key: VersionKey) -> list[Version]:
        """The parts of a version that are here, and the copies of its slices."""
        return [
            version
            for part_key, version in self._versions.items()
            if part_key.part and part_key.whole == key
        ]

    def is_readable(self, key: VersionKey) -> bool:
        """Whether all parts of the version are committed, on whichever nodes; a part by itself is
        not readable."""
        if not key.part or key.is_copy:
            return True
        manifest = self._versions.get(key.whole)
        return manifest is not None and manifest.is_committed and manifest.is_manifest

    def pieces(self, key: VersionKey) -> list[Version]:
        """The whole version, or its manifest and the parts that are here: every piece that must
        last as long as the version.

        Raises: CallerError: NOT_FOUND: the version is not committed here.
        """
        version = self._versions.get(key)
        if version is None or not version.is_committed:
            raise not_here(key)
        parts = [part for part in self.parts_of(key) if part.is_committed and not part.key.is_copy]
        return [version, *parts]

    def bases_of(self, version: Version) -> list[Version]:
        """The earlier versions of the policy that are in memory in the layout of this one, the
        newest first; of a part, or of a copy of slices, the same part or slices of them."""
        key = version.key
        matches = [
            earlier
            for other_key, earlier in self._versions.items()
            if (other_key.policy, other_key.part) == (key.policy, key.part)
            and other_key.seq < key.seq
            and earlier.is_committed
            and earlier.extent is not None
            and not earlier.is_bad
            and (earlier.num_bytes, earlier.table) == (version.num_bytes, version.table)
        ]
        return sorted(matches, key=lambda earlier: earlier.key.seq, reverse=True)

    def stale_parts(self, policy: object, seq: int) -> list[Version]:
        """The parts here of versions before `seq` that were never committed as a whole."""
        return [
            version
            for key, version in self._versions.items()
            if key.policy == policy
            and key.seq < seq
            and key.part
            and not key.is_copy
            and not self.is_readable(key)
        ]

    def known(self) -> list[Version]:
        return list(self._versions.values())

    def commit(self, version: Version, digest: str) -> None:
        """Make a version readable, and immutable. Committing the same content again is harmless.

        Raises: CallerError: ALREADY_EXISTS: the version is committed with other bytes.
                ResourceError: ABORTED: it was dropped meanwhile.
        """
        version.check_kept()
        assert digest
        assert version.extent is not None or version.is_committed
        if version.is_committed and version.digest != digest:
            raise CallerError(
                f"version {version.key} is committed with other bytes",
                code=Code.ALREADY_EXISTS,
                field="digest",
            )
        version.digest = digest

    def opened(self, version: Version, reader: Wpg) -> None:
        """Note that the reader's ranks may have the memory mapped from now on."""
        version.readers = {wpg for wpg in version.readers if not wpg.is_lost} | {reader}
        version.num_openings += 1

    def unused(self) -> list[Version]:
        """Committed versions in memory that no task here uses; ranks may have them mapped."""
        return [
            version
            for key, version in self._versions.items()
            if version.is_committed
            and version.extent is not None
            and not version.users
            and not key.is_copy
            and not version.is_manifest
        ]

    def ahead(self) -> list[Version]:
        """The versions, parts and copies of slices that were fetched ahead of an operation, or are
        being fetched, and that no operation has asked for yet; the oldest first. Those that other
        nodes read are left out, and so are manifests, which are small, and without which no part
        can be read."""
        return [
            version
            for version in self._versions.values()
            if version.is_ahead
            and version.extent is not None
            and not version.is_manifest
            and version.users <= (0 if version.is_committed else 1)  # the fetch itself
        ]

    def leave_memory(self, version: Version) -> int:
        """Leave a version on disk only. Returns: its extent, to be freed."""
        assert version.is_on_disk
        assert not version.users
        extent, version.extent, version.incarnation = version.extent, None, None
        assert extent is not None
        return extent

    def drop(self, version: Version) -> None:
        """Drop a version that nobody needs. Idempotent; `reap` then takes its memory from it. A
        fetch that fills it ends."""
        if self._versions.get(version.key) is version:
            del self._versions[version.key]
            version.is_dropped = True
            if version.extent is not None:
                self._leaving.add(version)
            if version.end_fetch is not None:
                version.end_fetch()

    def reap(self, version: Version) -> int | None:
        """Take the memory from a dropped version that has no user. Returns: the extent to park;
        None: there is none."""
        assert version.users >= 0
        if not version.is_dropped or version.users:
            return None
        extent, version.extent = version.extent, None
        self._leaving.discard(version)
        return extent

    def unfinished(self, policy: object, incarnation: int) -> list[VersionKey]:
        """Versions, and parts, that this incarnation of a policy has begun and not committed as a
        whole."""
        return [
            key
            for key, version in self._versions.items()
            if key.policy == policy
            and version.incarnation == incarnation
            and not (version.is_committed and self.is_readable(key))
        ]

    def committed(self) -> list[VersionKey]:
        return sorted(key for key, version in self._versions.items() if version.is_committed)

    def states(self) -> list[VersionState]:
        """The states of the committed versions, in order."""
        return [
            VersionState(
                version=key,
                num_bytes=version.num_bytes,
                in_host=version.extent is not None,
                on_nvme=version.is_on_disk,
                num_users=version.users,
            )
            for key, version in sorted(self._versions.items())
            if version.is_committed
        ]

    def extents(self) -> list[int]:
        every = {*self._versions.values(), *self._leaving}
        return [version.extent for version in every if version.extent is not None]

    def validate(self) -> None:
        """Check the invariants. Raises: AssertionError: one does not hold."""
        for key, version in self._versions.items():
            assert version.key == key
            assert not version.is_dropped
            assert version.extent is not None or (version.is_committed and version.is_on_disk)
        for version in self._leaving:
            assert version.is_dropped
            assert version.users > 0
            assert version.extent is not None
        extents = self.extents()
        assert len(extents) == len(set(extents)), "one extent, two versions"


def not_here(key: VersionKey) -> CallerError:
    return CallerError(f"version {key} is not here", code=Code.NOT_FOUND, field="version")
