"""Streams between the state managers of different nodes: mutual TLS, messages, and bulk bytes.

    client ⇄ server   TLS 1.3; both have certificates of the mesh's authority
    server → client   Welcome; from then on the session decides

Nothing is sent unencrypted, and a peer without a certificate gets no answer. The certificate names
the peer's node. A control message is a little-endian uint32 length, then MessagePack. Bulk bytes
are decrypted straight into their final memory. Only one task at a time uses a stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from phaseloom.common.contract.errors import (
    CallerError,
    Code,
    InternalError,
    PhaseloomError,
    ResourceError,
)
from phaseloom.common.observability import metrics
from phaseloom.common.process.error_boundary import error_boundary
from phaseloom.common.transport import certificates
from phaseloom.common.transport.framing import accept

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_REQUEST_BYTES = 64 * 1024
"""Largest message from a client."""
_CHUNK_BYTES = 1024 * 1024
_INLINE_BYTES = 64 * 1024
"""Bytes of a large chunk to encrypt or decrypt on the event loop. The rest goes to a thread, in
parallel with other streams."""
_SMALL_BYTES = 512 * 1024
"""Chunks up to this size stay on the event loop: waking a thread would take as long."""
_RECORD_BYTES = 16 * 1024
"""Largest TLS record."""
_MAX_STREAMS = 320
"""Streams to serve at once: for each of 64 nodes, four as a source and one as a peer. Further
streams wait and time out eventually, because a fetch keeps its streams until it is complete."""
_MAX_UNPROVEN = 128
"""Connections that may be without a certificate at once. One more closes the oldest."""
_MAX_WELCOME_BYTES = 1024
_LENGTH = struct.Struct("<I")
_SPOILED = "DECRYPTION_FAILED_OR_BAD_RECORD_MAC"
_BLOCKED = (ssl.SSLWantReadError, ssl.SSLWantWriteError)
_GARBAGE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_FAILURES = (OSError, TimeoutError, *_GARBAGE, PhaseloomError)
_REMEDY = "give both nodes certificates of one authority: `phaseloom certs`"


class Welcome(msgspec.Struct, frozen=True):
    """Tells the client that the server has accepted its certificate."""


@dataclass(frozen=True)
class Identity:
    """The TLS contexts by which this node proves its identity and verifies other nodes."""

    server: ssl.SSLContext
    client: ssl.SSLContext

    @classmethod
    def load(cls, directory: str | Path) -> Identity:
        """Load this node's identity from files.

        Args:   directory: has `ca.pem`, `node.pem` and `node.key`; see `certificates`.
        Raises: CallerError: a file is missing or is not a certificate.
        """
        return cls(
            _context(ssl.PROTOCOL_TLS_SERVER, Path(directory)),
            _context(ssl.PROTOCOL_TLS_CLIENT, Path(directory)),
        )


def _context(protocol: int, directory: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # A certificate names a node, not an address; the session checks the node's name.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # streams are long, so nobody resumes one
    try:
        context.load_verify_locations(directory / certificates.CA_FILE)
        context.load_cert_chain(
            directory / certificates.CERTIFICATE_FILE, directory / certificates.KEY_FILE
        )
    except (OSError, ssl.SSLError) as error:
        raise CallerError(
            f"no certificate of this node in {directory}: {error}",
            code=Code.FAILED_PRECONDITION,
            field="statemgr.certificates",
            remedy="make them with `phaseloom certs`",
        ) from error
    return context


class Stream:
    """One end of a connection whose other end has proved that it belongs to this mesh."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock
        self._fd = sock.fileno()
        self._awaits_writing: bool | None = None
        """Whether the last read or write must wait until the socket is writable (True) or readable
        (False); None: it need not wait."""
        self.node = ""
        """The peer's node, from its certificate."""

    async def send(self, message: msgspec.Struct) -> None:
        payload = msgspec.msgpack.encode(message)
        await self._send_all(memoryview(_LENGTH.pack(len(payload)) + payload))

    async def receive(self, limit_bytes: int) -> bytes:
        """Receive one message.

        Raises: ConnectionError: the stream is closed, or the message exceeds the limit. OSError:
                the connection broke.
        """
        (length,) = _LENGTH.unpack(await self._exactly(_LENGTH.size))
        if length > limit_bytes:
            raise ConnectionError(f"a message of {length} bytes exceeds the limit of {limit_bytes}")
        return await self._exactly(length)

    async def send_bytes(self, memory: memoryview, timeout_s: float) -> None:
        """Send bulk bytes. Raises: TimeoutError: one chunk of 1 MiB takes longer than
        `timeout_s`."""
        for start in range(0, len(memory), _CHUNK_BYTES):
            async with asyncio.timeout(timeout_s):
                await self._send_all(memory[start : start + _CHUNK_BYTES])

    async def receive_into(
        self,
        memory: memoryview,
        timeout_s: float,
        see: Callable[[memoryview], object] = lambda chunk: None,
    ) -> None:
        """Fill the memory with bulk bytes, and call `see` with each chunk.

        Raises: ConnectionError: the other end closed too early. TimeoutError: one chunk of 1 MiB
                takes longer than `timeout_s`.
        """
        done = 0
        while done < len(memory):
            chunk = memory[done : done + _CHUNK_BYTES]
            async with asyncio.timeout(timeout_s):
                count = await self._fill(chunk)
            if count:
                see(chunk[:count])
            if count < len(chunk):
                raise ConnectionError(
                    f"the connection ended after {done + count} of {len(memory)} bytes"
                )
            done += count

    def close(self) -> None:
        self._sock.close()

    async def _handshake(self) -> None:
        while True:
            try:
                self._sock.do_handshake()
                break
            except _BLOCKED as error:
                self._awaits_writing = isinstance(error, ssl.SSLWantWriteError)
            await self._until_ready()
        certificate = self._sock.getpeercert() or {}
        subject: Sequence[Any] = certificate.get("subject", ())
        self.node = next((v for rdn in subject for k, v in rdn if k == "commonName"), "")

    async def _exactly(self, num_bytes: int) -> bytes:
        received = bytearray(num_bytes)
        if await self._fill(memoryview(received)) < num_bytes:
            raise ConnectionError("the connection ended within a message")
        return bytes(received)

    async def _fill(self, memory: memoryview) -> int:
        return await self._move(self._sock.recv_into, memory)

    async def _send_all(self, memory: memoryview) -> None:
        # One record at a time: OpenSSL requires a retry with the same bytes.
        await self._move(lambda unsent: self._sock.send(unsent[:_RECORD_BYTES]), memory)

    async def _move(self, step: Callable[[memoryview], int], memory: memoryview) -> int:
        """Read or write all of the memory with `step`, which returns how many bytes it moved.

        Returns: the bytes moved; fewer than all if a step moved none.
        """
        done = 0
        limit = _SMALL_BYTES if len(memory) <= _SMALL_BYTES else _INLINE_BYTES
        while done < len(memory):
            count = self._move_now(step, memory[done : done + limit])
            if count == limit and done + count < len(memory):
                count += await in_thread(partial(self._move_now, step), memory[done + count :])
            done += count
            if not count and self._awaits_writing is None:
                break
            if done < len(memory):
                await self._until_ready()
        return done

    def _move_now(self, step: Callable[[memoryview], int], memory: memoryview) -> int:
        done = 0
        self._awaits_writing = None
        try:
            while done < len(memory) and (count := step(memory[done:])):
                done += count
        except _BLOCKED as error:
            self._awaits_writing = isinstance(error, ssl.SSLWantWriteError)
        return done

    async def _until_ready(self) -> None:
        """Wait until the socket is ready to continue. If nothing has to wait, let other tasks
        run."""
        if self._awaits_writing is None:
            await asyncio.sleep(0)
            return
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        if self._awaits_writing:
            watch, unwatch = loop.add_writer, loop.remove_writer
        else:
            watch, unwatch = loop.add_reader, loop.remove_reader
        watch(self._fd, ready.set)
        try:
            await ready.wait()
        finally:
            unwatch(self._fd)


