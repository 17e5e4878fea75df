"""Weights versions that differ little, sent to another node as deltas: few bytes, the same bits,
and whole where a delta cannot be had. Real daemons; the link is a proxy that counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from phaseloom.common.contract.ids import VersionKey
from phaseloom.worker.state.heap import align
from tests.support.meshcerts import ticket
from tests.support.partranks import arrays, publish, start_part_ranks
from tests.support.readversions import load_version
from tests.support.slowlink import Link, link
from tests.support.statedaemon import (
    POLICY,
    SAMPLER,
    Daemon,
    MiB,
    Rank,
    daemon,
    flip_in_memory,
    start,
)

SIZE = 8 * MiB + 3
FIRST, SECOND, THIRD = (VersionKey(POLICY, seq) for seq in (2, 4, 6))
_CONTROL = SIZE // 25
"""More than the handshakes and messages of a fetch take."""
_FEW = SIZE // 50
"""More than a delta of the versions here takes."""


def _step(rank: Rank, seed: int, share: float = 0.01) -> None:
    """Change this share of the weights, here and there, as a step does."""
    chance = np.random.default_rng(seed)
    weights = np.frombuffer(rank.heap.buffer, np.uint8)
    places = chance.choice(SIZE, int(share * SIZE), replace=False)
    weights[places] ^= chance.integers(1, 4, places.size, np.uint8)
    rank.seq += 1


@dataclass
class _Pair:
    """A policy on a node behind a link that counts, and samplers on others."""

    train: Daemon
    policy: Rank
    slow: Link
    rollouts: list[Daemon]
    samplers: list[Rank]

    async def publish(self, key: VersionKey) -> None:
        await self.policy.client.versions.create(key, self.policy.slots)

    async def sync(self, key: VersionKey) -> int:
        """Bring a version to all samplers. Returns: the bytes that crossed the link for it."""
        before = self.slow.passed_bytes
        await asyncio.gather(
            *(
                load_version(s.client, key, [self.slow.endpoint], s.slots, ticket(key))
                for s in self.samplers
            )
        )
        assert [s.digest() for s in self.samplers] == [self.policy.digest()] * len(self.samplers)
        return self.slow.passed_bytes - before

    async def begin(self) -> None:
        """Publish the first version and bring it to the samplers."""
        _step(self.policy, 0, 1.0)
        await self.publish(FIRST)
        assert await self.sync(FIRST) >= SIZE


@asynccontextmanager
async def _pair(
    directory: Path, *, num: int = 1, site: str = "", delta_share: str = "0.25"
) -> AsyncIterator[_Pair]:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(
            daemon(
                directory / "train",
                devices=[2 * SIZE],
                SITE="east" if site else "",
                DELTA_SHARE=delta_share,
            )
        )
        others = [
            await stack.enter_async_context(
                daemon(directory / f"rollout{i}", devices=[2 * SIZE], SITE=site)
            )
            for i in range(num)
        ]
        slow = await stack.enter_async_context(link(await first.endpoint()))
        policy = await start(first, POLICY, SIZE)
        samplers = [await start(each, SAMPLER, SIZE) for each in others]
        await first.agent.switch_in(POLICY, 1, 1, [])
        for each in others:
            await each.agent.switch_in(SAMPLER, 1, 1, [])
        yield _Pair(first, policy, slow, others, samplers)


async def test_a_version_that_differs_little_crosses_as_a_delta(short_dir: Path) -> None:
    async with _pair(short_dir) as pair:
        await pair.begin()
        for seed, key in enumerate((SECOND, THIRD), 1):
            _step(pair.policy, seed)
            await pair.publish(key)
            assert await pair.sync(key) < _FEW + _CONTROL
        await pair.rollouts[0].logged(f"{align(SIZE)} of them as deltas of")


async def test_a_delta_is_of_the_newest_version_that_both_have(short_dir: Path) -> None:
    """The sampler has skipped a version, as one that is behind does."""
    async with _pair(short_dir) as pair:
        await pair.begin()
        for seed, key in enumerate((SECOND, THIRD), 1):
            _step(pair.policy, seed)
            await pair.publish(key)
        assert await pair.sync(THIRD) < 2 * _FEW + _CONTROL


async def test_a_version_that_differs_much_comes_whole(short_dir: Path) -> None:
    async with _pair(short_dir) as pair:
        await pair.begin()
        _step(pair.policy, 1, 0.6)
        await pair.publish(SECOND)
        assert SIZE <= await pair.sync(SECOND) < SIZE + _CONTROL
        await pair.rollouts[0].logged("0 of them as deltas of 0 bytes")


async def test_a_node_without_a_share_for_deltas_sends_versions_whole(short_dir: Path) -> None:
    async with _pair(short_dir, delta_share="0") as pair:
        await pair.begin()
        _step(pair.policy, 1)
        await pair.publish(SECOND)
        assert await pair.sync(SECOND) >= SIZE


@pytest.mark.parametrize("where", ["source", "reader"])
async def test_a_version_comes_whole_where_its_base_was_dropped(
    short_dir: Path, where: str
) -> None:
    async with _pair(short_dir) as pair:
        await pair.begin()
        _step(pair.policy, 1)
        await pair.publish(SECOND)
        node = pair.train if where == "source" else pair.rollouts[0]
        await node.agent.drop_versions([FIRST])
        assert SIZE <= await pair.sync(SECOND) < SIZE + _CONTROL


@pytest.mark.parametrize("where", ["source", "reader"])
async def test_a_version_is_exact_where_a_bit_of_its_base_has_flipped(
    short_dir: Path, where: str
) -> None:
    """Nobody looks at the digest of a base: the checksums of what is made of it tell."""
    async with _pair(short_dir) as pair:
        await pair.begin()
        _step(pair.policy, 1)
        await pair.publish(SECOND)
        node = pair.train if where == "source" else pair.rollouts[0]
        flip_in_memory(node.pid, f"version {FIRST}", SIZE // 2)
        await pair.sync(SECOND)
        await pair.rollouts[0].logged("a delta produced other bytes; requesting no more deltas")


async def test_a_delta_goes_on_when_the_link_broke(short_dir: Path) -> None:
    async with _pair(short_dir) as pair:
        await pair.begin()
        _step(pair.policy, 1)
        await pair.publish(SECOND)
        pair.slow.held.clear()
        pair.slow.hold_after_bytes = pair.slow.passed_bytes + _FEW // 2
        syncing = asyncio.create_task(pair.sync(SECOND))
        await pair.slow.held.wait()
        pair.slow.cut()
        pair.slow.release()
        assert await syncing < 2 * _FEW + _CONTROL


async def test_a_reader_that_was_killed_has_its_base_still(short_dir: Path) -> None:
    async with _pair(short_dir) as pair:
        await pair.begin()
        _step(pair.policy, 1)
        await pair.publish(SECOND)
        await pair.rollouts[0].relaunch()
        assert await pair.sync(SECOND) < _FEW + _CONTROL


async def test_one_delta_crosses_to_a_site(short_dir: Path) -> None:
    """The nodes there make all of it, each from its share and what the other one has made."""
    async with _pair(short_dir, num=2, site="west") as pair:
        await pair.begin()
        _step(pair.policy, 1)
        await pair.publish(SECOND)
        assert await pair.sync(SECOND) < _FEW + 2 * _CONTROL


@pytest.mark.parametrize("num_readers", [1, 3])
async def test_parts_and_slices_cross_as_deltas(short_dir: Path, num_readers: int) -> None:
    """One reader needs both parts whole; one of three some rows of each, as slices."""
    shapes = {"a": [1030, 1024], "b": [1029, 1024]}
    content, size = arrays(1, shapes), 2059 * 4096
    async with (
        daemon(short_dir / "a", devices=[size] * 2, NODE="a") as train,
        daemon(short_dir / "b", devices=[size] * 3, NODE="b") as rollout,
        link(await train.endpoint()) as slow,
    ):
        policy = await start_part_ranks([train], POLICY, 2, shapes=shapes)
        await train.agent.switch_in(POLICY, 1, 1, [])
        readers = await start_part_ranks(
            [rollout], SAMPLER, num_readers, is_sharded=num_readers > 1, shapes=shapes
        )
        crossed = []
        for key in (FIRST, SECOND):
            await publish(policy, key, content)
            before = slow.passed_bytes
            await asyncio.gather(*(reader.sync(key, slow.endpoint) for reader in readers))
            crossed.append(slow.passed_bytes - before)
            assert all(reader.backend.holds(content) for reader in readers)
            for each in content.values():
                each[::50, ::7] += 1
        assert crossed[0] >= size
        assert crossed[1] < size // 20
