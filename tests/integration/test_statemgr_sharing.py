"""What is equal is held once: frozen models of several jobs, on one node and in real memory."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.contract.state_agent import (
    AgentHello,
    DropVersions,
    SharedCopyState,
    StatusReport,
    StatusRequest,
)
from phaseloom.common.contract.state_layout import TensorSlot, VersionPart, VersionParts
from phaseloom.common.contract.state_rank import (
    CommitInitial,
    Copied,
    CopyIn,
    CopyOut,
    Done,
    HoldVersion,
    RegisterHeap,
    StateMessage,
    StillMapped,
    Unmap,
)
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.common.tensors.versionparts import layout_digest, part_name, part_of
from phaseloom.common.transport.framing import Peer, close_fds
from phaseloom.worker.state.layouts import packed
from tests.support.meshcerts import SECRET
from tests.support.readversions import load_version, open_version
from tests.support.statedaemon import (
    POLICY,
    SAMPLER,
    Daemon,
    MiB,
    Rank,
    daemon,
    greeted,
    open_memory,
    real_memory,
    start,
    start_ranks,
    taken,
)
from tests.support.staterank import slots_of

SIZE = 2 * MiB
FIRST = DeploymentKey("acme", "sums", "reference")
SECOND = DeploymentKey("acme", "letters", "reference")
FOREIGN = DeploymentKey("umbrella", "sums", "reference")
VERSION = VersionKey(POLICY, 4)


async def until(d: Daemon, predicate: Callable[[StatusReport], bool]) -> StatusReport:
    """The daemon finds what is equal in the background."""
    async with asyncio.timeout(30):
        while not predicate(report := await d.agent.status()):
            pass
    return report


async def identified(d: Daemon, num_copies: int) -> StatusReport:
    """Once so many copies are held, and each of them is known by its hash."""
    return await until(
        d, lambda r: len(r.shared_copies) == num_copies and all(c.hash for c in r.shared_copies)
    )


async def frozen(
    d: Daemon, key: DeploymentKey, content: int = 3, *, incarnation: int = 1, seal_seq: int = 0
) -> Rank:
    return await start(
        d, key, SIZE, frozen=True, content=content, incarnation=incarnation, seal_seq=seal_seq
    )


def only(report: StatusReport) -> SharedCopyState:
    (copy,) = report.shared_copies
    return copy


async def visit(d: Daemon, rank: Rank, key: DeploymentKey, epoch: int) -> str:
    """Switch it in and out again; what it held meanwhile."""
    await d.agent.switch_in(key, 1, epoch, [])
    held = rank.digest()
    await d.agent.switch_out(key, 1, epoch)
    return held


# --- sharing -------------------------------------------------------------------------------------


async def test_two_jobs_of_a_tenant_hold_one_copy_of_a_frozen_model(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        ranks = {key: await frozen(d, key) for key in (FIRST, SECOND)}
        report = await identified(d, 1)
        assert only(report).users == [str(SECOND), str(FIRST)]
        assert (report.owned_bytes, report.held_bytes) == (2 * SIZE, SIZE)
        assert report.host_used_bytes == SIZE
        assert [s.shared_bytes for s in report.deployments] == [SIZE, SIZE]
        held = {await visit(d, rank, key, 1) for key, rank in ranks.items()}
        assert len(held) == 1
        await taken(d, SIZE)


async def test_what_differs_is_not_shared(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        first, second = await frozen(d, FIRST, 3), await frozen(d, SECOND, 4)
        report = await identified(d, 2)
        assert (report.owned_bytes, report.held_bytes) == (2 * SIZE, 2 * SIZE)
        assert await visit(d, first, FIRST, 1) != await visit(d, second, SECOND, 1)


async def test_other_tenants_share_what_the_operator_registered_and_nothing_else(
    short_dir: Path,
) -> None:
    async with daemon(short_dir) as d:
        await frozen(d, FIRST)
        await frozen(d, FOREIGN)
        report = await identified(d, 2)
        assert len({copy.hash for copy in report.shared_copies}) == 1
        assert {copy.base for copy in report.shared_copies} == {""}
        assert report.held_bytes == 2 * SIZE
        known = report.shared_copies[0].hash
    bases = json.dumps({"a model": [known]})
    async with daemon(short_dir, FROZEN_BASES=bases) as d:
        ranks = {key: await frozen(d, key) for key in (FIRST, FOREIGN)}
        copy = only(await identified(d, 1))
        assert (copy.base, copy.users) == ("a model", [str(FIRST), str(FOREIGN)])
        assert len({await visit(d, rank, key, 1) for key, rank in ranks.items()}) == 1
        await taken(d, SIZE)


async def test_unchanged_frozen_rank_leaves_the_device_without_a_copy(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        rank = await frozen(d, FIRST)
        await identified(d, 1)
        await d.agent.switch_in(FIRST, 1, 1, [])
        rank.heap.buffer[:4] = b"xxxx"  # not by an operation: what is canonical stands
        await d.agent.switch_out(FIRST, 1, 1)
        assert rank.heap.resident_bytes() == 0
        await d.agent.switch_in(FIRST, 1, 2, [])
        assert bytes(rank.heap.buffer[:4]) == bytes([3, 3, 3, 3])


async def test_write_of_one_leaves_the_bytes_of_the_other(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        first, second = await frozen(d, FIRST), await frozen(d, SECOND)
        await identified(d, 1)
        before = await visit(d, second, SECOND, 1)
        await d.agent.switch_in(FIRST, 1, 2, [])
        written = first.run(7)
        await d.agent.switch_out(FIRST, 1, 2)
        report = await identified(d, 2)
        assert {s.deployment: (s.applied, s.shared_bytes) for s in report.deployments} == {
            FIRST: (7, 0),
            SECOND: (0, 0),
        }
        assert written != before
        assert await visit(d, second, SECOND, 3) == before
        assert await visit(d, first, FIRST, 3) == written
        await d.agent.switch_in(SECOND, 1, 4, [])
        second.run(7)  # the same operation of the other: they are equal again
        await d.agent.switch_out(SECOND, 1, 4)
        assert only(await identified(d, 1)).users == [str(SECOND), str(FIRST)]


async def test_write_that_finds_no_memory_is_refused_and_harms_nobody(short_dir: Path) -> None:
    async with daemon(short_dir, host_bytes=SIZE, NVME_BYTES="0") as d:
        first = await frozen(d, FIRST)
        await identified(d, 1)
        await d.agent.switch_in(FIRST, 1, 1, [])
        written = first.run(7)
        with pytest.raises(ResourceError, match="needs 2097152 bytes of host memory") as caught:
            await d.agent.switch_out(FIRST, 1, 1)
        assert caught.value.info.code is Code.RESOURCE_EXHAUSTED
        assert first.digest() == written
        assert (await d.agent.status()).device_used_bytes == [SIZE]


async def test_content_goes_with_its_last_user(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        first = await frozen(d, FIRST)
        await frozen(d, SECOND)
        await identified(d, 1)
        await d.agent.drop_wpg(SECOND, 1)
        assert only(await d.agent.status()).users == [str(FIRST)]
        before = first.digest()
        assert await visit(d, first, FIRST, 1) != before  # it was released, and came back
        await d.agent.drop_wpg(FIRST, 1)
        report = await d.agent.status()
        assert (report.shared_copies, report.host_used_bytes) == ([], 0)
        await taken(d, 0)


async def test_nobody_can_write_what_is_shared(short_dir: Path) -> None:
    """Not through a descriptor that was writable once, nor by opening it anew."""
    async with daemon(short_dir) as d:
        peer = await greeted(d, FIRST)
        _, (fd,) = await peer.call(
            RegisterHeap(SIZE, TensorTable.of(slots_of(SIZE)).packed, frozen=True)
        )
        with mmap.mmap(fd, SIZE) as mapping:
            mapping[:] = content_of(3)
        digest = (await frozen(d, SECOND)).client._copies.copied[1]
        await peer.call(CommitInitial(digest))
        await identified(d, 1)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"evil", 0)
        with pytest.raises(PermissionError):
            mmap.mmap(fd, SIZE)
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        with pytest.raises(PermissionError):
            os.pwrite(again, b"evil", 0)
        os.close(again)
        os.close(fd)
        await peer.close()


def content_of(seq: int) -> bytes:
    """As `fill` does."""
    return (b"".join(bytes([(seq + i) % 251]) * 4096 for i in range(256)) * 2)[:SIZE]


async def test_extent_that_a_rank_keeps_mapped_is_never_shared(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        peer = await greeted(d, FIRST)
        _, (fd,) = await peer.call(
            RegisterHeap(SIZE, TensorTable.of(slots_of(SIZE)).packed, frozen=True)
        )
        mapping = mmap.mmap(fd, SIZE)
        os.close(fd)
        mapping[:] = content_of(3)
        good = await frozen(d, SECOND)
        await peer.call(CommitInitial(good.client._copies.copied[1]))
        await d.logged("is still mapped writable")
        assert sorted(bool(c.hash) for c in (await d.agent.status()).shared_copies) == [False, True]
        mapping[:] = bytes(SIZE)
        await visit(d, good, SECOND, 1)
        assert bytes(good.heap.buffer[:1]) == b"\0"  # released
        await d.agent.switch_in(SECOND, 1, 2, [])
        assert bytes(good.heap.buffer) == content_of(3)
        mapping.close()
        await peer.close()


async def test_rank_that_lies_about_its_copy_loses_its_incarnation_and_nobody_else_anything(
    short_dir: Path,
) -> None:
    async def lie(body: StateMessage, fds: list[int]) -> tuple[StateMessage, list[int]]:
        close_fds(fds)
        if isinstance(body, CopyIn):
            return Copied(body.digest, 0, 0, 0.0), []
        if isinstance(body, Unmap):
            return StillMapped([]), []
        assert isinstance(body, CopyOut)
        if body.whole_at >= 0:
            return Copied("", 5, 0, 0.0, changed=True), []
        return Copied("f" * 32, 5, 0, 0.0), []

    async with daemon(short_dir) as d:
        good = await frozen(d, SECOND)
        expected = await visit(d, good, SECOND, 1)
        peer = await greeted(d, FIRST, handler=lie)
        _, fds = await peer.call(
            RegisterHeap(SIZE, TensorTable.of(slots_of(SIZE)).packed, frozen=True)
        )
        os.pwrite(fds[0], content_of(3), 0)
        close_fds(fds)
        await peer.call(CommitInitial(good.client._copies.copied[1]))
        await identified(d, 1)
        await d.agent.switch_in(FIRST, 1, 1, [])
        await d.agent.switch_out(FIRST, 1, 1)
        await asyncio.wait_for(peer.closed, 60)
        await d.logged("its host copy does not match its digest")
        assert only(await d.agent.status()).users == [str(SECOND)]
        assert await visit(d, good, SECOND, 2) == expected


async def test_model_that_is_no_hash_and_frozen_state_in_host_memory_are_refused(
    short_dir: Path,
) -> None:
    async with daemon(short_dir) as d:
        peer = await greeted(d, FIRST)
        for request, field in (
            (
                RegisterHeap(SIZE, TensorTable.of(slots_of(SIZE)).packed, frozen=True, model="x"),
                "model",
            ),
            (
                RegisterHeap(
                    SIZE, TensorTable.of(slots_of(SIZE)).packed, frozen=True, host_bytes=64
                ),
                "host_bytes",
            ),
        ):
            with pytest.raises(CallerError) as caught:
                await peer.call(request)
            assert caught.value.info.field == field
        await peer.close()


async def test_replicas_of_a_deployment_hold_one_copy(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[SIZE, SIZE]) as d:
        ranks = await start_ranks(d, SAMPLER, [SIZE, SIZE], frozen=True)
        report = await identified(d, 1)
        assert only(report).users == [str(SAMPLER)] * 2
        assert (report.owned_bytes, report.held_bytes) == (2 * SIZE, SIZE)
        await d.agent.switch_in(SAMPLER, 1, 1, [])
        digests = [rank.run(1) for rank in ranks]  # both load the same
        await d.agent.switch_out(SAMPLER, 1, 1)
        report = await identified(d, 1)
        assert report.host_used_bytes == SIZE
        await d.relaunch()
        await d.agent.switch_in(SAMPLER, 1, 2, [])
        assert [rank.digest() for rank in ranks] == digests


# --- weights versions ----------------------------------------------------------------------------


async def policy_and_sampler(d: Daemon, policy_bytes: int = SIZE) -> tuple[Rank, Rank]:
    """Both of one job, on the same device."""
    policy = await start(d, POLICY, policy_bytes)
    sampler = await frozen(d, SAMPLER)
    await d.agent.switch_in(POLICY, 1, 1, [])
    await d.agent.switch_in(SAMPLER, 1, 1, [])
    return policy, sampler


async def synced(d: Daemon, sampler: Rank, policy: Rank, version: VersionKey, seq: int) -> str:
    """Publish what the policy is at and bring it to the sampler, which is on its device."""
    await policy.client.versions.create(version, policy.slots)
    digest = await load_version(sampler.client, version, [], sampler.slots)
    await sampler.client.versions.hold(version, seq)
    sampler.seq = seq
    return digest


async def publish_in_one_part(policy: Rank) -> VersionKey:
    part = part_of(VERSION, part_name(0, 1))
    copy = await policy.client.versions.create(part, policy.slots)
    table = TensorTable.of(packed(policy.slots)[0]).packed
    entry = VersionPart(part.part, copy.num_bytes, copy.digest, table)
    await policy.client.versions.commit_parts(VERSION, VersionParts(layout_digest(table), [entry]))
    return part


async def test_sampler_refers_to_the_memory_of_the_version_it_has(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[2 * SIZE]) as d:
        policy, sampler = await policy_and_sampler(d)
        policy.run(1)
        await synced(d, sampler, policy, VERSION, 2)
        report = await d.agent.status()
        assert only(report).version == VERSION
        assert report.host_used_bytes == 2 * SIZE  # the policy's copy and the version
        assert (report.owned_bytes, report.held_bytes) == (3 * SIZE, 2 * SIZE)
        held = sampler.digest()
        await d.agent.switch_out(SAMPLER, 1, 2)
        await d.agent.drop_versions([VERSION])  # the sampler's copy outlives its name
        assert await visit(d, sampler, SAMPLER, 3) == held
        assert (await d.agent.status()).host_used_bytes == 2 * SIZE


async def test_samplers_move_on_from_version_to_version(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[3 * SIZE]) as d:
        policy = await start(d, POLICY, SIZE)
        other = DeploymentKey("acme", "sums", "sampler-2")
        samplers = [await frozen(d, key) for key in (SAMPLER, other)]
        for key in (POLICY, SAMPLER, other):
            await d.agent.switch_in(key, 1, 1, [])
        for seq in range(1, 4):
            content = policy.run(seq)
            for sampler in samplers:
                await synced(d, sampler, policy, VersionKey(POLICY, seq), seq)
            await d.agent.drop_versions([VersionKey(POLICY, seq - 1)])
            report = await d.agent.status()
            assert only(report).users == [str(SAMPLER), str(other)]
            assert (report.owned_bytes, report.held_bytes) == (4 * SIZE, 2 * SIZE)
            assert [sampler.digest() for sampler in samplers] == [content] * 2


async def test_sync_while_a_seal_is_written_leaves_the_seal_what_it_was(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[2 * SIZE]) as d:
        policy, sampler = await policy_and_sampler(d)
        before = sampler.run(1)
        await d.agent.prepare_seal(SAMPLER, 1, 1)
        policy.run(5)
        await synced(d, sampler, policy, VERSION, 2)
        after = sampler.digest()
        await d.agent.write_seal(SAMPLER, 1, 1, [])
        await d.agent.switch_out(SAMPLER, 1, 2)
        assert only(await d.agent.status()).version == VERSION
        assert await visit(d, sampler, SAMPLER, 3) == after
        await d.agent.prepare_seal(SAMPLER, 1, 2)
        await d.agent.write_seal(SAMPLER, 1, 2, [])
        for incarnation, (seq, content) in enumerate([(1, before), (2, after)], start=2):
            reborn = await frozen(d, SAMPLER, incarnation=incarnation, seal_seq=seq)
            await d.agent.switch_in(SAMPLER, incarnation, 10 * incarnation, [])
            assert reborn.digest() == content


async def test_version_that_is_held_in_the_middle_of_a_copy_changes_nothing_of_it(
    short_dir: Path,
) -> None:
    async with daemon(short_dir, devices=[2 * SIZE]) as d:
        policy, sampler = await policy_and_sampler(d)
        policy.run(5)
        await policy.client.versions.create(VERSION, policy.slots)
        content = sampler.run(6)
        loop, held = asyncio.get_running_loop(), asyncio.Event()

        def hold() -> None:
            sampler.on_copy = lambda: None
            # Its client never would: it does one thing after the other.
            holding = sampler.client._link.ask(HoldVersion(VERSION, 5), Done)
            asyncio.run_coroutine_threadsafe(holding, loop).result(30)
            loop.call_soon_threadsafe(held.set)

        calls: list[int] = []

        def on_copy() -> None:
            calls.append(len(calls))
            if len(calls) == 2:  # the first asks whether there is anything to copy
                hold()

        sampler.on_copy = on_copy
        await d.agent.prepare_seal(SAMPLER, 1, 6)
        assert held.is_set()
        await d.agent.write_seal(SAMPLER, 1, 6, [])
        await d.agent.switch_out(SAMPLER, 1, 2)
        assert await visit(d, sampler, SAMPLER, 3) == content
        await d.agent.drop_wpg(SAMPLER, 1)
        reborn = await frozen(d, SAMPLER, incarnation=2, seal_seq=6)
        await d.agent.switch_in(SAMPLER, 2, 4, [])
        assert reborn.digest() == content


# --- the tier below ------------------------------------------------------------------------------


async def test_shared_content_goes_down_once_and_comes_up_for_both(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[2 * SIZE], host_bytes=2 * SIZE) as d:
        first, second = await frozen(d, FIRST), await frozen(d, SECOND)
        await identified(d, 1)
        expected = await visit(d, first, FIRST, 1)
        shared = set(real_memory(d.pid))
        assert shared <= mapped_here()  # for the next load
        await start(d, POLICY, SIZE)
        await start(d, SAMPLER, SIZE)
        report = await d.agent.status()
        assert (only(report).in_host, only(report).on_nvme) == (False, True)
        assert report.nvme_used_bytes == SIZE
        assert len(list((d.files / ".copies").iterdir())) == 1
        await taken(d, 2 * SIZE)
        async with asyncio.timeout(30):
            while shared & mapped_here():  # a thread may hold it a moment longer
                await d.agent.status()
        await d.agent.drop_wpg(SAMPLER, 1)
        assert await visit(d, second, SECOND, 2) == expected
        assert only(await d.agent.status()).in_host
        assert not list((d.files / ".copies").iterdir())
        assert await visit(d, first, FIRST, 3) == expected
        with pytest.raises(OSError, match="Operation not permitted"):
            write_into(d, "the host copy of acme.sums.reference")


def mapped_here() -> set[int]:
    """Inodes. Ranks of a test are in its process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in lines}


