"""The ring of coming time: when nodes are busy, and the shift that puts a job into their free time.

The ring is a circular horizon: slot `t mod L` stands for every second t (PlexRL §4.3.1, §5.2.1). A
periodic job is laid on it once, for ever: its period is rounded so that a whole number of periods
fills the ring. A job whose period is longer than the ring has one period on it. Ranges are
half-open, in whole slots; ranges of one list that touch are one.

Nothing is kept: when nodes are busy follows from the members of their group, their cycles and when
these began. Called by the choice among groups that could take a job.

Cost:   O(P log P) to lay a job of P periods on the ring, O(P log M) for a shift among M free
        ranges.
Source: PlexRL §4.3, §5.2.1. Deviations:
    - PlexRL does not say how a period that does not divide the horizon goes on past the wrap. Cut
      at the wrap, a footprint would be right for one lap of the ring only. Rounded, it is off by
      T / (2·⌊L/T⌋) seconds a period at most (under 1 % up to T = 570 s), less than cycles jitter.
    - PlexRL reserves free time only. Jobs that no shift fits may share nodes all the same, up to
      the duty limit (its §4.4: strict non-overlap is infeasible).
    - PlexRL rejects shifts by a segment tree over the free capacity of a pool, before any node is
      looked at. On the backlog of its Fig. 8 such a tree rejected less than a third of the shifts,
      and it took longer to keep it up to date than to look at the nodes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor

import msgspec

from phaseloom.common.contract.ids import NodeId
from phaseloom.common.contract.specs import Cycle
from phaseloom.scheduler.core.state.cluster import Member, Pool

HORIZON_SLOTS = 28_800
"""Slots of one second on the ring: eight hours."""
SHORTEST_PERIOD_S = 20.0
"""Shorter cycles have no footprint, because slots of a second are too coarse for them; only the
duty bound limits them."""

Range = tuple[int, int]
"""[start, end) in slots."""
Nodes = Mapping[Pool, Sequence[NodeId]]


class Demand(msgspec.Struct, frozen=True):
    """A cycle in slots."""

    period: int
    period_starts: list[int]
    """Slots in which periods begin on the ring, counted from the cycle's beginning."""
    segments: dict[Pool, list[tuple[int, int]]]
    """(offset, length) of each segment, by pool."""


