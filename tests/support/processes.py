"""Services as processes of their own, and what is running, as /proc says."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest

from phaseloom.common.process.config import PREFIX, inherited
from phaseloom.common.process.lifecycle import DIE_WITH_PARENT
from phaseloom.common.transport.natsserver import EmbeddedServer


@contextmanager
def without_torch() -> Iterator[None]:
    """Nodes that start meanwhile import no torch, which takes seconds and `noop` does not need."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(f"{PREFIX}WORKER_PRELOAD", "false")
        yield


@asynccontextmanager
async def service(
    name: str, server: EmbeddedServer, **environment: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """One on this bus; killed at the end if it still runs."""
    bus = server.credentials.bus
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"phaseloom.{name}.main"),
        env={
            **inherited(),
            "PHASELOOM_BUS_URL": bus.url,
            "PHASELOOM_BUS_USER": bus.user,
            "PHASELOOM_BUS_PASSWORD": bus.password,
            DIE_WITH_PARENT: str(os.getpid()),
            **environment,
        },
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def free_port() -> int:
    """One that no connection is given meanwhile: they come from 32768 on."""
    while True:
        port = secrets.choice(range(10_000, 32_000))
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def gone(pid: int) -> bool:
    """True when the process has ended, reaped or not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return text.rpartition(")")[2].split()[0] in {"Z", "X"}


def child_pids(pid: int) -> list[int]:
    """The children of a process, of all its threads."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found += [int(child) for child in (task / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread ended meanwhile
    return sorted(found)


def descendant_pids(pid: int) -> list[int]:
    """Children, their children, and so on."""
    found: list[int] = []
    for child in child_pids(pid):
        found += [child, *descendant_pids(child)]
    return found


async def until_gone(pids: Iterable[int], timeout_s: float) -> None:
    """Raises: TimeoutError: some still run; in its text."""
    left = set(pids)
    try:
        async with asyncio.timeout(timeout_s):
            while left := {pid for pid in left if not gone(pid)}:
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise TimeoutError("still running: " + ", ".join(map(description, left))) from None


def description(pid: int) -> str:
    """For a failed assertion: what this process is and who started it."""
    directory = Path(f"/proc/{pid}")
    try:
        command = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
        state, parent = (directory / "stat").read_text().rpartition(")")[2].split()[:2]
        return f"{pid} (state {state}, parent {parent}): {command}"
    except (FileNotFoundError, ProcessLookupError):
        return f"{pid} (ended meanwhile)"
