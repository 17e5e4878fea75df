"""The mesh on NATS: the streams table, the decision log, stored messages, KV.

Services use this and never nats-py's JetStream API directly, so that its traps are handled once:

- `js.publish` writes into the headers dict that it is given.
- A message refused by one-message-per-subject comes as an API error, whose code a full stream
  shares.
- Memory streams vanish when the server restarts, so the table is provisioned again on every
  reconnect.
- An ordered consumer vanishes too. It is noticed missing only after two heartbeats, and may be made
  again from before the place where it stood.
- Where several servers keep each stream, whoever does not lead it may lag behind. What is read is
  asked of the leader, except in the log, whose readers know each entry's number. A leader that was
  cut off may take itself for one for `LAG_S` more: what must be there is looked for that long, and
  what was stored since is never replaced, as every compare-and-set needs most of the servers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec
import nats
from nats.aio.msg import Msg
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js import JetStreamContext, api
from nats.js.errors import APIError, NotFoundError, ServerError, ServiceUnavailableError

from phaseloom.common.contract import streams
from phaseloom.common.contract.api import JobReport
from phaseloom.common.contract.codec import CONTENT_TYPE, MSGPACK, decode, encode
from phaseloom.common.contract.errors import Code, ErrorInfo, ResourceError
from phaseloom.common.contract.events import Event, Notice, QueuedOperation, parts
from phaseloom.common.contract.ids import JobKey
from phaseloom.common.contract.streams import Bucket
from phaseloom.common.transport.connection import (
    CONNECT_TIMEOUT_S,
    DRAIN_TIMEOUT_S,
    SERVICE_CONNECT_S,
    BusConfig,
    close_client,
    connect,
    within,
)
from phaseloom.common.transport.natsclient import MeshClient, each, hand_over

log = logging.getLogger(__name__)

_STORE_FAILED = 10077
_NOT_FOUND = "404"
_NOT_THERE = 404
_SUBJECT_TAKEN = "per subject exceeded"
_WRONG_LAST_SEQUENCE = frozenset({10071, 10164})
_CONSUMER_EXISTS = frozenset({10013, 10148})
_NO_PEERS = 10005
_CONSUMER_BOUND_PAUSE_S = 0.05
_NO_STORAGE = 10047
"""The error code of a NATS server whose disk has less room than a stream may take."""
_PROVISION_PAUSE_S = 0.2
_REQUEST_TIMEOUT_S = 10.0
_NEXT_TRY_S = 3.0
"""Where another server takes over from one that is gone, a request to that one is given up soon."""
LAG_S = 12.0
"""How long a server that was cut off may answer for a stream that others lead meanwhile: NATS ends
its lead after 10 s without most of the servers."""
_LAG_PAUSE_S = 0.1
_ORDERED_HEARTBEAT_S = 0.5
_IDLE_HEARTBEAT_S = 2.0
"""How often the server looks again at a consumer that had nothing to deliver, and says so."""
_BATCH = 256
_ANSWER_BYTES = 16 * 2**20
"""Most bytes of one answer with many stored messages. Without this limit the server sends more than
it lets wait for a connection (64 MiB), and then cuts off a slow reader."""
_MICROSECOND = 1e-6
_SAME_TIME_S = 1e-4
"""Time stamps of one message are equal but for what a float, and Python's microseconds, lose."""
_LOG_SUBJECT = f"{streams.PREFIX}.sched.>"
_QUEUED_SUBJECT = streams.LOG_SUBJECTS[QueuedOperation]
_REPLY_TOKENS = 9

Handler = Callable[[Msg], None]


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One entry of the decision log."""

    sequence: int
    time_s: float
    """The time at which the log took the entry (Unix seconds); it is the scheduler's clock."""
    event: Event
    headers: dict[str, str]

    def apart(self) -> Iterator[LogEntry]:
        """The entry's events, one entry each: one append may bring several."""
        for event in parts(self.event):
            yield LogEntry(self.sequence, self.time_s, event, self.headers)


@dataclass(frozen=True, slots=True)
class LogExtent:
    """Which entries the decision log has."""

    first: int
    """Sequence of the oldest entry; where the log is empty, of its next one."""
    last: int
    """Sequence of the newest entry, even where that was truncated; 0: there was none."""
    num_entries: int

    def check_whole(self) -> None:
        """Raises: ResourceError: DATA_LOSS: entries between the first and the last are missing."""
        num_lost = self.last - self.first + 1 - self.num_entries
        if num_lost > 0:
            raise log_has_a_hole(self.first, self.last, num_lost)


