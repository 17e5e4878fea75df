"""Deployments with several ranks: each has its heap, host copy and device; all move together."""

from __future__ import annotations

import asyncio
import signal
import threading
import tracemalloc
from pathlib import Path

import pytest

from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.tensors.blockhash import digest_in_threads
from phaseloom.common.tensors.resharding import StridedRanges
from tests.support.readversions import open_version
from tests.support.statedaemon import (
    OTHER,
    POLICY,
    SAMPLER,
    Daemon,
    MiB,
    child,
    daemon,
    names,
    real_memory,
    sent,
    start,
    start_ranks,
)

TWIN = DeploymentKey("acme", "letters", "sampler")


async def test_ranks_move_together_and_are_counted_by_device(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[2 * MiB, 3 * MiB]) as d:
        pair = await start_ranks(d, POLICY, [MiB, 2 * MiB])
        single = await start(d, OTHER, 2 * MiB, device=1)
        switched = await d.agent.switch_in(POLICY, 1, 1, [])
        assert switched.bytes_in == 3 * MiB
        assert (await d.agent.status()).device_used_bytes == [MiB, 2 * MiB]
        digests = [rank.run(index + 1) for index, rank in enumerate(pair)]
        with pytest.raises(ResourceError, match="of device 1: 2097152 of 3145728 are in use"):
            await d.agent.switch_in(OTHER, 1, 2, [])
        switched = await d.agent.switch_in(OTHER, 1, 3, [POLICY])
        # What is in nobody's way stays.
        assert (switched.bytes_out, switched.bytes_in) == (2 * MiB, 2 * MiB)
        assert switched.displaced == [POLICY]
        assert (await d.agent.status()).device_used_bytes == [MiB, 2 * MiB]
        assert [rank.heap.resident_bytes() for rank in (*pair, single)] == [MiB, 0, 2 * MiB]
        await d.agent.switch_in(POLICY, 1, 4, [OTHER])
        assert [rank.digest() for rank in pair] == digests
        assert (await d.agent.switch_out(POLICY, 1, 4)).bytes_out == 3 * MiB
        assert (await d.agent.status()).device_used_bytes == [0, 0]
        (state,) = [s for s in (await d.agent.status()).deployments if s.deployment == POLICY]
        assert (state.devices, state.heap_bytes, state.resident) == ([0, 1], 3 * MiB, False)


async def test_switch_of_two_devices_copies_on_both_at_once(short_dir: Path) -> None:
    """Each rank's copy waits for the other's to have begun: one after the other would hang."""
    async with daemon(short_dir, devices=[MiB, MiB]) as d:
        pair = await start_ranks(d, POLICY, [MiB, MiB])
        await d.agent.switch_in(POLICY, 1, 1, [])
        both = threading.Barrier(2, timeout=30)

        def meet() -> None:
            both.wait()

        for rank in pair:
            rank.on_copy = meet
        await d.agent.switch_out(POLICY, 1, 1)


async def test_ranks_that_are_loaded_are_taken_back_when_one_cannot_be(short_dir: Path) -> None:
    def broken() -> None:
        raise RuntimeError("derived tensors cannot be rebuilt")

    async with daemon(short_dir, devices=[MiB, MiB]) as d:
        before = await start_ranks(d, OTHER, [MiB, MiB])
        await d.agent.switch_in(OTHER, 1, 1, [])
        digests = [rank.run(index + 3) for index, rank in enumerate(before)]
        pair = await start_ranks(d, POLICY, [MiB, MiB])
        pair[1].on_loaded = broken
        with pytest.raises(PhaseloomError, match="derived tensors"):
            await d.agent.switch_in(POLICY, 1, 2, [OTHER])
        assert [rank.heap.resident_bytes() for rank in pair] == [0, 0]
        assert [rank.digest() for rank in before] == digests
        status = await d.agent.status()
        assert status.device_used_bytes == [MiB, MiB]
        assert {s.deployment: s.resident for s in status.deployments} == {
            OTHER: True,
            POLICY: False,
        }
        pair[1].on_loaded = lambda: None
        await d.agent.switch_in(POLICY, 1, 3, [OTHER])
        assert [rank.heap.resident_bytes() for rank in pair] == [MiB, MiB]


