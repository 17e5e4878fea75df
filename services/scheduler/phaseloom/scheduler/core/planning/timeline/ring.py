"""The circular horizon, and free time on it: slot `t mod L` stands for every second t (PlexRL
§5.2.1).

A periodic job is laid on it once, for ever: its period is rounded so that a whole number of periods
fills the ring. Deviation from PlexRL, which does not say how a period that does not divide the
horizon goes on past the wrap: cut at the wrap, a footprint would be right for one turn only and
would have to be laid anew in every other; rounded, it is off by at most T / (2·⌊L/T⌋) seconds a
period (under 1 % up to T = 570 s), less than cycles jitter. A job whose period is longer than the
ring has one period on it.

Ranges are half-open, in whole slots; ranges of one list that touch are one. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from math import ceil, floor

HORIZON_SLOTS = 28_800
"""Slots of one second on the ring: eight hours."""

Range = tuple[int, int]
"""[start, end) in slots."""


def pieces(start: int, length: int, num_slots: int) -> list[Range]:
    """The part of the ring that [start, start + length) covers: one range, or two if it wraps."""
    if length <= 0:
        return []
    if length >= num_slots:
        return [(0, num_slots)]
    first = start % num_slots
    last = first + length
    if last <= num_slots:
        return [(first, last)]
    return [(0, last - num_slots), (first, num_slots)]


def num_periods(period_s: float, num_slots: int) -> int:
    """Number of periods that fill the ring, rounded; at least one."""
    return max(1, round(num_slots / period_s))


def starts(period_s: float, num_slots: int) -> list[int]:
    """Slot in which each period begins, the first in slot 0."""
    count = num_periods(period_s, num_slots)
    return [k * num_slots // count for k in range(count)]


def in_slots(segments: Iterable[tuple[float, float]]) -> list[tuple[int, int]]:
    """(offset, duration) of each segment, grown to whole slots; empty ones are left out.

    Args:    segments: (offset_s, duration_s) pairs.
    Returns: sorted, those that touch joined.
    """
    whole = ((floor(a), ceil(a + d)) for a, d in segments if d > 0)
    return [(start, end - start) for start, end in merged(whole)]


def footprint(
    segments: Sequence[tuple[int, int]], period_starts: Sequence[int], origin: int, num_slots: int
) -> list[Range]:
    """Every slot of the ring in which a job is busy: sorted, disjoint, those that touch joined.

    Args:
        segments: as `in_slots` gives them.
        origin: the slot in which the job's cycle begins.
    """
    return merged(
        piece
        for start in period_starts
        for offset, length in segments
        for piece in pieces(origin + start + offset, length, num_slots)
    )


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Ranges joined: the same slots as sorted, disjoint ranges that do not touch."""
    union: list[Range] = []
    for start, end in sorted(ranges):
        if union and start <= union[-1][1]:
            if end > union[-1][1]:
                union[-1] = (union[-1][0], end)
        else:
            union.append((start, end))
    return union


def overlap(one: Sequence[Range], other: Sequence[Range]) -> int:
    """Number of slots that are in both lists of ranges.

    Args: each sorted and disjoint. Cost: linear.
    """
    total = i = j = 0
    while i < len(one) and j < len(other):
        (start, end), (begin, stop) = one[i], other[j]
        total += max(0, min(end, stop) - max(start, begin))
        if end <= stop:
            i += 1
        else:
            j += 1
    return total


def minus(ranges: Sequence[Range], taken: Sequence[Range]) -> list[Range]:
    """The ranges without the slots that are taken.

    Args: each sorted and disjoint. Cost: linear.
    """
    left: list[Range] = []
    i = 0
    for first, end in ranges:
        start = first
        while i < len(taken) and taken[i][1] <= start:
            i += 1
        k = i
        while k < len(taken) and taken[k][0] < end:
            if taken[k][0] > start:
                left.append((start, taken[k][0]))
            start = max(start, taken[k][1])
            k += 1
        if start < end:
            left.append((start, end))
    return left