async def in_thread(work: Callable[[memoryview], T], memory: memoryview) -> T:
    """Process memory in a thread, so that streams are decrypted in parallel.

    However often the call is cancelled, it returns only after the thread has ended. It then
    releases the view: from then on nobody uses the memory, which may be freed or reused.
    """
    with memory:
        working = asyncio.get_running_loop().run_in_executor(None, work, memory)
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            while not working.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([working])
            # The cancellation matters more than a failure of the thread.
            working.exception()
            raise


async def connect(endpoint: str, identity: Identity, timeout_s: float) -> Stream:
    """Open a stream to another node's state manager, after both ends have proved their identity.

    Raises: ResourceError: the endpoint is out of reach, or silent for `timeout_s`. CallerError:
            PERMISSION_DENIED: one end does not know the authority of the other's certificate; a bad
            endpoint.
    """
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal():
        raise CallerError(f"{endpoint!r} is not host:port", field="sources")
    try:
        async with asyncio.timeout(timeout_s):
            stream = await _connected(host, int(port), identity)
            with closed_on_failure(stream):
                msgspec.msgpack.decode(await stream.receive(_MAX_WELCOME_BYTES), type=Welcome)
    except (OSError, TimeoutError, msgspec.DecodeError) as error:
        raise typed_error(error, endpoint, timeout_s) from error
    return stream


