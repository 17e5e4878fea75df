"""What state managers say to one another, and how they prove who they are.

    server → Challenge → client → FetchRequest → server → FetchReply
    then, as often as the client likes: client → Next | Again | Take
                                        server → Part and its bytes | Elsewhere | Over | Refusal
                                                 Waiting, before any of them

Both prove that they know the mesh's secret by an HMAC over the other's nonce; the secret itself
never travels. The reply's HMAC covers the content's digest. Control messages are a little-endian
uint32 length and MessagePack. Sockets do not block; bytes go straight between socket and memory.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import socket
import struct
from typing import Any

import msgspec
import xxhash

from phaseloom.common.errors import ErrorInfo
from phaseloom.common.ids import VersionKey
from phaseloom.common.statewire import TensorSlot

NONCE_BYTES = 32
MAX_REQUEST_BYTES = 4096
MAX_REPLY_BYTES = 16 * 1024 * 1024
_CHUNK_BYTES = 1024 * 1024
_LENGTH = struct.Struct("<I")


class Challenge(msgspec.Struct, frozen=True):
    nonce: bytes


class FetchRequest(msgspec.Struct, frozen=True):
    version: VersionKey
    nonce: bytes
    endpoint: str
    """Where the client serves what it gets."""
    site: str
    """Of the client's node; empty: it names none."""
    session: str
    """All streams of one fetch say the same."""
    is_relay: bool
    """It asks for blocks that the server may only be about to get."""
    mac: bytes = b""
    """HMAC-SHA256 of the secret over both nonces and the rest."""


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


class Next(msgspec.Struct, frozen=True, tag="next"):
    """A block that nobody of the client's group was given."""

    seen: int
    """How much of the news it knows."""


class Again(msgspec.Struct, frozen=True, tag="again"):
    """A block that this endpoint did not deliver."""

    block: int
    failed: str


class Take(msgspec.Struct, frozen=True, tag="take"):
    """Of a relay: this block, as soon as it is there."""

    block: int


class Part(msgspec.Struct, frozen=True, tag="part"):
    """The block's bytes follow."""

    block: int
    digest: str
    seen: int
    given: list[tuple[int, str]]
    """Blocks that others were given, and where they serve them."""


class Waiting(msgspec.Struct, frozen=True, tag="waiting"):
    """To Take: it is still on its way to the server. Another reply follows."""


class Elsewhere(msgspec.Struct, frozen=True, tag="elsewhere"):
    """The block is to be had there by now."""

    block: int
    endpoint: str


class Over(msgspec.Struct, frozen=True, tag="over"):
    """Every block was given to somebody."""

    seen: int
    given: list[tuple[int, str]]


Request = Next | Again | Take
Reply = Part | Waiting | Elsewhere | Over | Refusal


async def send(sock: socket.socket, message: msgspec.Struct) -> None:
    payload = msgspec.msgpack.encode(message)
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, _LENGTH.pack(len(payload)) + payload)


async def receive(sock: socket.socket, limit_bytes: int) -> bytes:
    """Raises: ConnectionError: closed, or a message above the limit."""
    (length,) = _LENGTH.unpack(await _exactly(sock, _LENGTH.size))
    if length > limit_bytes:
        raise ConnectionError(f"a message of {length} bytes, limit {limit_bytes}")
    return await _exactly(sock, length)


async def send_bytes(sock: socket.socket, memory: memoryview, timeout_s: float) -> None:
    """Raises: TimeoutError: the other end takes nothing for this long."""
    loop = asyncio.get_running_loop()
    for start in range(0, len(memory), _CHUNK_BYTES):
        async with asyncio.timeout(timeout_s):
            await loop.sock_sendall(sock, memory[start : start + _CHUNK_BYTES])


def digest_of_block(memory: memoryview, block: int) -> str:
    """xxh3-128 in hex, seeded with the block's number: no block passes for another."""
    return xxhash.xxh3_128(memory, seed=block).hexdigest()


async def receive_bytes(
    sock: socket.socket, memory: memoryview, block: int, timeout_s: float
) -> str:
    """Fill the memory of a block; returns the digest of what came.

    Raises: ConnectionError: broken off. TimeoutError: nothing came for this long.
    """
    loop = asyncio.get_running_loop()
    digest = xxhash.xxh3_128(seed=block)
    done = 0
    while done < len(memory):
        async with asyncio.timeout(timeout_s):
            count = await loop.sock_recv_into(sock, memory[done : done + _CHUNK_BYTES])
        if not count:
            raise ConnectionError(f"broken off after {done} of {len(memory)} bytes of a block")
        digest.update(memory[done : done + count])
        done += count
    return digest.hexdigest()


def request_mac(secret: bytes, server_nonce: bytes, request: FetchRequest) -> bytes:
    unsigned = msgspec.structs.replace(request, mac=b"")
    return _mac(secret, "request", server_nonce, msgspec.msgpack.encode(unsigned))


def reply_mac(secret: bytes, nonce: bytes, answer: bytes) -> bytes:
    return _mac(secret, "reply", nonce, answer)


def _mac(secret: bytes, *parts: Any) -> bytes:
    # Encoded as one list, so that no two different lists of parts give the same bytes.
    return hmac.new(secret, msgspec.msgpack.encode(parts), hashlib.sha256).digest()


async def _exactly(sock: socket.socket, num_bytes: int) -> bytes:
    loop = asyncio.get_running_loop()
    received = b""
    while len(received) < num_bytes:
        chunk = await loop.sock_recv(sock, num_bytes - len(received))
        if not chunk:
            raise ConnectionError("broken off after a part of a message")
        received += chunk
    return received
