"""Range add and range minimum over the ring (PlexRL §5.2.1): the number of free nodes by slot.

A node's pending addition is never pushed down: it stays where it was made and a query adds what it
passes on its way up, so that both operations are one loop from the leaves to the root. Two
sentinel leaves, left and right of the values, make every range an open interval between leaves.

Cost: O(log L) a range that does not wrap, two of those for one that does; O(L) to build.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from operator import add

from phaseloom.scheduler.core.planning.timeline.ring import Range, pieces

_NEVER_LEAST = 1 << 60
_REBUILD_FROM = 500
"""Changed ranges from which building the tree anew is cheaper than changing one after the other."""


class SegmentTree:
    def __init__(self, values: Sequence[int]) -> None:
        """Args: values: one for each slot; at least one."""
        self.num_slots = len(values)
        self._base = 1 << (self.num_slots + 1).bit_length()
        self._least: list[int] = []
        """Least value of each subtree, with its own addition and those below it."""
        self._added: list[int] = []
        """Addition to each whole subtree."""
        self._build(values)

    def add(self, start: int, length: int, amount: int) -> None:
        """Add to `length` slots from `start` on, around the ring; never twice to one of them."""
        for first, end in pieces(start, length, self.num_slots):
            self._add(first, end, amount)

    def add_all(self, changes: Mapping[Range, int]) -> None:
        """Add each amount to its range (none wraps). Cost: never much above O(L)."""
        if len(changes) < _REBUILD_FROM:
            for (start, end), amount in changes.items():
                self._add(start, end, amount)
            return
        steps = [0] * (self.num_slots + 1)
        for (start, end), amount in changes.items():
            steps[start] += amount
            steps[end] -= amount
        self._build(list(map(add, self.values(), accumulate(steps))))

    def minimum(self, start: int, length: int) -> int:
        """The least value of `length` slots from `start` on, around the ring.

        Raises: ValueError: no slot at all.
        """
        if length <= 0:
            raise ValueError(f"a minimum over {length} slots")
        return min(self._minimum(*piece) for piece in pieces(start, length, self.num_slots))

    def values(self) -> list[int]:
        """The value of every slot. Cost: O(L)."""
        totals = [self._added[1]]
        while len(totals) < self._base:
            below = self._added[2 * len(totals) : 4 * len(totals)]
            totals = list(map(add, below, [total for total in totals for _ in (0, 1)]))
        return totals[1 : self.num_slots + 1]

    def _build(self, values: Sequence[int]) -> None:
        num_right = self._base - self.num_slots - 1
        self._added = [0] * (self._base + 1) + [*values, *([0] * num_right)]
        level = [_NEVER_LEAST, *values, *([_NEVER_LEAST] * num_right)]
        levels = [level]
        while len(level) > 1:
            level = list(map(min, level[::2], level[1::2]))
            levels.append(level)
        self._least = [_NEVER_LEAST, *chain.from_iterable(reversed(levels))]

    def _add(self, start: int, end: int, amount: int) -> None:
        least, added = self._least, self._added
        left, right = self._base + start, self._base + end + 1
        while left ^ right ^ 1:
            if not left & 1:
                least[left ^ 1] += amount
                added[left ^ 1] += amount
            if right & 1:
                least[right ^ 1] += amount
                added[right ^ 1] += amount
            left >>= 1
            right >>= 1
            one, other = least[2 * left], least[2 * left + 1]
            least[left] = (one if one < other else other) + added[left]
            one, other = least[2 * right], least[2 * right + 1]
            least[right] = (one if one < other else other) + added[right]
        while left > 1:
            left >>= 1
            one, other = least[2 * left], least[2 * left + 1]
            total = (one if one < other else other) + added[left]
            if total == least[left]:
                return
            least[left] = total

    def _minimum(self, start: int, end: int) -> int:
        least, added = self._least, self._added
        left, right = self._base + start, self._base + end + 1
        on_left = on_right = _NEVER_LEAST
        while left ^ right ^ 1:
            if not left & 1:
                on_left = min(on_left, least[left ^ 1])
            if right & 1:
                on_right = min(on_right, least[right ^ 1])
            left >>= 1
            right >>= 1
            on_left += added[left]
            on_right += added[right]
        found = min(on_left, on_right)
        while left > 1:
            left >>= 1
            found += added[left]
        return found
