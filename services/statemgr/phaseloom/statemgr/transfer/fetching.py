"""Fetches slices of a weights version, or blocks of a state file, from all sources at once.

Up to four streams per source pull batches of boxes from one queue per part, so a fast source
delivers more than a slow one. If a source fails, the others take over its batches; verified bytes
are never fetched again. All sources of a part must have the same bytes. Batches are written
straight to their final memory, so a slow receiver slows its sources down.

If all sources of a part are on other sites, each byte crosses the slow link once. All nodes of this
site choose the same source, and that source assigns each byte to one of the nodes
(`assignment.py`). A node fetches its own share from the source and the rest from the peers that
have it, and verifies that rest against checksums from the source. If a peer fails, its bytes come
from the source after all.
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
"""Number of timeouts for which one request may last while the peer reports progress."""
_STREAMS = 4
"""Streams to one source; one per thread that can decrypt."""
_STREAM_BYTES = 4 * 1024 * 1024
"""Bytes per stream to a near source. Opening a stream takes as long as moving one of these
megabytes."""
_MAX_STREAMS = 16
"""Streams of one fetch, unless it has more sources than this: each source has at least one."""
_AHEAD = 16
"""Chunks in one request to a source that assigns them. The source sends about one of these chunks
and names the peers that have the others."""
_MAX_FAILURES = 3
"""Consecutive failures of a source to tolerate before giving it up."""
_BACKOFF_S = 0.05
_FAILURES = (OSError, TimeoutError, msgspec.DecodeError, PhaseloomError)
_FEW_SPANS = 256
"""Spans that are computed faster than a thread wakes up."""
_FEW_BYTES = 4096
"""Average run length of a batch, in bytes, below which the batch is received in one piece and then
copied to its places."""


@dataclass
class Home:
    """This state manager, as the one that fetches."""

    identity: Identity
    endpoint: str
    """The address at which other nodes reach this state manager."""
    site: str
    """The site of this node, within which links are fast. Empty: the node shares with no other
    node."""
    timeout_s: float
    """Limit for each step: connecting, a reply, a pause within a batch."""


class LocalError(Exception):
    """The fetched bytes cannot be stored here, so another source would not help."""

    def __init__(self, error: PhaseloomError) -> None:
        super().__init__(str(error))
        self.error = error


class Sink(Protocol):
    """The destination of a fetch's bytes."""

    base: memoryview | None
    """The bytes of an earlier version in the same layout. Sources may send deltas of it. None:
    there is no such version."""

    async def receive(
        self, stream: Stream, batch: Batch, timeout_s: float, delta_bytes: int = 0
    ) -> str:
        """Receive a batch from the stream and store it.

        Args:    delta_bytes: the size of the delta that comes instead of the batch; 0: the batch
                 itself comes.
        Returns: the xxh3-128 of the batch.
        Raises:  OSError, TimeoutError: the stream broke. LocalError: the bytes cannot be stored.
                 ResourceError: DATA_LOSS: the batch is bad. DeltaError: the delta does not fit the
                 base.
        """

    async def is_sound(self) -> bool | None:
        """Whether the received bytes are the committed ones; None: only the sources can tell."""


@dataclass
class Memory:
    """A sink that writes to host memory."""

    memory: memoryview
    digest: str = ""
    """The digest that the memory must have in the end; empty: not known."""
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
        """Apply a delta to the base and write the result in place. Slow: run it in a thread.

        Returns: the xxh3-128 of the batch.
        Raises:  DeltaError.
        """
        if self.base is None:
            raise DeltaError("the base was given up")
        content = apply(joined([self.base[span] for span in batch.spans]), delta)
        batch.put(memory, content)
        return xxhash.xxh3_128_hexdigest(content)

    async def is_sound(self) -> bool | None:
        if not self.digest:
            return None
        return await asyncio.to_thread(digest_in_threads, self.memory) == self.digest


