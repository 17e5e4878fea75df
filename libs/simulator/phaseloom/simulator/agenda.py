"""Virtual time: a queue of scheduled actions.

Actions that are scheduled for the same time run in the order in which they were scheduled. An
action appends at most one event, as its last step, so a reader that folds the events later sees the
same order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

NEVER_S = float("inf")


class Agenda:
    __slots__ = ("_count", "_heap", "now_s")

    def __init__(self, start_s: float = 0.0) -> None:
        self.now_s = start_s
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, time_s: float, action: Callable[..., None], *args: Any) -> None:
        """Schedule an action. A time in the past means now."""
        self._count += 1
        heapq.heappush(self._heap, (max(time_s, self.now_s), self._count, action, args))

    def after(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        self.at(self.now_s + delay_s, action, *args)

    @property
    def next_s(self) -> float:
        return self._heap[0][0] if self._heap else NEVER_S

    def advance(self, time_s: float) -> None:
        """Move the clock forward to an event that is not on the agenda, such as a timer."""
        assert time_s <= self.next_s, "time would pass over an action"
        self.now_s = max(self.now_s, time_s)

    def run_next(self) -> None:
        self.now_s, _, action, args = heapq.heappop(self._heap)
        action(*args)
