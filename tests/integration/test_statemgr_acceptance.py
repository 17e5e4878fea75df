"""A state manager that is broken in many ways: what it had is there, or is named as lost.

After each of these tests all jobs end, and nothing is held any more in any tier, whatever happened.
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.contract.specs import Durability
from tests.support.readversions import load_version
from tests.support.statedaemon import (
    OTHER,
    POLICY,
    SAMPLER,
    Daemon,
    MiB,
    Rank,
    daemon,
    emptied,
    flip_in_file,
    flip_in_memory,
    names,
    start,
)

SIZE = 2 * MiB
VERSION = VersionKey(POLICY, 2)


@asynccontextmanager
async def breaking(
    short_dir: Path,
    *,
    host_bytes: int = 256 * MiB,
    nvme_bytes: int = 1024 * MiB,
) -> AsyncIterator[Daemon]:
    """A state manager with a root for checkpoints, of which nothing must be left at the end."""
    async with daemon(
        short_dir,
        devices=[80 * MiB],
        host_bytes=host_bytes,
        CHECKPOINT_ROOT=str(short_dir / "checkpoints"),
        NVME_BYTES=str(nvme_bytes),
    ) as d:
        yield d
        await emptied(d)


async def trained(d: Daemon, key: DeploymentKey, seq: int, num_bytes: int = SIZE) -> Rank:
    """On its device, after one operation."""
    rank = await start(d, key, num_bytes)
    await d.agent.switch_in(key, 1, seq, [])
    rank.run(seq)
    return rank


async def put_down(
    d: Daemon, key: DeploymentKey, seq: int, num_bytes: int = SIZE
) -> tuple[Rank, str]:
    """Offloaded after one operation, and the digest of its state."""
    rank = await trained(d, key, seq, num_bytes)
    content = rank.digest()
    await d.agent.switch_out(key, 1, seq)
    return rank, content


async def seal(d: Daemon, key: DeploymentKey, seq: int, versions: list[int] | None = None) -> None:
    await d.agent.prepare_seal(key, 1, seq)
    await d.agent.write_seal(key, 1, seq, versions or [])


async def reborn(d: Daemon, key: DeploymentKey, seq: int, num_bytes: int = SIZE) -> str:
    """The digest of what its next incarnation begins with, from that seal."""
    rank = await start(d, key, num_bytes, incarnation=2, seal_seq=seq)
    await d.agent.switch_in(key, 2, 100, [])
    return rank.digest()


async def visited(d: Daemon, key: DeploymentKey, rank: Rank, epoch: int) -> str:
    """The digest of what it has on its device."""
    await d.agent.switch_in(key, 1, epoch, [])
    found = rank.digest()
    await d.agent.switch_out(key, 1, epoch)
    return found


async def refused(call: Awaitable[object], code: Code) -> ResourceError:
    """Every refusal says what to do."""
    with pytest.raises(ResourceError) as caught:
        await call
    assert caught.value.info.code is code, caught.value
    assert caught.value.info.remedy, caught.value
    return caught.value


# --- bits that flip ------------------------------------------------------------------------------


async def test_bad_host_copy_ends_its_incarnation_and_the_next_one_begins_from_its_seal(
    short_dir: Path,
) -> None:
    async with breaking(short_dir) as d:
        rank, (other, other_content) = await trained(d, POLICY, 1), await put_down(d, OTHER, 2)
        content = rank.digest()
        await seal(d, POLICY, 1)
        rank.run(2)
        await d.agent.switch_out(POLICY, 1, 3)
        await d.digested()
        flip_in_memory(d.pid, f"the host copy of {POLICY}")
        error = await refused(d.agent.switch_in(POLICY, 1, 4, []), Code.DATA_LOSS)
        assert str(POLICY) in error.info.message
        await asyncio.wait_for(rank.client.closed, 60)
        assert await reborn(d, POLICY, 1) == content
        assert await visited(d, OTHER, other, 101) == other_content


async def test_bad_file_of_a_demoted_copy_ends_its_incarnation_and_the_next_begins_from_its_seal(
    short_dir: Path,
) -> None:
    async with breaking(short_dir, host_bytes=5 * MiB) as d:
        rank = await trained(d, POLICY, 1)
        content = rank.digest()
        await seal(d, POLICY, 1)
        await d.agent.switch_out(POLICY, 1, 1)
        other, other_content = await put_down(d, OTHER, 2)
        await start(d, SAMPLER, SIZE)
        (file,) = (d.files / ".copies").iterdir()
        flip_in_file(file, -SIZE // 2)
        error = await refused(d.agent.switch_in(POLICY, 1, 4, []), Code.DATA_LOSS)
        assert re.search(f"{POLICY} rank 0.*checksum", error.info.message)
        assert error.info.details["offset"] == "0"
        await asyncio.wait_for(rank.client.closed, 60)
        assert await visited(d, OTHER, other, 5) == other_content
        assert await reborn(d, POLICY, 1) == content


async def test_bad_seal_in_host_memory_is_never_begun_from(short_dir: Path) -> None:
    async with breaking(short_dir) as d:
        rank = await trained(d, POLICY, 1)
        content = rank.digest()
        for seq in (1, 2):
            await d.agent.prepare_seal(POLICY, 1, seq)
            await d.agent.write_seal(POLICY, 1, seq, [], durability=Durability.HOST)
            rank.run(2)
        flip_in_memory(d.pid, f"seal 2 of {POLICY}", SIZE // 2)
        await refused(start(d, POLICY, SIZE, incarnation=2, seal_seq=2), Code.DATA_LOSS)
        restored = await start(d, POLICY, SIZE, incarnation=3, seal_seq=1)
        await d.agent.switch_in(POLICY, 3, 9, [])
        assert restored.digest() == content


# --- disks that are full -------------------------------------------------------------------------


@asynccontextmanager
async def full_disk(d: Daemon, num_bytes: int = MiB) -> AsyncIterator[None]:
    """No file can be longer than that, as where the disk has no room for more.

    What was begun goes: at once, or when the move that writes it in the background fails, too.
    """
    pid = d.pid
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    yield
    resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
    async with asyncio.timeout(30):
        while unfinished(d):
            await asyncio.sleep(0.01)


def unfinished(d: Daemon) -> list[Path]:
    return [*d.directory.rglob("*.partial*"), *d.directory.rglob(".*.draft")]


async def test_full_disk_fails_a_version_s_file_and_the_seal_that_needs_it(short_dir: Path) -> None:
    async with breaking(short_dir) as d:
        rank = await trained(d, POLICY, 1)
        content = rank.digest()
        await seal(d, POLICY, 1)
        made = await rank.client.versions.create(VERSION, rank.slots)
        rank.run(2)
        async with full_disk(d):
            await refused(seal(d, POLICY, 2, [2]), Code.RESOURCE_EXHAUSTED)
        assert names(d) == ["seal-1.state"]
        sampler = await trained(d, SAMPLER, 3)
        assert await load_version(sampler.client, VERSION, [], sampler.slots) == made.digest
        await seal(d, POLICY, 2, [2])
        assert names(d) == ["seal-1.state", "seal-2.state", "version-2.state"]
        assert await reborn(d, POLICY, 1) == content


async def test_full_disk_fails_a_seal_and_the_one_before_stands(short_dir: Path) -> None:
    size = 24 * MiB  # three blocks
    async with breaking(short_dir) as d:
        rank = await trained(d, POLICY, 1, size)
        digests = [rank.digest()]
        await seal(d, POLICY, 1)
        rank.heap.buffer[5] ^= 1
        rank.seq = 2
        digests.append(rank.digest())
        async with full_disk(d):
            await refused(seal(d, POLICY, 2), Code.RESOURCE_EXHAUSTED)
        assert names(d) == ["seal-1.state"]
        await seal(d, POLICY, 2)
        assert await reborn(d, POLICY, 1, size) == digests[0]
        again = await start(d, POLICY, size, incarnation=3, seal_seq=2)
        await d.agent.switch_in(POLICY, 3, 101, [])
        assert again.digest() == digests[1]


async def test_full_disk_keeps_in_host_memory_what_should_leave_it(short_dir: Path) -> None:
    """A version that nobody reads, and a host copy."""
    async with breaking(short_dir, host_bytes=7 * MiB) as d:
        async with full_disk(d, SIZE):  # with its header each file is longer
            rank = await trained(d, POLICY, 1)
            made = await rank.client.versions.create(VERSION, rank.slots)
            other, content = await put_down(d, OTHER, 2)
            await refused(start(d, SAMPLER, SIZE), Code.RESOURCE_EXHAUSTED)
            report = await d.agent.status()
            assert [each.in_host for each in report.version_states] == [True]
            assert not any(each.nvme_bytes for each in report.deployments)
        sampler = await start(d, SAMPLER, SIZE, incarnation=2)
        await d.agent.switch_in(SAMPLER, 2, 3, [POLICY])
        assert await load_version(sampler.client, VERSION, [], sampler.slots) == made.digest
        assert await visited(d, OTHER, other, 4) == content


# --- kills ---------------------------------------------------------------------------------------

LARGE = 64 * MiB


async def killed_in(d: Daemon, pattern: str) -> None:
    """As soon as such a file is there."""

    def wait() -> None:
        while not list(d.files.rglob(pattern)):
            os.sched_yield()

    await asyncio.to_thread(wait)
    await d.relaunch()


async def test_kill_as_a_version_of_a_seal_is_written_loses_neither(short_dir: Path) -> None:
    async with breaking(short_dir) as d:
        rank = await trained(d, POLICY, 1, LARGE)
        content = rank.digest()
        made = await rank.client.versions.create(VERSION, rank.slots)
        sealing = asyncio.create_task(seal(d, POLICY, 1, [2]))
        await killed_in(d, "version-2.*")
        await sealing
        assert names(d) == ["seal-1.state", "version-2.state"]
        assert rank.digest() == content
        await d.agent.switch_out(POLICY, 1, 2)
        sampler = await trained(d, SAMPLER, 3, LARGE)
        assert await load_version(sampler.client, VERSION, [], sampler.slots) == made.digest
        await d.agent.switch_out(SAMPLER, 1, 4)
        assert await reborn(d, POLICY, 1, LARGE) == content


async def test_version_that_was_read_from_disk_leaves_no_memory_behind(short_dir: Path) -> None:
    """Its memory is kept for versions of the same policy, while there is that policy."""
    async with daemon(short_dir, devices=[SIZE]) as d:
        rank = await trained(d, POLICY, 1)
        made = await rank.client.versions.create(VERSION, rank.slots)
        await seal(d, POLICY, 1, [2])
        await d.kill()
    async with breaking(short_dir) as d:
        sampler = await trained(d, SAMPLER, 1)
        assert await load_version(sampler.client, VERSION, [], sampler.slots) == made.digest


# --- races for the last bytes --------------------------------------------------------------------

RACERS = [
    DeploymentKey("acme", job, name)
    for job in ("sums", "letters")
    for name in ("policy", "sampler", "critic")
]


async def raced(calls: list[Awaitable[object]]) -> tuple[int, list[ResourceError]]:
    """How many of them got what they asked for, and what the others were told."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    errors = [each for each in results if isinstance(each, ResourceError)]
    assert len(errors) == sum(isinstance(each, BaseException) for each in results), results
    for error in errors:
        assert error.info.code is Code.RESOURCE_EXHAUSTED, error
        assert error.info.remedy
        assert int(error.info.details["budget_bytes"])
    return len(results) - len(errors), errors


