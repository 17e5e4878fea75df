"""Serves weights versions and state files to the state managers of other nodes.

Bytes are gathered from memory, or read from disk, as they are sent. The content that a stream has
opened stays available until the stream ends. Each byte crosses to another site once: the server
assigns it to one node there, and gives the other nodes that node's name and the checksum
(`assignment.py`). A node also serves to its peers the versions and slices that it has fetched, or
is fetching, for its own ranks. If client and server both have an earlier version, a batch that
differs little is sent as a delta (`transfer/delta.py`).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TypeVar
from weakref import WeakKeyDictionary

import msgspec
import xxhash

from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.tensors.blockhash import digest_in_threads
from phaseloom.statemgr.node.ledger import Ledger
from phaseloom.statemgr.node.stores import VersionStore
from phaseloom.statemgr.records.versions import Version
from phaseloom.statemgr.seals.replicating import Replicator
from phaseloom.statemgr.transfer import delta, wire
from phaseloom.statemgr.transfer.assignment import Assignment, Peer, Shares
from phaseloom.statemgr.transfer.fetching import Home
from phaseloom.statemgr.transfer.permission import Gate
from phaseloom.statemgr.transfer.served import Found, OpenPart, OpenParts, Served
from phaseloom.statemgr.transfer.tensorslices import (
    MAX_BATCH_BOXES,
    MAX_BATCH_BYTES,
    Box,
    Fragment,
    split_into_requests,
)
from phaseloom.statemgr.transfer.tls import MAX_REQUEST_BYTES, Stream
from phaseloom.statemgr.versions.weights import Weights

_MAX_PARTS = 4096
_FEW_BYTES = 64 * 1024
"""Memories of an answer that are shorter on average are sent in one piece."""
_WORDS_PER_TIMEOUT = 3
"""How often within its timeout a client hears that the server is still working."""

T = TypeVar("T")


class Server:
    """Serves other nodes the streams that their tickets permit."""

    def __init__(
        self,
        gate: Gate,
        ledger: Ledger,
        versions: VersionStore,
        weights: Weights,
        replicator: Replicator,
        *,
        home: Home,
        delta_share: float = 0.0,
    ) -> None:
        """Args: delta_share: the largest useful delta, as a share of a batch."""
        self._gate = gate
        self._timeout_s = home.timeout_s
        self._ledger = ledger
        self._versions = versions
        self._weights = weights
        self._replicator = replicator
        self._site = home.site
        self._delta_share = delta_share if delta.is_available() else 0.0
        self._assignments: WeakKeyDictionary[Version, defaultdict[str, Assignment]]
        self._assignments = WeakKeyDictionary()
        """Assignments of each part by site. They end with the part."""

    async def session(self, stream: Stream) -> None:
        """Serve one stream, until the client closes it or has its only answer."""
        payload: bytes | None
        async with asyncio.timeout(self._timeout_s):
            payload = await stream.receive(MAX_REQUEST_BYTES)
        while payload is not None and await self._handle_first(stream, payload):
            # After a description the client reserves memory, then opens the version.
            payload = await _next_request(stream)

    async def _handle_first(self, stream: Stream, payload: bytes) -> bool:
        """Answer a first request, and the requests on the object that it opened.

        Returns: whether the stream starts over, as after a description.
        """
        first: wire.First = msgspec.msgpack.decode(payload, type=wire.First)
        try:
            match first:
                case wire.OpenVersion():
                    self._gate.check(first.ticket, first.version, stream.node)
                    await self._serve_version(stream, first)
                case wire.DescribeVersion():
                    self._gate.check(first.ticket, first.version.whole, stream.node)
                    async with self._weights.open_part(first.version) as part:
                        version = part.version
                        described = version.num_bytes, version.tensors, version.digest
                        await self._send(stream, wire.VersionDescription(*described))
                    return True
                case wire.DescribeFile() | wire.OpenFile():
                    self._gate.check_files(first.ticket, first.name.deployment, stream.node)
                    await self._ledger.until_settled(self._timeout_s)
                    await self._serve_file(stream, first)
                case wire.KeepFiles():
                    self._gate.check_files(first.ticket, first.deployment, self._ledger.node)
                    await self._ledger.until_settled(self._timeout_s)
                    keeping = self._replicator.keep(first)
                    # A client that has left repeats the request, or no longer needs it.
                    await self._while_waiting(stream, keeping, may_cancel=True)
                    await self._send(stream, wire.FilesKept())
        except PhaseloomError as error:
            await self._send(stream, wire.Refusal(error.info))
        return False

    async def _serve_version(self, stream: Stream, request: wire.OpenVersion) -> None:
        if request.relay is not None:
            key = msgspec.structs.replace(request.version, part=request.relay)
            async with self._weights.open_fetched(key) as fetched:
                await self._send(stream, wire.Opened({}))
                await self._handle_requests(stream, fetched, {}, request.peer)
        elif request.parts:
            await self._serve_parts(stream, request)
        else:
            digests = await self._weights.digests_of(request.version)
            await self._send(stream, wire.Opened(digests))

    async def _serve_parts(self, stream: Stream, request: wire.OpenVersion) -> None:
        if len(request.parts) > _MAX_PARTS:
            raise CallerError(
                f"at most {_MAX_PARTS} parts are allowed, got {len(request.parts)}", field="parts"
            )
        async with AsyncExitStack() as stack:
            parts = OpenParts()
            for part in sorted(set(request.parts)):
                key = msgspec.structs.replace(request.version, part=part)
                parts[part] = await stack.enter_async_context(self._weights.open_part(key))
                base = request.base if self._delta_share else None
                if base is not None and (earlier := self._base(parts[part].version, base)):
                    stack.enter_context(self._versions.using(earlier))
                    parts.bases[part] = OpenPart.of(earlier, self._versions.bytes_of(earlier))
            is_far = request.site not in {"", self._site}
            digests = {name: part.version.digest for name, part in parts.items()}
            await self._send(stream, wire.Opened(digests, is_far))
            far = parts.items() if is_far else ()
            assignments = {name: self._assignment(part, request.site) for name, part in far}
            await self._handle_requests(stream, parts, assignments, request.peer)

    async def _serve_file(self, stream: Stream, request: wire.DescribeFile | wire.OpenFile) -> None:
        header, content = await self._replicator.open(request.name)
        if isinstance(request, wire.DescribeFile):
            parts = await self._replicator.parts_of(request.name)
            await self._send(stream, wire.FileDescription(header, parts))
            return
        await self._send(stream, wire.Opened({"": header.digest}))
        await self._handle_requests(stream, content, {}, Peer("", ""))

    def _base(self, version: Version, base: wire.BaseVersion) -> Version | None:
        key = msgspec.structs.replace(version.key, seq=base.seq)
        earlier = self._versions.records.bases_of(version)
        digest = base.digests.get(key.part)
        return next(
            (
                candidate
                for candidate in earlier
                if candidate.key == key and candidate.digest == digest
            ),
            None,
        )

    def _assignment(self, part: OpenPart, site: str) -> Assignment:
        return self._assignments.setdefault(part.version, defaultdict(Assignment))[site]

    async def _handle_requests(
        self,
        stream: Stream,
        content: Served,
        assignments: Mapping[str, Assignment],
        peer: Peer,
    ) -> None:
        """Answer requests until the client closes the stream.

        Args: assignments: by part, if the client is on another site.
        """
        while (payload := await _next_request(stream)) is not None:
            request: wire.Ask = msgspec.msgpack.decode(payload, type=wire.Ask)
            memories: list[memoryview] = []
            reply: wire.Reply
            try:
                if isinstance(request, wire.Confirm):
                    await self._confirm(stream, content, request.part)
                    reply = wire.Confirmed()
                else:
                    memories, reply = await self._prepare_reply(
                        stream, content, request, assignments.get(request.part), peer
                    )
            except PhaseloomError as error:
                reply = wire.Refusal(error.info)
            await self._send(stream, reply)
            for memory in memories:
                await stream.send_bytes(memory, self._timeout_s)

    async def _prepare_reply(
        self,
        stream: Stream,
        content: Served,
        request: wire.Give,
        assignment: Assignment | None,
        peer: Peer,
    ) -> tuple[list[memoryview], wire.Given]:
        boxes_found = _find_boxes(content, request, is_assigned=assignment is not None)
        arriving = content.until_arrived(request.part, request.boxes)
        await self._while_waiting(stream, arriving, may_cancel=True)
        shares = None
        if assignment is not None:
            boxes = [
                (box, box_found.num_bytes)
                for box, box_found in zip(request.boxes, boxes_found, strict=True)
            ]
            shares = assignment.assign(boxes, request.num_bytes, request.failed, peer)
        base = content.bases.get(request.part) if isinstance(content, OpenParts) else None
        if not request.takes_delta:
            base = None
        return await asyncio.to_thread(
            _gather, request, boxes_found, shares, base, self._delta_share
        )

    async def _confirm(self, stream: Stream, content: Served, name: str) -> None:
        """Check that a part still has its committed bytes, after they were sent.

        Raises: ResourceError: DATA_LOSS: the part is bad, and may be fetched again;
                UNAVAILABLE: its policy makes it again. CallerError: the stream did not open the
                part.
        """
        part = content.get(name) if isinstance(content, OpenParts) else None
        if part is None:
            raise CallerError(f"part {name!r} is not open on this stream", field="part")
        taking = asyncio.to_thread(digest_in_threads, part.memory)
        if await self._while_waiting(stream, taking) == part.version.digest:
            return
        bad = ResourceError(
            f"version {part.version.key} no longer matches its digest",
            code=Code.DATA_LOSS,
        )
        try:
            await self._while_waiting(stream, self._weights.verify(part.version.key))
        except PhaseloomError as error:
            if error.info.code in {Code.DATA_LOSS, Code.UNAVAILABLE}:
                raise
            # The sent bytes are bad in any case.
            raise bad from error
        raise bad

    async def _while_waiting(
        self, stream: Stream, work: Awaitable[T], *, may_cancel: bool = False
    ) -> T:
        """Wait for the work, and meanwhile report progress to the client.

        Args:   may_cancel: cancel the work if the client leaves. Otherwise wait for it, because it
                reads memory.
        Raises: as the work; OSError, TimeoutError: the client has left.
        """
        doing = asyncio.ensure_future(work)
        pause_s = self._timeout_s / _WORDS_PER_TIMEOUT
        try:
            while not (await asyncio.wait([doing], timeout=pause_s))[0]:
                await self._send(stream, wire.Waiting())
        except BaseException:
            if may_cancel:
                doing.cancel()
            await asyncio.wait([doing])
            if not doing.cancelled():
                doing.exception()  # retrieved, so that asyncio does not log it
            raise
        return doing.result()

    async def _send(self, stream: Stream, message: msgspec.Struct) -> None:
        async with asyncio.timeout(self._timeout_s):
            await stream.send(message)


async def _next_request(stream: Stream) -> bytes | None:
    """The next request of a client, which may stay silent; None: it has closed the stream."""
    try:
        return await stream.receive(MAX_REQUEST_BYTES)
    except ConnectionError:
        return None


def _find_boxes(content: Served, request: wire.Give, *, is_assigned: bool) -> list[Found]:
    """Find the requested boxes. Raises: CallerError: they do not exist, or are too large."""
    if len(request.boxes) > MAX_BATCH_BOXES:
        raise CallerError(
            f"at most {MAX_BATCH_BOXES} boxes are allowed, got {len(request.boxes)}", field="boxes"
        )
    matches = [content.find(request.part, box) for box in request.boxes]
    num_bytes = sum(box_match.num_bytes for box_match in matches)
    if not is_assigned and num_bytes != request.num_bytes:
        raise CallerError(
            f"the boxes have {num_bytes} bytes, not {request.num_bytes}", field="num_bytes"
        )
    if not 0 <= request.num_bytes <= MAX_BATCH_BYTES:
        raise CallerError(
            f"num_bytes must be from 0 to {MAX_BATCH_BYTES}, got {request.num_bytes}",
            field="num_bytes",
        )
    return matches


def _gather(
    request: wire.Give,
    boxes: Sequence[Found],
    shares: Shares | None,
    base: OpenPart | None,
    delta_share: float,
) -> tuple[list[memoryview], wire.Given]:
    """The bytes to send, and the reply that precedes them. Slow: run it in a thread.

    Args: base: the earlier part that a delta may be based on, if any.
          delta_share: the largest useful delta, as a share of the bytes.
    """
    memories, reply = _gather_whole(request, boxes, shares)
    if len(memories) * _FEW_BYTES > sum(map(len, memories)):
        memories = [delta.joined(memories)]
    if base is None:
        return memories, reply
    sent = request.boxes if shares is None else [box for _, box in shares.own_boxes]
    return _as_delta(memories, reply, base, sent, delta_share)


def _gather_whole(
    request: wire.Give, boxes: Sequence[Found], shares: Shares | None
) -> tuple[list[memoryview], wire.Given]:
    if shares is None:
        memories = [memory for box_found in boxes for memory in box_found.read()]
        return memories, wire.Given(_digest(memories))

    def sized(fragment: Fragment) -> tuple[Box, int]:
        number, box = fragment
        return box, boxes[number].of(box).num_bytes

    memories = list(_read_fragments(boxes, shares.own_boxes))
    peer_boxes = [
        wire.Shared(holder, share, _digest(_read_fragments(boxes, share)))
        for holder, fragments in shares.peer_boxes.items()
        for share in split_into_requests(fragments, sized, request.num_bytes)
    ]
    assigned = wire.Assigned(shares.num_boxes, shares.own_boxes, peer_boxes)
    return memories, wire.Given(_digest(memories), assigned)


def _as_delta(
    memories: list[memoryview],
    reply: wire.Given,
    base: OpenPart,
    boxes: Sequence[Box],
    share: float,
) -> tuple[list[memoryview], wire.Given]:
    """Encode the bytes as a delta, if it is at most this share of them."""
    earlier = [memory for box in boxes for memory in base.find(box).read()]
    if not earlier:
        return memories, reply
    content = delta.joined(memories)
    encoded = delta.encode(delta.joined(earlier), content, int(share * len(content)))
    if encoded is None:
        return memories, reply
    return [memoryview(encoded)], msgspec.structs.replace(reply, delta_bytes=len(encoded))


def _read_fragments(boxes: Sequence[Found], fragments: Iterable[Fragment]) -> Iterator[memoryview]:
    for number, box in fragments:
        yield from boxes[number].of(box).read()


def _digest(memories: Iterable[memoryview]) -> str:
    digest = xxhash.xxh3_128()
    for memory in memories:
        digest.update(memory)
    return digest.hexdigest()
