"""nats-py's client with a shorter way for the messages of an operation's path.

In all else (connecting, reconnecting, subscriptions, draining) it is nats-py's client. The methods
that are overridden were measured to be most of an operation's cost; each falls back to nats-py
where its case is not the common one. They save a pass through the event loop per message on every
side:

- A message is written to the connection at once. The other messages that the same pass of the loop
  publishes are written together at the end of the pass. Nothing is handed to a flushing task.
- Messages are cut out of the bytes that were read without regular expressions, and without a copy
  for each.
- A request's answer goes from the reading task to whoever waits for it, not through a queue and a
  second task. Giving up a request that is just being answered loses no cancellation.
- A client that is closed has ended its attempts to reconnect.
- An error with which the server ends a connection does not end the client: it connects again.
- `hand_over` and `each` take a subscription's messages without a task per subscription or message.

The client uses nats-py's internals, hence the bound on its version in pyproject.toml.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
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
"""How the subjects begin that only the server answers on."""
_OF_NATS_PY = ("permissions violation", "stale connection")
"""In the server's errors that leave a client connected, or have nats-py connect again."""
_GIVEN_UP = (None, None)
_MAX_UNSENT_BYTES = 2 * 2**20
"""Most bytes in the connection's buffer; above that a publisher waits until the server reads on."""