class FreeRanges:
    """A node's free time on the ring: sorted disjoint ranges (PlexRL §5.2.1).

    Positions after the end of the ring are those of its next turn: a free range at the ring's end
    goes on in the one at its beginning. Found by bisection; O(log M) of M ranges, and O(M) to move
    list entries.
    """

    def __init__(self, num_slots: int, ranges: Iterable[Range] | None = None) -> None:
        """Args: ranges: sorted, disjoint, not touching; None: all of the ring."""
        kept = [(0, num_slots)] if ranges is None else list(ranges)
        self.num_slots = num_slots
        self._starts = [start for start, _ in kept]
        self._ends = [end for _, end in kept]

    def ranges(self) -> list[Range]:
        return list(zip(self._starts, self._ends, strict=True))

    def take(self, start: int, end: int) -> list[Range]:
        """Mark [start, end) as taken. Returns: the part of it that was free."""
        first = bisect_right(self._ends, start)
        last = bisect_left(self._starts, end)
        if first >= last:
            return []
        touched = list(zip(self._starts[first:last], self._ends[first:last], strict=True))
        left = [(s, start) for s, _ in touched[:1] if s < start]
        right = [(end, e) for _, e in touched[-1:] if e > end]
        self._replace(first, last, left + right)
        return [(max(s, start), min(e, end)) for s, e in touched]

    def give(self, start: int, end: int) -> None:
        """Make [start, end) free; parts of it may be free already."""
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
        self._replace(first, last, [(start, end)])

    def holds(self, start: int, end: int) -> bool:
        """Whether all of [start, end), which does not wrap, is free."""
        i = bisect_right(self._starts, start) - 1
        return i >= 0 and end <= self._ends[i]

    def first_fit(self, at: int, length: int) -> int | None:
        """The earliest position from `at` on where `length` slots in a row are free.

        Returns: `at` itself (of its turn, or the next), or the start of a free range after it; None
            where no range is so long.
        """
        turn, slot = divmod(at, self.num_slots)
        i = bisect_right(self._ends, slot)
        for k in range(i, i + len(self._starts) + 1 if self._starts else i):
            wraps, place = divmod(k, len(self._starts))
            start = max(self._starts[place] + wraps * self.num_slots, slot)
            if start + length <= self._end(place) + wraps * self.num_slots:
                return start + turn * self.num_slots
        return None

    def next_start(self, at: int) -> int | None:
        """The first position after `at` where a free range begins; None where none ever does."""
        turn, slot = divmod(at, self.num_slots)
        i = bisect_right(self._starts, slot)
        for k in range(i, i + 2 * len(self._starts)):
            wraps, place = divmod(k, len(self._starts))
            if place or not self._joins:
                return self._starts[place] + (wraps + turn) * self.num_slots
        return None

    @property
    def _joins(self) -> bool:
        """Whether the first range is the rest of the last one."""
        return self._starts[0] == 0 and self._ends[-1] == self.num_slots

    def _end(self, place: int) -> int:
        """End of the free time that begins in a range; it may lie past the end of the ring."""
        end = self._ends[place]
        return end + self._ends[0] if end == self.num_slots and self._joins else end

    def _replace(self, first: int, last: int, by: list[Range]) -> None:
        self._starts[first:last] = [start for start, _ in by]
        self._ends[first:last] = [end for _, end in by]


def common(sets: Iterable[FreeRanges], num_slots: int) -> FreeRanges:
    """The time that is free in all sets. Cost: linear in the ranges."""
    shared: list[Range] = [(0, num_slots)]
    for free in sets:
        shared = _both(shared, free.ranges())
    return FreeRanges(num_slots, shared)


def _both(one: list[Range], other: list[Range]) -> list[Range]:
    found: list[Range] = []
    i = j = 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            found.append((start, end))
        if one[i][1] <= other[j][1]:
            i += 1
        else:
            j += 1
    return found
