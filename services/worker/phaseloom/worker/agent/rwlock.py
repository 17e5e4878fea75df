"""A fair read-write lock for coroutines: many readers or one writer, in order of arrival."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairReadWriteLock:
    """A lock whose waiters never overtake: a reader waits behind a writer that came first."""

    def __init__(self) -> None:
        self._num_readers = 0
        self._has_writer = False
        self._waiting: deque[tuple[bool, asyncio.Future[None]]] = deque()
        """Waiters in order, as (whether it is a writer, the future that grants the lock)."""

    @property
    def is_unused(self) -> bool:
        """Whether nobody holds the lock or waits for it."""
        return not (self._has_writer or self._num_readers or self._waiting)

    @asynccontextmanager
    async def read(self) -> AsyncIterator[None]:
        await self._acquire(is_writer=False)
        try:
            yield
        finally:
            self._num_readers -= 1
            self._admit()

    @asynccontextmanager
    async def write(self) -> AsyncIterator[None]:
        await self._acquire(is_writer=True)
        try:
            yield
        finally:
            self._has_writer = False
            self._admit()

    async def _acquire(self, *, is_writer: bool) -> None:
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((is_writer, admitted))
        self._admit()
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.cancelled():
                self._waiting = deque(w for w in self._waiting if w[1] is not admitted)
            else:
                # The lock was granted at the moment of cancellation, so undo the grant.
                self._num_readers -= not is_writer
                self._has_writer = self._has_writer and not is_writer
            self._admit()
            raise

    def _admit(self) -> None:
        while self._waiting and not self._has_writer:
            is_writer, admitted = self._waiting[0]
            if is_writer and self._num_readers and not admitted.done():
                return
            self._waiting.popleft()
            if admitted.done():
                continue  # cancelled
            self._has_writer = is_writer
            self._num_readers += not is_writer
            admitted.set_result(None)
