"""Fetches slices of a weights version, or blocks of a state file, each byte once, from all sources.

A few streams to every source pull batches of boxes, whichever stream is free next: sources that
hold the same part share its batches, and where one source fails the others take its batches. Bytes
that have come and are verified stay. All sources of a part must hold the same bytes. A slow
receiver slows its sources: the bytes go straight into the memory that they are for.

Where all sources of a part are on other sites, each byte crosses the slow link once: all nodes of
this site choose the same source, and the source assigns each byte to one of the nodes
(`assignment.py`). A node takes the other bytes from the peers that they were assigned to, and
checks them against the checksum that the source gave. A peer that fails is asked no more, and its
bytes are asked of the source.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar

import msgspec
import xxhash

from phaseloom.common.contract.errors import (
    CallerError,
    Code,
    PhaseloomError,
    ResourceError,
    to_exception,
)
from phaseloom.common.tensors.blockhash import digest_in_threads, num_threads
from phaseloom.statemgr.transfer import wire
from phaseloom.statemgr.transfer.assignment import Peer
from phaseloom.statemgr.transfer.delta import DeltaError, apply, joined
from phaseloom.statemgr.transfer.served import Incoming
from phaseloom.statemgr.transfer.tensorslices import (
    MAX_BATCH_BYTES,
    Batch,
    Piece,
    chunk_bytes,
    grouped,
)
from phaseloom.statemgr.transfer.tls import (
    Identity,
    Stream,
    closed_on_failure,
    connect,
    in_thread,
    typed_error,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

PEER_TIMEOUTS = 6.0
"""The number of timeouts that a peer may take for one request, while it says that it is at work."""
_STREAMS = 4
"""The most streams to one source: no more than there are threads to decrypt them."""
_STREAM_BYTES = 4 * 1024 * 1024
"""A fetch has one stream to each near source for so many bytes: to open another one takes as long
as to move one of these megabytes."""
_MAX_STREAMS = 16
"""The most streams of one fetch, unless it has more sources: each source has one at least."""
_AHEAD = 16
"""Chunks in one request to a source that assigns them: the source gives about one of them, and says
which of the others peers have."""
_MAX_FAILURES = 3
"""The most failures of a source in a row, without a batch in between."""
_BACKOFF_S = 0.05
_FAILURES = (OSError, TimeoutError, msgspec.DecodeError, PhaseloomError)
_FEW_SPANS = 256
"""Spans that are found in less time than it takes to wake a thread."""
_FEW_BYTES = 4096
"""The average length in bytes of a batch's runs below which the batch is received in one piece, and
then put where the runs belong."""


@dataclass
class Home:
    """The state manager that fetches."""

    identity: Identity
    endpoint: str
    """The address at which the state manager serves its peers."""
    site: str
    """The site of the node, within which links are fast; empty: the node shares with nobody."""
    timeout_s: float
    """The limit of each step: connecting, a reply, a pause within a batch."""


class LocalError(Exception):
    """The fetched bytes cannot be put where they belong: no other source helps."""

    def __init__(self, error: PhaseloomError) -> None:
        super().__init__(str(error))
        self.error = error


class Sink(Protocol):
    """The place that the bytes of a fetch go to."""

    base: memoryview | None
    """The bytes of an earlier version, laid out as those that are fetched: batches may come as
    deltas of them. None: there is no such version."""

    async def receive(
        self, stream: Stream, batch: Batch, timeout_s: float, delta_bytes: int = 0
    ) -> str:
        """Take a batch from the stream, to where it belongs. Returns: its xxh3-128.

        Args:   delta_bytes: the size of the delta that comes in the batch's place; 0: none does.
        Raises: OSError, TimeoutError: the stream broke. LocalError: the bytes cannot be put there.
                ResourceError: DATA_LOSS: the batch is bad. DeltaError: the delta does not fit.
        """

    async def is_sound(self) -> bool | None:
        """Whether all that came is what was committed; None: only the sources can tell."""


@dataclass
class Memory:
    """A sink in memory."""

    memory: memoryview
    digest: str = ""
    """The digest that the memory must have once all has come; empty: it is not known."""
    base: memoryview | None = None

    async def receive(
        self, stream: Stream, batch: Batch, timeout_s: float, delta_bytes: int = 0
    ) -> str:
        digest = xxhash.xxh3_128()
        if batch.max_spans <= _FEW_SPANS:
            spans = batch.spans
        else:
            # Narrow slices have hundreds of thousands of spans: others are served meanwhile.
            spans = await asyncio.to_thread(lambda: batch.spans)
        if delta_bytes:
            delta = memoryview(bytearray(delta_bytes))
            await stream.receive_into(delta, timeout_s)
            return await in_thread(partial(self._apply, batch, delta), self.memory[:])
        if batch.num_bytes >= _FEW_BYTES * len(spans):
            for span in spans:
                await stream.receive_into(self.memory[span], timeout_s, digest.update)
        else:
            content = memoryview(bytearray(batch.num_bytes))
            await stream.receive_into(content, timeout_s, digest.update)
            await in_thread(partial(batch.put, self.memory), content)
        return digest.hexdigest()

    def _apply(self, batch: Batch, delta: memoryview, memory: memoryview) -> str:
        """Put what a delta makes of the base where it belongs. This takes long: run it in a thread.

        Returns: the xxh3-128 of the batch. Raises: DeltaError.
        """
        if self.base is None:
            raise DeltaError("the base is given up")
        content = apply(joined([self.base[span] for span in batch.spans]), delta)
        batch.put(memory, content)
        return xxhash.xxh3_128_hexdigest(content)

    async def is_sound(self) -> bool | None:
        if not self.digest:
            return None
        return await asyncio.to_thread(digest_in_threads, self.memory) == self.digest


@dataclass
class Fetch:
    """One fetch of a version, of slices of one, or of blocks of a state file.

    `fetch_all` is called once.
    """

    label: str
    """The name of the fetched object, for errors and logs."""
    open_with: Callable[[list[str], str | None], wire.First]
    """Makes the first message of a stream: to a source, with the parts that are wanted; to a peer,
    with the peer's session."""
    home: Home
    incoming: Incoming
    sink: Sink
    idle_streams: dict[str, Stream] = field(default_factory=dict)
    """Streams that nothing was opened on yet, by endpoint: they are used before others are made.
    The caller closes those that are left."""
    errors: dict[str, PhaseloomError] = field(default_factory=dict, init=False)
    """The last error of each source that is given up, by endpoint."""
    fetched_bytes: int = field(default=0, init=False)
    """Bytes that came from sources."""
    relayed_bytes: int = field(default=0, init=False)
    """Bytes that came from peers."""
    delta_bytes: int = field(default=0, init=False)
    """The size of the deltas that came from sources."""
    rebuilt_bytes: int = field(default=0, init=False)
    """Bytes, of those from sources, that the deltas made of the base."""
    _queues: dict[str, deque[Batch]] = field(default_factory=dict, init=False)
    """The batches that are still to be asked of a source, by part."""
    _batch_bytes: int = field(default=0, init=False)
    """The size of the largest batch."""
    _chunk_bytes: int = field(default=0, init=False)
    """The size of the chunks that a far source assigns."""
    _num_near: int = field(default=1, init=False)
    """The number of streams to each near source."""
    _sources: list[_Source] = field(default_factory=list, init=False)
    _peer_shares: dict[Peer, deque[tuple[Batch, str]]] = field(default_factory=dict, init=False)
    """The batches that each peer is to deliver, each with its checksum."""
    _pulling: list[asyncio.Task[None]] = field(default_factory=list, init=False)
    _relaying: list[asyncio.Task[None]] = field(default_factory=list, init=False)
    _failed_peers: set[Peer] = field(default_factory=set, init=False)
    """Peers that failed."""
    _failure: Exception | None = field(default=None, init=False)
    _retry: Fetch | None = field(default=None, init=False)
    """The second try, where the bytes of the first were bad."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _ended: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set once everything has come, or nothing more will."""
    _verdict_known: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set once it is known whether the sources have to confirm what came."""
    _must_confirm: bool = field(default=False, init=False)

    async def fetch_all(self, batches: Sequence[Batch], sources: Mapping[str, list[str]]) -> None:
        """Fetch the batches.

        Args:   sources: the endpoints that have each part, by part.
        Raises: PhaseloomError: some batch can be had from no source. ResourceError: DATA_LOSS: the
                fetched bytes are bad as a whole; ABORTED: `end` was called. LocalError: the sink
                cannot take them.
        """
        parts_of: dict[str, set[str]] = {}
        for batch in batches:
            if batch.part not in self._queues:
                self._queues[batch.part] = deque()
                for endpoint in sources.get(batch.part, []):
                    parts_of.setdefault(endpoint, set()).add(batch.part)
            self._queues[batch.part].append(batch)
            self._batch_bytes = max(self._batch_bytes, batch.num_bytes)
        is_far = None if self.home.site else False
        self._sources = [_Source(e, sorted(parts), is_far) for e, parts in parts_of.items()]
        self._check_reachable()
        if self.incoming.is_whole:
            self._ended.set()
        per_source = min(_STREAMS, num_threads(), _MAX_STREAMS // max(1, len(self._sources)))
        num_bytes = sum(batch.num_bytes for batch in batches)
        self._chunk_bytes = chunk_bytes(num_bytes)
        self._num_near = max(1, min(per_source, -(-num_bytes // _STREAM_BYTES)))
        num_streams = max(1, min(per_source, -(-num_bytes // self._chunk_bytes)))
        async with asyncio.TaskGroup() as group:
            self._group = group
            for source in self._sources:
                for number in range(num_streams if self.home.site else self._num_near):
                    self._pulling.append(group.create_task(self._pull(source, number)))
            await self._ended.wait()
            # After a failure the memory is wanted back, however long a source would take yet.
            over = self._relaying if self._failure is None else self._relaying + self._pulling
            for task in over:
                task.cancel()
            is_sound = await self.sink.is_sound() if self._failure is None else True
            self._must_confirm = not is_sound
            self._verdict_known.set()
        if self._failure is not None:
            raise self._failure
        if is_sound is False:
            raise ResourceError(f"{self.label} does not match its digest", code=Code.DATA_LOSS)

    async def fetch_with_retry(
        self, batches: Sequence[Batch], sources: Mapping[str, list[str]]
    ) -> Fetch:
        """Fetch the batches, and once more where the fetched bytes are bad: by then the source that
        sent them has dropped its copy.

        Returns: the fetch by which the batches came.
        """
        try:
            await self.fetch_all(batches, sources)
            return self
        except ResourceError as error:
            if error.info.code is not Code.DATA_LOSS:
                raise
            log.warning("%s; once more", error)
            self.sink.base = None
            for batch in batches:
                self.incoming.forget(batch)
            again = self._retry = replace(self)
            try:
                await again.fetch_all(batches, sources)
            except PhaseloomError as failed:
                # It may come later.
                raise failed if failed.info.code is Code.UNAVAILABLE else error from failed
            return again

    def end(self) -> None:
        """End the fetch at once: nobody needs any more what it fetches. `fetch_all` then raises
        ABORTED."""
        running = self._retry or self
        running._end(ResourceError(f"{self.label} was dropped", code=Code.ABORTED))

    def check(self, part: str, digest: str, source_name: str) -> None:
        """Check that the part at a source has the digest that this fetch expects.

        Raises: CallerError: FAILED_PRECONDITION: the part there has another digest.
        """
        expected = self.incoming.digests.setdefault(part, digest)
        if expected != digest:
            raise CallerError(
                f"{self.label} is another at {source_name}: "
                f"part {part or 'all'} has digest {digest}, not {expected}",
                code=Code.FAILED_PRECONDITION,
                field="sources",
                remedy="name sources that hold the same version",
            )

    # --- Sources ---------------------------------------------------------------------------------

    async def _pull(self, source: _Source, number: int) -> None:
        """Work through one stream to a source, which is opened again as often as it breaks.

        Args: number: the stream's, from 0 on; the first one finds out whether the source is far.
        """
        stream: Stream | None = None
        is_first = number == 0
        try:
            while not self._ended.is_set() and not source.is_abandoned:
                is_used = source.is_far or number < self._num_near
                batch = self._next_batch(source) if is_used else None
                if batch is None and not (is_first and source.is_far is None):
                    await self._changed.wait()
                    continue
                try:
                    try:
                        stream = stream or await self._open(source)
                    except BaseException:
                        self._requeue(batch)
                        raise
                    if batch is not None:
                        await self._fetch(stream, source, batch)
                except LocalError as failure:
                    self._end(failure)
                except _FAILURES as error:
                    if stream is not None:
                        stream.close()
                        stream = None
                    self._record_failure(source, error)
                    await asyncio.sleep(_BACKOFF_S * min(source.failures, _MAX_FAILURES))
            if is_first and not source.is_abandoned:
                await self._verdict_known.wait()
                if self._must_confirm:
                    await self._confirm(source, stream)
        finally:
            if stream is not None:
                stream.close()

    def _next_batch(self, source: _Source) -> Batch | None:
        for part in source.parts:
            if self._queues[part] and self._is_next_source(source, part):
                return self._next_chunks(part) if source.is_far else self._queues[part].popleft()
        return None

    def _next_chunks(self, part: str) -> Batch:
        """The next chunks of a part."""
        queue, limit = self._queues[part], _AHEAD * self._chunk_bytes
        pieces: list[Piece] = []
        num_bytes = 0
        while queue and num_bytes < limit:
            batch = queue.popleft()
            pieces += (chunk for piece in batch.pieces for chunk in piece.cut(self._chunk_bytes))
            num_bytes += batch.num_bytes
        first, *later = grouped(pieces, limit)
        self._requeue(Batch(part, [piece for group in later for piece in group]))
        return Batch(part, first)

    def _is_next_source(self, source: _Source, part: str) -> bool:
        """Whether the part, or the rest of it, is to be fetched from this source now."""
        if not source.is_far:
            return source.is_far is not None
        rivals = (rival for rival in self._sources if rival is not source and part in rival.parts)
        return all(
            rival.is_abandoned
            or rival.failures
            or (rival.is_far and rival.rank(part) < source.rank(part))
            for rival in rivals
        )

    async def _open(self, source: _Source) -> Stream:
        """Open a stream to a source. Raises: CallerError: it refuses, or has other bytes."""
        stream, opened = await self._open_stream(source.endpoint, source.parts)
        with closed_on_failure(stream):
            for part in source.parts:
                self.check(part, opened.digests.get(part, ""), source.endpoint)
        source.is_far = opened.is_far
        self._announce()
        return stream

    async def _fetch(self, stream: Stream, source: _Source, batch: Batch) -> None:
        """Fetch a batch; from a source that assigns chunks, only this node's share of the batch."""
        try:
            limit_bytes = self._chunk_bytes if source.is_far else MAX_BATCH_BYTES
            num_bytes = min(batch.num_bytes, limit_bytes)
            takes_delta = self.sink.base is not None
            failed = sorted(self._failed_peers)
            give = wire.Give(batch.part, batch.boxes, num_bytes, failed, takes_delta)
            reply = await self._call(stream, give, wire.Given)
            if reply.assigned is not None:
                batch = self._split(batch, reply.assigned)
            if not 0 <= reply.delta_bytes <= (batch.num_bytes if takes_delta else 0):
                raise ConnectionError(f"it sends a delta of {reply.delta_bytes} bytes")
            source.delivered.add(batch.part)
            await self._receive(stream, batch, reply.digest, reply.delta_bytes)
        except DeltaError as error:
            # The base is bad, here or at the source: the rest comes whole, also from this source.
            log.warning("%s from %s: %s; it comes whole", self.label, source.endpoint, error)
            self.sink.base = None
            self._requeue(batch)
            return
        except BaseException:
            self._requeue(batch)
            raise
        source.succeeded()
        self.fetched_bytes += batch.num_bytes
        if reply.delta_bytes:
            self.delta_bytes += reply.delta_bytes
            self.rebuilt_bytes += batch.num_bytes
        self._record_arrival(batch)

    def _split(self, batch: Batch, assigned: wire.Assigned) -> Batch:
        """Divide a batch as the source has assigned it. Returns: the share that the source sends.

        The shares of peers are asked of them, and boxes without an answer are queued again.
        Raises: ConnectionError, CallerError: the answer does not fit the batch.
        """
        if not 1 <= assigned.num_boxes <= len(batch.pieces):
            raise ConnectionError(f"it tells of {assigned.num_boxes} boxes")
        answered = Batch(batch.part, batch.pieces[: assigned.num_boxes])
        local, *shares = answered.split(
            [assigned.own_boxes, *(share.boxes for share in assigned.peer_boxes)]
        )
        for peer_batch, share in zip(shares, assigned.peer_boxes, strict=True):
            self._relay(peer_batch, share)
        self._requeue(Batch(batch.part, batch.pieces[assigned.num_boxes :]))
        return local

    async def _confirm(self, source: _Source, stream: Stream | None) -> None:
        """Let a source verify the parts that it sent, or gave checksums of. A source that is gone
        by now is believed."""
        opened: Stream | None = None
        is_asked = False
        try:
            for part in sorted(source.delivered):
                if stream is None:
                    stream = opened = await self._open(source)
                is_asked = True
                await self._call(stream, wire.Confirm(part), wire.Confirmed)
        except _FAILURES as error:
            if is_asked and isinstance(error, ResourceError):
                self._failure = error
            else:
                log.warning("%s confirms nothing any more: %s", source.endpoint, error)
        finally:
            if opened is not None:
                opened.close()

    def _record_failure(self, source: _Source, error: Exception) -> None:
        log.warning("%s from %s: %s", self.label, source.endpoint, error)
        source.failures += 1
        idle_s = time.monotonic() - source.progress_s
        is_bad = isinstance(error, ResourceError) and error.info.code is Code.DATA_LOSS
        is_hopeless = source.failures > _MAX_FAILURES and (is_bad or idle_s > self.home.timeout_s)
        if is_hopeless or isinstance(error, CallerError):
            source.is_abandoned = True
            self.errors[source.endpoint] = typed_error(error, source.endpoint, self.home.timeout_s)
        self._check_reachable()
        self._announce()

    def _check_reachable(self) -> None:
        """End the fetch where batches are queued that no source is left to ask for."""
        reachable = {
            part for source in self._sources if not source.is_abandoned for part in source.parts
        }
        for part, queue in self._queues.items():
            if queue and part not in reachable:
                self._end(
                    not_delivered(f"part {part or 'all'} of {self.label}", self.errors.values())
                )

    def _end(self, error: Exception) -> None:
        self._failure = error
        self._ended.set()
        self._announce()

    # --- Peers -----------------------------------------------------------------------------------

    def _relay(self, batch: Batch, share: wire.Shared) -> None:
        """Have a batch fetched from the peer that it was assigned to."""
        peer = share.holder
        if peer in self._failed_peers:
            self._requeue(batch)
        elif peer in self._peer_shares:
            self._peer_shares[peer].append((batch, share.digest))
        else:
            self._peer_shares[peer] = deque([(batch, share.digest)])
            self._relaying.append(self._group.create_task(self._pull_from_peer(peer)))
        self._announce()

    async def _pull_from_peer(self, peer: Peer) -> None:
        shares = self._peer_shares[peer]
        stream: Stream | None = None
        try:
            # A source that is still being asked may name a peer when all is over.
            while not self._ended.is_set():
                if not shares:
                    await self._changed.wait()
                    continue
                batch, digest = shares[0]
                if stream is None:
                    stream, _ = await self._open_stream(peer.endpoint, [], peer.session)
                give = wire.Give(batch.part, batch.boxes, batch.num_bytes)
                async with asyncio.timeout(PEER_TIMEOUTS * self.home.timeout_s):
                    reply = await self._call(stream, give, wire.Given)
                if reply.assigned is not None:
                    raise ConnectionError("it assigns what is not its own")
                await self._receive(stream, batch, digest)
                shares.popleft()
                self.relayed_bytes += batch.num_bytes
                self._record_arrival(batch)
        except _FAILURES as error:
            log.warning("%s by way of %s: %r", self.label, peer, error)
            self._failed_peers.add(peer)
            del self._peer_shares[peer]
            for batch, _ in shares:
                self._requeue(batch)
            self._check_reachable()
        finally:
            if stream is not None:
                stream.close()

    # --- Both ------------------------------------------------------------------------------------

    async def _open_stream(
        self, endpoint: str, parts: list[str], session: str | None = None
    ) -> tuple[Stream, wire.Opened]:
        stream = self.idle_streams.pop(endpoint, None)
        if stream is None:
            stream = await connect(endpoint, self.home.identity, self.home.timeout_s)
        with closed_on_failure(stream):
            return stream, await self._call(stream, self.open_with(parts, session), wire.Opened)

    async def _call(self, stream: Stream, message: wire.First | wire.Ask, answer: type[T]) -> T:
        return await call(stream, message, answer, self.home.timeout_s)

    async def _receive(
        self, stream: Stream, batch: Batch, expected: str, delta_bytes: int = 0
    ) -> None:
        """Receive a batch and verify its checksum.

        Raises: ResourceError: DATA_LOSS: the batch is bad. DeltaError: it came as a delta, and is.
        """
        timeout_s = self.home.timeout_s
        if await self.sink.receive(stream, batch, timeout_s, delta_bytes) == expected:
            return
        if delta_bytes:
            raise DeltaError("a delta makes other bytes")
        raise ResourceError("bytes do not match their checksum", code=Code.DATA_LOSS)

    def _record_arrival(self, batch: Batch) -> None:
        self.incoming.add(batch)
        if self.incoming.is_whole:
            self._ended.set()
        self._announce()

    def _requeue(self, batch: Batch | None) -> None:
        """Queue a batch again, before all others, to be asked of a source."""
        if batch is not None:
            groups = grouped(batch.pieces, self._batch_bytes)
            again = [Batch(batch.part, pieces) for pieces in groups]
            self._queues[batch.part].extendleft(reversed(again))
            self._announce()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass(eq=False)
