"""Slices that several nodes of a site need cross the slow link to it once, whatever each needs and
whatever breaks on the way. Real daemons, real sockets; the slow link is a proxy that counts."""

from __future__ import annotations

import asyncio
import random
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
import xxhash

from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.ids import VersionKey
from phaseloom.common.contract.state_layout import PartSources, Slice
from phaseloom.common.tensors.resharding import item_bytes
from phaseloom.statemgr.transfer import fetching, tls, wire
from phaseloom.statemgr.transfer.assignment import Peer
from phaseloom.statemgr.transfer.tensorslices import Box, batches
from phaseloom.worker.state.client import RankStateClient
from tests.support.meshcerts import identity, ticket
from tests.support.modelslices import (
    LAYOUTS,
    Plan,
    check_slices,
    commit,
    part_called,
    slices_of,
    version_rank,
    write,
)
from tests.support.peerfetch import fetch_of, home
from tests.support.sharded import Array, Sharded
from tests.support.slowlink import Link, link
from tests.support.statedaemon import POLICY, SAMPLER, Daemon, daemon, emptied

_CONTROL = 128 * 1024
"""More than handshakes and control messages of a node's fetch take."""


@dataclass
class World:
    """A policy's nodes behind links that count, and samplers' nodes on another site."""

    east: list[Daemon]
    sources: list[Link]
    writers: list[RankStateClient]
    nodes: list[Daemon]
    readers: list[RankStateClient]

    @property
    def passed_bytes(self) -> int:
        return sum(each.passed_bytes for each in self.sources)


@asynccontextmanager
async def _world(directory: Path, num_far: int, *, num_sources: int = 1) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:

        async def start(name: str, site: str) -> Daemon:
            # Deltas would cross in the place of the bytes that are counted here.
            return await stack.enter_async_context(
                daemon(directory / name, SITE=site, DELTA_SHARE="0")
            )

        east = [await start(f"east{n}", "east") for n in range(num_sources)]
        west = [await start(f"west{n}", "west") for n in range(num_far)]
        yield World(
            east,
            [await stack.enter_async_context(link(await d.endpoint())) for d in east],
            [await version_rank(d, POLICY) for d in east],
            west,
            [await version_rank(d, SAMPLER) for d in west],
        )


async def _came(node: Daemon, number: int = 1) -> tuple[int, int, int]:
    """(from sources, from here, by peers): what came as the `number`th slices."""
    found: list[tuple[str, str, str]] = []
    async with asyncio.timeout(30):
        while len(found) < number:
            await node.agent.status()  # its log comes here meanwhile
            found = re.findall(
                r"fetched \S.*: (\d+) bytes .*, (\d+) from here, (\d+) from", node.text()
            )
    source, local, peers = map(int, found[number - 1])
    return source, local, peers


def _union_bytes(needed: Sequence[Sequence[Slice]]) -> int:
    """How many bytes somebody needs."""
    by_tensor: dict[tuple[str, str], list[Slice]] = {}
    for each in (each for slices in needed for each in slices):
        by_tensor.setdefault((each.part, each.name), []).append(each)
    total = 0
    for same in by_tensor.values():
        ends = [np.add(each.start, each.size) for each in same]
        mask = np.zeros(np.max(ends, axis=0), np.bool_)
        for each in same:
            mask[tuple(slice(s, s + n) for s, n in zip(each.start, each.size, strict=True))] = True
        total += int(mask.sum()) * item_bytes(same[0].dtype)
    return total


async def _publish(world: World, key: VersionKey, source: Sharded) -> list[PartSources]:
    """As a policy of this layout; every source has every part."""
    plan = Plan(source, source)
    parts = plan.parts
    digests: dict[str, str] = {}
    for number, content in enumerate(plan.held):
        part = part_called(number, parts)
        mine = msgspec.structs.replace(key, part=part)
        for writer in world.writers:
            digests[part] = await write(writer, mine, content)
    await commit(digests, key, *world.writers)
    return [PartSources(part, [each.endpoint for each in world.sources]) for part in digests]