async def test_whole_incarnation_is_over_with_one_rank(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[MiB, MiB]) as d:
        first, second = await start_ranks(d, POLICY, [MiB, MiB])
        await d.agent.switch_in(POLICY, 1, 1, [])
        await second.client.close()
        await asyncio.wait_for(first.client.closed, 60)
        status = await d.agent.status()
        assert (status.deployments, status.device_used_bytes) == ([], [0, 0])
        assert status.host_used_bytes == 0


async def test_seal_holds_every_rank_and_is_refused_by_another_layout(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[4 * MiB, 4 * MiB]) as d:
        ranks = await start_ranks(d, POLICY, [MiB, 2 * MiB])
        await d.agent.switch_in(POLICY, 1, 1, [])
        digests = []
        for index, rank in enumerate(ranks):
            rank.run(20 + index)
            rank.seq = 4
            digests.append(rank.digest())
        await d.agent.prepare_seal(POLICY, 1, 4)
        for rank in ranks:
            rank.run(5)  # the deployment runs on while the seal is written
        sealed = await d.agent.write_seal(POLICY, 1, 4, [])
        assert sealed.num_bytes == 3 * MiB
        assert names(d) == ["seal-4.state"]
        reborn = await start_ranks(d, POLICY, [MiB, 2 * MiB], incarnation=2, seal_seq=4)
        assert [rank.seq for rank in reborn] == [4, 4]
        await d.agent.switch_in(POLICY, 2, 2, [])
        assert [rank.digest() for rank in reborn] == digests
        for incarnation, sizes in ((3, [3 * MiB]), (4, [MiB, MiB]), (5, [MiB, 2 * MiB, MiB])):
            with pytest.raises(CallerError, match="has another layout") as caught:
                await start_ranks(
                    d,
                    POLICY,
                    sizes,
                    devices=[0, 1, 1][: len(sizes)],
                    incarnation=incarnation,
                    seal_seq=4,
                )
            info = caught.value.info
            assert info.code is Code.FAILED_PRECONDITION
            assert info.details["sealed_ranks"] == "2"
            assert info.details["ranks"] == str(len(sizes))
        again = await start_ranks(d, POLICY, [MiB, 2 * MiB], incarnation=6, seal_seq=4)
        await d.agent.switch_in(POLICY, 6, 3, [])
        assert [rank.digest() for rank in again] == digests


async def test_seal_is_refused_when_ranks_are_not_at_the_same_seq(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[MiB, MiB]) as d:
        first, second = await start_ranks(d, POLICY, [MiB, MiB])
        await d.agent.switch_in(POLICY, 1, 1, [])
        first.run(2)
        second.run(1)
        with pytest.raises(CallerError, match=r"rank 1 of .* has applied 1, not 2"):
            await d.agent.prepare_seal(POLICY, 1, 2)
        assert names(d) == []


async def test_versions_are_made_by_rank_0_and_read_by_every_rank(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[MiB, MiB]) as d:
        ranks = await start_ranks(d, POLICY, [MiB, MiB])
        readers = await start_ranks(d, SAMPLER, [MiB, MiB])
        key = VersionKey(POLICY, 2)
        buffer = await ranks[0].client.versions.reserve(key, ranks[0].slots)
        assert isinstance(buffer, memoryview)
        buffer[:] = bytes([7]) * MiB
        made = await ranks[0].client.versions.commit(key, buffer, digest_in_threads(buffer))
        for rank in readers:
            content, digest = await open_version(rank.client, key, [], rank.slots)
            assert (bytes(content[:3]), digest) == (b"\x07\x07\x07", made.digest)
            with pytest.raises(CallerError, match="of another model"):
                await open_version(rank.client, key, [], [])
        with pytest.raises(CallerError, match="only the first rank") as caught:
            await ranks[1].client.versions.reserve(VersionKey(POLICY, 3), ranks[1].slots)
        assert caught.value.info.code is Code.PERMISSION_DENIED


