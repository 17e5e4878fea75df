"""A TCP link to a state manager that tests can count, hold, cut and spoil."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

_CHUNK_BYTES = 64 * 1024
GOODBYES_BYTES = 512
"""More than a source has to say to streams that are closed, maybe after what was fetched by them
has arrived; less than a handshake."""


@dataclass
class Link:
    """What flows back from one endpoint, over all connections."""

    source: str
    """Where it ends; may be changed, for connections to come."""
    endpoint: str = ""
    num_connections: int = 0
    """Those that were ever made."""
    passed_bytes: int = 0
    hold_after_bytes: int = 1 << 60
    """Nothing passes beyond; `held` is set then, and `release` lets the rest pass."""
    flip_at: int = -1
    """One bit of this byte is wrong, once."""
    grown: asyncio.Event = field(default_factory=asyncio.Event)
    held: asyncio.Event = field(default_factory=asyncio.Event)
    _released: asyncio.Event = field(default_factory=asyncio.Event)
    connections: set[asyncio.StreamWriter] = field(default_factory=set)
    """Both ends of those that are open."""

    def release(self) -> None:
        self._released.set()

    def cut(self) -> None:
        """Break every connection that is open now."""
        for writer in self.connections:
            writer.transport.abort()

    async def passed(self, num_bytes: int) -> None:
        """Wait until so much has passed in all."""
        while self.passed_bytes < num_bytes:
            self.grown.clear()
            await self.grown.wait()

    async def pass_on(self, chunk: bytes, writer: asyncio.StreamWriter) -> None:
        if self.passed_bytes + len(chunk) > self.hold_after_bytes:
            self.held.set()
            await self._released.wait()
        place = self.flip_at - self.passed_bytes
        if 0 <= place < len(chunk):
            chunk = chunk[:place] + bytes([chunk[place] ^ 1]) + chunk[place + 1 :]
        self.passed_bytes += len(chunk)
        self.grown.set()
        writer.write(chunk)
        await writer.drain()


@asynccontextmanager
async def link(source: str) -> AsyncIterator[Link]:
    """A link that ends at another endpoint of this machine."""
    running = Link(source)

    async def upstream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A fetch that closes its stream with bytes unread resets it. Its source must hear of that,
        # or it waits for the next request, and this end for the source.
        try:
            while chunk := await reader.read(65536):
                writer.write(chunk)
            writer.write_eof()
        except OSError:
            writer.transport.abort()

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        running.num_connections += 1
        asking: asyncio.Task[None] | None = None
        try:
            host, port = running.source.rsplit(":", 1)
            answers, asks = await asyncio.open_connection(host, int(port))
            ends.append(asks)
            running.connections.update(ends)
            asking = asyncio.create_task(upstream(reader, asks))
            while chunk := await answers.read(_CHUNK_BYTES):
                await running.pass_on(chunk, writer)
        except OSError:
            return
        finally:
            if asking is not None:
                asking.cancel()
                with contextlib.suppress(asyncio.CancelledError, OSError):
                    await asking
            running.connections.difference_update(ends)
            for end in ends:
                end.transport.abort()

    server = await asyncio.start_server(connection, "127.0.0.1", 0)
    running.endpoint = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield running
        running.release()
        running.cut()
