"""The shell's clock, so that a test can turn it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds since some fixed moment: the log's, as far as the two agree."""
        ...

    async def wait(self, event: asyncio.Event, until_s: float | None) -> None:
        """Returns once the event is set, or this clock has passed `until_s`; None: never."""
        ...


class WallClock:
    def now_s(self) -> float:
        return time.time()

    async def wait(self, event: asyncio.Event, until_s: float | None) -> None:
        delay_s = None if until_s is None else until_s - time.time()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), delay_s)