class _Reader(Parser):
    """A parser that takes whole messages itself and leaves the server's commands to nats-py's."""

    def __init__(self, client: MeshClient) -> None:
        super().__init__(client)
        self._client = client

    def reset(self) -> None:
        super().reset()
        self._wanted = 0
        """Bytes up to the end of the message that `buf` begins with; 0 where that is not known."""
        self._is_reset = True

    async def parse(self, data: bytes = b"") -> None:
        is_all = len(data) < DEFAULT_BUFFER_SIZE
        await self._take(data)
        # This is awaited between two reads of the connection.
        if self._client.read_pause_s and is_all:
            await asyncio.sleep(self._client.read_pause_s)

    async def _take(self, data: bytes) -> None:
        if self.buf:
            self.buf += data
            if len(self.buf) < self._wanted:
                return  # the message is not whole yet: do not parse it again for every piece
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
                        return  # the connection is over, and with it what is left of its data
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
    """nats-py's client, with shorter ways to publish, request and read; see the module.

    `request` has nats-py's contract.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ps = _Reader(self)
        self.read_pause_s = 0.0
        """The pause after everything that had come was read, in which more gathers. It adds as much
        latency: for a process that follows a stream and for which nobody waits."""
        self._answers: dict[bytes, tuple[asyncio.Future[Msg], list[Msg] | None]] = {}
        """For each open request its answer, and the list for messages that come before its last.

        The list is None where the answer is a single message.
        """
        self._of_server: set[asyncio.Future[Msg]] = set()
        """The answers among them that the server gives, and not a service."""
        self._inbox = ""
        self._inbox_bytes = 0
        self._inbox_sid = -1
        self._numbers = itertools.count(1)
        self._gathered: list[bytes] = []
        """The commands to write at the end of this pass of the event loop."""
        self._is_gathering = False
        self.denial: ErrorInfo | None = None
        """Why the servers that the client was connected to do not take it again; None: they do, or
        it is not known."""
        self.denied = asyncio.Event()
        """Whether there is a denial."""

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
        """Like `request`, where the server itself answers, as it does to a publish to a stream.

        Raises: nats.errors.TimeoutError: also as soon as the connection is lost: the server that
                was asked never answers, and what was asked may be asked again.
        """
        return _answered(await self._ask(subject, payload, timeout, headers, of_server=True))

    async def request_many(
        self, subject: str, payload: bytes = b"", timeout: float = 0.5
    ) -> list[Msg]:
        """Like `ask_server`, for an answer of several messages, of which the last has a status.

        Returns: all of them, the one with the status included.
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
        """Send a request and wait for its answer's last message.

        Args: before: a list that takes the messages before the one with a status; None: the first
                  message that comes is the answer.
              of_server: whether the server answers, and no service: the answer is lost with the
                  connection.
        """
        if not self._inbox:
            await self._open_inbox()
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

    async def _open_inbox(self) -> None:
        inbox = f"{self.new_inbox()}."
        subscribing = self.subscribe(f"{inbox}*")
        # Set before the first wait: two first requests at once share the inbox.
        self._inbox, self._inbox_bytes = inbox, len(inbox)
        self._inbox_sid = (await subscribing)._id

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
        # The first line tells a status: a header of that name may be the publisher's.
        if before is None or (headers and headers.startswith(_STATUS_START)):
            answer.set_result(message)
        else:
            before.append(message)

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        try:
            if headers.startswith(_HEADER_START):
                return _headers(headers)
            if headers.startswith(_STATUS_START) and headers.count(b"\r\n") == _STATUS_LINES:
                return _status(headers)
        except ValueError:
            pass  # nats-py knows more forms
        parsed: dict[str, str] | None = await super()._process_headers(headers)
        return parsed

    # --- writing --------------------------------------------------------------------------------

    async def _send_publish(
        self,
        subject: str,
        reply: str,
        payload: bytes,
        payload_size: int,
        headers: dict[str, Any] | None,
    ) -> None:
        head = "" if headers is None else _head(headers)
        writer = self._free_writer()
        if head is None or writer is None:
            await super()._send_publish(subject, reply, payload, payload_size, headers)
            return
        if head:
            size = len(head) + payload_size
            line = f"HPUB {subject} {reply} {len(head)} {size}\r\n{head}"
        else:
            line = f"PUB {subject} {reply} {payload_size}\r\n"
        self._write(writer, b"%b%b\r\n" % (line.encode(), payload))

    def _write(self, writer: asyncio.WriteTransport, command: bytes) -> None:
        if self._is_gathering:
            self._gathered.append(command)
            return
        writer.write(command)
        self._is_gathering = True
        asyncio.get_running_loop().call_soon(self._write_gathered)

    def _write_gathered(self) -> None:
        self._is_gathering = False
        if not self._gathered:
            return
        commands, self._gathered = b"".join(self._gathered), []
        writer = self._free_writer()
        if writer is not None:
            writer.write(commands)
        else:
            self._pending.append(commands)
            self._pending_data_size += len(commands)

    async def _send_ping(self, future: asyncio.Future[Any] | None = None) -> None:
        # A ping's answer says that the server has taken everything sent before it. nats-py would
        # write the ping ahead of the commands that wait for its flushing task.
        self._write_gathered()
        if self._pending and self._transport is not None:
            self._transport.writelines(self._pending)
            self._pending, self._pending_data_size = [], 0
        await super()._send_ping(future)

    def deny(self, why: ErrorInfo | None) -> None:
        """Tell whoever uses the client that the servers do not take it; None: that they do."""
        self.denial = why
        if why is None:
            self.denied.clear()
        else:
            self.denied.set()

    async def _process_err(self, err_msg: str) -> None:
        if not self.is_connected or any(each in err_msg.lower() for each in _OF_NATS_PY):
            await super()._process_err(err_msg)
            return
        # nats-py would close the client for good, as after a reload of the server's settings.
        error = nats.errors.Error(f"nats: {err_msg}")
        await self._error_cb(error)
        await self._process_op_err(error)

    async def _attempt_reconnect(self) -> None:
        for answer in self._of_server:
            _time_out(answer)
        # nats-py would wait until what is unsent was sent, to a server that may stand still.
        self._abort_connection()
        await super()._attempt_reconnect()

    async def _select_next_server(self) -> None:
        # nats-py leaves the connection of an attempt that a server has denied open.
        self._abort_connection()
        await super()._select_next_server()

    def _abort_connection(self) -> None:
        tcp: Any = self._transport
        if tcp is not None and tcp._io_writer is not None:
            tcp._io_writer.transport.abort()

    async def close(self) -> None:
        self._write_gathered()
        await super().close()

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        await super()._close(status, do_cbs)
        reconnecting = self._reconnection_task
        if reconnecting in (None, asyncio.current_task()) or reconnecting.done():
            return
        # nats-py cancels it once. On Python 3.11 an attempt that fails, or comes through, at that
        # moment swallows this and goes on, and connects once the server is back.
        await lifecycle.end([reconnecting])
        self._status = Client.CLOSED
        if self._transport is not None:
            self._transport.close()  # type: ignore[no-untyped-call]

    def _free_writer(self) -> asyncio.WriteTransport | None:
        """The connection, if it can be written to at once; else None.

        It cannot where nats-py still has commands to write first, or the buffer is full.
        """
        if self._pending or self._status != Client.CONNECTED:
            return None
        tcp: Any = self._transport
        writer: asyncio.WriteTransport = tcp._io_writer.transport
        return writer if writer.get_write_buffer_size() < _MAX_UNSENT_BYTES else None


