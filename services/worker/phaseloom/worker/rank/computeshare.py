"""The compute units of its device that a rank uses: cores, of an emulated device of several.

A rank that shares its device in space is told which units it may use. It changes over at a
boundary, between two decode steps or two passes of a model, because the threads of a step must all
be done with it. Of several changes the one with the newest command id counts. Units that a rank
was given and has not taken yet it gives back without waiting for a boundary.

A rank on a device of one unit never touches its threads or its cores.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from phaseloom.common.contract.specs import CommandId

_NEVER = CommandId(-1, 0)

_LEAST_TOLD_S = 0.001

Told = Callable[[float, float, Sequence[int]], None]
"""Called in the device thread with (begin, end, units) of a time in which a rank used these
units."""


class ComputeShare:
    """The share of one rank: `ask` in the event loop; `begin`, `take` and `end` in its device
    thread."""

    def __init__(
        self, device: int, num_units: int, use: Callable[[int], None], told: Told | None = None
    ) -> None:
        """Args: num_units: the units of the whole device. use: sets the number of threads that the
        backend works with; called in the device thread. told: hears of shares that have ended."""
        self._num_units = num_units
        self._use = use
        self._told = told
        self._cores = _cores_of(device, num_units)
        self._lock = threading.Lock()
        self._wanted: tuple[int, ...] = tuple(range(num_units))
        self._newest = _NEVER
        self._used: tuple[int, ...] = ()
        self._held: set[int] = set(range(num_units))
        """The units that its threads may be on, those that it is about to take included."""
        self._since_s = 0.0
        """The time at which the rank began to use these units for its work; 0: no work runs."""
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    @property
    def units(self) -> tuple[int, ...]:
        """The units that the rank uses; empty: it has not begun."""
        return self._used

    def ask(self, units: Sequence[int], command: CommandId) -> None:
        """Set the units that the rank may use from its next boundary on; empty: all of the device.

        A command that is older than the newest has no effect.
        """
        with self._lock:
            if command >= self._newest:
                self._newest = command
                self._wanted = tuple(units) or tuple(range(self._num_units))

    async def taken(self) -> None:
        """Return once the rank uses no more than it was asked to: at its next boundary, or at once
        where it is to give up only what it has not taken yet."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if self._held <= set(self._wanted):
                return
            self._waiting.append((loop, waiting))
        await waiting

    def begin(self) -> None:
        """Begin some work, which is a boundary."""
        self.take()
        self._since_s = time.time()

    def end(self) -> None:
        """Note that the work has ended."""
        self._tell(time.time())
        self._since_s = 0.0

    def take(self) -> None:
        """Use the units that were asked for last. A boundary; costs next to nothing where nothing
        has changed."""
        if not self._waiting and (self._num_units == 1 or self._used == self._wanted):
            return
        with self._lock:
            wanted, waiting, self._waiting = self._wanted, self._waiting, []
            self._held |= set(wanted)
        if wanted != self._used and self._num_units > 1:
            now_s = time.time()
            self._tell(now_s)
            cores = {self._cores[unit] for unit in wanted}
            _pin(cores)
            self._use(len(cores))
            self._used = wanted
            if self._since_s:
                self._since_s = now_s
        with self._lock:
            self._held = set(wanted)
        for loop, each in waiting:
            loop.call_soon_threadsafe(_set, each)

    def _tell(self, now_s: float) -> None:
        is_long = self._since_s and now_s - self._since_s >= _LEAST_TOLD_S
        if self._told is not None and self._used and is_long:
            self._told(self._since_s, now_s, self._used)


def whole_device() -> ComputeShare:
    """The share of a rank on a device of one unit."""
    return ComputeShare(0, 1, lambda count: None)


def _set(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def _cores_of(device: int, num_units: int) -> list[int]:
    """The core of each unit of a device, among those that this process may use. A machine with
    fewer cores than its devices have together gives some of them to several units."""
    cores = sorted(os.sched_getaffinity(0))
    return [cores[(device * num_units + unit) % len(cores)] for unit in range(num_units)]


def _pin(cores: set[int]) -> None:
    """Keep all threads of this process, and those that they start, on these cores.

    Where there are several, all but this one leave the first core to it. Threads that were kept on
    one core before would else go on there together for a while, each waiting for the other at the
    end of every step: the first pass on two cores took longer than one on a single core.
    """
    first = min(cores)
    others = cores - {first} or cores
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread.name), others)
    # It moves over now; what it starts may have any of the cores.
    os.sched_setaffinity(0, {first})
    os.sched_setaffinity(0, cores)