async def _connected(host: str, port: int, identity: Identity) -> Stream:
    loop = asyncio.get_running_loop()
    ((family, kind, proto, _, address), *_) = await loop.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    )
    sock = socket.socket(family, kind, proto)
    with closed_on_failure(sock):
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.sock_connect(sock, address)
        stream = Stream(identity.client.wrap_socket(sock, do_handshake_on_connect=False))
    with closed_on_failure(stream):
        await stream._handshake()
    return stream


@contextlib.contextmanager
def closed_on_failure(opened: Stream | socket.socket) -> Iterator[None]:
    """Close the stream or socket if the block fails."""
    try:
        yield
    except BaseException:
        opened.close()
        raise


def typed_error(error: Exception, endpoint: str, timeout_s: float) -> PhaseloomError:
    """Convert a failure of the stream to an endpoint into a typed error."""
    if isinstance(error, PhaseloomError):
        return error
    if isinstance(error, ssl.SSLCertVerificationError):
        return CallerError(
            f"the certificate of {endpoint} is not of this mesh: {error.verify_message}",
            code=Code.PERMISSION_DENIED,
            remedy=_REMEDY,
        )
    if isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
        return CallerError(
            f"{endpoint} rejected this node's certificate: {error.reason}",
            code=Code.PERMISSION_DENIED,
            remedy=_REMEDY,
        )
    if isinstance(error, ssl.SSLError) and error.reason == _SPOILED:
        return ResourceError(f"{endpoint}: data was corrupted in transit", code=Code.DATA_LOSS)
    reason = f"silent for {timeout_s} s" if isinstance(error, TimeoutError) else str(error)
    return ResourceError(f"{endpoint}: {reason}")


Session = Callable[[Stream], Awaitable[None]]


class Server:
    """Accepts streams from nodes of this mesh and runs a session for each."""

    def __init__(self, identity: Identity, timeout_s: float, session: Session) -> None:
        self._identity = identity
        self._timeout_s = timeout_s
        self._session = session
        self._slots = asyncio.Semaphore(_MAX_STREAMS)
        self._unproven: dict[asyncio.Task[None], None] = {}
        """Connections without a certificate yet, oldest first."""

    async def serve(self, listener: socket.socket) -> None:
        """Accept streams until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                sock = await accept(listener)
                if len(self._unproven) >= _MAX_UNPROVEN:
                    oldest = next(iter(self._unproven))
                    del self._unproven[oldest]
                    oldest.cancel()
                task = tasks.create_task(self._host(sock))
                self._unproven[task] = None
                task.add_done_callback(lambda done: self._unproven.pop(done, None))

    async def _host(self, sock: socket.socket) -> None:
        node = ""
        # `error_boundary` logs and counts failures. Sessions keep no state, so one can end alone.
        with (
            contextlib.closing(sock),
            contextlib.suppress(InternalError),
            error_boundary(metrics.UNFORESEEN, "peer"),
        ):
            try:
                sock.setblocking(False)
                self._configure(sock)
                wrap = self._identity.server.wrap_socket
                stream = Stream(wrap(sock, server_side=True, do_handshake_on_connect=False))
                with contextlib.closing(stream):
                    async with asyncio.timeout(self._timeout_s):
                        await stream._handshake()
                    node = stream.node
                    self._unproven.pop(_current(), None)
                    async with self._slots:
                        async with asyncio.timeout(self._timeout_s):
                            await stream.send(Welcome())
                        await self._session(stream)
            except _FAILURES as error:
                log.warning("a stream from %s ended: %r", node or "an unknown node", error)

    def _configure(self, sock: socket.socket) -> None:
        """Have the kernel detect dead clients, because live ones may be silent for a long time."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            sock.setsockopt(socket.IPPROTO_TCP, option, max(1, round(self._timeout_s)))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)


def _current() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task
