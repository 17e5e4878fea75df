"""Runs of a comparison take turns, round by round, so that a change of the machine's load affects
all of them. The processor time of their rounds is measured next to the wall time."""

from __future__ import annotations

import asyncio
import os
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

import psutil

from phaseloom.common.observability.intervals import Interval
from phaseloom.demo.progress import Progress
from phaseloom.demo.report import RunLog, Usage

LAST_BARRIER = "end"


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _usage_now() -> Usage:
    """Return the time since the machine's start, and what processes have used of it."""
    own_s = 0.0
    this = psutil.Process()
    for process in [this, *this.children(recursive=True)]:
        try:
            # Children that have ended count with their parent.
            own_s += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    times = psutil.cpu_times()
    busy_s = times.user + times.nice + times.system + times.irq + times.softirq
    return Usage(time.monotonic(), own_s, busy_s - own_s)


class Turn:
    """One run, which holds the turn while it is entered. Args: lock: the turn, or None if the run
    never waits for another one."""

    def __init__(self, lock: asyncio.Lock | None, progress: Progress) -> None:
        self._lock, self._progress = lock, progress
        self._started: Usage | None = None
        self.pauses: list[Interval] = []
        """Unix times between which the run waited for its turn."""
        self.usage = Usage()

    async def __aenter__(self) -> Turn:
        if self._lock is not None:
            await self._lock.acquire()
        self._progress.__enter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._progress.__exit__()
        if self._lock is not None and self._lock.locked():
            self._lock.release()

    async def at_barrier(self, name: str) -> None:
        """End a round. Before the next one, all other runs have their turn."""
        if self._started is not None:
            self.usage += _usage_now() - self._started
        if name == LAST_BARRIER:
            return
        if self._lock is not None:
            self._progress.__exit__()
            since_s = time.time()
            self._lock.release()
            await self._lock.acquire()
            self.pauses.append((since_s, time.time()))
            self._progress.__enter__()
        self._started = _usage_now()


def without_pauses(log: RunLog, pauses: Sequence[Interval]) -> RunLog:
    """Return the log as told by a clock that stands still during the pauses."""
    clock = Clock(pauses)
    return replace(
        log,
        executions=[
            replace(
                e,
                queued_s=clock.at(e.queued_s),
                ready_s=clock.at(e.ready_s),
                start_s=clock.at(e.start_s),
                end_s=clock.at(e.end_s),
            )
            for e in log.executions
        ],
        switches=[replace(s, start_s=clock.at(s.start_s)) for s in log.switches],
    )


class Clock:
    """A clock that stands still during pauses, which are in order and do not overlap."""

    def __init__(self, pauses: Sequence[Interval]) -> None:
        self._pauses = pauses
        self._starts = [start for start, _ in pauses]

    def at(self, time_s: float) -> float:
        begun = self._pauses[: bisect_right(self._starts, time_s)]
        return time_s - sum(min(end, time_s) - start for start, end in begun)