@dataclass(frozen=True, slots=True)
class Stored:
    """A message that a stream has stored."""

    payload: bytes
    sequence: int
    """The message's sequence in the stream, for compare-and-set."""
    headers: dict[str, str]

    @property
    def is_gone(self) -> bool:
        """Whether the message only marks that a KV key was deleted or has expired."""
        return not {"KV-Operation", "Nats-Marker-Reason"}.isdisjoint(self.headers)


@dataclass(frozen=True, slots=True)
class KeyChange:
    """A key of a KV bucket, with the value that it has now."""

    key: str
    stored: Stored | None
    """The key's value; None where the key was deleted or has expired."""


def is_subject_taken(code: int | None, description: str | None) -> bool:
    """Whether a publish was refused because its subject already has its one message.

    The server has one code for every refusal by a stream; only the text tells a full stream.
    """
    return code == _STORE_FAILED and _SUBJECT_TAKEN in (description or "")


def _can_consume_soon(error: Exception) -> bool:
    """Whether an error in making or taking over a durable consumer passes by itself.

    Such an error has one of two causes: another replica made the consumer at the same moment, or a
    predecessor that was killed holds it until the server sees its socket close.
    """
    if isinstance(error, APIError):
        return error.err_code in _CONSUMER_EXISTS
    return "already bound" in str(error)


def _passes(error: Exception) -> bool:
    """Whether a call fails only because servers are away, or agree on who leads right now."""
    if isinstance(error, APIError) and error.err_code == _NO_PEERS:
        return True  # one has yet to find the others
    return isinstance(error, NatsTimeoutError | ServiceUnavailableError | NoRespondersError)


def _place(message: Msg) -> tuple[int, float]:
    """The stream sequence of a message that a consumer got, and when the stream took it (Unix s).

    Both are read from the reply subject, `$JS.ACK.<stream>.<consumer>.<delivered>.<stream
    sequence>.<consumer sequence>.<nanoseconds>.<pending>`, which has two more tokens after `ACK` in
    later forms.
    """
    tokens = message.reply.split(".")
    skip = 0 if len(tokens) == _REPLY_TOKENS else 2
    return int(tokens[5 + skip]), int(tokens[7 + skip]) / 1e9


class _Refusal(msgspec.Struct, frozen=True):
    err_code: int = 0
    description: str = ""


class _Answer(msgspec.Struct, frozen=True):
    """What the server says to a publish, or to a purge. `seq`: of the message that is stored."""

    seq: int = 0
    duplicate: bool = False
    """Whether an earlier message with the same id is the one that is stored."""
    error: _Refusal | None = None


class _Found(msgspec.Struct, frozen=True):
    """A stored message. `data`, `hdrs`: in Base64 in JSON."""

    subject: str
    seq: int
    time: str
    data: bytes = b""
    hdrs: bytes = b""


class _FoundError(msgspec.Struct, frozen=True):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _GetAnswer(msgspec.Struct, frozen=True):
    message: _Found | None = None
    error: _FoundError | None = None


_json = msgspec.json.Encoder()
_answer = msgspec.json.Decoder(_Answer)
_get_answer = msgspec.json.Decoder(_GetAnswer)
"""Calls on the path of every operation bypass nats-py's JetStream layer, which parses more of an
answer than we use."""


def log_went_back(known: int, end: int) -> ResourceError:
    """The error for a decision log that has lost its newest entries.

    Args: known: the newest sequence that was there once. end: the newest one that is there now.
    """
    return ResourceError(
        f"the decision log ends at {end}, and had {known}: the {known - end} entries since are "
        "lost, and with them the operations, outcomes and seals that they tell of",
        code=Code.DATA_LOSS,
        remedy="put the right store back, restore a backup (`phaseloom restore`), or go on "
        "without what is lost (`phaseloom up --resume --accept-loss`)",
        details={"first_lost": end + 1, "last_lost": known},
    )


def log_has_a_hole(first: int, last: int, num_lost: int = 0) -> ResourceError:
    """The error for a decision log without entries that have others behind them.

    Args: first, last: the sequences between which entries are lost, these two included.
          num_lost: how many are lost there; 0: all.
    """
    num_lost = num_lost or last - first + 1
    return ResourceError(
        f"the decision log has a hole: {num_lost} of its entries from {first} to {last} are lost "
        "or damaged, and with them the operations, outcomes and seals that they tell of",
        code=Code.DATA_LOSS,
        remedy="put the right store back, or restore a backup (`phaseloom restore`)",
        details={"first_lost": first, "last_lost": last},
    )


class AlreadyStored(Exception):
    """The subject takes one message, and another message was first."""


class Conflict(Exception):
    """A compare-and-set failed: the key changed since it was read."""


