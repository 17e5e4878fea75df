"""Sets of half-open time intervals [start, end), stored as sorted lists of disjoint pairs.

The profiler and the run report use them for the same questions: how long a device was busy, how
much of a switch delayed an operation, how long a job stalled. Cost: O(n log n) for `merge`, O(n)
for the other functions.
"""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]
"""(start_s, end_s), start inclusive, end exclusive."""


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of any intervals as a merged set. Empty and reversed intervals are
    dropped."""
    merged: list[Interval] = []
    for start, end in sorted(i for i in intervals if i[0] < i[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersect(first: list[Interval], second: list[Interval]) -> list[Interval]:
    """Return the intersection of two merged sets."""
    common: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            common.append((start, end))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return common


def subtract(intervals: list[Interval], holes: list[Interval]) -> list[Interval]:
    """Return the parts of the merged set `intervals` outside the merged set `holes`."""
    remaining: list[Interval] = []
    first = 0
    for start, end in intervals:
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        cursor = start
        for k in range(first, len(holes)):
            hole_start, hole_end = holes[k]
            if hole_start >= end:
                break
            if hole_start > cursor:
                remaining.append((cursor, hole_start))
            cursor = hole_end
        if cursor < end:
            remaining.append((cursor, end))
    return remaining


def total(intervals: list[Interval]) -> float:
    """Return the length of a merged set, in seconds."""
    return sum(end - start for start, end in intervals)
