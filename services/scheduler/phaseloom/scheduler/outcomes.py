"""Writes the outcomes of operations that never ran, behind the fold and tenant by tenant.

One log entry may end thousands of operations of a tenant. No other entry waits until their outcomes
are stored. The outcomes of one entry come before its deletions and its answer, and before the
outcomes and deletions of the tenant's later entries.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import NamedTuple

from phaseloom.scheduler.core.state.outputs import Answer, DeleteOperations, Output, WriteCompletion

WRITES_AT_ONCE = 32
"""Maximum outcomes of one tenant being sent to the server at once."""

Perform = Callable[[Output], Awaitable[None]]


class _Batch(NamedTuple):
    """The outcomes of one log entry, and the outputs that wait for them."""

    writes: list[WriteCompletion]
    final: list[Output]
    stored: asyncio.Future[None]


class OutcomeWriter:
    """Args: perform: performs an output; returns once its effect is stored."""

    def __init__(self, perform: Perform, tasks: asyncio.TaskGroup) -> None:
        self._perform = perform
        self._tasks = tasks
        self._batches: dict[str, deque[_Batch]] = {}
        """Tenant → its batches that are not stored yet, oldest first."""

    def add(self, outputs: list[Output]) -> list[Output]:
        """Handle the outcomes among the outputs of a log entry, and the outputs that wait for them.

        Returns: the other outputs, in order.
        """
        writes: dict[str, list[WriteCompletion]] = {}
        for output in outputs:
            if isinstance(output, WriteCompletion):
                writes.setdefault(output.key.tenant, []).append(output)
        final: dict[str, list[Output]] = {}
        others: list[Output] = []
        for output in outputs:
            tenant = self._waits_for(output, writes)
            if tenant:
                final.setdefault(tenant, []).append(output)
            elif not isinstance(output, WriteCompletion):
                others.append(output)
        for tenant in {**writes, **final}:
            self._add(tenant, writes.get(tenant, []), final.get(tenant, []))
        return others

    async def stored(self) -> None:
        """Wait until everything added before this call is stored."""
        last = [batches[-1].stored for batches in self._batches.values()]
        if last:
            await asyncio.wait(last)

    def _waits_for(self, output: Output, writes: dict[str, list[WriteCompletion]]) -> str:
        """Return the tenant whose outcomes an output waits for; empty: it waits for none."""
        match output:
            case DeleteOperations([key, *_]) if key.tenant in writes or key.tenant in self._batches:
                return key.tenant
            case Answer():
                return next(iter(writes), "")
        return ""

    def _add(self, tenant: str, writes: list[WriteCompletion], final: list[Output]) -> None:
        batch = _Batch(writes, final, asyncio.get_running_loop().create_future())
        batches = self._batches.get(tenant)
        if batches is not None:
            batches.append(batch)
            return
        batches = self._batches[tenant] = deque([batch])
        self._tasks.create_task(self._store(tenant, batches))

    async def _store(self, tenant: str, batches: deque[_Batch]) -> None:
        while batches:
            batch = batches[0]
            remaining = iter(batch.writes)

            async def write(remaining: Iterator[WriteCompletion] = remaining) -> None:
                for output in remaining:
                    await self._perform(output)

            async with asyncio.TaskGroup() as writing:
                for _ in range(min(WRITES_AT_ONCE, len(batch.writes))):
                    writing.create_task(write())
            for output in batch.final:
                await self._perform(output)
            batches.popleft()
            batch.stored.set_result(None)
        del self._batches[tenant]
