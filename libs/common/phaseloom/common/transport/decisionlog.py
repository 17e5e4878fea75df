"""The decision log: one stream of events, read in order, which must never lose or change an entry.

An ordered consumer vanishes when the server restarts. The client notices this only after two missed
heartbeats, and may recreate the consumer before its last position. A server that has lost the end
of the log assigns the same numbers again. Readers know each entry's number, so they skip repeated
entries and report lost ones (`DATA_LOSS`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec
import nats
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js import api

from phaseloom.common.contract import streams
from phaseloom.common.contract.codec import decode
from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.contract.events import Event, QueuedOperation, parts
from phaseloom.common.transport.link import PAUSE_S, Link, ordered, position_of
from phaseloom.common.transport.stored import StoredMessages

log = logging.getLogger(__name__)

_BATCH = 256
_MICROSECOND = 1e-6
_SAME_TIME_S = 1e-4
"""Tolerance for equal time stamps, which lose precision in floats and in Python's microseconds."""
_LOG_SUBJECT = f"{streams.PREFIX}.sched.>"
_QUEUED_SUBJECT = streams.LOG_SUBJECTS[QueuedOperation]

_json = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One entry of the decision log."""

    sequence: int
    time_s: float
    """When the log stored the entry (Unix seconds). This is the scheduler's clock."""
    event: Event
    headers: dict[str, str]

    def split(self) -> Iterator[LogEntry]:
        """Yield one entry per event, since one append may contain several events."""
        for event in parts(self.event):
            yield LogEntry(self.sequence, self.time_s, event, self.headers)


@dataclass(frozen=True, slots=True)
class LogExtent:
    """The range of entries in the decision log."""

    first: int
    """Sequence of the oldest entry; if the log is empty, of its next one."""
    last: int
    """Sequence of the newest entry, even if it was truncated; 0: there was none."""
    num_entries: int

    def check_whole(self) -> None:
        """Check that no entry is missing.

        Raises: ResourceError: DATA_LOSS: entries between the first and the last one are missing.
        """
        num_lost = self.last - self.first + 1 - self.num_entries
        if num_lost > 0:
            raise log_entries_missing(self.first, self.last, num_lost)


def log_end_lost(last_known: int, last_stored: int) -> ResourceError:
    """The error for a decision log that has lost its newest entries.

    Args:   last_known: the newest sequence that was stored.
            last_stored: the newest sequence now.
    """
    return ResourceError(
        f"the decision log ends at {last_stored}, but had entries up to {last_known}: "
        f"{last_known - last_stored} entries are lost, with the operations, outcomes and seals "
        "that they recorded",
        code=Code.DATA_LOSS,
        remedy="put the right store back, restore a backup (`phaseloom restore`), or continue "
        "without the lost entries (`phaseloom up --resume --accept-loss`)",
        details={"first_lost": last_stored + 1, "last_lost": last_known},
    )


def log_entries_missing(first: int, last: int, num_lost: int = 0) -> ResourceError:
    """The error for a decision log that lacks entries before its end.

    Args:   first, last: the range with lost entries, including both.
            num_lost: number of lost entries in the range; 0: all.
    """
    num_lost = num_lost or last - first + 1
    return ResourceError(
        f"the decision log has a hole: {num_lost} entries from {first} to {last} are lost or "
        "damaged, with the operations, outcomes and seals that they recorded",
        code=Code.DATA_LOSS,
        remedy="put the right store back, or restore a backup (`phaseloom restore`)",
        details={"first_lost": first, "last_lost": last},
    )


