"""Seals of durability `host`: in the memory that the agent keeps, and on no disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from phaseloom.common.contract.commands import FilesTicket
from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.contract.ids import NodeId, VersionKey
from phaseloom.common.contract.specs import Durability
from phaseloom.common.contract.state_agent import FetchState
from phaseloom.common.transport.tickets import signed
from tests.support.meshcerts import SECRET
from tests.support.statedaemon import (
    OTHER,
    POLICY,
    Daemon,
    MiB,
    Rank,
    daemon,
    names,
    start,
)

SIZE = 9 * MiB


async def sealed(d: Daemon, *seqs: int) -> Rank:
    """A policy that was sealed in host memory at each of these."""
    policy = await start(d, POLICY, SIZE)
    await d.agent.switch_in(POLICY, 1, 1, [])
    committed = 0
    for seq in seqs:
        policy.run(seq)
        await d.agent.prepare_seal(POLICY, 1, seq)
        await d.agent.write_seal(
            POLICY, 1, seq, [], committed=committed, durability=Durability.HOST
        )
        committed = seq
    return policy


async def again(d: Daemon, seq: int) -> Rank:
    """Its next incarnation, from a seal."""
    await d.agent.drop_wpg(POLICY, 1)
    restored = await start(d, POLICY, SIZE, incarnation=2, seal_seq=seq)
    await d.agent.switch_in(POLICY, 2, 2, [])
    return restored


async def host_bytes(d: Daemon) -> int:
    return (await d.agent.status()).host_used_bytes


async def test_the_next_incarnation_begins_with_it_and_nothing_is_on_the_disk(
    short_dir: Path,
) -> None:
    async with daemon(short_dir) as d:
        policy = await sealed(d, 3)
        content = policy.digest()
        policy.run(4)
        restored = await again(d, 3)
        assert (restored.seq, restored.digest()) == (3, content)
        assert names(d) == []


async def test_frozen_deployment_has_one_too(short_dir: Path) -> None:
    """What it is made from cannot be written, and is shared maybe."""
    async with daemon(short_dir) as d:
        await start(d, POLICY, SIZE, frozen=True, content=7, applied=1)
        await d.agent.prepare_seal(POLICY, 1, 1)
        await d.agent.write_seal(POLICY, 1, 1, [], durability=Durability.HOST)
        await d.agent.drop_wpg(POLICY, 1)
        restored = await start(d, POLICY, SIZE, incarnation=2, seal_seq=1, frozen=True)
        await d.agent.switch_in(POLICY, 2, 2, [])
        fresh = await start(d, OTHER, SIZE, frozen=True, content=7)
        await d.agent.switch_in(OTHER, 1, 3, [POLICY])
        await d.agent.switch_in(POLICY, 2, 4, [OTHER])
        held = restored.digest()
        await d.agent.switch_in(OTHER, 1, 5, [POLICY])
        assert fresh.digest() == held
        assert names(d) == []


async def test_it_survives_a_kill_of_the_daemon(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        policy = await sealed(d, 3)
        content = policy.digest()
        await d.relaunch()
        restored = await again(d, 3)
        assert restored.digest() == content


async def test_who_asks_again_after_a_kill_hears_that_it_is_written(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        policy = await sealed(d, 3)
        await d.relaunch()
        policy.run(4)
        await d.agent.prepare_seal(POLICY, 1, 3)
        again = await d.agent.write_seal(POLICY, 1, 3, [], durability=Durability.HOST)
        assert (again.file, again.num_bytes) == ("", SIZE)


async def test_the_newest_two_are_kept_and_all_go_with_the_job(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        await sealed(d, 3)
        one = await host_bytes(d)
        await d.agent.drop_wpg(POLICY, 1, forget=True)
        assert await host_bytes(d) == 0
        await sealed(d, 3, 4, 5, 6)
        two = await host_bytes(d)
        assert one < two < one + SIZE + MiB
        await d.relaunch()
        await d.agent.drop_wpg(POLICY, 1, forget=True)
        assert await host_bytes(d) == 0


async def test_what_is_kept_in_memory_here_is_fetched_from_nowhere(short_dir: Path) -> None:
    """A WPG is rebuilt on its node: its seal and its versions are here, though on no disk."""
    async with daemon(short_dir) as d:
        policy = await sealed(d, 3)
        await policy.client.versions.create(VersionKey(POLICY, 2), policy.slots)
        content = policy.digest()
        await d.agent.fetch_state(FetchState(POLICY, 3, [2], []))
        assert names(d) == []
        assert (await again(d, 3)).digest() == content


async def test_a_replica_has_it_on_disk_though_it_is_in_its_memory_too(short_dir: Path) -> None:
    async with (
        daemon(short_dir / "a", NODE="a") as a,
        daemon(short_dir / "b", NODE="b") as b,
    ):
        await sealed(b, 3)
        policy = await start(a, POLICY, SIZE)
        await a.agent.switch_in(POLICY, 1, 1, [])
        policy.run(3)
        await a.agent.prepare_seal(POLICY, 1, 3)
        leave = signed(FilesTicket(POLICY, 1, ["b"]), SECRET)
        replicas = {NodeId("b"): await b.endpoint()}
        await a.agent.write_seal(
            *(POLICY, 1, 3, []),
            durability=Durability.REMOTE,
            replicas=replicas,
            ticket=leave,
        )
        assert names(b) == ["seal-3.state"]


async def test_it_is_refused_with_the_numbers_when_host_memory_is_full(short_dir: Path) -> None:
    async with daemon(short_dir, host_bytes=SIZE + MiB) as d:
        policy = await start(d, POLICY, SIZE)
        await d.agent.switch_in(POLICY, 1, 1, [])
        policy.run(3)
        await d.agent.prepare_seal(POLICY, 1, 3)
        with pytest.raises(ResourceError) as caught:
            await d.agent.write_seal(POLICY, 1, 3, [], durability=Durability.HOST)
        assert caught.value.info.code is Code.RESOURCE_EXHAUSTED
        assert caught.value.info.details["budget_bytes"] == str(SIZE + MiB)


async def test_another_node_brings_it_to_its_disk(short_dir: Path) -> None:
    async with (
        daemon(short_dir / "a", NODE="a") as a,
        daemon(short_dir / "b", NODE="b") as b,
    ):
        policy = await sealed(a, 3)
        leave = signed(FilesTicket(POLICY, 1, ["b"]), SECRET)
        await b.agent.fetch_state(FetchState(POLICY, 3, [], [await a.endpoint()], leave))
        assert names(b) == ["seal-3.state"]
        restored = await start(b, POLICY, SIZE, incarnation=2, seal_seq=3)
        await b.agent.switch_in(POLICY, 2, 2, [])
        assert restored.digest() == policy.digest()
