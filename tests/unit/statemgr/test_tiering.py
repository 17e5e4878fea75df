"""Moves between host memory and NVMe that meet one another: joined, cancelled, outlived."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from phaseloom.common.contract.errors import Code, InternalError, ResourceError
from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.contract.specs import Durability
from phaseloom.common.contract.state_agent import Prefetch, PrepareSeal, RegisterWpg, WriteSeal
from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.common.contract.state_rank import RegisterHeap
from phaseloom.common.tensors.blockfile import Cancelled
from phaseloom.common.tensors.blockhash import digest_of
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.statemgr.disk.disk import BlockOf
from phaseloom.statemgr.disk.files import NEVER, StateDirectory, find_parts
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.records.incarnations import Rank, State, Wpg
from phaseloom.statemgr.records.stateheader import SectionRef, StateHeader
from phaseloom.statemgr.seals.sealing import Sealer
from phaseloom.statemgr.tiering.tiering import Tiering
from tests.support.nodeparts import node_on, parts_on
from tests.support.statefiles import PREFERRED
from tests.support.threads import FirstIsLate

PAGE = 4096
SIZE = 16 * PAGE
HEAP = SIZE - PAGE + 1
"""Memory is given in whole pages."""
NAMES = ["a", "b", "c"]


class GatedDirectory(StateDirectory):
    """A disk that is as slow as a test wants: each move waits at its gate, or for its cancel."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, PREFERRED)
        self.gate = threading.Event()
        self.gate.set()
        self.at_gate = threading.Semaphore(0)
        self.last_gate = threading.Event()
        """Before a file goes of what has come up."""
        self.last_gate.set()
        self.at_last_gate = threading.Semaphore(0)

    def remove(self, path: Path) -> None:
        self.at_last_gate.release()
        self.last_gate.wait()
        super().remove(path)

    def write(
        self,
        path: Path,
        header: StateHeader,
        memories: Sequence[memoryview | BlockOf],
        cancelled: threading.Event = NEVER,
    ) -> StateHeader:
        self._wait(cancelled)
        return super().write(path, header, memories, cancelled)

    def read(
        self, place: SectionRef, memory: memoryview, cancelled: threading.Event = NEVER
    ) -> None:
        self._wait(cancelled)
        super().read(place, memory, cancelled)

    def _wait(self, cancelled: threading.Event) -> None:
        self.at_gate.release()
        while not self.gate.wait(0.001):
            if cancelled.is_set():
                raise Cancelled


@dataclass
class World:
    node: Node
    directory: GatedDirectory
    tiering: Tiering
    sealer: Sealer
    wpgs: dict[str, Wpg] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    async def add(self, name: str, *, incarnation: int = 1, content: str = "") -> Rank:
        """A deployment whose whole state is in host memory."""
        key = DeploymentKey("acme", "job", name)
        node = self.node
        token = f"token {name} {incarnation}"
        replaced = node.records.residency.register(RegisterWpg([token], key, incarnation, [0], 0))
        if replaced is not None:
            node.ranks.retire(replaced, "another incarnation has come")
        (rank,) = node.records.residency.current(key, incarnation).ranks
        slots = [TensorSlot("w", Role.WEIGHT, "uint8", [HEAP], 0, HEAP)]
        with self.node.records.residency.using(rank.wpg):
            extent = await self.tiering.reserve(HEAP, name)
        heap, table = RegisterHeap(HEAP, b""), TensorTable.of(slots)
        node.records.residency.register_heap(rank, heap, table, extent)
        memory = node.memory[extent].view(HEAP)
        memory[:] = (content or name).encode() * HEAP
        self.wpgs[name], self.digests[name] = rank.wpg, digest_of(memory)
        node.records.residency.fill(rank, 1, self.digests[name])
        return rank

    def state(self, name: str) -> State:
        """Where the rank's host copy is; LOST: the rank is."""
        (rank,) = self.wpgs[name].ranks
        return rank.state if rank.copy is None else rank.copy.state

    def file(self, name: str) -> Path:
        copy = self.wpgs[name].ranks[0].copy
        assert copy is not None
        return self.node.copies.file_of(copy)

    def is_whole(self, name: str) -> bool:
        (rank,) = self.wpgs[name].ranks
        assert rank.extent is not None
        return digest_of(self.node.memory[rank.extent].view(HEAP)) == self.digests[name]

    async def at_gate(self) -> None:
        """A move has come as far as its bytes, and waits."""
        await asyncio.to_thread(self.directory.at_gate.acquire)

    async def rest(self) -> None:
        await self.node.ledger.until(lambda: not self.node.copies.moves)

    async def use(self, name: str) -> None:
        async with self.tiering.in_host(self.wpgs[name]):
            assert self.is_whole(name)

    def hint(self, name: str, in_s: float) -> None:
        wpg = self.wpgs[name]
        self.tiering.hint(wpg, Prefetch(wpg.key, 1, in_s))


