"""Serves boxes of weights versions' parts to the state managers of other nodes.

A box is gathered from the part's memory as it is sent. While a stream lasts, the parts that it
asked for stay; whether one still is what was committed is reckoned once a stream, beside the rest.

Nodes of another site share what crosses to them: what one was given the others are to have from
there (`core/boxdealing.py`), and are told what it must be. A node gives its neighbours what it has
brought for its own ranks, or is about to get.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import msgspec
import xxhash

from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import VersionKey
from phaseloom.common.tensors.blockhash import digest_of
from phaseloom.statemgr.core.boxdealing import BoxDeal, Shares
from phaseloom.statemgr.core.dealing import Fetcher
from phaseloom.statemgr.core.slices import (
    MAX_BATCH_BOXES,
    MAX_BATCH_BYTES,
    Box,
    Fragment,
    together,
)
from phaseloom.statemgr.core.versions import Version
from phaseloom.statemgr.mesh.permission import Gate
from phaseloom.statemgr.mesh.tls import MAX_REQUEST_BYTES, Stream
from phaseloom.statemgr.versions import wire
from phaseloom.statemgr.versions.boxes import Boxes, OpenPart, OpenParts, Place, gathered
from phaseloom.statemgr.versions.serving import WORDS_PER_TIMEOUT, Mend, while_waiting

_MAX_PARTS = 4096
_MAX_DEALS = 256
_MAX_RECORDS = 1 << 20
"""Of all deals, but for what those under way add."""

OpenPartOf = Callable[[VersionKey], AbstractAsyncContextManager[OpenPart]]
OpenBrought = Callable[[VersionKey], AbstractAsyncContextManager[Boxes]]
DigestsOf = Callable[[VersionKey], Awaitable[dict[str, str]]]


class SliceServer:
    def __init__(
        self,
        gate: Gate,
        timeout_s: float,
        *,
        open_part: OpenPartOf,
        open_brought: OpenBrought,
        digests_of: DigestsOf,
        mend: Mend,
        site: str = "",
    ) -> None:
        """Args: open_brought: slices that this node brings, or has brought, by their own key.
        digests_of: of the parts of a version that are here.
        """
        self._gate = gate
        self._timeout_s = timeout_s
        self._open_part = open_part
        self._open_brought = open_brought
        self._digests_of = digests_of
        self._mend = mend
        self._site = site
        self._deals: OrderedDict[tuple[Version, str], BoxDeal] = OrderedDict()
        """By part and site; the oldest go, which costs at worst another copy."""

    async def session(self, stream: Stream) -> None:
        """One stream, until the client closes it."""
        async with asyncio.timeout(self._timeout_s):
            payload = await stream.receive(MAX_REQUEST_BYTES)
        request = msgspec.msgpack.decode(payload, type=wire.SlicesRequest)
        try:
            self._gate.check(request.ticket, request.version, stream.node)
            if request.relay:
                key = msgspec.structs.replace(request.version, part=request.relay)
                async with self._open_brought(key) as brought:
                    await self._send(stream, wire.Holding({}))
                    await self._answer_all(stream, brought, {}, request.fetcher)
            elif request.parts:
                await self._serve(stream, request)
            else:
                await self._send(stream, wire.Holding(await self._digests_of(request.version)))
        except PhaseloomError as error:
            await self._send(stream, wire.Refusal(error.info))

    async def _serve(self, stream: Stream, request: wire.SlicesRequest) -> None:
        if len(request.parts) > _MAX_PARTS:
            raise CallerError(f"{len(request.parts)} parts", field="parts")
        async with AsyncExitStack() as stack:
            parts = OpenParts()
            for part in sorted(set(request.parts)):
                key = msgspec.structs.replace(request.version, part=part)
                parts[part] = await stack.enter_async_context(self._open_part(key))
            is_far = request.site not in {"", self._site}
            digests = {name: part.version.digest for name, part in parts.items()}
            await self._send(stream, wire.Holding(digests, is_far))
            deals = {name: self._deal(part, request.site) for name, part in parts.items() if is_far}
            await self._answer_all(stream, parts, deals, request.fetcher)

    def _deal(self, part: OpenPart, site: str) -> BoxDeal:
        key = (part.version, site)
        if key not in self._deals:
            for gone in [each for each in self._deals if each[0].is_dropped]:
                del self._deals[gone]
            self._deals[key] = BoxDeal()
        self._deals.move_to_end(key)
        deal = self._deals[key]
        while sum(each.num_records for each in self._deals.values()) > _MAX_RECORDS:
            self._deals.popitem(last=False)
        while len(self._deals) > _MAX_DEALS:
            self._deals.popitem(last=False)
        return deal

    async def _answer_all(
        self,
        stream: Stream,
        held: Boxes,
        deals: Mapping[str, BoxDeal],
        fetcher: Fetcher,
    ) -> None:
        """Args: deals: of the parts that are dealt out, and to whom."""
        while True:
            try:
                payload = await stream.receive(MAX_REQUEST_BYTES)
            except ConnectionError:
                return
            asked: wire.SlicesAsk = msgspec.msgpack.decode(payload, type=wire.SlicesAsk)
            memories: list[memoryview] = []
            reply: wire.SlicesReply
            try:
                if isinstance(asked, wire.Confirm):
                    await self._confirm(stream, held, asked.part)
                    reply = wire.Confirmed()
                else:
                    deal = deals.get(asked.part)
                    places = _places(held, asked, is_dealt=deal is not None)
                    await self._until_here(stream, held, asked)
                    shares = None
                    if deal is not None:
                        boxes = [(each.box, each.num_bytes) for each in places]
                        shares = deal.ask(boxes, asked.num_bytes, asked.failed, fetcher)
                    limit = asked.num_bytes
                    memories, reply = await asyncio.to_thread(_given, places, shares, limit)
            except PhaseloomError as error:
                reply = wire.Refusal(error.info)
            await self._send(stream, reply)
            for memory in memories:
                await stream.send_bytes(memory, self._timeout_s)

    async def _until_here(self, stream: Stream, held: Boxes, asked: wire.Give) -> None:
        """Who asks hears meanwhile that it comes. Raises: ResourceError: it does not."""
        while True:
            try:
                async with asyncio.timeout(self._timeout_s / WORDS_PER_TIMEOUT):
                    await held.until_here(asked.part, asked.boxes)
                    return
            except TimeoutError:
                await self._send(stream, wire.Waiting())

    async def _confirm(self, stream: Stream, held: Boxes, name: str) -> None:
        """Raises: ResourceError: DATA_LOSS: what was sent is bad; by now it may be whole again."""
        part = held.get(name) if isinstance(held, OpenParts) else None
        if part is None:
            raise CallerError(f"part {name!r} was not asked for", field="part")
        taking = asyncio.to_thread(digest_of, part.memory)
        if await while_waiting(stream, self._timeout_s, taking) == part.version.digest:
            return
        bad = ResourceError(
            f"version {part.version.key} does not match its digest any more",
            code=Code.DATA_LOSS,
        )
        try:
            await while_waiting(stream, self._timeout_s, self._mend(part.version.key))
        except PhaseloomError as error:
            if error.info.code is Code.DATA_LOSS:
                raise
            # Whatever becomes of it here, what was sent is bad.
            raise bad from error
        raise bad

    async def _send(self, stream: Stream, message: msgspec.Struct) -> None:
        async with asyncio.timeout(self._timeout_s):
            await stream.send(message)


def _places(held: Boxes, asked: wire.Give, *, is_dealt: bool) -> list[Place]:
    """Where the boxes are. Raises: CallerError: nowhere; they are too large."""
    if len(asked.boxes) > MAX_BATCH_BOXES:
        raise CallerError(f"{len(asked.boxes)} boxes", field="boxes")
    places = [held.find(asked.part, box) for box in asked.boxes]
    num_bytes = sum(place.num_bytes for place in places)
    if not is_dealt and num_bytes != asked.num_bytes:
        raise CallerError(f"{num_bytes} bytes, not {asked.num_bytes}", field="num_bytes")
    if not 0 <= asked.num_bytes <= MAX_BATCH_BYTES:
        raise CallerError(f"{asked.num_bytes} bytes are too many", field="num_bytes")
    return places


def _given(
    places: Sequence[Place], shares: Shares | None, limit_bytes: int
) -> tuple[list[memoryview], wire.Given]:
    """What to send, and what to say of it. Long: run it in a thread."""
    boxes = [place.box for place in places]
    here = list(enumerate(boxes)) if shares is None else shares.here
    memories = list(_gathered(places, here))
    given = wire.Given(_digest(memories))
    if shares is None:
        return memories, given
    elsewhere = [
        wire.Shared(holder, wire.cuts_of(some, boxes), _digest(_gathered(places, some)))
        for holder, fragments in shares.elsewhere.items()
        for some in _some(places, fragments, limit_bytes)
    ]
    dealt = wire.Dealt(shares.num_boxes, wire.cuts_of(here, boxes), elsewhere)
    return memories, msgspec.structs.replace(given, dealt=dealt)


def _gathered(places: Sequence[Place], fragments: Iterable[Fragment]) -> Iterator[memoryview]:
    for number, box in fragments:
        yield from gathered(places[number]._replace(box=box))


def _digest(memories: Iterable[memoryview]) -> str:
    digest = xxhash.xxh3_128()
    for memory in memories:
        digest.update(memory)
    return digest.hexdigest()


def _some(
    places: Sequence[Place], fragments: list[Fragment], limit_bytes: int
) -> Iterator[list[Fragment]]:
    """As much as a neighbour is to be asked for at once."""

    def box_of(fragment: Fragment) -> tuple[Box, int]:
        number, box = fragment
        return box, places[number]._replace(box=box).num_bytes

    return together(fragments, box_of, limit_bytes)