async def test_device_memory_goes_to_as_many_as_fit(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[2 * SIZE + SIZE // 2]) as d:
        ranks = [await start(d, key, SIZE, content=seq) for seq, key in enumerate(RACERS)]
        num, errors = await raced(
            [d.agent.switch_in(key, 1, 10 + seq, []) for seq, key in enumerate(RACERS)]
        )
        assert (num, len(errors)) == (2, len(RACERS) - 2)
        assert sum(rank.heap.resident_bytes() for rank in ranks) == 2 * SIZE
        await emptied(d)


async def test_host_memory_goes_to_as_many_as_fit_whatever_they_want_it_for(
    short_dir: Path,
) -> None:
    """Cuts, and the copies of those that begin; nothing can go down."""
    async with breaking(short_dir, host_bytes=4 * SIZE, nvme_bytes=0) as d:
        ranks = [await trained(d, key, seq) for seq, key in enumerate(RACERS[:2], 1)]
        snapshots = [rank.client.take_snapshot("op", "c", rank.seq) for rank in ranks]
        num, errors = await raced([*snapshots, *(start(d, key, SIZE) for key in RACERS[2:])])
        assert (num, len(errors)) == (2, len(RACERS) - 2)
        assert (await d.agent.status()).host_used_bytes == 4 * SIZE


async def test_nvme_goes_to_as_many_as_fit(short_dir: Path) -> None:
    async with breaking(short_dir, host_bytes=3 * SIZE, nvme_bytes=2 * SIZE) as d:
        held = [await put_down(d, key, seq) for seq, key in enumerate(RACERS[:3], 1)]
        num, errors = await raced([start(d, key, SIZE) for key in RACERS[3:]])
        assert (num, len(errors)) == (2, 1)
        assert errors[0].info.details["nvme_budget_bytes"] == str(2 * SIZE)
        report = await d.agent.status()
        assert (report.nvme_used_bytes, report.host_used_bytes) == (2 * SIZE, 3 * SIZE)
        for key in RACERS[3:]:
            await d.agent.drop_wpg(key, 1)
        for epoch, (key, (rank, content)) in enumerate(zip(RACERS[:3], held, strict=True), 10):
            assert await visited(d, key, rank, epoch) == content
