"""Slices on their way into memory: who ends a fetch has the memory for himself."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import pytest
import xxhash

from phaseloom.common.contract.errors import ResourceError
from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.contract.state_layout import Slice
from phaseloom.common.tensors.blockhash import digest_of, num_threads
from phaseloom.statemgr.transfer import tls, wire
from phaseloom.statemgr.transfer.delta import apply
from phaseloom.statemgr.transfer.tensorslices import Batch, batches
from tests.support.meshcerts import identity
from tests.support.peerfetch import fetch_of, home

KEY = VersionKey(DeploymentKey("acme", "job", "policy"), 3)
CONTENT = bytes(range(64))
_OTHER = zlib.compress(b"\1\0" + b"\1\0") + b"\0"
"""A delta that changes one element."""


async def _gives_all(stream: tls.Stream) -> None:
    """A source that has one part, of which it is asked for all."""
    await stream.receive(tls.MAX_REQUEST_BYTES)
    await stream.send(wire.Opened({"0of1": ""}))
    await stream.receive(tls.MAX_REQUEST_BYTES)
    await stream.send(wire.Given(xxhash.xxh3_128_hexdigest(CONTENT)))
    await stream.send_bytes(memoryview(CONTENT), 10.0)
    await stream.receive(tls.MAX_REQUEST_BYTES)


@dataclass
class _Source:
    """A source of one part, the bytes of one tensor."""

    content: bytes
    breaks_at: int = -1
    """The number of the request in the middle of whose answer it breaks off, once."""
    asked: list[wire.Give] = field(default_factory=list)
    num_streams: int = 0

    async def session(self, stream: tls.Stream) -> None:
        self.num_streams += 1
        await stream.receive(tls.MAX_REQUEST_BYTES)
        await stream.send(wire.Opened({"0of1": ""}))
        while True:
            payload = await stream.receive(tls.MAX_REQUEST_BYTES)
            give = msgspec.msgpack.decode(payload, type=wire.Give)
            self.asked.append(give)
            sent = b"".join(self.content[b.start[0] : b.start[0] + b.size[0]] for b in give.boxes)
            await stream.send(wire.Given(xxhash.xxh3_128_hexdigest(sent)))
            if len(self.asked) - 1 == self.breaks_at:
                await stream.send_bytes(memoryview(sent[: len(sent) // 2]), 10.0)
                return
            await stream.send_bytes(memoryview(sent), 10.0)


async def test_a_small_version_takes_few_requests_of_which_a_break_costs_one() -> None:
    source = _Source(random.Random(1).randbytes(3 * 2**20 + 5), breaks_at=3)
    size = len(source.content)
    slices = [Slice("0of1", "w", "uint8", [0], [size], 0, size)]
    memory = memoryview(bytearray(size))
    fetch = fetch_of(KEY, slices, memory, home())
    async with _serving(source.session) as endpoint:
        await fetch.fetch_all(batches(slices), {"0of1": [endpoint]})
    assert bytes(memory) == source.content
    assert source.num_streams == 2
    asked = [give.num_bytes for give in source.asked]
    assert max(asked) <= 2**19
    assert sum(asked) == size + asked[3]
    assert len(asked) <= size // 2**19 + 2


@pytest.mark.parametrize("num_bytes", [1, 2**22, 2**22 + 1, 2**25])
async def test_streams_are_opened_for_as_many_bytes_as_they_are_worth(num_bytes: int) -> None:
    source = _Source(bytes(num_bytes))
    slices = [Slice("0of1", "w", "uint8", [0], [num_bytes], 0, num_bytes)]
    memory = memoryview(bytearray(num_bytes))
    fetch = fetch_of(KEY, slices, memory, home())
    async with _serving(source.session) as endpoint:
        await fetch.fetch_all(batches(slices), {"0of1": [endpoint]})
    assert source.num_streams == min(-(-num_bytes // 2**22), num_threads(), 4)


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


@pytest.mark.parametrize("garbage", [b"garbage", _OTHER, b"x" * 64])
async def test_what_comes_as_a_bad_delta_is_asked_for_whole_on_the_same_stream(
    garbage: bytes,
) -> None:
    asked: list[wire.Ask] = []

    async def gives_a_bad_delta_first(stream: tls.Stream) -> None:
        await stream.receive(tls.MAX_REQUEST_BYTES)
        await stream.send(wire.Opened({"0of1": ""}))
        for sent, delta_bytes in ((garbage, len(garbage)), (CONTENT, 0)):
            payload = await stream.receive(tls.MAX_REQUEST_BYTES)
            asked.append(msgspec.msgpack.decode(payload, type=wire.Ask))
            digest = xxhash.xxh3_128_hexdigest(CONTENT)
            await stream.send(wire.Given(digest, delta_bytes=delta_bytes))
            await stream.send_bytes(memoryview(sent), 10.0)
        await stream.receive(tls.MAX_REQUEST_BYTES)

    assert await _fetched(gives_a_bad_delta_first, bytes(64)) == CONTENT
    assert [ask.takes_delta for ask in asked if isinstance(ask, wire.Give)] == [True, False]


@pytest.mark.parametrize(("base", "delta_bytes"), [(None, 8), (bytes(64), 65), (bytes(64), -1)])
async def test_a_source_that_sends_a_delta_unasked_or_a_large_one_is_left(
    base: bytes | None, delta_bytes: int
) -> None:
    async def gives_a_delta(stream: tls.Stream) -> None:
        await stream.receive(tls.MAX_REQUEST_BYTES)
        await stream.send(wire.Opened({"0of1": ""}))
        await stream.receive(tls.MAX_REQUEST_BYTES)
        await stream.send(wire.Given("", delta_bytes=delta_bytes))
        await stream.receive(tls.MAX_REQUEST_BYTES)

    with pytest.raises(ResourceError, match=f"a delta of {delta_bytes} bytes"):
        await _fetched(gives_a_delta, base, timeout_s=0.2)


async def _fetched(session: tls.Session, base: bytes | None, *, timeout_s: float = 10.0) -> bytes:
    """What came of `CONTENT` from one source, where the reader has this base."""
    slices = [Slice("0of1", "w", "uint8", [0], [len(CONTENT)], 0, len(CONTENT))]
    memory = memoryview(bytearray(len(CONTENT)))
    fetch = fetch_of(KEY, slices, memory, home(timeout_s=timeout_s))
    fetch.sink.base = None if base is None else memoryview(base)
    async with _serving(session) as source:
        await fetch.fetch_all(batches(slices), {"0of1": [source]})
    return bytes(memory)


async def test_a_version_that_is_bad_as_a_whole_comes_without_deltas_once_more() -> None:
    """The checksum beside a delta was right, and that of the version is not."""
    asked: list[bool] = []

    async def gives_another_version_first(stream: tls.Stream) -> None:
        await stream.receive(tls.MAX_REQUEST_BYTES)
        await stream.send(wire.Opened({"0of1": ""}))
        payload = await stream.receive(tls.MAX_REQUEST_BYTES)
        give = msgspec.msgpack.decode(payload, type=wire.Give)
        asked.append(give.takes_delta)
        made, sent = (apply(memoryview(bytes(64)), memoryview(_OTHER)), _OTHER)
        if not give.takes_delta:
            made, sent = memoryview(CONTENT), CONTENT
        delta_bytes = len(sent) if give.takes_delta else 0
        await stream.send(wire.Given(xxhash.xxh3_128_hexdigest(made), delta_bytes=delta_bytes))
        await stream.send_bytes(memoryview(sent), 10.0)
        await stream.receive(tls.MAX_REQUEST_BYTES)

    slices = [Slice("0of1", "w", "uint8", [0], [len(CONTENT)], 0, len(CONTENT))]
    memory = memoryview(bytearray(len(CONTENT)))
    fetch = fetch_of(KEY, slices, memory, home(), digest=digest_of(memoryview(CONTENT)))
    fetch.sink.base = memoryview(bytes(64))
    async with _serving(gives_another_version_first) as source:
        await fetch.fetch_with_retry(batches(slices), {"0of1": [source]})
    assert bytes(memory) == CONTENT
    assert asked == [True, False]
