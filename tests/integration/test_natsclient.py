"""The mesh's NATS client against a real server."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial

import nats.errors
import pytest
from nats.aio.msg import Msg

from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.connection import close_client, connect
from phaseloom.common.transport.natsclient import hand_over
from phaseloom.common.transport.natsserver import EmbeddedServer


async def test_answers_reach_the_request_they_belong_to_in_whatever_order_they_come(
    bus: Bus,
) -> None:
    asked: list[Msg] = []

    async def answer(message: Msg) -> None:
        asked.append(message)
        if len(asked) == 50:
            for waiting in reversed(asked):
                await waiting.respond(waiting.data * 2)

    await bus.client.subscribe("double", cb=answer)
    numbers = [str(number).encode() for number in range(50)]
    answers = await asyncio.gather(*(bus.client.request("double", n, timeout=10) for n in numbers))
    assert [message.data for message in answers] == [number * 2 for number in numbers]


async def test_request_fails_at_once_when_nobody_listens(bus: Bus) -> None:
    with pytest.raises(nats.errors.NoRespondersError):
        await bus.client.request("nobody", b"", timeout=30)


async def test_request_times_out_when_nobody_answers(bus: Bus) -> None:
    await bus.client.subscribe("silence")
    with pytest.raises(nats.errors.TimeoutError):
        await bus.client.request("silence", b"", timeout=0.05)


async def test_request_that_is_cancelled_as_its_answer_comes_is_cancelled(bus: Bus) -> None:
    """nats-py's own returns the answer then, and a task that was told to end goes on."""
    responded = asyncio.Event()

    async def answer(message: Msg) -> None:
        await message.respond(b"")
        await bus.client.flush()
        responded.set()

    await bus.client.subscribe("answered", cb=answer)
    for _ in range(20):
        responded.clear()
        task = asyncio.create_task(bus.client.request("answered", b"", timeout=10))
        await responded.wait()
        if task.cancel():
            with pytest.raises(asyncio.CancelledError):
                await task


async def test_everything_published_before_a_flush_is_with_the_server_after_it(
    nats_server: EmbeddedServer, bus: Bus
) -> None:
    """Also what one pass of the loop publishes together."""
    taken: list[bytes] = []
    other = await Bus.open(nats_server.credentials.bus, "hearer")
    subscription = await other.client.subscribe("numbers")
    hand_over(subscription, lambda message: taken.append(message.data))
    await other.client.flush()

    for number in range(100):
        await bus.client.publish("numbers", str(number).encode())
    await bus.client.flush()
    await other.client.flush()

    assert taken == [str(number).encode() for number in range(100)]
    await other.close()


async def test_what_is_published_last_is_sent_before_the_connection_closes(
    nats_server: EmbeddedServer, bus: Bus
) -> None:
    taken: asyncio.Queue[Msg] = asyncio.Queue()
    subscription = await bus.client.subscribe("last")
    hand_over(subscription, taken.put_nowait)
    await bus.client.flush()
    credentials = nats_server.credentials
    client = await connect(credentials.url, "brief", credentials.user, credentials.password)
    for number in range(3):
        await client.publish("last", str(number).encode())
    await client.close()
    assert [(await taken.get()).data for _ in range(3)] == [b"0", b"1", b"2"]


def _note(taken: list[bytes], message: Msg) -> None:
    taken.append(message.data)


async def test_flush_waits_for_what_was_published_before_it(bus: Bus) -> None:
    """Whatever waits for the flushing task: a subscription just made, and what came after it."""
    for number in range(50):
        taken: list[bytes] = []
        subscription = await bus.client.subscribe(f"flushed.{number}")
        hand_over(subscription, partial(_note, taken))
        await bus.client.publish(f"flushed.{number}", b"x")
        await bus.client.flush()
        assert taken == [b"x"]


async def test_a_handler_that_fails_does_not_end_the_connection(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    taken: list[bytes] = []

    def take(message: Msg) -> None:
        taken.append(message.data)
        if message.data == b"bad":
            raise ValueError("cannot take this")

    hand_over(await bus.client.subscribe("fragile"), take)
    for data in (b"bad", b"good"):
        await bus.client.publish("fragile", data)
    await bus.client.flush()
    assert taken == [b"bad", b"good"]
    assert "cannot take this" in caplog.text


async def test_header_values_that_would_break_the_protocol_are_made_harmless(bus: Bus) -> None:
    taken: asyncio.Queue[Msg] = asyncio.Queue()
    hand_over(await bus.client.subscribe("headers"), taken.put_nowait)
    await bus.client.publish("headers", b"x", headers={"Text": "one\r\nInjected: two"})
    message = await taken.get()
    assert message.headers is not None
    assert "Injected" not in message.headers
    assert message.data == b"x"


async def test_client_that_is_closed_as_it_reconnects_opens_no_connection_any_more(
    nats_server: EmbeddedServer,
) -> None:
    """An attempt that fails at the moment of its cancellation swallows that. It would go on for
    ever, and be connected once the server is back, when nobody could close the connection."""
    before = asyncio.all_tasks()
    login = nats_server.credentials.bus
    buses = [await Bus.open(login, f"client-{number}") for number in range(30)]
    await nats_server.kill()

    async def closed_after(bus: Bus, passes: int) -> None:
        while bus.client.is_connected:
            await asyncio.sleep(0)
        for _ in range(passes):
            await asyncio.sleep(0)
        await close_client(bus.client)

    await asyncio.gather(*(closed_after(bus, passes) for passes, bus in enumerate(buses)))
    async with asyncio.timeout(10):
        while asyncio.all_tasks() != before:
            await asyncio.sleep(0)
    assert all(bus.client.is_closed for bus in buses)


async def test_request_of_a_server_that_dies_is_given_up_at_once(
    nats_server: EmbeddedServer,
) -> None:
    """It would never be answered; one of a service is waited for, which may be there still."""
    async with asyncio.timeout(30):
        other = await Bus.open(nats_server.credentials.bus, "dies with it")
        await other.client.subscribe("silence")
        os.kill(nats_server.pid, signal.SIGSTOP)
        asked = [
            asyncio.create_task(call)
            for call in (
                other.client.ask_server("pl.v1.event.test", b"", timeout=600),
                other.client.request("$JS.API.STREAM.INFO.SCHED", b"", timeout=600),
                other.client.request_many("$JS.API.DIRECT.GET.SCHED", b"{}", timeout=600),
                other.client.request("silence", b"", timeout=600),
            )
        ]
        await asyncio.sleep(0)
        os.kill(nats_server.pid, signal.SIGKILL)
        *of_server, of_service = asked
        for one in of_server:
            with pytest.raises(nats.errors.TimeoutError):
                await one
        assert not of_service.done()
        of_service.cancel()
        await close_client(other.client)
