"""The host memory of a rank: its heap's extent, which a seal or the rank itself fills, and the
memory that it borrows while an operation needs it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.state_layout import extent_bytes
from phaseloom.common.contract.state_rank import (
    BorrowMemory,
    CommitInitial,
    HeapRegistered,
    MemoryLent,
    RegisterHeap,
    ReturnMemory,
)
from phaseloom.statemgr.node.digests import has_digest
from phaseloom.statemgr.node.extents import HostMemory
from phaseloom.statemgr.node.ledger import Ledger
from phaseloom.statemgr.node.ranks import Ranks
from phaseloom.statemgr.node.stores import HostCopyStore, pool_of
from phaseloom.statemgr.records.incarnations import Loan, Rank, State
from phaseloom.statemgr.records.layouts import rounded
from phaseloom.statemgr.records.records import Records
from phaseloom.statemgr.records.ways import Way
from phaseloom.statemgr.tiering.heapfiles import HeapFiles
from phaseloom.statemgr.tiering.tiering import Tiering

log = logging.getLogger(__name__)


@dataclass
class RankMemory:
    ledger: Ledger
    records: Records
    memory: HostMemory
    copies: HostCopyStore
    ranks: Ranks
    tiering: Tiering
    heap_files: HeapFiles
    restore: Callable[[Rank], Awaitable[None]]
    """Fills a registered heap from the seal that its incarnation starts from."""

    async def register_heap(
        self, rank: Rank, request: RegisterHeap
    ) -> tuple[HeapRegistered, list[int]]:
        """Give a rank its extent, filled from the seal that its incarnation starts from, if any.

        Returns: the answer, and the extent's descriptor; none for a frozen rank that starts from a
                 seal, because its host copy is shared at once.
        Raises:  CallerError: the layout is bad. ResourceError: RESOURCE_EXHAUSTED, with the
                 numbers; DATA_LOSS: the seal is bad; ABORTED: the incarnation ended meanwhile.
        """
        table = self.records.layouts.read(request.tensors)
        self.records.residency.check_heap(rank, request, table)
        # The copies of the deployment's other ranks stay: a switch-in needs all of them at once.
        label = f"the host copy of {rank.owner}"
        num_bytes = extent_bytes(request.heap_bytes, request.host_bytes)
        with self.records.residency.using(rank.wpg):
            has_memory = self._way_of(rank, request) is Way.HOST
            if has_memory:
                reserving = self.tiering.reserved(num_bytes, label, may_freeze=request.frozen)
                async with reserving as extent:
                    self.records.residency.register_heap(rank, request, table, extent)
            else:
                log.warning("host memory has no room for %s, so it is copied to NVMe only", label)
                vacated = None if request.frozen else self.memory.reserve_vacated(num_bytes, label)
                self.records.residency.register_heap(
                    rank, request, table, vacated, has_memory=False
                )
            # A rank whose device pins memory may share a descriptor of device memory later.
            if rank in self.ranks.connected:
                self.ranks.connected[rank].max_fds = int(rank.pins)
        if rank.wpg.seal_seq:
            await self.restore(rank)
        rank.wpg.check_alive()
        if rank.extent is None:
            return HeapRegistered(rank.applied, has_memory), []
        return HeapRegistered(rank.applied, has_memory), [self.memory[rank.extent].fd]

    def _way_of(self, rank: Rank, request: RegisterHeap) -> Way:
        num_bytes = rounded(extent_bytes(request.heap_bytes, request.host_bytes))
        room, needs_host = self.tiering.room(rank), request.host_bytes > 0
        return room.choose(num_bytes, is_leaving=False, needs_host=needs_host)

    async def commit_initial(self, rank: Rank, request: CommitInitial) -> None:
        """Make the bytes with which a rank has filled its extent its initial state. If the extent
        has no memory, they are still in its heap.

        Raises: CallerError: the rank is not filling its extent. ResourceError: DATA_LOSS: the bytes
                do not match the rank's digest; ABORTED: the incarnation is over.
        """
        if rank.frozen and rank.copy is not None and request.digest in {rank.digest, ""}:
            return  # the rank asks again after a kill of the daemon
        is_straight = rank.extent is None or rank.is_below
        is_expected = rank.state is State.FILLING and not rank.wpg.seal_seq
        if not is_expected or (is_straight and request.digest):
            raise CallerError(f"{rank} expects no initial state", code=Code.FAILED_PRECONDITION)
        if request.applied < 0:
            raise CallerError(
                f"seq must not be negative, got {request.applied}",
                field="applied",
                remedy="use zero or more",
            )
        if is_straight:
            await self.heap_files.fill(rank, request.applied)
            return
        assert rank.extent is not None
        extent = self.memory[rank.extent]
        memory = (extent.readable if rank.frozen else extent.view)(rank.extent_bytes)
        if not await has_digest(memory, request.digest):
            raise ResourceError(
                f"the host copy of {rank} does not match its digest", code=Code.DATA_LOSS
            )
        self.copies.fill(rank, request.applied, request.digest)

    async def borrow(self, rank: Rank, request: BorrowMemory) -> tuple[MemoryLent, list[int]]:
        """Lend memory to a rank. Unneeded host copies and versions make room for it.

        Returns: the answer, and the memory's descriptor. A request that is repeated after a kill of
                 the daemon gets the same memory.
        Raises:  CallerError: a bad size, or the rank has no heap yet. ResourceError:
                 RESOURCE_EXHAUSTED, with the numbers; ABORTED: the incarnation is over.
        """
        if request.num_bytes <= 0:
            raise CallerError(
                f"{request.num_bytes} bytes", field="num_bytes", remedy="use one or more"
            )
        if rank.state in {State.AWAITING, State.LOST}:
            raise CallerError(f"{rank} is {rank.state}", code=Code.FAILED_PRECONDITION)
        if request.loan not in rank.loans and not self._lend_copy(rank, request):
            label = f"{request.what} for {rank.owner}"
            async with self.tiering.reserved(request.num_bytes, label, pool_of(rank.wpg)) as extent:
                rank.wpg.check_alive()
                loan = Loan(extent, request.num_bytes, is_host_copy=False)
                if rank.loans.setdefault(request.loan, loan) is not loan:
                    raise CallerError(f"{rank} sent the same request twice at once", field="loan")
        loan = rank.loans[request.loan]
        memory = self.memory[loan.extent]
        fd = memory.read_only_fd if loan.is_host_copy else memory.fd
        return MemoryLent(loan.is_host_copy), [fd]

    def _lend_copy(self, rank: Rank, request: BorrowMemory) -> bool:
        """Lend a frozen rank its host copy if it has the requested state. Nobody overwrites a
        frozen copy, and its memory stays while a loan holds it."""
        copy = rank.copy
        if not rank.frozen or copy is None or rank.is_below or rank.applied != request.copy_at:
            return False
        if copy.extent is None or rank.has_other_layout or copy.num_bytes < request.num_bytes:
            return False
        self.memory.hold(copy.extent)
        rank.loans[request.loan] = Loan(copy.extent, copy.num_bytes, is_host_copy=True)
        return True

    async def take_back(self, rank: Rank, request: ReturnMemory) -> None:
        """Take back borrowed memory that a rank has unmapped. Idempotent."""
        loan = rank.loans.pop(request.loan, None)
        if loan is None:
            return
        if loan.is_host_copy:
            self.memory.free(loan.extent)
        else:
            self.memory.park(loan.extent, pool_of(rank.wpg))
        self.ledger.announce()