@dataclass(frozen=True, slots=True)
class Ring:
    """The circular horizon, and what is asked of it.

    In every method `members` are the jobs that may be on the nodes, each with its own nodes, cycle
    and beginning. A member without a known cycle is never busy.
    """

    num_slots: int = HORIZON_SLOTS
    shortest_s: float = SHORTEST_PERIOD_S

    def demand(self, cycle: Cycle) -> Demand:
        """A cycle in slots; without segments where it is too short for them."""
        if cycle.period_s < self.shortest_s:
            return Demand(self.num_slots, [0], {})
        pools = dict.fromkeys(segment.pool for segment in cycle.segments)
        segments = {
            pool: in_slots((s.offset_s, s.duration_s) for s in cycle.segments if s.pool == pool)
            for pool in pools
        }
        period_starts = starts(cycle.period_s, self.num_slots)
        return Demand(self.num_slots // len(period_starts), period_starts, segments)

    def busy(self, members: Iterable[Member], pool: Pool, nodes: Sequence[NodeId]) -> list[Range]:
        """Slots in which some member is busy on at least one of these nodes of a pool."""
        return merged(
            part
            for member in members
            if member.cycle is not None and not set(nodes).isdisjoint(member.nodes.get(pool, ()))
            for part in self.footprint(self.demand(member.cycle), pool, int(member.began_s))
        )

    def footprint(self, demand: Demand, pool: Pool, origin: int) -> list[Range]:
        """Slots of the ring in which a job is busy on a pool.

        Args: origin: the slot in which the job's cycle begins.
        """
        segments = demand.segments.get(pool, [])
        return merged(
            piece
            for start in demand.period_starts
            for offset, length in segments
            for piece in pieces(origin + start + offset, length, self.num_slots)
        )

    def find_shift(
        self, members: Sequence[Member], nodes: Nodes, demand: Demand, origin: int, limit: int
    ) -> int | None:
        """The smallest shift, in slots up to `limit`, at which a demand fits in every period.

        Args:    origin: the slot in which the demand's cycle begins without a shift.
        Returns: None where no shift does.
        """
        free = {
            pool: FreeRanges(self.num_slots, self.busy(members, pool, names))
            for pool, names in nodes.items()
        }
        return smallest_shift(
            [
                (origin + start + offset, length, free[pool].first_fit)
                for start in demand.period_starts
                for pool in nodes
                for offset, length in demand.segments.get(pool, [])
            ],
            limit,
        )

    def overlap_share(
        self, members: Sequence[Member], nodes: Nodes, demand: Demand, origin: int
    ) -> float:
        """Share of all time in which a demand and a member are busy on one of these nodes.

        Shares of several pools are summed. This is the predicted interference (PlexRL §4.3.2).
        """
        total = sum(
            overlap(self.footprint(demand, pool, origin), self.busy(members, pool, names))
            for pool, names in nodes.items()
        )
        return total / self.num_slots


RING = Ring()


# --- ranges on the ring --------------------------------------------------------------------------


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


def starts(period_s: float, num_slots: int) -> list[int]:
    """Slot in which each period begins, the first in slot 0; at least one fills the ring."""
    count = max(1, round(num_slots / period_s))
    return [k * num_slots // count for k in range(count)]


def in_slots(segments: Iterable[tuple[float, float]]) -> list[tuple[int, int]]:
    """(offset, duration) of each segment, grown to whole slots; empty ones are left out.

    Args:    segments: (offset_s, duration_s) pairs.
    Returns: sorted, those that touch joined.
    """
    whole = ((floor(a), ceil(a + d)) for a, d in segments if d > 0)
    return [(start, end - start) for start, end in merged(whole)]


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


class FreeRanges:
    """The time on the ring that is not busy, as sorted disjoint ranges (PlexRL §5.2.1).

    Positions after the end of the ring are those of its next lap: a free range at the ring's end
    goes on in the one at its beginning.
    """

    def __init__(self, num_slots: int, busy: Sequence[Range]) -> None:
        """Args: busy: sorted, disjoint, not touching."""
        self.num_slots = num_slots
        begins, ends = [0, *(end for _, end in busy)], [*(start for start, _ in busy), num_slots]
        kept = [(start, end) for start, end in zip(begins, ends, strict=True) if start < end]
        self._starts = [start for start, _ in kept]
        self._ends = [end for _, end in kept]

    def first_fit(self, at: int, length: int) -> int | None:
        """The earliest position from `at` on where `length` slots in a row are free.

        Returns: `at` itself (of its lap, or the next), or the start of a free range after it; None
            where no range is so long.
        Cost:    a bisection, and a look at each range that is too short.
        """
        lap, slot = divmod(at, self.num_slots)
        i = bisect_right(self._ends, slot)
        for k in range(i, i + len(self._starts) + 1 if self._starts else i):
            wraps, place = divmod(k, len(self._starts))
            start = max(self._starts[place] + wraps * self.num_slots, slot)
            if start + length <= self._end(place) + wraps * self.num_slots:
                return start + lap * self.num_slots
        return None

    def _end(self, place: int) -> int:
        """End of the free time that begins in a range; it may lie past the end of the ring."""
        end = self._ends[place]
        joins = end == self.num_slots and self._starts[0] == 0
        return end + self._ends[0] if joins else end


FirstFit = Callable[[int, int], int | None]
"""(position, length) -> the earliest position from there on with so much free time, if any."""


def smallest_shift(segments: Sequence[tuple[int, int, FirstFit]], limit: int) -> int | None:
    """Micro-shift: the smallest delay δ up to `limit` that puts every segment into free time.

    The best shift is 0 or brings some segment to the start of a window, so each step goes to the
    next such δ; no grid is searched.

    Args:   segments: (offset, length, search for its free time).
    Cost:   one bisection a segment for each window that is passed.
    Source: PlexRL §4.3.2, eq. 1-2. Its cost J(δ) = w1·(t_end(δ) − T)/T + w2·δ/T, with t_end =
        max(a_i + d_i) + δ, grows with δ: the best shift is the smallest that fits.
    """
    shift = 0
    has_moved = True
    while has_moved:
        has_moved = False
        for offset, length, first_fit in segments:
            place = first_fit(offset + shift, length)
            if place is None or place - offset > limit:
                return None
            if place > offset + shift:
                shift = place - offset
                has_moved = True
    return shift
