"""The ring of coming time: when nodes are busy, and the shift that puts a job into their free time.

The ring is a circular horizon: slot `t mod L` stands for every second t (PlexRL §4.3.1, §5.2.1). A
periodic job is laid on it once, for ever: its period is rounded so that a whole number of periods
fills the ring. A job whose period is longer than the ring has one period on it. A set of slots is
an integer with a bit for each, so that to shift, to join and to count sets is one operation each.

When nodes are busy follows from the members of their group, their cycles and when these began.
Called by the choice among groups that could take a job.

Cost:   O(P) to lay a job of P periods on the ring, once for each cycle; O(L / 64) to join two sets
        and for each busy stretch that a shift passes.
Source: PlexRL §4.3, §5.2.1. Deviations:
    - PlexRL does not say how a period that does not divide the horizon goes on past the wrap. Cut
      at the wrap, a footprint would be right for one lap of the ring only. Rounded, it is off by
      T / (2·⌊L/T⌋) seconds a period at most (under 1 % up to T = 570 s), less than cycles jitter.
    - PlexRL reserves free time only. Jobs that no shift fits may share nodes all the same, up to
      the duty limit (its §4.4: strict non-overlap is infeasible).
    - PlexRL rejects shifts by a segment tree over the free capacity of a pool, before any node is
      looked at. On the backlog of its Fig. 8 such a tree rejected less than a third of the shifts,
      and it took longer to keep it up to date than to look at the nodes.
    - PlexRL keeps sorted ranges of free time. With a thousand periods on the ring these are long
      lists: a decision among 100 nodes took ten times as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
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
_MEMO = 4096
"""Footprints that are kept; one takes 4 kB."""

Slots = int
"""A set of slots of the ring: bit t is slot t."""
Parts = tuple[tuple[int, int], ...]
"""(offset, length) of each segment in slots, counted from the period's beginning."""
Nodes = Mapping[Pool, Sequence[NodeId]]


class Demand(msgspec.Struct, frozen=True):
    """A cycle in slots."""

    num_periods: int
    """Periods on the ring."""
    parts: dict[Pool, Parts]


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
            return Demand(1, {})
        pools = dict.fromkeys(segment.pool for segment in cycle.segments)
        parts = {
            pool: in_slots((s.offset_s, s.duration_s) for s in cycle.segments if s.pool == pool)
            for pool in pools
        }
        return Demand(max(1, round(self.num_slots / cycle.period_s)), parts)

    def period(self, demand: Demand) -> int:
        """The length of a demand's shortest period, in slots."""
        return self.num_slots // demand.num_periods

    def busy(self, members: Iterable[Member], pool: Pool, nodes: Sequence[NodeId]) -> Slots:
        """Slots in which some member is busy on at least one of these nodes of a pool."""
        slots = 0
        for member in members:
            if member.cycle is not None and not set(nodes).isdisjoint(member.nodes.get(pool, ())):
                slots |= self.footprint(self.demand(member.cycle), pool, int(member.began_s))
        return slots

    def footprint(self, demand: Demand, pool: Pool, origin: int) -> Slots:
        """Slots in which a job is busy on a pool.

        Args: origin: the slot in which the job's cycle begins.
        """
        laid = _laid(self.num_slots, demand.num_periods, demand.parts.get(pool, ()))
        return turned(laid, origin, self.num_slots)

    def find_shift(
        self, members: Sequence[Member], nodes: Nodes, demand: Demand, origin: int, limit: int
    ) -> int | None:
        """The smallest shift, in slots up to `limit`, at which a demand fits in every period.

        Args:    origin: the slot in which the demand's cycle begins without a shift.
        Returns: None where no shift does.
        """
        wanted = [
            (self.footprint(demand, pool, origin), self.busy(members, pool, names))
            for pool, names in nodes.items()
        ]
        return smallest_shift(wanted, limit, self.num_slots)

    def overlap_share(
        self, members: Sequence[Member], nodes: Nodes, demand: Demand, origin: int
    ) -> float:
        """Share of all time in which a demand and a member are busy on one of these nodes.

        Shares of several pools are summed. This is the predicted interference (PlexRL §4.3.2).
        """
        total = sum(
            (self.footprint(demand, pool, origin) & self.busy(members, pool, names)).bit_count()
            for pool, names in nodes.items()
        )
        return total / self.num_slots


RING = Ring()


# --- sets of slots -------------------------------------------------------------------------------


def slots_in(ranges: Iterable[tuple[int, int]], num_slots: int) -> Slots:
    """The slots of some ranges (start, length), each of which may go on past the end of the ring.

    Args: start: from 0 on.
    """
    digits = bytearray(b"0" * num_slots)  # the first digit is the last slot
    for start, length in ranges:
        first = start % num_slots
        end = first + min(length, num_slots)
        for begin, stop in ((first, min(end, num_slots)), (0, end - num_slots)):
            if begin < stop:
                digits[num_slots - stop : num_slots - begin] = b"1" * (stop - begin)
    return int(digits, 2)


def turned(slots: Slots, shift: int, num_slots: int) -> Slots:
    """All slots so much later, around the ring."""
    shift %= num_slots
    return ((slots << shift) | (slots >> (num_slots - shift))) & ((1 << num_slots) - 1)


def in_slots(segments: Iterable[tuple[float, float]]) -> Parts:
    """(offset, length) of each segment, grown to whole slots; empty ones are left out.

    Args:    segments: (offset_s, duration_s) pairs.
    Returns: sorted, those that touch joined.
    """
    joined: list[tuple[int, int]] = []
    for start, end in sorted((floor(a), ceil(a + d)) for a, d in segments if d > 0):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return tuple((start, end - start) for start, end in joined)


@lru_cache(maxsize=_MEMO)
def _laid(num_slots: int, num_periods: int, parts: Parts) -> Slots:
    """The slots of a demand whose cycle begins in slot 0."""
    starts = (k * num_slots // num_periods for k in range(num_periods))
    ranges = ((start + offset, length) for start in starts for offset, length in parts)
    return slots_in(ranges, num_slots)


def smallest_shift(wanted: Sequence[tuple[Slots, Slots]], limit: int, num_slots: int) -> int | None:
    """Micro-shift: the smallest delay δ up to `limit` that puts every segment into free time.

    The best shift is 0 or brings some segment past a busy stretch, so each step goes to the next
    such δ; no grid is searched.

    Args:   wanted: the slots that are wanted and those that are busy, of each pool.
    Source: PlexRL §4.3.2, eq. 1-2. Its cost J(δ) = w1·(t_end(δ) − T)/T + w2·δ/T, with t_end =
        max(a_i + d_i) + δ, grows with δ: the best shift is the smallest that fits.
    """
    shift = 0
    while shift <= limit:
        further = max(
            (_way_out(turned(slots, shift, num_slots) & busy, busy) for slots, busy in wanted),
            default=0,
        )
        if not further:
            return shift
        shift += further
    return None


def _way_out(met: Slots, busy: Slots) -> int:
    """By how much the first slot that is met is to be shifted until it is not busy; 0: none is."""
    if not met:
        return 0
    return _first(~(busy >> _first(met)))


def _first(slots: Slots) -> int:
    return (slots & -slots).bit_length() - 1