async def _open(
    reader: RankStateClient, key: VersionKey, slices: list[Slice], held: list[PartSources]
) -> memoryview:
    sources = [endpoint for each in held for endpoint in each.endpoints]
    await reader.versions.open(key, sources, ticket(key))
    memory, _ = await reader.versions.open_slices(key, slices, held, ticket(key))
    return memory


async def test_what_a_site_needs_crosses_once(short_dir: Path) -> None:
    """Any layout to two samplers of any layouts, each over two nodes, all of them at once."""
    async with _world(short_dir, 4, num_sources=2) as world:
        for seed in range(5):
            await _sync_two(world, VersionKey(POLICY, seed + 2), random.Random(seed))


async def _sync_two(world: World, key: VersionKey, chance: random.Random) -> None:
    source = chance.choice(LAYOUTS[1:])
    held = await _publish(world, key, source)
    jobs = []
    for nodes in ((0, 1), (2, 3)):
        target = chance.choice(LAYOUTS[1:])
        plan = Plan(source, target)
        half = target.layout.num_ranks // 2
        ranks = (set(range(half)), set(range(half, 2 * half)))
        for node, mine in zip(nodes, ranks, strict=True):
            slices = slices_of(plan.fetches(mine), plan.parts)
            jobs.append((node, plan, mine, slices))
    before = world.passed_bytes
    opened = await asyncio.gather(
        *(_open(world.readers[node], key, slices, held) for node, _, _, slices in jobs)
    )
    passed = world.passed_bytes - before
    crossed = 0
    for (node, plan, mine, _), memory in zip(jobs, opened, strict=True):
        needed = check_slices(plan, mine, memory)
        came, local, relayed = await _came(world.nodes[node], key.seq - 1)
        assert (came + relayed, local) == (needed, 0)
        crossed += came
    union = _union_bytes([slices for *_, slices in jobs])
    assert crossed == union
    assert union <= passed < union * 1.02 + 4 * _CONTROL


# --- What breaks ---------------------------------------------------------------------------------

KEY = VersionKey(POLICY, 2)
PART = msgspec.structs.replace(KEY, part="0of1")
ROWS, COLUMNS = 2048, 2048
SIZE = ROWS * COLUMNS
BATCH = 64 * 1024
SMALL: Array = np.arange(3, dtype=np.uint8)
CONTENT: Array = np.random.default_rng(1).integers(0, 256, (ROWS, COLUMNS), np.uint8)


def _box(start: list[int], size: list[int]) -> list[Slice]:
    return [Slice("0of1", "w", "uint8", start, size, 0, size[0] * size[1])]


def _bytes(box: list[Slice]) -> bytes:
    (each,) = box
    return CONTENT[
        tuple(slice(s, s + n) for s, n in zip(each.start, each.size, strict=True))
    ].tobytes()


