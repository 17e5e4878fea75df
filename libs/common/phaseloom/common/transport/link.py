"""The connection for all calls to the mesh's streams: request timeouts, and which errors are
temporary."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import nats
from nats.aio.msg import Msg
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js import JetStreamContext, api
from nats.js.errors import APIError, ServiceUnavailableError

from phaseloom.common.contract.codec import CONTENT_TYPE, MSGPACK, encode
from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.transport.natsclient import MeshClient, each

log = logging.getLogger(__name__)

LAG_S = 12.0
"""How long a disconnected server may answer for a stream that another server leads by now. NATS
ends its leadership after 10 s without a majority."""
PAUSE_S = 0.2
"""Pause between attempts of a call that fails only because servers are unreachable."""
_STORE_FAILED = 10077
_SUBJECT_TAKEN = "per subject exceeded"
_NO_PEERS = 10005
_REQUEST_TIMEOUT_S = 10.0
_NEXT_TRY_S = 3.0
"""Request timeout if another server can take over from a failed one."""
_ORDERED_HEARTBEAT_S = 0.5
_REPLY_TOKENS = 9


class AlreadyStored(Exception):
    """The subject holds a single message, and another one was stored first."""


class StreamRefusal(msgspec.Struct, frozen=True):
    """Why the server refused a call on a stream."""

    err_code: int = 0
    description: str = ""


class PublishAck(msgspec.Struct, frozen=True):
    """The server's answer to a publish."""

    seq: int = 0
    """Sequence of the stored message."""
    duplicate: bool = False
    """Whether the stored message is an earlier one with the same id."""
    error: StreamRefusal | None = None


_publish_ack = msgspec.json.Decoder(PublishAck)


def is_subject_taken(code: int | None, description: str | None) -> bool:
    """Whether a publish was refused because its subject already has its single message.

    The server uses one code for every refusal by a stream. Only the text distinguishes a full
    stream.
    """
    return code == _STORE_FAILED and _SUBJECT_TAKEN in (description or "")


def is_transient(error: Exception) -> bool:
    """Whether a call failed only because servers are unreachable or are electing a leader."""
    if isinstance(error, APIError) and error.err_code == _NO_PEERS:
        return True  # the servers have not found each other yet
    return isinstance(error, NatsTimeoutError | ServiceUnavailableError | NoRespondersError)


def position_of(message: Msg) -> tuple[int, float]:
    """Return a consumed message's stream sequence and the time when the stream stored it (Unix
    seconds).

    Both are parsed from the reply subject, `$JS.ACK.<stream>.<consumer>.<delivered>.<stream
    sequence>.<consumer sequence>.<nanoseconds>.<pending>`, which has two more tokens after `ACK` in
    newer versions.
    """
    tokens = message.reply.split(".")
    skip = 0 if len(tokens) == _REPLY_TOKENS else 2
    return int(tokens[5 + skip]), int(tokens[7 + skip]) / 1e9


@dataclass(slots=True)
class Link:
    """A connection to the mesh's streams."""

    client: MeshClient
    replicas: int = 1
    """Number of servers that store each stream."""
    timeout_s: float = field(init=False)
    """How long a request waits for its answer."""
    lag_s: float = field(init=False)
    """Maximum age in seconds of an answer from a server that no longer leads."""
    js: JetStreamContext = field(init=False)

    def __post_init__(self) -> None:
        # A single server is worth waiting for; with several, another one takes over quickly.
        self.timeout_s = _REQUEST_TIMEOUT_S if self.replicas == 1 else _NEXT_TRY_S
        self.lag_s = 0.0 if self.replicas == 1 else LAG_S
        self.js = self.client.jetstream(timeout=self.timeout_s)

    async def store(
        self,
        subject: str,
        message: object,
        msg_id: str | None,
        headers: dict[str, str] | None,
        content_type: str = MSGPACK,
    ) -> PublishAck:
        """Publish to a stream. Returns: the server's answer, once it has stored the message.

        Args:   msg_id: the stream stores only the first of several messages with the same id.
        Raises: AlreadyStored: the subject holds one message, and another one was first.
                ResourceError: the message was not stored in time, or the stream is full.
        """
        all_headers = {CONTENT_TYPE: content_type, **(headers or {})}
        if msg_id:
            all_headers["Nats-Msg-Id"] = msg_id
        try:
            payload = encode(message, content_type)
            answer = await self.client.ask_server(subject, payload, self.timeout_s, all_headers)
        except (NatsTimeoutError, nats.errors.Error) as error:
            raise ResourceError(f"{subject} was not stored: {error!r}") from error
        ack = _publish_ack.decode(answer.data)
        if ack.error is None:
            return ack
        if is_subject_taken(ack.error.err_code, ack.error.description):
            raise AlreadyStored(f"{subject} already holds a message")
        raise ResourceError(
            f"{subject} was not stored: {ack.error.description}", code=Code.RESOURCE_EXHAUSTED
        )


async def ordered(
    link: Link, stream: str, subject: str, config: api.ConsumerConfig
) -> AsyncGenerator[Msg, None]:
    """Yield the messages of a stream in order, forever.

    After a restart of the server, some messages may be repeated.
    """
    subscription = await _ordered_subscription(link, stream, subject, config)
    try:
        async for message in each(subscription):
            yield message
    finally:
        # If the connection is closed or draining, the subscription ends with it.
        with suppress(nats.errors.Error):
            await subscription.unsubscribe()


async def _ordered_subscription(
    link: Link, stream: str, subject: str, config: api.ConsumerConfig
) -> JetStreamContext.PushSubscription:
    while True:
        try:
            return await link.js.subscribe(
                subject,
                stream=stream,
                ordered_consumer=True,
                config=config,
                idle_heartbeat=_ORDERED_HEARTBEAT_S,
            )
        except (NatsTimeoutError, nats.errors.Error) as error:
            if not is_transient(error) or link.client.is_closed:
                raise
            log.warning("cannot create a consumer on %s yet: %r", stream, error)
            await asyncio.sleep(PAUSE_S)
