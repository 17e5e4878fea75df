"""A service's connection to the mesh on NATS: its streams, the decision log, stored messages, keys.

Services use this module and never nats-py's JetStream API directly, so that its pitfalls are
handled in one place:

- `js.publish` modifies the headers dict passed to it.
- A message refused because its subject already has one is reported as an API error, with the same
  code as a full stream.
- Memory streams are lost when the server restarts, so streams are provisioned again after every
  reconnect.
- If several servers store each stream, followers may lag, so reads go to the leader. The decision
  log is the exception, since its readers know each entry's number. Every compare-and-set needs a
  majority of the servers, so stored values are never silently replaced.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress

import msgspec
import nats
from nats.aio.msg import Msg
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js import JetStreamContext, api
from nats.js.errors import APIError, NotFoundError, ServerError

from phaseloom.common.contract import streams
from phaseloom.common.contract.api import JobReport, JobStatus
from phaseloom.common.contract.codec import CONTENT_TYPE, MSGPACK, decode, encode
from phaseloom.common.contract.errors import Code, ErrorInfo, ResourceError
from phaseloom.common.contract.events import Notice
from phaseloom.common.contract.ids import JobKey
from phaseloom.common.transport.connection import (
    CONNECT_TIMEOUT_S,
    DRAIN_TIMEOUT_S,
    SERVICE_CONNECT_S,
    BusConfig,
    close_client,
    connect,
    with_timeout,
)
from phaseloom.common.transport.decisionlog import DecisionLog
from phaseloom.common.transport.keys import Keys
from phaseloom.common.transport.link import PAUSE_S, Link, is_transient, ordered, position_of
from phaseloom.common.transport.natsclient import MeshClient, hand_over
from phaseloom.common.transport.pulling import PullConsumer
from phaseloom.common.transport.stored import StoredMessages

log = logging.getLogger(__name__)

_CONSUMER_EXISTS = frozenset({10013, 10148})
_CONSUMER_BOUND_PAUSE_S = 0.05
_NO_STORAGE = 10047
"""Error code of a NATS server whose disk has less room than a stream may need."""
_MAX_ACK_PENDING = 1024
"""Maximum delivered messages of a consumer that are not acknowledged yet."""
_JOB_TOKEN = 3
"""Index of the tenant in the subjects of reports and records of runs; the job and the run
follow."""
_IDLE_HEARTBEAT_S = 2.0
"""How often the server rechecks a consumer that had nothing to deliver, and sends a heartbeat."""

Handler = Callable[[Msg], None]


def _can_consume_soon(error: Exception) -> bool:
    """Whether a killed predecessor still holds a consumer, until the server notices that its socket
    is closed."""
    if isinstance(error, APIError):
        return error.err_code in _CONSUMER_EXISTS
    return "already bound" in str(error)


class Bus:
    """A service's connection to the mesh account. Create it with `Bus.open`."""

    def __init__(self, client: MeshClient, replicas: int = 1) -> None:
        """Args:   replicas: number of servers that store each stream."""
        self._link = Link(client, replicas)
        self.client = client
        self.replicas = replicas
        self.js: JetStreamContext = self._link.js
        self.lag_s = self._link.lag_s
        """Maximum age in seconds of an answer from a server that no longer leads."""
        self.stored = StoredMessages(self._link)
        self.keys = Keys(self._link, self.stored)
        self.log = DecisionLog(self._link, self.stored)

    @classmethod
    async def open(
        cls,
        config: BusConfig,
        name: str,
        *,
        timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> Bus:
        """Connect, and create the streams and buckets of the mesh; see `connect`.

        Raises: ResourceError: see `connect`, or the server does not create the streams in
                time.
        """
        bus: Bus

        async def again() -> None:
            # This runs in the client's reconnect task. An error would end that task permanently.
            level = logging.WARNING
            while bus.client.is_connected:
                try:
                    return await bus.provision()
                except (nats.errors.Error, NatsTimeoutError) as error:
                    log.log(level, "cannot provision streams yet: %r", error)
                    level = logging.DEBUG
                    await asyncio.sleep(PAUSE_S)

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
        """Close the connection. Running handlers get a few seconds to finish.

        Without a server the connection is closed at once.
        """
        # If the server dies during a drain, the drain waits forever, fails, or treats a
        # cancellation as success.
        with suppress(OSError, nats.errors.Error, NatsTimeoutError):
            await with_timeout(DRAIN_TIMEOUT_S + 1, self.client.drain())
        if not self.client.is_closed:
            await close_client(self.client)

    # --- provisioning ---------------------------------------------------------------------------

    async def provision(self) -> None:
        """Create the streams and buckets of the mesh that do not exist yet.

        Raises: nats.errors.Error: the server does not answer, or is not ready.
        """
        makes = [
            *(self._ensure_stream(config) for config in streams.mesh_streams(self.replicas)),
            *(self._ensure_bucket(bucket) for bucket in streams.buckets(self.replicas)),
        ]
        # Creating a replicated stream is slow, but servers create many of them concurrently.
        results = await asyncio.gather(*makes, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _provision_first(self) -> None:
        """Provision for the first time, and retry while the server does not answer.

        Raises: ResourceError: the server answers too slowly, or not at all.
        """
        reason = "it did not answer"
        try:
            async with asyncio.timeout(SERVICE_CONNECT_S):
                while True:
                    try:
                        return await self.provision()
                    except (NatsTimeoutError, nats.errors.Error) as error:
                        if not is_transient(error):
                            raise
                        is_new, reason = repr(error) != reason, repr(error)
                        level = logging.WARNING if is_new else logging.DEBUG
                        log.log(level, "cannot provision streams yet: %s", reason)
                        await asyncio.sleep(PAUSE_S)
        except BaseException as error:
            await close_client(self.client)
            if isinstance(error, TimeoutError):
                raise ResourceError(
                    f"the NATS server did not create the streams within {SERVICE_CONNECT_S:.0f} s: "
                    f"{reason}",
                    remedy="check that JetStream is enabled and that the server's machine and disk "
                    "are not overloaded",
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
                    f"the NATS server's disk has no room for stream {config.name}, which may need "
                    f"{config.max_bytes} bytes",
                    code=Code.RESOURCE_EXHAUSTED,
                    remedy="move the server's store to a larger disk; for a tenant's stream, lower "
                    "ops_max_bytes",
                ) from error

    async def _ensure_bucket(self, config: api.KeyValueConfig) -> None:
        try:
            await self._replicate(await self.js.stream_info(f"KV_{config.bucket}"))
        except NotFoundError:
            await self.js.create_key_value(config)

    async def _replicate(self, stream: api.StreamInfo) -> None:
        """Raise the number of servers that store a stream, if it was created for fewer."""
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
        """Publish to a stream. Returns: the message's sequence, once the server has stored it.

        Args:   msg_id: the stream stores only the first of several messages with the same id.
        Raises: AlreadyStored: the subject holds one message, and another one was first.
                ResourceError: the message was not stored in time, or the stream is full.
        """
        answer = await self._link.store(subject, message, msg_id, headers, content_type)
        return answer.seq

    async def notice(self, source: str, what: str, reason: str, subject: str = "") -> None:
        """Publish a notice for people. Nothing in the mesh depends on notices.

        Args:   source: the reporting service.
                subject: what the notice is about, if anything.
        """
        payload = encode(Notice(source, what, reason, subject))
        await self.client.publish(
            streams.event_subject(source), payload, headers={CONTENT_TYPE: MSGPACK}
        )

    async def bury(self, source: str, message: Msg, error: ErrorInfo) -> None:
        """Move a message that cannot be handled to the stream DEAD, with the reason, for people.

        It is then removed from its own stream.
        """
        headers = dict(message.headers or {})
        headers["Phaseloom-Error"] = msgspec.json.encode(error).decode()
        headers["Phaseloom-Subject"] = message.subject
        for name in [h for h in headers if h.startswith("Nats-")]:
            del headers[name]
        await self.js.publish(streams.dead_subject(source), message.data, headers=headers)
        await message.term()

    # --- reading --------------------------------------------------------------------------------

    async def newest_notices(self, number: int) -> list[Notice]:
        """Return the newest notices, oldest first."""
        state = (await self.js.stream_info(streams.EVENTS)).state
        notices = []
        first = max(1, state.first_seq, state.last_seq - number + 1)
        for sequence in range(first, state.last_seq + 1):
            with suppress(NotFoundError):  # the notice has expired meanwhile
                message = await self.js.get_msg(streams.EVENTS, sequence)
                notices.append(decode(message.data or b"", Notice))
        return notices

    async def read_notices(self, newest: int) -> AsyncGenerator[Notice, None]:
        """Yield the newest notices, then each new one, forever.

        Args:   newest: number of past notices to start with.
        """
        end = (await self.js.stream_info(streams.EVENTS)).state.last_seq
        config = api.ConsumerConfig(
            deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=max(1, end - newest + 1),
        )
        subject = streams.event_subject(">")
        async with aclosing(ordered(self._link, streams.EVENTS, subject, config)) as messages:
            async for message in messages:
                yield decode(message.data, Notice)

    async def read_reports(self) -> AsyncGenerator[tuple[JobKey, float, JobReport], None]:
        """Yield the stored reports of controllers, then each new one, forever.

        Each report comes with its job and the time at which the stream stored it (Unix seconds).
        """
        config = api.ConsumerConfig(deliver_policy=api.DeliverPolicy.ALL)
        subject = streams.report_subject(">")
        newest = 0
        async with aclosing(ordered(self._link, streams.REPORTS, subject, config)) as messages:
            async for message in messages:
                sequence, time_s = position_of(message)
                if sequence <= newest:
                    continue
                newest = sequence
                tenant, job, *run = message.subject.split(".")[_JOB_TOKEN:]
                report = decode(message.data, JobReport)
                if run:
                    report = msgspec.structs.replace(report, run=run[0])
                yield JobKey(tenant, job), time_s, report

    async def runs(self) -> dict[tuple[JobKey, str], JobStatus]:
        """Return the stored record of each run, by job and name of the run."""
        records = {}
        for subject in await self.stored.subjects(streams.RUNS, streams.run_subject(">")):
            stored = await self.stored.get(streams.RUNS, subject)
            if stored is not None:  # it may have expired meanwhile
                tenant, job, run = subject.split(".")[_JOB_TOKEN:]
                records[JobKey(tenant, job), run] = decode(stored.payload, JobStatus)
        return records

    async def drop_run(self, job: JobKey, run: str) -> None:
        """Drop the record of a run, and what its controller reported."""
        await self.stored.delete(streams.REPORTS, streams.report_subject(job, run))
        await self.stored.delete(streams.RUNS, streams.run_subject(job, run))

    async def consume(
        self,
        stream: str,
        subject: str,
        durable: str,
        handler: Handler,
        *,
        ack_wait_s: float = 30.0,
    ) -> JetStreamContext.PushSubscription:
        """Subscribe to a stream alone, with a durable push consumer.

        The handler, or a task that it starts, must acknowledge each message after publishing the
        message's effects.

        Args:   durable: the consumer's name.
                handler: called with each message as it is read from the connection, in order. It
                    must not block; it starts a task for slow work.
                ack_wait_s: an unacknowledged message is redelivered after this time.
        """
        while True:
            config = api.ConsumerConfig(
                ack_policy=api.AckPolicy.EXPLICIT,
                ack_wait=ack_wait_s,
                max_ack_pending=_MAX_ACK_PENDING,
                # Rarely (nats-server 2.15.1), a consumer that had reached `max_ack_pending` stays
                # asleep after acknowledgements until the next message is published. A heartbeat
                # wakes it too.
                idle_heartbeat=_IDLE_HEARTBEAT_S,
            )
            try:
                subscription = await self.js.subscribe(
                    subject,
                    stream=stream,
                    durable=durable,
                    manual_ack=True,
                    config=config,
                )
            except (NatsTimeoutError, nats.errors.Error) as error:
                if is_transient(error):
                    log.warning("cannot create consumer %s yet: %r", durable, error)
                elif not _can_consume_soon(error):
                    raise
                await asyncio.sleep(_CONSUMER_BOUND_PAUSE_S)
            else:

                def on_message(message: Msg) -> None:
                    if message.reply:  # a heartbeat has none
                        handler(message)

                hand_over(subscription, on_message)
                return subscription

    async def pull(
        self, stream: str, durable: str, handler: Handler, *, ack_wait_s: float
    ) -> PullConsumer:
        """Share a stream's messages with other replicas; see `PullConsumer.open`."""
        return await PullConsumer.open(self._link, stream, durable, handler, ack_wait_s=ack_wait_s)
