"""Seals: a host copy is made whole between operations, then written to disk while work
continues."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakValueDictionary

from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.contract.specs import Durability
from phaseloom.common.contract.state_agent import PrepareSeal, Sealed, WriteSeal
from phaseloom.common.contract.state_layout import host_start
from phaseloom.common.contract.state_rank import StageState
from phaseloom.statemgr.disk.disk import BlockOf, MemoryFile, copy, read_part, write_state
from phaseloom.statemgr.disk.files import NEVER, find_parts
from phaseloom.statemgr.disk.statefile import layout_of
from phaseloom.statemgr.node.extents import HostMemory, joined
from phaseloom.statemgr.node.ledger import Ledger
from phaseloom.statemgr.node.ranks import Ranks
from phaseloom.statemgr.node.stores import HostCopyStore, HostSealStore
from phaseloom.statemgr.records.incarnations import Rank, State, Step, Wpg
from phaseloom.statemgr.records.records import Records
from phaseloom.statemgr.records.seals import HostSeal, seal_header, section_of, superseded_seals
from phaseloom.statemgr.records.stateheader import Section, SectionRef, StateHeader
from phaseloom.statemgr.tiering.heapfiles import HeapFiles
from phaseloom.statemgr.tiering.sharing import FrozenCopies
from phaseloom.statemgr.tiering.switching import on_each_device
from phaseloom.statemgr.tiering.tiering import Tiering

log = logging.getLogger(__name__)


@dataclass
class Sealer:
    ledger: Ledger
    records: Records
    memory: HostMemory
    ranks: Ranks
    tiering: Tiering
    copies: HostCopyStore
    frozen: FrozenCopies
    host_seals: HostSealStore
    heap_files: HeapFiles
    verify_version: Callable[[VersionKey], Awaitable[None]]
    """Drops the copy of a version here if it is bad; raises PhaseloomError if the version is
    lost."""
    _seals: dict[DeploymentKey, dict[int, Sealed]] = field(default_factory=dict, init=False)
    _writing: WeakValueDictionary[DeploymentKey, asyncio.Lock] = field(
        default_factory=WeakValueDictionary, init=False
    )

    def add_from_disk(self, header: StateHeader, file: str) -> None:
        """Add a seal that is on disk."""
        sealed = Sealed(file, header.digest, header.num_bytes)
        self._seals.setdefault(header.deployment, {})[header.seq] = sealed

    async def prepare(self, request: PrepareSeal) -> None:
        """Make the host copies of all ranks whole at `seq`, and keep them so until the seal is
        written. Does nothing if that seal exists.

        Raises: CallerError: FAILED_PRECONDITION: another seq was applied last. ResourceError: the
                incarnation is stale, or a rank is lost.
        """
        wpg = self.records.residency.current(request.deployment, request.incarnation)
        in_host = self.tiering.in_host(wpg, or_straight=True)
        async with in_host, self.ranks.holding(wpg):
            if self._find(wpg, request.seq) is not None:
                return
            if wpg.prepared is not None and wpg.prepared.seq == request.seq:
                return
            await self.ledger.until(lambda: wpg.prepared is None or not wpg.prepared.is_writing)
            self.records.residency.end_seal(wpg)
            self.ranks.settle(wpg)
            self.records.residency.check_ready(wpg)
            try:
                await on_each_device(wpg.on_device, self._copy)
                for rank in wpg.ranks:
                    await self.frozen.rearrange(rank)
                    await self._snapshot(rank)
                self.records.residency.prepare_seal(wpg, request.seq)
            except BaseException:
                self.ranks.settle(wpg)
                raise

    async def _copy(self, rank: Rank) -> None:
        await self.heap_files.choose(rank)
        self.records.residency.begin_copy_out(rank, release=False)
        if rank.is_in_extent and not rank.is_below:
            with self.copies.snapshot_of(rank) as target:
                copied = await self.ranks.order(rank, StageState(), [target.fd])
        else:
            copied = await self.frozen.copy_out(rank, release=False)
        # The digest is taken while writing.
        self.records.residency.finish_copy_out(rank, copied.applied, rank.digest)

    async def _snapshot(self, rank: Rank) -> None:
        """Copy a rank's host-only state, which the rank changes while the seal is written."""
        if not rank.host_bytes:
            return
        label = f"the seal of {rank.owner}'s state in host memory"
        async with self.tiering.reserved(rank.host_bytes, label) as snapshot:
            if rank.extent is None:
                raise ResourceError(f"{rank} is lost")
            rank.snapshot = snapshot
        source = self.memory[rank.extent].view(rank.extent_bytes)[host_start(rank.heap_bytes) :]
        await asyncio.to_thread(copy, self.memory[snapshot].view(rank.host_bytes), source)

    async def write(self, request: WriteSeal) -> Sealed:
        """Write the versions and then the prepared copies to disk or, for durability HOST, keep the
        copies in host memory. Idempotent.

        Raises: CallerError: the seal is not prepared, or a version is not here. ResourceError: the
                disk is full or fails; the previous seal stays valid.
        """
        wpg = self.records.residency.current(request.deployment, request.incarnation)
        await self.ledger.until(lambda: wpg.prepared is None or not wpg.prepared.is_writing)
        stored = self._find(wpg, request.seq)
        is_kept = request.durability is Durability.HOST
        if stored is not None:
            await self._make_durable(wpg, request.versions, is_kept=is_kept)
            return stored
        self.records.residency.begin_write(wpg, request.seq)
        # An earlier incarnation may still be writing a file of this name.
        writing = self._writing.setdefault(wpg.key, asyncio.Lock())
        try:
            await self._make_durable(wpg, request.versions, is_kept=is_kept)
            write = self._keep if is_kept else self._write
            async with writing:
                current = self.records.residency.find(wpg.key)
                if current not in {None, wpg}:
                    # An older incarnation must not replace a newer one's seal.
                    raise ResourceError(
                        f"{wpg} is over: {current} has replaced it", code=Code.ABORTED
                    )
                sealed = await write(wpg, request.seq)
        finally:
            self.records.residency.end_seal(wpg)
            self.ranks.settle(wpg)
        self._seals.setdefault(wpg.key, {})[request.seq] = sealed
        wpg.sealed.add(request.seq)
        await self.remove_superseded(wpg.key, request.seq, request.committed)
        wpg.sealed &= self._seals.get(wpg.key, {}).keys()
        return sealed

    async def fill(self, rank: Rank) -> None:
        """Fill the extent of a registered heap from the seal that its incarnation starts from, or
        the file of its host copy if the extent has no memory.

        Raises: ResourceError: DATA_LOSS, naming the file. CallerError: the seal has another layout.
        """
        wpg = rank.wpg
        seal = self.host_seals.records.get((wpg.key, wpg.seal_seq))
        if seal is not None:
            refs = self.host_seals.parts_of(seal)
            image = MemoryFile(self.host_seals.bytes_of(seal))
            read: Callable[[SectionRef, memoryview], None] = partial(
                read_part, image, cancelled=NEVER
            )
            block_of: Callable[[SectionRef], BlockOf] = partial(self._kept_block, seal)
        else:
            path = self.copies.directory.seal(wpg.key, wpg.seal_seq)
            refs = await asyncio.to_thread(find_parts, path)
            read = self.copies.directory.read
            block_of = self.copies.directory.blocks_of
        part = section_of(rank, refs[0])
        if rank.extent is None or rank.is_below:
            await self._fill_file(rank, part, block_of(refs[rank.index]))
            return
        assert rank.extent is not None
        memory = self.memory[rank.extent].view(part.num_bytes)
        await asyncio.to_thread(read, refs[rank.index], memory)
        self.copies.fill(rank, wpg.seal_seq, part.digest)

    async def _fill_file(self, rank: Rank, part: Section, block_of: BlockOf) -> None:
        number, seq = self.heap_files.number_for(rank), rank.wpg.seal_seq
        self.tiering.check_nvme(rank)
        section = Section(part.num_bytes, rank.tensors, part.digest)
        header = StateHeader("copy", rank.wpg.key, seq, [section])
        path = self.copies.directory.host_copy(number)
        await asyncio.to_thread(self.copies.directory.write, path, header, [block_of])
        self.heap_files.settle(rank, number, seq, part.digest)
        self.records.residency.step(rank, Step.FILLED)

    def _kept_block(self, seal: HostSeal, place: SectionRef) -> BlockOf:
        image = self.host_seals.bytes_of(seal)[place.offset :]
        return lambda start, end: image[start:end]

    def abandon(self) -> None:
        """Give up prepared seals that are not being written, because the agent that would request
        the write has left."""
        for wpg in self.records.residency.unwritten_seals():
            log.info("the seal of %s will not be written because its agent has left", wpg)
            self.records.residency.end_seal(wpg)
            self.ranks.settle(wpg)

    async def forget(self, key: DeploymentKey) -> None:
        """Delete the seals and all state files of a deployment, of every incarnation."""
        self._seals.pop(key, None)
        for seal in self.host_seals.records.of(key):
            self.host_seals.drop(key, seal.seq)
        await asyncio.to_thread(self.copies.directory.clear, key)

    async def _write(self, wpg: Wpg, seq: int) -> Sealed:
        path, header = self.copies.directory.seal(wpg.key, seq), _header(wpg, seq)
        memories = [await self._sealed(rank) for rank in wpg.ranks]
        written = await asyncio.to_thread(self.copies.directory.write, path, header, memories)
        for rank, part in zip(wpg.ranks, written.parts, strict=True):
            if rank.is_dirty and rank.state is State.HOST:
                self.records.residency.digested(rank, part.digest)
        return Sealed(str(path), written.digest, written.num_bytes)

    async def _keep(self, wpg: Wpg, seq: int) -> Sealed:
        header = _header(wpg, seq)
        _, num_bytes = layout_of(header)
        async with self.tiering.reserved(num_bytes, f"seal {seq} of {wpg.key}") as extent:
            seal = HostSeal(wpg.key, seq, extent, num_bytes)
            memories = [await self._sealed(rank) for rank in wpg.ranks]
            image = MemoryFile(self.host_seals.bytes_of(seal))
            written = await asyncio.to_thread(
                write_state, image, seal.name, header, memories, NEVER
            )
            self.host_seals.drop(wpg.key, seq)
            self.host_seals.records[wpg.key, seq] = seal
        return Sealed("", written.digest, written.num_bytes)

    async def _sealed(self, rank: Rank) -> memoryview | BlockOf:
        if rank.snapshot is None and rank.copy is not None and rank.is_below:
            # It stays there: nothing is promoted while a seal is prepared.
            (place,) = await asyncio.to_thread(find_parts, self.copies.file_of(rank.copy))
            return self.copies.directory.blocks_of(place)
        if rank.snapshot is None:
            return self.copies.bytes_for(rank)
        if rank.is_in_extent:
            return self.memory[rank.snapshot].view(rank.extent_bytes)
        assert rank.extent is not None
        extent = self.memory[rank.extent]
        snapshot, start = self.memory[rank.snapshot], host_start(rank.heap_bytes)
        return joined(extent, start, snapshot, rank.host_bytes)

    async def _make_durable(self, wpg: Wpg, seqs: list[int], *, is_kept: bool) -> None:
        """Put versions on disk or leave them in host memory, where committed ones are."""
        for seq in seqs:
            pieces = self.records.versions.pieces(VersionKey(wpg.key, seq))
            # The manifest goes last, so that the parts are on disk if the manifest is.
            for piece in [] if is_kept else reversed(pieces):
                try:
                    await self.tiering.versions.persist(piece)
                except ResourceError as error:
                    if error.info.code is Code.DATA_LOSS:
                        await self.verify_version(piece.key)
                    raise

    async def remove_superseded(self, key: DeploymentKey, written: int, committed: int) -> None:
        in_memory = {host_seal.seq for host_seal in self.host_seals.records.of(key)}
        seqs = in_memory | self._seals.get(key, {}).keys()
        for seq in superseded_seals(list(seqs), written, committed):
            self._seals.get(key, {}).pop(seq, None)
            self.host_seals.drop(key, seq)
            path = self.copies.directory.seal(key, seq)
            try:
                await asyncio.to_thread(self.copies.directory.remove, path)
            except OSError as error:
                log.warning("the old seal %s cannot be removed: %s", path, error)

    def _find(self, wpg: Wpg, seq: int) -> Sealed | None:
        """The seal at `seq` if this incarnation wrote it or started from it. The seal of another
        incarnation may differ in bits."""
        if seq != wpg.seal_seq and seq not in wpg.sealed:
            return None
        sealed = self._seals.get(wpg.key, {}).get(seq)
        # The previous daemon may have kept it in host memory.
        header = None if sealed else self._kept_header(wpg.key, seq)
        return Sealed("", header.digest, header.num_bytes) if header else sealed

    def is_kept(self, key: DeploymentKey, seq: int, ranks: tuple[int, int]) -> bool:
        """Whether a seal is in host memory; its blocks are verified when they are read.

        Args: ranks: see `StateHeader.is_of`.
        """
        try:
            header = self._kept_header(key, seq)
        except ResourceError as error:
            log.error("%s", error)
            return False
        return header is not None and header.is_of(*ranks)

    def _kept_header(self, key: DeploymentKey, seq: int) -> StateHeader | None:
        """Raises: ResourceError: DATA_LOSS: the header of the seal in host memory is bad."""
        seal = self.host_seals.records.get((key, seq))
        if seal is None:
            return None
        return self.host_seals.parts_of(seal)[0].header


def _header(wpg: Wpg, seq: int) -> StateHeader:
    sections = [Section(rank.extent_bytes, rank.tensors, rank.digest) for rank in wpg.ranks]
    return seal_header(wpg.key, seq, sections, rank_offset=wpg.rank_offset, num_ranks=wpg.num_ranks)