class _Source:
    endpoint: str
    parts: list[str]
    is_far: bool | None
    """Whether the source is on another site; None: not known yet."""
    failures: int = 0
    """Failures in a row."""
    progress_s: float = field(default_factory=time.monotonic)
    """The time at which the last batch came from the source, on the monotonic clock."""
    is_abandoned: bool = False
    """Whether the source is given up."""
    delivered: set[str] = field(default_factory=set)
    """Parts of which the source sent bytes, or gave a checksum."""

    def succeeded(self) -> None:
        self.failures, self.progress_s = 0, time.monotonic()

    def rank(self, part: str) -> int:
        """The rank of the source for a part: all nodes of a site fetch the part from the far source
        with the highest rank."""
        return xxhash.xxh3_64_intdigest(f"{part} {self.endpoint}")


async def call(
    stream: Stream, message: wire.First | wire.Ask, answer: type[T], timeout_s: float
) -> T:
    """Send a message and wait for its answer, as long as the other end says that it is at work.

    Raises: PhaseloomError: a refusal. TimeoutError: no word within `timeout_s`. ConnectionError:
            the stream broke, or the answer is of another type. msgspec.DecodeError.
    """
    async with asyncio.timeout(timeout_s):
        await stream.send(message)
    while True:
        async with asyncio.timeout(timeout_s):
            payload = await stream.receive(wire.MAX_REPLY_BYTES)
        reply: wire.Reply = msgspec.msgpack.decode(payload, type=wire.Reply)
        if isinstance(reply, wire.Refusal):
            raise to_exception(reply.error)
        if isinstance(reply, answer):
            return reply
        if not isinstance(reply, wire.Waiting):
            raise ConnectionError(f"it answered {type(reply).__name__}")


