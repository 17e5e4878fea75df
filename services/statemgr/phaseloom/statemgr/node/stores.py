"""The bytes that the records describe: host copies, weights versions, and seals in host memory.

Each store frees memory and files together with the record that referred to them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from phaseloom.common.contract.ids import DeploymentKey, JobKey
from phaseloom.statemgr.disk.files import StateDirectory
from phaseloom.statemgr.disk.statefile import parts_in
from phaseloom.statemgr.node.background import Background
from phaseloom.statemgr.node.devicecopies import DeviceCopies
from phaseloom.statemgr.node.extents import HostMemory
from phaseloom.statemgr.node.ledger import Ledger
from phaseloom.statemgr.node.moves import Moves
from phaseloom.statemgr.records.incarnations import HostCopy, Rank, State, Wpg
from phaseloom.statemgr.records.records import Records
from phaseloom.statemgr.records.seals import HostSeal
from phaseloom.statemgr.records.stateheader import Place
from phaseloom.statemgr.records.versions import Version


class HostCopyStore:
    """Host copies: their memory, their files on NVMe, and the moves between the two."""

    def __init__(
        self,
        ledger: Ledger,
        records: Records,
        memory: HostMemory,
        directory: StateDirectory,
        background: Background,
    ) -> None:
        self._residency = records.residency
        self.records = records.host_copies
        self._memory = memory
        self.directory = directory
        self.moves = Moves(background, ledger.node, directory, self._stale_file, ledger.announce)
        self.to_compare: asyncio.Queue[HostCopy] = asyncio.Queue()
        """Frozen copies that may be equal to others; `Sharing` takes them from here."""

    def bytes_of(self, copy: HostCopy) -> memoryview:
        """The bytes of a host copy, which must be in host memory. Read-only by convention."""
        assert copy.extent is not None
        extent = self._memory[copy.extent]
        return (extent.readable if copy.is_frozen else extent.view)(copy.num_bytes)

    def bytes_for(self, rank: Rank) -> memoryview:
        """The bytes of a rank's host copy, as `bytes_of`."""
        assert rank.copy is not None
        return self.bytes_of(rank.copy)

    def file_of(self, copy: HostCopy) -> Path:
        """The file of a host copy while it is on NVMe."""
        return self.directory.host_copy(copy.number)

    def _stale_file(self, copy: HostCopy) -> Path | None:
        return None if self.records.is_known(copy) else self.file_of(copy)

    def fill(self, rank: Rank, applied: int, digest: str) -> None:
        """Record that the rank's extent holds its whole state: the initial one, or a seal's."""
        self._residency.fill(rank, applied, digest)
        assert rank.copy is not None
        self.compare_later(rank.copy)

    def detach(self, rank: Rank) -> None:
        """Detach a rank from its host copy; a copy without users is freed."""
        copy = self.records.detach(rank)
        if copy is not None:
            self.free(copy)

    def free(self, copy: HostCopy) -> None:
        """Free the memory and the file of a host copy that no rank uses."""
        self.free_memory(copy)
        self.moves.give_up(copy, self.file_of(copy))

    def free_memory(self, copy: HostCopy) -> None:
        if copy.extent is not None:
            extent, copy.extent = copy.extent, None
            self._memory.free(extent)

    def vacate(self, copy: HostCopy) -> None:
        """Give back the memory of a host copy whose bytes are on NVMe."""
        if copy.is_frozen:
            # An immutable extent cannot be emptied.
            self.free_memory(copy)
        elif copy.extent is not None:
            # A rank that trains has the extent mapped, so the extent itself stays.
            self._memory.vacate(copy.extent)

    def compare_later(self, copy: HostCopy) -> None:
        """Queue a frozen copy that is new, or in host memory again, for comparison with others.

        Other copies are ignored, and so is a copy that is a version's memory.
        """
        if copy.is_frozen and copy.version is None and copy.state is State.HOST:
            self.to_compare.put_nowait(copy)


