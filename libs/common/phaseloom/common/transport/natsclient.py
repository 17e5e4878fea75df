"""nats-py's client with faster paths for the messages of an operation.

Everything else (connecting, writing, subscriptions, draining) is nats-py's. The faster paths fall
back to nats-py outside the common case:

- Messages are parsed from the received bytes without regular expressions and without copying each.
- The answer to a request goes directly from the reading task to the waiting task, without a queue
  and a second task. Cancelling a request at the moment of its answer does not lose the
  cancellation.
- Closing the client also ends its reconnection attempts.
- If the server ends a connection with an error, the client reconnects instead of closing.
- `hand_over` and `each` receive a subscription's messages without a task per subscription or
  message.

The client uses nats-py's internals, so pyproject.toml restricts its version.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import nats.errors
from nats.aio.client import DEFAULT_BUFFER_SIZE, Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext
from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

from phaseloom.common.contract.errors import ErrorInfo
from phaseloom.common.process import lifecycle

log = logging.getLogger(__name__)

_HEADER_START = b"NATS/1.0\r\n"
_STATUS_START = b"NATS/1.0 "
_STATUS_LINES = 2
_NO_RESPONDERS = "503"
_OF_SERVER = ("$JS.", "$KV.")
"""Prefixes of subjects on which only the server answers."""
_OF_NATS_PY = ("permissions violation", "stale connection")
"""Parts of server errors that nats-py handles itself, by staying connected or reconnecting."""
_GIVEN_UP = (None, None)
_YIELD_EVERY_S = 0.005


class _Reader(Parser):
    """A parser that handles complete messages itself and leaves the server's other commands to
    nats-py."""

    def __init__(self, client: MeshClient) -> None:
        super().__init__(client)
        self._client = client

    def reset(self) -> None:
        super().reset()
        self._wanted = 0
        """Bytes up to the end of the message at the start of `buf`; 0: unknown."""
        self._is_reset = True

    async def parse(self, data: bytes = b"") -> None:
        is_all = len(data) < DEFAULT_BUFFER_SIZE
        await self._take(data)
        # The client awaits this between two reads of the connection.
        if self._client.read_pause_s and is_all:
            await asyncio.sleep(self._client.read_pause_s)

    async def _take(self, data: bytes) -> None:
        if self.buf:
            self.buf += data
            if len(self.buf) < self._wanted:
                return  # the message is incomplete: do not parse it again for every chunk
            data = bytes(self.buf)
            self.buf.clear()
        self._wanted = 0
        self._is_reset = False
        start = 0
        while start < len(data) and self.state == AWAITING_CONTROL_LINE:
            end = data.find(b"\r\n", start)
            if end < 0:
                break
            match data[start:end].split(b" "):
                case [b"MSG", subject, sid, *reply, size]:
                    head = 0
                case [b"HMSG", subject, sid, *reply, head_size, size]:
                    head = int(head_size)
                case _:
                    await super().parse(data[start : end + 2])
                    if self._is_reset:
                        return  # the connection has ended: drop its remaining data
                    start = end + 2
                    continue
            first, last = end + 2, end + 2 + int(size)
            if last + 2 > len(data):
                self._wanted = last + 2 - start
                break
            body = first + head
            start = last + 2
            await self._client._process_msg(
                int(sid), subject, reply[0] if reply else b"", data[body:last], data[first:body]
            )
        self.buf += data[start:]


class MeshClient(Client):
    """nats-py's client with faster ways to publish, request and read; see the module.

    `request` has the same contract as in nats-py.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ps = _Reader(self)
        self.read_pause_s = 0.0
        """Pause after all available data has been read, so that more accumulates. It adds the same
        latency, so use it only in processes that follow a stream and that no other process waits
        for."""
        self._answers: dict[bytes, tuple[asyncio.Future[Msg], list[Msg] | None]] = {}
        """For each open request: its answer, and a list for the messages before the last one.

        The list is None if the answer is a single message.
        """
        self._of_server: set[asyncio.Future[Msg]] = set()
        """The answers among them that the server gives, and not a service."""
        self._inbox = ""
        self._inbox_bytes = 0
        self._inbox_sid = -1
        self._numbers = itertools.count(1)
        self.denial: ErrorInfo | None = None
        """Why the servers reject the client after it was connected; None: they do not, or it is
        unknown."""
        self.denied = asyncio.Event()
        """Set while there is a denial."""

    # --- requests -------------------------------------------------------------------------------

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,
        old_style: bool = False,
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        if subject.startswith(_OF_SERVER):
            return await self.ask_server(subject, payload, timeout, headers)
        return _answered(await self._ask(subject, payload, timeout, headers))

    async def ask_server(
        self,
        subject: str,
        payload: bytes,
        timeout: float,
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        """Like `request`, for requests that the server itself answers, such as a publish to a
        stream.

        Raises: nats.errors.TimeoutError: also as soon as the connection is lost. That server will
                never answer, and the request may be repeated.
        """
        return _answered(await self._ask(subject, payload, timeout, headers, of_server=True))

    async def request_many(
        self, subject: str, payload: bytes = b"", timeout: float = 0.5
    ) -> list[Msg]:
        """Like `ask_server`, for an answer of several messages. The last one has a status.

        Returns: all messages, including the one with the status.
        """
        before: list[Msg] = []
        last = await self._ask(subject, payload, timeout, None, before, of_server=True)
        return [*before, _answered(last)]

    async def _ask(
        self,
        subject: str,
        payload: bytes,
        timeout: float,
        headers: dict[str, Any] | None,
        before: list[Msg] | None = None,
        *,
        of_server: bool = False,
    ) -> Msg:
        """Send a request and wait for the last message of its answer.

        Args:   before: a list for the messages before the one with a status; None: the first
                    message is the answer.
                of_server: whether the server answers, and not a service. Such an answer is lost
                    with the connection.
        """
        if not self._inbox:
            inbox = f"{self.new_inbox()}."
            subscribing = self.subscribe(f"{inbox}*")
            # Set before the first await, so that two concurrent first requests share the inbox.
            self._inbox, self._inbox_bytes = inbox, len(inbox)
            self._inbox_sid = (await subscribing)._id
        loop = asyncio.get_running_loop()
        token = str(next(self._numbers))
        answer: asyncio.Future[Msg] = loop.create_future()
        self._answers[token.encode()] = (answer, before)
        timer = loop.call_later(timeout, _time_out, answer)
        if of_server:
            self._of_server.add(answer)
        try:
            await self.publish(subject, payload, reply=self._inbox + token, headers=headers)
            return await answer
        finally:
            timer.cancel()
            self._of_server.discard(answer)
            del self._answers[token.encode()]

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        if sid != self._inbox_sid:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        answer, before = self._answers.get(subject[self._inbox_bytes :], _GIVEN_UP)
        if answer is None or answer.done():
            return
        parsed = await self._process_headers(headers)
        message = Msg(self, subject.decode(), "", data, parsed)
        # Only the first line shows a status: the publisher may set a header named Status.
        if before is None or (headers and headers.startswith(_STATUS_START)):
            answer.set_result(message)
        else:
            before.append(message)

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        try:
            if headers.startswith(_HEADER_START):
                lines = headers[len(_HEADER_START) : -4].decode().split("\r\n")
                pairs = [line.split(": ", 1) for line in lines]
                return {name: value.strip() for name, value in pairs}
            if headers.startswith(_STATUS_START) and headers.count(b"\r\n") == _STATUS_LINES:
                return _status(headers)
        except ValueError:
            pass  # nats-py parses more forms
        parsed: dict[str, str] | None = await super()._process_headers(headers)
        return parsed

    # --- the connection -----------------------------------------------------------------------

    async def is_answering(self, within_s: float) -> bool:
        """Return whether there is a connection, and the server answers a ping in time.

        nats-py's `flush` would break the connection if the answer came later.
        """
        if not self.is_connected:
            return False
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        await self._send_ping(answer)
        await asyncio.wait([answer], timeout=within_s)
        return answer.done()

    async def _send_ping(self, future: asyncio.Future[Any] | None = None) -> None:
        # The answer to a ping confirms everything sent before it, but nats-py would write the ping
        # before the commands that wait for its flushing task.
        if self._pending and self._transport is not None:
            self._transport.writelines(self._pending)
            self._pending, self._pending_data_size = [], 0
        await super()._send_ping(future)

    def deny(self, why: ErrorInfo | None) -> None:
        """Record why the servers reject this client; None: they no longer do."""
        self.denial = why
        if why is None:
            self.denied.clear()
        else:
            self.denied.set()

    async def _process_err(self, err_msg: str) -> None:
        if not self.is_connected or any(each in err_msg.lower() for each in _OF_NATS_PY):
            await super()._process_err(err_msg)
            return
        # nats-py would close the client permanently, for example after the server reloads its
        # settings.
        error = nats.errors.Error(f"nats: {err_msg}")
        await self._error_cb(error)
        await self._process_op_err(error)

    async def _attempt_reconnect(self) -> None:
        for answer in self._of_server:
            _time_out(answer)
        # nats-py would wait until unsent data is sent, but the server may be frozen.
        self._abort_connection()
        await super()._attempt_reconnect()

    async def _select_next_server(self) -> None:
        # nats-py leaves the connection open if a server denied the attempt.
        self._abort_connection()
        await super()._select_next_server()

    def _abort_connection(self) -> None:
        tcp: Any = self._transport
        if tcp is not None and tcp._io_writer is not None:
            tcp._io_writer.transport.abort()

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        await super()._close(status, do_cbs)
        reconnecting = self._reconnection_task
        if reconnecting in (None, asyncio.current_task()) or reconnecting.done():
            return
        # nats-py cancels this task once. On Python 3.11, an attempt that fails or succeeds at that
        # moment swallows the cancellation, continues, and connects once the server is back.
        await lifecycle.end([reconnecting])
        self._status = Client.CLOSED
        if self._transport is not None:
            self._transport.close()  # type: ignore[no-untyped-call]


def _status(block: bytes) -> dict[str, str]:
    status, _, description = block[len(_STATUS_START) : -4].decode().partition(" ")
    return {"Status": status, "Description": description}


def _answered(message: Msg) -> Msg:
    """Return the answer. Raises: NoRespondersError: it reports that nobody listens on the
    subject."""
    if message.headers and message.headers.get("Status") == _NO_RESPONDERS:
        raise nats.errors.NoRespondersError
    return message


def _time_out(answer: asyncio.Future[Msg]) -> None:
    if not answer.done():
        answer.set_exception(nats.errors.TimeoutError())


# --- taking messages ------------------------------------------------------------------------------


class _Direct(asyncio.Queue[Msg]):
    """A replacement for a subscription's queue that passes each message on as it is read."""

    def __init__(self, take: Callable[[Msg], None]) -> None:
        super().__init__()
        self._take = take

    def put_nowait(self, item: Msg) -> None:
        try:
            self._take(item)
        except Exception as error:
            # If this were raised in the client's reading task, it would end the connection.
            log.error("a message handler failed: %r", error, exc_info=error)


def hand_over(subscription: Subscription, take: Callable[[Msg], None]) -> None:
    """Call `take` with every message of a subscription that was made without a callback.

    The task that reads the connection calls `take`, in the order of arrival. It must not block, and
    starts a task for slow work.
    """
    waiting = subscription._pending_queue
    direct = _Direct(take)
    receiving = _receiving(subscription)
    receiving._pending_bytes_limit = 0  # nothing is ever pending
    receiving._pending_queue = subscription._pending_queue = direct
    while not waiting.empty():
        direct.put_nowait(waiting.get_nowait())


class _End:
    """A replacement for a subscription's iterator. It ends `each` when the subscription ends."""

    def __init__(self, queue: asyncio.Queue[Any]) -> None:
        self._queue = queue

    def _cancel(self) -> None:
        self._queue.put_nowait(None)


async def each(subscription: Subscription) -> AsyncGenerator[Msg, None]:
    """Yield the messages of a subscription that was made without a callback.

    They end when the subscription or its connection ends. Reading a backlog lets the event loop run
    other work every few milliseconds.
    """
    queue: asyncio.Queue[Any] = subscription._pending_queue
    yields_at_s = time.monotonic() + _YIELD_EVERY_S
    end: Any = _End(queue)
    _receiving(subscription)._message_iterator = subscription._message_iterator = end
    while (message := await queue.get()) is not None:
        queue.task_done()
        subscription._pending_size -= len(message.data)
        yield message
        # As long as messages wait, getting one does not let anything else run.
        if time.monotonic() >= yields_at_s:
            await asyncio.sleep(0)
            yields_at_s = time.monotonic() + _YIELD_EVERY_S


def _receiving(subscription: Subscription) -> Subscription:
    """Return the subscription that the client puts messages into; a JetStream subscription is a
    copy of it."""
    if isinstance(subscription, JetStreamContext.PushSubscription):
        original: Subscription = subscription._sub
        return original
    return subscription