def write_into(d: Daemon, what: str) -> None:
    for descriptor in open_memory(d.pid, what):
        fd = os.open(descriptor, os.O_RDWR)
        try:
            os.pwrite(fd, b"evil", 0)
        finally:
            os.close(fd)


async def test_demoted_copy_is_removed_with_its_last_user(short_dir: Path) -> None:
    async with daemon(short_dir, host_bytes=2 * SIZE) as d:
        await frozen(d, FIRST)
        await frozen(d, SECOND)
        await identified(d, 1)
        await start(d, POLICY, SIZE)
        await start(d, SAMPLER, SIZE)
        for key in (FIRST, SECOND):
            assert list((d.files / ".copies").iterdir())
            await d.agent.drop_wpg(key, 1)
        assert not list((d.files / ".copies").iterdir())
        assert (await d.agent.status()).nvme_used_bytes == 0


async def test_bad_content_below_ends_its_users_and_nobody_else(short_dir: Path) -> None:
    async with daemon(short_dir, host_bytes=2 * SIZE) as d:
        await frozen(d, FIRST)
        await frozen(d, SECOND)
        await identified(d, 1)
        policy = await start(d, POLICY, SIZE)
        await start(d, SAMPLER, SIZE)
        (path,) = (d.files / ".copies").iterdir()
        with path.open("r+b") as file:
            file.seek(-5000, os.SEEK_END)
            file.write(b"bad")
        await d.agent.drop_wpg(SAMPLER, 1)
        with pytest.raises(ResourceError, match="checksum") as caught:
            await d.agent.switch_in(FIRST, 1, 1, [])
        assert caught.value.info.code is Code.DATA_LOSS
        assert [s.deployment for s in (await d.agent.status()).deployments] == [POLICY]
        await d.agent.switch_in(POLICY, 1, 1, [])
        assert policy.heap.resident_bytes() == SIZE


