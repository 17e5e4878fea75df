"""All host copies: those of ranks that train, and those that frozen ranks share.

Frozen copies are content-addressed. They are looked up by BLAKE3 and length, not by owner, so
frozen ranks with equal state use one copy. A frozen rank that writes moves to another copy and
leaves the others' bytes untouched. A frozen copy may also be the memory of a weights version. A
rank that trains has a copy of its own, in memory that it has mapped.

Invariants (`validate`): every copy has a user, and is dropped with its last one; users of different
tenants share only copies that the operator has registered as frozen bases; a copy with users of
different jobs is frozen and immutable; a copy has one location for all of its users: host memory,
NVMe, or the way between them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.ids import VersionKey
from phaseloom.common.contract.state_agent import SharedCopyState
from phaseloom.statemgr.records.incarnations import (
    ON_NVME,
    HostCopy,
    Rank,
    State,
    Step,
    following,
)
from phaseloom.statemgr.records.versions import Version

_HASH = re.compile(r"[0-9a-f]{64}")


def bases_of(configured: Mapping[str, list[str]], section: str = "") -> dict[str, str]:
    """The registered frozen bases, which tenants may share, as BLAKE3 → name.

    Args:   configured: name → hashes.
            section: prefix of the field names in errors.
    Raises: CallerError: an entry is not a hash, or a hash has two names.
    """
    names: dict[str, str] = {}
    for name, hashes in configured.items():
        for hash_ in hashes:
            field = f"{section}frozen_bases.{name}"
            if not _HASH.fullmatch(hash_):
                raise CallerError(
                    f"{hash_!r} is not a BLAKE3 in hex",
                    field=field,
                    remedy="use the hash that `phaseloom state --json` shows for the shared copy",
                )
            if names.setdefault(hash_, name) != name:
                raise CallerError(
                    f"{hash_} is already named {names[hash_]!r}",
                    field=field,
                    remedy="give it one name",
                )
    return names


class HostCopies:
    """All host copies of the node. Every change goes through this class; the shell moves the
    bytes."""

    def __init__(self, bases: Mapping[str, str]) -> None:
        """Args: bases: the frozen bases that tenants may share, as BLAKE3 → name."""
        self._bases = bases
        self._copies: dict[int, HostCopy] = {}
        self._last = 0

    def add(self, rank: Rank, extent: int, digest: str = "") -> HostCopy:
        """Record the first host copy of a rank, whose state is or will be in the extent.

        Args: digest: of the state; empty: not known yet.
        """
        copy = HostCopy(
            self.next_number(),
            rank.wpg.key,
            rank.extent_bytes,
            extent,
            is_frozen=rank.frozen,
            digest=digest,
        )
        self._copies[copy.number] = copy
        self.attach(rank, copy)
        return copy

    def next_number(self) -> int:
        """A number for a host copy that is written before it is added."""
        self._last += 1
        return self._last

    def add_below(self, rank: Rank, number: int, digest: str) -> None:
        """Record the host copy of a frozen rank that was written to NVMe straight."""
        copy = HostCopy(number, rank.wpg.key, rank.extent_bytes, None, is_frozen=True)
        copy.digest, copy.state = digest, State.DEMOTED
        self._copies[number] = copy
        self.attach(rank, copy)

    def add_version(self, rank: Rank, version: Version) -> HostCopy:
        """Make the memory of a version the host copy of a frozen rank; it may be that of others."""
        assert version.extent is not None
        copy = self.of_version(version.key, version.extent)
        if copy is None:
            copy = self.add(rank, version.extent, version.digest)
            copy.version, copy.num_bytes = version.key, version.num_bytes
        else:
            self.attach(rank, copy)
        if (version.num_bytes, version.table) != (rank.extent_bytes, rank.table):
            copy.table = version.table
        return copy

    def take_over(self, copy: HostCopy) -> None:
        """Adopt a host copy of the previous daemon. Its users are attached later."""
        self._copies[copy.number] = copy
        self._last = max(self._last, copy.number)

    def attach(self, rank: Rank, copy: HostCopy) -> None:
        """Make the rank a user of a host copy. The rank must not use another one."""
        assert rank.copy is None
        assert copy.number in self._copies
        rank.copy = copy
        copy.users.append(rank)

    def detach(self, rank: Rank) -> HostCopy | None:
        """Remove the rank from the users of its host copy.

        Returns: the copy if the rank was its last user; the caller frees its memory and file.
        """
        copy = rank.copy
        if copy is None:
            return None
        rank.copy = None
        copy.users.remove(rank)
        if copy.users:
            return None
        del self._copies[copy.number]
        return copy

    def is_known(self, copy: HostCopy) -> bool:
        return self._copies.get(copy.number) is copy

    def of_version(self, key: VersionKey, extent: int) -> HostCopy | None:
        """The host copy that is the memory of this version."""
        return next((c for c in self.all() if c.version == key and c.extent == extent), None)

    def merge(self, copy: HostCopy, twin: HostCopy) -> list[Rank]:
        """Make the users of `copy` users of its twin. Returns: these users."""
        if len(copy.tenants | twin.tenants) > 1:
            twin.is_base = True
        moved = list(copy.users)
        for rank in moved:
            self.detach(rank)
            self.attach(rank, twin)
        return moved

    def twin(self, copy: HostCopy) -> HostCopy | None:
        """The oldest other copy with the same bytes that the users of `copy` may share."""
        return next((c for c in self.all() if self._may_merge(c, copy)), None)

    def _may_merge(self, first: HostCopy, second: HostCopy) -> bool:
        if first is second or not first.hash:
            return False
        is_equal = (first.hash, first.num_bytes) == (second.hash, second.num_bytes)
        is_equal = is_equal and first.table == second.table
        is_shareable = first.is_immutable and second.is_immutable
        is_allowed = first.hash in self._bases or len(first.tenants | second.tenants) == 1
        return is_equal and is_shareable and is_allowed

    def all(self) -> list[HostCopy]:
        """All host copies, oldest first."""
        return list(self._copies.values())

    def step(self, copy: HostCopy, step: Step) -> None:
        """Apply a step of the transition table. Raises: InvalidTransition."""
        copy.state = following(copy, step)

    def demotable(self) -> list[HostCopy]:
        """The whole host copies that may be demoted now, unordered."""
        return [copy for copy in self.all() if copy.is_demotable]

    def extents(self) -> list[int]:
        return [copy.extent for copy in self.all() if copy.extent is not None]

    def nvme_used_bytes(self) -> int:
        """Bytes of host copies that are on NVMe or are being written there."""
        below = ON_NVME | {State.DEMOTING}
        return sum(copy.num_bytes for copy in self.all() if copy.state in below)

    def states(self) -> list[SharedCopyState]:
        """The states of the copies that frozen ranks share, or may share."""
        return [
            SharedCopyState(
                num_bytes=copy.num_bytes,
                hash=copy.hash,
                base=self._bases.get(copy.hash, ""),
                users=sorted(str(rank.wpg.key) for rank in copy.users),
                version=copy.version,
                in_host=copy.state not in ON_NVME,
                on_nvme=copy.state in ON_NVME,
                model=copy.users[0].model,
            )
            for copy in self.all()
            if copy.is_frozen
        ]

    def validate(self) -> None:
        """Raises: AssertionError: an invariant of this module does not hold."""
        for number, copy in self._copies.items():
            assert copy.number == number
            assert copy.users, f"{copy} has no user"
            assert all(rank.copy is copy for rank in copy.users)
            assert all(rank.frozen is copy.is_frozen for rank in copy.users)
            assert len(set(copy.users)) == len(copy.users)
            assert copy.is_frozen or len(copy.users) == 1, f"{copy} is shared, and not frozen"
            assert copy.digest or not copy.is_frozen, f"{copy} is not whole"
            assert not (copy.is_dirty and copy.digest)
            # A copy without memory is not whole before the rank has written its initial state.
            is_filling = not copy.is_frozen and copy.state is State.DEMOTED
            assert copy.is_whole or copy.state is State.HOST or is_filling, copy
            assert not (copy.is_dirty and copy.state in ON_NVME)
            is_gone = copy.is_frozen and copy.state is State.DEMOTED
            assert (copy.extent is None) is is_gone, copy
            jobs = {rank.wpg.key.job_key for rank in copy.users}
            assert len(jobs) == 1 or copy.is_immutable, f"{copy} can be written by another"
            assert len(copy.tenants) == 1 or copy.is_base, f"{copy} is shared"
        extents = self.extents()
        assert len(extents) == len(set(extents)), "two host copies in one extent"
