"""Heaps that go straight to NVMe and back, where host memory is smaller than the state."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from phaseloom.common.contract.errors import Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.tensors.blockhash import BLOCK_BYTES
from tests.integration.test_statemgr_tiers import flip, kill_while, small_disk, tiers
from tests.support.statedaemon import (
    OTHER,
    POLICY,
    SAMPLER,
    Daemon,
    MiB,
    Rank,
    child,
    daemon,
    names,
    start,
    start_ranks,
)

SIZE = BLOCK_BYTES + MiB + 64
"""More than a block, and no whole number of pages."""
LARGE = 96 * MiB
HOST = MiB


async def ran(d: Daemon, key: DeploymentKey, seq: int, *, size: int = SIZE) -> tuple[Rank, str]:
    """A deployment on its device that has run once, and the digest of its state."""
    rank = await start(d, key, size)
    await d.agent.switch_in(key, 1, seq, [])
    return rank, rank.run(seq)


async def test_deployments_larger_than_host_memory_share_a_device(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[SIZE + MiB], host_bytes=HOST) as d:
        ranks = {POLICY: await start(d, POLICY, SIZE), OTHER: await start(d, OTHER, SIZE)}
        assert set((await tiers(d)).values()) == {"nvme"}
        assert names(d) == ["copy-1.state", "copy-2.state"]
        contents: dict[DeploymentKey, str] = {}
        for seq in range(1, 5):
            key, leaving = (POLICY, OTHER) if seq % 2 else (OTHER, POLICY)
            switched = await d.agent.switch_in(key, 1, seq, [leaving])
            assert (switched.bytes_out, switched.bytes_in) == (SIZE if seq > 1 else 0, SIZE)
            rank = ranks[key]
            if key in contents:
                assert rank.digest() == contents[key]
            contents[key] = rank.run(seq)
            report = await d.agent.status()
            assert report.host_used_bytes == 0
            for state in report.deployments:
                assert "leaves straight between the device and NVMe, enters straight" in state.way
                assert f"{SIZE} bytes, host memory has {HOST} bytes free" in state.way
            assert (await tiers(d))[leaving] == "nvme"
        await d.agent.switch_out(OTHER, 1, 5)
        assert (await d.agent.status()).device_used_bytes == [0]
        assert ranks[OTHER].heap.resident_bytes() == 0
        await d.agent.switch_in(POLICY, 1, 6, [])
        assert ranks[POLICY].digest() == contents[POLICY]
        assert names(d) == ["copy-1.state", "copy-2.state"]


async def test_heap_goes_through_host_memory_once_that_has_room(short_dir: Path) -> None:
    """The file of the copy that was on NVMe goes, and the next load comes from memory."""
    async with daemon(short_dir, devices=[4 * SIZE], host_bytes=SIZE + MiB) as d:
        small, _ = await ran(d, SAMPLER, 1)
        policy, _ = await ran(d, POLICY, 2)
        content = policy.run(3)
        assert (await tiers(d))[POLICY] == "device"
        await small.client.close()
        await d.agent.drop_wpg(SAMPLER, 1, forget=True)
        await d.agent.switch_out(POLICY, 1, 4)
        assert (await tiers(d))[POLICY] == "host"
        assert names(d) == []
        await d.agent.switch_in(POLICY, 1, 5, [])
        assert policy.digest() == content
        (state,) = (await d.agent.status()).deployments
        assert state.way == "leaves and enters through host memory"


async def test_ranks_of_one_deployment_go_straight_where_they_do_not_fit(short_dir: Path) -> None:
    devices = [SIZE, SIZE]
    async with daemon(short_dir, devices=devices, host_bytes=SIZE + MiB) as d:
        ranks = await start_ranks(d, POLICY, [SIZE, SIZE])
        await d.agent.switch_in(POLICY, 1, 1, [])
        contents = [rank.run(1) for rank in ranks]
        await d.agent.switch_out(POLICY, 1, 2)
        (state,) = (await d.agent.status()).deployments
        assert state.nvme_bytes == state.host_bytes == SIZE
        await d.agent.switch_in(POLICY, 1, 3, [])
        assert [rank.digest() for rank in ranks] == contents


async def test_frozen_heaps_are_loaded_straight_and_written_only_if_they_change(
    short_dir: Path,
) -> None:
    async with daemon(short_dir, devices=[2 * SIZE], host_bytes=HOST) as d:
        rank = await start(d, SAMPLER, SIZE, frozen=True, content=3)
        await d.agent.switch_in(SAMPLER, 1, 1, [])
        first, files = rank.digest(), names(d)
        switched = await d.agent.switch_out(SAMPLER, 1, 2)
        assert switched.displaced == [SAMPLER]
        assert names(d) == files
        await d.agent.switch_in(SAMPLER, 1, 3, [])
        assert rank.digest() == first
        content = rank.run(4)
        await d.agent.switch_out(SAMPLER, 1, 5)
        assert len(names(d)) == 1
        assert names(d) != files
        await d.agent.switch_in(SAMPLER, 1, 6, [])
        assert rank.digest() == content
        assert (await d.agent.status()).host_used_bytes == 0


async def test_seal_is_written_from_the_file_and_restored_to_one(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[2 * SIZE], host_bytes=HOST) as d:
        rank, content = await ran(d, POLICY, 1)
        await d.agent.prepare_seal(POLICY, 1, 1)
        later = rank.run(2)
        sealed = await d.agent.write_seal(POLICY, 1, 1, [])
        assert sealed.digest == content
        await d.agent.switch_out(POLICY, 1, 2)
        await d.agent.prepare_seal(POLICY, 1, 2)
        # Loaded while the seal is still to be written from the same file.
        await d.agent.switch_in(POLICY, 1, 3, [])
        assert rank.digest() == later
        assert (await d.agent.write_seal(POLICY, 1, 2, [])).digest == later
        await rank.client.close()
        again = await start(d, POLICY, SIZE, incarnation=2, seal_seq=2)
        assert again.seq == 2
        await d.agent.switch_in(POLICY, 2, 4, [])
        assert again.digest() == later
        assert (await d.agent.status()).host_used_bytes == 0


async def test_checkpoint_needs_host_memory_and_says_so(short_dir: Path) -> None:
    root = short_dir / "checkpoints"
    async with daemon(short_dir, devices=[SIZE], host_bytes=HOST, CHECKPOINT_ROOT=str(root)) as d:
        rank, content = await ran(d, POLICY, 1)
        with pytest.raises(ResourceError, match="bytes of host memory") as caught:
            await rank.client.take_snapshot("op", "one", 1)
        assert caught.value.info.code is Code.RESOURCE_EXHAUSTED
        assert rank.digest() == content


async def test_full_disk_leaves_the_heap_on_its_device(short_dir: Path) -> None:
    disk = short_dir / "disk"
    with small_disk(disk, 3 * SIZE):
        async with daemon(short_dir, devices=[2 * SIZE], host_bytes=HOST, DIRECTORY=str(disk)) as d:
            rank, content = await ran(d, POLICY, 1)
            (disk / "something else").write_bytes(bytes(SIZE + SIZE // 2))
            with pytest.raises(ResourceError, match="No space left") as caught:
                await d.agent.switch_out(POLICY, 1, 2)
            assert caught.value.info.code is Code.RESOURCE_EXHAUSTED
            assert (await tiers(d))[POLICY] == "device"
            assert not list(disk.rglob("*.partial"))
            assert rank.digest() == content
            (disk / "something else").unlink()
            await d.agent.switch_out(POLICY, 1, 3)
            await d.agent.switch_in(POLICY, 1, 4, [])
            assert rank.digest() == content


async def test_budget_of_nvme_refuses_with_the_numbers(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[SIZE], host_bytes=HOST, NVME_BYTES=str(SIZE + MiB)) as d:
        await ran(d, POLICY, 1)
        with pytest.raises(ResourceError, match=f"where {SIZE} of {SIZE + MiB} are in use"):
            await start(d, OTHER, SIZE)


@pytest.mark.parametrize("damage", ["a flipped bit", "a torn file"])
async def test_damaged_file_is_named_and_ends_the_incarnation(short_dir: Path, damage: str) -> None:
    async with daemon(short_dir, devices=[SIZE], host_bytes=HOST) as d:
        rank, _ = await ran(d, POLICY, 1)
        await d.agent.switch_out(POLICY, 1, 2)
        (path,) = d.files.rglob("copy-*.state")
        if "bit" in damage:
            flip(path)
        else:
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size - 1000)
        with pytest.raises(PhaseloomError, match=r"copy-1.state: .*\(w\): ") as caught:
            await d.agent.switch_in(POLICY, 1, 3, [])
        assert caught.value.info.code is Code.DATA_LOSS
        await rank.client.closed
        assert (await d.agent.status()).deployments == []


# --- kills ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["being written", "in place"])
async def test_kill_while_the_heap_is_written_loses_nothing(short_dir: Path, moment: str) -> None:
    async with daemon(short_dir, devices=[LARGE], host_bytes=HOST) as d:
        rank, content = await ran(d, POLICY, 1, size=LARGE)
        (file,) = d.files.rglob("copy-1.state")
        before = file.stat().st_ino

        def is_reached() -> bool:
            # Who looks late finds the new file, and no half-written one.
            is_replaced = file.stat().st_ino != before
            return is_replaced or (moment != "in place" and bool([*d.files.rglob("*.partial")]))

        leaving = asyncio.create_task(d.agent.switch_out(POLICY, 1, 2))
        await kill_while(d, is_reached)
        await leaving  # asked again, it completes
        assert await tiers(d) == {POLICY: "nvme"}
        assert names(d) == ["copy-1.state"]
        for _ in range(2):
            await d.relaunch()
        await d.agent.switch_in(POLICY, 1, 3, [])
        assert rank.digest() == content


@pytest.mark.parametrize("frozen", [False, True])
async def test_kill_while_the_initial_state_is_written_loses_nothing(
    short_dir: Path, frozen: bool
) -> None:
    async with daemon(short_dir, devices=[LARGE], host_bytes=HOST) as d:
        starting = asyncio.create_task(start(d, POLICY, LARGE, frozen=frozen, content=5))
        await kill_while(d, lambda: bool([*d.files.rglob("copy-*")]))
        rank = await starting
        await d.agent.switch_in(POLICY, 1, 1, [])
        expected = Rank(rank.heap, rank.slots)
        assert rank.digest() == expected.run(5)
        assert len(names(d)) == 1


async def test_kill_while_the_heap_is_loaded_leaves_the_file(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[LARGE], host_bytes=HOST) as d:
        rank, content = await ran(d, POLICY, 1, size=LARGE)
        await d.agent.switch_out(POLICY, 1, 2)
        entering = asyncio.create_task(d.agent.switch_in(POLICY, 1, 3, []))
        await kill_while(d, lambda: rank.heap.resident_bytes() > 0)
        await entering
        assert rank.digest() == content


async def test_rank_that_dies_while_it_writes_leaves_no_half_file(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[LARGE], host_bytes=HOST) as d:
        async with child(d, POLICY, LARGE) as running:
            await d.agent.switch_in(POLICY, 1, 1, [])
            await running.ask("fill 1")
            leaving = asyncio.create_task(d.agent.switch_out(POLICY, 1, 2))

            def begins() -> None:
                while not [*d.files.rglob("*.partial")] and not leaving.done():
                    pass

            await asyncio.to_thread(begins)
            running.process.kill()
            await asyncio.wait([leaving])
        while (await d.agent.status()).deployments:
            pass
        while names(d):
            await d.agent.status()