async def test_hint_brings_a_content_up_before_it_is_needed(short_dir: Path) -> None:
    async with daemon(short_dir, host_bytes=2 * SIZE) as d:
        first = await frozen(d, FIRST)
        await frozen(d, SECOND)
        await identified(d, 1)
        expected = await visit(d, first, FIRST, 1)
        await start(d, POLICY, SIZE)
        await start(d, SAMPLER, SIZE)
        await d.agent.drop_wpg(SAMPLER, 1)
        assert only(await d.agent.status()).on_nvme
        await d.agent.prefetch(SECOND, 1, 5.0)
        await until(d, lambda report: only(report).in_host)
        assert await visit(d, first, FIRST, 2) == expected


async def test_dropped_version_goes_down_with_the_sampler_that_has_it(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[2 * SIZE], host_bytes=3 * SIZE) as d:
        policy, sampler = await policy_and_sampler(d)
        policy.run(1)
        await synced(d, sampler, policy, VERSION, 2)
        held = sampler.digest()
        await d.agent.switch_out(SAMPLER, 1, 2)
        await d.agent.drop_versions([VERSION])
        others = [DeploymentKey("acme", "more", name) for name in ("a", "b")]
        for key in others:
            await start(d, key, SIZE)
        report = await d.agent.status()
        assert (only(report).on_nvme, only(report).version) == (True, None)
        await d.agent.drop_wpg(others[0], 1)
        assert await visit(d, sampler, SAMPLER, 3) == held


