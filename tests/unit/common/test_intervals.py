"""Interval sets against a plain list of small cells."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phaseloom.common.observability.intervals import Interval, intersect, merge, subtract, total

LIMIT = 30
intervals = st.lists(
    st.tuples(st.integers(0, LIMIT), st.integers(0, LIMIT)).map(lambda p: (p[0], p[1])), max_size=8
)


def cells(of: list[Interval]) -> set[int]:
    """The unit cells that a set covers: an oracle for whole numbers."""
    return {c for c in range(LIMIT) for start, end in of if start <= c < end}


@given(intervals, intervals)
def test_operations_agree_with_sets_of_cells(a: list[Interval], b: list[Interval]) -> None:
    left, right = merge(a), merge(b)
    assert cells(left) == cells(a)
    assert cells(intersect(left, right)) == cells(a) & cells(b)
    assert cells(subtract(left, right)) == cells(a) - cells(b)
    assert total(left) == len(cells(a))


@given(intervals, intervals)
def test_results_are_sorted_and_apart(a: list[Interval], b: list[Interval]) -> None:
    left, right = merge(a), merge(b)
    for result in (left, intersect(left, right), subtract(left, right)):
        edges = [edge for interval in result for edge in interval]
        assert edges == sorted(edges)
        assert all(start < end for start, end in result)


def test_merge_joins_intervals_that_touch() -> None:
    assert merge([(2, 3), (0, 1), (1, 2)]) == [(0, 3)]