def _headers(block: bytes) -> dict[str, str]:
    """The headers of a block without a status.

    Raises: ValueError: a line is not of the form `Name: value`.
    """
    lines = block[len(_HEADER_START) : -4].decode().split("\r\n")
    pairs = [line.split(": ", 1) for line in lines]
    return {name: value.strip() for name, value in pairs}


def _status(block: bytes) -> dict[str, str]:
    """The headers of a block that has nothing but a status."""
    status, _, description = block[len(_STATUS_START) : -4].decode().partition(" ")
    return {"Status": status, "Description": description}


def _head(headers: dict[str, Any]) -> str | None:
    """The header block of a message; None where a name or a value needs nats-py's care."""
    # `strip` makes a plain string of a name from nats-py's enumeration, which formats otherwise.
    lines = [f"{name.strip()}: {value}\r\n" for name, value in headers.items()]
    head = "".join(lines)
    if not head.isascii() or head.count("\n") != len(lines) or head.count("\r") != len(lines):
        return None
    return f"{_HEADER_START.decode()}{head}\r\n"


def _answered(message: Msg) -> Msg:
    """The answer. Raises: NoRespondersError: it says that nobody listens on the subject."""
    if message.headers and message.headers.get("Status") == _NO_RESPONDERS:
        raise nats.errors.NoRespondersError
    return message


def _time_out(answer: asyncio.Future[Msg]) -> None:
    if not answer.done():
        answer.set_exception(nats.errors.TimeoutError())


# --- taking messages ------------------------------------------------------------------------------


class _Direct(asyncio.Queue[Msg]):
    """A stand-in for a subscription's queue, which hands each message over as it is read."""

    def __init__(self, take: Callable[[Msg], None]) -> None:
        super().__init__()
        self._take = take

    def put_nowait(self, item: Msg) -> None:
        try:
            self._take(item)
        except Exception as error:
            # Raised in the client's reading task, it would end the connection's.
            log.error("a message handler failed: %r", error, exc_info=error)


def hand_over(subscription: Subscription, take: Callable[[Msg], None]) -> None:
    """Have `take` called with every message of a subscription that was made without a callback.

    `take` is called in the order of arrival, from the task that reads the connection. It must not
    block, and starts a task for whatever takes time.
    """
    waiting = subscription._pending_queue
    direct = _Direct(take)
    receiving = _receiving(subscription)
    receiving._pending_bytes_limit = 0  # nothing is ever pending
    receiving._pending_queue = subscription._pending_queue = direct
    while not waiting.empty():
        direct.put_nowait(waiting.get_nowait())


class _End:
    """A stand-in for a subscription's iterator, which ends `each` when the subscription ends."""

    def __init__(self, queue: asyncio.Queue[Any]) -> None:
        self._queue = queue

    def _cancel(self) -> None:
        self._queue.put_nowait(None)


async def each(subscription: Subscription) -> AsyncGenerator[Msg, None]:
    """The messages of a subscription that was made without a callback.

    They end when the subscription or its connection ends.
    """
    queue: asyncio.Queue[Any] = subscription._pending_queue
    end: Any = _End(queue)
    _receiving(subscription)._message_iterator = subscription._message_iterator = end
    while (message := await queue.get()) is not None:
        queue.task_done()
        subscription._pending_size -= len(message.data)
        yield message


def _receiving(subscription: Subscription) -> Subscription:
    """The subscription that the client puts messages in; a JetStream subscription is a copy."""
    if isinstance(subscription, JetStreamContext.PushSubscription):
        original: Subscription = subscription._sub
        return original
    return subscription