class VersionStore:
    """Weights versions in host memory, and their copies in device memory."""

    def __init__(
        self,
        ledger: Ledger,
        records: Records,
        memory: HostMemory,
        device_copies: DeviceCopies,
        connected: Collection[Rank],
    ) -> None:
        """Args: connected: the ranks that are connected now."""
        self._ledger = ledger
        self._all_records = records
        self.records = records.versions
        self._memory = memory
        self._device_copies = device_copies
        self._connected = connected

    def bytes_of(self, version: Version) -> memoryview:
        """The bytes of a version, which must be in host memory."""
        assert version.extent is not None
        return self._memory[version.extent].view(version.num_bytes)

    def fd_of(self, version: Version) -> int:
        """A read-only descriptor of the memory of a version."""
        assert version.extent is not None
        return self._memory[version.extent].read_only_fd

    def is_only_holder(self, version: Version) -> bool:
        """Whether nothing else holds the memory of a version, which must be in host memory."""
        assert version.extent is not None
        return self._memory[version.extent].num_holders == 1

    @contextmanager
    def using(self, version: Version) -> Iterator[None]:
        """Keep a version's memory within the block, even if the version is dropped meanwhile.

        After the last use a dropped version's memory is parked or freed.
        """
        version.users += 1
        try:
            yield
        finally:
            version.users -= 1
            self._recycle(version)

    def drop(self, version: Version) -> None:
        """Free a version's memory now, or when its last user is done."""
        self._device_copies.drop(version.key)
        self.records.drop(version)
        self._recycle(version)

    def leave_memory(self, version: Version) -> None:
        """Free the memory of a version that is on disk."""
        self._memory.free(self.records.leave_memory(version))

    def _recycle(self, version: Version) -> None:
        """Park the extent of a dropped version without users if it may be reused, or free it.

        The writer of the extent still has it mapped, so only the same incarnation of the same
        policy reuses it. An extent that this daemon wrote is reused by versions of the same policy
        while its job is on this node.
        """
        extent = self.records.reap(version)
        if extent is None:
            return
        writer = next((r.wpg for r in self._connected if _writes(r.wpg, version)), None)
        is_orphan = version.incarnation is not None and writer is None
        is_over = not self._all_records.has_job(version.key.policy.job_key)
        if not version.is_committed or version.is_bad or is_orphan or is_over:
            self._memory.free(extent)
        else:
            self._memory.park(extent, pool_of(writer) if writer else str(version.key.policy))
        self._ledger.announce()

    def forget(self, policy: DeploymentKey) -> None:
        """Drop every version of a policy whose job is over from memory."""
        for version in self.records.known():
            if version.key.policy == policy:
                self.drop(version)
        self._memory.drop_pool(str(policy))

    def leave_job(self, job: JobKey) -> None:
        """Free the parked memory of a job's versions, once the job has no deployment here."""
        if not self._all_records.has_job(job):
            for pool in self._memory.pools():
                if pool.startswith(f"{job}."):
                    self._memory.drop_pool(pool)


def _writes(wpg: Wpg, version: Version) -> bool:
    return wpg.key == version.key.policy and wpg.incarnation == version.incarnation


def pool_of(wpg: Wpg) -> str:
    """The name of the pool of extents that this incarnation's ranks may write."""
    return f"{wpg.key}#{wpg.incarnation}"


class HostSealStore:
    """Seals in host memory, each of which has the bytes of a state file."""

    def __init__(self, records: Records, memory: HostMemory) -> None:
        self.records = records.seals
        self._memory = memory

    def bytes_of(self, seal: HostSeal) -> memoryview:
        return self._memory[seal.extent].view(seal.num_bytes)

    def parts_of(self, seal: HostSeal) -> list[Place]:
        """The parts of a seal. Raises: ResourceError: DATA_LOSS: its header is bad."""
        image = self.bytes_of(seal)
        return parts_in(lambda at, length: bytes(image[at : at + length]), seal.name)

    def drop(self, key: DeploymentKey, seq: int) -> None:
        seal = self.records.pop((key, seq), None)
        if seal is not None:
            self._memory.free(seal.extent)