async def test_full_disk_leaves_a_content_where_it_is(short_dir: Path) -> None:
    async with daemon(short_dir, host_bytes=2 * SIZE, NVME_BYTES=str(SIZE - 1)) as d:
        first = await frozen(d, FIRST)
        await frozen(d, SECOND)
        await identified(d, 1)
        await start(d, POLICY, SIZE)
        with pytest.raises(ResourceError, match="nothing more can go to NVMe"):
            await start(d, SAMPLER, SIZE)
        assert only(await d.agent.status()).in_host
        await visit(d, first, FIRST, 1)


# --- kills ---------------------------------------------------------------------------------------

LARGE = 64 * MiB


@pytest.mark.parametrize("moment", ["copy-*", "copy-*.state"])
async def test_kill_as_a_content_goes_down_leaves_the_old_place_or_the_new(
    short_dir: Path, moment: str
) -> None:
    async with daemon(short_dir, devices=[LARGE], host_bytes=2 * LARGE) as d:
        ranks = {key: await start(d, key, LARGE, frozen=True, content=3) for key in (FIRST, SECOND)}
        await identified(d, 1)
        await start(d, POLICY, LARGE)
        starting = asyncio.create_task(start(d, SAMPLER, LARGE))
        await asyncio.to_thread(_wait_for, d, moment)
        await d.relaunch()
        await starting
        await d.agent.drop_wpg(SAMPLER, 1)
        held = {await visit(d, rank, key, 5) for key, rank in ranks.items()}
        assert len(held) == 1
        assert only(await d.agent.status()).users == [str(SECOND), str(FIRST)]


