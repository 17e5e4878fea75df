"""The background work of the daemon: its tasks, its threads, and the end of both."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakSet


class Background:
    """Background work, from `running` until `stop`: tasks, and threads that look at an event."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        """Set by `stop`: a thread that works for long ends early then."""
        self._tasks: asyncio.TaskGroup
        self._endless: list[asyncio.Task[None]] = []
        self._events: WeakSet[threading.Event] = WeakSet()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run tasks within the block, and stop all work at its end. A task that fails ends it."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                yield
                self.stop()
        finally:
            # Work in threads goes on, whatever becomes of its task, until it is told to stop.
            self.stop()

    def start(self, work: Coroutine[Any, Any, None], *, is_endless: bool = False) -> None:
        """Begin a task. Args: is_endless: it never ends by itself: `stop` cancels it."""
        task = self._tasks.create_task(work)
        if is_endless:
            self._endless.append(task)

    def event(self) -> threading.Event:
        """An event that cancels one piece of work; `stop` sets it, too."""
        event = threading.Event()
        self._events.add(event)
        return event

    def stop(self) -> None:
        """End all work early; returns at once."""
        self.stopped.set()
        for event in [*self._events]:
            event.set()
        for task in self._endless:
            task.cancel()
