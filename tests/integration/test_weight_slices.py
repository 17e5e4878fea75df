"""Slices of sharded weights between state managers: each node gets exactly the bytes that its ranks
need, once, whatever breaks on the way. Real daemons, real sockets."""

from __future__ import annotations

import asyncio
import random
import re
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest

from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError
from phaseloom.common.contract.ids import VersionKey
from phaseloom.common.contract.state_layout import PartSources, Slice
from phaseloom.worker.state.client import RankStateClient
from tests.support.meshcerts import ticket
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
from tests.support.sharded import Array
from tests.support.slowlink import GOODBYES_BYTES, Link, link
from tests.support.statedaemon import POLICY, SAMPLER, Daemon, MiB, daemon

_CONTROL = 64 * 1024
"""More than handshakes and control messages of a fetch take."""


async def _write_part(client: RankStateClient, seed: int) -> None:
    """The only one of `KEY`, and its manifest."""
    await commit({PART.part: await write(client, PART, _content(seed))}, KEY, client)


def _told(d: Daemon) -> list[tuple[str, str]]:
    """(from other nodes, from here), of all slices that its log tells of so far."""
    return re.findall(r"slices of version \S+: (\d+) bytes from other nodes, (\d+)", d.text())


async def _came(d: Daemon, number: int) -> tuple[int, int]:
    """(from other nodes, from here): what came as the `number`th slices."""
    async with asyncio.timeout(30):
        while len(_told(d)) < number:
            await d.agent.status()  # its log comes here meanwhile
    crossed, local = _told(d)[number - 1]
    return int(crossed), int(local)


async def test_a_node_gets_exactly_what_its_ranks_need(short_dir: Path) -> None:
    """Any layout to any other, the target's ranks on a node of their own and on a source's."""
    async with AsyncExitStack() as stack:
        nodes = [
            await stack.enter_async_context(daemon(short_dir / name, NODE=name)) for name in "abc"
        ]
        slow = [await stack.enter_async_context(link(await node.endpoint())) for node in nodes[:2]]
        world = _World(
            [*zip(nodes, slow, strict=False)],
            [await version_rank(node, POLICY) for node in nodes[:2]],
            [(node, await version_rank(node, SAMPLER)) for node in (nodes[2], nodes[0])],
        )
        for seed in range(8):
            await _sync(world, VersionKey(POLICY, seed + 2), random.Random(seed))
            for node in nodes:
                await node.agent.drop_versions([VersionKey(POLICY, seed + 2)])
                assert (await node.agent.status()).versions == []


@dataclass
class _World:
    """Two nodes of a policy behind links that count; a sampler on another and on the first."""

    sources: list[tuple[Daemon, Link]]
    writers: list[RankStateClient]
    readers: list[tuple[Daemon, RankStateClient]]

    @property
    def passed_bytes(self) -> int:
        return sum(each.passed_bytes for _, each in self.sources)


async def _sync(world: _World, key: VersionKey, chance: random.Random) -> None:
    plan = Plan(*chance.sample(LAYOUTS, 2))
    parts = plan.parts
    named: list[PartSources] = []
    digests: dict[str, str] = {}
    local_parts: set[str] = set()
    for number, ranks in enumerate(parts):
        part = part_called(number, parts)
        mine = msgspec.structs.replace(key, part=part)
        content = plan.held[number]
        numbers = sorted({rank % 2 for rank in ranks} | {chance.randrange(2)})
        for holder in numbers:
            digests[part] = await write(world.writers[holder], mine, content)
        named.append(PartSources(part, [world.sources[n][1].endpoint for n in numbers]))
        if 0 in numbers:
            local_parts.add(part)
    await commit(digests, key, *world.writers)
    everyone = list(range(plan.target.num_ranks))
    chance.shuffle(everyone)
    half = (len(everyone) + 1) // 2
    shown = ticket(key, "sampler", "a", "c")
    for (node, reader), needy in zip(
        world.readers, (set(everyone[:half]), set(everyone[half:])), strict=True
    ):
        if not needy:
            continue
        await reader.versions.open(key, [slow.endpoint for _, slow in world.sources], shown)
        before = world.passed_bytes
        slices = slices_of(plan.fetches(needy), parts)
        number = len(_told(node)) + 1
        memory, described = await reader.versions.open_slices(key, slices, named, shown)
        planned = check_slices(plan, needy, memory)
        crossed, local = await _came(node, number)
        passed = world.passed_bytes - before
        assert crossed + local == planned
        assert crossed <= passed < crossed * 1.02 + _CONTROL
        is_source = node is world.sources[0][0]
        assert local == sum(s.num_bytes for s in slices if is_source and s.part in local_parts)
        # Whoever asks for the same on this node gets the same memory.
        again, same = await reader.versions.open_slices(key, slices, named, shown)
        assert (bytes(again), same.digest) == (bytes(memory), described.digest)
        assert world.passed_bytes - before < passed + GOODBYES_BYTES


# --- What breaks ---------------------------------------------------------------------------------

KEY = VersionKey(POLICY, 2)
SIZE = 8 * MiB
PART = msgspec.structs.replace(KEY, part="0of1")