async def test_initial_state_may_stand_for_a_later_seq(short_dir: Path) -> None:
    """As where a job goes on from a checkpoint."""
    async with daemon(short_dir) as d:
        rank = await start(d, POLICY, applied=7)
        await d.agent.prepare_seal(POLICY, 1, 7)
        await d.agent.write_seal(POLICY, 1, 7, [])
        assert names(d) == ["seal-7.state"]
        assert [s.applied for s in (await d.agent.status()).deployments] == [7]
        await d.relaunch()
        await d.agent.switch_in(POLICY, 1, 1, [])
        assert rank.heap.resident_bytes() == MiB


async def test_one_device_does_not_wait_for_another_of_a_hung_rank(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[MiB, MiB, MiB]) as d, child(d, SAMPLER, MiB) as hung:
        await start_ranks(d, POLICY, [MiB, MiB], devices=[1, 2])
        hung.process.send_signal(signal.SIGSTOP)
        waiting = await sent(d.agent.switch_in(SAMPLER, 1, 1, []))
        await d.agent.switch_in(POLICY, 1, 2, [])
        assert not waiting.done()
        hung.process.send_signal(signal.SIGCONT)
        await waiting
        assert (await d.agent.status()).device_used_bytes == [MiB, MiB, MiB]


async def test_switches_over_crossing_devices_never_wait_for_each_other(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[MiB, MiB]) as d:
        await start_ranks(d, POLICY, [MiB, MiB], devices=[0, 1])
        await start_ranks(d, OTHER, [MiB, MiB], devices=[1, 0])
        for epoch in range(1, 20, 2):
            await asyncio.gather(
                d.agent.switch_in(POLICY, 1, epoch, [OTHER]),
                d.agent.switch_in(OTHER, 1, epoch + 1, [POLICY]),
            )
        assert (await d.agent.status()).device_used_bytes == [MiB, MiB]


async def held_bytes(d: Daemon, expected: int) -> None:
    """Once so much host memory is held."""
    async with asyncio.timeout(30):
        while (await d.agent.status()).host_used_bytes != expected:
            pass


async def lent_bytes(d: Daemon, key: DeploymentKey, expected: int) -> None:
    """Once the deployment has borrowed so many bytes of host memory, beside its host copy of 1 MiB:
    memory is returned by itself when the last reference is gone."""
    async with asyncio.timeout(30):
        while True:
            states = {each.deployment: each for each in (await d.agent.status()).deployments}
            if states[key].host_bytes == MiB + expected:
                return


async def test_memory_for_a_trainers_own_weights_is_of_the_budget_until_nobody_refers_to_it(
    short_dir: Path,
) -> None:
    """While an operation reads with other weights, the rank's own are in host memory a second time:
    that was beside the budget."""
    async with daemon(short_dir, devices=[MiB, MiB], host_bytes=3 * MiB) as d:
        first = await start(d, POLICY, MiB)
        second = await start(d, OTHER, MiB, device=1)
        for key in (POLICY, OTHER):
            await d.agent.switch_in(key, 1, 1, [])
        own = first.run(7)
        others = memoryview(bytearray([5]) * MiB)
        tracemalloc.start()
        borrowed = await first.client.loans.borrow_to_save(MiB, 7)
        assert await first.client.loans.borrow_to_save(MiB, 7) is borrowed
        with first.client.versions.temporarily_loaded(
            [(others, [StridedRanges(0, 0, MiB)])], borrowed
        ):
            assert first.heap.buffer == others
            _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < MiB / 2, "memory that nobody counts"
        assert sum(real_memory(d.pid, "a copy of the current weights").values()) == MiB
        assert (await d.agent.status()).host_used_bytes == 3 * MiB
        assert first.digest() == own
        with pytest.raises(ResourceError, match="a copy of the current weights for acme") as caught:
            await second.client.loans.borrow_to_save(MiB, 0)
        assert caught.value.info.code is Code.RESOURCE_EXHAUSTED
        assert caught.value.info.remedy
        told = caught.value.info.details
        numbers = [told[name] for name in ("needed_bytes", "used_bytes", "budget_bytes")]
        assert numbers == [str(MiB), str(3 * MiB), str(3 * MiB)]

        # At another seq it would hold what is not the rank's own any more.
        first.run(8)
        with pytest.raises(AssertionError), first.client.versions.temporarily_loaded([], borrowed):
            pass
        del borrowed
        await lent_bytes(d, POLICY, 0)
        again = await second.client.loans.borrow_to_save(MiB, 0)
        assert not again.is_filled
        await d.agent.drop_wpg(OTHER, 1, forget=True)
        assert (await d.agent.status()).host_used_bytes == MiB, "it went with its rank"
        assert len(again.memory) == MiB


