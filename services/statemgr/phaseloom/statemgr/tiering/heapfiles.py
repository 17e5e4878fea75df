"""Host copies that are written and read by the ranks themselves, straight between heap and NVMe.

This is the way of a heap whose copy has no room in host memory (`records.ways`). The daemon makes
the file, the rank fills it and returns the checksums, and the daemon completes it. The heap stays
on the device until the whole file is fsynced and in the manifest, so that the file or the heap is
complete at every moment. While the rank is on the device, the file is older than the heap; the next
one replaces it.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass

from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.contract.state_rank import Copied, CopyIn, CopyOut, FileSection
from phaseloom.common.tensors.blockhash import BLOCK_BYTES
from phaseloom.statemgr.disk.disk import write_header
from phaseloom.statemgr.disk.files import Draft, find_parts
from phaseloom.statemgr.disk.statefile import check_blocks
from phaseloom.statemgr.node.extents import HostMemory
from phaseloom.statemgr.node.ledger import Ledger
from phaseloom.statemgr.node.ranks import Ranks
from phaseloom.statemgr.node.stores import HostCopyStore
from phaseloom.statemgr.records.incarnations import ON_NVME, HostCopy, Rank, State, Step
from phaseloom.statemgr.records.residency import Residency
from phaseloom.statemgr.records.stateheader import (
    Section,
    SectionRef,
    StateHeader,
    data_loss,
)
from phaseloom.statemgr.records.ways import Way
from phaseloom.statemgr.tiering.tiering import Tiering

_ANY_SEQ = 2**62
"""A seq that no heap is at: a rank that is asked for changes since then reports its own seq."""


@dataclass
class HeapFiles:
    ledger: Ledger
    residency: Residency
    memory: HostMemory
    copies: HostCopyStore
    ranks: Ranks
    tiering: Tiering

    async def choose(self, rank: Rank) -> Way:
        """Choose the way of a resident rank's next host copy, and take the memory if it has room.

        The copy of a rank that trains and has memory keeps it.
        """
        copy = rank.copy
        if copy is not None and not rank.frozen:
            await self.copies.moves.until_settled(copy)
            if copy.state not in ON_NVME:
                return Way.HOST
        elif rank.new_extent is not None:
            return Way.HOST
        way = self.tiering.way_of(rank, is_leaving=True)
        if way is Way.HOST and copy is not None and not rank.frozen:
            assert copy.extent is not None
            self.memory.occupy(copy.extent, f"the host copy of {rank.owner}")
            async with self.ledger.change() as afterwards:
                self.copies.records.step(copy, Step.OCCUPIED)
                copy.overwritten()
                file = self.copies.file_of(copy)
                afterwards.push_async_callback(self.copies.moves.discard, file)
        return way

    async def copy_out(self, rank: Rank, *, release: bool) -> Copied:
        """Write the heap of a resident rank to NVMe as its host copy, then release it if that was
        ordered.

        Raises: ResourceError: the disk is full or fails; the rank is lost, or has run an operation
                meanwhile. The heap is unchanged, and an earlier file too.
        """
        applied = (await self.ranks.order(rank, CopyOut(False, whole_at=_ANY_SEQ))).applied
        await self._write(rank, applied)
        order = CopyOut(release, whole_at=applied, digest=rank.digest)
        copied = await self.ranks.order(rank, order)
        if copied.changed:
            raise ResourceError(f"{rank} has changed since it was written", code=Code.ABORTED)
        return copied

    async def fill(self, rank: Rank, applied: int) -> None:
        """Write the initial state, which is in the rank's heap.

        Raises: as `copy_out`.
        """
        await self._write(rank, applied)
        self.residency.step(rank, Step.FILLED)

    def settle(self, rank: Rank, number: int, applied: int, digest: str) -> None:
        """Make a whole file the host copy of a rank, in place of the old copy.

        Args: number: of the file.
        """
        if rank.state is State.LOST:
            raise ResourceError(f"{rank} was lost after its state was written")
        if rank.frozen:
            self.copies.detach(rank)
            self.copies.records.add_below(rank, number, digest)
            rank.applied, rank.held_version = applied, None
        else:
            rank.copied(applied, digest)

    def number_for(self, rank: Rank) -> int:
        """The number of the next file. A frozen copy may have other users, so it is not
        replaced."""
        if rank.frozen or rank.copy is None:
            return self.copies.records.next_number()
        return rank.copy.number

    async def _write(self, rank: Rank, applied: int) -> None:
        number, directory = self.number_for(rank), self.copies.directory
        self.tiering.check_nvme(rank)
        section = Section(rank.heap_bytes, rank.tensors, "")
        header = StateHeader("copy", rank.wpg.key, applied, [section])
        draft = await asyncio.to_thread(Draft, directory, directory.host_copy(number), header)
        try:
            fd = draft.duplicate()
            try:
                place = FileSection(draft.offsets[0], directory.disk.path.method)
                order = CopyOut(False, file=place)
                checksums = (await self.ranks.order(rank, order, [fd])).checksums
            finally:
                os.close(fd)
            written = header.with_blocks(BLOCK_BYTES, [checksums])
            if not written.parts[0].has_checksums(BLOCK_BYTES):
                raise self.ranks.broken_protocol(rank, "it returned no checksum for some blocks")

            def finish() -> None:
                write_header(draft, written, draft.offsets)
                draft.finish()

            await asyncio.to_thread(finish)
        except BaseException:
            draft.abandon()
            raise
        async with self.ledger.change():
            self.settle(rank, number, applied, written.digest)

    async def load(self, rank: Rank) -> Copied:
        """Load a rank from the file of its host copy, which stays on NVMe.

        Raises: ResourceError: DATA_LOSS, with the tensors that are bad; the rank is lost.
        """
        copy = rank.copy
        assert copy is not None
        place, fd = await asyncio.to_thread(self._opened, copy)
        try:
            method = self.copies.directory.disk.path.method
            section = FileSection(place.offset, method, place.part.blocks)
            return await self.ranks.order(rank, CopyIn(copy.digest, file=section), [fd])
        except ResourceError as error:
            details = error.info.details
            if error.info.code is not Code.DATA_LOSS or "offset" not in details:
                raise
            start = int(details["offset"])
            end = min(start // BLOCK_BYTES * BLOCK_BYTES + BLOCK_BYTES, copy.num_bytes)
            raise place.loss(error.info.message, start, end) from error
        finally:
            os.close(fd)

    def _opened(self, copy: HostCopy) -> tuple[SectionRef, int]:
        """The file of a host copy. Blocking. Raises: ResourceError: DATA_LOSS."""
        path = self.copies.file_of(copy)
        (place,) = find_parts(path)
        check_blocks(place)
        if place.part.digest != copy.digest or place.header.block_bytes != BLOCK_BYTES:
            raise data_loss(place.file, f"it does not have the newest state of {copy}")
        try:
            return place, os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise data_loss(place.file, error.strerror or repr(error)) from error
