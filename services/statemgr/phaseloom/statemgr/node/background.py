"""Background work of the daemon: its tasks, its threads, and their end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakSet


class Background:
    """Background work from `running` until `stop`: tasks, and threads that watch an event."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        """Set by `stop`. Threads that work for a long time check it and end early."""
        self._tasks: asyncio.TaskGroup
        self._endless: list[asyncio.Task[None]] = []
        self._events: WeakSet[threading.Event] = WeakSet()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run tasks within the block and stop all work at its end. A task that fails ends the
        block."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                yield
                self.stop()
        finally:
            # Threads outlive their cancelled tasks until they see the event.
            self.stop()

    def start(self, work: Coroutine[Any, Any, None], *, is_endless: bool = False) -> None:
        """Start a task. Args: is_endless: it never ends by itself, so `stop` cancels it."""
        task = self._tasks.create_task(work)
        if is_endless:
            self._endless.append(task)

    def event(self) -> threading.Event:
        """An event that cancels one piece of work. `stop` sets it, too."""
        event = threading.Event()
        self._events.add(event)
        return event

    def stop(self) -> None:
        """Tell all work to end early; returns at once."""
        self.stopped.set()
        for event in [*self._events]:
            event.set()
        for task in self._endless:
            task.cancel()
