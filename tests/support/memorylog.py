"""A decision log and a sink in memory: the shell's seams without a server.

What a test of the shell, or a dry run, uses instead of NATS. The clock is the caller's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from opentelemetry.context import Context

from phaseloom.common.contract.events import Event
from phaseloom.common.transport.decisionlog import LogEntry
from phaseloom.scheduler.core.state.outputs import Output


class MemoryLog:
    def __init__(self, clock: Callable[[], float]) -> None:
        self.entries: list[LogEntry] = []
        self._clock = clock
        self._ids: set[str] = set()
        self._grown = asyncio.Event()

    async def append(self, event: Event, *, msg_id: str | None = None) -> int:
        if msg_id is None or msg_id not in self._ids:
            if msg_id is not None:
                self._ids.add(msg_id)
            self.entries.append(LogEntry(len(self.entries) + 1, self._clock(), event, {}))
            self._grown.set()
        return len(self.entries)

    async def read_entries(self, start_sequence: int = 1) -> AsyncIterator[LogEntry]:
        index = start_sequence - 1
        while True:
            while index < len(self.entries):
                yield self.entries[index]
                index += 1
            self._grown.clear()
            await self._grown.wait()

    async def end(self) -> int:
        return len(self.entries)


class MemorySink:
    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.snapshots: list[tuple[int, bytes]] = []

    async def perform(self, output: Output, context: Context | None) -> None:
        self.outputs.append(output)

    async def save(self, sequence: int, snapshot: bytes) -> None:
        self.snapshots.append((sequence, snapshot))
