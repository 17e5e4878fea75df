"""Slices on their way into memory: who ends a fetch has the memory for himself."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import xxhash

from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.contract.state_layout import Slice
from phaseloom.statemgr.mesh import tls
from phaseloom.statemgr.transfer import wire
from phaseloom.statemgr.transfer.tensorslices import Batch, batches
from tests.support.meshcerts import identity
from tests.support.peerfetch import fetch_of, home

KEY = VersionKey(DeploymentKey("acme", "job", "policy"), 3)
CONTENT = bytes(range(64))


async def _gives_all(stream: tls.Stream) -> None:
    """A source that has one part, of which it is asked for all."""
    await stream.receive(tls.MAX_REQUEST_BYTES)
    await stream.send(wire.Opened({"0of1": ""}))
    await stream.receive(tls.MAX_REQUEST_BYTES)
    await stream.send(wire.Given(xxhash.xxh3_128_hexdigest(CONTENT)))
    await stream.send_bytes(memoryview(CONTENT), 10.0)
    await stream.receive(tls.MAX_REQUEST_BYTES)


@asynccontextmanager
async def _serving(session: tls.Session) -> AsyncIterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    with listener:
        server = tls.Server(identity(), 10.0, session)
        serving = asyncio.create_task(server.serve(listener))
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        serving.cancel()
        await asyncio.wait([serving])


async def test_nobody_writes_any_more_when_a_fetch_that_was_cancelled_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its memory may be another version's next."""
    loop, begun, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    put = Batch.put

    def put_late(batch: Batch, memory: memoryview, content: bytes | memoryview) -> None:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait()
        put(batch, memory, content)

    monkeypatch.setattr(Batch, "put", put_late)
    slices = [Slice("0of1", "w", "uint8", [0], [len(CONTENT)], 0, len(CONTENT))]
    memory = memoryview(bytearray(len(CONTENT)))
    fetch = fetch_of(KEY, slices, memory, home())
    async with _serving(_gives_all) as source:
        fetching = asyncio.create_task(fetch.fetch_all(batches(slices), {"0of1": [source]}))
        try:
            await begun.wait()
            fetching.cancel()
            done, _ = await asyncio.wait([fetching], timeout=0.1)
        finally:
            go_on.set()
        assert not done, "its memory is still being written"
        await asyncio.wait([fetching])
        assert fetching.cancelled()
        assert bytes(memory) == CONTENT
