"""Serves weights versions to the state managers of other nodes, in blocks.

Nodes of another site share what crosses to them (`core/dealing.py`); what a node has got, or is
about to get, it serves to its neighbours. The rest is between one fetch and this daemon.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import msgspec

from phaseloom.common.errors import CallerError, Code, ErrorInfo, PhaseloomError
from phaseloom.common.framing import accept
from phaseloom.common.ids import VersionKey
from phaseloom.statemgr import wire
from phaseloom.statemgr.core.dealing import Blocks, Deal, Fetcher
from phaseloom.statemgr.incoming import Readable
from phaseloom.statemgr.wire import (
    Again,
    Challenge,
    Elsewhere,
    FetchReply,
    FetchRequest,
    Next,
    Over,
    Part,
    Refusal,
    Reply,
    Request,
    Take,
    VersionDescription,
    Waiting,
)

log = logging.getLogger(__name__)

_MAX_STREAMS = 64
_MAX_DEALS = 64
_WORDS_PER_TIMEOUT = 3
"""How often who waits for a block hears that it is still coming."""

OpenVersion = Callable[[VersionKey, bool], AbstractAsyncContextManager[Readable]]
"""(which, whether also one that is still coming)."""


class VersionServer:
    """Serves versions to peers that know the secret."""

    def __init__(
        self, secret: str, timeout_s: float, open_version: OpenVersion, *, site: str = ""
    ) -> None:
        self._secret = secret.encode()
        self._timeout_s = timeout_s
        self._open_version = open_version
        self._site = site
        self._deals: OrderedDict[tuple[VersionKey, str, str], Deal] = OrderedDict()
        """By version, content and group; the oldest go, which costs at worst another copy."""

    async def serve(self, listener: socket.socket) -> None:
        """Until cancelled."""
        slots = asyncio.Semaphore(_MAX_STREAMS)

        async def host(sock: socket.socket) -> None:
            try:
                sock.setblocking(False)
                self._configure(sock)
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

    def _configure(self, sock: socket.socket) -> None:
        """A client may be silent for long, but not dead."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            sock.setsockopt(socket.IPPROTO_TCP, option, max(1, round(self._timeout_s)))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)

    async def _serve_one(self, sock: socket.socket) -> None:
        challenge = Challenge(os.urandom(wire.NONCE_BYTES))
        async with asyncio.timeout(self._timeout_s):
            await wire.send(sock, challenge)
            payload = await wire.receive(sock, wire.MAX_REQUEST_BYTES)
        request = msgspec.msgpack.decode(payload, type=FetchRequest)
        proof = wire.request_mac(self._secret, challenge.nonce, request)
        if not hmac.compare_digest(proof, request.mac):
            error = ErrorInfo(Code.PERMISSION_DENIED, "the proof of the mesh's secret is wrong")
            await self._describe(sock, request, Refusal(error))
            return
        try:
            async with self._open_version(request.version, request.is_relay) as readable:
                await self._describe(sock, request, readable.description)
                await self._answer_all(sock, request, readable)
        except PhaseloomError as error:
            await self._describe(sock, request, Refusal(error.info))

    async def _describe(
        self, sock: socket.socket, request: FetchRequest, answer: VersionDescription | Refusal
    ) -> None:
        encoded = msgspec.msgpack.encode(answer)
        mac = wire.reply_mac(self._secret, request.nonce, encoded)
        await self._send(sock, FetchReply(encoded, mac))

    async def _answer_all(
        self, sock: socket.socket, request: FetchRequest, readable: Readable
    ) -> None:
        """Until the client closes; it may be silent as long as it lives."""
        deal = self._deal(request, readable.description)
        fetcher = Fetcher(request.endpoint, request.session)
        while True:
            try:
                payload = await wire.receive(sock, wire.MAX_REQUEST_BYTES)
            except ConnectionError:
                return
            asked: Request = msgspec.msgpack.decode(payload, type=Request)
            memory: memoryview | None = None
            try:
                reply = self._choose(deal, fetcher, asked)
                if isinstance(reply, Part):
                    memory, digest = await self._block(sock, readable, reply.block)
                    reply = msgspec.structs.replace(reply, digest=digest)
            except PhaseloomError as error:
                reply = Refusal(error.info)
            await self._send(sock, reply)
            if memory is not None:
                await wire.send_bytes(sock, memory, self._timeout_s)

    async def _block(
        self, sock: socket.socket, readable: Readable, block: int
    ) -> tuple[memoryview, str]:
        """The fetch that brings it here ends by itself; till then who waits is told so."""
        while True:
            try:
                async with asyncio.timeout(self._timeout_s / _WORDS_PER_TIMEOUT):
                    return await readable.block(block)
            except TimeoutError:
                await self._send(sock, Waiting())

    async def _send(self, sock: socket.socket, message: msgspec.Struct) -> None:
        async with asyncio.timeout(self._timeout_s):
            await wire.send(sock, message)

    def _deal(self, request: FetchRequest, description: VersionDescription) -> Deal:
        crosses = request.site and request.site != self._site
        group = request.site if crosses else request.session
        key = (request.version, description.digest, group)
        deal = self._deals.setdefault(key, Deal(Blocks(description.num_bytes).count))
        self._deals.move_to_end(key)
        while len(self._deals) > _MAX_DEALS:
            self._deals.popitem(last=False)
        return deal

    def _choose(self, deal: Deal, fetcher: Fetcher, asked: Request) -> Reply:
        match asked:
            case Next(seen):
                block = deal.take(fetcher)
                seen, given = deal.news(seen, fetcher)
                return Over(seen, given) if block is None else Part(block, "", seen, given)
            case Again(block, failed):
                _check(block, deal)
                holder = deal.again(block, failed, fetcher)
                return Part(block, "", 0, []) if holder is None else Elsewhere(block, holder)
            case Take(block):
                _check(block, deal)
                return Part(block, "", 0, [])


def _check(block: int, deal: Deal) -> None:
    if not 0 <= block < deal.num_blocks:
        raise CallerError(f"block {block} of {deal.num_blocks}", field="block")
