"""Serves weights versions to the state managers of other nodes, in blocks.

Nodes of another site share what crosses to them (`core/dealing.py`); what a node has got, or is
about to get, it serves to its neighbours. The rest is between one fetch and this daemon.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

import msgspec

from phaseloom.common.contract.errors import CallerError, PhaseloomError
from phaseloom.common.contract.ids import VersionKey
from phaseloom.statemgr.core.dealing import Blocks, Deal, Fetcher
from phaseloom.statemgr.mesh.permission import Gate
from phaseloom.statemgr.mesh.tls import MAX_REQUEST_BYTES, Stream
from phaseloom.statemgr.versions import wire
from phaseloom.statemgr.versions.incoming import Readable

log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_DEALS = 64
WORDS_PER_TIMEOUT = 3
"""How often who waits hears that something is still coming, or being reckoned."""

Mend = Callable[[VersionKey], Awaitable[None]]
"""Verify a version, or a part, that is here, because who got it found it bad."""
OpenVersion = Callable[[VersionKey, bool], AbstractAsyncContextManager[Readable]]
"""(which, whether also one that is still coming)."""


class VersionServer:
    """Serves versions to peers whose tickets say that they may have them."""

    def __init__(
        self,
        gate: Gate,
        timeout_s: float,
        open_version: OpenVersion,
        mend: Mend,
        *,
        site: str = "",
    ) -> None:
        self._gate = gate
        self._timeout_s = timeout_s
        self._open_version = open_version
        self._mend = mend
        self._site = site
        self._deals: OrderedDict[tuple[VersionKey, str, str], Deal] = OrderedDict()
        """By version, content and group; the oldest go, which costs at worst another copy."""

    async def session(self, stream: Stream) -> None:
        """One stream, until the client closes it."""
        async with asyncio.timeout(self._timeout_s):
            payload = await stream.receive(MAX_REQUEST_BYTES)
        request = msgspec.msgpack.decode(payload, type=wire.FetchRequest)
        try:
            self._gate.check(request.ticket, request.version.whole, stream.node)
            if request.doubted:
                await while_waiting(stream, self._timeout_s, self._mend(request.version))
                await self._send(stream, wire.Sound())
                return
            async with self._open_version(request.version, request.is_relay) as readable:
                await self._send(stream, readable.description)
                await self._answer_all(stream, request, readable)
        except PhaseloomError as error:
            await self._send(stream, wire.Refusal(error.info))

    async def _answer_all(
        self, stream: Stream, request: wire.FetchRequest, readable: Readable
    ) -> None:
        """Until the client closes; it may be silent as long as it lives."""
        deal = self._deal(request, readable.description)
        fetcher = Fetcher(request.endpoint, request.session)
        while True:
            try:
                payload = await stream.receive(MAX_REQUEST_BYTES)
            except ConnectionError:
                return
            asked: wire.Request = msgspec.msgpack.decode(payload, type=wire.Request)
            memory: memoryview | None = None
            try:
                reply = self._choose(deal, fetcher, asked)
                if isinstance(reply, wire.Part):
                    memory, digest = await self._block(stream, readable, reply.block)
                    reply = msgspec.structs.replace(reply, digest=digest)
            except PhaseloomError as error:
                reply = wire.Refusal(error.info)
            await self._send(stream, reply)
            if memory is not None:
                await stream.send_bytes(memory, self._timeout_s)

    async def _block(
        self, stream: Stream, readable: Readable, block: int
    ) -> tuple[memoryview, str]:
        """The fetch that brings it here ends by itself; till then who waits is told so."""
        while True:
            try:
                async with asyncio.timeout(self._timeout_s / WORDS_PER_TIMEOUT):
                    return await readable.block(block)
            except TimeoutError:
                await self._send(stream, wire.Waiting())

    async def _send(self, stream: Stream, message: msgspec.Struct) -> None:
        async with asyncio.timeout(self._timeout_s):
            await stream.send(message)

    def _deal(self, request: wire.FetchRequest, description: wire.VersionDescription) -> Deal:
        crosses = request.site and request.site != self._site
        group = request.site if crosses else request.session
        key = (request.version, description.digest, group)
        deal = self._deals.setdefault(key, Deal(Blocks(description.num_bytes).count))
        self._deals.move_to_end(key)
        while len(self._deals) > _MAX_DEALS:
            self._deals.popitem(last=False)
        return deal

    def _choose(self, deal: Deal, fetcher: Fetcher, asked: wire.Request) -> wire.Reply:
        match asked:
            case wire.Next(seen):
                block = deal.take(fetcher)
                seen, given = deal.news(seen, fetcher)
                if block is None:
                    return wire.Over(seen, given)
                return wire.Part(block, "", seen, given)
            case wire.Again(block, failed):
                _check(block, deal)
                holder = deal.again(block, failed, fetcher)
                if holder is not None:
                    return wire.Elsewhere(block, holder)
                return wire.Part(block, "", 0, [])
            case wire.Take(block):
                _check(block, deal)
                return wire.Part(block, "", 0, [])


async def while_waiting(stream: Stream, timeout_s: float, work: Awaitable[T]) -> T:
    """What it comes to; who asked for it hears meanwhile that it is under way.

    Raises: as the work; OSError, TimeoutError: who asked is gone.
    """
    doing = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([doing], timeout=timeout_s / WORDS_PER_TIMEOUT))[0]:
            async with asyncio.timeout(timeout_s):
                await stream.send(wire.Waiting())
    finally:
        await asyncio.wait([doing])  # it reads memory
        doing.exception()  # known, also where nobody is left to tell
    return doing.result()


def _check(block: int, deal: Deal) -> None:
    if not 0 <= block < deal.num_blocks:
        raise CallerError(f"block {block} of {deal.num_blocks}", field="block")