LEFT = _box([0, 0], [ROWS, COLUMNS // 2])
"""In every row: half of it."""
MIDDLE = _box([ROWS // 4, COLUMNS // 4], [ROWS // 2, COLUMNS // 2])


async def _write_part(*writers: RankStateClient) -> None:
    for writer in writers:
        digest = await write(writer, PART, {"v": SMALL, "w": CONTENT, "x": SMALL})
        await commit({PART.part: digest}, KEY, writer)


async def _opened(reader: RankStateClient, slices: list[Slice], *sources: str) -> bytes:
    """The slices; what they are is checked."""
    memory = await _open(reader, KEY, slices, [PartSources("0of1", list(sources))])
    assert bytes(memory) == _bytes(slices)
    return bytes(memory)


async def test_who_comes_late_finds_all_at_its_peers(short_dir: Path) -> None:
    async with _world(short_dir, 2) as world:
        await _write_part(*world.writers)
        (slow,) = world.sources
        await _opened(world.readers[0], LEFT, slow.endpoint)
        before = world.passed_bytes
        await _opened(world.readers[1], LEFT, slow.endpoint)
        assert await _came(world.nodes[1]) == (0, 0, SIZE // 2)
        assert world.passed_bytes - before < _CONTROL
        # Other slices: what they have in common with those before does not cross again.
        await _opened(world.readers[1], MIDDLE, slow.endpoint)
        assert await _came(world.nodes[1], 2) == (SIZE // 8, 0, SIZE // 8)


async def test_slices_of_one_node_for_several_readers_cross_once(short_dir: Path) -> None:
    """A node is its own peer."""
    async with _world(short_dir, 1) as world:
        await _write_part(*world.writers)
        (slow,), (reader,) = world.sources, world.readers
        await asyncio.gather(
            _opened(reader, LEFT, slow.endpoint), _opened(reader, MIDDLE, slow.endpoint)
        )
        union = SIZE // 2 + SIZE // 8
        assert union <= world.passed_bytes < union + 2 * _CONTROL
        await emptied(world.nodes[0])


async def test_a_part_and_slices_of_it_cross_once(short_dir: Path) -> None:
    """One node needs all of it, and others some: whoever comes first, or at the same time."""
    async with _world(short_dir, 3) as world:
        await _write_part(*world.writers)
        (slow,), (whole, one, other) = world.sources, world.readers
        await _opened(one, LEFT, slow.endpoint)
        # At the same time: the rest of the part, and some of that rest.
        await asyncio.gather(_opened_part(whole, slow), _opened(other, MIDDLE, slow.endpoint))
        num_bytes = SIZE + 2 * 64  # with what lies before and after the large tensor
        assert num_bytes - 64 < world.passed_bytes < num_bytes + 3 * _CONTROL
        for node in world.nodes:
            await node.agent.drop_versions([KEY])
            assert (await node.agent.status()).versions == []
        # And who needs only some comes last: after a restart the peer has the part still.
        await _opened_part(whole, slow)
        endpoint = await world.nodes[0].endpoint()
        await world.nodes[0].relaunch()
        while await world.nodes[0].endpoint() != endpoint:
            pass  # what the daemon before had is not taken over yet
        before = world.passed_bytes
        await _opened(one, LEFT, slow.endpoint)
        assert await _came(world.nodes[1], 2) == (0, 0, SIZE // 2)
        assert world.passed_bytes - before < _CONTROL


async def _opened_part(reader: RankStateClient, source: Link) -> None:
    await reader.versions.open(KEY, [source.endpoint], ticket(KEY))
    opened = await reader.versions.open(PART, [source.endpoint], ticket(KEY))
    (large,) = [slot for slot in opened.table.tensors if slot.name == "w"]
    assert bytes(opened.memory[large.offset :][: large.num_bytes]) == CONTENT.tobytes()


async def test_what_a_peer_that_died_was_to_fetch_comes_from_the_source(
    short_dir: Path,
) -> None:
    async with _world(short_dir, 2) as world, link(world.sources[0].source) as held:
        await _write_part(*world.writers)
        (slow,) = world.sources
        dying, living = world.nodes
        endpoint = await dying.endpoint()
        await world.readers[0].versions.open(KEY, [slow.endpoint], ticket(KEY))
        held.hold_after_bytes = SIZE // 8
        lost = asyncio.create_task(_opened(world.readers[0], LEFT, held.endpoint))
        await held.held.wait()
        before = slow.passed_bytes
        opening = asyncio.create_task(_opened(world.readers[1], LEFT, slow.endpoint))
        # All but what the doomed one has, or is about to get, was given to the living one.
        await slow.passed(before + SIZE // 4)
        await dying.kill()
        await opening
        await living.logged(f"from peer Peer(endpoint='{endpoint}'")
        came, _, relayed = await _came(living)
        assert came + relayed == SIZE // 2
        assert slow.passed_bytes - before < came + _CONTROL
        await world.readers[0].close()
        with pytest.raises(ResourceError):
            await lost


async def test_a_cut_link_costs_the_batches_that_were_under_way(short_dir: Path) -> None:
    async with _world(short_dir, 2) as world:
        await _write_part(*world.writers)
        (slow,) = world.sources
        slow.hold_after_bytes = SIZE // 4
        opening = [
            asyncio.create_task(_opened(reader, LEFT, slow.endpoint)) for reader in world.readers
        ]
        await slow.held.wait()
        slow.cut()
        slow.release()
        await asyncio.gather(*opening)
        crossed = sum([(await _came(node))[0] for node in world.nodes])
        assert crossed == SIZE // 2
        assert slow.passed_bytes < SIZE // 2 + 8 * BATCH + 2 * _CONTROL


async def test_a_source_that_has_forgotten_costs_no_more_than_another_copy(
    short_dir: Path,
) -> None:
    async with _world(short_dir, 2) as world:
        await _write_part(*world.writers)
        (slow,) = world.sources
        await _opened(world.readers[0], LEFT, slow.endpoint)
        await world.east[0].relaunch()
        slow.source = await world.east[0].endpoint()
        await _opened(world.readers[1], LEFT, slow.endpoint)
        assert await _came(world.nodes[1]) == (SIZE // 2, 0, 0)


async def test_a_source_serves_the_streams_of_64_nodes_at_once(short_dir: Path) -> None:
    """Each fetch keeps its four until it has all: who had to wait for one of the others' would
    give up."""
    async with _world(short_dir, 0) as world:
        await _write_part(*world.writers)
        opened: list[tls.Stream] = []
        try:
            for number in range(4 * 64):
                peer = Peer("127.0.0.1:1", str(number // 4))
                opened.append(await _opened_by(peer, world.sources[0].source))
        finally:
            for stream in opened:
                stream.close()


async def test_a_source_on_the_own_site_spares_the_slow_link(short_dir: Path) -> None:
    async with _world(short_dir, 2) as world:
        await _write_part(*world.writers)
        (slow,), (near, node) = world.sources, world.nodes
        writer = await version_rank(near, POLICY)
        await _write_part(writer)
        await _opened(world.readers[1], LEFT, slow.endpoint, await near.endpoint())
        assert await _came(node) == (SIZE // 2, 0, 0)
        assert slow.passed_bytes < _CONTROL
        # It cannot be reached any more: the slow link is left.
        endpoint = await near.endpoint()
        await near.kill()
        await _opened(world.readers[1], MIDDLE, slow.endpoint, endpoint)
        assert await _came(node, 2) == (SIZE // 4, 0, 0)


# --- Who lies ------------------------------------------------------------------------------------


async def _lies(stream: tls.Stream, give: wire.Give) -> None:
    """With the digest of what it sends."""
    content = bytes(give.num_bytes)
    await stream.send(wire.Given(xxhash.xxh3_128_hexdigest(content)))
    await stream.send_bytes(memoryview(content), 10.0)


async def _keeps_waiting(stream: tls.Stream, give: wire.Give) -> None:
    while True:
        await stream.send(wire.Waiting())
        await asyncio.sleep(0.2)


async def _talks_nonsense(stream: tls.Stream, give: wire.Give) -> None:
    await stream.send(wire.Confirmed())


async def _sends_elsewhere(stream: tls.Stream, give: wire.Give) -> None:
    boxes = list(enumerate(give.boxes))
    peer_boxes = [wire.Shared(Peer("127.0.0.1:1", "s"), boxes, "")]
    await stream.send(wire.Given("", wire.Assigned(len(boxes), [], peer_boxes)))


@asynccontextmanager
async def _peer(
    world: World, behave: Callable[[tls.Stream, wire.Give], Awaitable[None]]
) -> AsyncIterator[str]:
    """A node of the site that was given the first rows of `LEFT`, and what it does then."""

    async def session(stream: tls.Stream) -> None:
        await stream.receive(tls.MAX_REQUEST_BYTES)
        await stream.send(wire.Opened({}))
        payload = await stream.receive(tls.MAX_REQUEST_BYTES)
        await behave(stream, msgspec.msgpack.decode(payload, type=wire.Give))

    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
    with listener:
        serving = asyncio.create_task(tls.Server(identity(), 10.0, session).serve(listener))
        stream = await _opened_by(Peer(endpoint, "s"), world.sources[0].endpoint)
        rows = BATCH // COLUMNS * 2
        give = wire.Give("0of1", [Box("w", [0, 0], [rows, COLUMNS // 2])], BATCH)
        await stream.send(give)
        given = msgspec.msgpack.decode(await stream.receive(wire.MAX_REPLY_BYTES), type=wire.Reply)
        assert isinstance(given, wire.Given)
        await stream.receive_into(memoryview(bytearray(BATCH)), 10.0)
        stream.close()
        yield endpoint
        serving.cancel()
        await asyncio.wait([serving])


async def _opened_by(peer: Peer, source: str) -> tls.Stream:
    """A stream of a node that this process plays."""
    stream = await tls.connect(source, identity(), 10.0)
    await stream.send(wire.OpenVersion(KEY, ticket(KEY), ["0of1"], "west", peer))
    await stream.receive(wire.MAX_REPLY_BYTES)
    return stream


@pytest.mark.parametrize("behave", [_lies, _talks_nonsense, _sends_elsewhere])
async def test_a_peer_that_lies_is_left(
    short_dir: Path, behave: Callable[[tls.Stream, wire.Give], Awaitable[None]]
) -> None:
    async with _world(short_dir, 1) as world:
        await _write_part(*world.writers)
        async with _peer(world, behave) as endpoint:
            before = world.passed_bytes
            await _opened(world.readers[0], LEFT, world.sources[0].endpoint)
            # What the peer was given has crossed for it; now it crosses again.
            assert await _came(world.nodes[0]) == (SIZE // 2, 0, 0)
            assert world.passed_bytes - before < SIZE // 2 + _CONTROL
            await world.nodes[0].logged(f"from peer Peer(endpoint={endpoint!r}")


async def test_a_peer_that_never_delivers_is_left(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says again and again that it comes."""
    monkeypatch.setattr(fetching, "PEER_TIMEOUTS", 0.1)
    async with _world(short_dir, 0) as world:
        await _write_part(*world.writers)
        async with _peer(world, _keeps_waiting):
            memory = memoryview(bytearray(SIZE // 2))
            at = home(site="west", endpoint="127.0.0.1:1")
            running = fetch_of(KEY, LEFT, memory, at)
            await running.fetch_all(batches(LEFT), {"0of1": [world.sources[0].endpoint]})
            assert bytes(memory) == _bytes(LEFT)
            assert (running.fetched_bytes, running.relayed_bytes) == (SIZE // 2, 0)


@asynccontextmanager
async def _serving(session: tls.Session) -> AsyncIterator[str]:
    """Where a node that this process plays serves slices."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    with listener:
        serving = asyncio.create_task(tls.Server(identity(), 10.0, session).serve(listener))
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        serving.cancel()
        await asyncio.wait([serving])


async def test_a_fetch_that_failed_ends_also_where_a_source_names_peers_still() -> None:
    """One part can be had nowhere while a source is being asked for another."""
    content = bytes(BATCH)
    digest = xxhash.xxh3_128_hexdigest(content)
    asked, holders = asyncio.Event(), [""]

    async def holds(stream: tls.Stream, *, is_far: bool) -> wire.Give:
        await stream.receive(tls.MAX_REQUEST_BYTES)
        await stream.send(wire.Opened({"0of2": ""} if is_far else {}, is_far))
        payload = await stream.receive(tls.MAX_REQUEST_BYTES)
        return msgspec.msgpack.decode(payload, type=wire.Give)

    async def peer(stream: tls.Stream) -> None:
        await holds(stream, is_far=False)
        await stream.send(wire.Given(digest))
        await stream.send_bytes(memoryview(content), 10.0)

    async def assigns(stream: tls.Stream) -> None:
        give = await holds(stream, is_far=True)
        asked.set()
        await running._ended.wait()
        peer_boxes = [wire.Shared(Peer(holders[0], "s"), [(0, give.boxes[0])], digest)]
        nothing = xxhash.xxh3_128_hexdigest(b"")
        await stream.send(wire.Given(nothing, wire.Assigned(1, [], peer_boxes)))

    async def has_nothing(stream: tls.Stream) -> None:
        await stream.receive(tls.MAX_REQUEST_BYTES)
        await asked.wait()
        await stream.send(wire.Refusal(CallerError("gone", code=Code.NOT_FOUND).info))

    slices = [
        Slice(part, "w", "uint8", [0], [BATCH], number * BATCH, BATCH)
        for number, part in enumerate(["0of2", "1of2"])
    ]
    at = home(site="west", endpoint="127.0.0.1:1")
    running = fetch_of(KEY, slices, memoryview(bytearray(2 * BATCH)), at)
    async with (
        _serving(peer) as holders[0],
        _serving(assigns) as one,
        _serving(has_nothing) as other,
        asyncio.timeout(30),
    ):
        with pytest.raises(ResourceError, match="gone") as caught:
            await running.fetch_all(batches(slices), {"0of2": [one], "1of2": [other]})
    assert caught.value.info.code is Code.NOT_FOUND


async def test_slices_go_to_peers_with_a_ticket_only(short_dir: Path) -> None:
    async with _world(short_dir, 1) as world:
        await _write_part(*world.writers)
        await _opened(world.readers[0], LEFT, world.sources[0].endpoint)
        endpoint = await world.nodes[0].endpoint()
        (held,) = [key for key in (await world.nodes[0].agent.status()).versions if key.is_copy]
        request = wire.OpenVersion(KEY, ticket(KEY), [], relay=held.part)
        box = Box("w", [1, 0], [2, COLUMNS // 2])
        good = await _reply_to(endpoint, request, wire.Give("0of1", [box], COLUMNS))
        assert isinstance(good, wire.Given)
        other = VersionKey(POLICY, 3)
        for shown, asked in (
            (None, KEY),
            (ticket(KEY, "sampler", "another"), KEY),
            (ticket(KEY, secret="another"), KEY),
            (ticket(other), KEY),
            (ticket(KEY, incarnation=0), KEY),
        ):
            bad = msgspec.structs.replace(request, version=asked, ticket=shown)
            refusal = await _reply_to(endpoint, bad)
            assert isinstance(refusal, wire.Refusal), shown
            assert refusal.error.code is Code.PERMISSION_DENIED
        nothing = msgspec.structs.replace(request, relay="slices-of-nothing")
        assert isinstance(await _reply_to(endpoint, nothing), wire.Refusal)
        for missing in (
            wire.Give("0of1", [Box("w", [1, 0], [1, COLUMNS])], COLUMNS),
            wire.Give("0of2", [box], COLUMNS),
            wire.Give("0of1", [Box("v", [1, 0], [2, COLUMNS // 2])], COLUMNS),
            wire.Give("0of1", [Box("w", [1], [2])], 2),
            wire.Give("0of1", [Box("w", [1, 0], [2])], 2),
            wire.Give("0of1", [box], COLUMNS + 1),
            wire.Confirm("0of1"),
        ):
            assert isinstance(await _reply_to(endpoint, request, missing), wire.Refusal), missing


async def _reply_to(
    endpoint: str, request: wire.OpenVersion, asked: wire.Ask | None = None
) -> wire.Reply:
    stream = await tls.connect(endpoint, identity(), 10.0)
    try:
        for message in (request, asked):
            if message is not None:
                await stream.send(message)
                payload = await stream.receive(wire.MAX_REPLY_BYTES)
        reply: wire.Reply = msgspec.msgpack.decode(payload, type=wire.Reply)
        return reply
    finally:
        stream.close()
