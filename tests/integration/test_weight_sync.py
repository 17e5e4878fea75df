"""Weights between state managers of different nodes: each batch once over the slow link, whatever
breaks on the way. Real daemons, real sockets; the slow link is a proxy that counts."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
import xxhash

from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.contract.ids import VersionKey
from phaseloom.statemgr.node.ledger import Ledger
from phaseloom.statemgr.node.stores import VersionStore
from phaseloom.statemgr.seals.replicating import Replicator
from phaseloom.statemgr.serving import Server
from phaseloom.statemgr.transfer import tls, wire
from phaseloom.statemgr.transfer.assignment import Peer
from phaseloom.statemgr.transfer.fetching import Home, call
from phaseloom.statemgr.transfer.permission import Gate
from phaseloom.statemgr.transfer.served import Fetched, Incoming, Served
from phaseloom.statemgr.transfer.tensorslices import batches, chunk_bytes, slices_of_part
from phaseloom.statemgr.versions.weights import Weights
from tests.support.meshcerts import SECRET, identity, ticket
from tests.support.readversions import load_version
from tests.support.slowlink import Link, link
from tests.support.statedaemon import (
    POLICY,
    SAMPLER,
    Daemon,
    MiB,
    Rank,
    daemon,
    start,
)

KEY = VersionKey(POLICY, 2)
SIZE = 4 * MiB
CHUNK = chunk_bytes(SIZE)
"""What nodes of a site share a version in."""
BATCH = 8 * CHUNK
_CONTROL = SIZE // 25
"""More than the control messages of a fetch take."""


async def _published(d: Daemon, num_bytes: int = SIZE) -> Rank:
    policy = await start(d, POLICY, num_bytes)
    await d.agent.switch_in(POLICY, 1, 1, [])
    policy.run(1)
    await policy.client.versions.create(KEY, policy.slots)
    return policy


async def _sampler(d: Daemon) -> Rank:
    sampler = await start(d, SAMPLER, SIZE)
    await d.agent.switch_in(SAMPLER, 1, 1, [])
    return sampler


@asynccontextmanager
async def _nodes(
    directory: Path, count: int, site: str, *, peer_timeout_s: float = 10.0
) -> AsyncIterator[list[Daemon]]:
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                daemon(directory / f"{site}{i}", SITE=site, PEER_TIMEOUT_S=str(peer_timeout_s))
            )
            for i in range(count)
        ]


async def _sync(sampler: Rank, source: Link) -> str:
    return await load_version(sampler.client, KEY, [source.endpoint], sampler.slots, ticket(KEY))


async def test_a_version_crosses_to_a_site_once(short_dir: Path) -> None:
    async with (
        daemon(short_dir / "east", SITE="east") as train,
        _nodes(short_dir, 3, "west") as far,
        link(await train.endpoint()) as slow,
    ):
        policy = await _published(train)
        samplers = [await _sampler(d) for d in far]
        await asyncio.gather(*(_sync(sampler, slow) for sampler in samplers))
        assert [sampler.digest() for sampler in samplers] == [policy.digest()] * 3
        assert SIZE <= slow.passed_bytes < SIZE + _CONTROL


async def test_without_sites_every_node_fetches_its_own(short_dir: Path) -> None:
    """The baseline; and nodes of the policy's own site have no slow link to spare."""
    async with AsyncExitStack() as stack:
        train = await stack.enter_async_context(daemon(short_dir / "a", SITE="east"))
        slow = await stack.enter_async_context(link(await train.endpoint()))
        policy = await _published(train)
        for name, site in (("b", ""), ("c", ""), ("d", "east")):
            d = await stack.enter_async_context(daemon(short_dir / name, SITE=site))
            sampler = await _sampler(d)
            await _sync(sampler, slow)
            assert sampler.digest() == policy.digest()
        assert 3 * SIZE <= slow.passed_bytes < 3 * (SIZE + _CONTROL)


async def test_a_small_version_takes_one_connection(short_dir: Path) -> None:
    """It is fetched on the stream on which it was described."""
    async with (
        daemon(short_dir / "a") as train,
        daemon(short_dir / "b") as rollout,
        link(await train.endpoint()) as slow,
    ):
        policy = await _published(train)
        sampler = await _sampler(rollout)
        await _sync(sampler, slow)
        assert sampler.digest() == policy.digest()
        assert slow.num_connections == 1


