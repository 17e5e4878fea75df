"""Moves between host memory and NVMe that meet one another: joined, cancelled, outlived."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from phaseloom.common.errors import Code, ResourceError
from phaseloom.common.ids import DeploymentKey, NodeId
from phaseloom.common.statewire import Prefetch, Role, TensorSlot
from phaseloom.statemgr.core.residency import Rank, State, Wpg
from phaseloom.statemgr.core.statefile import Place, StateHeader
from phaseloom.statemgr.disk.disk import Cancelled
from phaseloom.statemgr.files import NEVER, StateDirectory
from phaseloom.statemgr.hierarchy import Hierarchy
from phaseloom.statemgr.memory import digest_of
from phaseloom.statemgr.node import Node

PAGE = 4096
SIZE = 16 * PAGE
HEAP = SIZE - PAGE + 1
"""Memory is given in whole pages."""
NAMES = ["a", "b", "c"]


class GatedDirectory(StateDirectory):
    """A disk that is as slow as a test wants: each move waits at its gate, or for its cancel."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate = threading.Event()
        self.gate.set()
        self.at_gate = threading.Semaphore(0)

    def write(
        self,
        path: Path,
        header: StateHeader,
        memories: list[memoryview],
        cancelled: threading.Event = NEVER,
    ) -> None:
        self._wait(cancelled)
        super().write(path, header, memories, cancelled)

    def read(self, place: Place, memory: memoryview, cancelled: threading.Event = NEVER) -> None:
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
    hierarchy: Hierarchy
    wpgs: dict[str, Wpg] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    async def add(self, name: str) -> Rank:
        """A deployment whose whole state is in host memory."""
        key = DeploymentKey("acme", "job", name)
        node = self.node
        node.residency.register([f"token {name}"], key, 1, [0], 0)
        (rank,) = node.residency.current(key, 1).ranks
        slots = [TensorSlot("w", Role.WEIGHT, "uint8", [HEAP], 0, HEAP)]
        extent = await self.hierarchy.reserve(HEAP, name)
        node.residency.register_heap(rank, HEAP, slots, extent)
        memory = node.memory[extent].view(HEAP)
        memory[:] = name.encode() * HEAP
        self.wpgs[name], self.digests[name] = rank.wpg, digest_of(memory)
        node.residency.fill(rank, 1, self.digests[name])
        return rank

    def state(self, name: str) -> State:
        return self.wpgs[name].ranks[0].state

    def is_whole(self, name: str) -> bool:
        (rank,) = self.wpgs[name].ranks
        assert rank.extent is not None
        return digest_of(self.node.memory[rank.extent].view(HEAP)) == self.digests[name]

    async def at_gate(self) -> None:
        """A move has come as far as its bytes, and waits."""
        await asyncio.to_thread(self.directory.at_gate.acquire)

    async def rest(self) -> None:
        await self.node.until(lambda: not self.hierarchy.num_moves)

    async def use(self, name: str) -> None:
        async with self.hierarchy.in_host(self.wpgs[name]):
            assert self.is_whole(name)

    def hint(self, name: str, in_s: float | None) -> None:
        wpg = self.wpgs[name]
        self.hierarchy.hint(wpg, Prefetch(wpg.key, 1, in_s))


@asynccontextmanager
async def world(directory: Path, *, room: int = 2, closed: bool = True) -> AsyncIterator[World]:
    """`a` is on NVMe, `b` and `c` in host memory, which has room for two; the gate is closed."""
    node = Node(NodeId("n"), [SIZE], room * SIZE, 10.0)
    gated = await asyncio.to_thread(GatedDirectory, directory)
    hierarchy = Hierarchy(node, gated, 10 * SIZE)
    made = World(node, gated, hierarchy)
    async with asyncio.TaskGroup() as tasks:
        hierarchy.start(tasks)
        for name in NAMES:
            await made.add(name)
            async with hierarchy.in_host(made.wpgs[name]):
                pass
        await made.rest()
        assert [made.state(name) for name in NAMES] == [State.SPILLED, State.HOST, State.HOST]
        await made.at_gate()
        if closed:
            gated.gate.clear()
        yield made
        gated.gate.set()
        await made.rest()
        node.validate()
    node.keeper.close()
    node.memory.close()


