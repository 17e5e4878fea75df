"""The compute units of a device that a rank uses: the cores of an emulated device with several.

A rank that shares its device by units switches to a new set only at a boundary, between two decode
steps or two passes of a model, because all threads of a step must be done. The newest command id
wins. A rank that loses only units it has not started to use gives them up without waiting for a
boundary.

On a device of one unit, a rank never changes its threads or cores.
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

_MIN_INTERVAL_S = 0.001

OnInterval = Callable[[float, float, Sequence[int]], None]
"""Called in the device thread with (start, end, units) of an interval in which a rank used these
units."""


class ComputeShare:
    """The share of one rank.

    Call `request` in the event loop. Call `start_work`, `apply_request` and `end_work` in the
    device thread.
    """

    def __init__(
        self,
        device: int,
        num_units: int,
        set_threads: Callable[[int], None],
        on_interval: OnInterval | None = None,
    ) -> None:
        """Args: num_units: the units of the whole device.
        set_threads: sets the number of threads of the backend; called in the device thread.
        on_interval: receives each interval in which the rank used one set of units."""
        self._num_units = num_units
        self._set_threads = set_threads
        self._on_interval = on_interval
        # If the machine has too few cores for its devices, several units share one.
        cores = sorted(os.sched_getaffinity(0))
        self._cores = [cores[(device * num_units + unit) % len(cores)] for unit in range(num_units)]
        self._lock = threading.Lock()
        self._requested: tuple[int, ...] = tuple(range(num_units))
        self._newest = _NEVER
        self._used: tuple[int, ...] = ()
        self._occupied: set[int] = set(range(num_units))
        """Units that the rank's threads may run on, including those it is about to use."""
        self._since_s = 0.0
        """Start of the current interval of work on these units; 0: no work is running."""
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    @property
    def units(self) -> tuple[int, ...]:
        """The units in use; empty until the first boundary."""
        return self._used

    def request(self, units: Sequence[int], command: CommandId) -> None:
        """Set the units to use from the next boundary on; empty: the whole device.

        A command older than the newest has no effect.
        """
        with self._lock:
            if command >= self._newest:
                self._newest = command
                self._requested = tuple(units) or tuple(range(self._num_units))

    async def until_applied(self) -> None:
        """Wait until the rank uses none but the requested units.

        Usually this is at its next boundary. It is immediately if the rank loses only units that it
        has not started to use.
        """
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if self._occupied <= set(self._requested):
                return
            self._waiting.append((loop, waiting))
        await waiting

    def start_work(self) -> None:
        """Start some work. This is a boundary."""
        self.apply_request()
        self._since_s = time.time()

    def end_work(self) -> None:
        """Finish the work."""
        self._report_interval(time.time())
        self._since_s = 0.0

    def apply_request(self) -> None:
        """Switch to the requested units. This is a boundary, and nearly free if nothing has
        changed."""
        if not self._waiting and (self._num_units == 1 or self._used == self._requested):
            return
        with self._lock:
            requested, waiting, self._waiting = self._requested, self._waiting, []
            # Old and new units count as occupied until all threads have moved.
            self._occupied |= set(requested)
        if requested != self._used and self._num_units > 1:
            now_s = time.time()
            self._report_interval(now_s)
            cores = {self._cores[unit] for unit in requested}
            _pin(cores)
            self._set_threads(len(cores))
            self._used = requested
            if self._since_s:
                self._since_s = now_s
        with self._lock:
            self._occupied = set(requested)
        for loop, future in waiting:
            loop.call_soon_threadsafe(_complete, future)

    def _report_interval(self, now_s: float) -> None:
        is_long = self._since_s and now_s - self._since_s >= _MIN_INTERVAL_S
        if self._on_interval is not None and self._used and is_long:
            self._on_interval(self._since_s, now_s, self._used)


def whole_device() -> ComputeShare:
    """The share of a rank on a device of one unit."""
    return ComputeShare(0, 1, lambda count: None)


def _complete(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def _pin(cores: set[int]) -> None:
    """Restrict all threads of this process, and threads that they start, to these cores.

    With several cores, all other threads leave the first core to the calling thread. Threads
    previously confined to one core would otherwise stay there together for a while and wait for
    each other at the end of every step: the first pass on two cores took longer than a pass on one.
    """
    first = min(cores)
    other_cores = cores - {first} or cores
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(thread.name), other_cores)
    # Pinning to one core moves this thread at once; threads that it starts may use every core.
    os.sched_setaffinity(0, {first})
    os.sched_setaffinity(0, cores)