def _wait_for(d: Daemon, pattern: str) -> None:
    while not list((d.files / ".copies").glob(pattern)):
        os.sched_yield()


async def test_shared_copies_are_there_after_a_kill(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[2 * SIZE]) as d:
        first, second = await frozen(d, FIRST), await frozen(d, SECOND)
        await identified(d, 1)
        await d.agent.switch_in(FIRST, 1, 1, [])
        expected = first.digest()
        before = await d.agent.status()
        for _ in range(2):
            await d.relaunch()
            assert await d.agent.status() == before
        await taken(d, SIZE)
        await d.agent.switch_out(FIRST, 1, 2)
        for key, rank in ((FIRST, first), (SECOND, second)):
            assert await visit(d, rank, key, 3) == expected
        await d.agent.drop_wpg(FIRST, 1)
        assert only(await d.agent.status()).users == [str(SECOND)]


async def test_version_that_a_sampler_refers_to_is_there_after_a_kill(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[2 * SIZE]) as d:
        policy, sampler = await policy_and_sampler(d)
        policy.run(1)
        await synced(d, sampler, policy, VERSION, 2)
        held = sampler.digest()
        await d.agent.switch_out(SAMPLER, 1, 2)
        before = await d.agent.status()
        await d.relaunch()
        assert await d.agent.status() == before
        await d.agent.drop_versions([VERSION])
        await d.relaunch()
        assert await visit(d, sampler, SAMPLER, 3) == held
        assert (await d.agent.status()).host_used_bytes == 2 * SIZE


