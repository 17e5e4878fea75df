"""Counts and logs callbacks that use more than 50 ms of the event loop thread's processor time.

A timer of processor time (SIGPROF) interrupts the main thread after every 10 ms of work, and the
handler sees which callback runs. If the same one runs at several interruptions and the loop has run
nothing else between them, the time between them is the callback's. A C call, such as a decoder,
delays the handler, and then the time since the timer expired is the callback's.

A callback of 50 to 70 ms may go unnoticed, but a shorter one is never counted, however busy the
machine or the loop is. No callback is wrapped, and it works with uvloop, whose callbacks run in C.
Cost: 0.05 % of a processor while the loop is idle, and 0.3 % while it works all the time.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from phaseloom.common.observability import metrics

log = logging.getLogger(__name__)

LIMIT_S = 0.05
_INTERVAL_S = 0.01
_TICK_S = 0.01
"""How late the kernel may notice that the timer has expired."""
_TURN_S = 0.2
"""How often the loop runs something of ours. At a low load the kernel rarely notices the timer, and
many short callbacks run between two interruptions."""
_STACK_LINES = 8


@contextmanager
def watching(service: str) -> Iterator[None]:
    """Watch the running event loop of the main thread within the block."""
    watchdog = _Watchdog(service)
    previous = signal.signal(signal.SIGPROF, watchdog.interrupt)
    signal.siginterrupt(signal.SIGPROF, False)
    signal.setitimer(signal.ITIMER_PROF, _INTERVAL_S, _INTERVAL_S)
    watchdog.turn_regularly()
    try:
        yield
    finally:
        watchdog.stop()
        signal.setitimer(signal.ITIMER_PROF, 0)
        # A signal that is already on its way would end the process by default.
        signal.signal(signal.SIGPROF, previous if callable(previous) else signal.SIG_IGN)


class _Watchdog:
    def __init__(self, service: str) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._callback: FrameType | None = None
        """The frame of the callback that ran at the last interruption."""
        self._start_s = 0.0
        """The thread's processor time at which that callback was running for certain."""
        self._last_s = time.thread_time()
        self._is_counted = False

        self._turn_s = self._last_s
        """The thread's processor time at which the loop last ran a function of this object."""
        self._timer: asyncio.TimerHandle | None = None

    def turn_regularly(self) -> None:
        self._turn()
        self._timer = self._loop.call_later(_TURN_S, self.turn_regularly)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        # This may run between any two bytecodes, so it leaves logging to the loop.
        now_s = time.thread_time()
        callback = _outermost(frame)
        if callback is None or callback is not self._callback:
            expired_s = self._last_s + _INTERVAL_S + _TICK_S
            self._start_s = min(now_s, max(expired_s, self._turn_s))
            self._callback, self._is_counted = callback, False
            if callback is not None:
                self._loop.call_soon_threadsafe(self._turn)
        self._last_s = now_s
        if callback is not None and not self._is_counted and now_s - self._start_s >= LIMIT_S:
            self._is_counted = True
            stack = traceback.extract_stack(frame, _STACK_LINES)
            self._loop.call_soon_threadsafe(self._report, now_s - self._start_s, stack)

    def _turn(self) -> None:
        # Whatever runs next is another callback, even if it is a step of the same task.
        self._callback, self._turn_s = None, time.thread_time()

    def _report(self, seconds: float, stack: traceback.StackSummary) -> None:
        metrics.count(metrics.LOOP_STALLS, service=self._service)
        lines = " < ".join(f"{f.name} ({f.filename}:{f.lineno})" for f in reversed(stack))
        log.warning("a callback used %.0f ms or more of the event loop: %s", seconds * 1e3, lines)


def _outermost(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the callback that the loop has called, or None if there is none."""
    inner = None
    while frame is not None and frame.f_code not in _RUNNERS:
        inner, frame = frame, frame.f_back
    return inner


_RUNNERS = {asyncio.Runner.run.__code__}
