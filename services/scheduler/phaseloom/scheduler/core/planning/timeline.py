"""A circular timeline of when nodes are busy, and the shift that fits a job into their idle time.

The timeline is a ring of L slots: slot `t mod L` stands for every second t (PlexRL §4.3.1, §5.2.1).
A periodic job is laid on the ring only once: its period is rounded so that a whole number of
periods fills the ring. A period longer than the ring is laid on it once. A set of slots is an
integer with one bit per slot, so shifting, merging and counting sets are single operations.

A node's busy slots follow from the members of its group, their cycles and their start times. Called
when choosing among groups for a job.

Cost: O(P) to lay a job of P periods on the ring, once per cycle. O(L / 64) to merge two sets, and
    for each busy stretch that a shift passes.
Source: PlexRL §4.3, §5.2.1. Deviations:

- PlexRL does not say how a period that does not divide the horizon continues past the end of the
  ring. If it were cut there, a footprint would be right for only one lap. With rounding, it is off
  by at most T / (2·⌊L/T⌋) seconds per period (less than 1 % up to T = 570 s), which is less than
  cycles jitter.
- PlexRL only reserves idle time. Here, jobs that fit at no shift may still share nodes, up to the
  duty limit (its §4.4 says that strict non-overlap is infeasible).
- PlexRL uses a segment tree over a pool's free capacity to reject shifts before examining nodes. On
  the backlog of its Fig. 8, such a tree rejected less than a third of the shifts, and updating it
  took longer than examining the nodes.
- PlexRL keeps sorted ranges of free time. With a thousand periods on the ring these are long lists;
  a decision among 100 nodes took ten times as long.
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
"""Number of one-second slots on the ring, enough for eight hours."""
SHORTEST_PERIOD_S = 20.0
"""Shorter cycles have no footprint, because one-second slots are too coarse for them. Only the duty
limit restricts them."""
_MEMO = 4096
"""Number of cached footprints, 4 kB each."""

Slots = int
"""A set of slots: bit t is slot t."""
Parts = tuple[tuple[int, int], ...]
"""(offset, length) of each segment in slots, relative to the start of the period."""
Nodes = Mapping[Pool, Sequence[NodeId]]


class SlotCycle(msgspec.Struct, frozen=True):
    """A cycle, in slots."""

    num_periods: int
    """Number of periods on the ring."""
    parts: dict[Pool, Parts]


@dataclass(frozen=True, slots=True)
class Ring:
    """The circular timeline and queries on it.

    In every method, `members` are the jobs that may be on the nodes, each with its nodes, cycle and
    start time. A member of unknown cycle is never busy.
    """

    num_slots: int = HORIZON_SLOTS
    shortest_s: float = SHORTEST_PERIOD_S

    def demand(self, cycle: Cycle) -> SlotCycle:
        """Convert a cycle to slots. It has no segments if it is too short for them."""
        if cycle.period_s < self.shortest_s:
            return SlotCycle(1, {})
        pools = dict.fromkeys(segment.pool for segment in cycle.segments)
        parts = {
            pool: in_slots((s.offset_s, s.duration_s) for s in cycle.segments if s.pool == pool)
            for pool in pools
        }
        return SlotCycle(max(1, round(self.num_slots / cycle.period_s)), parts)

    def period(self, demand: SlotCycle) -> int:
        """Length of one period, in slots, rounded down."""
        return self.num_slots // demand.num_periods

    def busy(self, members: Iterable[Member], pool: Pool, nodes: Sequence[NodeId]) -> Slots:
        """Slots in which any member is busy on at least one of these nodes of a pool."""
        slots = 0
        for member in members:
            if member.cycle is not None and not set(nodes).isdisjoint(member.nodes.get(pool, ())):
                slots |= self.footprint(self.demand(member.cycle), pool, int(member.began_s))
        return slots

    def footprint(self, demand: SlotCycle, pool: Pool, origin: int) -> Slots:
        """Slots in which a job is busy on a pool.

        Args: origin: slot in which the job's cycle starts.
        """
        laid = _laid(self.num_slots, demand.num_periods, demand.parts.get(pool, ()))
        return turned(laid, origin, self.num_slots)

    def find_shift(
        self, members: Sequence[Member], nodes: Nodes, demand: SlotCycle, origin: int, limit: int
    ) -> int | None:
        """Find the smallest shift, in slots up to `limit`, at which the cycle fits in every period.

        Args: origin: slot in which the cycle would start without a shift.
        Returns: None if it fits at no shift.
        """
        requests = [
            (self.footprint(demand, pool, origin), self.busy(members, pool, names))
            for pool, names in nodes.items()
        ]
        return smallest_shift(requests, limit, self.num_slots)

    def overlap_share(
        self, members: Sequence[Member], nodes: Nodes, demand: SlotCycle, origin: int
    ) -> float:
        """Share of all time in which the job and a member are busy on the same node.

        The shares of several pools are added up. This is PlexRL's predicted interference (§4.3.2).
        """
        total = sum(
            (self.footprint(demand, pool, origin) & self.busy(members, pool, names)).bit_count()
            for pool, names in nodes.items()
        )
        return total / self.num_slots


RING = Ring()


# --- sets of slots -------------------------------------------------------------------------------


def slots_in(ranges: Iterable[tuple[int, int]], num_slots: int) -> Slots:
    """Slots of (start, length) ranges, which may wrap around the end of the ring.

    Args: start: must be at least 0.
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
    """Rotate a set of slots around the ring."""
    shift %= num_slots
    return ((slots << shift) | (slots >> (num_slots - shift))) & ((1 << num_slots) - 1)


def in_slots(segments: Iterable[tuple[float, float]]) -> Parts:
    """Round segments outwards to whole slots. Empty segments are dropped and touching ones joined.

    Args: segments: (offset_s, duration_s) pairs.
    Returns: sorted (offset, length) pairs.
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
    """Slots of a cycle that starts in slot 0."""
    starts = (k * num_slots // num_periods for k in range(num_periods))
    ranges = ((start + offset, length) for start in starts for offset, length in parts)
    return slots_in(ranges, num_slots)


def smallest_shift(
    requests: Sequence[tuple[Slots, Slots]], limit: int, num_slots: int
) -> int | None:
    """Micro-shift: the smallest delay δ up to `limit` that moves every segment into idle time.

    The best shift is 0, or it moves some segment exactly to the end of a busy stretch. So each step
    jumps to the next such δ, without a search grid.

    Args: requests: per pool, the requested slots and the busy slots.
    Source: PlexRL §4.3.2, eq. 1-2. Its cost J(δ) = w1·(t_end(δ) − T)/T + w2·δ/T, with t_end =
    max(a_i + d_i) + δ, grows with δ, so the best shift is the smallest that fits.
    """
    shift = 0
    while shift <= limit:
        further = max(
            (_way_out(turned(slots, shift, num_slots) & busy, busy) for slots, busy in requests),
            default=0,
        )
        if not further:
            return shift
        shift += further
    return None


def _way_out(met: Slots, busy: Slots) -> int:
    """Distance by which the first conflicting slot must move to become idle. 0 if there is no
    conflict."""
    if not met:
        return 0
    return _first(~(busy >> _first(met)))


def _first(slots: Slots) -> int:
    return (slots & -slots).bit_length() - 1