async def test_demoted_copy_is_there_after_a_kill(short_dir: Path) -> None:
    async with daemon(short_dir, host_bytes=2 * SIZE) as d:
        first = await frozen(d, FIRST)
        await frozen(d, SECOND)
        await identified(d, 1)
        expected = await visit(d, first, FIRST, 1)
        await start(d, POLICY, SIZE)
        await start(d, SAMPLER, SIZE)
        before = await d.agent.status()
        await d.relaunch()
        assert await d.agent.status() == before
        await d.agent.drop_wpg(SAMPLER, 1)
        assert await visit(d, first, FIRST, 4) == expected


@pytest.mark.parametrize("is_written", [False, True])
async def test_switch_is_completed_when_the_daemon_dies_as_a_frozen_rank_copies_out(
    short_dir: Path, is_written: bool
) -> None:
    async with daemon(short_dir) as d:
        first, second = await frozen(d, FIRST), await frozen(d, SECOND)
        await identified(d, 1)
        await d.agent.switch_in(FIRST, 1, 1, [])
        expected = first.run(6) if is_written else first.digest()
        killed = asyncio.Event()
        loop = asyncio.get_running_loop()

        def die() -> None:
            first.on_copy = lambda: None
            os.kill(d.pid, signal.SIGKILL)
            loop.call_soon_threadsafe(killed.set)

        first.on_copy = die
        switch = asyncio.create_task(d.agent.switch_out(FIRST, 1, 2))
        await killed.wait()
        await d.relaunch()
        await switch
        report = await identified(d, 1 + is_written)
        assert {s.deployment: s.applied for s in report.deployments} == {
            FIRST: 6 * is_written,
            SECOND: 0,
        }
        assert await visit(d, first, FIRST, 3) == expected
        assert (await visit(d, second, SECOND, 3) == expected) is not is_written


