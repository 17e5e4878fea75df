"""What is sent of each job: the newest, by a task that whoever puts it in does not wait for."""

from __future__ import annotations

import asyncio

from phaseloom.common.contract.events import PhaseTrace
from phaseloom.common.contract.ids import JobKey
from phaseloom.common.process import lifecycle
from phaseloom.profiler.core.profile import Emission
from phaseloom.profiler.outbox import Outbox

A, B = JobKey("demo", "a"), JobKey("demo", "b")


def emission(job: JobKey, sequence: int) -> Emission:
    return Emission(f"profiler:{sequence}", PhaseTrace(job, 0.0, [], []))


class Server:
    """Takes what is sent when it is let to."""

    def __init__(self) -> None:
        self.taken: asyncio.Queue[str] = asyncio.Queue()
        self.is_up = asyncio.Event()

    async def send(self, sent: Emission) -> None:
        await self.is_up.wait()
        self.taken.put_nowait(sent.msg_id)


async def test_only_the_newest_of_a_job_is_sent_when_the_server_was_away() -> None:
    server = Server()
    outbox = Outbox(server.send)
    running = asyncio.create_task(outbox.run())
    for sequence in range(1, 1000):
        outbox.put(emission(A, sequence))
    outbox.put(emission(B, 1000))
    server.is_up.set()
    sent = [await server.taken.get(), await server.taken.get()]
    assert sent == ["profiler:999", "profiler:1000"]
    outbox.put(emission(A, 1001))
    assert await server.taken.get() == "profiler:1001"
    await lifecycle.end([running])
    assert running.cancelled()


async def test_what_is_dropped_is_not_sent() -> None:
    server = Server()
    server.is_up.set()
    outbox = Outbox(server.send)
    outbox.put(emission(A, 1))
    outbox.put(emission(B, 2))
    outbox.drop(A)
    outbox.drop(B, "profiler:1")
    running = asyncio.create_task(outbox.run())
    assert await server.taken.get() == "profiler:2"
    outbox.put(emission(B, 3))
    outbox.drop(B, "profiler:3")
    outbox.put(emission(A, 4))
    assert await server.taken.get() == "profiler:4"
    await lifecycle.end([running])
