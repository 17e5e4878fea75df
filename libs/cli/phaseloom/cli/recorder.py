"""Record the decision log of a run, live, into `events.jsonl`: one entry a line.

    {"sequence": 7, "time_unix_s": 1700000000.123, "event": {"type": "queued_operation", ...}}

The file is the run as the scheduler saw it, events that one append brought on one line; everything
in a run's summary and pictures is computed from it. A line is written whole, so a file cut off by a
crash is readable up to its last newline.
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
from phaseloom.common.transport.bus import Bus, LogEntry


class Recorded(msgspec.Struct, frozen=True):
    """An entry of the decision log; its time is the server's, in Unix seconds."""

    sequence: int
    time_unix_s: float
    event: Event


class Recorder:
    """Follows the log from its first entry.

    Args: path: of the file, which is written anew.
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
        """Record until cancelled."""
        async with aclosing(self._bus.read_entries()) as entries:
            await self._record(entries)
        raise InternalError("the decision log's subscription ended")

    async def _record(self, entries: AsyncIterator[LogEntry]) -> None:
        async with aiofiles.open(self._path, "wb", buffering=0) as file:
            async for entry in entries:
                recorded = Recorded(entry.sequence, entry.time_s, entry.event)
                await file.write(msgspec.json.encode(recorded) + b"\n")
                if self._watch:
                    for one in _parts(recorded):
                        self._watch(one)
                async with self._advanced:
                    self._sequence = entry.sequence
                    self._advanced.notify_all()

    async def drained(self) -> None:
        """Returns when everything that is in the log now is in the file."""
        end = await self._bus.log_end()
        await self.until(lambda: self._sequence >= end)

    async def until(self, seen: Callable[[], bool]) -> None:
        """Returns once the predicate holds; asked again after each entry was watched."""
        async with self._advanced:
            await self._advanced.wait_for(seen)


def _parts(entry: Recorded) -> Iterator[Recorded]:
    for event in parts(entry.event):
        yield Recorded(entry.sequence, entry.time_unix_s, event)


def read_events(path: Path) -> list[Recorded]:
    """The events of an `events.jsonl`, in log order; several of one entry have its sequence.

    Raises: CallerError: a line is no recorded entry; names the line.
    """
    entries: list[Recorded] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                entries += _parts(_decoder.decode(line))
            except msgspec.DecodeError as error:
                raise CallerError(
                    f"{path}:{number} is no recorded event: {error}",
                    field=str(path),
                    remedy="use the events.jsonl of a run of this version of phaseloom",
                ) from None
    return entries


_decoder = msgspec.json.Decoder(Recorded)