async def test_frozen_rank_borrows_its_host_copy_where_that_has_its_weights(
    short_dir: Path,
) -> None:
    async with daemon(short_dir, devices=[MiB, MiB], host_bytes=2 * MiB) as d:
        rank = await start(d, SAMPLER, MiB, frozen=True, content=3)
        twin = await start(d, TWIN, MiB, device=1, frozen=True, content=3)
        await held_bytes(d, MiB)  # they share one host copy
        for key in (SAMPLER, TWIN):
            await d.agent.switch_in(key, 1, 1, [])
        own = rank.digest()
        theirs = await twin.client.loans.borrow_to_save(MiB, 0)
        assert theirs.is_filled
        others = memoryview(bytearray([5]) * MiB)
        borrowed = await rank.client.loans.borrow_to_save(MiB, 0)
        assert borrowed.is_filled
        assert (await d.agent.status()).host_used_bytes == MiB
        with rank.client.versions.temporarily_loaded(
            [(others, [StridedRanges(0, 0, MiB)])], borrowed
        ):
            assert rank.heap.buffer == others
        assert rank.digest() == own

        # The copy's memory stays for the loan, also where no rank has the copy any more.
        await d.agent.drop_wpg(TWIN, 1, forget=True)
        rank.run(4)
        await d.agent.switch_out(SAMPLER, 1, 1)
        assert (await d.agent.status()).host_used_bytes == 2 * MiB
        assert digest_in_threads(borrowed.memory) == own
        del borrowed
        await held_bytes(d, MiB)
        await d.agent.switch_in(SAMPLER, 1, 2, [])
        rank.run(5)  # its host copy is older: it needs memory of its own
        assert not (await rank.client.loans.borrow_to_save(MiB, 5)).is_filled


async def test_loans_are_known_to_the_next_daemon_and_end_with_their_rank(
    short_dir: Path,
) -> None:
    async with daemon(short_dir, devices=[MiB, MiB], host_bytes=4 * MiB) as d:
        trainer = await start(d, POLICY, MiB)
        sampler = await start(d, SAMPLER, MiB, device=1, frozen=True, content=3)
        for key in (POLICY, SAMPLER):
            await d.agent.switch_in(key, 1, 1, [])
        borrowed = [
            await trainer.client.loans.borrow_to_save(MiB, 0),
            await trainer.client.loans.borrow(MiB, "the weights of a checkpoint"),
            await sampler.client.loans.borrow_to_save(MiB, 0),
        ]
        assert (await d.agent.status()).host_used_bytes == 4 * MiB
        await d.relaunch()
        assert (await d.agent.status()).host_used_bytes == 4 * MiB
        await lent_bytes(d, POLICY, 2 * MiB)
        with pytest.raises(ResourceError) as caught:
            await sampler.client.loans.borrow(MiB, "more")
        assert caught.value.info.code is Code.RESOURCE_EXHAUSTED
        del borrowed[1:]
        await lent_bytes(d, POLICY, MiB)
        await trainer.client.close()
        await held_bytes(d, MiB)
