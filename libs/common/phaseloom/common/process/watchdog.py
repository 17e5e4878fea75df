"""Counts and logs callbacks that use more than 50 ms of the event loop thread's processor time.

A timer of processor time (SIGPROF) interrupts the main thread after every 10 ms of work, and while
the loop works, so does a timer of real time (SIGALRM). The handler sees which callback runs. If the
same one runs at several interruptions and the loop has run nothing else between them, the time
between them is the callback's. A C call, such as a decoder, delays the handler, and then the time
since the timer expired is the callback's.

The kernel samples processor time, so SIGPROF may be late on a busy machine, and the time by which
it may be late is not counted. SIGALRM is punctual, but would cost an idle loop 0.6 % of a
processor, so it runs only until the loop is idle.

A callback of 50 to 70 ms may go unnoticed, and one of up to 200 ms if the loop was idle before it.
A shorter one is never counted, however busy the machine or the loop is. No callback is wrapped, and
it works with uvloop, whose callbacks run in C. Cost: 0.05 % of a processor while the loop is idle,
and 0.5 % while it works all the time.
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
_LATE_S = {False: 0.1, True: 0.01}
"""How much processor time the loop may use between the end of an interval and the signal: without
the timer of real time, and with it."""
_NUM_IDLE = 3
"""After so many interruptions without a callback the loop counts as idle. A single one may be
between two callbacks."""
_TURN_S = 0.2
"""How often the loop runs something of ours. At a low load the kernel rarely notices the timer, and
many short callbacks run between two interruptions."""
_STACK_LINES = 8


@contextmanager
def watching(service: str) -> Iterator[None]:
    """Watch the running event loop of the main thread within the block."""
    watchdog = _Watchdog(service)
    numbers = (signal.SIGPROF, signal.SIGALRM)
    previous = {number: signal.signal(number, watchdog.interrupt) for number in numbers}
    for number in numbers:
        signal.siginterrupt(number, False)
    alarm = signal.setitimer(signal.ITIMER_REAL, 0)
    signal.setitimer(signal.ITIMER_PROF, _INTERVAL_S, _INTERVAL_S)
    watchdog.turn_regularly()
    try:
        yield
    finally:
        watchdog.stop()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous.items():
            # A signal that is already on its way would end the process by default.
            signal.signal(number, handler if callable(handler) else signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, *alarm)


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
        self._is_interrupted = False
        self._is_punctual = False
        """Whether the timer of real time runs."""
        self._num_idle = 0
        """How many interruptions in a row have seen no callback."""

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
        # The other timer may interrupt this, too.
        if self._is_interrupted:
            return
        self._is_interrupted = True
        try:
            self._look_at(frame)
        finally:
            self._is_interrupted = False

    def _look_at(self, frame: FrameType | None) -> None:
        # This may run between any two bytecodes, so it leaves logging to the loop.
        now_s = time.thread_time()
        callback = _outermost(frame)
        if callback is None or callback is not self._callback:
            expired_s = self._last_s + _INTERVAL_S + _LATE_S[self._is_punctual]
            self._start_s = min(now_s, max(expired_s, self._turn_s))
            self._callback, self._is_counted = callback, False
            if callback is not None:
                self._loop.call_soon_threadsafe(self._turn)
        self._last_s = now_s
        self._be_punctual_while_busy(callback)
        if callback is not None and not self._is_counted and now_s - self._start_s >= LIMIT_S:
            self._is_counted = True
            stack = traceback.extract_stack(frame, _STACK_LINES)
            self._loop.call_soon_threadsafe(self._report, now_s - self._start_s, stack)

    def _be_punctual_while_busy(self, callback: FrameType | None) -> None:
        self._num_idle = 0 if callback is not None else self._num_idle + 1
        is_busy = self._num_idle < _NUM_IDLE
        if is_busy is not self._is_punctual:
            self._is_punctual = is_busy
            interval_s = _INTERVAL_S if is_busy else 0
            signal.setitimer(signal.ITIMER_REAL, interval_s, interval_s)

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
