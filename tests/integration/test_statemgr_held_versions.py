"""A version's memory as the host copy of samplers whose heaps are laid out otherwise."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.contract.state_agent import SharedCopyState, StatusReport
from phaseloom.common.contract.state_layout import Role, TensorSlot
from tests.support.readversions import load_version
from tests.support.statedaemon import (
    POLICY,
    SAMPLER,
    Daemon,
    Rank,
    daemon,
    flip_in_memory,
    open_memory,
    start,
)

KiB = 1024
SIZES = {"embed": 700 * KiB, "k_proj": 64, "o_proj": 11 * 1024 * KiB, "q_proj": 600 * KiB}
SIZE = sum(SIZES.values())
SAMPLER_SIZE = SIZE + 200 * KiB
OTHER = DeploymentKey("acme", "sums", "sampler-2")


def only(report: StatusReport) -> SharedCopyState:
    (copy,) = report.shared_copies
    return copy


def laid_out(names: list[str], gap_bytes: int = 0) -> list[TensorSlot]:
    """Slots of the tensors, in this order, with gaps in between."""
    slots, offset = [], 0
    for name in names:
        size = SIZES[name]
        slots.append(TensorSlot(name, Role.WEIGHT, "uint8", [size], offset, size))
        offset += size + gap_bytes
    return slots


def tensors(rank: Rank) -> dict[str, bytes]:
    memory = rank.heap.buffer
    return {s.name: bytes(memory[s.offset : s.offset + s.num_bytes]) for s in rank.slots}


async def started_sampler(d: Daemon, key: DeploymentKey = SAMPLER, incarnation: int = 1) -> Rank:
    """A sampler on its device, whose tensors are in another order than the policy's."""
    slots = laid_out(["o_proj", "q_proj", "k_proj", "embed"], 4 * KiB)
    sampler = await start(d, key, SAMPLER_SIZE, frozen=True, slots=slots, incarnation=incarnation)
    await d.agent.switch_in(key, incarnation, 1, [])
    sampler.heap.buffer[:] = bytes(SAMPLER_SIZE)  # between tensors there are zeroes
    sampler.seq += 1
    return sampler


async def started_policy(d: Daemon) -> Rank:
    policy = await start(d, POLICY, SIZE, slots=laid_out(list(SIZES)))
    await d.agent.switch_in(POLICY, 1, 1, [])
    return policy


async def sync(sampler: Rank, policy: Rank, seq: int) -> str:
    """Publish new weights and bring them to the sampler. Returns: the digest of its heap."""
    policy.run(seq)
    version = VersionKey(POLICY, seq)
    await policy.client.versions.create(version, policy.slots)
    await load_version(sampler.client, version, [], sampler.slots)
    await sampler.client.versions.hold(version, seq)
    sampler.seq = seq
    assert tensors(sampler) == tensors(policy)
    return sampler.digest()


async def visit(d: Daemon, rank: Rank, key: DeploymentKey, epoch: int, incarnation: int = 1) -> str:
    """Switch it in and out again. Returns: the digest of its heap meanwhile."""
    await d.agent.switch_in(key, incarnation, epoch, [])
    held = rank.digest()
    await d.agent.switch_out(key, incarnation, epoch)
    return held


async def test_sampler_in_another_layout_is_not_copied_out(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[2 * SAMPLER_SIZE]) as d:
        sampler, policy = await started_sampler(d), await started_policy(d)
        for seq in (2, 3):  # two syncs in a row
            held = await sync(sampler, policy, seq)
        copies = open_memory(d.pid, f"the host copy of {SAMPLER}")
        await d.agent.switch_out(SAMPLER, 1, 2)
        assert sampler.heap.resident_bytes() == 0
        assert open_memory(d.pid, f"the host copy of {SAMPLER}").keys() <= copies.keys()
        copy = only(await d.agent.status())
        assert (copy.version, copy.num_bytes) == (VersionKey(POLICY, 3), SIZE)
        assert await visit(d, sampler, SAMPLER, 3) == held
        assert await visit(d, sampler, SAMPLER, 4) == held


