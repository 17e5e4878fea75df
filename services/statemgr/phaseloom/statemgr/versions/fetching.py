"""Fetches a weights version from other nodes' state managers, in blocks, over parallel streams.

A few streams to one source pull block after block, each verified as it arrives and written where it
belongs: nothing is held elsewhere, and a slow receiver slows the sender. Blocks that a neighbour
was given come from the neighbour. A broken stream is opened again, a broken source is followed by
the next; what is verified stays. At the end the whole is verified.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from phaseloom.common.contract.commands import Ticket
from phaseloom.common.contract.errors import (
    CallerError,
    Code,
    PhaseloomError,
    ResourceError,
    to_exception,
)
from phaseloom.common.contract.ids import VersionKey
from phaseloom.common.tensors.blockhash import digest_of
from phaseloom.statemgr.mesh.tls import Identity, Stream, connect, explained
from phaseloom.statemgr.versions import wire
from phaseloom.statemgr.versions.incoming import Incoming

log = logging.getLogger(__name__)

RELAY_PATIENCE = 6.0
"""Timeouts that a neighbour may take for one thing, as long as it says that it comes."""
_STREAMS = 4
_MAX_FAILURES = 3
"""Of one source, without a block in between."""
_BACKOFF_S = 0.05
_FAILURES = (OSError, TimeoutError, msgspec.DecodeError, PhaseloomError)


@dataclass(frozen=True)
class Home:
    """The daemon that fetches."""

    identity: Identity
    endpoint: str
    """Where it serves its neighbours."""
    site: str
    """Of its node; fast links join what is on one site. Empty: it shares with nobody."""
    timeout_s: float
    """For each step: connecting, a reply, a pause within a block."""


@dataclass
class Fetching:
    """One version, from one source after another."""

    version: VersionKey
    ticket: Ticket | None
    home: Home
    place: Callable[[wire.VersionDescription], Awaitable[Incoming]]
    """Finds memory for it; asked once. May raise."""
    incoming: Incoming | None = None
    progress_s: float = field(default_factory=time.monotonic)
    """When the last block came, on the monotonic clock."""
    from_source_bytes: int = 0
    relayed_bytes: int = 0
    relays: set[str] = field(default_factory=set)
    """Neighbours that brought some of it."""

    async def bring(self, source: str) -> str:
        """Everything that is still missing; returns the version's digest.

        What is not the version in the end comes once more, where the source has found that its
        memory was bad, and mended it.

        Raises: ResourceError: out of reach, broken off, or DATA_LOSS; `place`'s refusal.
                CallerError: NOT_FOUND there, or PERMISSION_DENIED; a bad endpoint.
        """
        digest = await self._come(source)
        if digest is None:
            await self._let_verify(source)
            digest = await self._come(source)
        if digest is None:
            raise ResourceError(
                f"version {self.version} from {source} does not match its digest",
                code=Code.DATA_LOSS,
            )
        return digest

    async def _come(self, source: str) -> str | None:
        """None: all of it came, and it is something else."""
        connection = await Connection.open(source, self.version, self.ticket, self.home)
        try:
            incoming = await self._placed(source, connection.description)
            stage = _Round(self, incoming, source, connection)
            await stage.run()
        finally:
            connection.close()
        digest = await asyncio.to_thread(digest_of, incoming.memory)
        if digest == connection.description.digest:
            return digest
        incoming.forget()
        return None

    async def _let_verify(self, source: str) -> None:
        """Let all who brought something verify their memory. Raises: PhaseloomError: the source has
        nothing that is good."""
        refusal: PhaseloomError | None = None
        for endpoint in [source, *self.relays]:
            try:
                await _doubt(endpoint, self.version, self.ticket, self.home)
            except PhaseloomError as error:
                log.warning("version %s at %s: %s", self.version, endpoint, error)
                refusal = error if endpoint == source else refusal
        self.relays.clear()
        if refusal is not None:
            raise refusal

    @property
    def may_resume(self) -> bool:
        """Something came, and not long ago."""
        if self.incoming is None or len(self.incoming.missing()) == self.incoming.blocks.count:
            return False
        return time.monotonic() - self.progress_s < self.home.timeout_s

    async def _placed(self, source: str, description: wire.VersionDescription) -> Incoming:
        if self.incoming is None:
            self.incoming = await self.place(description)
        elif self.incoming.description != description:
            raise ResourceError(f"version {self.version} is another at {source}")
        return self.incoming


class _Round:
    """What one source, and the neighbours that it names, still have to bring."""

    def __init__(
        self, fetching: Fetching, incoming: Incoming, source: str, connection: Connection
    ) -> None:
        self._fetching = fetching
        self._incoming = incoming
        self._source = source
        self._home = fetching.home
        self._first: Connection | None = connection
        self._again: deque[tuple[int, str]] = deque()
        """(block, the endpoint that did not deliver it): to be asked of the source."""
        self._relays: dict[str, deque[int]] = {}
        """Blocks to take from each neighbour."""
        self._broken: set[str] = set()
        """Neighbours that failed."""
        self._accounted: set[int] = set()
        """Blocks that a stream, a relay or `_again` has, and those that came."""
        self._seen = 0
        self._is_over = False
        """The source has nothing left that it gave to nobody."""
        self._num_asked = 0
        """Requests to the source that are under way."""
        self._failures = 0
        self._error: PhaseloomError | None = None
        self._session = connection.session
        self._ended = asyncio.Event()
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        missing = incoming.missing()
        if len(missing) < incoming.blocks.count:
            # Some are here already: ask for the others by number.
            self._is_over = True
            self._put_back([(block, "") for block in missing])

    async def run(self) -> None:
        """Raises: PhaseloomError: the source could not bring everything."""
        if self._incoming.is_whole:
            return
        async with asyncio.TaskGroup() as group:
            self._group = group
            for _ in range(min(_STREAMS, self._incoming.blocks.count)):
                self._tasks.append(group.create_task(self._stream()))
            await self._ended.wait()
            for task in self._tasks:
                task.cancel()
        if self._error is not None:
            raise self._error

    # --- The source ------------------------------------------------------------------------------

    async def _stream(self) -> None:
        connection, self._first = self._first, None
        try:
            while True:
                asked = self._choose()
                if asked is None:
                    await self._changed.wait()
                    continue
                self._num_asked += 1
                try:
                    if connection is None:
                        connection = await self._open(self._source, is_relay=False)
                    await self._ask(connection, asked)
                except _FAILURES as error:
                    if isinstance(asked, wire.Again):
                        self._put_back([(asked.block, asked.failed)])
                    if connection is not None:
                        connection.close()
                        connection = None
                    self._failed(error)
                    await asyncio.sleep(_BACKOFF_S * self._failures)
                finally:
                    self._num_asked -= 1
                    self._announce()
        finally:
            if connection is not None:
                connection.close()

    def _choose(self) -> wire.Request | None:
        """What to ask the source for next; None: nothing for now."""
        if not self._again and self._is_over and not self._num_asked:
            # Given to this fetch by an answer that was lost.
            lost = [b for b in self._incoming.missing() if b not in self._accounted]
            self._put_back([(block, self._home.endpoint) for block in lost])
        while self._again:
            block, failed = self._again.popleft()
            if not self._incoming.has(block):
                return wire.Again(block, failed)
        return None if self._is_over else wire.Next(self._seen)

    async def _ask(self, connection: Connection, asked: wire.Request) -> None:
        reply = await connection.ask(asked)
        match reply:
            case wire.Part():
                if isinstance(asked, wire.Again) and reply.block != asked.block:
                    raise ConnectionError(f"it sent block {reply.block} for {asked.block}")
                self._accounted.add(reply.block)
                self._learn(reply.seen, reply.given)
                try:
                    size = await self._receive(connection, reply)
                except _FAILURES:
                    if not isinstance(asked, wire.Again):
                        self._put_back([(reply.block, self._home.endpoint)])
                    raise
                self._failures = 0
                self._fetching.from_source_bytes += size
            case wire.Elsewhere(block, endpoint):
                self._assign(block, endpoint)
            case wire.Over(seen, given):
                self._is_over = True
                self._learn(seen, given)
            case wire.Refusal(error):
                raise to_exception(error)

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        log.warning("version %s from %s: %s", self._fetching.version, self._source, error)
        if self._failures > _MAX_FAILURES or isinstance(error, CallerError):
            self._error = _typed(error, self._fetching.version, self._source, self._home.timeout_s)
            self._ended.set()

    # --- Neighbours ------------------------------------------------------------------------------

    def _learn(self, seen: int, given: list[tuple[int, str]]) -> None:
        """Blocks that others were given: to be had from them."""
        self._seen = max(self._seen, seen)
        for block, endpoint in given:
            if not 0 <= block < self._incoming.blocks.count:
                raise ConnectionError(f"news of block {block}")
            if block not in self._accounted:
                self._assign(block, endpoint)

    def _assign(self, block: int, endpoint: str) -> None:
        self._accounted.add(block)
        if endpoint in self._broken or endpoint == self._home.endpoint:
            self._put_back([(block, endpoint)])
        elif endpoint in self._relays:
            self._relays[endpoint].append(block)
        else:
            self._relays[endpoint] = deque([block])
            self._tasks.append(self._group.create_task(self._relay(endpoint)))
        self._announce()

    async def _relay(self, endpoint: str) -> None:
        blocks = self._relays[endpoint]
        connection: Connection | None = None
        try:
            while True:
                if not blocks:
                    await self._changed.wait()
                    continue
                if self._incoming.has(blocks[0]):
                    blocks.popleft()
                    continue
                if connection is None:
                    connection = await self._open(endpoint, is_relay=True)
                async with asyncio.timeout(RELAY_PATIENCE * self._home.timeout_s):
                    reply = await connection.ask(wire.Take(blocks[0]))
                if isinstance(reply, wire.Refusal):
                    raise to_exception(reply.error)
                if not isinstance(reply, wire.Part) or reply.block != blocks[0]:
                    raise ConnectionError("it answered something else")
                size = await self._receive(connection, reply)
                self._fetching.relayed_bytes += size
                self._fetching.relays.add(endpoint)
                blocks.popleft()
        except _FAILURES as error:
            log.warning("version %s by way of %s: %r", self._fetching.version, endpoint, error)
            self._broken.add(endpoint)
            self._put_back([(block, endpoint) for block in blocks])
            del self._relays[endpoint]
        finally:
            if connection is not None:
                connection.close()

    # --- Both ------------------------------------------------------------------------------------

    async def _open(self, endpoint: str, *, is_relay: bool) -> Connection:
        connection = await Connection.open(
            endpoint,
            self._fetching.version,
            self._fetching.ticket,
            self._home,
            session=self._session,
            is_relay=is_relay,
        )
        if connection.description != self._incoming.description:
            connection.close()
            raise ResourceError(f"version {self._fetching.version} is another at {endpoint}")
        return connection

    async def _receive(self, connection: Connection, part: wire.Part) -> int:
        """The bytes of a block, verified; returns how many."""
        if not 0 <= part.block < self._incoming.blocks.count or self._incoming.has(part.block):
            raise ConnectionError(f"it sent block {part.block}")
        memory = self._incoming.span(part.block)
        digest = await wire.receive_block(
            connection.stream, memory, part.block, self._home.timeout_s
        )
        if digest != part.digest:
            raise ResourceError(
                f"block {part.block} does not match its digest", code=Code.DATA_LOSS
            )
        self._incoming.add(part.block, digest)
        self._fetching.progress_s = time.monotonic()
        if self._incoming.is_whole:
            self._ended.set()
        return len(memory)

    def _put_back(self, blocks: list[tuple[int, str]]) -> None:
        self._again.extend(blocks)
        self._accounted.update(block for block, _ in blocks)
        self._announce()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Connection:
    """A stream that a source has answered with what it has."""

    def __init__(self, stream: Stream, timeout_s: float, session: str) -> None:
        self.stream = stream
        self.session = session
        self.description: wire.VersionDescription
        self._timeout_s = timeout_s

    @classmethod
    async def open(
        cls,
        endpoint: str,
        version: VersionKey,
        ticket: Ticket | None,
        home: Home,
        *,
        session: str = "",
        is_relay: bool = False,
    ) -> Connection:
        """Raises: ResourceError: out of reach. CallerError: refused there; a bad endpoint."""
        stream = await connect(endpoint, wire.SERVICE, home.identity, home.timeout_s)
        connection = cls(stream, home.timeout_s, session or os.urandom(8).hex())
        request = wire.FetchRequest(
            version, ticket, home.endpoint, home.site, connection.session, is_relay
        )
        try:
            async with asyncio.timeout(home.timeout_s):
                connection.description = await connection._introduce(request)
        except BaseException as error:
            stream.close()
            if isinstance(error, OSError | TimeoutError | msgspec.DecodeError):
                raise _typed(error, version, endpoint, home.timeout_s) from error
            raise
        return connection

    async def ask(self, request: wire.Request) -> wire.Reply:
        """Raises: TimeoutError: not a word for this long."""
        async with asyncio.timeout(self._timeout_s):
            await self.stream.send(request)
        while True:
            async with asyncio.timeout(self._timeout_s):
                payload = await self.stream.receive(wire.MAX_REPLY_BYTES)
            reply: wire.Reply = msgspec.msgpack.decode(payload, type=wire.Reply)
            if not isinstance(reply, wire.Waiting):
                return reply

    def close(self) -> None:
        self.stream.close()

    async def _introduce(self, request: wire.FetchRequest) -> wire.VersionDescription:
        await self.stream.send(request)
        payload = await self.stream.receive(wire.MAX_REPLY_BYTES)
        answer: wire.VersionDescription | wire.Refusal = msgspec.msgpack.decode(
            payload, type=wire.VersionDescription | wire.Refusal
        )
        if isinstance(answer, wire.Refusal):
            raise to_exception(answer.error)
        return answer


async def _doubt(endpoint: str, version: VersionKey, ticket: Ticket | None, home: Home) -> None:
    """Have a state manager verify what it gives away.

    Raises: ResourceError: out of reach, or DATA_LOSS. CallerError: refused there.
    """
    stream = await connect(endpoint, wire.SERVICE, home.identity, home.timeout_s)
    request = wire.FetchRequest(version, ticket, home.endpoint, home.site, "", False, doubted=True)
    try:
        async with asyncio.timeout(home.timeout_s):
            await stream.send(request)
        answer: wire.Waiting | wire.Sound | wire.Refusal = wire.Waiting()
        while isinstance(answer, wire.Waiting):
            async with asyncio.timeout(home.timeout_s):
                payload = await stream.receive(wire.MAX_REPLY_BYTES)
            answer = msgspec.msgpack.decode(payload, type=wire.Waiting | wire.Sound | wire.Refusal)
        if isinstance(answer, wire.Refusal):
            raise to_exception(answer.error)
    except (OSError, TimeoutError, msgspec.DecodeError) as error:
        raise _typed(error, version, endpoint, home.timeout_s) from error
    finally:
        stream.close()


def _typed(
    error: Exception, version: VersionKey, endpoint: str, timeout_s: float
) -> PhaseloomError:
    if isinstance(error, PhaseloomError):
        return error
    found = explained(error, endpoint, timeout_s)
    return type(found)(
        f"version {version} from {found.info.message}",
        code=found.info.code,
        remedy=found.info.remedy,
    )
