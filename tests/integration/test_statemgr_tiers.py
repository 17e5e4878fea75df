"""Host memory and NVMe: what goes down, what comes up, and what a kill in between leaves."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phaseloom.common.contract.errors import Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.contract.state_agent import DeploymentState, DiskMethod
from phaseloom.common.tensors.blockhash import digest_of
from phaseloom.statemgr.disk.disk import probe
from tests.support.meshcerts import certificates
from tests.support.readversions import load_version, open_version
from tests.support.statedaemon import (
    OTHER,
    POLICY,
    SAMPLER,
    Daemon,
    MiB,
    Rank,
    daemon,
    names,
    real_memory,
    start,
    start_ranks,
    taken,
)
from tests.support.statefiles import PREFERRED

FOURTH = DeploymentKey("acme", "letters", "sampler")
SIZE = 2 * MiB


async def tiers(d: Daemon) -> dict[DeploymentKey, str]:
    """Of those that have a heap."""

    def tier(state: DeploymentState) -> str:
        if state.device_bytes:
            return "device"
        return "nvme" if state.nvme_bytes == state.heap_bytes else "host"

    states = (await d.agent.status()).deployments
    return {state.deployment: tier(state) for state in states if state.heap_bytes}


async def until(d: Daemon, key: DeploymentKey, tier: str) -> None:
    while (await tiers(d))[key] != tier:
        pass


async def filled(
    d: Daemon, key: DeploymentKey, seq: int, num_bytes: int = SIZE
) -> tuple[Rank, str]:
    """A deployment that has run once and is offloaded, and the digest of its state."""
    rank = await start(d, key, num_bytes)
    await d.agent.switch_in(key, 1, seq, [])
    content = rank.run(seq)
    await d.agent.switch_out(key, 1, seq)
    return rank, content


def memory_of(d: Daemon) -> int:
    """Bytes that its host copies really take."""
    return sum(real_memory(d.pid).values())


async def test_least_recently_used_copy_goes_down_and_comes_back_bit_equal(short_dir: Path) -> None:
    async with daemon(short_dir, host_bytes=5 * MiB) as d:
        first, first_content = await filled(d, POLICY, 1)
        second, second_content = await filled(d, OTHER, 2)
        third, third_content = await filled(d, SAMPLER, 3)
        assert await tiers(d) == {POLICY: "nvme", OTHER: "host", SAMPLER: "host"}
        assert names(d) == ["copy-1.state"]
        status = await d.agent.status()
        assert (status.nvme_used_bytes, status.host_used_bytes) == (SIZE, 2 * SIZE)
        assert status.disk == probe(short_dir, PREFERRED)
        assert status.disk.method in set(DiskMethod)
        await taken(d, 2 * SIZE)
        for seq, (key, rank, content) in enumerate(
            [
                (POLICY, first, first_content),
                (OTHER, second, second_content),
                (SAMPLER, third, third_content),
            ],
            start=4,
        ):
            await d.agent.switch_in(key, 1, seq, [])
            assert rank.digest() == content
            await d.agent.switch_out(key, 1, seq)
        assert await tiers(d) == {POLICY: "nvme", OTHER: "host", SAMPLER: "host"}
        await taken(d, 2 * SIZE)


async def test_switch_out_of_what_is_on_nvme_moves_nothing_and_needs_no_room(
    short_dir: Path,
) -> None:
    async with daemon(short_dir, devices=[2 * SIZE], host_bytes=2 * SIZE) as d:
        rank, content = await filled(d, POLICY, 1)
        for key in (OTHER, SAMPLER):
            await start(d, key, SIZE)
        for seq, key in enumerate((OTHER, SAMPLER), start=2):
            await d.agent.switch_in(key, 1, seq, [])
        assert (await tiers(d))[POLICY] == "nvme"
        # What is on a device keeps its host memory, so there is none to come up to.
        switched = await d.agent.switch_out(POLICY, 1, 4)
        assert switched.displaced == []
        assert (await tiers(d))[POLICY] == "nvme"
        for key in (OTHER, SAMPLER):
            await d.agent.switch_out(key, 1, 5)
        # All the same the epochs before are over.
        with pytest.raises(ResourceError) as stale:
            await d.agent.switch_in(POLICY, 1, 3, [])
        assert stale.value.info.code is Code.ABORTED
        await d.agent.switch_in(POLICY, 1, 6, [])
        assert rank.digest() == content


async def test_what_is_predicted_to_be_used_sooner_stays(short_dir: Path) -> None:
    async with daemon(short_dir, host_bytes=7 * MiB) as d:
        for seq, key in enumerate((POLICY, OTHER, SAMPLER), start=1):
            await filled(d, key, seq)
        await d.agent.prefetch(POLICY, 1, 10.0)
        await d.agent.prefetch(OTHER, 1, 1000.0)
        await start(d, FOURTH, SIZE)
        # Of the sampler nobody said anything, though it was used last.
        assert (await tiers(d))[SAMPLER] == "nvme"
        await d.agent.switch_in(SAMPLER, 1, 10, [])
        assert (await tiers(d))[FOURTH] == "nvme"
        await d.agent.switch_in(FOURTH, 1, 11, [])
        assert await tiers(d) == {
            POLICY: "host",
            OTHER: "nvme",
            SAMPLER: "device",
            FOURTH: "device",
        }


async def test_what_is_active_or_being_sealed_stays_and_the_refusal_has_the_numbers(
    short_dir: Path,
) -> None:
    async with daemon(short_dir, host_bytes=5 * MiB) as d:
        sealing, sealed_content = await filled(d, OTHER, 1)
        await d.agent.prepare_seal(OTHER, 1, 1)
        active = await start(d, POLICY, SIZE)
        await d.agent.switch_in(POLICY, 1, 2, [])
        content = active.run(2)
        with pytest.raises(ResourceError, match="nothing more can go to NVMe") as caught:
            await active.client.loans.borrow(SIZE, "other weights")
        assert caught.value.info.code is Code.RESOURCE_EXHAUSTED
        assert caught.value.info.details["needed_bytes"] == str(SIZE)
        assert caught.value.info.details["used_bytes"] == str(2 * SIZE)
        assert caught.value.info.details["budget_bytes"] == str(5 * MiB)
        assert caught.value.info.details["nvme_used_bytes"] == "0"
        assert (await d.agent.write_seal(OTHER, 1, 1, [])).digest == sealed_content
        assert active.digest() == content
        await start(d, FOURTH, SIZE)  # now the sealed one may go down
        assert await tiers(d) == {POLICY: "device", OTHER: "nvme", FOURTH: "host"}
        await d.agent.switch_in(OTHER, 1, 3, [POLICY])
        assert sealing.digest() == sealed_content


async def test_full_tier_below_refuses_with_the_numbers(short_dir: Path) -> None:
    async with daemon(short_dir, host_bytes=5 * MiB, NVME_BYTES=str(3 * MiB)) as d:
        for seq, key in enumerate((POLICY, OTHER, SAMPLER), start=1):
            await filled(d, key, seq)
        with pytest.raises(ResourceError, match=f"where {SIZE} of {3 * MiB} are in use") as caught:
            await start(d, FOURTH, SIZE)
        assert caught.value.info.code is Code.RESOURCE_EXHAUSTED
        assert await tiers(d) == {POLICY: "nvme", OTHER: "host", SAMPLER: "host"}
        await d.agent.drop_wpg(POLICY, 1)
        assert names(d) == []
        await start(d, FOURTH, SIZE, incarnation=2)


async def test_ranks_that_do_not_fit_together_are_refused_when_they_register(
    short_dir: Path,
) -> None:
    devices = [SIZE, SIZE]
    async with daemon(short_dir, devices=devices, host_bytes=3 * MiB, NVME_BYTES="0") as d:
        with pytest.raises(ResourceError, match="nothing more can go to NVMe"):
            await start_ranks(d, POLICY, [SIZE, SIZE])


async def test_two_that_race_for_the_last_bytes_get_them_or_the_numbers(short_dir: Path) -> None:
    async with daemon(short_dir, host_bytes=5 * MiB, NVME_BYTES=str(3 * MiB)) as d:
        first, content = await filled(d, POLICY, 1)
        await filled(d, OTHER, 2)
        results = await asyncio.gather(
            start(d, SAMPLER, SIZE), start(d, FOURTH, SIZE), return_exceptions=True
        )
        (refused,) = [result for result in results if isinstance(result, BaseException)]
        assert isinstance(refused, ResourceError)
        assert refused.info.code is Code.RESOURCE_EXHAUSTED
        assert (await d.agent.status()).host_used_bytes == 2 * SIZE
        await d.agent.drop_wpg(OTHER, 1)
        await d.agent.switch_in(POLICY, 1, 3, [])
        assert first.digest() == content


async def test_hint_brings_a_copy_up_before_it_is_needed(short_dir: Path) -> None:
    async with daemon(short_dir, host_bytes=5 * MiB) as d:
        first, content = await filled(d, POLICY, 1)
        await filled(d, OTHER, 2)
        await filled(d, SAMPLER, 3)
        assert (await tiers(d))[POLICY] == "nvme"
        await d.agent.prefetch(POLICY, 1, 5.0)
        await until(d, POLICY, "host")
        assert (await tiers(d))[OTHER] == "nvme"
        with pytest.raises(PhaseloomError, match="is not here"):
            await d.agent.prefetch(OTHER, 2, 5.0)
        await d.agent.switch_in(POLICY, 1, 4, [])
        assert first.digest() == content


async def test_hint_displaces_nothing_that_is_needed_sooner(short_dir: Path) -> None:
    async with daemon(short_dir, host_bytes=5 * MiB) as d:
        for seq, key in enumerate((POLICY, OTHER, SAMPLER), start=1):
            await filled(d, key, seq)
        await d.agent.prefetch(OTHER, 1, 1.0)
        await d.agent.prefetch(SAMPLER, 1, 2.0)
        await d.agent.prefetch(POLICY, 1, 100.0)
        await d.logged("nothing more can go to NVMe")
        assert await tiers(d) == {POLICY: "nvme", OTHER: "host", SAMPLER: "host"}


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


@contextmanager
def small_disk(directory: Path, num_bytes: int) -> Iterator[None]:
    """A disk of this size at `directory`; the test is skipped where none can be mounted."""
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(directory)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True)


async def test_full_disk_fails_that_move_only(short_dir: Path) -> None:
    disk = short_dir / "disk"
    with small_disk(disk, 3 * MiB):
        async with daemon(short_dir, host_bytes=5 * MiB, DIRECTORY=str(disk)) as d:
            ranks = [await filled(d, key, seq) for seq, key in enumerate((POLICY, OTHER), 1)]
            ranks.append(await filled(d, SAMPLER, 3))
            assert (await tiers(d))[POLICY] == "nvme"
            with pytest.raises(ResourceError, match="nothing more can go to NVMe") as caught:
                await start(d, FOURTH, SIZE)
            assert caught.value.info.code is Code.RESOURCE_EXHAUSTED
            assert not list(disk.rglob("*.partial"))
            assert await tiers(d) == {POLICY: "nvme", OTHER: "host", SAMPLER: "host"}
            for seq, key in enumerate((OTHER, SAMPLER), start=4):
                rank, content = ranks[seq - 3]
                await d.agent.switch_in(key, 1, seq, [])
                assert rank.digest() == content


async def test_disk_that_fills_up_fails_that_move_only(short_dir: Path) -> None:
    disk = short_dir / "disk"
    with small_disk(disk, 5 * MiB):
        async with daemon(short_dir, host_bytes=5 * MiB, DIRECTORY=str(disk)) as d:
            first, first_content = await filled(d, POLICY, 1)
            second, second_content = await filled(d, OTHER, 2)
            (disk / "something else").write_bytes(bytes(4 * MiB))
            with pytest.raises(ResourceError, match="nothing more can go to NVMe"):
                await start(d, SAMPLER, SIZE)
            await d.logged("No space left on device")
            assert await tiers(d) == {POLICY: "host", OTHER: "host"}
            (disk / "something else").unlink()
            await start(d, SAMPLER, SIZE, incarnation=2)
            assert await tiers(d) == {POLICY: "nvme", OTHER: "host", SAMPLER: "host"}
            for seq, (key, rank, content) in enumerate(
                [(POLICY, first, first_content), (OTHER, second, second_content)], start=4
            ):
                await d.agent.switch_in(key, 1, seq, [])
                assert rank.digest() == content
                await d.agent.switch_out(key, 1, seq)


# --- kills ---------------------------------------------------------------------------------------

LARGE = 64 * MiB


async def kill_while(d: Daemon, is_reached: Callable[[], bool]) -> None:
    def wait() -> None:
        while not is_reached():
            os.sched_yield()

    await asyncio.to_thread(wait)
    await d.relaunch()


async def test_demoted_state_is_there_after_a_kill(short_dir: Path) -> None:
    async with daemon(short_dir, host_bytes=5 * MiB) as d:
        first, content = await filled(d, POLICY, 1)
        await filled(d, OTHER, 2)
        await filled(d, SAMPLER, 3)
        await d.digested()
        before = await d.agent.status()
        for _ in range(2):
            await d.relaunch()
            assert await d.agent.status() == before
            await taken(d, 2 * SIZE)
        await d.agent.switch_in(POLICY, 1, 4, [])
        assert first.digest() == content


@pytest.mark.parametrize("moment", ["the file is being written", "the file is in place"])
async def test_kill_in_a_demotion_leaves_the_old_place_or_the_new(
    short_dir: Path, moment: str
) -> None:
    async with daemon(short_dir, devices=[LARGE], host_bytes=2 * LARGE + MiB) as d:
        first, first_content = await filled(d, POLICY, 1, LARGE)
        second, second_content = await filled(d, OTHER, 2, LARGE)
        # Who looks late finds the whole file, and no half-written one ever again.
        pattern = "copy-*" if "written" in moment else "copy-*.state"
        starting = asyncio.create_task(start(d, SAMPLER, LARGE))
        await kill_while(d, lambda: bool(list(d.files.rglob(pattern))))
        await starting  # asked again, it completes
        assert list((await tiers(d)).values()).count("nvme") == 1
        for seq, (key, rank, content) in enumerate(
            [(POLICY, first, first_content), (OTHER, second, second_content)], start=4
        ):
            await d.agent.switch_in(key, 1, seq, [])
            assert rank.digest() == content
            await d.agent.switch_out(key, 1, seq)


async def test_kill_while_a_copy_comes_up_leaves_it_below_or_above(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[LARGE], host_bytes=2 * LARGE + MiB) as d:
        first, content = await filled(d, POLICY, 1, LARGE)
        await filled(d, OTHER, 2, LARGE)
        await filled(d, SAMPLER, 3, LARGE)
        assert (await tiers(d))[POLICY] == "nvme"
        await d.agent.drop_wpg(OTHER, 1)
        before = memory_of(d)
        switch = asyncio.create_task(d.agent.switch_in(POLICY, 1, 4, []))
        await kill_while(d, lambda: memory_of(d) > before)
        await switch
        assert first.digest() == content


async def test_files_of_an_incarnation_that_is_over_are_swept(short_dir: Path) -> None:
    async with daemon(short_dir, host_bytes=5 * MiB, reconnect_s=0.1) as d:
        await filled(d, POLICY, 1)
        await filled(d, OTHER, 2)
        await filled(d, SAMPLER, 3)
        assert names(d) == ["copy-1.state"]
        await d.agent.close()
        await d.kill()
    async with daemon(short_dir, host_bytes=5 * MiB) as d:
        await start(d, POLICY)
        while names(d):
            await d.agent.status()


@pytest.mark.parametrize("setting", ["HOST_MEMORY_BYTES", "NVME_BYTES"])
def test_daemon_refuses_capacities_that_the_machine_does_not_have(
    short_dir: Path, setting: str
) -> None:
    settings = {
        "NODE": "node0",
        "SOCKET": str(short_dir / "s"),
        "SECRET": "secret",
        "CERTIFICATES": str(certificates()),
        "DIRECTORY": str(short_dir),
        "DEVICES": "[1]",
        "HOST_MEMORY_BYTES": "1",
        setting: str(2**60),
    }
    started = subprocess.run(
        [sys.executable, "-m", "phaseloom.statemgr.main"],
        env=os.environ | {f"PHASELOOM_STATEMGR_{name}": value for name, value in settings.items()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert started.returncode
    assert f"{setting.lower()} must be at most" in started.stderr
    assert f"got {2**60}" in started.stderr


async def publishing(d: Daemon, version: VersionKey) -> tuple[Rank, str]:
    """A policy on its device, and the digest of a version of its weights that it has published."""
    rank = await start(d, POLICY, SIZE)
    await d.agent.switch_in(POLICY, 1, 1, [])
    rank.run(1)
    return rank, (await rank.client.versions.create(version, rank.slots)).digest


def is_mapped(version: VersionKey) -> bool:
    """Whether this process, which the ranks are in, keeps the pages of that version.

    Its `seq` must be no other test's: their ranks were in this process, too.
    """
    return f"/memfd:phaseloom: version {version} " in Path("/proc/self/maps").read_text()


async def test_version_that_nobody_reads_makes_room_and_comes_back_from_disk(
    short_dir: Path,
) -> None:
    version = VersionKey(POLICY, 1002)
    async with daemon(short_dir, host_bytes=5 * MiB) as d:
        _, published = await publishing(d, version)
        assert is_mapped(version)  # its writer would reuse it
        sampler = await start(d, SAMPLER, SIZE)
        assert not is_mapped(version)
        (state,) = (await d.agent.status()).version_states
        assert (state.in_host, state.on_nvme) == (False, True)
        assert names(d) == ["version-1002.state"]
        await d.agent.switch_in(SAMPLER, 1, 2, [POLICY])
        with pytest.raises(ResourceError, match="nothing more can go to NVMe") as caught:
            # Both have what they need, and the version would be a third.
            await sampler.client.loans.borrow(3 * SIZE, "other weights")
        assert caught.value.info.code is Code.RESOURCE_EXHAUSTED
        assert await load_version(sampler.client, version, [], sampler.slots) == published
        assert (await d.agent.status()).host_used_bytes <= 5 * MiB


async def test_version_on_disk_that_no_rank_has_goes_before_any_host_copy(short_dir: Path) -> None:
    version = VersionKey(POLICY, 3)
    async with daemon(short_dir, host_bytes=7 * MiB) as d:
        policy, _ = await publishing(d, version)
        await d.agent.prepare_seal(POLICY, 1, 1)
        await d.agent.write_seal(POLICY, 1, 1, [3])
        await policy.client.close()
        while (await d.agent.status()).deployments:
            pass
        await filled(d, OTHER, 1)
        await filled(d, SAMPLER, 2)
        await start(d, FOURTH, SIZE)
        assert set((await tiers(d)).values()) == {"host"}
        (state,) = (await d.agent.status()).version_states
        assert (state.in_host, state.on_nvme) == (False, True)


async def test_version_that_a_rank_uses_stays_and_the_refusal_has_the_numbers(
    short_dir: Path,
) -> None:
    version = VersionKey(POLICY, 1004)
    async with daemon(short_dir, host_bytes=7 * MiB, NVME_BYTES="0") as d:
        policy, published = await publishing(d, version)
        sampler = await start(d, SAMPLER, SIZE)
        memory, digest = await open_version(sampler.client, version, [], sampler.slots)
        with pytest.raises(ResourceError, match="nothing more can go to NVMe"):
            await start(d, OTHER, SIZE)
        assert digest == published == digest_of(memory)
        del memory
        await start(d, FOURTH, SIZE)
        assert not is_mapped(version)
        (state,) = (await d.agent.status()).version_states
        assert (state.in_host, state.on_nvme) == (False, True)
        assert policy.heap.resident_bytes() == SIZE
