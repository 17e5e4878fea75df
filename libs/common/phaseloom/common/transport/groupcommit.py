"""Group commit: items that arrive during a store are stored together by the next one.

A single item is stored at once, unless more items are known to arrive soon. Then the store waits
for them briefly. The caller that adds an item gets the result of the store that contains it, which
starts after the item arrived.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from phaseloom.common.contract.errors import ResourceError

T = TypeVar("T")
R = TypeVar("R")

MAX_ITEMS = 128
"""Maximum number of items per store, which limits the size of a message."""


class _Group(Generic[T, R]):
    """Items that are stored together, by the task that added the first one."""

    def __init__(self, first: T) -> None:
        self.items = [first]
        self.stored: asyncio.Future[R] | None = None
        """Result of the store for the tasks that added further items. Created with the second
        item."""
        self.complete: asyncio.Future[None] | None = None
        """Set while the first task waits for more items; completes when it must stop waiting."""


class GroupCommit(Generic[T, R]):
    """Stores items in groups.

    Args:   store: stores a list of at most `MAX_ITEMS` items, in order of arrival. Calls never
                overlap.
            is_more_coming: whether to wait for more items. Called when an item has arrived.
            max_wait_s: maximum time to wait for more items.
    """

    def __init__(
        self,
        store: Callable[[list[T]], Awaitable[R]],
        is_more_coming: Callable[[], bool] = lambda: False,
        max_wait_s: float = 0.0,
    ) -> None:
        self._store = store
        self._is_more_coming = is_more_coming
        self._max_wait_s = max_wait_s
        self._turn = asyncio.Lock()
        self._open: _Group[T, R] | None = None
        """The group that waits for its store and accepts more items until then."""

    async def add(self, item: T) -> R:
        """Store an item together with its group. Returns: the result of `store` for the group.

        Raises: the error raised by `store`. ResourceError: the task that stores the group was
                cancelled.
        """
        group = self._open
        if group is None or len(group.items) >= MAX_ITEMS:
            group = self._open = _Group(item)
            return await self._lead(group)
        group.items.append(item)
        if group.complete is not None and self._is_complete(group):
            _complete(group.complete)
        if group.stored is None:
            group.stored = asyncio.get_running_loop().create_future()
        return await asyncio.shield(group.stored)

    async def _lead(self, group: _Group[T, R]) -> R:
        try:
            async with self._turn:
                if not self._is_complete(group):
                    loop = asyncio.get_running_loop()
                    group.complete = loop.create_future()
                    timer = loop.call_later(self._max_wait_s, _complete, group.complete)
                    try:
                        await group.complete
                    finally:
                        timer.cancel()
                # Close the group before storing it: items that arrive now belong to the next one.
                if self._open is group:
                    self._open = None
                result = await self._store(group.items)
        except BaseException as error:
            if self._open is group:
                self._open = None
            _fail(group.stored, error)
            raise
        if group.stored is not None:
            group.stored.set_result(result)
        return result

    def _is_complete(self, group: _Group[T, R]) -> bool:
        return len(group.items) >= MAX_ITEMS or not self._is_more_coming()


def _complete(complete: asyncio.Future[None]) -> None:
    if not complete.done():
        complete.set_result(None)


def _fail(stored: asyncio.Future[R] | None, error: BaseException) -> None:
    if stored is None:
        return
    if not isinstance(error, Exception):
        error = ResourceError("the task that stored it was cancelled", remedy="try again")
    stored.set_exception(error)
    stored.exception()  # mark it as retrieved: the waiting tasks may have been cancelled too