@asynccontextmanager
async def world(directory: Path, *, room: int = 2, closed: bool = True) -> AsyncIterator[World]:
    """`a` is on NVMe, `b` and `c` in host memory, which has room for two; the gate is closed."""
    gated = await asyncio.to_thread(GatedDirectory, directory)
    node = node_on(gated, device_bytes=SIZE, host_bytes=room * SIZE)
    parts = parts_on(node, nvme_bytes=10 * SIZE)
    tiering = parts.tiering
    made = World(node, gated, tiering, parts.sealer)
    async with node.background.running():
        for name in NAMES:
            await made.add(name)
            async with tiering.in_host(made.wpgs[name]):
                pass
        await made.rest()
        assert [made.state(name) for name in NAMES] == [State.DEMOTED, State.HOST, State.HOST]
        await made.at_gate()
        if closed:
            gated.gate.clear()
        yield made
        gated.gate.set()
        await made.rest()
        node.validate()
    node.close()


async def test_demotion_is_cancelled_by_who_needs_the_copy(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        asking = asyncio.create_task(w.tiering.reserve(SIZE, "new"))
        await w.at_gate()
        assert w.state("b") is State.DEMOTING
        using = asyncio.create_task(w.use("b"))
        # `b` stays; room is made by `c` instead.
        await w.at_gate()
        await using
        assert w.state("b") is State.HOST
        assert w.state("c") is State.DEMOTING
        w.directory.gate.set()
        w.node.memory.free(await asking)
        assert len(w.directory.host_copies()) == 2


async def test_move_upward_is_joined(tmp_path: Path) -> None:
    async with world(tmp_path, closed=False) as w:
        w.node.ranks.retire(w.wpgs["b"], "room")
        w.directory.gate.clear()
        w.hint("a", 5.0)
        await w.at_gate()
        assert w.state("a") is State.PROMOTING
        using = asyncio.create_task(w.use("a"))
        await asyncio.sleep(0)
        w.directory.gate.set()
        await using
        assert w.state("a") is State.HOST


async def test_deployment_that_ends_on_its_way_up_leaves_no_file_and_no_bytes(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, closed=False) as w:
        w.node.ranks.retire(w.wpgs["b"], "room")
        w.directory.gate.clear()
        using = asyncio.create_task(w.use("a"))
        await w.at_gate()
        w.node.ranks.retire(w.wpgs["a"], "dropped")
        w.directory.gate.set()
        with pytest.raises(ResourceError):
            await using
        await w.rest()
        assert w.directory.host_copies() == set()
        assert w.node.memory.used_bytes == SIZE


async def test_deployment_that_ends_on_its_way_down_leaves_no_file_and_no_bytes(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as w:
        asking = asyncio.create_task(w.tiering.reserve(SIZE, "new"))
        await w.at_gate()
        w.node.ranks.retire(w.wpgs["b"], "dropped")
        w.directory.gate.set()
        w.node.memory.free(await asking)
        await w.rest()
        assert w.directory.host_copies() == {w.file("a")}
        assert w.node.memory.used_bytes == SIZE


async def test_deployment_that_ends_as_its_way_down_begins_makes_the_room_itself(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as w:
        asking = asyncio.create_task(w.tiering.reserve(SIZE, "new"))
        await asyncio.sleep(0)
        assert w.state("b") is State.DEMOTING
        w.node.ranks.retire(w.wpgs["b"], "its rank has left")
        w.node.memory.free(await asking)
        await w.rest()
        assert w.directory.host_copies() == {w.file("a")}


async def test_version_that_two_want_on_disk_is_written_once(tmp_path: Path) -> None:
    """A seal, and somebody who needs its memory."""
    async with world(tmp_path, closed=False) as w:
        key = VersionKey(DeploymentKey("acme", "job", "policy"), 1)
        slots = [TensorSlot("w", Role.WEIGHT, "uint8", [HEAP], 0, HEAP)]
        extent = await w.tiering.reserve(HEAP, "a version")
        await w.at_gate()
        w.directory.gate.clear()
        version = w.node.records.versions.begin(key, HEAP, TensorTable.of(slots), extent)
        w.node.records.versions.commit(version, digest_of(w.node.memory[extent].view(HEAP)))
        moves = w.tiering.versions
        both = [asyncio.create_task(moves.persist(version)) for _ in range(2)]
        await w.at_gate()
        w.directory.gate.set()
        await asyncio.gather(*both)
        assert version.is_on_disk
        assert not w.directory.at_gate.acquire(blocking=False)


async def test_records_are_sound_while_a_seal_is_written_to_host_memory(tmp_path: Path) -> None:
    async with world(tmp_path, closed=False) as w:
        w.node.memory.budget_bytes += 2 * SIZE
        sealer = w.sealer
        wpg, busy = w.wpgs["b"], threading.Event()
        await sealer.prepare(PrepareSeal(wpg.key, 1, 1))
        one_thread = ThreadPoolExecutor(1)
        asyncio.get_running_loop().set_default_executor(one_thread)
        one_thread.submit(busy.wait)
        request = WriteSeal(wpg.key, 1, 1, [], durability=Durability.HOST)
        writing = asyncio.create_task(sealer.write(request))
        used_bytes = w.node.memory.used_bytes
        while w.node.memory.used_bytes == used_bytes:
            await asyncio.sleep(0)
        try:
            w.node.validate()
        finally:
            busy.set()
            await writing
        await sealer.forget(wpg.key)


async def test_seals_of_two_incarnations_at_one_seq_are_written_one_after_the_other(
    tmp_path: Path,
) -> None:
    """The write of an incarnation that is over goes on, in a half-written file of the same name."""
    async with world(tmp_path, closed=False) as w:
        w.node.memory.budget_bytes += 2 * SIZE
        sealer, key = w.sealer, w.wpgs["b"].key
        await sealer.prepare(PrepareSeal(key, 1, 1))
        w.directory.gate.clear()
        old = asyncio.create_task(sealer.write(WriteSeal(key, 1, 1, [])))
        await w.at_gate()
        await w.add("b", incarnation=2, content="x")
        await sealer.prepare(PrepareSeal(key, 2, 1))
        new = asyncio.create_task(sealer.write(WriteSeal(key, 2, 1, [])))
        await asyncio.wait([new], timeout=0.1)  # it comes as far as it can
        assert not w.directory.at_gate.acquire(blocking=False)
        w.directory.gate.set()
        assert (await old).digest != (await new).digest
        (place,) = find_parts(w.directory.seal(key, 1))
        assert (place.header.digest, place.part.digest) == ((await new).digest, w.digests["b"])
        await sealer.forget(key)


async def test_seal_of_an_incarnation_that_is_over_does_not_replace_that_of_the_next(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, closed=False) as w:
        w.node.memory.budget_bytes += 2 * SIZE
        sealer, key = w.sealer, w.wpgs["b"].key
        version = VersionKey(key, 1)
        slots = [TensorSlot("w", Role.WEIGHT, "uint8", [HEAP], 0, HEAP)]
        extent = await w.tiering.reserve(HEAP, "a version")
        cut = w.node.records.versions.begin(version, HEAP, TensorTable.of(slots), extent)
        w.node.records.versions.commit(cut, digest_of(w.node.memory[extent].view(HEAP)))
        await sealer.prepare(PrepareSeal(key, 1, 1))
        w.directory.gate.clear()
        old = asyncio.create_task(sealer.write(WriteSeal(key, 1, 1, [1])))
        await w.at_gate()  # with the version
        await w.add("b", incarnation=2, content="x")
        await sealer.prepare(PrepareSeal(key, 2, 1))
        w.directory.gate.set()
        with pytest.raises(ResourceError, match="is over") as caught:
            await old
        assert caught.value.info.code is Code.ABORTED
        await sealer.write(WriteSeal(key, 2, 1, []))
        (place,) = find_parts(w.directory.seal(key, 1))
        assert place.part.digest == w.digests["b"]
        w.node.versions.drop(cut)
        await sealer.forget(key)


async def test_one_demotion_makes_room_for_one_of_two_who_ask(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        w.node.ranks.retire(w.wpgs["c"], "room")
        kept = await w.tiering.reserve(SIZE, "kept")
        asking = [asyncio.create_task(w.tiering.reserve(SIZE, f"new {n}")) for n in range(2)]
        await w.at_gate()
        w.directory.gate.set()
        results = await asyncio.gather(*asking, return_exceptions=True)
        (extent,) = [result for result in results if isinstance(result, int)]
        (refused,) = [result for result in results if isinstance(result, ResourceError)]
        assert refused.info.code is Code.RESOURCE_EXHAUSTED
        assert "nothing more can go to NVMe" in refused.info.message
        for each in (kept, extent):
            w.node.memory.free(each)


async def test_nothing_goes_down_for_what_cannot_fit_anyway(tmp_path: Path) -> None:
    async with world(tmp_path, closed=False) as w:
        with pytest.raises(ResourceError, match="nothing more can go to NVMe") as caught:
            await w.tiering.reserve(3 * SIZE, "too large")
        assert caught.value.info.details["needed_bytes"] == str(3 * SIZE)
        with w.node.records.residency.using(w.wpgs["b"]), pytest.raises(ResourceError):
            await w.tiering.reserve(2 * SIZE, "too large beside what is in use")
        assert [w.state(name) for name in NAMES] == [State.DEMOTED, State.HOST, State.HOST]


async def test_host_copy_that_went_bad_is_not_demoted_and_its_incarnation_is_over(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, closed=False) as w:
        (rank,) = w.wpgs["b"].ranks
        assert rank.extent is not None
        w.node.memory[rank.extent].view(HEAP)[7] ^= 1
        w.node.memory.free(await w.tiering.reserve(SIZE, "new"))
        assert w.state("b") is State.LOST
        assert w.state("c") is State.HOST


async def test_caller_that_is_cancelled_leaves_the_move_whole(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        asking = asyncio.create_task(w.tiering.reserve(SIZE, "new"))
        await w.at_gate()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        w.directory.gate.set()
        await w.rest()
        assert w.state("b") is State.DEMOTED
        await w.use("b")


async def test_directory_in_the_place_of_a_copy_below_ends_that_incarnation_only(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, closed=False) as w:
        (path,) = w.directory.host_copies()
        path.unlink()
        (path / "in the way").mkdir(parents=True)
        with pytest.raises(ResourceError) as caught:
            await w.use("a")
        assert caught.value.info.code is Code.DATA_LOSS
        await w.rest()
        assert w.state("a") is State.LOST
        await w.use("b")


async def test_directory_in_the_way_of_a_copy_down_leaves_it_above(tmp_path: Path) -> None:
    async with world(tmp_path, closed=False) as w:
        for name in ("b", "c"):
            (w.file(name) / "in the way").mkdir(parents=True)
        with pytest.raises(ResourceError, match="nothing more can go to NVMe"):
            await w.tiering.reserve(SIZE, "new")
        assert [w.state(name) for name in NAMES] == [State.DEMOTED, State.HOST, State.HOST]
        w.node.ranks.retire(w.wpgs["c"], "its rank has left")


@asynccontextmanager
async def without_threads() -> AsyncIterator[None]:
    """As on a machine that has no thread to give: `to_thread` raises what is none of ours."""
    loop, gone, back = asyncio.get_running_loop(), ThreadPoolExecutor(1), ThreadPoolExecutor(4)
    gone.shutdown()
    loop.set_default_executor(gone)
    yield
    loop.set_default_executor(back)


async def test_move_that_fails_as_nobody_foresaw_fails_alone_and_the_copy_is_where_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(tmp_path, closed=False) as w:
        async with without_threads():
            with pytest.raises(ResourceError, match="nothing more can go to NVMe"):
                await w.tiering.reserve(SIZE, "new")
            assert [w.state(name) for name in NAMES] == [State.DEMOTED, State.HOST, State.HOST]
            w.node.validate()
            w.node.ranks.retire(w.wpgs["c"], "room")
            with pytest.raises(InternalError, match="RuntimeError"):
                await w.use("a")
            assert w.state("a") is State.DEMOTED
            w.node.validate()
        await w.use("a")
    assert "Traceback" in caplog.text


async def test_copy_that_has_just_come_up_goes_down_once_the_end_of_that_is_recorded(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, closed=False) as w:
        w.directory.last_gate.clear()
        with w.node.records.residency.using(w.wpgs["c"]):
            w.hint("a", 5.0)
            await asyncio.to_thread(w.directory.at_last_gate.acquire)
            assert w.state("a") is State.HOST
            asking = asyncio.create_task(w.tiering.reserve(SIZE, "new"))
            await asyncio.sleep(0)
            w.directory.last_gate.set()
            w.node.memory.free(await asking)
        assert w.state("a") is State.DEMOTED


async def test_dirty_copy_that_is_demoted_has_the_digest_of_what_was_written(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, closed=False) as w:
        (rank,) = w.wpgs["b"].ranks
        rank.copied(1, "")
        w.node.memory.free(await w.tiering.reserve(SIZE, "new"))
        assert (w.state("b"), rank.digest) == (State.DEMOTED, w.digests["b"])
        await w.use("b")


async def test_memory_that_is_given_back_is_not_taken_again_by_who_reads_it_for_its_digest(
    tmp_path: Path,
) -> None:
    """The digest of a dirty copy may be late; to read what was given back is to take it."""
    async with world(tmp_path, closed=False) as w:
        (rank,) = w.wpgs["b"].ranks
        assert rank.extent is not None
        memory = w.node.memory[rank.extent]
        rank.copied(1, "")
        threads = FirstIsLate()
        asyncio.get_running_loop().set_default_executor(threads)
        w.node.digests.begin([rank])
        await asyncio.sleep(0)  # it has asked for a thread
        asking = asyncio.create_task(w.tiering.reserve(SIZE, "new"))
        while w.state("b") is not State.DEMOTED:
            await asyncio.sleep(0)
        threads.may_begin.set()
        w.node.memory.free(await asking)
        await w.node.digests.until_ended(rank)
        assert os.fstat(memory.fd).st_blocks == 0
        await w.use("b")