async def test_weights_stay_when_the_version_is_dropped_and_the_daemon_killed(
    short_dir: Path,
) -> None:
    async with daemon(short_dir, devices=[2 * SAMPLER_SIZE]) as d:
        sampler, policy = await started_sampler(d), await started_policy(d)
        held = await sync(sampler, policy, 2)
        await d.relaunch()  # while it is on its device
        await d.agent.drop_versions([VersionKey(POLICY, 2)])
        await d.agent.switch_out(SAMPLER, 1, 2)
        await d.relaunch()  # while it is not
        assert await visit(d, sampler, SAMPLER, 3) == held


@pytest.mark.parametrize("moment", ["hold", "offload", "seal", "load"])
async def test_weights_stay_when_the_daemon_dies_in(moment: str, short_dir: Path) -> None:
    async with daemon(short_dir, devices=[2 * SAMPLER_SIZE]) as d:
        sampler, policy = await started_sampler(d), await started_policy(d)
        loop, dead = asyncio.get_running_loop(), asyncio.Event()

        def die() -> None:
            sampler.on_copy = sampler.on_loaded = lambda: None
            os.kill(d.pid, signal.SIGKILL)
            loop.call_soon_threadsafe(dead.set)

        async def survived(name: str, work: Coroutine[Any, Any, Any]) -> None:
            """Do the work. At its moment the daemon dies in it, and the next one completes it."""
            doing = asyncio.ensure_future(work)
            if name == moment:
                await dead.wait()
                await d.relaunch()
            await doing

        policy.run(2)
        version = VersionKey(POLICY, 2)
        await policy.client.versions.create(version, policy.slots)
        await load_version(sampler.client, version, [], sampler.slots)
        if moment == "hold":
            die()
        await survived("hold", sampler.client.versions.hold(version, 2))
        sampler.seq, held = 2, sampler.digest()
        if moment == "offload":
            sampler.on_copy = die
        await survived("offload", d.agent.switch_out(SAMPLER, 1, 2))
        assert sampler.heap.resident_bytes() == 0
        if moment == "seal":
            sampler.on_copy = die
            await survived("seal", d.agent.prepare_seal(SAMPLER, 1, 2))
            await d.agent.write_seal(SAMPLER, 1, 2, [])
            await d.relaunch()  # the seal's copy is the host copy now
        if moment == "load":
            sampler.on_loaded = die
        await survived("load", d.agent.switch_in(SAMPLER, 1, 3, []))
        assert sampler.digest() == held
        await d.agent.switch_out(SAMPLER, 1, 3)
        assert await visit(d, sampler, SAMPLER, 4) == held


@pytest.mark.parametrize("is_dropped", [True, False])
async def test_weights_go_to_nvme_and_come_back(short_dir: Path, is_dropped: bool) -> None:
    host_bytes = 2 * SAMPLER_SIZE + SIZE
    async with daemon(short_dir, devices=[2 * SAMPLER_SIZE], host_bytes=host_bytes) as d:
        sampler, policy = await started_sampler(d), await started_policy(d)
        held = await sync(sampler, policy, 2)
        await d.agent.switch_out(SAMPLER, 1, 2)
        if is_dropped:
            await d.agent.drop_versions([VersionKey(POLICY, 2)])
        await start(d, OTHER, SAMPLER_SIZE, frozen=True)
        await start(d, DeploymentKey("acme", "sums", "third"), SIZE)
        assert (await d.agent.status()).nvme_used_bytes >= SIZE
        await d.relaunch()
        await d.agent.drop_wpg(OTHER, 1)
        assert await visit(d, sampler, SAMPLER, 3) == held