async def test_spill_is_cancelled_by_who_needs_the_copy(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        asking = asyncio.create_task(w.hierarchy.reserve(SIZE, "new"))
        await w.at_gate()
        assert w.state("b") is State.SPILLING
        using = asyncio.create_task(w.use("b"))
        # `b` stays; room is made by `c` instead.
        await w.at_gate()
        await using
        assert w.state("b") is State.HOST
        assert w.state("c") is State.SPILLING
        w.directory.gate.set()
        w.node.memory.free(await asking)
        assert [p.name for p in w.directory.spilled()] == ["spill-1-0.state"] * 2


async def test_move_upward_is_joined_and_then_no_withdrawn_hint_ends_it(tmp_path: Path) -> None:
    async with world(tmp_path, closed=False) as w:
        w.node.retire(w.wpgs["b"], "room")
        w.directory.gate.clear()
        w.hint("a", 5.0)
        await w.at_gate()
        assert w.state("a") is State.LIFTING
        using = asyncio.create_task(w.use("a"))
        await asyncio.sleep(0)
        w.hint("a", None)
        w.directory.gate.set()
        await using
        assert w.state("a") is State.HOST


async def test_withdrawn_hint_leaves_the_copy_below(tmp_path: Path) -> None:
    async with world(tmp_path, closed=False) as w:
        w.node.retire(w.wpgs["b"], "room")
        used_bytes = w.node.memory.arena.used_bytes
        w.directory.gate.clear()
        w.hint("a", 5.0)
        await w.at_gate()
        w.hint("a", None)
        await w.rest()
        assert w.state("a") is State.SPILLED
        assert w.node.memory.arena.used_bytes == used_bytes
        w.directory.gate.set()
        await w.use("a")


async def test_deployment_that_ends_on_its_way_up_leaves_no_file_and_no_bytes(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, closed=False) as w:
        w.node.retire(w.wpgs["b"], "room")
        w.directory.gate.clear()
        using = asyncio.create_task(w.use("a"))
        await w.at_gate()
        w.node.retire(w.wpgs["a"], "dropped")
        w.directory.gate.set()
        with pytest.raises(ResourceError):
            await using
        await w.rest()
        assert w.directory.spilled() == set()
        assert w.node.memory.arena.used_bytes == SIZE


async def test_deployment_that_ends_on_its_way_down_leaves_no_file_and_no_bytes(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as w:
        asking = asyncio.create_task(w.hierarchy.reserve(SIZE, "new"))
        await w.at_gate()
        w.node.retire(w.wpgs["b"], "dropped")
        w.directory.gate.set()
        w.node.memory.free(await asking)
        await w.rest()
        assert {path.parent.name for path in w.directory.spilled()} == {"a"}
        assert w.node.memory.arena.used_bytes == SIZE


async def test_one_spill_makes_room_for_one_of_two_who_ask(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        w.node.retire(w.wpgs["c"], "room")
        kept = await w.hierarchy.reserve(SIZE, "kept")
        asking = [asyncio.create_task(w.hierarchy.reserve(SIZE, f"new {n}")) for n in range(2)]
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
            await w.hierarchy.reserve(3 * SIZE, "too large")
        assert caught.value.info.details["needed_bytes"] == str(3 * SIZE)
        with w.hierarchy.using(w.wpgs["b"]), pytest.raises(ResourceError):
            await w.hierarchy.reserve(2 * SIZE, "too large beside what is in use")
        assert [w.state(name) for name in NAMES] == [State.SPILLED, State.HOST, State.HOST]


async def test_host_copy_that_went_bad_is_not_spilled_and_its_life_is_over(tmp_path: Path) -> None:
    async with world(tmp_path, closed=False) as w:
        (rank,) = w.wpgs["b"].ranks
        assert rank.extent is not None
        w.node.memory[rank.extent].view(HEAP)[7] ^= 1
        w.node.memory.free(await w.hierarchy.reserve(SIZE, "new"))
        assert w.state("b") is State.LOST
        assert w.state("c") is State.HOST


async def test_caller_that_is_cancelled_leaves_the_move_whole(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        asking = asyncio.create_task(w.hierarchy.reserve(SIZE, "new"))
        await w.at_gate()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        w.directory.gate.set()
        await w.rest()
        assert w.state("b") is State.SPILLED
        await w.use("b")