async def test_batches_of_a_peer_that_died_cross_again_and_no_others(short_dir: Path) -> None:
    async with (
        daemon(short_dir / "east", SITE="east") as train,
        _nodes(short_dir, 2, "west") as (dying, living),
        link(await train.endpoint()) as slow,
        link(await train.endpoint()) as held,
    ):
        policy = await _published(train)
        doomed, sampler = await _sampler(dying), await _sampler(living)
        held.hold_after_bytes = SIZE // 4
        lost = asyncio.create_task(_sync(doomed, held))
        await held.held.wait()
        syncing = asyncio.create_task(_sync(sampler, slow))
        # All but what the doomed one has, or is about to get, was given to the living one.
        await slow.passed(SIZE // 2)
        await dying.kill()
        await syncing
        assert sampler.digest() == policy.digest()
        assert slow.passed_bytes < SIZE + _CONTROL
        await doomed.client.close()
        with pytest.raises(ResourceError):
            await lost


async def test_who_waits_for_a_slow_peer_hears_that_it_lives() -> None:
    content = memoryview(bytearray(b"weights"))
    slices = slices_of_part("", [], len(content))
    incoming = Incoming(slices, {})
    (batch,) = batches(slices)

    class Fetching:
        @asynccontextmanager
        async def open_fetched(self, key: VersionKey) -> AsyncIterator[Served]:
            assert key == KEY
            yield Fetched(incoming, content)

    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    with listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        ledger = cast("Ledger", SimpleNamespace(node="node0"))
        weights, replicator = cast("Weights", Fetching()), cast("Replicator", None)
        versions, home = cast("VersionStore", None), Home(identity(), "", "", 0.1)
        serving = Server(Gate(SECRET), ledger, versions, weights, replicator, home=home)
        server = tls.Server(identity(), 10.0, serving.session)
        running = asyncio.create_task(server.serve(listener))
        opening = wire.OpenVersion(KEY, ticket(KEY), [], relay="")
        stream = await tls.connect(endpoint, identity(), 10.0)
        await call(stream, opening, wire.Opened, 10.0)
        give = wire.Give("", batch.boxes, len(content))
        await stream.send(give)
        for _ in range(5):
            assert await _reply(stream) == wire.Waiting()
        incoming.add(batch)
        reply = await _reply(stream)
        while reply == wire.Waiting():
            reply = await _reply(stream)
        assert reply == wire.Given(xxhash.xxh3_128_hexdigest(content))
        memory = memoryview(bytearray(len(content)))
        await stream.receive_into(memory, 10.0)
        assert memory == content
        # Nothing more comes: who waits is told.
        incoming.forget(batch)
        incoming.give_up()
        with pytest.raises(ResourceError) as caught:
            await call(stream, give, wire.Given, 10.0)
        assert caught.value.info.code is Code.UNAVAILABLE
        stream.close()
        running.cancel()
        await asyncio.wait([running])


async def _reply(stream: tls.Stream) -> wire.Reply:
    payload = await stream.receive(wire.MAX_REPLY_BYTES)
    reply: wire.Reply = msgspec.msgpack.decode(payload, type=wire.Reply)
    return reply


async def test_a_receiver_that_is_killed_begins_afresh_and_leaks_nothing(short_dir: Path) -> None:
    async with (
        daemon(short_dir / "a") as train,
        daemon(short_dir / "b") as rollout,
        link(await train.endpoint()) as slow,
    ):
        policy = await _published(train)
        sampler = await _sampler(rollout)
        slow.hold_after_bytes = SIZE // 2
        syncing = asyncio.create_task(_sync(sampler, slow))
        await slow.held.wait()
        await rollout.kill()
        slow.release()
        await rollout.launch()
        await syncing
        assert sampler.digest() == policy.digest()
        status = await rollout.agent.status()
        assert (status.versions, status.host_used_bytes) == ([KEY], 2 * SIZE)


async def test_a_peer_that_cannot_be_reached_costs_its_chunks_only(short_dir: Path) -> None:
    """It took three chunks and is gone: they cross twice, once for each that brought them."""
    async with (
        daemon(short_dir / "east", SITE="east") as train,
        _nodes(short_dir, 2, "west") as far,
        link(await train.endpoint()) as slow,
    ):
        policy = await _published(train)
        gone = Peer("127.0.0.1:1", "")
        stream = await tls.connect(slow.endpoint, identity(), 10.0)
        opening = wire.OpenVersion(KEY, ticket(KEY), [""], "west", gone)
        assert (await call(stream, opening, wire.Opened, 10.0)).is_far
        (first,) = batches(slices_of_part("", policy.slots, SIZE))[0].pieces
        for chunk in list(first.cut(CHUNK))[:3]:
            assert chunk.num_bytes == CHUNK
            await call(stream, wire.Give("", [chunk.box], CHUNK), wire.Given, 10.0)
            await stream.receive_into(memoryview(bytearray(CHUNK)), 10.0)
        stream.close()
        samplers = [await _sampler(d) for d in far]
        await asyncio.gather(*(_sync(sampler, slow) for sampler in samplers))
        assert [sampler.digest() for sampler in samplers] == [policy.digest()] * 2
        assert SIZE + 3 * CHUNK <= slow.passed_bytes < SIZE + 3 * CHUNK + _CONTROL


async def test_a_cut_link_costs_the_batch_that_was_under_way(short_dir: Path) -> None:
    async with (
        daemon(short_dir / "a") as train,
        daemon(short_dir / "b") as rollout,
        link(await train.endpoint()) as slow,
    ):
        policy = await _published(train)
        sampler = await _sampler(rollout)
        slow.hold_after_bytes = SIZE // 2
        syncing = asyncio.create_task(_sync(sampler, slow))
        await slow.held.wait()
        slow.cut()
        slow.release()
        await syncing
        assert sampler.digest() == policy.digest()
        assert slow.passed_bytes < SIZE + BATCH + _CONTROL


async def test_a_source_that_is_killed_goes_on_where_it_was(short_dir: Path) -> None:
    """With each that has got some of it: who has nothing yet is told to come again."""
    async with (
        daemon(short_dir / "a", SITE="east") as train,
        _nodes(short_dir, 2, "west", peer_timeout_s=60.0) as far,
        link(await train.endpoint()) as one,
        link(await train.endpoint()) as other,
    ):
        policy = await _published(train)
        samplers = [await _sampler(d) for d in far]
        links = (one, other)
        for slow in links:
            slow.hold_after_bytes = SIZE // 4
        syncing = [
            asyncio.create_task(_sync(sampler, slow))
            for sampler, slow in zip(samplers, links, strict=True)
        ]
        for slow in links:
            await slow.held.wait()
        await train.kill()
        for slow in links:
            slow.release()
        await train.launch()
        await asyncio.gather(*syncing)
        assert [sampler.digest() for sampler in samplers] == [policy.digest()] * 2
        # The new incarnation does not know who has what: a node may fetch what its peer has.
        assert one.passed_bytes + other.passed_bytes < 2 * SIZE


async def test_what_one_source_fetched_no_other_brings_again(short_dir: Path) -> None:
    async with (
        daemon(short_dir / "a") as train,
        daemon(short_dir / "b") as rollout,
        link(await train.endpoint()) as first,
        link(await train.endpoint()) as second,
    ):
        policy = await _published(train)
        sampler = await _sampler(rollout)
        first.hold_after_bytes = second.hold_after_bytes = SIZE // 4
        sources = [first.endpoint, second.endpoint]
        syncing = asyncio.create_task(
            load_version(sampler.client, KEY, sources, sampler.slots, ticket(KEY))
        )
        await first.held.wait()
        await second.held.wait()
        first.source = "127.0.0.1:1"
        first.cut()
        first.release()
        second.release()
        await syncing
        assert sampler.digest() == policy.digest()
        crossed = first.passed_bytes + second.passed_bytes
        assert SIZE <= crossed < SIZE + BATCH + 2 * _CONTROL


async def test_a_spoiled_batch_is_fetched_again(short_dir: Path) -> None:
    async with (
        daemon(short_dir / "a") as train,
        daemon(short_dir / "b") as rollout,
        link(await train.endpoint()) as slow,
    ):
        policy = await _published(train)
        sampler = await _sampler(rollout)
        slow.flip_at = SIZE // 2
        await _sync(sampler, slow)
        assert sampler.digest() == policy.digest()
        await rollout.logged(f"version {KEY} from {slow.endpoint}")
        assert SIZE < slow.passed_bytes < SIZE + BATCH + _CONTROL
