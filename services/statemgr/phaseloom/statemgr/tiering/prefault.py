"""Prefault of host memory before a rank copies out for the first time.

Memory that was never touched takes several times as long to write. While a rank fills its heap,
its extent is prefaulted in the background, piece by piece. Each deployment starts offloaded, so
the rank writes all of that extent a moment later: the prefault takes no memory that would not be
taken anyway. It ends as soon as the rank has filled its extent or is lost.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from pathlib import Path

from phaseloom.common.contract.errors import InternalError
from phaseloom.common.observability import metrics
from phaseloom.common.process.error_boundary import error_boundary
from phaseloom.common.tensors.hugepages import touch
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.residency.incarnations import Rank, State

_PIECE_BYTES = 32 * 1024 * 1024
"""Bytes prefaulted in one step; a caller of `Prefault.end` waits for one step at most."""


class Prefault:
    """Background prefault of ranks' extents: call `start` with a task group, `stop` to end it."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._under_way: dict[Rank, tuple[threading.Event, asyncio.Task[None]]] = {}
        self._tasks: asyncio.TaskGroup

    def start(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks

    def stop(self) -> None:
        for stopped, _ in self._under_way.values():
            stopped.set()

    def begin(self, rank: Rank) -> None:
        """Begin to prefault, in the background, the extent that the rank is about to fill."""
        assert rank.extent is not None
        # Taken now: by the time that the task runs, the rank may be lost and its extent freed.
        views = [self._node.memory[rank.extent].view(rank.extent_bytes)]
        stopped = threading.Event()
        task = self._tasks.create_task(self._run(rank, views, stopped))
        self._under_way[rank] = (stopped, task)

    async def end(self, rank: Rank) -> None:
        """Stop the prefault of the rank's extent; on return nothing has it mapped for that."""
        if rank in self._under_way:
            stopped, task = self._under_way[rank]
            stopped.set()
            await asyncio.wait([task])

    async def _run(self, rank: Rank, views: list[memoryview], stopped: threading.Event) -> None:
        try:
            # Logged and counted there: the rank fills its extent all the same.
            with suppress(InternalError), error_boundary(metrics.UNFORESEEN, "move"):
                # The rank waits for the answer that brings its extent: that answer goes first.
                await self._node.handles.recorded()
                await asyncio.to_thread(_touch, rank, views, stopped)
        finally:
            # An extent can be made immutable only while nobody has it mapped writable.
            views.clear()
            del self._under_way[rank]


def _touch(rank: Rank, views: list[memoryview], stopped: threading.Event) -> None:
    """Touch the memory of a rank that fills it. Blocking: called in a thread.

    The list comes in place of the memory itself, because a thread may drop its arguments late,
    and a view that lives on keeps the extent from being made immutable.
    """
    (memory,) = views
    for start in range(0, len(memory), _PIECE_BYTES):
        is_over = stopped.is_set() or rank.state is not State.FILLING
        if is_over or _available_bytes() < _PIECE_BYTES:
            return
        if not touch(memory[start : start + _PIECE_BYTES]):
            return


def _available_bytes() -> int:
    """Bytes of the machine's memory that can be had without anybody giving some up."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
