"""Leases on a real server: one holder, fenced by revision, who knows in time when it is over."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

import pytest

from phaseloom.common.contract.errors import Code
from phaseloom.common.contract.streams import Bucket
from phaseloom.common.transport import leases
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.leases import REVISION_HEADER, Lease, LeaseLost
from phaseloom.common.transport.natsserver import EmbeddedServer

KEY = "node.train-0"


async def stored_revision(bus: Bus) -> int:
    """The stream sequence of the lease's newest write; a renewal makes it grow."""
    stored = await bus.keys.get(Bucket.LEASES, KEY)
    return stored.sequence if stored else 0


async def until_renewed(bus: Bus, than: int) -> int:
    async for change in bus.keys.watch(Bucket.LEASES, KEY):
        if change.stored is not None and change.stored.sequence > than:
            return change.stored.sequence
    raise AssertionError("the watch ended")


async def test_acquire_takes_a_free_lease_at_once(bus: Bus) -> None:
    lease = await Lease.acquire(bus, KEY, b"me", 60)
    stored = await bus.keys.get(Bucket.LEASES, KEY)
    assert stored is not None
    assert (stored.payload, stored.sequence) == (b"me", lease.revision)
    assert 0 < lease.expires_in_s <= 60


async def test_acquire_waits_until_the_holder_expires_and_gets_a_higher_revision(bus: Bus) -> None:
    """A holder that was killed: nobody releases."""
    first = await Lease.acquire(bus, KEY, b"killed", 1)
    second = await Lease.acquire(bus, KEY, b"next", 1)
    assert first.expires_in_s <= 0
    assert second.revision > first.revision


async def test_acquire_rounds_up_what_is_no_whole_second(bus: Bus) -> None:
    """The server reads 1.9 as 1: the holder would believe in a lease that is another's."""
    began_s = time.monotonic()
    lease = await Lease.acquire(bus, KEY, b"me", 59.2)
    stored = await bus.keys.get(Bucket.LEASES, KEY)
    assert stored is not None
    assert stored.headers["Nats-TTL"] == "60"
    expires_in_s = lease.expires_in_s
    assert began_s + 60 <= time.monotonic() + expires_in_s + 1e-6


async def test_keep_holds_it_beyond_its_time_to_live(bus: Bus) -> None:
    lease = await Lease.acquire(bus, KEY, b"me", 3)
    async with asyncio.TaskGroup() as group:
        keeping = group.create_task(lease.keep())
        rival = group.create_task(Lease.acquire(bus, KEY, b"rival", 1))
        last = lease.revision
        for _ in range(4):  # four thirds of the time to live
            last = await until_renewed(bus, last)
        assert not rival.done()
        stored = await bus.keys.get(Bucket.LEASES, KEY)
        assert stored is not None
        assert stored.headers[REVISION_HEADER] == str(lease.revision)
        keeping.cancel()
    assert rival.result().revision > last


async def test_release_lets_the_next_in_at_once(bus: Bus) -> None:
    lease = await Lease.acquire(bus, KEY, b"me", 60)
    async with asyncio.TaskGroup() as group:
        rival = group.create_task(Lease.acquire(bus, KEY, b"rival", 60))
        await lease.release()
        async with asyncio.timeout(30):
            await rival
    assert rival.result().revision > lease.revision


async def test_acquire_takes_a_lease_of_which_nobody_said_that_it_is_free(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is cut off for longer than an expired lease is marked finds neither it nor its mark."""
    monkeypatch.setattr(leases, "_REREAD_AFTER_S", 0.5)
    lease = await Lease.acquire(bus, KEY, b"me", 60)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        rival = group.create_task(Lease.acquire(bus, KEY, b"rival", 60))
        while not (await bus.js.stream_info(f"KV_{Bucket.LEASES}")).state.consumer_count:
            await asyncio.sleep(0.01)
        await bus.stored.delete(f"KV_{Bucket.LEASES}", f"$KV.{Bucket.LEASES}.{KEY}")
    assert rival.result().revision > lease.revision


async def test_release_leaves_another_holder_alone(bus: Bus) -> None:
    first = await Lease.acquire(bus, KEY, b"first", 1)
    second = await Lease.acquire(bus, KEY, b"second", 60)
    await first.release()
    assert await stored_revision(bus) == second.revision


async def test_keep_raises_when_another_holder_took_it(bus: Bus) -> None:
    lease = await Lease.acquire(bus, KEY, b"me", 2)
    await bus.keys.put(Bucket.LEASES, KEY, b"thief")
    with pytest.raises(LeaseLost) as lost:
        await lease.keep()
    assert lost.value.info.code is Code.ABORTED


async def test_keep_raises_before_expiry_when_the_server_is_gone(
    nats_server: EmbeddedServer, bus: Bus
) -> None:
    lease = await Lease.acquire(bus, KEY, b"me", 4)
    await nats_server.kill()
    with pytest.raises(LeaseLost, match="in time"):
        await lease.keep()
    assert lease.expires_in_s > 0
    await nats_server.start()


async def test_keep_survives_a_restart_of_the_server(nats_server: EmbeddedServer, bus: Bus) -> None:
    lease = await Lease.acquire(bus, KEY, b"me", 6)
    async with asyncio.TaskGroup() as group:
        keeping = group.create_task(lease.keep())
        await nats_server.kill()
        await nats_server.start()
        await until_renewed(bus, lease.revision)
        keeping.cancel()


async def test_keep_goes_on_when_the_answer_to_its_renewal_was_lost(bus: Bus) -> None:
    """Stored, but the server died before it said so: the conflict is with oneself."""
    lease = await Lease.acquire(bus, KEY, b"me", 6)
    stored = await bus.keys.get(Bucket.LEASES, KEY)
    assert stored is not None
    own = {name: value for name, value in stored.headers.items() if name.startswith("Phaseloom-")}
    unheard = await bus.keys.swap(Bucket.LEASES, KEY, b"me", stored.sequence, 6, headers=own)
    async with asyncio.TaskGroup() as group:
        keeping = group.create_task(lease.keep())
        await until_renewed(bus, unheard)
        keeping.cancel()


async def test_there_is_one_holder_when_many_want_it(bus: Bus) -> None:
    """Twenty contenders, each holds it once; their times never overlap."""
    held: list[tuple[float, float, int]] = []

    async def contend(number: int) -> None:
        lease = await Lease.acquire(bus, KEY, str(number).encode(), 10)
        began = time.monotonic()
        assert await stored_revision(bus) == lease.revision
        held.append((began, time.monotonic(), lease.revision))
        await lease.release()

    async with asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(contend(number))
    assert len(held) == 20
    assert [revision for _, _, revision in held] == sorted(revision for _, _, revision in held)
    assert all(end <= begin for (_, end, _), (begin, _, _) in pairwise(held))
