"""Contents that share what is equal in part, whatever happens in the middle of it."""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest

from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.contract.ids import DeploymentKey, NodeId
from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.common.tensors.blockhash import digest_of
from phaseloom.statemgr.core import contents
from phaseloom.statemgr.core import pieces as planning
from phaseloom.statemgr.core.contents import Content
from phaseloom.statemgr.core.residency import Rank, State
from phaseloom.statemgr.disk.files import StateDirectory
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.tiers import sharing
from phaseloom.statemgr.tiers.composing import Composing
from phaseloom.statemgr.tiers.hierarchy import Hierarchy
from phaseloom.statemgr.tiers.sharing import Sharing

TENSOR = 4 * 4096
NAMES = "abcdefgh"
SIZE = len(NAMES) * TENSOR


@dataclass
class World:
    node: Node
    hierarchy: Hierarchy
    loop: asyncio.AbstractEventLoop
    ranks: dict[str, Rank] = field(default_factory=dict)

    def add(
        self, name: str, variants: str = "", tenant: str = "acme", *, names: str = NAMES
    ) -> Content:
        """A frozen deployment of its own.

        Args:
            variants: names of the tensors that are not what everybody's are.
            names: of those that it has.
        """
        size = len(names) * TENSOR
        node, key = self.node, DeploymentKey(tenant, "job", name)
        node.residency.register([name], key, 1, [0], 0)
        (rank,) = node.residency.current(key, 1).ranks
        slots = [
            TensorSlot(each, Role.WEIGHT, "uint8", [TENSOR], at * TENSOR, TENSOR)
            for at, each in enumerate(names)
        ]
        extent = node.memory.reserve(size, name, may_freeze=True)
        node.residency.register_heap(rank, size, slots, extent)
        rank.frozen = True
        self.ranks[name] = rank
        digest = self.fill(extent, name, variants, names)
        node.residency.fill(rank, 1, digest)
        sharing.settle_copy(node, rank, 1, digest)
        assert rank.content is not None
        return rank.content

    def fill(self, extent: int, name: str, variants: str, names: str = NAMES) -> str:
        memory = self.node.memory[extent].view(len(names) * TENSOR)
        memory[:] = b"".join(
            random.Random(f"{name} {each}" if each in variants else each).randbytes(TENSOR)
            for each in names
        )
        return digest_of(memory)

    def write(self, name: str, variants: str) -> None:
        """Its rank has copied out what it has written."""
        rank = self.ranks[name]
        extent = self.node.memory.reserve(SIZE, name, may_freeze=True)
        rank.extent = extent
        sharing.settle_copy(self.node, rank, 2, self.fill(extent, f"{name} anew", variants))

    def leave(self, name: str) -> None:
        self.node.retire(self.ranks.pop(name).wpg, "it leaves")

    async def spill(self, name: str) -> None:
        content = self.ranks[name].content
        if content in self.hierarchy.contents.spillable(None):
            await self.hierarchy.contents.spill(content)

    async def lift(self, name: str) -> None:
        content = self.ranks[name].content
        assert content is not None
        await self.hierarchy.contents.lift(content, self.node.reserve_frozen)

    async def used(self, num_bytes: int) -> None:
        """Once so many bytes of host memory are."""
        arena = self.node.memory.arena
        async with asyncio.timeout(20):
            while arena.used_bytes != num_bytes:
                await asyncio.sleep(0)

    def check(self) -> None:
        """The books agree, and what they say lies where they say."""
        self.node.validate()
        for content in self.node.contents.all():
            if content.pieces and content.state is State.HOST:
                assert digest_of(self.node.memory.read(content.pieces)) == content.digest


@asynccontextmanager
async def world(
    directory: Path, room: int = 8 * SIZE, bases: dict[str, str] | None = None
) -> AsyncIterator[World]:
    node = Node(NodeId("n"), [SIZE], room, 10.0, frozen_bases=bases)
    node.reserve_frozen = None  # type: ignore[assignment]
    hierarchy = Hierarchy(node, await asyncio.to_thread(StateDirectory, directory), 100 * SIZE)
    finder = Sharing(node)
    async with asyncio.TaskGroup() as tasks:
        hierarchy.start(tasks)
        finder.start(tasks)
        running = World(node, hierarchy, asyncio.get_running_loop())
        yield running
        for name in list(running.ranks):
            running.check()
            running.leave(name)
        await running.used(0)
        running.check()
        finder.stop()
        hierarchy.stop()
    assert not await asyncio.to_thread(StateDirectory(directory).contents)
    node.keeper.close()
    node.memory.close()