async def test_corrupt_version_is_never_loaded(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[2 * SAMPLER_SIZE]) as d:
        sampler, policy = await started_sampler(d), await started_policy(d)
        await sync(sampler, policy, 2)
        await d.agent.switch_out(SAMPLER, 1, 2)
        flip_in_memory(d.pid, f"version {VersionKey(POLICY, 2)}")
        with pytest.raises(ResourceError) as caught:
            await d.agent.switch_in(SAMPLER, 1, 3, [])
        assert caught.value.info.code is Code.DATA_LOSS
        assert not sampler.heap.resident_bytes()


@pytest.mark.parametrize("is_resident", [True, False])
async def test_seal_has_the_layout_of_the_heap(short_dir: Path, is_resident: bool) -> None:
    async with daemon(short_dir, devices=[2 * SAMPLER_SIZE]) as d:
        sampler, policy = await started_sampler(d), await started_policy(d)
        held = await sync(sampler, policy, 2)
        if not is_resident:
            await d.agent.switch_out(SAMPLER, 1, 2)
        await d.agent.prepare_seal(SAMPLER, 1, 2)
        await d.agent.write_seal(SAMPLER, 1, 2, [])
        if is_resident:
            await d.agent.switch_out(SAMPLER, 1, 2)
        assert await visit(d, sampler, SAMPLER, 3) == held
        reborn = await start(
            *(d, SAMPLER, SAMPLER_SIZE),
            frozen=True,
            slots=sampler.slots,
            incarnation=2,
            seal_seq=2,
        )
        assert await visit(d, reborn, SAMPLER, 4, 2) == held


async def test_checkpoint_of_an_offloaded_sampler_has_its_weights(short_dir: Path) -> None:
    root = str(short_dir / "checkpoints")
    async with daemon(short_dir, devices=[2 * SAMPLER_SIZE], CHECKPOINT_ROOT=root) as d:
        sampler, policy = await started_sampler(d), await started_policy(d)
        await sync(sampler, policy, 2)
        sha256 = set()
        for name in ("resident", "offloaded"):
            await sampler.client.take_snapshot(name, name, 2)
            sha256.add(await sampler.client.write_checkpoint(name, name, "{}", 0))
            await d.agent.switch_out(SAMPLER, 1, 2)
        assert len(sha256) == 1


async def test_load_state_after_a_sync_is_copied_out(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[2 * SAMPLER_SIZE]) as d:
        sampler, policy = await started_sampler(d), await started_policy(d)
        await sync(sampler, policy, 2)
        loaded = sampler.run(3)
        await d.agent.switch_out(SAMPLER, 1, 2)
        assert await visit(d, sampler, SAMPLER, 3) == loaded
        copy = only(await d.agent.status())
        assert copy.version is None


async def test_bytes_between_tensors_come_back(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[2 * SAMPLER_SIZE]) as d:
        sampler, policy = await started_sampler(d), await started_policy(d)
        sampler.heap.buffer[-1] = 1
        held = await sync(sampler, policy, 2)
        await d.agent.switch_out(SAMPLER, 1, 2)
        assert only(await d.agent.status()).version == VersionKey(POLICY, 2)
        assert await visit(d, sampler, SAMPLER, 3) == held


async def test_samplers_of_two_layouts_hold_the_memory_of_one_version(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[3 * SAMPLER_SIZE]) as d:
        sampler, policy = await started_sampler(d), await started_policy(d)
        same = await start(d, OTHER, SIZE, frozen=True, slots=policy.slots)
        await d.agent.switch_in(OTHER, 1, 1, [])
        held = await sync(same, policy, 2), await sync(sampler, policy, 2)
        for key in (SAMPLER, OTHER):
            await d.agent.switch_out(key, 1, 2)
        report = await d.agent.status()
        copy = only(report)
        assert copy.users == [str(SAMPLER), str(OTHER)]
        assert report.held_bytes == 2 * SIZE  # the policy's copy and the version
        assert held == (await visit(d, same, OTHER, 3), await visit(d, sampler, SAMPLER, 3))
