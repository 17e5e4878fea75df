"""Host memory that a rank borrows from its state manager for the duration of an operation.

Loans count against the node's host memory budget. If the budget has no room, the state manager
refuses the operation with the numbers. Dropping the last reference to the memory returns the loan.
A loan survives a restart of the state manager, which reclaims the loans of ranks that died.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from dataclasses import dataclass

from phaseloom.common.contract.errors import InternalError, PhaseloomError
from phaseloom.common.contract.state_rank import BorrowMemory, Done, MemoryLent, ReturnMemory
from phaseloom.common.process import lifecycle
from phaseloom.common.transport.framing import close_fds
from phaseloom.worker.state.copying import Mapping
from phaseloom.worker.state.link import StateLink, expect

log = logging.getLogger(__name__)


@dataclass(eq=False)
class SavedBytes:
    """Saves the first bytes of a rank's heap while other weights temporarily occupy them."""

    memory: memoryview
    applied: int
    """The heap's seq that these bytes belong to. They must not be used at any other seq."""
    is_filled: bool
    """Whether `memory` already contains the bytes, because it is the heap's host copy."""


class Loans:
    """The loans of one rank. The rank borrows memory here and returns it by dropping the memory."""

    def __init__(self, link: StateLink) -> None:
        self._link = link
        self._num_loans = 0
        self._saved: weakref.ref[SavedBytes] | None = None
        self._saved_lock = asyncio.Lock()
        self._unmapped: asyncio.Queue[int] = asyncio.Queue()
        """Loans whose memory is unmapped and that still have to be returned."""
        self._returning = asyncio.create_task(self._return())

    async def close(self) -> None:
        await lifecycle.end([self._returning])

    async def borrow(self, num_bytes: int, purpose: str) -> memoryview:
        """Borrow memory with undefined content.

        Args:   what: purpose of the memory, used in the message of a refusal.
        Raises: ResourceError: RESOURCE_EXHAUSTED, with the numbers.
        """
        return (await self._borrow(num_bytes, purpose)).memory

    async def borrow_to_save(self, num_bytes: int, applied: int) -> SavedBytes:
        """Borrow memory that saves the heap's first bytes while other weights occupy them.

        Concurrent callers share the same memory and use it one after another.
        Args:   num_bytes: must be the same in every call.
                applied: the heap's seq.
        Raises: the errors of `borrow`.
        """
        async with self._saved_lock:
            saved = self._saved() if self._saved is not None else None
            if saved is None or saved.applied != applied:
                saved = await self._borrow(num_bytes, "a copy of the current weights", applied)
                self._saved = weakref.ref(saved)
            return saved

    async def _borrow(self, num_bytes: int, purpose: str, copy_at: int = -1) -> SavedBytes:
        """Args: copy_at: as in `BorrowMemory`."""
        self._num_loans += 1
        loan = self._num_loans
        answer, fds = await self._link.call(BorrowMemory(loan, num_bytes, purpose, copy_at))
        granted = expect(answer, MemoryLent)
        if len(fds) != 1:
            close_fds(fds)
            raise InternalError(f"expected 1 extent for a loan, got {len(fds)}")
        mapping = Mapping(fds[0], num_bytes, writable=not granted.is_host_copy)
        loop = asyncio.get_running_loop()

        def queue_return() -> None:
            # the loop is closed because the process is exiting
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._unmapped.put_nowait, loan)

        mapping.when_unmapped(queue_return)
        return SavedBytes(mapping.buffer, copy_at, granted.is_host_copy)

    async def _return(self) -> None:
        while True:
            loan = await self._unmapped.get()
            try:
                await self._link.ask(ReturnMemory(loan), Done)
            except PhaseloomError as error:
                log.warning("loan %d not returned: %s", loan, error)
