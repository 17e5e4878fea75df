"""Prefault of host memory before a rank copies out for the first time.

Memory that was never touched takes several times as long to write. While a rank fills its heap,
its extent is prefaulted in the background, piece by piece. Each deployment starts offloaded, so
the rank writes all of that extent a moment later: the prefault takes no memory that would not be
taken anyway. It pauses while moves and switches are under way, and ends as soon as the rank has
filled its extent or is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from phaseloom.common.contract.errors import PhaseloomError
from phaseloom.common.observability import metrics
from phaseloom.common.process.error_boundary import contained
from phaseloom.common.tensors.hugepages import touch
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.residency.incarnations import Rank, State

log = logging.getLogger(__name__)

_PIECE_BYTES = 32 * 1024 * 1024
"""Bytes prefaulted in one step; a caller of `Prefault.end` waits for one step at most."""


class Prefault:
    """Background prefault of ranks' extents: call `start` with a task group, `stop` to end it."""

    def __init__(self, node: Node, is_busy: Callable[[], bool]) -> None:
        """Args: is_busy: whether a move or a switch is under way; the node announces its end."""
        self._node = node
        self._is_busy = is_busy
        self._under_way: dict[Rank, asyncio.Future[None]] = {}
        self._ending: set[Rank] = set()
        self._is_stopped = False
        self._tasks: asyncio.TaskGroup

    def start(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks

    def stop(self) -> None:
        self._is_stopped = True
        self._node.announce()

    def begin(self, rank: Rank) -> None:
        """Begin to prefault, in the background, the extent that the rank is about to fill."""
        assert rank.extent is not None
        # Taken now: by the time that the task runs, the rank may be lost and its extent freed.
        views = [self._node.memory[rank.extent].view(rank.extent_bytes)]
        self._under_way[rank] = asyncio.get_running_loop().create_future()
        self._tasks.create_task(self._run(rank, views))

    async def end(self, rank: Rank) -> None:
        """Stop the prefault of the rank's extent; on return nothing has it mapped for that."""
        ended = self._under_way.get(rank)
        if ended is not None:
            self._ending.add(rank)
            self._node.announce()
            await asyncio.shield(ended)

    async def _run(self, rank: Rank, views: list[memoryview]) -> None:
        try:
            with contained(metrics.UNFORESEEN, "move"):
                # The rank waits for the answer that brings its extent: that answer goes first.
                await self._node.handles.recorded()
                for start in range(0, len(views[0]), _PIECE_BYTES):
                    await self._node.until(lambda: self._is_over(rank) or not self._is_busy())
                    if self._is_over(rank) or _available_bytes() < _PIECE_BYTES:
                        break
                    if not await asyncio.to_thread(_touch, views, start):
                        break
        except PhaseloomError as error:
            log.warning("the memory for %s is not prefaulted: %s", rank, error)
        finally:
            # An extent can be made immutable only while nobody has it mapped writable.
            views.clear()
            self._ending.discard(rank)
            self._under_way.pop(rank).set_result(None)

    def _is_over(self, rank: Rank) -> bool:
        return self._is_stopped or rank in self._ending or rank.state is not State.FILLING


def _touch(views: list[memoryview], start: int) -> bool:
    """Touch one piece; False ends the prefault. Blocking: called in a thread.

    The list comes in place of the memory itself, because a thread may drop its arguments late,
    and a view that lives on keeps the extent from being made immutable.
    """
    (memory,) = views
    return touch(memory[start : start + _PIECE_BYTES])


def _available_bytes() -> int:
    """Bytes of the machine's memory that can be had without anybody giving some up."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
