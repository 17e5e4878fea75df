"""Traces on their way out, sent by a task of their own, so that nobody waits to put one in.

Only a job's newest trace counts: one that still waits, because the server is slow or away, is
replaced by the next. So memory is bounded by the number of jobs. Sending ends only when cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from phaseloom.common.contract.ids import JobKey
from phaseloom.profiler.core.profile import Emission

_MAX_AT_ONCE = 32
"""The most requests under way at once. One at a time, each would wait for the connection's next
read."""


class Outbox:
    def __init__(self, send: Callable[[Emission], Coroutine[Any, Any, None]]) -> None:
        """An outbox that is empty.

        Args: send: sends one emission, and tries until that is done; sending twice is harmless.
        """
        self._send = send
        self._waiting: dict[JobKey, Emission] = {}
        self._filled = asyncio.Event()

    def put(self, emission: Emission) -> None:
        # An emission goes behind the others, also where it replaces one: jobs take turns.
        self._waiting.pop(emission.trace.job, None)
        self._waiting[emission.trace.job] = emission
        self._filled.set()

    def drop(self, job: JobKey, msg_id: str | None = None) -> None:
        """Forget a job's emission that still waits.

        Args: msg_id: forget the emission only where it has this id; None: forget any.
        """
        waiting = self._waiting.get(job)
        if waiting is not None and msg_id in (None, waiting.msg_id):
            del self._waiting[job]

    async def run(self) -> None:
        """Send for ever."""
        while True:
            await self._filled.wait()
            batch = [self._waiting.pop(job) for job in [*self._waiting][:_MAX_AT_ONCE]]
            if not self._waiting:
                self._filled.clear()
            async with asyncio.TaskGroup() as group:
                for emission in batch:
                    group.create_task(self._send(emission))
