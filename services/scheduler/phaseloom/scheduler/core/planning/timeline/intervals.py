"""A node's free time on the ring: sorted disjoint half-open ranges (PlexRL §5.2.1).

Ranges that touch are one. Positions after the end of the ring are those of its next turn: a free
range at its end goes on in the one at its beginning. Found by bisection; O(log M) of M ranges, and
O(M) to move list entries.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from phaseloom.scheduler.core.planning.timeline.ring import Range


class FreeRanges:
    def __init__(self, num_slots: int, ranges: Iterable[Range] | None = None) -> None:
        """Args: ranges: sorted, disjoint, not touching; None: all of the ring."""
        kept = [(0, num_slots)] if ranges is None else list(ranges)
        self.num_slots = num_slots
        self._starts = [start for start, _ in kept]
        self._ends = [end for _, end in kept]

    def ranges(self) -> list[Range]:
        return list(zip(self._starts, self._ends, strict=True))

    def take(self, start: int, end: int) -> list[Range]:
        """Take [start, end) out of them. Returns: what of it was free."""
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
        """Make [start, end) free, whatever of it is free already."""
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

        Returns: where `at` is (of its turn, or the next), or the start of a free range after it;
            None: there is none so long.
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
        """The first position after `at` where a free range begins; None: none ever does."""
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
        """Where the free time goes on to that begins in a range, past the end of the ring."""
        end = self._ends[place]
        return end + self._ends[0] if end == self.num_slots and self._joins else end

    def _replace(self, first: int, last: int, by: list[Range]) -> None:
        self._starts[first:last] = [start for start, _ in by]
        self._ends[first:last] = [end for _, end in by]


def common(sets: Iterable[FreeRanges], num_slots: int) -> FreeRanges:
    """What is free in all of them. Cost: linear in the ranges."""
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
