"""What is to be sent of each job, sent by a task of its own: who puts it in never waits.

Of a job only the newest counts: what waits while the server is slow, or away, is replaced by what
comes after it. So memory is bounded by the number of jobs. Sending ends in a cancel only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from phaseloom.common.contract.ids import JobKey
from phaseloom.profiler.core.profile import Emission

_MAX_AT_ONCE = 32
"""Requests on their way: one at a time would each wait for the connection's next gulp."""


class Outbox:
    def __init__(self, send: Callable[[Emission], Coroutine[Any, Any, None]]) -> None:
        """Args: send: tries until it is done; harmless twice."""
        self._send = send
        self._waiting: dict[JobKey, Emission] = {}
        self._filled = asyncio.Event()

    def put(self, emission: Emission) -> None:
        # Behind the others, also where it replaces one: jobs take turns.
        self._waiting.pop(emission.trace.job, None)
        self._waiting[emission.trace.job] = emission
        self._filled.set()

    def drop(self, job: JobKey, msg_id: str | None = None) -> None:
        """Forget what waits of a job.

        Args: msg_id: only what has this one.
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
