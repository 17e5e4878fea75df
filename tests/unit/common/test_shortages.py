"""Processes that are short of open files or memory say so, and go on once the shortage is over."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phaseloom.cli.child import Child
from phaseloom.cli.processes import ChildSpec
from phaseloom.common.contract.errors import Code, ResourceError, unexpected_error
from phaseloom.common.contract.state_rank import Done, RankHello, StateMessage
from phaseloom.common.transport.framing import LocalListener, Peer, close_fds, serve

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]


@contextmanager
def no_more_files() -> Iterator[None]:
    """This process can open nothing within the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    "error",
    [MemoryError("no"), *(OSError(n, "no") for n in (errno.ENOMEM, errno.EMFILE, errno.ENOSPC))],
)
async def test_shortage_is_resource_exhausted_with_a_remedy(error: Exception) -> None:
    info = unexpected_error(error)
    assert info.code is Code.RESOURCE_EXHAUSTED
    assert "try again" in info.remedy
    assert unexpected_error(OSError(errno.EBADF, "a bug")).code is Code.INTERNAL


async def _echo(peer: Peer[StateMessage]) -> None:
    async def handle(body: StateMessage, fds: list[int]) -> tuple[StateMessage, list[int]]:
        close_fds(fds)
        return Done(), []

    peer.handler = handle
    peer.start()
    await asyncio.wait([peer.closed])


async def test_descriptor_that_cannot_be_duplicated_is_refused_and_the_connection_goes_on(
    short_dir: Path,
) -> None:
    with LocalListener(short_dir / "s") as listener, (short_dir / "file").open("wb") as file:
        server = asyncio.create_task(serve(listener, StateMessage, _echo))
        peer: Peer[StateMessage] = await Peer.connect(short_dir / "s", StateMessage)
        with no_more_files():
            with pytest.raises(ResourceError, match="Too many open files") as refused:
                await peer.call(RankHello("token"), [file.fileno()])
            assert refused.value.info.code is Code.RESOURCE_EXHAUSTED
            with pytest.raises(ResourceError, match="Too many open files"):
                await Peer.connect(short_dir / "s", StateMessage)
        await peer.call(RankHello("token"), [file.fileno()])
        await peer.close()
        server.cancel()
        await asyncio.wait([server])


async def test_connection_waits_until_the_server_may_open_files_again(
    short_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    path = short_dir / "s"
    with LocalListener(path) as listener:
        server = asyncio.create_task(serve(listener, StateMessage, _echo))
        with socket.socket(socket.AF_UNIX) as early:
            with no_more_files():
                early.connect(str(path))
                while "cannot accept a connection" not in caplog.text:
                    await asyncio.sleep(0)
            peer: Peer[StateMessage] = await Peer.connect(path, StateMessage)
            await peer.call(RankHello("token"))
            await peer.close()
        assert not server.done()
        server.cancel()
        await asyncio.wait([server])


@pytest.mark.parametrize("removed", ["the socket", "its directory"])
async def test_removed_socket_is_made_again(short_dir: Path, removed: str) -> None:
    directory = short_dir / "d"
    await asyncio.to_thread(directory.mkdir)
    path = directory / "s"
    with LocalListener(path) as listener:
        server = asyncio.create_task(serve(listener, StateMessage, _echo))
        earlier: Peer[StateMessage] = await Peer.connect(path, StateMessage)
        await earlier.call(RankHello("token"))
        path.unlink()
        if removed == "its directory":
            directory.rmdir()
        later = None
        while later is None:
            try:
                later = await Peer[StateMessage].connect(path, StateMessage)
            except ResourceError:
                await asyncio.sleep(0.01)
        for peer in (earlier, later):
            await peer.call(RankHello("token"))
            await peer.close()
        server.cancel()
        await asyncio.wait([server])


async def test_child_is_started_once_its_supervisor_may_open_files(tmp_path: Path) -> None:
    reasons: asyncio.Queue[str] = asyncio.Queue()
    started = asyncio.Event()

    async def report(_name: str, reason: str) -> None:
        await reasons.put(reason)

    log_file = tmp_path / "logs" / "child.log"  # its directory does not exist
    spec = ChildSpec(
        "child", "tests.support.idle", {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    )
    child = Child(spec, log_file, started.set, report)
    with no_more_files():
        running = asyncio.create_task(child.run())
        reason = await reasons.get()
        assert "could not be started: OSError: [Errno 24] Too many open files" in reason
        assert "ulimit -n" in reason
    await started.wait()
    assert child.process is not None
    assert log_file.exists()
    await child.stop(10.0)
    await running
