"""Host memory as a budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.statemgr.memory.arena import MAX_IDLE_PER_POOL, PAGE_BYTES, Arena


def test_refusal_has_the_numbers_and_changes_nothing() -> None:
    arena = Arena(3 * PAGE_BYTES)
    arena.reserve(PAGE_BYTES + 1, "a")
    with pytest.raises(ResourceError) as caught:
        arena.reserve(2 * PAGE_BYTES, "b")
    assert caught.value.info.code is Code.RESOURCE_EXHAUSTED
    assert caught.value.info.details == {
        "needed_bytes": str(2 * PAGE_BYTES),
        "used_bytes": str(2 * PAGE_BYTES),
        "budget_bytes": str(3 * PAGE_BYTES),
    }
    arena.validate()
    assert arena.used_bytes == 2 * PAGE_BYTES


def test_parked_extent_is_reused_within_its_pool_only() -> None:
    arena = Arena(10 * PAGE_BYTES)
    first = arena.reserve(PAGE_BYTES, "a", "pool").extent
    arena.park(first, "pool")
    other = arena.reserve(PAGE_BYTES, "b", "another pool")
    assert (other.extent == first, other.is_new) == (False, True)
    larger = arena.reserve(2 * PAGE_BYTES, "c", "pool")
    assert larger.is_new
    again = arena.reserve(PAGE_BYTES - 1, "d", "pool")
    assert (again.extent, again.is_new) == (first, False)


def test_idle_extents_are_given_up_oldest_first_before_anything_is_refused() -> None:
    arena = Arena(3 * PAGE_BYTES)
    extents = [arena.reserve(PAGE_BYTES, name, name).extent for name in "abc"]
    for extent, name in zip(extents, "abc", strict=True):
        arena.park(extent, name)
    grant = arena.reserve(2 * PAGE_BYTES, "d")
    assert grant.evicted == extents[:2]
    assert arena.used_bytes == 3 * PAGE_BYTES
    arena.validate()


def test_pool_keeps_few_and_can_be_dropped() -> None:
    arena = Arena(10 * PAGE_BYTES)
    extents = [arena.reserve(PAGE_BYTES, "v", "pool").extent for _ in range(4)]
    evicted = [e for extent in extents for e in arena.park(extent, "pool")]
    assert evicted == extents[: 4 - MAX_IDLE_PER_POOL]
    assert arena.drop_pool("pool") == extents[4 - MAX_IDLE_PER_POOL :]
    assert arena.used_bytes == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["reserve", "free", "park", "drop_pool"]),
            st.integers(0, 4 * PAGE_BYTES),
            st.sampled_from(["", "p", "q"]),
        )
    )
)
def test_budget_is_never_exceeded_and_no_extent_has_two_owners(
    steps: list[tuple[str, int, str]],
) -> None:
    arena = Arena(6 * PAGE_BYTES)
    owned: list[int] = []
    for kind, number, pool in steps:
        if kind == "reserve":
            try:
                grant = arena.reserve(number, "x", pool)
            except ResourceError:
                continue
            assert grant.extent not in owned
            assert not set(grant.evicted) & set(owned)
            owned.append(grant.extent)
        elif kind == "drop_pool":
            arena.drop_pool(pool)
        elif owned:
            extent = owned.pop(number % len(owned))
            if kind == "free":
                arena.free(extent)
            else:
                arena.park(extent, pool)
        arena.validate()
        assert arena.extents_in_use() == set(owned)


def test_extents_of_the_daemon_before_keep_their_numbers() -> None:
    arena = Arena(3 * PAGE_BYTES)
    arena.take_over(7, PAGE_BYTES + 1)
    arena.validate()
    assert arena.extents_in_use() == {7}
    with pytest.raises(ResourceError, match="8192 of 12288 are in use"):
        arena.take_over(3, 2 * PAGE_BYTES)
    assert arena.reserve(PAGE_BYTES, "another").extent > 7
    arena.free(7)
    arena.validate()


def test_extent_is_counted_once_and_stays_until_its_last_holder_lets_go() -> None:
    arena = Arena(2 * PAGE_BYTES)
    extent = arena.reserve(1, "a").extent
    arena.hold(extent)
    arena.hold(extent)
    assert (arena.num_holders(extent), arena.used_bytes) == (3, PAGE_BYTES)
    assert [arena.drop_holder(extent) for _ in range(3)] == [True, True, False]
    arena.free(extent)
    arena.validate()
    assert arena.used_bytes == 0