async def test_rank_that_died_meanwhile_leaves_the_content_to_the_other(short_dir: Path) -> None:
    async with daemon(short_dir, RESUME_TIMEOUT_S="5") as d:
        first, second = await frozen(d, FIRST), await frozen(d, SECOND)
        await identified(d, 1)
        await d.kill()
        await first.client.close()
        await d.launch()
        report = await d.agent.status()
        assert [s.deployment for s in report.deployments] == [SECOND]
        assert only(report).users == [str(SECOND)]
        assert report.host_used_bytes == SIZE
        await visit(d, second, SECOND, 1)


async def test_stale_files_of_shared_copies_are_swept(short_dir: Path) -> None:
    async with daemon(short_dir, host_bytes=2 * SIZE, reconnect_s=0.1) as d:
        await frozen(d, FIRST)
        await identified(d, 1)
        await start(d, POLICY, SIZE)
        await start(d, SAMPLER, SIZE)
        assert list((d.files / ".copies").iterdir())
        await d.agent.close()
        await d.kill()
    async with daemon(short_dir) as d:
        async with asyncio.timeout(30):
            while list((d.files / ".copies").iterdir()):
                await d.agent.status()


async def test_stale_files_go_before_anything_goes_down_under_their_names(short_dir: Path) -> None:
    """Each daemon of a node numbers its copies from one on; so many files take a while to go."""
    files = short_dir / "files" / ".copies"
    files.mkdir(parents=True)
    for number in range(1, 1001):
        (files / f"copy-{number}.state").touch()
    async with daemon(short_dir, host_bytes=2 * SIZE) as d:
        first = await frozen(d, FIRST)
        await identified(d, 1)
        expected = await visit(d, first, FIRST, 1)
        await start(d, POLICY, SIZE)
        await start(d, SAMPLER, SIZE)
        async with asyncio.timeout(30):
            while len(list(files.iterdir())) > 1:
                await d.agent.status()
        await d.agent.drop_wpg(SAMPLER, 1)
        assert await visit(d, first, FIRST, 2) == expected


