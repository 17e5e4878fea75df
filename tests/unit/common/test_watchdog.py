"""The watchdog of event loops: which callbacks it counts, and which it must not."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

import msgspec
import pytest
import uvloop

from phaseloom.common.process.watchdog import LIMIT_S, watching

_LONG_S = 8 * LIMIT_S
"""So long that it is noticed even if the kernel notices late that the timer has expired."""


def work(seconds: float) -> None:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


async def long_callback() -> None:
    work(_LONG_S)


async def long_c_call() -> None:
    """A C call after an idle time, when only the late timer runs."""
    msgspec.msgpack.decode(LONG_PAYLOAD)


async def long_c_call_of_a_busy_loop() -> None:
    for _ in range(50):
        work(0.003)
        await asyncio.sleep(0)
    msgspec.msgpack.decode(PAYLOAD)


async def long_timer() -> None:
    done = asyncio.Event()

    def run() -> None:
        work(_LONG_S)
        done.set()

    asyncio.get_running_loop().call_later(0.001, run)
    await done.wait()


async def busy_task() -> None:
    """A task that always works, but in short steps."""
    for _ in range(200):
        work(0.003)
        await asyncio.sleep(0)


async def many_tasks() -> None:
    """Short callbacks that all run in the same turns of the loop."""

    async def step() -> None:
        for _ in range(3):
            work(0.003)
            await asyncio.sleep(0)

    await asyncio.gather(*(step() for _ in range(60)))


async def waiting_and_other_threads() -> None:
    """Time in which the thread of the loop waits for the processor, or for a lock."""
    threads = [threading.Thread(target=work, args=(0.3,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(_LONG_S)  # noqa: ASYNC251
    for thread in threads:
        await asyncio.to_thread(thread.join)


async def rare_work() -> None:
    """Work at a low load, of which the kernel's clock sees little."""
    for _ in range(300):
        work(0.001)
        await asyncio.sleep(0.003)


PAYLOAD = msgspec.msgpack.encode([{"tokens": [1]}] * 200_000)
LONG_PAYLOAD = msgspec.msgpack.encode([{"tokens": [1]}] * 600_000)


@pytest.fixture
def stalls(caplog: pytest.LogCaptureFixture) -> Callable[[Callable[[], object]], list[str]]:
    def run(call: Callable[[], object]) -> list[str]:
        async def main() -> None:
            with watching("test"):
                await asyncio.create_task(call())  # type: ignore[arg-type]
                await asyncio.sleep(0.01)

        caplog.clear()
        with caplog.at_level(logging.WARNING):
            uvloop.run(main())
        return [record.getMessage() for record in caplog.records]

    return run


@pytest.mark.parametrize(
    "call", [long_callback, long_c_call, long_c_call_of_a_busy_loop, long_timer]
)
def test_long_callback_is_logged_once_with_its_place(
    call: Callable[[], object], stalls: Callable[[Callable[[], object]], list[str]]
) -> None:
    (message,) = stalls(call)
    assert "test_watchdog.py" in message
    assert "of the event loop" in message


@pytest.mark.parametrize("call", [busy_task, many_tasks, waiting_and_other_threads, rare_work])
def test_short_callbacks_are_not_counted(
    call: Callable[[], object], stalls: Callable[[Callable[[], object]], list[str]]
) -> None:
    assert stalls(call) == []
