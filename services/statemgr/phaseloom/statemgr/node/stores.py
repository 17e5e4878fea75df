"""The bytes that the records describe: host copies, weights versions, and seals in host memory.

Each store frees memory and files together with the record that referred to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from phaseloom.common.contract.errors import CallerError, Code, InternalError, PhaseloomError
from phaseloom.common.contract.ids import DeploymentKey, JobKey, NodeId, VersionKey
from phaseloom.common.observability import metrics
from phaseloom.common.process.error_boundary import error_boundary
from phaseloom.common.transport.framing import close_fds
from phaseloom.statemgr.disk.files import StateDirectory
from phaseloom.statemgr.disk.statefile import parts_in
from phaseloom.statemgr.node.background import Background
from phaseloom.statemgr.node.extents import Extent, HostMemory
from phaseloom.statemgr.node.ledger import Ledger
from phaseloom.statemgr.records.incarnations import HostCopy, InvalidTransition, Rank, State, Wpg
from phaseloom.statemgr.records.layouts import rounded
from phaseloom.statemgr.records.records import Records
from phaseloom.statemgr.records.residency import Residency
from phaseloom.statemgr.records.seals import HostSeal
from phaseloom.statemgr.records.stateheader import SectionRef
from phaseloom.statemgr.records.versions import Version
from phaseloom.statemgr.transfer.permission import check_reader

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Move:
    """One move of a host copy."""

    copy: HostCopy
    is_up: bool
    """True: a promotion; False: a demotion."""
    is_hint: bool
    """Whether a hint started the move. It then evicts only copies that are needed later than its
    own."""
    cancelled: threading.Event
    """Set to end the move early; read by the thread that moves the bytes."""
    done: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """The end of the move, with its failure if any."""

    @property
    def name(self) -> str:
        """The name of the move in metrics and logs."""
        return "promote" if self.is_up else "demote"


Work = Callable[[Move], Awaitable[None]]
"""Moves the bytes and records where they are.

