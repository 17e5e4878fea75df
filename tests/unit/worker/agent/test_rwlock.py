"""The lock: many readers or one writer, first come, first served."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from phaseloom.worker.agent.rwlock import FairReadWriteLock


class World:
    """Holders of a lock that leave when they are told to."""

    def __init__(self) -> None:
        self.lock = FairReadWriteLock()
        self.inside: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._leave: dict[str, asyncio.Event] = {}

    async def _hold(self, name: str) -> None:
        alone = name.startswith("w")
        async with self.lock.write() if alone else self.lock.read():
            self.inside.append(name)
            others = [other for other in self.inside if other != name]
            assert not (alone and others), f"{name} is not alone: {others}"
            assert not any(other.startswith("w") for other in others), others
            try:
                await self._leave[name].wait()
            finally:
                self.inside.remove(name)

    async def come(self, name: str) -> None:
        self._leave[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._hold(name))
        await _settle()

    async def leave(self, name: str) -> None:
        self._leave[name].set()
        await _settle()

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await _settle()


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_readers_share_and_nobody_overtakes_a_writer_that_waits() -> None:
    world = World()
    for name in ("r1", "r2", "w1", "r3"):
        await world.come(name)
    assert world.inside == ["r1", "r2"]
    await world.leave("r1")
    assert world.inside == ["r2"]
    await world.leave("r2")
    assert world.inside == ["w1"]
    await world.leave("w1")
    assert world.inside == ["r3"]
    await world.leave("r3")


async def test_writer_that_gives_up_waiting_lets_those_behind_it_in() -> None:
    world = World()
    for name in ("r1", "w1", "r2"):
        await world.come(name)
    await world.cancel("w1")
    assert world.inside == ["r1", "r2"]
    for name in ("r1", "r2"):
        await world.leave(name)


async def test_turn_given_in_the_moment_of_its_cancel_is_given_back() -> None:
    world = World()
    for name in ("w1", "w2", "r1"):
        await world.come(name)
    # Without a pause between: w2 is given the lock and cancelled before it runs.
    world._leave["w1"].set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    world.tasks["w2"].cancel()
    await _settle()
    assert world.inside == ["r1"]
    await world.leave("r1")


@given(st.lists(st.tuples(st.sampled_from(["come", "leave", "cancel"]), st.integers(0, 9))))
def test_whatever_happens_all_get_their_turn_in_the_end(steps: list[tuple[str, int]]) -> None:
    """Odd names want it alone; the holders assert who may be inside with whom."""

    async def main() -> None:
        world = World()
        for what, number in steps:
            name = f"{'w' if number % 2 else 'r'}{number}"
            if what == "come" and name not in world.tasks:
                await world.come(name)
            elif what == "leave" and name in world.tasks:
                await world.leave(name)
            elif what == "cancel" and name in world.tasks:
                await world.cancel(name)
        for name in world.tasks:
            await world.leave(name)
        async with asyncio.timeout(30):
            await asyncio.gather(*world.tasks.values(), return_exceptions=True)
        for task in world.tasks.values():
            assert task.cancelled() or task.exception() is None
        assert world.inside == []
        # Nothing is left held.
        async with asyncio.timeout(30), world.lock.write():
            pass

    asyncio.run(main())


async def test_nobody_has_or_awaits_a_turn_once_all_have_left() -> None:
    world = World()
    assert world.lock.is_unused
    await world.come("w1")
    await world.come("r1")
    for name in ("w1", "r1"):
        assert not world.lock.is_unused
        await world.leave(name)
    assert world.lock.is_unused
    for name in ("r1", "w1"):
        await world.come(name)
    await world.cancel("w1")
    await world.cancel("r1")
    assert world.lock.is_unused