async def call_once(endpoint: str, message: wire.First, answer: type[T], home: Home) -> T:
    """Send one message on a stream of its own and return the answer. Raises: as `ask_first`."""
    stream, answered = await connect_and_call(endpoint, message, answer, home)
    stream.close()
    return answered


async def connect_and_call(
    endpoint: str, message: wire.First, answer: type[T], home: Home
) -> tuple[Stream, T]:
    """Connect, and send a first message. Returns: the stream, for the caller to close; the answer.

    Raises: ResourceError: the endpoint is out of reach, or the stream broke. CallerError: the
            message was refused there; a bad endpoint.
    """
    stream = await connect(endpoint, home.identity, home.timeout_s)
    with closed_on_failure(stream):
        try:
            return stream, await call(stream, message, answer, home.timeout_s)
        except (OSError, TimeoutError, msgspec.DecodeError) as error:
            raise typed_error(error, endpoint, home.timeout_s) from error


def not_delivered(label: str, errors: Iterable[PhaseloomError]) -> ResourceError:
    """The error where no source could deliver an object. The code is the one that all sources give;
    where they differ, UNAVAILABLE: a later try may succeed."""
    failures = list(errors)
    codes = {error.info.code for error in failures}
    return ResourceError(
        f"{label} could not be fetched: {'; '.join(map(str, failures)) or 'no source is named'}",
        code=codes.pop() if len(codes) == 1 else Code.UNAVAILABLE,
        remedy="retry; name sources that hold the version",
    )
