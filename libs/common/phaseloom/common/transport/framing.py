"""Bidirectional calls with file descriptors over a Unix stream socket.

A frame is a little-endian uint32 length and a MessagePack `Frame`. Its file descriptors are sent by
SCM_RIGHTS with its first byte. Used between the state manager, agents and ranks of one node.

Invariants: frames never interleave; every received descriptor is passed to exactly one owner or
closed; once `closed` completes, no call is pending. A peer that violates the protocol is
disconnected, and the reason is logged. asyncio's transports cannot carry descriptors, so a `Peer`
reads and writes its socket itself (`add_reader` and `add_writer`, which uvloop supports).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import struct
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from phaseloom.common.contract.errors import (
    CallerError,
    Code,
    PhaseloomError,
    ResourceError,
    to_exception,
    unexpected_error,
)
from phaseloom.common.contract.state_rank import Failed

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 16 * 1024 * 1024
MAX_FDS = 8
"""Maximum number of file descriptors attached to one frame."""
MAX_IN_FLIGHT = 1024
"""Maximum number of concurrent requests of one peer. A peer that exceeds it is disconnected."""
MAX_UNSENT_BYTES = 4 * MAX_FRAME_BYTES
"""Maximum number of bytes that a peer may leave unread. A peer that exceeds it is disconnected."""
MAX_PEERS = 256
"""Maximum number of connections of one server. Further ones wait in the listen queue."""
MAX_PATH_BYTES = 107
"""Maximum length of a Unix socket's path (Linux)."""

_READ_BYTES = 64 * 1024
"""Bytes per read. For larger buffers malloc would call the system every time."""
_CUT_OFF = int(socket.MSG_CTRUNC)  # as a flag of the enumeration it costs a microsecond
_LENGTH = struct.Struct("<I")
_LOOK_EVERY_S = 1.0
"""Pause between two looks at a socket's file, and between attempts while the machine is short of
something."""
_CREDENTIALS = struct.Struct("iII")
"""Pid, uid and gid of the connected process (`ucred`)."""

Body = TypeVar("Body")
Handler = Callable[[Body, list[int]], Awaitable[tuple[Body, Sequence[int]]]]


class Frame(msgspec.Struct, Generic[Body], frozen=True, array_like=True):
    """One message on the wire: a request, or the answer to one."""

    call: int
    """Number of the request, assigned by its sender. The answer has the same number."""
    answer: bool
    body: Body
    num_fds: int = 0


class _ProtocolError(Exception):
    """The peer violated the protocol."""


@dataclass(slots=True)
class _Unsent:
    data: memoryview
    fds: list[int]


