"""Streams between nodes: whatever is sent arrives, however slowly it is taken."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from phaseloom.common.contract.errors import CallerError
from phaseloom.statemgr.transfer import tls
from phaseloom.statemgr.transfer.tls import Session, Stream
from tests.support.meshcerts import identity

TIMEOUT_S = 30.0


@asynccontextmanager
async def _serving(session: Session) -> AsyncIterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    with listener:
        server = tls.Server(identity("server"), TIMEOUT_S, session)
        serving = asyncio.create_task(server.serve(listener))
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        serving.cancel()
        await asyncio.wait([serving])


async def _connect(endpoint: str) -> Stream:
    return await tls.connect(endpoint, identity("client"), TIMEOUT_S)


@pytest.mark.parametrize("size", [0, 1, 16384, 65537, 24 * 2**20 + 3])
async def test_bytes_arrive_whole_however_slowly_they_are_taken(size: int) -> None:
    """What the socket does not take at once must be offered again just as it was."""
    chance = random.Random(size)
    content = memoryview(chance.randbytes(size))
    seen: list[str] = []

    async def send(stream: Stream) -> None:
        seen.append(stream.node)
        await stream.send_bytes(content, TIMEOUT_S)
        back = memoryview(bytearray(size))
        await stream.receive_into(back, TIMEOUT_S)
        assert back == content
        await stream.send_bytes(memoryview(b"."), TIMEOUT_S)

    async with _serving(send) as endpoint:
        stream = await _connect(endpoint)
        received = bytearray(size)
        at = 0
        while at < size:
            end = min(size, at + chance.randrange(1, 300_000))
            await stream.receive_into(memoryview(received)[at:end], TIMEOUT_S)
            at = end
        assert received == content
        await stream.send_bytes(memoryview(received), TIMEOUT_S)
        await stream.receive_into(memoryview(bytearray(1)), TIMEOUT_S)
        assert (stream.node, seen) == ("server", ["client"])
        stream.close()


async def test_who_reads_beyond_the_end_is_told_how_much_came() -> None:
    async def send(stream: Stream) -> None:
        await stream.send_bytes(memoryview(bytes(100_000)), TIMEOUT_S)

    async with _serving(send) as endpoint:
        stream = await _connect(endpoint)
        with pytest.raises(
            ConnectionError, match="the connection ended after 100000 of 100001 bytes"
        ):
            await stream.receive_into(memoryview(bytearray(100_001)), TIMEOUT_S)
        stream.close()


async def test_a_cancelled_transfer_leaves_no_thread_at_its_memory() -> None:
    async def send(stream: Stream) -> None:
        while True:
            await stream.send_bytes(memoryview(bytes(2**20)), TIMEOUT_S)

    async with _serving(send) as endpoint:
        stream = await _connect(endpoint)
        memory = bytearray(64 * 2**20)
        came = asyncio.Event()
        receiving = asyncio.create_task(
            stream.receive_into(memoryview(memory), TIMEOUT_S, lambda chunk: came.set())
        )
        await came.wait()
        receiving.cancel()
        await asyncio.wait([receiving])
        assert receiving.cancelled()
        del receiving
        stream.close()
        memory.clear()  # a view of it that is still in use would make this fail


async def test_session_that_fails_as_nobody_foresaw_ends_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    num_sessions = 0

    async def session(stream: Stream) -> None:
        nonlocal num_sessions
        num_sessions += 1
        if num_sessions == 1:
            raise ZeroDivisionError("a bug")
        await stream.send_bytes(memoryview(b"."), TIMEOUT_S)

    async with _serving(session) as endpoint:
        stream = await _connect(endpoint)
        with pytest.raises(ConnectionError):
            await stream.receive_into(memoryview(bytearray(1)), TIMEOUT_S)
        stream.close()
        stream = await _connect(endpoint)
        await stream.receive_into(memoryview(bytearray(1)), TIMEOUT_S)
        stream.close()
    assert "ZeroDivisionError: a bug" in caplog.text


async def test_work_in_a_thread_outlives_every_cancellation() -> None:
    """A timeout and the end of the fetch may both cancel one transfer, while its thread writes."""
    began, may_end = threading.Event(), threading.Event()
    memory = bytearray(8)

    def work(view: memoryview) -> None:
        began.set()
        assert may_end.wait(TIMEOUT_S)
        view[:] = b"x" * 8

    working = asyncio.create_task(tls.in_thread(work, memoryview(memory)))
    await asyncio.to_thread(began.wait)
    for _ in range(3):
        working.cancel()
        assert not (await asyncio.wait([working], timeout=0.01))[0]
    may_end.set()
    await asyncio.wait([working])
    assert working.cancelled()
    assert memory == b"x" * 8
    memory.clear()


@pytest.mark.parametrize("endpoint", ["", "x", ":1", "a:b", "127.0.0.1:"])
async def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(CallerError, match="is not host:port"):
        await _connect(endpoint)


def test_an_identity_that_is_not_there_says_how_to_make_one(tmp_path: object) -> None:
    with pytest.raises(CallerError, match="phaseloom certs"):
        tls.Identity.load(str(tmp_path))
