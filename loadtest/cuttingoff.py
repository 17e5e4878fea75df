"""Three NATS servers, any of which can be cut off: from the other two and from all clients.

Everything that goes to a server, or from one to another, passes through a TCP proxy on loopback.
A server that is cut off runs on and hears nothing; what was sent meanwhile arrives when it is back,
as TCP would have it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from phaseloom.common.process import lifecycle
from phaseloom.common.transport.natsserver import MEMBERS, Credentials, EmbeddedEnsemble

_CHUNK_BYTES = 2**16
CLIENTS = "clients"


class _Link:
    """A port whose connections are passed on to another one, unless either end is cut off."""

    def __init__(self, ends: tuple[str, str], gates: Mapping[str, asyncio.Event]) -> None:
        self.target = 0
        self._gates = [gates[end] for end in ends if end in gates]
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await lifecycle.end([*self._tasks])

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._pass_on(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other: asyncio.StreamWriter | None = None
        try:
            await self._passable()
            from_other, other = await asyncio.open_connection("127.0.0.1", self.target)
            ways = [
                asyncio.create_task(self._copy(reader, other)),
                asyncio.create_task(self._copy(from_other, writer)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await lifecycle.end(ways)
        except OSError:
            pass  # nobody listens there
        finally:
            for end in (writer, other):
                if end is not None:
                    end.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await reader.read(_CHUNK_BYTES):
                await self._passable()
                writer.write(chunk)
                await writer.drain()

    async def _passable(self) -> None:
        while not all(gate.is_set() for gate in self._gates):
            for gate in self._gates:
                await gate.wait()


class EnsembleBehindProxies(EmbeddedEnsemble):
    """An ensemble whose servers can be cut off; for as long as it runs in this event loop."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._gates = {name: asyncio.Event() for name in MEMBERS}
        for gate in self._gates.values():
            gate.set()
        sources = (*MEMBERS, CLIENTS)
        self._links = {
            (source, to): _Link((source, to), self._gates)
            for source in sources
            for to in MEMBERS
            if source != to
        }
        self._ports: dict[tuple[str, str], int] = {}

    def cut_off(self, name: str) -> None:
        self._gates[name].clear()

    def bring_back(self, name: str) -> None:
        self._gates[name].set()

    @property
    def credentials(self) -> Credentials:
        urls = [f"nats://127.0.0.1:{self._ports[CLIENTS, name]}" for name in MEMBERS]
        return replace(super().credentials, url=",".join(urls))

    async def start(self) -> None:
        for ends, link in self._links.items():
            self._ports[ends] = await link.open()
        await super().start()
        for name, server in self.members.items():
            self._links[CLIENTS, name].target = int(server.credentials.url.rpartition(":")[2])

    async def stop(self) -> None:
        await super().stop()
        for link in self._links.values():
            await link.close()

    def _route(self, name: str, to: str, ports: Mapping[str, int]) -> str:
        self._links[name, to].target = ports[to]
        return f"127.0.0.1:{self._ports[name, to]}"
