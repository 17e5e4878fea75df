"""Digests that are taken after the fact: waited for, once, and of nothing that is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from phaseloom.common.contract.errors import ResourceError
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.contract.state_agent import RegisterWpg
from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.common.contract.state_rank import RegisterHeap
from phaseloom.common.tensors.blockhash import (
    BLOCK_BYTES,
    checksum,
    combine_checksums,
    digest_of,
    map_parts,
)
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.statemgr.node.background import Background
from phaseloom.statemgr.node.digests import Digests
from phaseloom.statemgr.node.extents import HostMemory
from phaseloom.statemgr.records.incarnations import Rank, State, Step
from phaseloom.statemgr.records.residency import Residency

SIZE = BLOCK_BYTES + 4096
KEY = DeploymentKey("acme", "sums", "policy")


@dataclass
class World:
    residency: Residency
    memory: HostMemory
    digests: Digests
    background: Background
    tasks: asyncio.TaskGroup
    kept: list[str] = field(default_factory=list)

    def offloaded(self) -> Rank:
        """Its host copy is whole, and nobody has hashed it."""
        self.residency.register(RegisterWpg(["token"], KEY, 1, [0], 0))
        rank = self.residency.authenticate("token")
        slots = [TensorSlot("w", Role.WEIGHT, "uint8", [SIZE], 0, SIZE)]
        extent = self.memory.reserve(SIZE, "a copy")
        self.residency.register_heap(rank, RegisterHeap(SIZE, b""), TensorTable.of(slots), extent)
        self.residency.fill(rank, 1, "the first")
        self.residency.begin_load(rank)
        self.residency.step(rank, Step.LOAD_VERIFIED)
        self.residency.begin_copy_out(rank, release=True)
        self.content(rank)[:] = b"\x07" * SIZE
        self.residency.finish_copy_out(rank, 2)
        return rank

    def content(self, rank: Rank) -> memoryview:
        assert rank.extent is not None
        return self.memory[rank.extent].view(SIZE)


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    residency, memory = Residency([SIZE]), HostMemory(4 * SIZE)

    @asynccontextmanager
    async def change() -> AsyncIterator[None]:
        yield
        made.kept.append(rank_of(residency).digest)

    background = Background()
    digests = Digests(background, residency, memory, change)
    async with background.running(), asyncio.TaskGroup() as tasks:
        made = World(residency, memory, digests, background, tasks)
        yield made
    residency.validate()
    memory.close()


def rank_of(residency: Residency) -> Rank:
    (rank,) = residency.current(KEY, 1).ranks
    return rank


async def test_dirty_copy_gets_its_digest_and_the_manifest_is_written() -> None:
    async with world() as w:
        rank = w.offloaded()
        assert (rank.is_dirty, rank.is_whole, rank.digest) == (True, True, "")
        w.residency.validate()
        w.digests.begin([rank])
        w.digests.begin([rank])
        await asyncio.gather(w.digests.until_taken(rank), w.digests.until_taken(rank))
        assert (rank.is_dirty, rank.digest) == (False, digest_of(w.content(rank)))
        assert rank.applied == 2
    assert w.kept == [rank.digest]  # taken once, however many ask


async def test_digest_is_taken_for_who_waits_though_nobody_began() -> None:
    async with world() as w:
        rank = w.offloaded()
        await w.digests.until_taken(rank)
        assert rank.digest
        await w.digests.until_taken(rank)


async def test_who_waits_hears_that_the_incarnation_is_over() -> None:
    async with world() as w:
        rank = w.offloaded()
        waiting = w.tasks.create_task(_refused(w.digests.until_taken(rank)))
        await asyncio.sleep(0)
        w.residency.drop(KEY, 1)
        assert rank.state is State.LOST
        assert "was lost" in await waiting
        assert rank.digest == ""
    assert w.kept == []


async def test_digest_of_an_older_copy_is_not_taken_for_that_of_a_newer_one() -> None:
    """A seal had hashed the older one meanwhile, so that nothing waited for this."""
    one_thread = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(one_thread)
    async with world() as w:
        rank = w.offloaded()
        w.digests.begin([rank])
        await asyncio.sleep(0)
        one_thread.submit(lambda: None).result()  # it is taken, and not heard of yet
        w.residency.digested(rank, digest_of(w.content(rank)))
        w.residency.begin_load(rank)
        w.residency.step(rank, Step.LOAD_VERIFIED)
        w.residency.begin_copy_out(rank, release=True)
        w.content(rank)[:] = b"\x08" * SIZE
        w.residency.finish_copy_out(rank, 3)
        await w.digests.until_taken(rank)
        assert rank.digest == digest_of(w.content(rank))


async def test_incarnation_that_ends_as_its_digest_is_begun_harms_nobody() -> None:
    async with world() as w:
        rank = w.offloaded()
        w.digests.begin([rank])
        w.residency.drop(KEY, 1)
        _, (copy,) = w.residency.reap(rank.wpg)
        assert copy.extent is not None
        w.memory.free(copy.extent)
        await w.digests.until_ended(rank)
    assert rank.digest == ""


async def test_stop_ends_what_waits() -> None:
    async with world() as w:
        rank = w.offloaded()
        w.background.stop()
        assert "was lost" in await _refused(w.digests.until_taken(rank))
        w.digests.begin([rank])
    assert rank.is_dirty


async def _refused(waiting: object) -> str:
    assert asyncio.iscoroutine(waiting)
    with pytest.raises(ResourceError) as caught:
        await waiting
    return caught.value.info.message


def test_copy_that_is_dirty_may_be_sealed_and_demoted_but_not_taken_for_verified() -> None:
    residency = Residency([10])
    residency.register(RegisterWpg(["token"], KEY, 1, [0], 0))
    rank = residency.authenticate("token")
    residency.register_heap(rank, RegisterHeap(10, b""), TensorTable.of([]), 1)
    residency.fill(rank, 3, "")
    residency.prepare_seal(rank.wpg, 3)
    residency.validate()
    residency.end_seal(rank.wpg)
    copies = residency.copies
    (copy,) = copies.demotable()
    copies.step(copy, Step.DEMOTE_BEGUN)
    copies.validate()
    copies.step(copy, Step.DEMOTE_VERIFIED)
    with pytest.raises(AssertionError):
        copies.validate()
    rank.copied(3, "as it was written")
    copies.validate()
    residency.validate()


@pytest.mark.parametrize("num_bytes", [0, 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 5])
def test_digest_is_the_same_however_many_threads_take_it(num_bytes: int) -> None:
    memory = memoryview(bytes(range(256)) * (num_bytes // 256 + 1))[:num_bytes]
    parts = map_parts(num_bytes, BLOCK_BYTES, lambda at, end: checksum(memory[at:end]))
    assert combine_checksums(b"".join(parts)) == digest_of(memory)


def test_flip_in_any_block_changes_the_digest() -> None:
    memory = memoryview(bytearray(2 * BLOCK_BYTES + 100))
    digests = {digest_of(memory)}
    for place in (0, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 99):
        memory[place] ^= 4
        digests.add(digest_of(memory))
        memory[place] ^= 4
    assert len(digests) == 5
    assert digest_of(memory[:-1]) not in digests


def test_failure_of_one_part_is_raised() -> None:
    def work(start: int, _: int) -> int:
        if start == 20:
            raise ValueError(start)
        return start

    with pytest.raises(ValueError, match="20"):
        map_parts(100, 10, work)
    assert map_parts(15, 10, work) == [0, 10]
