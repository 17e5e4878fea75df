"""Records the decision log of a run live into `events.jsonl`, one entry per line.

    {"sequence": 7, "time_unix_s": 1700000000.123, "event": {"type": "queued_operation", ...}}

The file shows the run as the scheduler saw it. Summaries and pictures of a run are computed from
it. Events that were appended together share a line. Each line is written immediately, so a file cut
off by a crash is readable up to its last newline.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import aiofiles
import msgspec

from phaseloom.common.contract.errors import CallerError, InternalError
from phaseloom.common.contract.events import Event, parts
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.decisionlog import LogEntry


class Recorded(msgspec.Struct, frozen=True):
    """An entry of the decision log."""

    sequence: int
    time_unix_s: float
    """Time at which the NATS server stored the entry, by the server's clock."""
    event: Event


class Recorder:
    """Writes every entry of the decision log to a file.

    Args: path: the file; it is overwritten.
          watch: called with each event after it is written; must not block.
    """

    def __init__(
        self, bus: Bus, path: Path, watch: Callable[[Recorded], None] | None = None
    ) -> None:
        self._bus = bus
        self._path = path
        self._watch = watch
        self._sequence = 0
        self._advanced = asyncio.Condition()

    async def run(self) -> None:
        """Record until the task is cancelled."""
        async with aclosing(self._bus.log.read_entries()) as entries:
            await self._record(entries)
        raise InternalError("the decision log's subscription ended")

    async def _record(self, entries: AsyncIterator[LogEntry]) -> None:
        async with aiofiles.open(self._path, "wb", buffering=0) as file:
            async for entry in entries:
                recorded = Recorded(entry.sequence, entry.time_s, entry.event)
                await file.write(msgspec.json.encode(recorded) + b"\n")
                if self._watch:
                    for part in _parts(recorded):
                        self._watch(part)
                async with self._advanced:
                    self._sequence = entry.sequence
                    self._advanced.notify_all()

    async def drained(self) -> None:
        """Wait until every entry that is in the log now has been written to the file."""
        end = await self._bus.log.end()
        await self.until(lambda: self._sequence >= end)

    async def until(self, seen: Callable[[], bool]) -> None:
        """Wait until the predicate is true. It is evaluated after each entry."""
        async with self._advanced:
            await self._advanced.wait_for(seen)


def _parts(entry: Recorded) -> Iterator[Recorded]:
    for event in parts(entry.event):
        yield Recorded(entry.sequence, entry.time_unix_s, event)


def read_events(path: Path) -> list[Recorded]:
    """Return the events of an `events.jsonl`, in the order of the log.

    All events of an entry have the entry's sequence number.

    Raises: CallerError: a line is not a recorded entry; the message has its number.
    """
    return [part for entry in read_entries(path) for part in _parts(entry)]


def read_entries(path: Path) -> list[Recorded]:
    """Return the entries of an `events.jsonl`. An entry may contain several events.

    Raises: CallerError: a line is not a recorded entry; the message has its number.
    """
    entries: list[Recorded] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                entries.append(_decoder.decode(line))
            except msgspec.DecodeError as error:
                raise CallerError(
                    f"{path}:{number} is not a recorded event: {error}",
                    field=str(path),
                    remedy="use the events.jsonl of a run with this version of phaseloom",
                ) from None
    return entries


_decoder = msgspec.json.Decoder(Recorded)
