"""Weights versions from daemon to daemon: one TCP stream, whole, checksummed.

    server → Challenge → client → FetchRequest → server → FetchReply, then the raw memory

Both prove that they know the mesh's secret by an HMAC over the other's nonce; the secret itself
never travels. The reply's HMAC covers the content's digest. Control messages are a little-endian
uint32 length and MessagePack. Bulk bytes move in threads, straight between socket and extent.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import os
import socket
import struct
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
import xxhash

from phaseloom.common.errors import (
    CallerError,
    Code,
    ErrorInfo,
    PhaseloomError,
    ResourceError,
    to_exception,
)
from phaseloom.common.framing import accept
from phaseloom.common.ids import VersionKey
from phaseloom.common.statewire import TensorSlot

log = logging.getLogger(__name__)

_NONCE_BYTES = 32
_CHUNK_BYTES = 1024 * 1024
_MAX_REQUEST_BYTES = 4096
_MAX_REPLY_BYTES = 16 * 1024 * 1024
_MAX_STREAMS = 16
_LENGTH = struct.Struct("<I")


class Challenge(msgspec.Struct, frozen=True):
    nonce: bytes


class FetchRequest(msgspec.Struct, frozen=True):
    version: VersionKey
    nonce: bytes
    mac: bytes
    """HMAC-SHA256 of the secret over both nonces and the version."""


class VersionDescription(msgspec.Struct, frozen=True, tag="version"):
    num_bytes: int
    tensors: list[TensorSlot]
    digest: str


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    error: ErrorInfo


class FetchReply(msgspec.Struct, frozen=True):
    answer: bytes
    """A VersionDescription or a Refusal, encoded."""
    mac: bytes
    """HMAC-SHA256 of the secret over the client's nonce and `answer`."""


OpenVersion = Callable[
    [VersionKey], AbstractAsyncContextManager[tuple[VersionDescription, memoryview]]
]


