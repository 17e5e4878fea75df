"""Weights versions on this node: immutable copies of weights, in host memory, on disk, or both.

Invariants (`validate`): only committed versions are readable; a committed version never changes; a
version in use (being read, sent or written to disk) keeps its memory until its last user is done,
even if it is dropped. If a version is written in parts, its manifest has the version's key, and the
parts are readable only once the manifest is committed.
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
    """Empty until the version is committed."""
    extent: int | None = None
    """The extent of host memory that holds the version; None: it is on disk only."""
    incarnation: int | None = None
    """The incarnation of the policy that wrote the version here; None: it was fetched, or read from
    disk."""
    is_on_disk: bool = False
    users: int = 0
    """Number of tasks that use the memory now."""
    is_dropped: bool = False
    is_bad: bool = False
    """Whether the memory differs from the committed bytes, so that nobody may reuse it."""
    readers: set[Wpg] = field(default_factory=set, repr=False)
    """Incarnations whose ranks may have the memory mapped."""
    num_openings: int = 0
    """Number of times that a reader opened the memory."""
    verified_for: CommandId | None = None
    """The permit that the memory was last verified for."""
    is_ahead: bool = False
    """Whether the version was prefetched and no operation needs it yet."""
    is_kept: bool = True
    """Whether the version stays until it is released. False: ranks here have fetched it, so it may
    leave with the last of them."""
    end_fetch: Callable[[], None] | None = field(default=None, repr=False)
    """Ends the fetch that fills the memory, if any."""

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
        """Raises: ResourceError: ABORTED: the version was dropped."""
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
        """Whether the version is complete and in host memory. False for a version in parts: its
        manifest does not say which parts this node needs."""
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
        """Add a version that will be filled.

        Raises: CallerError: ALREADY_EXISTS: the version is here already.
        """
        if key in self._versions:
            raise CallerError(f"version {key} is already here", code=Code.ALREADY_EXISTS)
        version = Version(key, num_bytes, table, extent=extent, incarnation=incarnation)
        self._versions[key] = version
        return version

    def add_from_disk(
        self, key: VersionKey, num_bytes: int, tensors: list[TensorSlot], digest: str
    ) -> None:
        """Add a committed version that is on disk."""
        self._versions[key] = Version(
            key, num_bytes, TensorTable.of(tensors), digest, is_on_disk=True
        )

    def take_over(self, version: Version) -> bool:
        """Adopt a verified version in memory of the previous daemon. It may be on disk too.

        Returns: False: the version on disk has other bytes, and stays.
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
        """Whether all parts of the version are committed, on whichever nodes. A part without the
        manifest is not readable."""
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
        """Earlier versions of the policy in memory that have the layout of this one, newest first.
        For a part or a copy of slices: the same part or slices of earlier versions."""
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
        """Parts here of versions before `seq` that were never committed as a whole."""
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
        """Make a version readable and immutable. Idempotent for the same content.

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
        """Record that the reader's ranks may have the memory mapped from now on."""
        version.readers = {wpg for wpg in version.readers if not wpg.is_lost} | {reader}
        version.num_openings += 1

    def unused(self) -> list[Version]:
        """Committed versions in memory that no task here uses. Ranks may have them mapped."""
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
        """Versions, parts and copies of slices that were prefetched, or are being prefetched, and
        that no operation needs yet, oldest first. Excludes those that other nodes read, and
        manifests, which are small and needed to read any part."""
        return [
            version
            for version in self._versions.values()
            if version.is_ahead
            and version.extent is not None
            and not version.is_manifest
            and version.users <= (0 if version.is_committed else 1)  # the fetch itself
        ]

    def leave_memory(self, version: Version) -> int:
        """Leave a version on disk only. Returns: its extent, for the caller to free."""
        assert version.is_on_disk
        assert not version.users
        extent, version.extent, version.incarnation = version.extent, None, None
        assert extent is not None
        return extent

    def drop(self, version: Version) -> None:
        """Drop a version that nobody needs, and end its fetch, if any. Idempotent; `reap` returns
        its memory."""
        if self._versions.get(version.key) is version:
            del self._versions[version.key]
            version.is_dropped = True
            if version.extent is not None:
                self._leaving.add(version)
            if version.end_fetch is not None:
                version.end_fetch()

    def reap(self, version: Version) -> int | None:
        """Detach the memory of a dropped version that has no user. Returns: its extent, if any."""
        assert version.users >= 0
        if not version.is_dropped or version.users:
            return None
        extent, version.extent = version.extent, None
        self._leaving.discard(version)
        return extent

    def unfinished(self, policy: object, incarnation: int) -> list[VersionKey]:
        """Versions and parts that this incarnation of a policy has begun and not committed as a
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
        """Raises: AssertionError: an invariant of this module does not hold."""
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
