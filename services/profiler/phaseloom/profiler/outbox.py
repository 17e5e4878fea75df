"""An outbox for traces. A separate task sends them, so adding a trace never waits.

Only a job's newest trace matters. If the server is slow or away, a newer trace replaces the waiting
one, so memory is bounded by the number of jobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from phaseloom.common.contract.ids import JobKey
from phaseloom.profiler.core.profile import Emission

_MAX_AT_ONCE = 32
"""Maximum number of concurrent requests. Sequential requests would each wait for the connection's
next read."""


class Outbox:
    def __init__(self, send: Callable[[Emission], Coroutine[Any, Any, None]]) -> None:
        """
        Args: send: sends one emission and retries until it succeeds. Sending twice is harmless.
        """
        self._send = send
        self._waiting: dict[JobKey, Emission] = {}
        self._has_emissions = asyncio.Event()

    def put(self, emission: Emission) -> None:
        # A replaced emission moves to the end of the queue, so jobs take turns.
        self._waiting.pop(emission.trace.job, None)
        self._waiting[emission.trace.job] = emission
        self._has_emissions.set()

    def drop(self, job: JobKey, msg_id: str | None = None) -> None:
        """Forget a job's waiting emission.

        Args: msg_id: forget it only if it has this id. None: forget any.
        """
        waiting = self._waiting.get(job)
        if waiting is not None and msg_id in (None, waiting.msg_id):
            del self._waiting[job]

    async def run(self) -> None:
        """Send emissions until cancelled."""
        while True:
            await self._has_emissions.wait()
            batch = [self._waiting.pop(job) for job in [*self._waiting][:_MAX_AT_ONCE]]
            if not self._waiting:
                self._has_emissions.clear()
            async with asyncio.TaskGroup() as group:
                for emission in batch:
                    group.create_task(self._send(emission))