Raises: PhaseloomError: the copy is where it was, or is lost.
"""


class Moves:
    """The moves of host copies between host memory and NVMe that are under way.

    Invariant: at most one move of a host copy is under way. A caller that needs the copy in host
    memory cancels a demotion and joins a promotion. A move continues if its caller is cancelled,
    and reports its failure to everyone who waits. `Tiering` starts the moves; `HostCopyStore`
    cancels those of lost copies.
    """

    def __init__(
        self,
        background: Background,
        name: NodeId,
        directory: StateDirectory,
        stale_file: Callable[[HostCopy], Path | None],
        announce: Callable[[], None],
    ) -> None:
        """Args: stale_file: called after a move; returns the copy's file if it must be removed.
        announce: called when a move has ended."""
        self._background = background
        self._name = name
        self._directory = directory
        self._stale_file = stale_file
        self._announce = announce
        self._moves: dict[HostCopy, Move] = {}

    def __len__(self) -> int:
        return len(self._moves)

    def __contains__(self, copy: object) -> bool:
        return copy in self._moves

    def under_way(self) -> list[Move]:
        return list(self._moves.values())

    async def move(self, copy: HostCopy, work: Work, *, is_up: bool) -> None:
        """Move a host copy and wait. The move continues if the caller is cancelled."""
        await asyncio.shield(self._begin(copy, work, is_up=is_up).done)

    async def until_settled(self, copy: HostCopy) -> None:
        """Wait until no move of the host copy is under way: join a promotion, cancel a demotion."""
        while (move := self._moves.get(copy)) is not None:
            if not move.is_up:
                move.cancelled.set()
            with contextlib.suppress(PhaseloomError):
                await asyncio.shield(move.done)

    def hint(self, copy: HostCopy, work: Work) -> None:
        """Start to promote a host copy that will be needed, unless a move of it is under way."""
        if copy not in self._moves:
            self._begin(copy, work, is_up=True, is_hint=True)

    def give_up(self, copy: HostCopy, file: Path) -> None:
        """Give up a host copy that nobody needs: cancel its move, which then removes its file, or
        remove the file at once."""
        move = self._moves.get(copy)
        if move is not None:
            move.cancelled.set()
        else:
            self._directory.discard(file)

    async def discard(self, file: Path) -> None:
        """Remove a file that nobody needs. Raises nothing: the next start removes leftover
        files."""
        with contextlib.suppress(InternalError), error_boundary(metrics.UNFORESEEN, "move"):
            await asyncio.to_thread(self._directory.discard, file)

    def _begin(self, copy: HostCopy, work: Work, *, is_up: bool, is_hint: bool = False) -> Move:
        assert copy not in self._moves
        move = self._moves[copy] = Move(copy, is_up, is_hint, self._background.event())
        self._background.start(self._run(move, work))
        return move

    async def _run(self, move: Move, work: Work) -> None:
        """Do the work of a move and report its end to everyone who waits.

        An invalid transition ends this process: nobody knows where the copy is, and the next daemon
        verifies both places.
        """
        labels = {"node": self._name, "direction": move.name}
        failure: PhaseloomError | None = None
        try:
            with metrics.timed(metrics.TRANSFER_DURATION, **labels):
                await work(move)
            metrics.count(metrics.TRANSFER_MOVED, move.copy.num_bytes, **labels)
        except InvalidTransition:
            raise
        except PhaseloomError as error:
            log.info("the %s of %s ended: %s", move.name, move.copy, error)
            failure = error
        file = self._stale_file(move.copy)
        if file is not None:
            await self.discard(file)
        # Before `done`: those who wait may start the next move at once.
        del self._moves[move.copy]
        if failure is None:
            move.done.set_result(None)
        else:
            move.done.set_exception(failure)
            # Marks the failure as seen: nobody may be waiting for a hint's move.
            move.done.exception()
        self._announce()


@dataclass(frozen=True, slots=True)
class DeviceCopy:
    """The device memory of one version, as a descriptor."""

    device: int
    num_bytes: int
    fd: int


class DeviceCopies:
    """Weights versions in device memory, so that ranks on one GPU sync without the host.

    The rank that publishes a version hands over a descriptor of device memory with the same bytes.
    A rank that opens the version on that device receives it. The daemon only holds descriptors and
    uses no GPU itself.

    Invariant: device copies never keep a deployment out, because heaps have priority in the budget.
    They are a cache, at most one per version: the version itself is in host memory, and a kill of
    the daemon drops them.
    """

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._copies: dict[VersionKey, DeviceCopy] = {}
        """By version, oldest first."""

    def keep(self, rank: Rank, key: VersionKey, num_bytes: int, fds: list[int]) -> bool:
        """Hold a version's device memory if it fits next to the heaps on the device.

        Older device copies are dropped to make room. The method owns the descriptors and closes
        them if it refuses the copy.

        Returns: whether the copy is held.
        Raises:  CallerError: PERMISSION_DENIED: there is not exactly one descriptor, or the rank is
                 not the first one here of the version's policy.
        """
        if len(fds) != 1 or key.policy != rank.wpg.key or rank.index:
            close_fds(fds)
            raise CallerError(
                f"{rank} cannot share version {key}", code=Code.PERMISSION_DENIED, field="version"
            )
        self.drop(key)
        budget = self._residency.device_budget_bytes[rank.device]
        room = budget - self._residency.device_used_bytes(rank.device)
        if num_bytes > room:
            log.info("version %s does not fit on device %d next to its policy", key, rank.device)
            close_fds(fds)
            return False
        self._drop_oldest(rank.device, until_bytes=room - num_bytes)
        self._copies[key] = DeviceCopy(rank.device, num_bytes, fds[0])
        return True

    def find(self, rank: Rank, key: VersionKey) -> int | None:
        """The descriptor of a version's device memory; None: there is none on the rank's device."""
        check_reader(rank.wpg, key, None)
        copy = self._copies.get(key)
        return copy.fd if copy is not None and copy.device == rank.device else None

    def make_way(self, rank: Rank) -> None:
        """Drop the oldest device copies that would not fit next to a rank's heap.

        Called before the rank is loaded, after everything that it displaces has left the device.
        """
        budget = self._residency.device_budget_bytes[rank.device]
        used_bytes = self._residency.device_used_bytes(rank.device) + rank.device_bytes
        self._drop_oldest(rank.device, until_bytes=budget - used_bytes)

    def used_bytes(self, device: int) -> int:
        return sum(copy.num_bytes for copy in self._copies.values() if copy.device == device)

    def drop(self, key: VersionKey) -> None:
        copy = self._copies.pop(key, None)
        if copy is not None:
            os.close(copy.fd)

    def close(self) -> None:
        for key in [*self._copies]:
            self.drop(key)

    def _drop_oldest(self, device: int, until_bytes: int) -> None:
        for key in [key for key, copy in self._copies.items() if copy.device == device]:
            if self.used_bytes(device) <= until_bytes:
                break
            self.drop(key)


class DeviceFiles:
    """The memory of emulated devices, as files, for ranks that are loaded by copying to it.

    A device keeps the last file after its rank was offloaded, so that the next load needs no fresh
    pages. Only a rank of the same tenant gets that file, and overwrites it in the load. If another
    rank is loaded on the device, the file is closed, and the system clears its pages. A killed
    daemon's files are lost: their ranks keep them until they are offloaded.
    """

    def __init__(self) -> None:
        self._used: dict[Rank, Extent] = {}
        self._idle: dict[int, tuple[str, Extent]] = {}
        """Device → the tenant whose ranks had the file, and the file."""

    def lend(self, rank: Rank) -> list[int]:
        """Provide the memory for a rank that is about to be loaded.

        Returns: its descriptor; none if the rank has memory of its own.
        """
        for lost in [other for other in self._used if other.state is State.LOST]:
            self._used.pop(lost).close()
        if rank in self._used:
            return [self._used[rank].fd]
        tenant, size = rank.wpg.key.tenant, rounded(rank.heap_bytes)
        is_needed = rank.emulated and rank.frozen and not rank.is_below
        last_tenant, file = self._idle.pop(rank.device, ("", None))
        if file and not (is_needed and tenant == last_tenant and file.num_bytes == size):
            file.close()
            file = None
        if is_needed:
            with contextlib.suppress(OSError):  # then the rank uses pages of its own
                self._used[rank] = file or Extent(size, f"phaseloom: a heap of {tenant}")
        return [self._used[rank].fd] if rank in self._used else []

    def take_back(self, rank: Rank) -> None:
        """Keep the memory that a rank has unmapped for the next rank on its device."""
        if rank in self._used:
            _, last = self._idle.pop(rank.device, ("", None))
            if last:
                last.close()
            self._idle[rank.device] = rank.wpg.key.tenant, self._used.pop(rank)


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

    @contextmanager
    def snapshot_of(self, rank: Rank) -> Iterator[Extent]:
        """Memory for a snapshot of a rank whose extent is device memory until the seal's end. The
        snapshot takes its place in the budget. It is the rank's once the block has filled it."""
        label, pool = f"the seal of {rank.owner}", pool_of(rank.wpg)
        snapshot = self._memory.reserve_uncounted(rank.extent_bytes, label, pool)
        self._memory.unrecorded.add(snapshot)
        try:
            yield self._memory[snapshot]
            rank.wpg.check_alive()
            rank.snapshot = snapshot
        finally:
            self._memory.unrecorded.discard(snapshot)
            if rank.snapshot != snapshot:
                self._memory.free(snapshot)

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
        """Whether nothing else needs the memory of a version, which must be in host memory.

        A host copy in that memory does not count if it may be demoted after the version has left.
        """
        assert version.extent is not None
        copy = self._all_records.host_copies.of_version(version.key, version.extent)
        is_held = copy is not None and copy.is_demotable
        return self._memory[version.extent].num_holders == 1 + is_held

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
        maker = (version.key.policy, version.incarnation)
        writers = (r.wpg for r in self._connected if (r.wpg.key, r.wpg.incarnation) == maker)
        writer = next(writers, None)
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

    def parts_of(self, seal: HostSeal) -> list[SectionRef]:
        """The parts of a seal. Raises: ResourceError: DATA_LOSS: its header is bad."""
        image = self.bytes_of(seal)
        return parts_in(lambda at, length: bytes(image[at : at + length]), seal.name)

    def drop(self, key: DeploymentKey, seq: int) -> None:
        seal = self.records.pop((key, seq), None)
        if seal is not None:
            self._memory.free(seal.extent)
