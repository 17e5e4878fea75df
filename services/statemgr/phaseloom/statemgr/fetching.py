"""Fetches a weights version from other nodes' state managers, in blocks, over parallel streams.

A few streams to one source pull block after block, each verified as it arrives and written where it
belongs: nothing is held elsewhere, and a slow receiver slows the sender. Blocks that a neighbour
was given come from the neighbour. A broken stream is opened again, a broken source is followed by
the next; what is verified stays. At the end the whole is verified.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from phaseloom.common.errors import CallerError, Code, PhaseloomError, ResourceError, to_exception
from phaseloom.common.ids import VersionKey
from phaseloom.statemgr import wire
from phaseloom.statemgr.incoming import Incoming
from phaseloom.statemgr.memory import digest_of
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

_STREAMS = 4
_MAX_FAILURES = 3
"""Of one source, without a block in between."""
_BACKOFF_S = 0.05
_FAILURES = (OSError, TimeoutError, msgspec.DecodeError, PhaseloomError)


@dataclass(frozen=True)
class Home:
    """The daemon that fetches."""

    secret: bytes
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
    home: Home
    place: Callable[[VersionDescription], Awaitable[Incoming]]
    """Finds memory for it; asked once. May raise."""
    incoming: Incoming | None = None
    progress_s: float = field(default_factory=time.monotonic)
    """When the last block came, on the monotonic clock."""
    from_source_bytes: int = 0
    relayed_bytes: int = 0

    async def bring(self, source: str) -> str:
        """Everything that is still missing; returns the version's digest.

        Raises: ResourceError: out of reach, broken off, or DATA_LOSS; `place`'s refusal.
                CallerError: NOT_FOUND there, or PERMISSION_DENIED; a bad endpoint.
        """
        connection = await Connection.open(source, self.version, self.home)
        try:
            incoming = await self._placed(source, connection.description)
            stage = _Round(self, incoming, source, connection)
            await stage.run()
        finally:
            connection.close()
        digest = await asyncio.to_thread(digest_of, incoming.memory)
        if digest != connection.description.digest:
            incoming.forget()
            raise ResourceError(
                f"version {self.version} from {source} does not match its digest",
                code=Code.DATA_LOSS,
            )
        return digest

    @property
    def may_resume(self) -> bool:
        """Something came, and not long ago."""
        if self.incoming is None or len(self.incoming.missing()) == self.incoming.blocks.count:
            return False
        return time.monotonic() - self.progress_s < self.home.timeout_s

    async def _placed(self, source: str, description: VersionDescription) -> Incoming:
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
                    if isinstance(asked, Again):
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

    def _choose(self) -> Request | None:
        """What to ask the source for next; None: nothing for now."""
        if not self._again and self._is_over and not self._num_asked:
            # Given to this fetch by an answer that was lost.
            lost = [b for b in self._incoming.missing() if b not in self._accounted]
            self._put_back([(block, self._home.endpoint) for block in lost])
        while self._again:
            block, failed = self._again.popleft()
            if not self._incoming.has(block):
                return Again(block, failed)
        return None if self._is_over else Next(self._seen)

    async def _ask(self, connection: Connection, asked: Request) -> None:
        reply = await connection.ask(asked)
        match reply:
            case Part():
                if isinstance(asked, Again) and reply.block != asked.block:
                    raise ConnectionError(f"it sent block {reply.block} for {asked.block}")
                self._accounted.add(reply.block)
                self._learn(reply.seen, reply.given)
                try:
                    size = await self._receive(connection, reply)
                except _FAILURES:
                    if not isinstance(asked, Again):
                        self._put_back([(reply.block, self._home.endpoint)])
                    raise
                self._failures = 0
                self._fetching.from_source_bytes += size
            case Elsewhere(block, endpoint):
                self._assign(block, endpoint)
            case Over(seen, given):
                self._is_over = True
                self._learn(seen, given)
            case Refusal(error):
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
                reply = await connection.ask(Take(blocks[0]))
                if isinstance(reply, Refusal):
                    raise to_exception(reply.error)
                if not isinstance(reply, Part) or reply.block != blocks[0]:
                    raise ConnectionError("it answered something else")
                size = await self._receive(connection, reply)
                self._fetching.relayed_bytes += size
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
            self._home,
            session=self._session,
            is_relay=is_relay,
        )
        if connection.description != self._incoming.description:
            connection.close()
            raise ResourceError(f"version {self._fetching.version} is another at {endpoint}")
        return connection

    async def _receive(self, connection: Connection, part: Part) -> int:
        """The bytes of a block, verified; returns how many."""
        if not 0 <= part.block < self._incoming.blocks.count or self._incoming.has(part.block):
            raise ConnectionError(f"it sent block {part.block}")
        memory = self._incoming.span(part.block)
        digest = await wire.receive_bytes(connection.sock, memory, part.block, self._home.timeout_s)
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
    """An authenticated stream."""

    def __init__(self, sock: socket.socket, timeout_s: float, session: str) -> None:
        self.sock = sock
        self.session = session
        self.description: VersionDescription
        self._timeout_s = timeout_s

    @classmethod
    async def open(
        cls,
        endpoint: str,
        version: VersionKey,
        home: Home,
        *,
        session: str = "",
        is_relay: bool = False,
    ) -> Connection:
        """Raises: ResourceError: out of reach. CallerError: refused there; a bad endpoint."""
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdecimal():
            raise CallerError(f"{endpoint!r} is not host:port", field="sources")
        sock: socket.socket | None = None
        try:
            sock = await _connected(host, int(port), home.timeout_s)
            connection = cls(sock, home.timeout_s, session or os.urandom(8).hex())
            async with asyncio.timeout(home.timeout_s):
                await connection._introduce(version, home, is_relay)
        except BaseException as error:
            if sock is not None:
                sock.close()
            if isinstance(error, OSError | TimeoutError | msgspec.DecodeError):
                raise _typed(error, version, endpoint, home.timeout_s) from error
            raise
        return connection

    async def ask(self, request: Request) -> Reply:
        """Raises: TimeoutError: not a word for this long."""
        async with asyncio.timeout(self._timeout_s):
            await wire.send(self.sock, request)
        while True:
            async with asyncio.timeout(self._timeout_s):
                payload = await wire.receive(self.sock, wire.MAX_REPLY_BYTES)
            reply: Reply = msgspec.msgpack.decode(payload, type=Reply)
            if not isinstance(reply, Waiting):
                return reply

    def close(self) -> None:
        self.sock.close()

    async def _introduce(self, version: VersionKey, home: Home, is_relay: bool) -> None:
        payload = await wire.receive(self.sock, wire.MAX_REQUEST_BYTES)
        challenge = msgspec.msgpack.decode(payload, type=Challenge)
        nonce = os.urandom(wire.NONCE_BYTES)
        request = FetchRequest(version, nonce, home.endpoint, home.site, self.session, is_relay)
        mac = wire.request_mac(home.secret, challenge.nonce, request)
        await wire.send(self.sock, msgspec.structs.replace(request, mac=mac))
        payload = await wire.receive(self.sock, wire.MAX_REPLY_BYTES)
        reply = msgspec.msgpack.decode(payload, type=FetchReply)
        if not hmac.compare_digest(wire.reply_mac(home.secret, nonce, reply.answer), reply.mac):
            raise CallerError(
                "the source does not know this mesh's secret, or the other way round",
                code=Code.PERMISSION_DENIED,
                remedy="give all state managers of a mesh the same secret",
            )
        answer: VersionDescription | Refusal = msgspec.msgpack.decode(
            reply.answer, type=VersionDescription | Refusal
        )
        if isinstance(answer, Refusal):
            raise to_exception(answer.error)
        self.description = answer


async def _connected(host: str, port: int, timeout_s: float) -> socket.socket:
    async with asyncio.timeout(timeout_s):
        loop = asyncio.get_running_loop()
        ((family, kind, proto, _, address), *_) = await loop.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )
        sock = socket.socket(family, kind, proto)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(sock, address)
        except BaseException:
            sock.close()
            raise
    return sock


def _typed(
    error: Exception, version: VersionKey, endpoint: str, timeout_s: float
) -> PhaseloomError:
    if isinstance(error, PhaseloomError):
        return error
    why = f"silent for {timeout_s} s" if isinstance(error, TimeoutError) else str(error)
    return ResourceError(f"version {version} from {endpoint}: {why}")