@dataclass
class Fetch:
    """One fetch of a version, of slices of a version, or of the blocks of a state file.

    Call `fetch_all` or `fetch_with_retry` once.
    """

    label: str
    """Name of the fetched object in errors and logs."""
    open_with: Callable[[list[str], str | None], wire.First]
    """Makes the first message of a stream. Called with the parts to fetch from a source, or with
    the session of a peer."""
    home: Home
    incoming: Incoming
    sink: Sink
    idle_streams: dict[str, Stream] = field(default_factory=dict)
    """Open streams that carry nothing yet, by endpoint. They are used before new ones are opened;
    the caller closes the unused ones."""
    errors: dict[str, PhaseloomError] = field(default_factory=dict, init=False)
    """The last error of each source that was given up, by endpoint."""
    fetched_bytes: int = field(default=0, init=False)
    """Bytes that came from sources."""
    relayed_bytes: int = field(default=0, init=False)
    """Bytes that came from peers."""
    delta_bytes: int = field(default=0, init=False)
    """Size of the deltas that came from sources."""
    rebuilt_bytes: int = field(default=0, init=False)
    """Bytes that those deltas produced; `fetched_bytes` includes them."""
    _queues: dict[str, deque[Batch]] = field(default_factory=dict, init=False)
    """Batches to request from a source, by part."""
    _batch_bytes: int = field(default=0, init=False)
    """Size of the largest batch."""
    _chunk_bytes: int = field(default=0, init=False)
    """Size of the chunks that a far source assigns."""
    _num_near: int = field(default=1, init=False)
    """Streams to each near source."""
    _sources: list[_Source] = field(default_factory=list, init=False)
    _peer_shares: dict[Peer, deque[tuple[Batch, str]]] = field(default_factory=dict, init=False)
    """Batches to request from each peer, with the checksum of each batch."""
    _pulling: list[asyncio.Task[None]] = field(default_factory=list, init=False)
    _relaying: list[asyncio.Task[None]] = field(default_factory=list, init=False)
    _failed_peers: set[Peer] = field(default_factory=set, init=False)
    _failure: Exception | None = field(default=None, init=False)
    _retry: Fetch | None = field(default=None, init=False)
    """The second attempt, if the bytes of the first were bad."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _ended: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set once everything has arrived, or nothing more will."""
    _verdict_known: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set once `_must_confirm` is known."""
    _must_confirm: bool = field(default=False, init=False)

    async def fetch_all(self, batches: Sequence[Batch], sources: Mapping[str, list[str]]) -> None:
        """Fetch the batches.

        Args:   sources: the endpoints that have each part, by part.
        Raises: PhaseloomError: no source delivered some batch. ResourceError: DATA_LOSS: the
                fetched bytes as a whole are bad; ABORTED: `end` was called. LocalError: the sink
                cannot store the bytes.
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
            # After a failure the caller needs the memory back, so slow sources are not waited for.
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
        """Fetch the batches, and once more if the fetched bytes are bad: by then the source that
        sent them has dropped its copy.

        Returns: the fetch that succeeded.
        Raises:  as `fetch_all`.
        """
        try:
            await self.fetch_all(batches, sources)
            return self
        except ResourceError as error:
            if error.info.code is not Code.DATA_LOSS:
                raise
            log.warning("%s; fetching it again", error)
            self.sink.base = None
            for batch in batches:
                self.incoming.forget(batch)
            again = self._retry = replace(self)
            try:
                await again.fetch_all(batches, sources)
            except PhaseloomError as failed:
                # A source that does not answer may have good bytes: the caller may try again later.
                raise failed if failed.info.code is Code.UNAVAILABLE else error from failed
            return again

    def end(self) -> None:
        """End the fetch at once because its result is no longer needed; `fetch_all` raises
        ABORTED."""
        running = self._retry or self
        running._end(ResourceError(f"{self.label} was dropped", code=Code.ABORTED))

    def check(self, part: str, digest: str, source_name: str) -> None:
        """Check that a source's copy of a part is the same as all other copies.

        Raises: CallerError: FAILED_PRECONDITION: the copy has another digest.
        """
        expected = self.incoming.digests.setdefault(part, digest)
        if expected != digest:
            raise CallerError(
                f"{self.label} differs at {source_name}: "
                f"part {part or 'all'} has digest {digest}, not {expected}",
                code=Code.FAILED_PRECONDITION,
                field="sources",
                remedy="name sources that hold the same version",
            )

    # --- Sources ---------------------------------------------------------------------------------

    async def _pull(self, source: _Source, number: int) -> None:
        """Fetch batches over one stream to a source, reopening the stream whenever it breaks.

        Args: number: the number of the stream. Stream 0 also finds out whether the source is far,
              and has the source confirm its parts in the end.
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
        """Whether to fetch the rest of the part from this source now.

        A far source is used only if every other source of the part is given up, is failing, or
        ranks lower.
        """
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
        stream, opened = await self._open_stream(source.endpoint, source.parts)
        with closed_on_failure(stream):
            for part in source.parts:
                self.check(part, opened.digests.get(part, ""), source.endpoint)
        source.is_far = opened.is_far
        self._announce()
        return stream

    async def _fetch(self, stream: Stream, source: _Source, batch: Batch) -> None:
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
            # The base is bad, here or at the source, so request no more deltas from anybody.
            log.warning(
                "%s from %s: %s; requesting no more deltas", self.label, source.endpoint, error
            )
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

        Peers' shares are queued for them, and boxes without an answer for a source.

        Raises: ConnectionError, CallerError: the answer does not fit the batch.
        """
        if not 1 <= assigned.num_boxes <= len(batch.pieces):
            raise ConnectionError(f"it answered {assigned.num_boxes} boxes, more than requested")
        answered = Batch(batch.part, batch.pieces[: assigned.num_boxes])
        local, *shares = answered.split(
            [assigned.own_boxes, *(share.boxes for share in assigned.peer_boxes)]
        )
        for peer_batch, share in zip(shares, assigned.peer_boxes, strict=True):
            self._relay(peer_batch, share)
        self._requeue(Batch(batch.part, batch.pieces[assigned.num_boxes :]))
        return local

    async def _confirm(self, source: _Source, stream: Stream | None) -> None:
        """Ask a source to verify the parts that it sent; a source that has left is trusted."""
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
                log.warning("%s could not confirm what it sent: %s", source.endpoint, error)
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
            # A source may still name a peer after the fetch has ended.
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
                    raise ConnectionError("a peer may not assign boxes")
                await self._receive(stream, batch, digest)
                shares.popleft()
                self.relayed_bytes += batch.num_bytes
                self._record_arrival(batch)
        except _FAILURES as error:
            log.warning("%s from peer %s: %r", self.label, peer, error)
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
        timeout_s = self.home.timeout_s
        if await self.sink.receive(stream, batch, timeout_s, delta_bytes) == expected:
            return
        if delta_bytes:
            raise DeltaError("a delta produced other bytes")
        raise ResourceError("bytes do not match their checksum", code=Code.DATA_LOSS)

    def _record_arrival(self, batch: Batch) -> None:
        self.incoming.add(batch)
        if self.incoming.is_whole:
            self._ended.set()
        self._announce()

    def _requeue(self, batch: Batch | None) -> None:
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
    """Consecutive failures."""
    progress_s: float = field(default_factory=time.monotonic)
    """Monotonic time of the last batch from this source."""
    is_abandoned: bool = False
    delivered: set[str] = field(default_factory=set)
    """Parts of which the source sent bytes or gave a checksum."""

    def succeeded(self) -> None:
        self.failures, self.progress_s = 0, time.monotonic()

    def rank(self, part: str) -> int:
        """The rank of the source for a part. All nodes of a site compute the same ranks, so they
        all fetch the part from the same far source."""
        return xxhash.xxh3_64_intdigest(f"{part} {self.endpoint}")


