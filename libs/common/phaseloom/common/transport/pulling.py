"""A shared consumer of a stream whose replicas request messages instead of being sent them.

Each replica has one open request for messages. It requests more only when it has finished enough of
those that it received. So a stream's backlog waits in the stream, and neither delays what comes
from other streams over the same connection nor fills memory. A request ends after `_REQUEST_S`, so
a replica that hangs soon gets nothing more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

import msgspec
import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import api
from nats.js.errors import NotFoundError

from phaseloom.common.contract.streams import MAX_PAYLOAD_BYTES
from phaseloom.common.transport.link import PAUSE_S, Link, is_transient
from phaseloom.common.transport.natsclient import hand_over

log = logging.getLogger(__name__)

WINDOW = 32
"""Maximum messages that a replica has received and not finished."""
WINDOW_BYTES = MAX_PAYLOAD_BYTES + 2**18
"""Maximum bytes of one request: a message of maximum size with its headers, or many small ones."""
_REQUEST_S = 2.0
"""How long the server holds a request for which it has too few messages."""
_LATE_S = 1.0
"""How late the end of a request may be reported. Then the server has lost the request, for example
with its restart."""
_NANOSECONDS = 1_000_000_000
_ENDED_USUALLY = ("404", "408", "409")
"""Status of a request that ended early: no messages within its time, or too many bytes."""

_json = msgspec.json.Encoder()


class PullConsumer:
    """One replica's part in a durable consumer. Create it with `open`."""

    def __init__(
        self, link: Link, stream: str, durable: str, handler: Callable[[Msg], None]
    ) -> None:
        self._link = link
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{durable}"
        self._handler = handler
        self._inbox = link.client.new_inbox()
        self._subscription: Subscription
        self._requested = 0
        """Messages that the open request may still bring; 0: there is no open request."""
        self._unfinished = 0
        self._unfinished_bytes = 0
        self._is_free = asyncio.Event()
        """Set when a request may be due."""

    @classmethod
    async def open(
        cls,
        link: Link,
        stream: str,
        durable: str,
        handler: Callable[[Msg], None],
        *,
        ack_wait_s: float,
    ) -> PullConsumer:
        """Subscribe. The caller must keep `run` running and call `finished` for every message.

        Args:   durable: the consumer's name. Replicas with the same one share the messages.
                handler: called with each message as it is read from the connection. It must not
                    block; it starts a task for slow work.
                ack_wait_s: an unacknowledged message is redelivered after this time.
        """
        config = api.ConsumerConfig(
            durable_name=durable,
            ack_policy=api.AckPolicy.EXPLICIT,
            ack_wait=ack_wait_s,
            max_ack_pending=-1,  # the replicas' windows are the bound
        )
        while True:
            try:
                await _ensure_consumer(link, stream, config)
                break
            except (nats.errors.TimeoutError, nats.errors.Error) as error:
                if not is_transient(error):
                    raise
                log.warning("cannot create consumer %s yet: %r", durable, error)
                await asyncio.sleep(PAUSE_S)
        consumer = cls(link, stream, durable, handler)
        consumer._subscription = await link.client.subscribe(consumer._inbox)
        hand_over(consumer._subscription, consumer._receive)
        return consumer

    async def run(self) -> None:
        """Request messages until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self._is_free.clear()
            room = WINDOW - self._unfinished
            if 2 * room < WINDOW or 2 * self._unfinished_bytes > WINDOW_BYTES:
                await self._is_free.wait()
                continue
            self._requested = room
            request = {
                "batch": room,
                "max_bytes": WINDOW_BYTES,
                "expires": int(_REQUEST_S * _NANOSECONDS),
            }
            with suppress(nats.errors.Error):  # the connection is lost: try again until it is back
                await self._link.client.publish(
                    self._subject, _json.encode(request), reply=self._inbox
                )
            until_s = loop.time() + _REQUEST_S + _LATE_S
            while self._requested and loop.time() < until_s:
                self._is_free.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(until_s):
                        await self._is_free.wait()

    def finished(self, message: Msg) -> None:
        """Make room for another message."""
        self._unfinished -= 1
        self._unfinished_bytes -= len(message.data)
        self._is_free.set()

    async def stop(self) -> None:
        """Receive what the server has sent, and no more. `run` must have ended."""
        await self._subscription.drain()  # type: ignore[no-untyped-call]

    def _receive(self, message: Msg) -> None:
        status = (message.headers or {}).get("Status") if not message.reply else None
        if status is not None or not message.reply:
            self._end_request(status or "")
            return
        self._requested = max(0, self._requested - 1)
        self._unfinished += 1
        self._unfinished_bytes += len(message.data)
        if not self._requested:
            self._is_free.set()
        self._handler(message)

    def _end_request(self, status: str) -> None:
        if status in _ENDED_USUALLY:
            self._requested = 0
            self._is_free.set()
            return
        # Nobody serves the consumer now, for example during an election: try again a little later.
        asyncio.get_running_loop().call_later(PAUSE_S, self._end_request, _ENDED_USUALLY[0])


async def _ensure_consumer(link: Link, stream: str, config: api.ConsumerConfig) -> None:
    """Create or update the consumer. One of an earlier version, which sends messages unrequested,
    is replaced."""
    durable = config.durable_name or ""
    with suppress(NotFoundError):
        existing = await link.js.consumer_info(stream, durable)
        if existing.config.deliver_subject is None:
            config = existing.config.evolve(ack_wait=config.ack_wait)
        else:
            first = existing.ack_floor.stream_seq + 1 if existing.ack_floor else 1
            start = api.DeliverPolicy.BY_START_SEQUENCE
            config = config.evolve(deliver_policy=start, opt_start_seq=first)
            await link.js.delete_consumer(stream, durable)
    await link.js.add_consumer(stream, config)
