"""State that lives in host memory alone, and device memory that pins its host copy."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec import structs

from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.contract.state_layout import Role, TensorSlot, host_start
from phaseloom.common.contract.state_rank import OpenOnDevice, ShareOnDevice
from phaseloom.worker.cuda.memory import CudaHeap
from phaseloom.worker.state.client import RankStateClient
from phaseloom.worker.state.devicememory import DeviceMemory
from phaseloom.worker.state.heap import Heap
from tests.support.emulatedcuda import EmulatedDriver
from tests.support.readversions import load_version
from tests.support.statedaemon import OTHER, POLICY, SAMPLER, Daemon, MiB, daemon, start

HEAP = MiB + 64
HOST = 2 * MiB
EXTENT = host_start(HEAP) + HOST


@dataclass
class Learner:
    """A rank in this process whose optimizer state, `HOST` bytes, is in host memory."""

    memory: DeviceMemory = field(default_factory=lambda: Heap(HEAP))
    host_bytes: int = HOST
    seq: int = 0

    def __post_init__(self) -> None:
        self.client: RankStateClient

    async def join(self, d: Daemon, key: DeploymentKey, incarnation: int, seal_seq: int) -> None:
        token = f"learner {key} {incarnation}"
        await d.agent.register_wpg([token], key, incarnation, [0], seal_seq)
        self.client = await RankStateClient.connect(
            d.socket, token, applied=lambda: self.seq, on_loaded=lambda: None
        )
        d.ranks.append(self.client)
        slots = [TensorSlot("w", Role.WEIGHT, "uint8", [HEAP], 0, HEAP)]
        if self.host_bytes:
            start = host_start(HEAP)
            slots.append(TensorSlot("m", Role.OPTIMIZER, "uint8", [HOST], start, HOST))
        self.seq = await self.client.register_heap(self.memory, slots, self.host_bytes)
        if not self.seq:
            await self.client.commit_initial()

    @property
    def buffer(self) -> memoryview:
        assert isinstance(self.memory, Heap)
        return self.memory.buffer

    def step(self, seq: int) -> tuple[bytes, bytes]:
        """A mutating operation; the state that it leaves."""
        self.buffer[:] = os.urandom(HEAP)
        self.client.host_memory[:] = os.urandom(HOST)
        self.seq = seq
        return self.state()

    def state(self) -> tuple[bytes, bytes]:
        return bytes(self.buffer), bytes(self.client.host_memory)


async def learner(
    d: Daemon, key: DeploymentKey = POLICY, incarnation: int = 1, seal_seq: int = 0
) -> Learner:
    running = Learner()
    await running.join(d, key, incarnation, seal_seq)
    return running


async def test_switch_moves_the_heap_only_and_accounts_for_the_rest(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[HEAP]) as d:
        rank = await learner(d)
        assert not any(rank.client.host_memory)
        assert (await d.agent.switch_in(POLICY, 1, 1, [])).bytes_in == HEAP
        state = rank.step(1)
        assert (await d.agent.switch_out(POLICY, 1, 1)).bytes_out == HEAP
        assert rank.memory.resident_bytes() == 0
        status = await d.agent.status()
        (described,) = status.deployments
        assert (described.heap_bytes, described.host_only_bytes) == (HEAP, HOST)
        assert described.host_bytes == EXTENT <= status.host_used_bytes
        await d.agent.switch_in(POLICY, 1, 2, [])
        assert rank.state() == state
        assert (await d.agent.status()).device_used_bytes == [HEAP]


async def test_seal_has_what_was_there_when_it_was_prepared(short_dir: Path) -> None:
    """The optimizer works on in the very memory that is being sealed."""
    async with daemon(short_dir) as d:
        rank = await learner(d)
        await d.agent.switch_in(POLICY, 1, 1, [])
        sealed = rank.step(3)
        before = (await d.agent.status()).host_used_bytes
        await d.agent.prepare_seal(POLICY, 1, 3)
        assert (await d.agent.status()).host_used_bytes == before + HOST
        rank.step(4)
        written = await d.agent.write_seal(POLICY, 1, 3, [])
        assert written.num_bytes == EXTENT
        assert (await d.agent.status()).host_used_bytes == before
        reborn = await learner(d, incarnation=2, seal_seq=3)
        assert reborn.seq == 3
        await d.agent.switch_in(POLICY, 2, 2, [])
        assert reborn.state() == sealed


async def test_seal_of_an_offloaded_deployment_stands_while_it_runs_again(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        rank = await learner(d)
        await d.agent.switch_in(POLICY, 1, 1, [])
        sealed = rank.step(3)
        await d.agent.switch_out(POLICY, 1, 1)
        await d.agent.prepare_seal(POLICY, 1, 3)
        await d.agent.switch_in(POLICY, 1, 2, [])
        rank.step(4)
        await d.agent.write_seal(POLICY, 1, 3, [])
        reborn = await learner(d, incarnation=2, seal_seq=3)
        await d.agent.switch_in(POLICY, 2, 3, [])
        assert reborn.state() == sealed


async def test_seal_that_has_no_room_for_the_snapshot_is_refused_and_harms_nobody(
    short_dir: Path,
) -> None:
    async with daemon(short_dir, host_bytes=EXTENT + HOST // 2) as d:
        rank = await learner(d)
        await d.agent.switch_in(POLICY, 1, 1, [])
        state = rank.step(1)
        with pytest.raises(ResourceError, match=r"seal of .* needs 2097152 bytes") as refused:
            await d.agent.prepare_seal(POLICY, 1, 1)
        assert refused.value.info.code is Code.RESOURCE_EXHAUSTED
        await d.agent.switch_out(POLICY, 1, 1)
        await d.agent.switch_in(POLICY, 1, 2, [])
        assert rank.state() == state


async def test_state_goes_to_nvme_and_back_as_one(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[4 * MiB], host_bytes=EXTENT + MiB) as d:
        rank = await learner(d)
        await d.agent.switch_in(POLICY, 1, 1, [])
        state = rank.step(1)
        # What is in use stays: there is no room for more.
        with pytest.raises(ResourceError, match="nothing more can go to NVMe"):
            await rank.client.loans.borrow(2 * MiB, "other weights")
        await d.agent.switch_out(POLICY, 1, 1)
        other = await start(d, OTHER, 2 * MiB, incarnation=2)
        described = {s.deployment: s for s in (await d.agent.status()).deployments}[POLICY]
        assert (described.nvme_bytes, described.host_bytes) == (EXTENT, 0)
        assert not any(rank.client.host_memory)
        await other.client.close()
        await d.agent.drop_wpg(OTHER, 2)
        await d.agent.switch_in(POLICY, 1, 2, [])
        assert rank.state() == state


async def test_daemon_is_killed_while_the_rank_works_on_in_host_memory(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        rank = await learner(d)
        await d.agent.switch_in(POLICY, 1, 1, [])
        rank.step(1)
        await d.agent.prepare_seal(POLICY, 1, 1)
        state = rank.step(2)
        await d.relaunch()
        # What the seal was prepared from is gone with the daemon, and it must not be made of more.
        with pytest.raises(CallerError, match=r"no seal of .* is prepared at 1"):
            await d.agent.write_seal(POLICY, 1, 1, [])
        assert rank.state() == state
        await d.agent.switch_out(POLICY, 1, 1)
        await d.relaunch()
        await d.agent.switch_in(POLICY, 1, 2, [])
        assert rank.state() == state
        await d.agent.prepare_seal(POLICY, 1, 2)
        await d.agent.write_seal(POLICY, 1, 2, [])
        reborn = await learner(d, incarnation=2, seal_seq=2)
        await d.agent.switch_in(POLICY, 2, 3, [])
        assert reborn.state() == state


async def test_host_memory_that_went_bad_is_never_run_on(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        rank = await learner(d)
        await d.agent.switch_in(POLICY, 1, 1, [])
        rank.step(1)
        await d.agent.switch_out(POLICY, 1, 1)
        await d.agent.prepare_seal(POLICY, 1, 1)
        await d.agent.write_seal(POLICY, 1, 1, [])
        rank.client.host_memory[HOST // 2] ^= 1
        with pytest.raises(ResourceError) as refused:
            await d.agent.switch_in(POLICY, 1, 2, [])
        assert refused.value.info.code is Code.DATA_LOSS


async def test_rank_with_another_host_part_cannot_take_the_seal(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        rank = await learner(d)
        await d.agent.switch_in(POLICY, 1, 1, [])
        rank.step(1)
        await d.agent.prepare_seal(POLICY, 1, 1)
        await d.agent.write_seal(POLICY, 1, 1, [])
        other = Learner(host_bytes=0)
        with pytest.raises(CallerError, match="has another layout"):
            await other.join(d, POLICY, 2, 1)


async def test_absurd_host_part_is_refused(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        with pytest.raises(CallerError) as refused:
            await Learner(host_bytes=-1).join(d, POLICY, 1, 0)
        assert refused.value.info.field == "host_bytes"
        with pytest.raises(ResourceError, match=r"needs .* bytes of host memory"):
            await Learner(host_bytes=2**50).join(d, OTHER, 1, 0)


async def test_pinned_host_copy_is_let_go_before_its_memory_is_given_back(
    short_dir: Path,
) -> None:
    """Pages that a device holds stay with it: it would go on reading those of before."""
    async with daemon(short_dir, devices=[4 * MiB], host_bytes=3 * MiB) as d:
        driver = EmulatedDriver()
        heap = CudaHeap(HEAP, driver)
        rank = Learner(heap, host_bytes=0)
        await rank.join(d, POLICY, 1, 0)
        assert len(driver.pinned) == 1
        assert rank.memory.resident_bytes() == 0
        await d.agent.switch_in(POLICY, 1, 1, [])
        address = heap.address
        assert driver.bytes_at(address, HEAP) == bytes(HEAP)
        content = os.urandom(HEAP)
        heap.copy_in(memoryview(bytearray(content)))
        rank.seq = 1
        await d.agent.switch_out(POLICY, 1, 1)
        assert (len(driver.pinned), driver.num_pins) == (1, 1)
        other = await start(d, OTHER, 2 * MiB)
        assert (driver.pinned, heap.unpinned_because) == ({}, "it was unpinned")
        await other.client.close()
        await d.agent.drop_wpg(OTHER, 1)
        await d.agent.switch_in(POLICY, 1, 2, [])
        assert driver.bytes_at(address, HEAP) == content
        assert (heap.address, len(driver.pinned), driver.num_pins) == (address, 1, 2)


async def gpu_ranks(
    d: Daemon, driver: EmulatedDriver
) -> tuple[tuple[CudaHeap, RankStateClient], tuple[CudaHeap, RankStateClient]]:
    """A policy and a sampler of its job, both on the device, and their heaps."""
    pair = []
    for key in (POLICY, SAMPLER):
        heap = CudaHeap(HEAP, driver)
        rank = Learner(heap, host_bytes=0)
        await rank.join(d, key, 1, 0)
        await d.agent.switch_in(key, 1, 1, [])
        pair.append((heap, rank.client))
    return pair[0], pair[1]


SLOTS = [TensorSlot("a", Role.WEIGHT, "uint8", [MiB], 0, MiB)]
VERSION = VersionKey(POLICY, 1)


async def test_version_goes_from_device_to_device_without_the_host(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[8 * MiB]) as d:
        driver = EmulatedDriver()
        (source, policy), (target, sampler) = await gpu_ranks(d, driver)
        content = os.urandom(HEAP)
        source.copy_in(memoryview(bytearray(content)))
        before = driver.num_bytes_in, driver.free_bytes()
        made = await policy.versions.create(VERSION, SLOTS)
        assert await load_version(sampler, VERSION, [], SLOTS) == made.digest
        assert driver.bytes_at(target.address, MiB) == content[:MiB]
        assert driver.num_bytes_in == before[0], "the host's copy was used"
        # What is shared is a version: the policy goes on.
        source.copy_in(memory_of(HEAP))
        await load_version(sampler, VERSION, [], SLOTS)
        assert driver.bytes_at(target.address, MiB) == content[:MiB]


async def test_version_on_a_device_goes_when_a_deployment_needs_the_room(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[4 * MiB]) as d:
        driver = EmulatedDriver()
        (source, policy), (target, sampler) = await gpu_ranks(d, driver)
        source.copy_in(memory_of(HEAP, 7))
        await policy.versions.create(VERSION, SLOTS)
        await start(d, OTHER, 3 * MiB // 2)
        await d.agent.switch_in(OTHER, 1, 2, [])
        used = driver.num_bytes_in
        await load_version(sampler, VERSION, [], SLOTS)
        assert driver.num_bytes_in == used + MiB
        assert driver.bytes_at(target.address, MiB) == b"\x07" * MiB


async def test_version_on_a_device_stays_beside_what_comes_in_place_of_another(
    short_dir: Path,
) -> None:
    async with daemon(short_dir, devices=[2 * HEAP + MiB]) as d:
        driver = EmulatedDriver()
        (source, policy), (target, sampler) = await gpu_ranks(d, driver)
        source.copy_in(memory_of(HEAP, 7))
        await policy.versions.create(VERSION, SLOTS)
        await start(d, OTHER, HEAP)
        await d.agent.switch_in(OTHER, 1, 2, [SAMPLER])
        await d.agent.switch_in(SAMPLER, 1, 3, [OTHER])
        used = driver.num_bytes_in
        await load_version(sampler, VERSION, [], SLOTS)
        assert driver.num_bytes_in == used
        assert driver.bytes_at(target.address, MiB) == b"\x07" * MiB


async def test_version_on_a_device_is_of_its_policy_and_its_tenant_alone(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[8 * MiB]) as d:
        driver = EmulatedDriver()
        (_, policy), _ = await gpu_ranks(d, driver)
        await policy.versions.create(VERSION, SLOTS)
        stranger = Learner(CudaHeap(HEAP, driver), host_bytes=0)
        await stranger.join(d, structs.replace(OTHER, tenant="stranger"), 1, 0)
        with pytest.raises(CallerError) as refused:
            await stranger.client._link.call(OpenOnDevice(VERSION))
        assert refused.value.info.code is Code.PERMISSION_DENIED
        fd = os.memfd_create("of no use")
        with pytest.raises(CallerError) as refused:
            await stranger.client._link.call(ShareOnDevice(VERSION), [fd])
        assert refused.value.info.code is Code.PERMISSION_DENIED
        with pytest.raises(CallerError) as refused:
            await policy._link.call(ShareOnDevice(VersionKey(POLICY, 9)), [fd])
        assert refused.value.info.code is Code.NOT_FOUND
        os.close(fd)


async def test_version_that_cannot_be_shared_on_its_device_is_committed_all_the_same(
    short_dir: Path,
) -> None:
    async with daemon(short_dir, devices=[8 * MiB]) as d:
        (_, policy), (_, sampler) = await gpu_ranks(d, EmulatedDriver())
        await policy.versions.create(VERSION, SLOTS)
        await d.agent.drop_versions([VERSION])  # between its commit and what is said here
        await policy.versions._share_on_device(VERSION, MiB, [(SLOTS[0], SLOTS[0])])
        again = structs.replace(VERSION, seq=2)
        await policy.versions.create(again, SLOTS)
        await load_version(sampler, again, [], SLOTS)


async def test_version_is_read_from_the_host_where_the_daemon_that_kept_it_was_killed(
    short_dir: Path,
) -> None:
    async with daemon(short_dir, devices=[8 * MiB]) as d:
        driver = EmulatedDriver()
        (source, policy), (target, sampler) = await gpu_ranks(d, driver)
        source.copy_in(memory_of(HEAP, 5))
        await policy.versions.create(VERSION, SLOTS)
        await d.relaunch()
        await load_version(sampler, VERSION, [], SLOTS)
        assert driver.bytes_at(target.address, MiB) == b"\x05" * MiB


def memory_of(num_bytes: int, value: int = 0) -> memoryview:
    return memoryview(bytearray([value]) * num_bytes)