def _content(seed: int) -> dict[str, Array]:
    random_bytes = np.random.default_rng(seed).integers(0, 256, (2048, SIZE // 2048), np.uint8)
    return {"w": random_bytes}


_HALF = [Slice("0of1", "w", "uint8", [512, 0], [1024, SIZE // 2048], 0, SIZE // 2)]


def _middle(content: dict[str, Array]) -> bytes:
    return content["w"][512:1536].tobytes()


async def test_what_a_killed_source_leaves_its_replica_brings(short_dir: Path) -> None:
    async with (
        daemon(short_dir / "a") as train,
        daemon(short_dir / "b") as replica,
        daemon(short_dir / "c") as rollout,
        link(await train.endpoint()) as dying,
        link(await replica.endpoint()) as other,
    ):
        for node in (train, replica):
            await _write_part(await version_rank(node, POLICY), 1)
        reader = await version_rank(rollout, SAMPLER)
        await reader.versions.open(KEY, [await train.endpoint()], ticket(KEY))
        # The replica waits, too, or it might bring all before the source has brought something.
        dying.hold_after_bytes = other.hold_after_bytes = SIZE // 8
        sources = [PartSources("0of1", [dying.endpoint, other.endpoint])]
        opening = asyncio.create_task(reader.versions.open_slices(KEY, _HALF, sources, ticket(KEY)))
        await dying.held.wait()
        await train.kill()
        dying.cut()
        other.release()
        memory, _ = await opening
        assert bytes(memory) == _middle(_content(1))
        await rollout.logged(f": {SIZE // 2} bytes from other nodes, 0 from here")


async def test_a_source_that_comes_back_with_another_version_is_refused(short_dir: Path) -> None:
    """What it brought before stays out of what it brings now: nothing of either is kept."""
    async with (
        daemon(short_dir / "a") as train,
        daemon(short_dir / "b") as other,
        daemon(short_dir / "c") as rollout,
        link(await train.endpoint()) as slow,
    ):
        for seed, node in enumerate((train, other)):
            await _write_part(await version_rank(node, POLICY), seed)
        reader = await version_rank(rollout, SAMPLER)
        await reader.versions.open(KEY, [await train.endpoint()], ticket(KEY))
        used = (await rollout.agent.status()).host_used_bytes
        slow.hold_after_bytes = SIZE // 4
        sources = [PartSources("0of1", [slow.endpoint])]
        opening = asyncio.create_task(reader.versions.open_slices(KEY, _HALF, sources, ticket(KEY)))
        await slow.held.wait()
        slow.source = await other.endpoint()
        slow.cut()
        slow.release()
        with pytest.raises(PhaseloomError, match="differs at") as caught:
            await opening
        assert caught.value.info.code is Code.FAILED_PRECONDITION
        assert (await rollout.agent.status()).host_used_bytes == used


_BAD = [
    (Slice("0of1", "v", "uint8", [0], [1], 0, 1), "is not in version"),
    (Slice("0of1", "w", "uint8", [2000, 0], [49, 4096], 0, 49 * 4096), "is not inside"),
    (Slice("0of1", "w", "uint8", [0], [1], 0, 1), "is not inside"),
    (Slice("0of1", "w", "uint8", [-1, 0], [1, 1], 0, 1), "is not a box"),
    (Slice("0of1", "w", "uint8", [0, 0], [1, 1], 0, 2), "is not 2 bytes"),
    (Slice("0of1", "w", "float32", [0, 0], [1, 1], 0, 4), "1 bytes, not 4"),
    (Slice("0of1", "w", "uint8", [0, 0], [1, 1], 1, 1), "multiple of 64"),
    (Slice("0of1", "w", "uint8", [2**60, 0], [2**60, 1], 0, 2**60), "of host memory"),
    (Slice("../0of1", "w", "uint8", [0, 0], [1, 1], 0, 1), "is not here"),
]


async def test_a_slice_that_is_none_is_refused(short_dir: Path) -> None:
    async with daemon(short_dir / "a") as train, daemon(short_dir / "b") as rollout:
        await _write_part(await version_rank(train, POLICY), 1)
        reader = await version_rank(rollout, SAMPLER)
        await reader.versions.open(KEY, [await train.endpoint()], ticket(KEY))
        used = (await rollout.agent.status()).host_used_bytes
        sources = [PartSources("0of1", [await train.endpoint()])]
        for bad, says in _BAD:
            with pytest.raises(PhaseloomError) as caught:
                await reader.versions.open_slices(KEY, [bad], sources, ticket(KEY))
            assert says in str(caught.value), bad
            assert (await rollout.agent.status()).host_used_bytes == used
        memory, _ = await reader.versions.open_slices(KEY, _HALF, sources, ticket(KEY))
        assert bytes(memory) == _middle(_content(1))


async def test_slices_of_a_version_that_was_written_whole(short_dir: Path) -> None:
    async with daemon(short_dir / "a") as train, daemon(short_dir / "b") as rollout:
        await write(await version_rank(train, POLICY), KEY, _content(1))
        reader = await version_rank(rollout, SAMPLER)
        sources = [PartSources("", [await train.endpoint()])]
        half = [msgspec.structs.replace(_HALF[0], part="")]
        with pytest.raises(CallerError, match="without a ticket"):
            await reader.versions.open_slices(KEY, half, sources)
        memory, _ = await reader.versions.open_slices(KEY, half, sources, ticket(KEY))
        assert bytes(memory) == _middle(_content(1))
        await rollout.logged(f": {SIZE // 2} bytes from other nodes, 0 from here")
