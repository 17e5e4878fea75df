"""Host memory that a rank borrows from its state manager, for as long as an operation needs it.

So it counts in the node's budget, and where there is no room the operation is refused with the
numbers. The last reference to the memory returns it. It is the rank's across a restart of the state
manager, and the state manager takes it back from a rank that has died.
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
class OwnBytes:
    """Memory for the first bytes of a rank's heap, while it has others there."""

    memory: memoryview
    applied: int
    """The heap's seq for which they are: at another one it must not be used."""
    is_filled: bool
    """Whether the memory is the host copy, which has the bytes."""


class Loans:
    """The loans of one rank: it borrows memory here, and returns it by dropping the memory."""

    def __init__(self, link: StateLink) -> None:
        self._link = link
        self._num_loans = 0
        self._own: weakref.ref[OwnBytes] | None = None
        self._own_lock = asyncio.Lock()
        self._over: asyncio.Queue[int] = asyncio.Queue()
        """The loans whose memory is unmapped."""
        self._returning = asyncio.create_task(self._return())

    async def close(self) -> None:
        await lifecycle.end([self._returning])

    async def borrow(self, num_bytes: int, what: str) -> memoryview:
        """Memory of undefined content. Args: what: what it is for, in a refusal.

        Raises: ResourceError: RESOURCE_EXHAUSTED, with the numbers.
        """
        return (await self._borrow(num_bytes, what)).memory

    async def for_own(self, num_bytes: int, applied: int) -> OwnBytes:
        """Memory for the heap's first bytes, while it has others there. All who ask before it is
        returned have the same memory, which they use one after another.

        Args:   num_bytes: the same at each call.
                applied: the heap's seq.
        Raises: as `borrow`.
        """
        async with self._own_lock:
            own = self._own() if self._own is not None else None
            if own is None or own.applied != applied:
                own = await self._borrow(num_bytes, "a copy of the own weights", applied)
                self._own = weakref.ref(own)
            return own

    async def _borrow(self, num_bytes: int, what: str, copy_at: int = -1) -> OwnBytes:
        """Args: copy_at: as in `BorrowMemory`."""
        self._num_loans += 1
        loan = self._num_loans
        answer, fds = await self._link.call(BorrowMemory(loan, num_bytes, what, copy_at))
        lent = expect(answer, MemoryLent)
        if len(fds) != 1:
            close_fds(fds)
            raise InternalError(f"{len(fds)} extents came for one loan")
        mapping = Mapping(fds[0], num_bytes, writable=not lent.is_host_copy)
        loop = asyncio.get_running_loop()

        def note() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: this process ends
                loop.call_soon_threadsafe(self._over.put_nowait, loan)

        mapping.when_unmapped(note)
        return OwnBytes(mapping.buffer, copy_at, lent.is_host_copy)

    async def _return(self) -> None:
        while True:
            loan = await self._over.get()
            try:
                await self._link.ask(ReturnMemory(loan), Done)
            except PhaseloomError as error:
                log.warning("loan %d is not returned: %s", loan, error)
