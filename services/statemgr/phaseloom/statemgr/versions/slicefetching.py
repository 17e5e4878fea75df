"""Fetches the slices of a weights version that a node needs, each byte once, from all who hold it.

Batches of boxes are pulled by a few streams to every source, whoever is free next: where several
hold the same part they share its batches, and where one fails the others take what it left. What
has come and is verified stays. All sources of a part must hold the same content. A slow receiver
slows its sources: nothing is held but the memory that the slices are for.

Of sources on another site one alone, the same for all nodes here, brings a part: it gives each byte
to one of them. What the others were given comes from there, and must be what the source says.
A neighbour that fails is left, and what it was to bring is asked of the source.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
import xxhash

from phaseloom.common.contract.commands import Ticket
from phaseloom.common.contract.errors import (
    CallerError,
    Code,
    PhaseloomError,
    ResourceError,
    to_exception,
)
from phaseloom.common.contract.ids import VersionKey
from phaseloom.statemgr.core.dealing import Fetcher
from phaseloom.statemgr.core.slices import MAX_BATCH_BYTES, Batch, Piece, Together, grouped
from phaseloom.statemgr.mesh.tls import Stream, apart, connect, explained
from phaseloom.statemgr.versions import wire
from phaseloom.statemgr.versions.boxes import IncomingSlices
from phaseloom.statemgr.versions.fetching import RELAY_PATIENCE, Home

log = logging.getLogger(__name__)

_STREAMS = 4
"""To one source."""
_MAX_STREAMS = 16
"""Of one fetch, but one to each source at least."""
_AHEAD = 16
"""Batches that a source is asked for at once where it deals: it gives about one of them, and tells
which of the others neighbours have."""
_MAX_FAILURES = 3
_BACKOFF_S = 0.05
_FAILURES = (OSError, TimeoutError, msgspec.DecodeError, PhaseloomError)
_FEW_BYTES = 4096
"""Runs that are shorter than this, on the average, are put where they belong after they came."""


@dataclass
class SliceFetching:
    """The slices of one version that are not on this node."""

    version: VersionKey
    ticket: Ticket | None
    home: Home
    name: str
    """Of what the slices come to: the same however often they are fetched."""
    incoming: IncomingSlices
    memory: memoryview
    fetched_bytes: int = 0
    """From sources."""
    relayed_bytes: int = 0
    """From neighbours."""
    _queues: dict[str, deque[Batch]] = field(default_factory=dict)
    """By part, what is to be asked of a source."""
    _batch_bytes: int = 0
    """Of the largest."""
    _sources: list[_Source] = field(default_factory=list)
    _errors: dict[str, PhaseloomError] = field(default_factory=dict)
    """By source that is given up."""
    _relays: dict[Fetcher, deque[tuple[Batch, str]]] = field(default_factory=dict)
    """By neighbour, what it is to bring, and the digest of that."""
    _relaying: list[asyncio.Task[None]] = field(default_factory=list)
    _broken: set[Fetcher] = field(default_factory=set)
    """Neighbours that failed."""
    _failure: PhaseloomError | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _over: asyncio.Event = field(default_factory=asyncio.Event)

    async def bring(self, batches: Sequence[Batch], sources: Mapping[str, list[str]]) -> None:
        """Args:   sources: of each part, endpoints.
        Raises: PhaseloomError: nobody can bring them all.
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
            self._over.set()
        num = max(1, min(_STREAMS, _MAX_STREAMS // max(1, len(self._sources))))
        async with asyncio.TaskGroup() as group:
            self._group = group
            for source in self._sources:
                for number in range(num):
                    group.create_task(self._pull(source, is_first=number == 0))
            await self._over.wait()
            for relay in self._relaying:
                relay.cancel()
        if self._failure is not None:
            raise self._failure

    async def bring_sound(
        self, batches: Sequence[Batch], sources: Mapping[str, list[str]]
    ) -> SliceFetching:
        """Bring them, once more where a source found that its memory was bad: it has mended it, or
        has that part no more. Returns: what has brought them. Raises: as `bring`.
        """
        try:
            await self.bring(batches, sources)
            return self
        except ResourceError as error:
            if error.info.code is not Code.DATA_LOSS:
                raise
            log.warning("%s; once more", error)
            for batch in batches:
                self.incoming.forget(batch)
            again = SliceFetching(
                *(self.version, self.ticket, self.home, self.name, self.incoming, self.memory)
            )
            try:
                await again.bring(batches, sources)
            except PhaseloomError as failed:
                # It may come later.
                raise failed if failed.info.code is Code.UNAVAILABLE else error from failed
            return again

    def check(self, part: str, digest: str, where: str) -> None:
        """Raises: CallerError: FAILED_PRECONDITION: what is there is not what it should be."""
        expected = self.incoming.digests.setdefault(part, digest)
        if expected != digest:
            raise CallerError(
                f"version {self.version} is another at {where}: "
                f"part {part or 'all'} has digest {digest}, not {expected}",
                code=Code.FAILED_PRECONDITION,
                field="sources",
                remedy="name sources that hold the same version",
            )

    # --- Sources ---------------------------------------------------------------------------------

    async def _pull(self, source: _Source, *, is_first: bool) -> None:
        """One stream's work, as often as it must be opened. Args: is_first: of its source's."""
        stream: Stream | None = None
        try:
            while not self._over.is_set() and not source.is_left:
                batch = self._take(source)
                if batch is None and not (is_first and source.is_far is None):
                    await self._changed.wait()
                    continue
                try:
                    try:
                        stream = stream or await self._open(source)
                    except BaseException:
                        self._put_back(batch)
                        raise
                    if batch is not None:
                        await self._bring(stream, source, batch)
                except _FAILURES as error:
                    if stream is not None:
                        stream.close()
                        stream = None
                    self._failed(source, error)
                    await asyncio.sleep(_BACKOFF_S * min(source.failures, _MAX_FAILURES))
            if is_first and self._failure is None and not source.is_left:
                await self._confirm(source, stream)
        finally:
            if stream is not None:
                stream.close()

    def _take(self, source: _Source) -> Batch | None:
        for part in source.parts:
            if self._queues[part] and self._is_due(source, part):
                return self._next(part, _AHEAD if source.is_far else 1)
        return None

    def _next(self, part: str, limit: int) -> Batch:
        """Some batches as one."""
        queue = self._queues[part]
        pieces: list[Piece] = []
        taken = Together(limit * self._batch_bytes)
        for _ in range(limit):
            if not queue or not taken.take(queue[0].boxes, queue[0].num_bytes):
                break
            pieces += queue.popleft().pieces
        return Batch(part, pieces)

    def _is_due(self, source: _Source, part: str) -> bool:
        """Whether the part, or the rest of it, comes from there."""
        if not source.is_far:
            return source.is_far is not None
        others = (each for each in self._sources if each is not source and part in each.parts)
        return all(
            each.is_left or each.failures or (each.is_far and each.rank(part) < source.rank(part))
            for each in others
        )

    async def _open(self, source: _Source) -> Stream:
        """Raises: CallerError: refused, or it has another content."""
        stream, holding = await self._opened(source.endpoint, source.parts)
        try:
            for part in source.parts:
                self.check(part, holding.digests.get(part, ""), source.endpoint)
        except BaseException:
            stream.close()
            raise
        source.is_far = holding.is_far
        self._announce()
        return stream

    async def _bring(self, stream: Stream, source: _Source, batch: Batch) -> None:
        """A batch, or what of it nobody else brings and the source gives at once."""
        try:
            most = self._batch_bytes if source.is_far else MAX_BATCH_BYTES
            num_bytes = min(batch.num_bytes, most)
            give = wire.Give(batch.part, batch.boxes, num_bytes, sorted(self._broken))
            given = await self._given(stream, give)
            if given.dealt is not None:
                batch = self._deal(batch, given.dealt)
            source.delivered.add(batch.part)
            await self._receive(stream, batch, given.digest)
        except BaseException:
            self._put_back(batch)
            raise
        source.came()
        self.fetched_bytes += batch.num_bytes
        self._came(batch)

    def _deal(self, batch: Batch, dealt: wire.Dealt) -> Batch:
        """What of it follows; the rest goes its ways.

        Raises: ConnectionError, CallerError: what is told is not the batch.
        """
        if not 1 <= dealt.num_boxes <= len(batch.pieces):
            raise ConnectionError(f"it tells of {dealt.num_boxes} boxes")
        told = Batch(batch.part, batch.pieces[: dealt.num_boxes])
        cuts = [dealt.here, *(share.boxes for share in dealt.elsewhere)]
        shares = [wire.fragments_of(each, told.boxes) for each in cuts]
        mine, *others = told.shared(shares)
        for other, share in zip(others, dealt.elsewhere, strict=True):
            self._assign(other, share)
        self._put_back(Batch(batch.part, batch.pieces[dealt.num_boxes :]))
        return mine

    async def _confirm(self, source: _Source, stream: Stream | None) -> None:
        """What it sent, or said of what others have, is of what was committed. One that is gone now
        is believed."""
        opened: Stream | None = None
        try:
            for part in sorted(source.delivered):
                if stream is None:
                    stream = opened = await self._open(source)
                await self._ask(stream, wire.Confirm(part))
        except _FAILURES as error:
            if isinstance(error, ResourceError) and error.info.code is Code.DATA_LOSS:
                self._failure = error
            else:
                log.warning("%s confirms nothing any more: %s", source.endpoint, error)
        finally:
            if opened is not None:
                opened.close()

    def _failed(self, source: _Source, error: Exception) -> None:
        log.warning("slices of version %s from %s: %s", self.version, source.endpoint, error)
        source.failures += 1
        idle_s = time.monotonic() - source.progress_s
        is_hopeless = source.failures > _MAX_FAILURES and idle_s > self.home.timeout_s
        if is_hopeless or isinstance(error, CallerError):
            source.is_left = True
            self._errors[source.endpoint] = explained(error, source.endpoint, self.home.timeout_s)
        self._check_reachable()
        self._announce()

    def _check_reachable(self) -> None:
        """Whether somebody is left to ask for what is to be asked for."""
        reachable = {part for each in self._sources if not each.is_left for part in each.parts}
        for part, queue in self._queues.items():
            if part in reachable or not queue:
                continue
            codes = {error.info.code for error in self._errors.values()}
            self._failure = ResourceError(
                f"part {part or 'all'} of version {self.version} could not be brought: "
                f"{'; '.join(map(str, self._errors.values())) or 'no source is named'}",
                code=codes.pop() if len(codes) == 1 else Code.UNAVAILABLE,
                remedy="retry; name sources that hold the version",
            )
            self._over.set()

    # --- Neighbours ------------------------------------------------------------------------------

    def _assign(self, batch: Batch, share: wire.Shared) -> None:
        holder = share.holder
        if holder in self._broken:
            self._put_back(batch)
        elif holder in self._relays:
            self._relays[holder].append((batch, share.digest))
        else:
            self._relays[holder] = deque([(batch, share.digest)])
            self._relaying.append(self._group.create_task(self._relay(holder)))
        self._announce()

    async def _relay(self, holder: Fetcher) -> None:
        shares = self._relays[holder]
        stream: Stream | None = None
        try:
            # A source that is still being asked may name one when all is over.
            while not self._over.is_set():
                if not shares:
                    await self._changed.wait()
                    continue
                batch, digest = shares[0]
                if stream is None:
                    stream, _ = await self._opened(holder.endpoint, [], holder.session)
                give = wire.Give(batch.part, batch.boxes, batch.num_bytes)
                async with asyncio.timeout(RELAY_PATIENCE * self.home.timeout_s):
                    given = await self._given(stream, give)
                if given.dealt is not None:
                    raise ConnectionError("it deals out what is not its own")
                await self._receive(stream, batch, digest)
                shares.popleft()
                self.relayed_bytes += batch.num_bytes
                self._came(batch)
        except _FAILURES as error:
            log.warning("slices of version %s by way of %s: %r", self.version, holder, error)
            self._broken.add(holder)
            del self._relays[holder]
            for batch, _ in shares:
                self._put_back(batch)
            self._check_reachable()
        finally:
            if stream is not None:
                stream.close()

    # --- Both ------------------------------------------------------------------------------------

    async def _opened(
        self, endpoint: str, parts: list[str], relay: str = ""
    ) -> tuple[Stream, wire.Holding]:
        home = self.home
        stream = await connect(endpoint, wire.SLICES, home.identity, home.timeout_s)
        request = wire.SlicesRequest(
            version=self.version,
            ticket=self.ticket,
            parts=parts,
            site=home.site,
            fetcher=Fetcher(home.endpoint, self.name),
            relay=relay,
        )
        try:
            holding = await self._ask(stream, request)
            if not isinstance(holding, wire.Holding):
                raise ConnectionError("it answered something else")
        except BaseException:
            stream.close()
            raise
        return stream, holding

    async def _given(self, stream: Stream, give: wire.Give) -> wire.Given:
        given = await self._ask(stream, give)
        if not isinstance(given, wire.Given):
            raise ConnectionError("it answered something else")
        return given

    async def _ask(
        self, stream: Stream, request: wire.SlicesRequest | wire.SlicesAsk
    ) -> wire.SlicesReply:
        """Raises: what it refuses with; TimeoutError."""
        async with asyncio.timeout(self.home.timeout_s):
            await stream.send(request)
        while True:
            async with asyncio.timeout(self.home.timeout_s):
                payload = await stream.receive(wire.MAX_REPLY_BYTES)
            reply: wire.SlicesReply = msgspec.msgpack.decode(payload, type=wire.SlicesReply)
            if isinstance(reply, wire.Refusal):
                raise to_exception(reply.error)
            if not isinstance(reply, wire.Waiting):
                return reply

    async def _receive(self, stream: Stream, batch: Batch, expected: str) -> None:
        """Where it belongs, verified."""
        digest = xxhash.xxh3_128()
        timeout_s = self.home.timeout_s
        # Of what is narrow they are hundreds of thousands: others are served meanwhile.
        spans = await asyncio.to_thread(lambda: batch.spans)
        if batch.num_bytes >= _FEW_BYTES * len(spans):
            for span in spans:
                await stream.receive_into(self.memory[span], timeout_s, digest.update)
        else:
            content = memoryview(bytearray(batch.num_bytes))
            await stream.receive_into(content, timeout_s, digest.update)
            await apart(partial(batch.put, self.memory), content)
        if digest.hexdigest() != expected:
            raise ResourceError("slices do not match their digest", code=Code.DATA_LOSS)

    def _came(self, batch: Batch) -> None:
        self.incoming.add(batch)
        if self.incoming.is_whole:
            self._over.set()
        self._announce()

    def _put_back(self, batch: Batch | None) -> None:
        """To be asked of a source, next."""
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
    """Whether it is on another site; None: not known yet."""
    failures: int = 0
    """Without a batch in between."""
    progress_s: float = field(default_factory=time.monotonic)
    is_left: bool = False
    delivered: set[str] = field(default_factory=set)
    """Parts of which it sent something, or said what it is."""

    def came(self) -> None:
        self.failures, self.progress_s = 0, time.monotonic()

    def rank(self, part: str) -> int:
        """Of several on other sites, all nodes take a part from the same one."""
        return xxhash.xxh3_64_intdigest(f"{part} {self.endpoint}")
