"""Host memory as a budget."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.statemgr.node.extents import MAX_IDLE_PER_POOL, Extent, HostMemory
from phaseloom.statemgr.records.layouts import PAGE_BYTES


@contextmanager
def memory_of(num_pages: int) -> Iterator[HostMemory]:
    memory = HostMemory(num_pages * PAGE_BYTES)
    yield memory
    memory.validate()
    memory.close()
    assert memory.used_bytes == 0


def test_refusal_has_the_numbers_and_changes_nothing() -> None:
    with memory_of(3) as memory:
        memory.reserve(PAGE_BYTES + 1, "a")
        with pytest.raises(ResourceError) as caught:
            memory.reserve(2 * PAGE_BYTES, "b")
        assert caught.value.info.code is Code.RESOURCE_EXHAUSTED
        assert caught.value.info.details == {
            "needed_bytes": str(2 * PAGE_BYTES),
            "used_bytes": str(2 * PAGE_BYTES),
            "budget_bytes": str(3 * PAGE_BYTES),
        }
        assert memory.used_bytes == 2 * PAGE_BYTES


def test_parked_extent_is_reused_within_its_pool_only() -> None:
    with memory_of(10) as memory:
        first = memory.reserve(PAGE_BYTES, "a", "pool")
        memory.park(first, "pool")
        assert memory.reserve(PAGE_BYTES, "b", "another pool") != first
        assert memory.reserve(2 * PAGE_BYTES, "c", "pool") != first
        assert memory.reserve(PAGE_BYTES - 1, "d", "pool") == first


def test_idle_extents_are_given_up_oldest_first_before_anything_is_refused() -> None:
    with memory_of(3) as memory:
        for name in "abc":
            memory.reserve(PAGE_BYTES, name, name)
        for extent, name in zip((1, 2, 3), "abc", strict=True):
            memory.park(extent, name)
        memory.reserve(2 * PAGE_BYTES, "d")
        assert memory.pools() == {"c"}
        assert memory.used_bytes == 3 * PAGE_BYTES


def test_pool_keeps_few_and_can_be_dropped() -> None:
    with memory_of(10) as memory:
        extents = [memory.reserve(PAGE_BYTES, "v", "pool") for _ in range(4)]
        for extent in extents:
            memory.park(extent, "pool")
        assert list(memory.handles()) == extents[4 - MAX_IDLE_PER_POOL :]
        memory.drop_pool("pool")
        assert (memory.handles(), memory.used_bytes) == ({}, 0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["reserve", "uncounted", "free", "park", "drop_pool"]),
            st.integers(0, 4 * PAGE_BYTES),
            st.sampled_from(["", "p", "q"]),
        )
    )
)
def test_budget_is_never_exceeded_and_no_extent_has_two_owners(
    steps: list[tuple[str, int, str]],
) -> None:
    owned: list[int] = []
    with memory_of(6) as memory:
        for kind, number, pool in steps:
            if kind == "reserve":
                try:
                    extent = memory.reserve(number, "x", pool)
                except ResourceError:
                    continue
                assert extent not in owned
                owned.append(extent)
            elif kind == "uncounted":
                extent = memory.reserve_uncounted(number, "x", pool)
                assert extent not in owned
                owned.append(extent)
            elif kind == "drop_pool":
                memory.drop_pool(pool)
            elif owned:
                extent = owned.pop(number % len(owned))
                if kind == "free":
                    memory.free(extent)
                else:
                    memory.park(extent, pool)
            memory.validate()
            assert memory.extents_in_use() == set(owned)


def test_uncounted_extent_is_counted_while_it_is_idle_and_only_if_there_is_room() -> None:
    with memory_of(2) as memory:
        kept = memory.reserve_uncounted(PAGE_BYTES, "snapshot", "pool")
        assert memory.used_bytes == 0
        memory.park(kept, "pool")
        assert memory.used_bytes == PAGE_BYTES
        assert memory.reserve_uncounted(PAGE_BYTES, "snapshot", "pool") == kept
        assert memory.used_bytes == 0
        memory.reserve(2 * PAGE_BYTES, "all there is")
        memory.park(kept, "pool")
        assert kept not in memory.handles()


def test_extents_of_the_daemon_before_keep_their_numbers() -> None:
    before = [Extent(size, "state") for size in (PAGE_BYTES + 1, 2 * PAGE_BYTES)]
    first, second = (os.dup(each.fd) for each in before)
    with memory_of(3) as memory:
        memory.take_over(7, first, PAGE_BYTES + 1, "state")
        assert memory.extents_in_use() == {7}
        with pytest.raises(ResourceError, match="8192 of 12288 are in use"):
            memory.take_over(3, second, 2 * PAGE_BYTES, "state")
        assert memory.reserve(PAGE_BYTES, "another") > 7
        memory.free(7)
    os.close(second)
    for each in before:
        each.close()


def test_extent_is_counted_once_and_stays_until_its_last_holder_gives_it_up() -> None:
    with memory_of(2) as memory:
        extent = memory.reserve(1, "a")
        memory.hold(extent)
        memory.hold(extent)
        assert (memory[extent].num_holders, memory.used_bytes) == (3, PAGE_BYTES)
        for is_there in (True, True, False):
            memory.free(extent)
            assert (extent in memory.handles()) is is_there


def test_vacated_extent_is_free_memory_until_it_is_occupied() -> None:
    with memory_of(2) as memory:
        extent = memory.reserve(2 * PAGE_BYTES, "a")
        memory.vacate(extent)
        other = memory.reserve(PAGE_BYTES, "b")
        with pytest.raises(ResourceError, match="4096 of 8192 are in use"):
            memory.occupy(extent, "a")
        memory.free(other)
        memory.occupy(extent, "a")
        assert memory.used_bytes == 2 * PAGE_BYTES
