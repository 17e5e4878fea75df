"""Consumers that replicas share, on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from nats.aio.msg import Msg
from nats.js import api

from phaseloom.common.process import lifecycle
from phaseloom.common.transport import pulling
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.natsserver import EmbeddedServer
from phaseloom.common.transport.pulling import PullConsumer

STREAM = "OPS_acme"


class Replica:
    """A replica that finishes messages only when the test says so."""

    def __init__(self) -> None:
        self.received: list[Msg] = []
        self.consumer: PullConsumer
        self._arrived = asyncio.Event()

    def receive(self, message: Msg) -> None:
        self.received.append(message)
        self._arrived.set()

    async def finish(self, message: Msg) -> None:
        await message.ack()
        self.consumer.finished(message)

    async def until(self, number: int) -> None:
        async with asyncio.timeout(60):
            while len(self.received) < number:
                self._arrived.clear()
                await self._arrived.wait()

    @property
    def sequences(self) -> list[int]:
        return [message.metadata.sequence.stream for message in self.received]


@asynccontextmanager
async def pulled(
    bus: Bus, durable: str = "routers", stream: str = STREAM
) -> AsyncIterator[Replica]:
    replica = Replica()
    replica.consumer = await bus.pull(STREAM, "routers", replica.receive, ack_wait_s=30.0)
    task = asyncio.create_task(replica.consumer.run())
    try:
        yield replica
    finally:
        await lifecycle.end([task])
        await replica.consumer.stop()


async def publish(bus: Bus, number: int, payload: bytes = b"") -> None:
    for seq in range(1, number + 1):
        await bus.publish(f"pl.v1.op.acme.sums.policy.{seq}", payload)


async def test_backlog_waits_in_the_stream_until_a_replica_has_finished_some(bus: Bus) -> None:
    await publish(bus, 3 * pulling.WINDOW)
    async with pulled(bus) as replica:
        await replica.until(pulling.WINDOW)
        info = await bus.js.consumer_info(STREAM, "routers")
        assert info.num_pending == 2 * pulling.WINDOW
        assert info.num_waiting == 0, "no request is open"
        done = 0
        while done < 3 * pulling.WINDOW:
            await replica.until(done + 1)
            await replica.finish(replica.received[done])
            done += 1
            assert len(replica.received) - done <= pulling.WINDOW
        assert replica.sequences == list(range(1, 3 * pulling.WINDOW + 1))


async def test_few_large_messages_are_received_at_once(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulling, "WINDOW_BYTES", 10_000)
    await publish(bus, 12, bytes(4000))
    async with pulled(bus) as replica:
        done = 0
        while done < 12:
            await replica.until(done + 1)
            assert sum(len(m.data) for m in replica.received[done:]) <= 15_000
            await replica.finish(replica.received[done])
            done += 1


async def test_replicas_share_the_messages_also_if_they_create_the_consumer_at_once(
    nats_server: EmbeddedServer, bus: Bus
) -> None:
    other = await Bus.open(nats_server.credentials.bus, "replica")
    async with asyncio.TaskGroup() as group:
        opening = [
            group.create_task(each.pull(STREAM, "routers", list[Msg]().append, ack_wait_s=30.0))
            for each in (bus, other)
        ]
    for task in opening:
        await task.result().stop()

    async with pulled(bus) as first, pulled(other) as second:
        await until_waiting(bus, 2)
        await publish(bus, 40)
        async with asyncio.timeout(60):
            while len(first.received) + len(second.received) < 40:
                await asyncio.sleep(0.01)
        assert sorted(first.sequences + second.sequences) == list(range(1, 41))
        assert first.received
        assert second.received
    await other.close()


async def test_replica_that_hangs_leaves_the_rotation_and_returns(
    nats_server: EmbeddedServer, bus: Bus
) -> None:
    """It hangs before it requests more, as a stopped process does."""
    other = await Bus.open(nats_server.credentials.bus, "hung")
    hung = Replica()
    hung.consumer = await other.pull(STREAM, "routers", hung.receive, ack_wait_s=30.0)
    task = asyncio.create_task(hung.consumer.run())
    await until_waiting(bus, 1)
    await lifecycle.end([task])
    await until_waiting(bus, 0)

    async with pulled(bus) as healthy:
        await publish(bus, 20)
        await healthy.until(20)
        assert not hung.received
        task = asyncio.create_task(hung.consumer.run())
        await until_waiting(bus, 2)
        for seq in range(21, 41):
            await bus.publish(f"pl.v1.op.acme.sums.policy.{seq}", b"")
        await hung.until(1)
    await lifecycle.end([task])
    await hung.consumer.stop()
    await other.close()


async def test_requests_go_on_after_a_restart_of_the_server(
    nats_server: EmbeddedServer, bus: Bus
) -> None:
    async with pulled(bus) as replica:
        await until_waiting(bus, 1)
        await nats_server.kill()
        await nats_server.start()
        async with asyncio.timeout(60):
            await bus.client.flush(60)
        await publish(bus, 1)
        await replica.until(1)


async def test_consumer_of_an_earlier_version_is_replaced_and_repeats_nothing_acknowledged(
    bus: Bus,
) -> None:
    await bus.js.add_consumer(
        STREAM,
        api.ConsumerConfig(
            durable_name="routers",
            deliver_subject="_INBOX.routers",
            deliver_group="routers",
            ack_policy=api.AckPolicy.EXPLICIT,
        ),
    )
    received: asyncio.Queue[Msg] = asyncio.Queue()
    subscription = await bus.client.subscribe("_INBOX.routers", queue="routers", cb=received.put)
    await publish(bus, 4)
    messages = [await received.get() for _ in range(4)]
    await messages[0].ack_sync()
    await messages[1].ack_sync()
    await subscription.unsubscribe()

    async with pulled(bus) as replica:
        await replica.until(2)
        assert replica.sequences == [3, 4]


async def until_waiting(bus: Bus, number: int) -> None:
    """Wait until this number of requests is open."""
    async with asyncio.timeout(60):
        while (await bus.js.consumer_info(STREAM, "routers")).num_waiting != number:
            await asyncio.sleep(0.05)