async def call(
    stream: Stream, message: wire.First | wire.Ask, answer: type[T], timeout_s: float
) -> T:
    """Send a message and wait for the reply for as long as the other end reports progress.

    Raises: PhaseloomError: the other end refuses. TimeoutError: silence for `timeout_s`.
            ConnectionError: the stream broke, or the reply has another type. msgspec.DecodeError.
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
            raise ConnectionError(f"unexpected reply: {type(reply).__name__}")


async def call_once(endpoint: str, message: wire.First, answer: type[T], home: Home) -> T:
    """Send one message on a new stream and return the reply. Raises: as `connect_and_call`."""
    stream, answered = await connect_and_call(endpoint, message, answer, home)
    stream.close()
    return answered


async def connect_and_call(
    endpoint: str, message: wire.First, answer: type[T], home: Home
) -> tuple[Stream, T]:
    """Open a stream and send its first message.

    Returns: the stream, for the caller to close, and the reply.
    Raises:  ResourceError: the endpoint is out of reach, or the stream broke. CallerError: the
             message was refused; a bad endpoint.
    """
    stream = await connect(endpoint, home.identity, home.timeout_s)
    with closed_on_failure(stream):
        try:
            return stream, await call(stream, message, answer, home.timeout_s)
        except (OSError, TimeoutError, msgspec.DecodeError) as error:
            raise typed_error(error, endpoint, home.timeout_s) from error


def not_delivered(label: str, errors: Iterable[PhaseloomError]) -> ResourceError:
    """The error to raise if no source delivered an object. It has the code that all sources gave,
    or UNAVAILABLE if they differ: a later attempt may succeed."""
    failures = list(errors)
    codes = {error.info.code for error in failures}
    return ResourceError(
        f"{label} could not be fetched: {'; '.join(map(str, failures)) or 'no source is named'}",
        code=codes.pop() if len(codes) == 1 else Code.UNAVAILABLE,
        remedy="retry; name sources that hold the version",
    )
