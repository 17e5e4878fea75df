"""Framed calls over a real Unix socket, under both event loops."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from phaseloom.common.contract.errors import CallerError, Code, InternalError, ResourceError
from phaseloom.common.contract.state_rank import Failed
from phaseloom.common.transport.framing import (
    MAX_FDS,
    MAX_FRAME_BYTES,
    MAX_IN_FLIGHT,
    MAX_PATH_BYTES,
    Frame,
    LocalListener,
    Peer,
    close_fds,
    serve,
)


class Echo(msgspec.Struct, frozen=True, tag="echo"):
    text: str


Body = Echo | Failed
Scenario = Callable[[Path], Awaitable[None]]
Run = Callable[[Scenario], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest, short_dir: Path) -> Run:
    """Runs a scenario under one of the loops; afterwards no descriptor may be left open."""

    def run_scenario(scenario: Scenario) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(asyncio.sleep(0))  # libuv opens two for good with its first loop
        gc.collect()  # what earlier tests of this process left must not go while this one counts
        before = set(os.listdir("/proc/self/fd"))
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(asyncio.wait_for(_awaited(scenario, short_dir / "s"), 30))
        assert set(os.listdir("/proc/self/fd")) == before

    return run_scenario


async def _awaited(scenario: Scenario, path: Path) -> None:
    await scenario(path)


def served(handler: Any, scenario: Callable[[Peer[Body], Path], Awaitable[None]]) -> Scenario:
    """A scenario with a connection to a server that answers by `handler(peer, body, fds)`."""

    async def session(peer: Peer[Body]) -> None:
        async def handle(body: Body, fds: list[int]) -> Any:
            return await handler(peer, body, fds)

        peer.handler = handle
        peer.start()
        await asyncio.wait([peer.closed])

    async def whole(path: Path) -> None:
        with LocalListener(path) as listener:
            server = asyncio.create_task(serve(listener, Body, session))
            peer: Peer[Body] = await Peer.connect(path, Body)
            try:
                await scenario(peer, path)
            finally:
                await peer.close()
                server.cancel()
                await asyncio.wait([server])
            assert server.cancelled()

    return whole


async def echo(_peer: Peer[Body], body: Body, fds: list[int]) -> tuple[Body, list[int]]:
    close_fds(fds)
    return body, []


def test_calls_of_all_sizes_come_back_as_sent(run: Run) -> None:
    async def scenario(peer: Peer[Body], _: Path) -> None:
        for size in (0, 1, 4096, 300_000, 8 * 2**20):
            body = Echo("x" * size)
            assert await peer.call(body) == (body, [])

    run(served(echo, scenario))


def test_calls_at_once_are_answered_each_with_its_own(run: Run) -> None:
    async def scenario(peer: Peer[Body], _: Path) -> None:
        bodies = [Echo(str(i) * 10_000) for i in range(200)]
        answers = await asyncio.gather(*(peer.call(body) for body in bodies))
        assert [answer for answer, _ in answers] == bodies

    run(served(echo, scenario))


def test_slow_call_does_not_hold_back_others(run: Run) -> None:
    release: list[asyncio.Event] = []

    async def slow(_peer: Peer[Body], body: Body, _fds: list[int]) -> tuple[Body, list[int]]:
        if body == Echo("slow"):
            release.append(asyncio.Event())
            await release[0].wait()
        return body, []

    async def scenario(peer: Peer[Body], _: Path) -> None:
        waiting = asyncio.create_task(peer.call(Echo("slow")))
        for i in range(5):
            assert await peer.call(Echo(str(i))) == (Echo(str(i)), [])
        assert not waiting.done()
        release[0].set()
        assert await waiting == (Echo("slow"), [])

    run(served(slow, scenario))


def test_both_ends_call_at_once(run: Run) -> None:
    async def back(peer: Peer[Body], body: Body, _fds: list[int]) -> tuple[Body, list[int]]:
        assert isinstance(body, Echo)
        return await peer.call(Echo(f"back {body.text}"))

    async def scenario(peer: Peer[Body], _: Path) -> None:
        async def answer(body: Body, _fds: list[int]) -> tuple[Body, list[int]]:
            assert isinstance(body, Echo)
            return Echo(f"{body.text} and forth"), []

        peer.handler = answer
        answers = await asyncio.gather(*(peer.call(Echo(str(i))) for i in range(20)))
        assert [a for a, _ in answers] == [Echo(f"back {i} and forth") for i in range(20)]

    run(served(back, scenario))


def test_descriptors_travel_with_their_frame(run: Run) -> None:
    async def swap(_peer: Peer[Body], body: Body, fds: list[int]) -> tuple[Body, list[int]]:
        text = "".join(os.pread(fd, 100, 0).decode() for fd in fds)
        close_fds(fds)
        made = memfd(f"answer to {text}")
        asyncio.get_running_loop().call_soon(os.close, made)
        return body, [made]

    async def scenario(peer: Peer[Body], _: Path) -> None:
        async def one(i: int) -> None:
            mine = [memfd(f"{i}.{k} ") for k in range(i % (MAX_FDS + 1))]
            _, fds = await peer.call(Echo("x" * 50_000), mine)
            expected = "".join(f"{i}.{k} " for k in range(i % (MAX_FDS + 1)))
            assert os.pread(fds[0], 1000, 0).decode() == f"answer to {expected}"
            assert not os.get_inheritable(fds[0])
            close_fds([*fds, *mine])

        await asyncio.gather(*(one(i) for i in range(30)))

    run(served(swap, scenario))


def memfd(text: str) -> int:
    fd = os.memfd_create("test")
    os.pwrite(fd, text.encode(), 0)
    return fd


def test_errors_of_the_handler_are_raised_at_the_caller(run: Run) -> None:
    async def fail(_peer: Peer[Body], body: Body, _fds: list[int]) -> tuple[Body, list[int]]:
        if body == Echo("bug"):
            raise RuntimeError("oops")
        raise ResourceError("full", code=Code.RESOURCE_EXHAUSTED, details={"used": "7"})

    async def scenario(peer: Peer[Body], _: Path) -> None:
        with pytest.raises(ResourceError) as caught:
            await peer.call(Echo(""))
        assert caught.value.info.details == {"used": "7"}
        with pytest.raises(InternalError, match="RuntimeError: oops"):
            await peer.call(Echo("bug"))

    run(served(fail, scenario))


def test_pending_calls_fail_at_once_when_the_other_end_is_gone(run: Run) -> None:
    async def hang_up(peer: Peer[Body], body: Body, _fds: list[int]) -> tuple[Body, list[int]]:
        if body == Echo("last"):
            peer.cut("enough")
        await asyncio.Event().wait()
        raise AssertionError

    async def scenario(peer: Peer[Body], _: Path) -> None:
        waiting = [asyncio.create_task(peer.call(Echo(str(i)))) for i in range(3)]
        waiting.append(asyncio.create_task(peer.call(Echo("last"))))
        for error in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(error, ResourceError)
            assert "closed by the other end" in str(error)
        assert peer.closed.result() == "closed by the other end"
        with pytest.raises(ResourceError):
            await peer.call(Echo("late"))

    run(served(hang_up, scenario))


def test_handlers_finish_their_work_when_who_asked_is_gone(run: Run) -> None:
    """A switch that has begun must be whole, also when its agent dies."""
    done: list[str] = []

    async def scenario(path: Path) -> None:
        begun, go_on, finished = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def work(_body: Body, _fds: list[int]) -> tuple[Body, list[int]]:
            begun.set()
            await go_on.wait()
            done.append("whole")
            return Echo(""), []

        async def session(peer: Peer[Body]) -> None:
            peer.handler = work
            peer.start()
            await asyncio.wait([peer.closed])
            go_on.set()
            await peer.finish()
            assert done == ["whole"]
            finished.set()

        with LocalListener(path) as listener:
            server = asyncio.create_task(serve(listener, Body, session))
            peer: Peer[Body] = await Peer.connect(path, Body)
            call = asyncio.create_task(peer.call(Echo("")))
            await begun.wait()
            await peer.close()
            with pytest.raises(ResourceError):
                await call
            await finished.wait()
            server.cancel()
            await asyncio.wait([server])

    run(scenario)


def test_close_cancels_handlers_and_waits_for_them(run: Run) -> None:
    seen: list[str] = []

    async def scenario(peer: Peer[Body], path: Path) -> None:
        begun = asyncio.Event()

        async def forever(_body: Body, _fds: list[int]) -> tuple[Body, list[int]]:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                seen.append("cancelled")
            raise AssertionError

        peer.handler = forever
        call = asyncio.create_task(peer.call(Echo("")))
        await begun.wait()
        await peer.close()
        assert seen == ["cancelled"]
        with pytest.raises(ResourceError):
            await call

    async def ask_back(peer: Peer[Body], body: Body, _fds: list[int]) -> tuple[Body, list[int]]:
        return await peer.call(body)

    run(served(ask_back, scenario))


def test_answer_to_a_cancelled_call_is_dropped_with_its_descriptors(run: Run) -> None:
    async def late(_peer: Peer[Body], body: Body, _fds: list[int]) -> tuple[Body, list[int]]:
        if body == Echo("wanted"):
            return body, []
        await asyncio.sleep(0)
        made = memfd("late")
        asyncio.get_running_loop().call_soon(os.close, made)
        return body, [made]

    async def scenario(peer: Peer[Body], _: Path) -> None:
        call = asyncio.create_task(peer.call(Echo("given up")))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        for _i in range(5):
            assert await peer.call(Echo("wanted")) == (Echo("wanted"), [])

    run(served(late, scenario))


def test_frame_above_the_limit_is_refused_where_it_is_sent(run: Run) -> None:
    async def scenario(peer: Peer[Body], _: Path) -> None:
        with pytest.raises(CallerError, match="a frame must have at most"):
            await peer.call(Echo("x" * MAX_FRAME_BYTES))
        with pytest.raises(CallerError, match="a frame must have at most"):
            await peer.call(Echo(""), [0] * (MAX_FDS + 1))
        assert await peer.call(Echo("still alive")) == (Echo("still alive"), [])

    run(served(echo, scenario))


def test_answer_above_the_limit_is_an_error_at_the_caller(run: Run) -> None:
    async def huge(_peer: Peer[Body], _body: Body, _fds: list[int]) -> tuple[Body, list[int]]:
        return Echo("x" * MAX_FRAME_BYTES), []

    async def scenario(peer: Peer[Body], _: Path) -> None:
        with pytest.raises(CallerError, match="a frame must have at most"):
            await peer.call(Echo(""))

    run(served(huge, scenario))


def _framed(*parts: object) -> bytes:
    payload = msgspec.msgpack.encode(parts)
    return struct.pack("<I", len(payload)) + payload


HOSTILE = {
    "oversize": struct.pack("<I", MAX_FRAME_BYTES + 1),
    "garbage": struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1",
    "not utf-8": struct.pack("<I", 4) + b"\x93\x01\xc2\xa1\xff",
    "wrong type": _framed(1, False, {"type": "unheard of"}, 0),
    "fds that did not come": _framed(1, False, {"type": "echo", "text": ""}, 2),
    "negative fds": _framed(1, False, {"type": "echo", "text": ""}, -1),
    "answer to nothing": _framed(7, True, {"type": "echo", "text": ""}, 0),
}


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE.keys())
def test_peer_that_breaks_the_protocol_is_cut_off_alone(
    run: Run, hostile: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(peer: Peer[Body], path: Path) -> None:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(hostile)
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        assert await peer.call(Echo("well")) == (Echo("well"), [])

    run(served(echo, scenario))
    assert "violated the protocol" in caplog.text


@pytest.mark.parametrize(
    ("num_fds", "payload"),
    [
        (MAX_FDS + 1, _framed(1, False, {"type": "echo", "text": ""}, MAX_FDS + 1)),
        (200, b"\x00"),
        (1, _framed(1, False, {"type": "echo", "text": ""}, 0)),
        (2, b"\x10"),
    ],
    ids=["too many", "far too many", "unannounced", "frame never whole"],
)
def test_hostile_descriptors_leak_nothing(run: Run, num_fds: int, payload: bytes) -> None:
    """The fixture counts descriptors afterwards."""

    async def scenario(peer: Peer[Body], path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))
            socket.send_fds(sock, [payload], [sock.fileno()] * num_fds)
            if len(payload) == 1 and num_fds <= MAX_FDS:
                await peer.call(Echo("it waits for the rest"))
            else:
                sock.setblocking(False)
                # The echo may still be answered before the cut.
                while await asyncio.get_running_loop().sock_recv(sock, 1000):
                    pass
        assert await peer.call(Echo("well")) == (Echo("well"), [])

    run(served(echo, scenario))


def test_flood_of_requests_is_cut_off(run: Run) -> None:
    async def never(_peer: Peer[Body], _body: Body, _fds: list[int]) -> tuple[Body, list[int]]:
        await asyncio.Event().wait()
        raise AssertionError

    async def scenario(peer: Peer[Body], path: Path) -> None:
        reader, writer = await asyncio.open_unix_connection(path)
        request = _framed(1, False, {"type": "echo", "text": ""}, 0)
        writer.write(request * (MAX_IN_FLIGHT + 1))
        assert await reader.read() == b""
        writer.close()

    run(served(never, scenario))


def test_frame_that_comes_byte_by_byte_is_read(run: Run) -> None:
    async def scenario(_peer: Peer[Body], path: Path) -> None:
        reader, writer = await asyncio.open_unix_connection(path)
        for byte in _framed(1, False, {"type": "echo", "text": "slow"}, 0):
            writer.write(bytes([byte]))
            await writer.drain()
        (length,) = struct.unpack("<I", await reader.readexactly(4))
        answer = msgspec.msgpack.decode(await reader.readexactly(length), type=Frame[Body])
        assert answer == Frame(1, True, Echo("slow"), 0)
        writer.close()
        await writer.wait_closed()

    run(served(echo, scenario))


def test_connecting_to_nobody_is_a_resource_error(run: Run) -> None:
    async def scenario(path: Path) -> None:
        with pytest.raises(ResourceError, match="cannot connect"):
            await Peer.connect(path, Body)

    run(scenario)


def test_stale_socket_file_is_replaced_and_private(short_dir: Path) -> None:
    LocalListener(short_dir / "s").close()
    with LocalListener(short_dir / "s"):
        assert (short_dir / "s").stat().st_mode & 0o777 == 0o600


def test_path_too_long_for_a_socket_is_refused_at_both_ends(run: Run) -> None:
    async def scenario(path: Path) -> None:
        long = path.parent / ("x" * MAX_PATH_BYTES)
        with pytest.raises(CallerError, match="Unix socket"):
            LocalListener(long)
        with pytest.raises(CallerError, match="Unix socket"):
            await Peer.connect(long, Body)

    run(scenario)