class VersionServer:
    """Serves committed versions to peers that know the secret."""

    def __init__(self, secret: str, timeout_s: float, open_version: OpenVersion) -> None:
        self._secret = secret.encode()
        self._timeout_s = timeout_s
        self._open_version = open_version

    async def serve(self, listener: socket.socket) -> None:
        """Until cancelled."""
        slots = asyncio.Semaphore(_MAX_STREAMS)

        async def host(sock: socket.socket) -> None:
            try:
                await self._serve_one(sock)
            except (OSError, TimeoutError, msgspec.DecodeError, PhaseloomError) as error:
                log.warning("a weights version could not be served: %r", error)
            finally:
                sock.close()
                slots.release()

        async with asyncio.TaskGroup() as tasks:
            while True:
                await slots.acquire()
                tasks.create_task(host(await accept(listener)))

    async def _serve_one(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        challenge = Challenge(os.urandom(_NONCE_BYTES))
        async with asyncio.timeout(self._timeout_s):
            await loop.sock_sendall(sock, _framed(challenge))
            (length,) = _LENGTH.unpack(await _read_async(sock, _LENGTH.size))
            if length > _MAX_REQUEST_BYTES:
                raise CallerError(f"a request of {length} bytes")
            payload = await _read_async(sock, length)
        request = msgspec.msgpack.decode(payload, type=FetchRequest)
        proof = _request_mac(self._secret, challenge.nonce, request.nonce, request.version)
        if not hmac.compare_digest(proof, request.mac):
            error = ErrorInfo(Code.PERMISSION_DENIED, "the proof of the mesh's secret is wrong")
            await self._reply(sock, request.nonce, Refusal(error))
            return
        try:
            async with self._open_version(request.version) as (description, memory):
                await self._reply(sock, request.nonce, description)
                await self._send(sock, memory)
        except PhaseloomError as error:
            await self._reply(sock, request.nonce, Refusal(error.info))

    async def _reply(
        self, sock: socket.socket, nonce: bytes, answer: VersionDescription | Refusal
    ) -> None:
        encoded = msgspec.msgpack.encode(answer)
        reply = FetchReply(encoded, _reply_mac(self._secret, nonce, encoded))
        async with asyncio.timeout(self._timeout_s):
            await asyncio.get_running_loop().sock_sendall(sock, _framed(reply))

    async def _send(self, sock: socket.socket, memory: memoryview) -> None:
        sock.settimeout(self._timeout_s)

        def send() -> None:
            for start in range(0, len(memory), _CHUNK_BYTES):
                sock.sendall(memory[start : start + _CHUNK_BYTES])

        await _in_thread(sock, send)


async def fetch(
    endpoint: str,
    secret: str,
    version: VersionKey,
    timeout_s: float,
    place: Callable[[VersionDescription], memoryview],
) -> VersionDescription:
    """Bring a version from another daemon into the memory that `place` gives for it.

    Args:   timeout_s: for each step: connecting, the reply, a pause within the stream.
    Raises: ResourceError: out of reach, broken off, or DATA_LOSS; `place`'s refusal.
            CallerError: NOT_FOUND there, or PERMISSION_DENIED; a bad endpoint.
    """
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal():
        raise CallerError(f"{endpoint!r} is not host:port", field="sources")
    sock = None
    try:
        sock = await asyncio.to_thread(socket.create_connection, (host, int(port)), timeout_s)
        description: VersionDescription = await _in_thread(
            sock, lambda: _ask(sock, secret.encode(), version)
        )
        memory = place(description)
        digest = await _in_thread(sock, lambda: _receive(sock, memory))
    except (OSError, msgspec.DecodeError) as error:
        raise ResourceError(f"version {version} from {endpoint}: {error}") from error
    finally:
        if sock is not None:
            sock.close()
    if digest != description.digest:
        raise ResourceError(
            f"version {version} from {endpoint} does not match its digest", code=Code.DATA_LOSS
        )
    return description


def _ask(sock: socket.socket, secret: bytes, version: VersionKey) -> VersionDescription:
    challenge = msgspec.msgpack.decode(_read_framed(sock, _MAX_REQUEST_BYTES), type=Challenge)
    nonce = os.urandom(_NONCE_BYTES)
    mac = _request_mac(secret, challenge.nonce, nonce, version)
    sock.sendall(_framed(FetchRequest(version, nonce, mac)))
    reply = msgspec.msgpack.decode(_read_framed(sock, _MAX_REPLY_BYTES), type=FetchReply)
    if not hmac.compare_digest(_reply_mac(secret, nonce, reply.answer), reply.mac):
        raise CallerError(
            "the source does not know this mesh's secret, or the other way round",
            code=Code.PERMISSION_DENIED,
            remedy="give all state managers of a mesh the same secret",
        )
    answer: VersionDescription | Refusal = msgspec.msgpack.decode(
        reply.answer, type=VersionDescription | Refusal
    )
    if isinstance(answer, Refusal):
        raise to_exception(answer.error)
    return answer


def _receive(sock: socket.socket, memory: memoryview) -> str:
    digest = xxhash.xxh3_128()
    done = 0
    while done < len(memory):
        count = sock.recv_into(memory[done : done + _CHUNK_BYTES])
        if not count:
            raise ConnectionError(f"broken off after {done} of {len(memory)} bytes")
        digest.update(memory[done : done + count])
        done += count
    return digest.hexdigest()


async def _in_thread(sock: socket.socket, work: Callable[[], Any]) -> Any:
    """Run blocking socket work in a thread; cancelling breaks the socket and so ends the thread."""
    thread = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        await asyncio.wait([thread])
        raise


async def _read_async(sock: socket.socket, num_bytes: int) -> bytes:
    loop = asyncio.get_running_loop()
    received = b""
    while len(received) < num_bytes:
        chunk = await loop.sock_recv(sock, num_bytes - len(received))
        if not chunk:
            raise ConnectionError("closed before its request was whole")
        received += chunk
    return received


def _read_framed(sock: socket.socket, limit_bytes: int) -> bytes:
    (length,) = _LENGTH.unpack(_read_exactly(sock, _LENGTH.size))
    if length > limit_bytes:
        raise ConnectionError(f"a message of {length} bytes, limit {limit_bytes}")
    return _read_exactly(sock, length)


def _read_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    received = bytearray(num_bytes)
    done = 0
    while done < num_bytes:
        count = sock.recv_into(memoryview(received)[done:])
        if not count:
            raise ConnectionError("closed by the source")
        done += count
    return bytes(received)


def _framed(message: msgspec.Struct) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(payload)) + payload


def _request_mac(secret: bytes, server: bytes, client: bytes, version: VersionKey) -> bytes:
    return _mac(secret, "request", server, client, str(version).encode())


def _reply_mac(secret: bytes, nonce: bytes, answer: bytes) -> bytes:
    return _mac(secret, "reply", nonce, answer)


def _mac(secret: bytes, *parts: Any) -> bytes:
    # Encoded as one list, so that no two different lists of parts give the same bytes.
    return hmac.new(secret, msgspec.msgpack.encode(parts), hashlib.sha256).digest()