async def test_what_is_equal_in_part_is_held_once(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        both = [w.add("first"), w.add("second", "cd")]
        await w.used(SIZE + 2 * TENSOR)
        assert sorted(content.is_composed for content in both) == [False, True]
        w.check()
        assert w.node.contents.account().saved_bytes == SIZE - 2 * TENSOR


COMPARISON = 2
"""Its number in the work of threads for one that comes: it is hashed, and verified, before."""


class Interrupting(ThreadPoolExecutor):
    """Something happens just before, or just after, the thread work of a given number."""

    def __init__(self, number: int, *, is_after: bool, act: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self.loop = asyncio.get_running_loop()
        self.number, self.is_after, self.act = number, is_after, act
        self.count = 0
        self.has_acted = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        number, self.count = self.count, self.count + 1
        if number != self.number or self.has_acted:
            return super().submit(fn, *args, **kwargs)
        self.has_acted = True

        def work() -> Any:
            if self.is_after:
                done = fn(*args, **kwargs)
                self._act()
                return done
            self._act()
            return fn(*args, **kwargs)

        return super().submit(work)

    def _act(self) -> None:
        async def act() -> None:
            await self.act()

        asyncio.run_coroutine_threadsafe(act(), self.loop).result(20)


ACTS = ["first leaves", "second leaves", "first writes", "second writes"]
ACTS += ["spill first", "spill second"]
"""What may happen in the middle."""


async def act(w: World, what: str) -> None:
    match what.split():
        case [name, "leaves"]:
            w.leave(name)
        case [name, "writes"]:
            w.write(name, "e")
        case ["spill", name]:
            await w.spill(name)
    w.check()


@pytest.mark.parametrize("what", ACTS)
@pytest.mark.parametrize("is_after", [False, True])
async def test_anything_may_happen_between_any_two_steps(
    tmp_path: Path, what: str, *, is_after: bool
) -> None:
    """At every piece of work that a thread does for it, once each."""
    number, has_acted = 0, True
    while has_acted:
        async with world(tmp_path) as w:
            threads = Interrupting(number, is_after=is_after, act=partial(act, w, what))
            asyncio.get_running_loop().set_default_executor(threads)
            w.add("first", "ab")
            w.add("second", "cd")
            await _quiet(w)
            w.check()
            for name in w.ranks:
                await w.lift(name)
            await _quiet(w)
            num_own = 2 * len(w.ranks)
            held = {0: 0, 1: SIZE, 2: SIZE + num_own * TENSOR}[len(w.ranks)]
            assert w.node.memory.arena.used_bytes <= held + SIZE // 2
            has_acted, number = threads.has_acted, number + 1
            threads.has_acted = True
    assert number > 3


@pytest.mark.parametrize("what", ["first leaves", "spill first"])
async def test_who_leaves_in_the_middle_is_not_missed_where_there_are_others(
    tmp_path: Path, what: str
) -> None:
    number, has_acted = 0, True
    while has_acted:
        async with world(tmp_path) as w:
            w.add("first", NAMES)
            w.add("third")
            await _quiet(w)
            threads = Interrupting(number, is_after=False, act=partial(act, w, what))
            asyncio.get_running_loop().set_default_executor(threads)
            w.add("second", "cd")
            await _quiet(w)
            for name in w.ranks:
                await w.lift(name)
            await _quiet(w)
            whole = 1 + ("first" in w.ranks)  # it has nothing in common with the others
            assert w.node.memory.arena.used_bytes == whole * SIZE + 2 * TENSOR
            has_acted, number = threads.has_acted, number + 1
            threads.has_acted = True
    assert number > 3


@contextmanager
def counting(*modules: ModuleType) -> Iterator[list[int]]:
    """How often functions of these are called within, in this thread."""
    count, files = [0], {module.__file__ for module in modules}

    def on_event(frame: FrameType, event: str, _arg: object) -> None:
        count[0] += event == "call" and frame.f_code.co_filename in files

    sys.setprofile(on_event)
    try:
        yield count
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("stays", [True, False])
async def test_event_loop_waits_for_nothing_that_takes_as_long_as_there_are_pieces(
    tmp_path: Path, *, stays: bool
) -> None:
    counts = []
    for variants, num_pieces in (("bcde", 3), ("bdfh", 8)):
        async with world(tmp_path / variants) as w:
            (extent,) = w.add("first").extents
            await _quiet(w)
            for name in ("second", "third"):
                composed = w.add(name, variants)
                await _quiet(w)
                assert len(composed.pieces) == num_pieces
            w.node.on_pieces_left = lambda _: None
            if not stays:
                w.leave("first")
            with counting(planning, contents) as count:
                is_packed = await Composing(w.node, threading.Event()).pack(extent)
            assert is_packed is not stays
            w.check()
            counts += count
    assert counts[0] == counts[1]


async def _quiet(w: World) -> None:
    """Nothing is under way, and nothing is about to begin."""
    quiet = 0
    async with asyncio.timeout(20):
        while quiet < 50:
            is_busy = w.hierarchy.num_moves or len(asyncio.all_tasks()) > 1
            quiet = 0 if is_busy else quiet + 1
            await asyncio.sleep(0)


async def test_bad_memory_that_several_refer_to_ends_all_of_them_and_nobody_else(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as w:
        first, second, third = w.add("first"), w.add("second", "cd"), w.add("third", "a")
        await w.used(SIZE + 3 * TENSOR)
        (extent,) = first.extents
        # What this process sees of it: nobody can write the memory itself any more.
        w.node.memory[extent].readable(SIZE)[2 * TENSOR] ^= 1
        with pytest.raises(ResourceError) as caught:
            await w.hierarchy.contents.spill(third)
        assert caught.value.info.code is Code.DATA_LOSS
        async with asyncio.timeout(20):
            await w.node.until(lambda: len(w.node.contents.all()) == 1)
        assert w.node.contents.all() == [second]  # its own has another "c"
        for name in ("first", "third"):
            assert w.ranks.pop(name).state is State.LOST
        w.check()


async def test_bad_memory_is_not_composed_and_found_out(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        second = w.add("second", "cd")
        async with asyncio.timeout(20):
            while not second.hash:
                await asyncio.sleep(0)
        (extent,) = second.extents
        w.node.memory[extent].readable(SIZE)[0] ^= 1
        first, third = w.add("first"), w.add("third", "cd")
        await _quiet(w)
        assert {first.is_composed, third.is_composed, second.is_composed} == {True, False}
        for content in (first, third):
            assert digest_of(w.node.memory.read(content.pieces)) == content.digest
        w.node.on_doubt([first, second, third])
        await _quiet(w)
        assert w.ranks.pop("second").state is State.LOST
        assert w.node.contents.all() == [first, third]


async def test_room_is_told_by_what_is_freed_once_all_are_down(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        first, second, third = w.add("first"), w.add("second", "cd"), w.add("third", "a")
        await w.used(SIZE + 3 * TENSOR)
        moves = w.hierarchy.contents
        assert moves.room_bytes([second]) == 2 * TENSOR
        assert moves.room_bytes([first]) == 0
        assert moves.room_bytes([first, second, third]) == SIZE + 3 * TENSOR
        assert moves.spillable(None) == [first, second, third]
        w.node.residency.begin_use(first.users[0].wpg)
        assert moves.spillable(None) == [second, third]
        await moves.spill(second)
        await w.used(SIZE + TENSOR)
        w.node.residency.end_use(first.users[0].wpg)
        await moves.spill(first)
        await _quiet(w)
        assert w.node.memory.arena.used_bytes == SIZE + TENSOR  # the third has what both had
        await w.lift("first")
        await w.lift("second")
        await w.used(SIZE + 4 * TENSOR)
        w.check()


async def test_what_goes_down_and_comes_up_while_it_is_compared_is_compared_again(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as w:
        first = w.add("first")
        await _quiet(w)

        async def down_and_up() -> None:
            await w.spill("second")
            await w.lift("second")

        threads = Interrupting(COMPARISON, is_after=False, act=down_and_up)
        asyncio.get_running_loop().set_default_executor(threads)
        second = w.add("second", "cd")
        await _quiet(w)
        assert threads.has_acted
        assert [first.is_composed, second.is_composed] == [False, True]
        w.check()


async def test_what_is_below_after_a_restart_is_compared_as_it_comes_up(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        w.add("first")
        second = w.add("second", "cd")
        await _quiet(w)
        await w.spill("second")
        w.node.on_content(second)  # as of all that are taken over
        await _quiet(w)
        await w.lift("second")
        await _quiet(w)
        assert second.is_composed
        w.check()


async def test_nothing_waits_for_room_to_compare_with_what_is_not_here(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As often as it came up, one more would wait."""
    caplog.set_level(logging.INFO, sharing.__name__)
    async with world(tmp_path, room=SIZE + 2 * TENSOR) as w:
        w.add("first", names="ab")
        await _quiet(w)
        await w.spill("first")
        second = w.add("second", "cdefgh")
        await _quiet(w)
        for number in (1, 2):
            await w.lift("first")
            # The second would refer to it, and finds no room for six of its own.
            await _refused(caplog, number)
            await w.spill("first")
            await _quiet(w)
        assert not second.is_composed
        w.check()


async def test_memory_is_packed_once_however_many_leave_it_while_there_is_no_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(tmp_path) as w:
        names = ("first", "second", "third", "fourth")
        for name in names:
            w.add(name, "" if name == "first" else "abc")
            await _quiet(w)
        caplog.set_level(logging.INFO, sharing.__name__)
        arena = w.node.memory.arena
        filler = w.node.memory.reserve(arena.free_bytes, "all that is free")
        w.leave("first")
        await _refused(caplog, 1)
        w.leave("fourth")  # with three of its own; the five that the others have need more
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 2, "one waits"
        w.node.memory.free(filler)
        w.node.announce()
        await w.used((5 + 2 * 3) * TENSOR)
        w.check()


async def _refused(caplog: pytest.LogCaptureFixture, number: int) -> None:
    """Once so often no memory was to be had for what saves some."""
    async with asyncio.timeout(20):
        while sum("not now" in record.message for record in caplog.records) < number:
            await asyncio.sleep(0)


async def test_tenant_that_has_only_a_part_of_a_registered_model_is_not_given_the_rest(
    tmp_path: Path,
) -> None:
    """It would be given the descriptor of all of it."""
    async with world(tmp_path / "first") as w:
        first = w.add("first")
        await _quiet(w)
        bases = {first.hash: "a model"}
    async with world(tmp_path / "second", bases=bases) as w:
        first = w.add("first")
        await _quiet(w)
        foreign = w.add("foreign", "c", tenant="umbrella")
        second = w.add("second", "c")
        await _quiet(w)
        assert not set(foreign.extents) & set(first.extents)
        assert set(second.extents) & set(first.extents)
        # Who has all of it may have more in common with it, too.
        whole = w.add("whole", tenant="umbrella")
        await _quiet(w)
        assert w.ranks["whole"].content is first
        assert whole is not first
        assert set(foreign.extents) & set(first.extents)
        w.check()


async def test_one_that_has_nothing_in_common_may_leave_in_the_middle(tmp_path: Path) -> None:
    """Nothing is looked at twice for it."""

    async def num_steps(leaving: list[str]) -> int:
        async with world(tmp_path / f"without {leaving}") as w:
            w.add("other", NAMES)
            w.add("first")
            await _quiet(w)

            async def leave() -> None:
                for name in leaving:
                    w.leave(name)

            threads = Interrupting(COMPARISON, is_after=True, act=leave)
            asyncio.get_running_loop().set_default_executor(threads)
            second = w.add("second", "cd")
            await _quiet(w)
            assert threads.has_acted
            assert second.is_composed
            return threads.count

    assert await num_steps(["other"]) == await num_steps([])


async def test_failure_that_nobody_foresaw_ends_the_comparison_and_nothing_else(
    tmp_path: Path,
) -> None:
    """In any step of it: the system may have no memory to map."""

    async def fail() -> None:
        raise OSError(errno.ENOMEM, "no memory to map")

    number, has_acted = COMPARISON, True
    while has_acted:
        async with world(tmp_path) as w:
            w.add("first")
            await _quiet(w)
            threads = Interrupting(number, is_after=False, act=fail)
            asyncio.get_running_loop().set_default_executor(threads)
            second = w.add("second", "cd")
            await _quiet(w)
            has_acted, threads.has_acted = threads.has_acted, True
            assert second.is_composed is not has_acted
            w.check()
            third = w.add("third", "cd")
            await _quiet(w)
            assert third.is_composed
            number += 1
    assert number == COMPARISON + 4  # what is compared, copied and verified; no step