def close_fds(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


class Peer(Generic[Body]):
    """One end of a connection. `body_type` is the union of its messages and must contain `Failed`.

    `handler` answers the other end's requests, each in its own task. It owns the descriptors it
    receives. The descriptors it returns stay its own, since they are duplicated. If it raises, the
    answer is `Failed`. When the connection ends, running handlers may finish, so that their effects
    are complete, and their answers are dropped. `close` cancels them.
    """

    def __init__(
        self,
        sock: socket.socket,
        body_type: Any,
        handler: Handler[Body] | None = None,
        *,
        max_fds: int = MAX_FDS,
    ) -> None:
        sock.setblocking(False)
        self.handler = handler
        self.max_fds = max_fds
        """Maximum number of descriptors in one frame from the other end, which is otherwise
        disconnected."""
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[str] = self._loop.create_future()
        """Completes when the connection ends; the result is the reason. It never fails."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Frame[Body]] = msgspec.msgpack.Decoder(
            Frame[body_type]
        )
        self._last_call = 0
        self._pending: dict[int, asyncio.Future[tuple[Body, list[int]]]] = {}
        self._abandoned: set[int] = set()
        self._received = bytearray()
        self._received_fds: list[int] = []
        self._unsent: deque[_Unsent] = deque()
        self._unsent_bytes = 0
        self._is_waiting_to_write = False
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def connect(
        cls, path: str | Path, body_type: Any, handler: Handler[Body] | None = None
    ) -> Peer[Body]:
        """Connect to the server at `path` and start reading.

        Raises: ResourceError: no server listens there. CallerError: the path is too long for a
                socket.
        """
        _check_length(path)
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            raise to_exception(unexpected_error(error)) from error
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, str(path))
        except OSError as error:
            sock.close()
            raise ResourceError(f"cannot connect to {path}: {error}") from error
        except BaseException:
            sock.close()
            raise
        peer = cls(sock, body_type, handler)
        peer.start()
        return peer

    def start(self) -> None:
        """Start reading. Set `handler` first."""
        self._loop.add_reader(self._sock, self._on_readable)

    async def call(self, body: Body, fds: Sequence[int] = ()) -> tuple[Body, list[int]]:
        """Send a request. Returns: the answer and its descriptors, which the caller then owns.

        The caller keeps the `fds` that it sends. Cancelling only stops waiting; the other end is
        not notified.

        Raises: the error in a `Failed` answer. ResourceError: the connection ended first.
                CallerError: `body` exceeds the frame limit.
        """
        if self.closed.done():
            raise self._lost()
        self._last_call += 1
        number = self._last_call
        future: asyncio.Future[tuple[Body, list[int]]] = self._loop.create_future()
        self._pending[number] = future
        try:
            self._send(number, body, fds, answer=False)
            return await future
        except asyncio.CancelledError:
            if future.cancelled() and not self.closed.done():
                self._abandoned.add(number)  # its answer is still expected, and dropped
            elif not future.cancelled() and future.exception() is None:
                close_fds(future.result()[1])
            raise
        finally:
            self._pending.pop(number, None)

    async def close(self) -> None:
        """End the connection, cancel running handlers and wait for them. Idempotent."""
        self.cut("closed by this end")
        tasks = self._tasks - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def finish(self) -> None:
        """Wait until the connection has ended and every handler has finished."""
        await asyncio.wait([self.closed])
        while self._tasks:
            await asyncio.wait(self._tasks)

    def cut(self, reason: str) -> None:
        """End the connection at once, while running handlers continue. Idempotent."""
        if self.closed.done():
            return
        self._loop.remove_reader(self._sock)
        if self._is_waiting_to_write:
            self._loop.remove_writer(self._sock)
        self._sock.close()
        close_fds(self._received_fds)
        self._received_fds.clear()
        self._received.clear()
        for unsent in self._unsent:
            close_fds(unsent.fds)
        self._unsent.clear()
        self.closed.set_result(reason)
        for future in self._pending.values():
            if not future.done():
                future.set_exception(self._lost())

    def _lost(self) -> ResourceError:
        return ResourceError(
            f"the connection ended: {self.closed.result()}", remedy="connect again and retry"
        )

    # --- receiving ---

    def _on_readable(self) -> None:
        space = socket.CMSG_SPACE(self.max_fds * array("i").itemsize) if self.max_fds else 0
        try:
            chunk, ancillary, flags, _ = self._sock.recvmsg(
                _READ_BYTES, space, socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.cut(f"read failed: {error}")
            return
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                received = array("i")
                received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                self._received_fds.extend(received)
        if not chunk and not ancillary:
            self.cut("closed by the other end")
            return
        self._received += chunk
        try:
            if flags & _CUT_OFF:
                raise _ProtocolError(
                    "file descriptors were lost: there were more than "
                    f"{self.max_fds}, or this process has too many open files"
                )
            self._parse_frames()
            # Check after parsing: one read may contain the end of a frame and the start of another.
            if len(self._received_fds) > self.max_fds:
                raise _ProtocolError(f"more than {self.max_fds} file descriptors")
        except _ProtocolError as error:
            log.warning("disconnecting a peer that violated the protocol: %s", error)
            self.cut(f"protocol violated: {error}")

    def _parse_frames(self) -> None:
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            if length > MAX_FRAME_BYTES:
                raise _ProtocolError(f"a frame of {length} bytes, limit {MAX_FRAME_BYTES}")
            end = _LENGTH.size + length
            if len(self._received) < end:
                return
            payload = bytes(self._received[_LENGTH.size : end])
            del self._received[:end]
            try:
                frame = self._decoder.decode(payload)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise _ProtocolError(f"not a frame: {error}") from None
            if not 0 <= frame.num_fds <= min(self.max_fds, len(self._received_fds)):
                raise _ProtocolError(
                    f"expected {frame.num_fds} file descriptors, got {len(self._received_fds)}"
                )
            fds = self._received_fds[: frame.num_fds]
            del self._received_fds[: frame.num_fds]
            if frame.answer:
                self._handle_answer(frame, fds)
            elif len(self._tasks) >= MAX_IN_FLIGHT:
                close_fds(fds)
                raise _ProtocolError(f"more than {MAX_IN_FLIGHT} requests at once")
            else:
                task = self._loop.create_task(self._answer(frame.call, frame.body, fds))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            if self.closed.done():
                return
        # Descriptors arrive with the first byte of their frame, so none may be left over here.
        if not self._received and self._received_fds:
            raise _ProtocolError("file descriptors that no frame announced")

    def _handle_answer(self, frame: Frame[Body], fds: list[int]) -> None:
        future = self._pending.get(frame.call)
        if future is None or future.done():
            close_fds(fds)
            if future is None and frame.call not in self._abandoned:
                raise _ProtocolError(f"an answer to unknown call {frame.call}")
            self._abandoned.discard(frame.call)
        elif isinstance(frame.body, Failed):
            close_fds(fds)
            future.set_exception(to_exception(frame.body.error))
        else:
            future.set_result((frame.body, fds))

    async def _answer(self, number: int, body: Body, fds: list[int]) -> None:
        reply: Any
        reply_fds: Sequence[int] = ()
        try:
            if self.handler is None:
                close_fds(fds)
                raise CallerError("this end accepts no requests", code=Code.FAILED_PRECONDITION)
            reply, reply_fds = await self.handler(body, fds)
        except PhaseloomError as error:
            reply = Failed(error.info)
        except Exception as error:
            log.exception("%s failed", type(body).__name__)
            reply = Failed(unexpected_error(error))
        if self.closed.done():
            return
        try:
            self._send(number, reply, reply_fds, answer=True)
        except PhaseloomError as error:
            log.error("cannot send the answer to %s: %s", type(body).__name__, error)
            self._send(number, Failed(error.info), (), answer=True)

    # --- sending ---

    def _send(self, number: int, body: Any, fds: Sequence[int], *, answer: bool) -> None:
        payload = self._encoder.encode(Frame(number, answer, body, len(fds)))
        if len(payload) > MAX_FRAME_BYTES or len(fds) > MAX_FDS:
            raise CallerError(
                f"a frame must have at most {MAX_FRAME_BYTES} bytes and {MAX_FDS} file "
                f"descriptors, got {len(payload)} and {len(fds)}"
            )
        data = _LENGTH.pack(len(payload)) + payload
        self._unsent.append(_Unsent(memoryview(data), _duplicates(fds)))
        self._unsent_bytes += len(data)
        if self._unsent_bytes > MAX_UNSENT_BYTES:
            log.warning("disconnecting a peer that leaves %d bytes unread", self._unsent_bytes)
            self.cut("it does not read")
        elif not self._is_waiting_to_write:
            self._flush()

    def _flush(self) -> None:
        while self._unsent:
            unsent = self._unsent[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", unsent.fds))]
            try:
                sent = self._sock.sendmsg([unsent.data], rights if unsent.fds else [])
            except (BlockingIOError, InterruptedError):
                if not self._is_waiting_to_write:
                    self._loop.add_writer(self._sock, self._flush)
                    self._is_waiting_to_write = True
                return
            except OSError as error:
                self.cut(f"write failed: {error}")
                return
            # The descriptors went with the first byte, even if the frame is sent in several parts.
            close_fds(unsent.fds)
            unsent.fds.clear()
            self._unsent_bytes -= sent
            unsent.data = unsent.data[sent:]
            if not unsent.data:
                self._unsent.popleft()
        if self._is_waiting_to_write:
            self._loop.remove_writer(self._sock)
            self._is_waiting_to_write = False


def _duplicates(fds: Sequence[int]) -> list[int]:
    """Duplicate descriptors, because the caller may close its own before the socket sends them.

    Raises: ResourceError: RESOURCE_EXHAUSTED: this process has too many open files.
    """
    duplicates: list[int] = []
    try:
        for fd in fds:
            duplicates.append(os.dup(fd))
    except OSError as error:
        close_fds(duplicates)
        raise to_exception(unexpected_error(error)) from error
    return duplicates


class LocalListener:
    """A Unix socket that listens at a path, accessible only to its owner.

    A stale socket is replaced. If somebody removes the file, the listener makes it again, so that
    clients find it.
    """

    def __init__(self, path: str | Path) -> None:
        """Raises: CallerError: the path is too long for a socket."""
        self._path = Path(path)
        _check_length(path)
        self._sock = _listen(self._path)

    def __enter__(self) -> LocalListener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._sock.close()

    async def accept(self) -> socket.socket:
        """Wait for the next connection."""
        while True:
            accepting = asyncio.ensure_future(accept(self._sock))
            try:
                while not accepting.done() and self._path.exists():
                    await asyncio.wait([accepting], timeout=_LOOK_EVERY_S)
                if accepting.done():
                    return accepting.result()
            finally:
                accepting.cancel()
            await asyncio.wait([accepting])
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                replacement = _listen(self._path)
            except OSError as error:
                log.error("%s was removed and cannot be made again: %s", self._path, error)
                await asyncio.sleep(_LOOK_EVERY_S)
            else:
                log.warning("%s was removed; listening there again", self._path)
                self._sock.close()
                self._sock = replacement


def _listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    sock.bind(str(path))
    path.chmod(0o600)
    sock.listen(MAX_PEERS)
    return sock


def _check_length(path: str | Path) -> None:
    if (num_bytes := len(os.fsencode(path))) > MAX_PATH_BYTES:
        raise CallerError(
            f"the path of a Unix socket must have at most {MAX_PATH_BYTES} bytes, got {num_bytes}: "
            f"{path}",
            remedy="use a directory with a shorter path for sockets",
        )


async def serve(
    listener: LocalListener,
    body_type: Any,
    session: Callable[[Peer[Any]], Awaitable[None]],
    *,
    max_fds: int = MAX_FDS,
) -> None:
    """Accept connections of our own user until cancelled, and run `session(peer)` for each.

    A session sets `peer.handler`, calls `peer.start()` and returns when it no longer needs the
    peer, which is then closed. An exception in a session ends the server.
    """
    slots = asyncio.Semaphore(MAX_PEERS)

    async def host(peer: Peer[Any]) -> None:
        try:
            await session(peer)
        finally:
            slots.release()
            await peer.close()

    async with asyncio.TaskGroup() as tasks:
        while True:
            await slots.acquire()
            sock = await listener.accept()
            ucred = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            pid, uid, _ = _CREDENTIALS.unpack(ucred)
            if uid != os.geteuid():
                log.warning(
                    "disconnecting process %d of user %d: it belongs to another user", pid, uid
                )
                sock.close()
                slots.release()
                continue
            tasks.create_task(host(Peer(sock, body_type, max_fds=max_fds)))


async def accept(listener: socket.socket) -> socket.socket:
    """Wait for the next connection, ignoring those aborted while they waited. While the process is
    short of open files or memory, connections wait."""
    while True:
        try:
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
        except OSError as error:
            info = unexpected_error(error)
            if info.code is Code.RESOURCE_EXHAUSTED:
                log.error("cannot accept a connection: %s; to fix: %s", error, info.remedy)
                await asyncio.sleep(_LOOK_EVERY_S)
            elif error.errno != errno.ECONNABORTED:
                raise
        else:
            return sock