async def test_sync_that_could_not_be_offloaded_is_refused_before_it_writes(
    short_dir: Path,
) -> None:
    """A part of a version cannot be the host copy: that needs room of its own."""
    spread = [moved(slots_of(SIZE)[0], 4096)]
    async with daemon(
        short_dir, devices=[3 * SIZE], host_bytes=3 * SIZE + 12288, NVME_BYTES="0"
    ) as d:
        policy = await start(d, POLICY, SIZE)
        sampler = await start(d, SAMPLER, SIZE + 4096, slots=spread, frozen=True)
        await d.agent.switch_in(POLICY, 1, 1, [])
        await d.agent.switch_in(SAMPLER, 1, 1, [])
        before = sampler.digest()
        policy.run(1)
        part = await publish_in_one_part(policy)
        with pytest.raises(ResourceError, match="needs 2101248 bytes of host memory"):
            await load_version(sampler.client, part, [], sampler.slots)
        assert sampler.digest() == before
        await d.agent.switch_out(SAMPLER, 1, 2)
        await d.agent.drop_wpg(POLICY, 1)
        await d.agent.switch_in(SAMPLER, 1, 3, [])
        await load_version(sampler.client, part, [], sampler.slots)
        sampler.seq = 2
        after = sampler.digest()
        report = await d.agent.status()
        manifest_bytes = 4096
        # its place is taken already
        assert report.host_used_bytes == SIZE + manifest_bytes + 2 * (SIZE + 4096)
        await d.agent.switch_out(SAMPLER, 1, 4)
        assert await visit(d, sampler, SAMPLER, 5) == after
        assert (await d.agent.status()).host_used_bytes == 2 * SIZE + manifest_bytes + 4096


def moved(slot: TensorSlot, offset: int) -> TensorSlot:
    return msgspec.structs.replace(slot, offset=offset)


async def test_version_of_another_job_is_nobody_s_host_copy(short_dir: Path) -> None:
    """Its layout is no secret; its bytes are."""
    async with daemon(short_dir, devices=[2 * SIZE]) as d:
        policy = await start(d, POLICY, SIZE)
        foreign = await frozen(d, FOREIGN)
        await d.agent.switch_in(POLICY, 1, 1, [])
        await d.agent.switch_in(FOREIGN, 1, 1, [])
        policy.run(1)
        await policy.client.versions.create(VERSION, policy.slots)
        with pytest.raises(CallerError) as caught:
            await foreign.client.versions.hold(VERSION, 1)
        assert caught.value.info.code is Code.PERMISSION_DENIED
        assert only(await d.agent.status()).version is None


async def test_version_outlives_the_sampler_that_cannot_come_back_after_a_kill(
    short_dir: Path,
) -> None:
    async with daemon(short_dir, devices=[SIZE, SIZE]) as d:
        policy = await start(d, POLICY, SIZE)
        sampler = await start(d, SAMPLER, SIZE, device=1, frozen=True, content=3)
        await d.agent.switch_in(POLICY, 1, 1, [])
        await d.agent.switch_in(SAMPLER, 1, 1, [])
        content = policy.run(1)
        await synced(d, sampler, policy, VERSION, 2)
        d.environment["PHASELOOM_STATEMGR_DEVICES"] = json.dumps([SIZE])
        await d.relaunch()
        report = await d.agent.status()
        assert [state.deployment for state in report.deployments] == [POLICY]
        assert report.versions == [VERSION]
        assert policy.digest() == content
        await d.agent.switch_out(POLICY, 1, 2)


async def test_descriptor_on_its_way_is_that_of_the_version_though_it_is_dropped(
    short_dir: Path,
) -> None:
    """Before it leaves, the agent is asked to keep a handle; meanwhile the version may go."""
    asked, answered = asyncio.Event(), asyncio.Event()
    answered.set()

    async def keep(body: StateMessage, fds: list[int]) -> tuple[StateMessage, list[int]]:
        close_fds(fds)
        asked.set()
        await answered.wait()
        return Done(), []

    async with daemon(short_dir, devices=[2 * SIZE]) as d:
        policy, sampler = await policy_and_sampler(d, MiB)
        policy.run(1)
        part = await publish_in_one_part(policy)
        await d.agent.drop_wpg(POLICY, 1)  # so that the version's memory is nobody else's
        agent: Peer[StateMessage] = await Peer.connect(d.socket, StateMessage, keep)
        await agent.call(AgentHello(SECRET))
        await agent.call(StatusRequest())  # it keeps all that there is
        asked.clear()
        answered.clear()
        opening = asyncio.create_task(open_version(sampler.client, part, [], policy.slots))
        await asked.wait()  # for the copy that the sampler may need now
        dropping = asyncio.create_task(agent.call(DropVersions([VERSION])))
        await asyncio.sleep(0)  # it is sent
        answered.set()
        async with asyncio.timeout(30):
            _, digest = await opening
            await dropping
        assert digest == policy.digest()
        assert (await d.agent.status()).versions == []
        await agent.close()
