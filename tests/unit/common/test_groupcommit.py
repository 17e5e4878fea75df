"""What is stored together, when, and who hears of it."""

from __future__ import annotations

import asyncio

import pytest

from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.transport.groupcommit import MAX_ITEMS, GroupCommit


class Store:
    """Keeps the groups that it is given; each waits until it is let."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        self.let = asyncio.Event()
        self.failure: Exception | None = None

    async def put(self, items: list[int]) -> int:
        self.groups.append(list(items))
        await self.let.wait()
        if self.failure is not None:
            raise self.failure
        return len(self.groups)


async def settle() -> None:
    """Let what was begun reach where it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


def add(group_commit: GroupCommit[int, int], *items: int) -> list[asyncio.Task[int]]:
    return [asyncio.create_task(group_commit.add(item)) for item in items]


async def test_one_alone_is_stored_at_once_and_what_comes_meanwhile_goes_together() -> None:
    store = Store()
    group_commit = GroupCommit(store.put)
    first = add(group_commit, 1)
    await settle()
    assert store.groups == [[1]]
    rest = add(group_commit, 2, 3, 4)
    await settle()
    assert store.groups == [[1]], "a store began before the one before it had ended"
    store.let.set()
    assert await asyncio.gather(*first, *rest) == [1, 2, 2, 2]
    assert store.groups == [[1], [2, 3, 4]]


async def test_no_group_is_larger_than_its_bound() -> None:
    store = Store()
    group_commit = GroupCommit(store.put)
    tasks = add(group_commit, *range(2 * MAX_ITEMS + 2))
    await settle()
    store.let.set()
    await asyncio.gather(*tasks)
    assert [len(group) for group in store.groups] == [1, MAX_ITEMS, MAX_ITEMS, 1]
    assert [item for group in store.groups for item in group] == list(range(2 * MAX_ITEMS + 2))


async def test_failure_reaches_everyone_in_the_group_and_the_next_goes_on() -> None:
    store = Store()
    group_commit = GroupCommit(store.put)
    first = add(group_commit, 1)
    await settle()
    rest = add(group_commit, 2, 3)
    await settle()
    store.failure = ValueError("full")
    store.let.set()
    failed = await asyncio.gather(*first, *rest, return_exceptions=True)
    assert [str(error) for error in failed] == ["full"] * 3
    store.failure = None
    assert await group_commit.add(4) == 3


async def test_the_others_hear_of_it_when_who_stores_for_them_is_cancelled() -> None:
    store = Store()
    group_commit = GroupCommit(store.put)
    first = add(group_commit, 1)
    await settle()
    second, third = add(group_commit, 2, 3)
    await settle()
    second.cancel()
    with pytest.raises(ResourceError) as lost:
        await third
    assert lost.value.info.code is Code.UNAVAILABLE
    store.let.set()
    assert await asyncio.gather(*first) == [1]
    assert await group_commit.add(4) == 2
    assert store.groups == [[1], [4]]


async def test_one_who_gives_up_waiting_takes_nobody_along() -> None:
    store = Store()
    group_commit = GroupCommit(store.put)
    first = add(group_commit, 1)
    await settle()
    second, third, fourth = add(group_commit, 2, 3, 4)
    await settle()
    third.cancel()
    await settle()
    store.let.set()
    assert await asyncio.gather(*first, second, fourth) == [1, 2, 2]
    assert third.cancelled()


async def test_what_is_about_to_come_is_waited_for() -> None:
    store = Store()
    store.let.set()
    left = 3
    group_commit = GroupCommit(store.put, lambda: left > 0, max_wait_s=60.0)
    tasks = []
    for item in range(3):
        left -= 1
        tasks += add(group_commit, item)
        await settle()
        assert store.groups == ([] if left else [[0, 1, 2]])
    await asyncio.gather(*tasks)


async def test_patience_ends() -> None:
    store = Store()
    store.let.set()
    group_commit = GroupCommit(store.put, lambda: True, max_wait_s=0.01)
    assert await group_commit.add(1) == 1
