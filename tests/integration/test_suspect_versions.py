"""Weights versions of which a bit flips in a node's host memory: found by who reads them, dropped,
and fetched again from the node's disk or another node, or named as lost. Real daemons, sockets and
memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.contract.specs import Durability
from phaseloom.common.contract.state_layout import PartSources, Slice
from phaseloom.common.tensors.versionparts import part_of
from phaseloom.worker.backends.base import RankGroup
from phaseloom.worker.backends.layout import shard
from tests.support.meshcerts import ticket
from tests.support.modelslices import version_rank
from tests.support.partranks import (
    SHAPES,
    VERSION,
    PartRank,
    arrays,
    new_permit,
    publish,
    start_part_ranks,
    switch_in,
)
from tests.support.readversions import load_version
from tests.support.statedaemon import (
    POLICY,
    SAMPLER,
    Daemon,
    MiB,
    Rank,
    daemon,
    flip_in_file,
    flip_in_memory,
    names,
    start,
)

SIZE = 2 * MiB
WHOLE = f"version {VERSION}"
PART = f"{WHOLE}/1of2"
ONE = arrays(1)
SOME = Slice("1of2", "a", "float32", [0, 0], [1, 64], 0, 256)
SOME_BYTES = ONE["a"][shard(SHAPES["a"], RankGroup(1, 2)).rows.start].tobytes()
REFERENCE = DeploymentKey(POLICY.tenant, POLICY.job, "reference")
SHOWN = ticket(VERSION, "sampler", "node0", "a", "b")


@asynccontextmanager
async def suspecting(directory: Path, name: str = "a", *, site: str = "") -> AsyncIterator[Daemon]:
    async with daemon(directory / name, devices=[16 * MiB] * 3, NODE=name, SITE=site) as d:
        yield d
        await d.agent.status()  # which states what must hold of the books


async def published(d: Daemon, *, is_sealed: bool) -> Rank:
    policy = await start(d, POLICY, SIZE)
    await d.agent.switch_in(POLICY, 1, 1, [])
    policy.run(1)
    await policy.client.versions.create(VERSION, policy.slots)
    if is_sealed:
        await seal(d, 1)
    return policy


async def seal(d: Daemon, seq: int, **more: Any) -> None:
    await d.agent.prepare_seal(POLICY, 1, seq)
    await d.agent.write_seal(POLICY, 1, seq, [VERSION.seq], **more)


async def sampling(d: Daemon, *, frozen: bool = False) -> Rank:
    sampler = await start(d, SAMPLER, SIZE, frozen=frozen)
    await d.agent.switch_in(SAMPLER, 1, 1, [])
    return sampler


async def synced(sampler: Rank, *sources: str) -> str:
    shown = SHOWN if sources else None
    await load_version(sampler.client, VERSION, list(sources), sampler.slots, shown)
    return sampler.digest()


async def published_in_parts(d: Daemon, *, is_sealed: bool) -> None:
    ranks = await start_part_ranks([d], POLICY, 2)
    await switch_in(d, POLICY)
    await publish(ranks, VERSION, ONE)
    if is_sealed:
        await seal(d, 0)


async def readers(d: Daemon, num_ranks: int = 2) -> list[PartRank]:
    """Each holds everything."""
    ranks = await start_part_ranks([d], SAMPLER, num_ranks, is_sharded=False)
    for rank in ranks:
        rank.backend.fill(arrays(9))
    return ranks


async def are_synced(ranks: list[PartRank], *sources: str) -> None:
    """At the same time, as the ranks of a deployment do it."""
    permitted = new_permit()
    await asyncio.gather(*(rank.sync(VERSION, *sources, permitted=permitted) for rank in ranks))
    for rank in ranks:
        assert rank.backend.holds(ONE)


async def sliced(reader: PartRank, *sources: str) -> bytes:
    held = [PartSources("1of2", list(sources))]
    shown = SHOWN if sources else None
    memory, _ = await reader.client.versions.open_slices(VERSION, [SOME], held, shown)
    return bytes(memory[: SOME.num_bytes])


# --- On the node's disk ---------------------------------------------------------------------------


async def test_bad_version_is_read_anew_from_disk(short_dir: Path) -> None:
    async with suspecting(short_dir) as d:
        policy = await published(d, is_sealed=True)
        sampler = await sampling(d)
        flip_in_memory(d.pid, WHOLE, SIZE // 2)
        assert await synced(sampler) == policy.digest()
        await d.logged(f"{WHOLE} is bad in host memory")
        # What was read is good: the next one is not told that it is suspect.
        await load_version(sampler.client, VERSION, [], sampler.slots)
        assert d.text().count("is bad in host memory") == 1


@pytest.mark.parametrize("what", [f"{WHOLE}/0of2", PART, WHOLE])
async def test_bad_part_or_manifest_is_read_anew_from_disk(short_dir: Path, what: str) -> None:
    async with suspecting(short_dir) as d:
        await published_in_parts(d, is_sealed=True)
        ranks = await readers(d)
        # Memory is named in full, and the manifest's name begins as those of parts do.
        flip_in_memory(d.pid, f"{what} (deleted)", 40)
        await are_synced(ranks)
        await d.logged(f"{what} is bad in host memory")


@pytest.mark.parametrize("is_in_parts", [False, True])
async def test_ranks_of_one_operation_share_a_verification_and_the_next_has_its_own(
    short_dir: Path, *, is_in_parts: bool
) -> None:
    """The bit flips between two ranks of one sync, when both might be copying already."""
    async with suspecting(short_dir) as d:
        makers = await start_part_ranks([d], POLICY, 2, is_sharded=is_in_parts)
        await switch_in(d, POLICY)
        if is_in_parts:
            await publish(makers, VERSION, ONE)
        else:
            makers[0].backend.fill(ONE)
            await makers[0].weights.write(VERSION)
        await seal(d, 0)
        first, other = await readers(d)
        flipped, found = (PART if is_in_parts else WHOLE), "is bad in host memory"
        permitted = new_permit()
        await first.bring(VERSION, permitted=permitted)
        flip_in_memory(d.pid, f"{flipped} (deleted)", 40)
        await other.bring(VERSION, permitted=permitted)
        assert found not in d.text()
        assert await other.sync(VERSION) == await first.sync(VERSION)
        assert other.backend.holds(ONE)
        assert first.backend.holds(ONE)
        assert d.text().count(found) == 1


async def test_slices_are_never_taken_from_a_bad_part(short_dir: Path) -> None:
    """They have a digest of their own, taken after they were copied."""
    async with suspecting(short_dir) as d:
        await published_in_parts(d, is_sealed=True)
        (reader,) = await readers(d, 1)
        flip_in_memory(d.pid, PART, 40)
        assert await sliced(reader) == SOME_BYTES
        await d.logged(f"{PART} is bad in host memory")


async def test_bad_copy_of_slices_is_made_anew(short_dir: Path) -> None:
    async with suspecting(short_dir) as d:
        await published_in_parts(d, is_sealed=False)
        (reader,) = await readers(d, 1)
        assert await sliced(reader) == SOME_BYTES
        flip_in_memory(d.pid, "slices of version", 40)
        assert await sliced(reader) == SOME_BYTES
        await d.logged("is bad in host memory")


async def test_incarnations_end_whose_host_copy_is_a_bad_version(short_dir: Path) -> None:
    """Also where the version itself comes again from disk."""
    async with suspecting(short_dir) as d:
        policy = await published(d, is_sealed=True)
        sampler = await sampling(d, frozen=True)
        await synced(sampler)
        await sampler.client.versions.hold(VERSION, 2)
        sampler.seq = 2
        other = await start(d, REFERENCE, SIZE)
        await d.agent.switch_in(REFERENCE, 1, 1, [])
        flip_in_memory(d.pid, WHOLE, SIZE // 2)
        assert await synced(other) == policy.digest()
        await asyncio.wait_for(sampler.client.closed, 60)
        assert (await d.agent.status()).shared_copies == []


# --- On another node ------------------------------------------------------------------------------


async def test_bad_version_is_fetched_anew_from_another_node(short_dir: Path) -> None:
    async with suspecting(short_dir) as train, suspecting(short_dir, "b") as rollout:
        policy = await published(train, is_sealed=False)
        sampler, source = await sampling(rollout), await train.endpoint()
        await synced(sampler, source)
        flip_in_memory(rollout.pid, WHOLE, SIZE // 2)
        sampler.run(9)
        assert await synced(sampler, source) == policy.digest()
        await rollout.logged(f"{WHOLE} is bad in host memory")


async def test_bad_file_of_a_bad_version_leaves_the_other_node(short_dir: Path) -> None:
    async with suspecting(short_dir) as train, suspecting(short_dir, "b") as rollout:
        policy = await published(train, is_sealed=True)
        await synced(await sampling(rollout), await train.endpoint())
        flip_in_memory(train.pid, WHOLE, SIZE // 2)
        flip_in_file(train.files / "acme" / "sums" / "policy" / "version-2.state", -SIZE // 2)
        here = await start(train, REFERENCE, SIZE)
        await train.agent.switch_in(REFERENCE, 1, 1, [])
        shown = ticket(VERSION, "reference", "node0", "a")
        source = await rollout.endpoint()
        await load_version(here.client, VERSION, [source], here.slots, shown)
        assert here.digest() == policy.digest()


@pytest.mark.parametrize("of_slices", [False, True])
async def test_bad_part_is_fetched_anew_from_another_node(
    short_dir: Path, *, of_slices: bool
) -> None:
    """Also where somebody needs no more of it than slices."""
    async with suspecting(short_dir) as train, suspecting(short_dir, "b") as rollout:
        await published_in_parts(train, is_sealed=False)
        source = await train.endpoint()
        ranks = await readers(rollout)
        await are_synced(ranks, source)
        flip_in_memory(rollout.pid, PART, 40)
        if of_slices:
            assert await sliced(ranks[0], source) == SOME_BYTES
        else:
            ranks[0].backend.fill(arrays(9))
            await are_synced(ranks, source)
        await rollout.logged(f"{PART} is bad in host memory")


# --- Nowhere else ---------------------------------------------------------------------------------


async def test_version_that_is_lost_is_named_and_can_be_published_again(short_dir: Path) -> None:
    """A seal has it, whose file is bad: no incarnation rebuilt from there would make it again."""
    async with suspecting(short_dir) as d:
        policy = await published(d, is_sealed=True)
        sampler = await sampling(d)
        before = sampler.digest()
        flip_in_memory(d.pid, WHOLE, SIZE // 2)
        flip_in_file(d.files / "acme" / "sums" / "policy" / "version-2.state", -SIZE // 2)
        with pytest.raises(ResourceError, match=f"{WHOLE} went bad") as caught:
            await synced(sampler, await d.endpoint())
        assert caught.value.info.code is Code.DATA_LOSS
        assert caught.value.info.remedy
        assert caught.value.info.details["version"] == str(VERSION)
        assert sampler.digest() == before
        assert (await d.agent.status()).versions == []
        await policy.client.versions.create(VERSION, policy.slots)
        assert await synced(sampler) == policy.digest()


async def test_version_that_no_seal_has_is_made_again_by_its_policy(short_dir: Path) -> None:
    """What is not sealed is rebuilt from the seal and the log: its incarnation is over, and who
    syncs the version is told to come again, until the next one begins."""
    async with suspecting(short_dir) as d:
        policy = await published(d, is_sealed=False)
        sampler = await sampling(d)
        expected, before = policy.digest(), sampler.digest()
        flip_in_memory(d.pid, WHOLE, SIZE // 2)
        for _ in range(2):
            with pytest.raises(ResourceError, match=f"{WHOLE} went bad") as caught:
                await synced(sampler, await d.endpoint())
            assert caught.value.info.code is Code.UNAVAILABLE
        await asyncio.wait_for(policy.client.closed, 60)
        assert sampler.digest() == before
        assert (await d.agent.status()).versions == []
        again = await start(d, POLICY, SIZE, incarnation=2)
        with pytest.raises(CallerError, match="NOT_FOUND"):
            await synced(sampler)
        await d.agent.switch_in(POLICY, 2, 1, [])
        again.run(1)
        await again.client.versions.create(VERSION, again.slots)
        assert await synced(sampler) == expected


async def test_version_that_host_memory_alone_has_sealed_is_not_made_again(
    short_dir: Path,
) -> None:
    async with suspecting(short_dir) as d:
        policy = await published(d, is_sealed=False)
        policy.run(2)
        await seal(d, 2, durability=Durability.HOST)
        sampler = await sampling(d)
        flip_in_memory(d.pid, WHOLE, SIZE // 2)
        with pytest.raises(ResourceError, match=f"{WHOLE} went bad") as caught:
            await synced(sampler)
        assert caught.value.info.code is Code.DATA_LOSS
        assert not policy.client.closed.done()


@pytest.mark.parametrize("of_slices", [False, True])
@pytest.mark.parametrize("is_sealed", [False, True])
async def test_part_that_is_lost_is_named(
    short_dir: Path, *, is_sealed: bool, of_slices: bool
) -> None:
    """Where no seal has the version, all of it is made again."""
    async with suspecting(short_dir) as d:
        await published_in_parts(d, is_sealed=is_sealed)
        (reader,) = await readers(d, 1)
        flip_in_memory(d.pid, PART, 40)
        named, code = WHOLE, Code.UNAVAILABLE
        if is_sealed:
            flip_in_file(d.files / "acme" / "sums" / "policy" / "version-2-1of2.state", -4096)
            named, code = f"part 1of2 of {WHOLE}", Code.DATA_LOSS
        source = await d.endpoint()
        reading = sliced(reader, source) if of_slices else reader.sync(VERSION, source)
        with pytest.raises(ResourceError, match=f"{named} went bad") as caught:
            await reading
        assert caught.value.info.code is code
        assert caught.value.info.remedy
        assert reader.backend.holds(arrays(9))
        if not is_sealed:
            assert (await d.agent.status()).versions == []


async def test_parts_that_are_made_again_leave_no_file(short_dir: Path) -> None:
    """One that made room for the others is on disk, though no seal has it. Found there by the next
    daemon, it would stand instead of what the policy's next incarnation makes."""
    shapes = {"a": [512, 1024]}
    limits = {"host_bytes": 3 * MiB + 128 * 1024, "NVME_BYTES": "0"}
    async with daemon(short_dir, devices=[4 * MiB] * 3, **limits) as d:  # type: ignore[arg-type]
        reader = await version_rank(d, SAMPLER)
        ranks = await start_part_ranks([d], POLICY, 2, shapes=shapes)
        await switch_in(d, POLICY)
        await publish(ranks, VERSION, arrays(1, shapes))
        assert names(d) == ["version-2-0of2.state"]
        flip_in_memory(d.pid, PART, 40)
        with pytest.raises(ResourceError, match=f"{WHOLE} went bad") as caught:
            await reader.versions.open(part_of(VERSION, "1of2"), [])
        assert caught.value.info.code is Code.UNAVAILABLE
        assert (await d.agent.status()).versions == []
        assert names(d) == []


