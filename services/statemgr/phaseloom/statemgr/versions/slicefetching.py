"""Fetches the slices of a weights version that a node needs, each byte once, from all who hold it.

Batches of boxes are pulled by a few streams to every source, whoever is free next: where several
hold the same part they share its batches, and where one fails the others take what it left. What
has come and is verified stays. All sources of a part must hold the same content. A slow receiver
slows its sources: nothing is held but the memory that the slices are for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import xxhash

from phaseloom.common.errors import CallerError, Code, PhaseloomError, ResourceError, to_exception
from phaseloom.common.ids import VersionKey
from phaseloom.common.messages import Ticket
from phaseloom.statemgr.core.slices import Batch
from phaseloom.statemgr.mesh.tls import Identity, Stream, connect, explained
from phaseloom.statemgr.versions import wire
from phaseloom.statemgr.versions.sliceserving import OpenPart, gathered

log = logging.getLogger(__name__)

_STREAMS = 4
"""To one source."""
_MAX_STREAMS = 16
"""Of one fetch, but one to each source at least."""
_MAX_FAILURES = 3
_BACKOFF_S = 0.05
_FAILURES = (OSError, TimeoutError, msgspec.DecodeError, PhaseloomError)


@dataclass
class SliceFetching:
    """The slices of one version that are not on this node."""

    version: VersionKey
    ticket: Ticket | None
    identity: Identity
    timeout_s: float
    """For each step; and so long without a batch a source that fails is tried again."""
    memory: memoryview
    digests: dict[str, str] = field(default_factory=dict)
    """By part: as the version's manifest says; of one without any, as its sources say."""
    fetched_bytes: int = 0
    _queues: dict[str, deque[Batch]] = field(default_factory=dict)
    _left: int = 0
    """Batches that are not here."""
    _trying: dict[str, set[str]] = field(default_factory=dict)
    """By part, sources that are not given up."""
    _errors: dict[str, PhaseloomError] = field(default_factory=dict)
    """By source that is given up."""
    _delivered: dict[str, set[str]] = field(default_factory=dict)
    """By source, parts that it brought something of."""
    _failure: PhaseloomError | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def bring(self, batches: Sequence[Batch], sources: Mapping[str, list[str]]) -> None:
        """Args:   sources: of each part, endpoints.
        Raises: PhaseloomError: nobody can bring them all.
        """
        for batch in batches:
            self._queues.setdefault(batch.part, deque()).append(batch)
        self._left = len(batches)
        parts_of: dict[str, set[str]] = {}
        for part in self._queues:
            self._trying[part] = set(sources.get(part, []))
            for endpoint in self._trying[part]:
                parts_of.setdefault(endpoint, set()).add(part)
        self._check_reachable()
        if self._failure is None:
            num = max(1, min(_STREAMS, _MAX_STREAMS // max(1, len(parts_of))))
            async with asyncio.TaskGroup() as group:
                for endpoint, parts in parts_of.items():
                    source = _Source(endpoint, sorted(parts))
                    for number in range(num):
                        group.create_task(self._pull(source, confirms=number == 0))
        if self._failure is not None:
            raise self._failure

    def again(self) -> SliceFetching:
        """The same once more, from the beginning."""
        return SliceFetching(
            *(self.version, self.ticket, self.identity, self.timeout_s),
            *(self.memory, dict(self.digests)),
        )

    def check(self, part: str, digest: str, where: str) -> None:
        """Raises: CallerError: FAILED_PRECONDITION: what is there is not what it should be."""
        if self.digests.setdefault(part, digest) != digest:
            raise CallerError(
                f"version {self.version} is another at {where}: "
                f"part {part or 'all'} has digest {digest}, not {self.digests[part]}",
                code=Code.FAILED_PRECONDITION,
                field="sources",
                remedy="name sources that hold the same version",
            )

    @property
    def _is_over(self) -> bool:
        return not self._left or self._failure is not None

    async def _pull(self, source: _Source, *, confirms: bool) -> None:
        """One stream's work, as often as it must be opened."""
        stream: Stream | None = None
        try:
            while not self._is_over and not source.is_left:
                batch = self._take(source)
                if batch is None:
                    await self._changed.wait()
                    continue
                try:
                    stream = stream or await self._open(source)
                    await self._fill(stream, batch)
                except BaseException as error:
                    self._queues[batch.part].appendleft(batch)
                    if stream is not None:
                        stream.close()
                        stream = None
                    if not isinstance(error, _FAILURES):
                        raise
                    self._failed(source, error)
                    self._announce()
                    await asyncio.sleep(_BACKOFF_S * min(source.failures, _MAX_FAILURES))
                    continue
                source.came()
                self._delivered.setdefault(source.endpoint, set()).add(batch.part)
                self._left -= 1
                self._announce()
            if confirms and self._failure is None and not source.is_left:
                await self._confirm(source, stream)
        finally:
            if stream is not None:
                stream.close()

    def _take(self, source: _Source) -> Batch | None:
        for part in source.parts:
            if self._queues[part]:
                return self._queues[part].popleft()
        return None

    async def _open(self, source: _Source) -> Stream:
        """Raises: CallerError: refused, or it has another content."""
        stream = await connect(source.endpoint, wire.SLICES, self.identity, self.timeout_s)
        try:
            request = wire.SlicesRequest(self.version, self.ticket, source.parts)
            holding = await self._ask(stream, request)
            if not isinstance(holding, wire.Holding):
                raise ConnectionError("it answered something else")
            for part in source.parts:
                self.check(part, holding.digests.get(part, ""), source.endpoint)
        except BaseException:
            stream.close()
            raise
        return stream

    async def _fill(self, stream: Stream, batch: Batch) -> None:
        given = await self._ask(stream, wire.Give(batch.part, batch.boxes, batch.num_bytes))
        if not isinstance(given, wire.Given):
            raise ConnectionError("it answered something else")
        digest = xxhash.xxh3_128()
        for span in batch.spans:
            await stream.receive_into(self.memory[span], self.timeout_s, digest.update)
        if digest.hexdigest() != given.digest:
            raise ResourceError("slices do not match their digest", code=Code.DATA_LOSS)
        self.fetched_bytes += batch.num_bytes

    async def _confirm(self, source: _Source, stream: Stream | None) -> None:
        """What it sent is of what was committed. One that is gone now is believed."""
        parts = self._delivered.get(source.endpoint, set())
        opened: Stream | None = None
        try:
            for part in sorted(parts):
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

    async def _ask(
        self, stream: Stream, request: wire.SlicesRequest | wire.SlicesAsk
    ) -> wire.SlicesReply:
        """Raises: what it refuses with; TimeoutError."""
        async with asyncio.timeout(self.timeout_s):
            await stream.send(request)
        while True:
            async with asyncio.timeout(self.timeout_s):
                payload = await stream.receive(wire.MAX_REPLY_BYTES)
            reply: wire.SlicesReply = msgspec.msgpack.decode(payload, type=wire.SlicesReply)
            if isinstance(reply, wire.Refusal):
                raise to_exception(reply.error)
            if not isinstance(reply, wire.Waiting):
                return reply

    def _failed(self, source: _Source, error: Exception) -> None:
        log.warning("slices of version %s from %s: %s", self.version, source.endpoint, error)
        source.failures += 1
        idle_s = time.monotonic() - source.progress_s
        is_hopeless = source.failures > _MAX_FAILURES and idle_s > self.timeout_s
        if is_hopeless or isinstance(error, CallerError):
            source.is_left = True
            self._errors[source.endpoint] = explained(error, source.endpoint, self.timeout_s)
            for part in source.parts:
                self._trying[part].discard(source.endpoint)
        self._check_reachable()

    def _check_reachable(self) -> None:
        for part, endpoints in self._trying.items():
            if endpoints or not self._queues[part]:
                continue
            codes = {error.info.code for error in self._errors.values()}
            self._failure = ResourceError(
                f"part {part or 'all'} of version {self.version} could not be brought: "
                f"{'; '.join(map(str, self._errors.values())) or 'no source is named'}",
                code=codes.pop() if len(codes) == 1 else Code.UNAVAILABLE,
                remedy="retry; name sources that hold the version",
            )

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass
class _Source:
    endpoint: str
    parts: list[str]
    failures: int = 0
    """Without a batch in between."""
    progress_s: float = field(default_factory=time.monotonic)
    is_left: bool = False

    def came(self) -> None:
        self.failures, self.progress_s = 0, time.monotonic()


def copy_here(part: OpenPart, batches: Sequence[Batch], memory: memoryview) -> int:
    """Slices of a part that is on this node. Long: run it in a thread. Returns: bytes."""
    total = 0
    for batch in batches:
        content = b"".join(piece for box in batch.boxes for piece in gathered(part, box))
        if len(content) != batch.num_bytes:
            raise CallerError(f"{len(content)} bytes, not {batch.num_bytes}", field="slices")
        at = 0
        for span in batch.spans:
            memory[span] = content[at : at + span.stop - span.start]
            at += span.stop - span.start
        total += at
    return total