class DecisionLog:
    """The decision log as read and written through one connection."""

    def __init__(self, link: Link, stored: StoredMessages) -> None:
        self._link = link
        self._stored = stored
        self.mark = 0
        """The newest sequence that this connection has written or read."""

    async def append(
        self, event: Event, *, msg_id: str | None = None, headers: dict[str, str] | None = None
    ) -> int:
        """Append an event to the decision log. Returns: its sequence.

        Raises: ResourceError: see `publish`. DATA_LOSS: the log had already assigned this sequence.
        """
        earlier_mark = self.mark
        answer = await self._link.store(streams.log_subject(event), event, msg_id, headers)
        if answer.seq <= earlier_mark and not answer.duplicate:
            raise log_end_lost(earlier_mark, answer.seq - 1)
        self.mark = max(self.mark, answer.seq)
        return answer.seq

    async def read(self, start_sequence: int = 1) -> AsyncGenerator[LogEntry, None]:
        """Yield every event of the decision log from `start_sequence` on, in order, forever.

        Events from one append are yielded one by one with the same sequence. A reader that stops at
        an event and resumes later must use `read_entries`, so that it does not miss the others.
        """
        async with aclosing(self.read_entries(start_sequence)) as entries:
            async for entry in entries:
                for event_entry in entry.split():
                    yield event_entry

    async def read_entries(self, start_sequence: int = 1) -> AsyncGenerator[LogEntry, None]:
        """Yield every entry of the decision log from `start_sequence` on, in order, forever.

        Each entry contains all events of one append.

        Raises: ResourceError: DATA_LOSS: the log has lost entries that were already read. This is
                detected at the first entry after a reconnect.
        """
        config = api.ConsumerConfig(
            deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=max(1, start_sequence),
        )
        next_sequence, newest_s = start_sequence, None
        connections = self._link.client.stats["reconnects"]
        async with aclosing(ordered(self._link, streams.SCHED, _LOG_SUBJECT, config)) as messages:
            async for message in messages:
                sequence, time_s = position_of(message)
                if sequence < next_sequence:
                    continue  # a recreated consumer repeats entries
                if self._link.client.stats["reconnects"] != connections:
                    connections = self._link.client.stats["reconnects"]
                    if newest_s is not None:
                        await self._check_still_there(next_sequence - 1, newest_s)
                next_sequence, newest_s = sequence + 1, time_s
                self.mark = max(self.mark, sequence)
                event = decode(message.data, Event)
                yield LogEntry(sequence, time_s, event, message.headers or {})

    async def _check_still_there(self, sequence: int, time_s: float) -> None:
        """Check that the log still has this entry, and not a later one with the same number.

        A server that has lost the end of the log assigns its numbers again. Without this check, a
        reader that was further ahead would receive nothing until the log is as long again, and then
        continue as if nothing had happened.

        Raises: ResourceError: DATA_LOSS: the log does not have it.
        """
        sure_at_s = time.monotonic() + self._link.lag_s
        while True:
            try:
                end = await self._end_without(sequence, time_s)
            except (nats.errors.Error, NatsTimeoutError) as error:
                if self._link.client.is_closed:
                    raise
                log.debug("cannot compare the log with its earlier end yet: %r", error)
            else:
                if end is None:
                    return
                # A lagging server may lack the entry for a while; believe it only after that.
                if time.monotonic() >= sure_at_s:
                    raise log_end_lost(sequence, end)
            await asyncio.sleep(PAUSE_S)

    async def _end_without(self, sequence: int, time_s: float) -> int | None:
        """Return where the log ended when it lost this entry; None: the entry exists or was
        truncated.

        Raises: nats.errors.Error: the server does not answer, or is not ready.
        """
        message = await self._stored.request_from_leader(streams.SCHED, {"seq": sequence})
        if message is not None:
            stored_s = datetime.fromisoformat(message.time).timestamp()
            return None if abs(stored_s - time_s) < _SAME_TIME_S else sequence - 1
        extent = await self.extent()
        return extent.last if sequence >= extent.first else None

    async def queued_since(self, time_s: float) -> AsyncGenerator[QueuedOperation, None]:
        """Yield the operations that the decision log stored since a time (Unix seconds), in order.

        Raises: nats.errors.Error: the server does not answer, or is not ready.
        """
        # Subtract the rounding error, so that a message stored at exactly `time_s` is included.
        since = (
            datetime.fromtimestamp(time_s - _MICROSECOND, UTC).isoformat().replace("+00:00", "Z")
        )
        start: dict[str, object] = {"start_time": since}
        while True:
            request = {**start, "batch": _BATCH, "next_by_subj": _QUEUED_SUBJECT}
            *messages, end = await self._link.client.request_many(
                f"$JS.API.DIRECT.GET.{streams.SCHED}",
                _json.encode(request),
                timeout=self._link.timeout_s,
            )
            for message in messages:
                for event in parts(decode(message.data, Event)):
                    if isinstance(event, QueuedOperation):
                        yield event
            if not messages or (end.headers or {}).get("Nats-Num-Pending", "0") == "0":
                return
            last = (messages[-1].headers or {})["Nats-Sequence"]
            start = {"seq": int(last) + 1}

    async def end(self) -> int:
        """Return the sequence of the newest entry; 0: the log is empty."""
        return (await self._link.js.stream_info(streams.SCHED)).state.last_seq

    async def extent(self) -> LogExtent:
        """Return the range of entries in the decision log."""
        state = (await self._link.js.stream_info(streams.SCHED)).state
        return LogExtent(max(1, state.first_seq), state.last_seq, state.messages)

    async def check(self) -> LogExtent:
        """Read the whole decision log, because the server detects damaged entries only when it
        reads them.

        Raises: ResourceError: DATA_LOSS: an entry is missing or damaged.
        """
        sure_at_s = time.monotonic() + self._link.lag_s
        while True:
            try:
                return await self._check_once()
            except ResourceError:
                if time.monotonic() >= sure_at_s:
                    raise
            await asyncio.sleep(PAUSE_S)

    async def _check_once(self) -> LogExtent:
        extent = await self.extent()
        extent.check_whole()
        next_sequence = extent.first
        while next_sequence <= extent.last:
            *messages, _ = await self._link.client.request_many(
                f"$JS.API.DIRECT.GET.{streams.SCHED}",
                _json.encode({"seq": next_sequence, "batch": _BATCH, "next_by_subj": _LOG_SUBJECT}),
                timeout=self._link.timeout_s,
            )
            for message in messages:
                sequence = int((message.headers or {})["Nats-Sequence"])
                if sequence != next_sequence:
                    raise log_entries_missing(next_sequence, sequence - 1)
                next_sequence += 1
            if not messages:
                raise log_entries_missing(next_sequence, extent.last)
        return extent

    async def truncate(self, sequence: int) -> None:
        """Drop the decision log's entries below `sequence`."""
        await self._link.js.purge_stream(streams.SCHED, seq=sequence)