async def test_incarnations_end_whose_host_copy_is_a_version_that_is_lost(short_dir: Path) -> None:
    async with suspecting(short_dir) as d:
        await published(d, is_sealed=False)
        sampler = await sampling(d, frozen=True)
        await synced(sampler)
        await sampler.client.versions.hold(VERSION, 2)
        sampler.seq = 2
        other = await start(d, REFERENCE, SIZE)
        await d.agent.switch_in(REFERENCE, 1, 1, [])
        flip_in_memory(d.pid, WHOLE, SIZE // 2)
        with pytest.raises(ResourceError):
            await synced(other)
        await asyncio.wait_for(sampler.client.closed, 60)
        assert not other.client.closed.done()
        assert (await d.agent.status()).shared_copies == []


# --- At its source --------------------------------------------------------------------------------


@pytest.mark.parametrize("is_sealed", [True, False])
async def test_source_finds_out_that_its_version_is_bad(
    short_dir: Path, *, is_sealed: bool
) -> None:
    """And the peer that found it out gets it, where the source has it on disk."""
    async with suspecting(short_dir) as train, suspecting(short_dir, "b") as rollout:
        policy = await published(train, is_sealed=is_sealed)
        sampler = await sampling(rollout)
        before = sampler.digest()
        flip_in_memory(train.pid, WHOLE, SIZE // 2)
        if is_sealed:
            assert await synced(sampler, await train.endpoint()) == policy.digest()
        else:
            with pytest.raises(ResourceError) as caught:
                await synced(sampler, await train.endpoint())
            # Its policy makes it again.
            assert caught.value.info.code is Code.UNAVAILABLE
            assert sampler.digest() == before
            assert (await train.agent.status()).versions == []
        await train.logged(f"{WHOLE} is bad in host memory")


@pytest.mark.parametrize("of_slices", [False, True])
async def test_source_reads_a_bad_part_anew(short_dir: Path, *, of_slices: bool) -> None:
    async with suspecting(short_dir) as train, suspecting(short_dir, "b") as rollout:
        await published_in_parts(train, is_sealed=True)
        source, ranks = await train.endpoint(), await readers(rollout)
        flip_in_memory(train.pid, PART, 40)
        if of_slices:
            await ranks[0].client.versions.open(VERSION, [source], SHOWN)
            assert await sliced(ranks[0], source) == SOME_BYTES
        else:
            await are_synced(ranks, source)
        await train.logged(f"{PART} is bad in host memory")


async def test_nodes_of_a_site_share_nothing_bad(short_dir: Path) -> None:
    """What one was given, and what the other was told of it, is from memory that had gone bad."""
    rows = shard(SHAPES["a"], RankGroup(1, 2)).rows
    num_bytes = 256 * len(rows)
    all_rows = Slice("1of2", "a", "float32", [0, 0], [len(rows), 64], 0, num_bytes)
    async with (
        suspecting(short_dir, "a", site="east") as train,
        suspecting(short_dir, "b", site="west") as one,
        suspecting(short_dir, "c", site="west") as other,
    ):
        await published_in_parts(train, is_sealed=True)
        flip_in_memory(train.pid, PART, 256 * len(rows) // 2)
        source, shown = await train.endpoint(), ticket(VERSION, "sampler", "b", "c")

        async def sync(d: Daemon) -> bytes:
            (reader,) = await readers(d, 1)
            await reader.client.versions.open(VERSION, [source], shown)
            held = [PartSources("1of2", [source])]
            memory, _ = await reader.client.versions.open_slices(VERSION, [all_rows], held, shown)
            return bytes(memory[:num_bytes])

        expected = ONE["a"][rows.start : rows.stop].tobytes()
        assert all(each == expected for each in await asyncio.gather(sync(one), sync(other)))
        await train.logged(f"{PART} is bad in host memory")


async def test_source_that_lost_a_part_gives_no_slices_of_it(short_dir: Path) -> None:
    async with suspecting(short_dir) as train, suspecting(short_dir, "b") as rollout:
        await published_in_parts(train, is_sealed=False)
        source, (reader,) = await train.endpoint(), await readers(rollout, 1)
        await reader.client.versions.open(VERSION, [source], SHOWN)
        flip_in_memory(train.pid, PART, 40)
        with pytest.raises(ResourceError) as caught:
            await sliced(reader, source)
        # Its policy makes all of it again.
        assert caught.value.info.code is Code.UNAVAILABLE
        assert (await train.agent.status()).versions == []
