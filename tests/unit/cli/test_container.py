"""A service in a container ends with its guard, and is killed if it hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

SERVICE = """
import asyncio, os, signal
from phaseloom.common.process.heartbeat import beat

async def serve():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    beating = asyncio.create_task(beat())
    await asyncio.sleep(0)  # it sends its first heartbeat: no silence counts before that
    print(os.getpid(), flush=True)
    await stop.wait()
    print("stopped", flush=True)

asyncio.run(serve())
"""
HUNG_S = 2.5


@contextmanager
def guarded(code: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run a service under its guard. Returns: the guard, and the service's pid."""
    program = [sys.executable, "-c", code]
    guard = (
        f"import sys; from phaseloom.cli.container import run; sys.exit(run({program}, {HUNG_S}))"
    )
    with subprocess.Popen([sys.executable, "-c", guard], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        try:
            yield process, pid
        finally:
            for number in (pid, process.pid):
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)


def test_service_that_hangs_is_killed_and_its_container_ends() -> None:
    with guarded(SERVICE) as (process, pid):
        os.kill(pid, signal.SIGSTOP)
        assert process.wait(60) == 128 + signal.SIGKILL
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_service_stops_when_its_container_is_stopped() -> None:
    with guarded(SERVICE) as (process, _):
        process.terminate()
        assert process.wait(60) == 0
        assert process.stdout is not None
        assert process.stdout.read() == b"stopped\n"


def test_service_dies_with_its_guard() -> None:
    with guarded(SERVICE) as (process, _):
        process.kill()
        assert process.stdout is not None
        assert process.stdout.read() == b"", "its end of the pipe is closed once it is dead"


def test_exit_code_of_the_service_is_the_containers() -> None:
    with guarded("import os, sys; print(os.getpid(), flush=True); sys.exit(3)") as (process, _):
        assert process.wait(60) == 3
