"""A lock that many may hold together or one alone, first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Nobody overtakes: who wants it together waits behind who came first and wants it alone."""

    def __init__(self) -> None:
        self._num_together = 0
        self._is_alone = False
        self._waiting: deque[tuple[bool, asyncio.Future[None]]] = deque()

    @property
    def is_unused(self) -> bool:
        """Nobody has a turn or waits for one."""
        return not (self._is_alone or self._num_together or self._waiting)

    @asynccontextmanager
    async def together(self) -> AsyncIterator[None]:
        await self._take(alone=False)
        try:
            yield
        finally:
            self._num_together -= 1
            self._admit()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        await self._take(alone=True)
        try:
            yield
        finally:
            self._is_alone = False
            self._admit()

    async def _take(self, *, alone: bool) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((alone, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting = deque(w for w in self._waiting if w[1] is not turn)
            else:
                # It was given in the same moment.
                self._num_together -= not alone
                self._is_alone = self._is_alone and not alone
            self._admit()
            raise

    def _admit(self) -> None:
        while self._waiting and not self._is_alone:
            alone, turn = self._waiting[0]
            if alone and self._num_together and not turn.done():
                return
            self._waiting.popleft()
            if turn.done():
                continue  # cancelled
            self._is_alone = alone
            self._num_together += not alone
            turn.set_result(None)
