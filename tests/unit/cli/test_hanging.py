"""Silence counts only while a process could have sent a heartbeat."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from phaseloom.cli.hanging import HUNG_AFTER_S, TICK_S, Pulse, close_connections
from phaseloom.common.process.heartbeat import NOTIFY_SOCKET

BEAT_ONCE = f"""
import os, socket
name = os.environ["{NOTIFY_SOCKET}"]
socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"WATCHDOG=1", chr(0) + name[1:])
"""
SPIN = "while True: pass"
WINDOW_S = 5.0


@contextmanager
def python(code: str, pulse: Pulse | None = None) -> Iterator[subprocess.Popen[bytes]]:
    environment = os.environ | ({NOTIFY_SOCKET: pulse.address} if pulse else {})
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def pulse() -> Iterator[Pulse]:
    made = Pulse()
    yield made
    made.close()


def watch(pulse: Pulse, until_s: float, window_s: float = 60.0) -> None:
    """Tick on time until the silence or the time is over."""
    end_s = time.monotonic() + window_s
    last_s = time.monotonic()
    while pulse.silence.seconds < until_s and time.monotonic() < end_s:
        time.sleep(TICK_S)
        pulse.tick(time.monotonic() - last_s)
        last_s = time.monotonic()


def test_stopped_process_counts_as_hung(pulse: Pulse) -> None:
    with python(BEAT_ONCE + "import time; time.sleep(60)", pulse) as process:
        while not pulse.silence.pid:
            pulse.tick(0.0)
        assert pulse.silence.pid == process.pid
        process.send_signal(signal.SIGSTOP)
        watch(pulse, HUNG_AFTER_S)
        assert pulse.silence.seconds >= HUNG_AFTER_S


@pytest.mark.parametrize("code", ["import time; time.sleep(60)", SPIN])
def test_process_whose_loop_stands_still_counts_as_hung(pulse: Pulse, code: str) -> None:
    with python(BEAT_ONCE + code, pulse):
        watch(pulse, HUNG_AFTER_S)
        assert pulse.silence.seconds >= HUNG_AFTER_S


def test_process_that_gets_no_processor_does_not_count_as_hung(pulse: Pulse) -> None:
    """It shares one processor with others that the kernel always prefers."""
    processor = min(os.sched_getaffinity(0))
    with python(BEAT_ONCE + SPIN, pulse) as process, python(SPIN) as first, python(SPIN) as second:
        while not pulse.silence.pid:
            pulse.tick(0.0)
        os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
        for each in (process, first, second):
            os.sched_setaffinity(each.pid, {processor})
        watch(pulse, HUNG_AFTER_S, WINDOW_S)
        assert pulse.silence.seconds < HUNG_AFTER_S


def test_supervisor_that_was_late_counts_no_silence(pulse: Pulse) -> None:
    with python(BEAT_ONCE + "import time; time.sleep(60)", pulse):
        while not pulse.silence.pid:
            pulse.tick(0.0)
        pulse.tick(60.0)
        assert pulse.silence.seconds <= 2 * TICK_S


def test_process_without_heartbeats_is_not_judged(pulse: Pulse) -> None:
    for _ in range(100):
        pulse.tick(TICK_S)
    assert pulse.silence.seconds == 0.0


def test_closing_connections_spares_listeners() -> None:
    listening = (
        "import socket\n"
        "listener = socket.create_server(('127.0.0.1', 0))\n"
        "print(listener.getsockname()[1], flush=True)\n"
        "kept = []\n"
        "while True:\n"
        "    kept.append(listener.accept()[0])\n"
        "    print('accepted', flush=True)\n"
    )
    with python(listening) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with socket.create_connection(("127.0.0.1", port)) as before:
            process.stdout.readline()
            process.send_signal(signal.SIGSTOP)
            close_connections(process.pid)
            before.settimeout(30)
            assert before.recv(1) == b""
        process.send_signal(signal.SIGCONT)
        with socket.create_connection(("127.0.0.1", port)):
            assert process.stdout.readline() == b"accepted\n"


SHORT_ONCE = """
import asyncio
from phaseloom.common.contract.errors import unexpected_error
from phaseloom.common.process.heartbeat import beat
unexpected_error(MemoryError("16 MiB"))
asyncio.run(beat())
"""


def test_shortage_is_in_the_heartbeats_until_nothing_has_failed_for_a_while(pulse: Pulse) -> None:
    with python(SHORT_ONCE, pulse):
        while not pulse.status:
            pulse.tick(0.0)
            time.sleep(TICK_S)
        assert pulse.status.startswith("MemoryError: 16 MiB; to fix: free memory")
        while pulse.status:
            pulse.tick(0.0)
            time.sleep(TICK_S)