class Bus:
    """A service's connection to the mesh account. Make it with `Bus.open`."""

    def __init__(self, client: MeshClient, replicas: int = 1) -> None:
        """Args: replicas: how many servers keep each stream."""
        self.client = client
        self.replicas = replicas
        self._timeout_s = _REQUEST_TIMEOUT_S if replicas == 1 else _NEXT_TRY_S
        self.js: JetStreamContext = client.jetstream(timeout=self._timeout_s)
        self.lag_s = 0.0 if replicas == 1 else LAG_S
        """How long an answer may be of a server that does not lead any more."""
        self.log_mark = 0
        """The newest sequence of the decision log that this connection has written or read."""

    @classmethod
    async def open(
        cls,
        config: BusConfig,
        name: str,
        *,
        timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> Bus:
        """Connect, and create the streams and buckets of the mesh; see `connect`.

        Raises: ResourceError: as `connect`, or the server does not make the streams in time.
        """
        bus: Bus

        async def again() -> None:
            # This runs in the client's own reconnect task, which an error would end for good.
            level = logging.WARNING
            while bus.client.is_connected:
                try:
                    return await bus.provision()
                except (nats.errors.Error, NatsTimeoutError) as error:
                    log.log(level, "streams are not provisioned yet: %r", error)
                    level = logging.DEBUG
                    await asyncio.sleep(_PROVISION_PAUSE_S)

        bus = cls(
            await connect(
                config.url,
                name,
                config.user,
                config.password,
                on_reconnect=again,
                timeout_s=timeout_s,
            ),
            config.replicas,
        )
        await bus._provision_first()
        return bus

    async def close(self) -> None:
        """Close the connection. Handlers that run may finish, within a few seconds.

        Without a server the connection is closed at once.
        """
        # A drain that meets the server's death waits for an answer that never comes, fails, or
        # takes a cancellation for the end of its work.
        with suppress(OSError, nats.errors.Error, NatsTimeoutError):
            await within(DRAIN_TIMEOUT_S + 1, self.client.drain())
        if not self.client.is_closed:
            await close_client(self.client)

    # --- provisioning ---------------------------------------------------------------------------

    async def provision(self) -> None:
        """Create the streams and buckets of the streams table that do not exist yet.

        Raises: nats.errors.Error: the server does not answer, or cannot yet.
        """
        makes = [
            *(self._ensure_stream(config) for config in streams.mesh_streams(self.replicas)),
            *(self._ensure_bucket(bucket) for bucket in streams.buckets(self.replicas)),
        ]
        # Servers that replicate a stream take their time to make it, and make many at once.
        results = await asyncio.gather(*makes, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _provision_first(self) -> None:
        """Provision for the first time; tried again while the server does not answer.

        Raises: ResourceError: the server answers too slowly, or not at all.
        """
        reason = "it did not answer"
        try:
            async with asyncio.timeout(SERVICE_CONNECT_S):
                while True:
                    try:
                        return await self.provision()
                    except (NatsTimeoutError, nats.errors.Error) as error:
                        if not _passes(error):
                            raise
                        is_news, reason = repr(error) != reason, repr(error)
                        level = logging.WARNING if is_news else logging.DEBUG
                        log.log(level, "streams are not provisioned yet: %s", reason)
                        await asyncio.sleep(_PROVISION_PAUSE_S)
        except BaseException as error:
            await close_client(self.client)
            if isinstance(error, TimeoutError):
                raise ResourceError(
                    f"the NATS server did not make the streams within {SERVICE_CONNECT_S:.0f} s: "
                    f"{reason}",
                    remedy="is JetStream enabled there? is its machine overloaded, or its disk?",
                ) from error
            raise

    async def provision_tenant(self, tenant: str, max_bytes: int) -> None:
        await self._ensure_stream(streams.tenant_stream(tenant, max_bytes, self.replicas))

    async def _ensure_stream(self, config: api.StreamConfig) -> None:
        assert config.name
        try:
            await self._replicate(await self.js.stream_info(config.name))
        except NotFoundError:
            try:
                await self.js.add_stream(config)
            except ServerError as error:
                if error.err_code != _NO_STORAGE:
                    raise
                raise ResourceError(
                    f"the NATS server's disk has no room for the {config.max_bytes} bytes that the "
                    f"stream {config.name} may take",
                    code=Code.RESOURCE_EXHAUSTED,
                    remedy="have the server's store on a disk with more room; of a tenant's stream "
                    "ops_max_bytes says how much it may take",
                ) from error

    async def _ensure_bucket(self, config: api.KeyValueConfig) -> None:
        try:
            await self._replicate(await self.js.stream_info(f"KV_{config.bucket}"))
        except NotFoundError:
            await self.js.create_key_value(config)

    async def _replicate(self, stream: api.StreamInfo) -> None:
        """Have as many servers keep a stream as they should, where it was made for fewer."""
        config = stream.config
        if (config.num_replicas or 1) < self.replicas:
            is_direct = config.allow_direct and config.name == streams.SCHED
            await self.js.update_stream(
                config.evolve(num_replicas=self.replicas, allow_direct=is_direct)
            )

    # --- writing --------------------------------------------------------------------------------

    async def publish(
        self,
        subject: str,
        message: object,
        *,
        msg_id: str | None = None,
        headers: dict[str, str] | None = None,
        content_type: str = MSGPACK,
    ) -> int:
        """Publish to a stream; returns the message's sequence once the server has stored it.

        Args:   msg_id: the stream stores only the first of several messages with one id.
        Raises: AlreadyStored: the subject takes one message, and another was first.
                ResourceError: the message was not stored in time, or the stream is full.
        """
        answer = await self._store(subject, message, msg_id, headers, content_type)
        return answer.seq

    async def _store(
        self,
        subject: str,
        message: object,
        msg_id: str | None,
        headers: dict[str, str] | None,
        content_type: str = MSGPACK,
    ) -> _Answer:
        all_headers = {CONTENT_TYPE: content_type, **(headers or {})}
        if msg_id:
            all_headers["Nats-Msg-Id"] = msg_id
        try:
            payload = encode(message, content_type)
            answer = await self.client.request(
                subject, payload, timeout=self._timeout_s, headers=all_headers
            )
        except (NatsTimeoutError, nats.errors.Error) as error:
            raise ResourceError(f"{subject} was not stored: {error!r}") from error
        ack = _answer.decode(answer.data)
        if ack.error is None:
            return ack
        if is_subject_taken(ack.error.err_code, ack.error.description):
            raise AlreadyStored(subject)
        raise ResourceError(
            f"{subject} was not stored: {ack.error.description}", code=Code.RESOURCE_EXHAUSTED
        )

    async def append(
        self, event: Event, *, msg_id: str | None = None, headers: dict[str, str] | None = None
    ) -> int:
        """Append an event to the decision log; returns its sequence there.

        Raises: ResourceError: as `publish`; DATA_LOSS: the log gave out this sequence before.
        """
        known = self.log_mark
        answer = await self._store(streams.log_subject(event), event, msg_id, headers)
        if answer.seq <= known and not answer.duplicate:
            raise log_went_back(known, answer.seq - 1)
        self.log_mark = max(self.log_mark, answer.seq)
        return answer.seq

    async def notice(self, source: str, what: str, reason: str, subject: str = "") -> None:
        """Publish a notice for people; nothing in the mesh depends on notices.

        Args: source: the service that tells it. subject: what the notice is about, if anything.
        """
        payload = encode(Notice(source, what, reason, subject))
        await self.client.publish(
            streams.event_subject(source), payload, headers={CONTENT_TYPE: MSGPACK}
        )

    async def bury(self, source: str, message: Msg, error: ErrorInfo) -> None:
        """Put a message that cannot be handled in the stream DEAD with the reason, for people.

        The message is then taken off its own stream.
        """
        headers = dict(message.headers or {})
        headers["Phaseloom-Error"] = msgspec.json.encode(error).decode()
        headers["Phaseloom-Subject"] = message.subject
        for name in [h for h in headers if h.startswith("Nats-")]:
            del headers[name]
        await self.js.publish(streams.dead_subject(source), message.data, headers=headers)
        await message.term()

    # --- reading --------------------------------------------------------------------------------

    async def read_log(self, start_sequence: int = 1) -> AsyncGenerator[LogEntry, None]:
        """Every event of the decision log from `start_sequence` on, in order, for ever.

        Several events that one append brought come one by one, under one sequence. A reader that
        stops at an event and goes on later uses `read_entries`, so as to miss none of the others.
        """
        async with aclosing(self.read_entries(start_sequence)) as entries:
            async for entry in entries:
                for one in entry.apart():
                    yield one

    async def read_entries(self, start_sequence: int = 1) -> AsyncGenerator[LogEntry, None]:
        """Every entry of the decision log from `start_sequence` on, in order, for ever.

        An entry comes as it is stored, with all the events that one append brought.

        Raises: ResourceError: DATA_LOSS: the log has lost entries that came, as is found where an
            entry comes after the server was away.
        """
        config = api.ConsumerConfig(
            deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=max(1, start_sequence),
        )
        wanted, newest_s = start_sequence, None
        connections = self.client.stats["reconnects"]
        async with aclosing(self._ordered(streams.SCHED, _LOG_SUBJECT, config)) as messages:
            async for message in messages:
                sequence, time_s = _place(message)
                if sequence < wanted:
                    continue
                if self.client.stats["reconnects"] != connections:
                    connections = self.client.stats["reconnects"]
                    if newest_s is not None:
                        await self._check_still_there(wanted - 1, newest_s)
                wanted, newest_s = sequence + 1, time_s
                self.log_mark = max(self.log_mark, sequence)
                event = decode(message.data, Event)
                yield LogEntry(sequence, time_s, event, message.headers or {})

    async def _check_still_there(self, sequence: int, time_s: float) -> None:
        """Check that the log has the entry that it had, and not a later one of the same number.

        A server that lost the log's end gives its numbers out anew. A reader that has come further
        would be sent nothing until there are as many entries again, and then go on as if nothing
        had been.

        Raises: ResourceError: DATA_LOSS: it has not.
        """
        sure_at_s = time.monotonic() + self.lag_s
        while True:
            try:
                end = await self._end_without(sequence, time_s)
            except (nats.errors.Error, NatsTimeoutError) as error:
                if self.client.is_closed:
                    raise
                log.debug("whether the log is what it was is not known yet: %r", error)
            else:
                if end is None:
                    return
                if time.monotonic() >= sure_at_s:
                    raise log_went_back(sequence, end)
            await asyncio.sleep(_PROVISION_PAUSE_S)

    async def _end_without(self, sequence: int, time_s: float) -> int | None:
        """Where the log ended when it had lost this entry; None: it has it, or has truncated it.

        Raises: nats.errors.Error: the server does not answer, or cannot yet.
        """
        found = await self._ask_leader(streams.SCHED, {"seq": sequence})
        if found is not None:
            stored_s = datetime.fromisoformat(found.time).timestamp()
            return None if abs(stored_s - time_s) < _SAME_TIME_S else sequence - 1
        extent = await self.log_extent()
        return extent.last if sequence >= extent.first else None

    async def queued_since(self, time_s: float) -> AsyncGenerator[QueuedOperation, None]:
        """The operations that the decision log has taken since a time (Unix seconds), in order.

        Raises: nats.errors.Error: the server does not answer, or cannot yet.
        """
        # The time of a stored message must not be rounded beyond it.
        since = (
            datetime.fromtimestamp(time_s - _MICROSECOND, UTC).isoformat().replace("+00:00", "Z")
        )
        start: dict[str, object] = {"start_time": since}
        while True:
            wanted = {**start, "batch": _BATCH, "next_by_subj": _QUEUED_SUBJECT}
            *messages, end = await self.client.request_many(
                f"$JS.API.DIRECT.GET.{streams.SCHED}",
                _json.encode(wanted),
                timeout=self._timeout_s,
            )
            for message in messages:
                for event in parts(decode(message.data, Event)):
                    if isinstance(event, QueuedOperation):
                        yield event
            if not messages or (end.headers or {}).get("Nats-Num-Pending", "0") == "0":
                return
            last = (messages[-1].headers or {})["Nats-Sequence"]
            start = {"seq": int(last) + 1}

    async def _ordered(
        self, stream: str, subject: str, config: api.ConsumerConfig
    ) -> AsyncGenerator[Msg, None]:
        """The messages of a stream in order, for ever.

        After a restart of the server some may come again.
        """
        subscription = await self._ordered_subscription(stream, subject, config)
        try:
            async for message in each(subscription):
                yield message
        finally:
            # Where the connection is closed or draining the subscription ends with it.
            with suppress(nats.errors.Error):
                await subscription.unsubscribe()

    async def _ordered_subscription(
        self, stream: str, subject: str, config: api.ConsumerConfig
    ) -> JetStreamContext.PushSubscription:
        while True:
            try:
                return await self.js.subscribe(
                    subject,
                    stream=stream,
                    ordered_consumer=True,
                    config=config,
                    idle_heartbeat=_ORDERED_HEARTBEAT_S,
                )
            except (NatsTimeoutError, nats.errors.Error) as error:
                if not _passes(error) or self.client.is_closed:
                    raise
                log.warning("no consumer on %s yet: %r", stream, error)
                await asyncio.sleep(_PROVISION_PAUSE_S)

    async def log_end(self) -> int:
        """Sequence of the decision log's newest entry; 0 when it is empty."""
        return (await self.js.stream_info(streams.SCHED)).state.last_seq

    async def newest_notices(self, number: int) -> list[Notice]:
        """The newest notices, oldest first."""
        state = (await self.js.stream_info(streams.EVENTS)).state
        notices = []
        first = max(1, state.first_seq, state.last_seq - number + 1)
        for sequence in range(first, state.last_seq + 1):
            with suppress(NotFoundError):  # the notice has expired meanwhile
                message = await self.js.get_msg(streams.EVENTS, sequence)
                notices.append(decode(message.data or b"", Notice))
        return notices

    async def read_notices(self, newest: int) -> AsyncGenerator[Notice, None]:
        """The newest notices, then each one that comes, for ever.

        Args: newest: how many notices of the past to begin with.
        """
        end = (await self.js.stream_info(streams.EVENTS)).state.last_seq
        config = api.ConsumerConfig(
            deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=max(1, end - newest + 1),
        )
        subject = streams.event_subject(">")
        async with aclosing(self._ordered(streams.EVENTS, subject, config)) as messages:
            async for message in messages:
                yield decode(message.data, Notice)

    async def log_extent(self) -> LogExtent:
        """Which entries the decision log has."""
        state = (await self.js.stream_info(streams.SCHED)).state
        return LogExtent(max(1, state.first_seq), state.last_seq, state.messages)

    async def check_log(self) -> LogExtent:
        """Read the decision log through; the server finds damaged entries only when it reads them.

        Raises: ResourceError: DATA_LOSS: an entry is missing or damaged.
        """
        sure_at_s = time.monotonic() + self.lag_s
        while True:
            try:
                return await self._check_log()
            except ResourceError:
                if time.monotonic() >= sure_at_s:
                    raise
            await asyncio.sleep(_PROVISION_PAUSE_S)

    async def _check_log(self) -> LogExtent:
        extent = await self.log_extent()
        extent.check_whole()
        wanted = extent.first
        while wanted <= extent.last:
            *messages, _ = await self.client.request_many(
                f"$JS.API.DIRECT.GET.{streams.SCHED}",
                _json.encode({"seq": wanted, "batch": _BATCH, "next_by_subj": _LOG_SUBJECT}),
                timeout=self._timeout_s,
            )
            for message in messages:
                sequence = int((message.headers or {})["Nats-Sequence"])
                if sequence != wanted:
                    raise log_has_a_hole(wanted, sequence - 1)
                wanted += 1
            if not messages:
                raise log_has_a_hole(wanted, extent.last)
        return extent

    async def read_reports(self) -> AsyncGenerator[tuple[JobKey, float, JobReport], None]:
        """What controllers have reported of their jobs, then each report that comes, for ever.

        Each comes with its job, and with when the stream took it (Unix seconds).
        """
        config = api.ConsumerConfig(deliver_policy=api.DeliverPolicy.ALL)
        subject = streams.report_subject(">")
        newest = 0
        async with aclosing(self._ordered(streams.REPORTS, subject, config)) as messages:
            async for message in messages:
                sequence, time_s = _place(message)
                if sequence <= newest:
                    continue
                newest = sequence
                tenant, job = message.subject.split(".")[-2:]
                yield JobKey(tenant, job), time_s, decode(message.data, JobReport)

    async def truncate_log(self, sequence: int) -> None:
        """Drop the decision log's entries below `sequence`."""
        await self.js.purge_stream(streams.SCHED, seq=sequence)

    async def consume(
        self,
        stream: str,
        subject: str,
        durable: str,
        handler: Handler,
        *,
        shared: bool = False,
        max_ack_pending: int = 1024,
        ack_wait_s: float = 30.0,
    ) -> JetStreamContext.PushSubscription:
        """Subscribe to a stream by a durable push consumer.

        Whoever handles a message acknowledges it, once the message's effects are published.

        Args: durable: the consumer's name.
              handler: called with each message as it is read from the connection, in order. It must
                  not wait, and starts a task for what takes time.
              shared: whether replicas with the same `durable` each get some of the messages.
              max_ack_pending: most messages that are delivered and not yet acknowledged.
              ack_wait_s: a message that is not acknowledged for so long is delivered again.
        """
        while True:
            config = api.ConsumerConfig(
                ack_policy=api.AckPolicy.EXPLICIT,
                ack_wait=ack_wait_s,
                max_ack_pending=max_ack_pending,
                # Once in a great while (nats-server 2.15.1) a consumer that had `max_ack_pending`
                # messages out sleeps on when they are acknowledged, until the next one is
                # published. A heartbeat wakes it, too.
                idle_heartbeat=_IDLE_HEARTBEAT_S,
            )
            if shared:
                # Two replicas may both find no consumer and make it. The server takes the second
                # for a change; with a subject of its own it would leave the first one deaf.
                config.deliver_subject = f"_INBOX.{stream}.{durable}"
            try:
                subscription = await self.js.subscribe(
                    subject,
                    stream=stream,
                    durable=durable,
                    queue=durable if shared else None,
                    manual_ack=True,
                    config=config,
                )
            except (NatsTimeoutError, nats.errors.Error) as error:
                if _passes(error):
                    log.warning("no consumer %s yet: %r", durable, error)
                elif not _can_consume_soon(error):
                    raise
                await asyncio.sleep(_CONSUMER_BOUND_PAUSE_S)
            else:

                def take(message: Msg) -> None:
                    if message.reply:  # a heartbeat has none
                        handler(message)

                hand_over(subscription, take)
                return subscription

    async def get_stored(self, stream: str, subject: str) -> Stored | None:
        """The newest stored message of a subject (direct get), or None where there is none.

        Raises: nats.errors.Error: the server does not answer, or cannot yet.
        """
        if self.replicas > 1:
            return await self._get_by_api(stream, subject)
        try:
            message = await self.client.request(
                f"$JS.API.DIRECT.GET.{stream}.{subject}", timeout=self._timeout_s
            )
        except NoRespondersError:
            return await self._get_by_api(stream, subject)
        headers = dict(message.headers or {})
        sequence = headers.get("Nats-Sequence")
        if sequence is not None:
            return Stored(message.data, int(sequence), headers)
        if headers.get("Status") == _NOT_FOUND:
            return None
        raise APIError.from_msg(message)

    async def _get_by_api(self, stream: str, subject: str) -> Stored | None:
        """The newest stored message of a subject, asked for without direct get.

        It is for the case that direct get gives no answer: there is no such stream, the stream has
        no direct get, or the server is starting. No answer does not mean that there is no message;
        the JetStream API tells these cases apart.
        """
        found = await self._ask_leader(stream, {"last_by_subj": subject})
        if found is None:
            return None
        headers = await self.client._process_headers(found.hdrs) if found.hdrs else {}
        return Stored(found.data, found.seq, headers or {})

    async def _ask_leader(self, stream: str, which: dict[str, object]) -> _Found | None:
        """A stored message, as whoever leads the stream has it; None where it has none.

        Raises: nats.errors.Error: the server does not answer, or cannot yet.
        """
        message = await self.client.request(
            f"$JS.API.STREAM.MSG.GET.{stream}", _json.encode(which), timeout=self._timeout_s
        )
        answer = _get_answer.decode(message.data)
        if answer.error is not None:
            if answer.error.code == _NOT_THERE:
                return None
            raise APIError.from_error(msgspec.json.decode(message.data)["error"])
        return answer.message

    async def get_all_stored(
        self, stream: str, subjects: Sequence[str], *, are_there: bool = False
    ) -> dict[str, Stored]:
        """The newest stored message of each subject that has one, as `get_stored` gives it.

        Args:   subjects: without wildcards.
                are_there: all of them have been stored: a server that has none is asked again for
                    as long as it may lag behind.
        Raises: nats.errors.Error: the server does not answer, or cannot yet.
        """
        found = await self._get_all_stored(stream, subjects)
        sure_at_s = time.monotonic() + self.lag_s
        while are_there and len(found) < len(subjects) and time.monotonic() < sure_at_s:
            await asyncio.sleep(_LAG_PAUSE_S)
            found = await self._get_all_stored(stream, subjects)
        return found

    async def _get_all_stored(self, stream: str, subjects: Sequence[str]) -> dict[str, Stored]:
        if len(subjects) == 1:
            only = await self.get_stored(stream, subjects[0])
            return {} if only is None else {subjects[0]: only}
        if self.replicas > 1:
            each_one = await asyncio.gather(*(self.get_stored(stream, each) for each in subjects))
            return {s: one for s, one in zip(subjects, each_one, strict=True) if one is not None}
        found: dict[str, Stored] = {}
        try:
            *messages, end = await self.client.request_many(
                f"$JS.API.DIRECT.GET.{stream}",
                _json.encode({"multi_last": subjects, "max_bytes": _ANSWER_BYTES}),
                timeout=self._timeout_s,
            )
        except NoRespondersError:
            messages, end = [], None
        for message in messages:
            headers = dict(message.headers or {})
            found[headers["Nats-Subject"]] = Stored(
                message.data, int(headers["Nats-Sequence"]), headers
            )
        status = {} if end is None else end.headers or {}
        if status.get("Status") == _NOT_FOUND or status.get("Nats-Num-Pending") == "0":
            return found
        # The messages are too much for one answer, or nobody was there to give it.
        for subject in subjects:
            if subject not in found and (one := await self.get_stored(stream, subject)):
                found[subject] = one
        return found

    async def delete_subject(self, stream: str, subject: str) -> None:
        """Drop the stored messages of a subject.

        Raises: nats.errors.Error: the server does not answer. APIError: there is no such stream.
        """
        message = await self.client.request(
            f"$JS.API.STREAM.PURGE.{stream}",
            _json.encode({"filter": subject}),
            timeout=self._timeout_s,
        )
        if _answer.decode(message.data).error is not None:
            raise APIError.from_error(msgspec.json.decode(message.data)["error"])

    async def stored_before(
        self, stream: str, subject: str, time_s: float
    ) -> AsyncGenerator[str, None]:
        """Subjects of the messages that a stream took before a time (Unix seconds), oldest first.

        The iteration may wait for ever where the last of the messages is deleted meanwhile: the
        caller must bound it.
        """
        if not (await self.js.stream_info(stream)).state.messages:
            return
        config = api.ConsumerConfig(deliver_policy=api.DeliverPolicy.ALL, headers_only=True)
        async with aclosing(self._ordered(stream, subject, config)) as messages:
            async for message in messages:
                _, stored_s = _place(message)
                if stored_s >= time_s:
                    return
                yield message.subject
                if message.reply.endswith(".0"):  # none is pending behind it
                    return

    async def subjects(self, stream: str, filter_subject: str) -> list[str]:
        """The subjects under a filter that have a stored message."""
        try:
            info = await self.js.stream_info(stream, subjects_filter=filter_subject)
        except NotFoundError:
            return []
        return sorted(info.state.subjects or {})

    # --- KV -------------------------------------------------------------------------------------

    async def kv_get(self, bucket: Bucket, key: str) -> Stored | None:
        """A key's value, or None where the key is absent, deleted or expired."""
        stored = await self.kv_get_raw(bucket, key)
        return None if stored is None or stored.is_gone else stored

    async def kv_get_raw(self, bucket: Bucket, key: str) -> Stored | None:
        """Like `kv_get`, but a deleted or expired key gives its marker.

        The marker's sequence is what `kv_swap` must name.
        """
        return await self.get_stored(f"KV_{bucket}", f"$KV.{bucket}.{key}")

    async def kv_put(self, bucket: Bucket, key: str, value: bytes) -> int:
        return (await self.js.publish(f"$KV.{bucket}.{key}", value)).seq

    async def kv_swap(
        self,
        bucket: Bucket,
        key: str,
        value: bytes,
        expected: int,
        ttl_s: float | None = None,
        *,
        headers: dict[str, str] | None = None,
    ) -> int:
        """Replace a key's value if nobody else has (compare-and-set); returns the new sequence.

        Args:   expected: stream sequence of the value that is replaced; 0: the key is new.
                ttl_s: whole seconds until the value expires; None: never.
        Raises: Conflict: the key has another value than the expected one.
        """
        all_headers = {**(headers or {}), "Nats-Expected-Last-Subject-Sequence": str(expected)}
        try:
            ack = await self.js.publish(
                f"$KV.{bucket}.{key}", value, headers=all_headers, msg_ttl=ttl_s
            )
        except APIError as error:
            if error.err_code in _WRONG_LAST_SEQUENCE:
                raise Conflict(f"{bucket}/{key}") from None
            raise
        return ack.seq

    async def kv_delete(self, bucket: Bucket, key: str, expected: int) -> int:
        """Delete a key if nobody else has changed it, as `kv_swap` replaces it.

        Returns: the sequence of the marker that is left behind.
        """
        return await self.kv_swap(bucket, key, b"", expected, headers={"KV-Operation": "DEL"})

    async def kv_watch(self, bucket: Bucket, keys: str = ">") -> AsyncGenerator[KeyChange, None]:
        """The keys under a filter as they are now, then every change of them, for ever.

        Where values of a key follow one another fast, some may be skipped; the last one never is.
        Expiry is a change only in buckets that leave markers (`leases`).
        """
        prefix = f"$KV.{bucket}."
        config = api.ConsumerConfig(deliver_policy=api.DeliverPolicy.LAST_PER_SUBJECT)
        newest: dict[str, int] = {}
        async with aclosing(self._ordered(f"KV_{bucket}", prefix + keys, config)) as messages:
            async for message in messages:
                sequence, _ = _place(message)
                key = message.subject.removeprefix(prefix)
                if sequence <= newest.get(key, 0):
                    continue
                newest[key] = sequence
                stored = Stored(message.data, sequence, dict(message.headers or {}))
                yield KeyChange(key, None if stored.is_gone else stored)

    async def kv_keys(self, bucket: Bucket) -> list[str]:
        prefix = f"$KV.{bucket}."
        return [s.removeprefix(prefix) for s in await self.subjects(f"KV_{bucket}", f"{prefix}>")]
