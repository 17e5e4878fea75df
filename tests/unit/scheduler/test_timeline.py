"""The ring of coming time against naive lists: footprints, shifts, overlaps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phaseloom.common.contract.ids import NodeId
from phaseloom.common.contract.specs import Cycle, Segment
from phaseloom.scheduler.core.planning import timeline
from phaseloom.scheduler.core.planning.timeline import (
    HORIZON_SLOTS,
    RING,
    Ring,
    SlotCycle,
    Slots,
    slots_in,
    smallest_shift,
    turned,
)
from phaseloom.scheduler.core.state.cluster import Member

GOLDEN = Path(__file__).parents[2] / "golden"
SLOTS = 40
SMALL_RING = Ring(SLOTS, shortest_s=1.0)
SMALL = settings(max_examples=100, deadline=None)
FEW = settings(max_examples=40, deadline=None)


def golden(name: str) -> list[Any]:
    cases = json.loads((GOLDEN / f"{name}.json").read_text())["cases"]
    assert cases
    return [pytest.param(case, id=case["name"]) for case in cases]


def slots_of(slots: Slots) -> list[int]:
    return [slot for slot in range(slots.bit_length()) if slots >> slot & 1]


def between(*ranges: tuple[int, int]) -> list[int]:
    return [slot for start, end in ranges for slot in range(start, end)]


# --- the ring ------------------------------------------------------------------------------------


def test_footprint_of_a_period_that_does_not_divide_the_ring_comes_out_even() -> None:
    """Periods of 289 s and of 285 s: 100 and 101 on the ring, none cut at the wrap."""
    for period_s, count in ((289.0, 100), (285.0, 101)):
        demand = RING.demand(Cycle(period_s, [Segment("t", 0, 50)]))
        assert demand.num_periods == count
        busy = slots_of(RING.footprint(demand, "t", 17))
        assert len(busy) == 50 * count
        there = set(busy)
        begins = [slot for slot in busy if (slot - 1) % HORIZON_SLOTS not in there]
        assert len(begins) == count
        ends = [*begins[1:], begins[0] + HORIZON_SLOTS]
        steps = {b - a for a, b in zip(begins, ends, strict=True)}
        assert max(steps) - min(steps) <= 1
        assert max(abs(step - period_s) for step in steps) < 1 + 0.005 * period_s


def test_footprint_goes_on_past_the_wrap() -> None:
    twice = SlotCycle(2, {"t": ((8, 6),)})
    assert slots_of(SMALL_RING.footprint(twice, "t", 0)) == between((8, 14), (28, 34))
    around = SMALL_RING.footprint(twice, "t", 10)
    assert slots_of(around) == between((0, 4), (18, 24), (38, 40))
    always = SMALL_RING.footprint(SlotCycle(1, {"t": ((0, 99),)}), "t", 10)
    assert slots_of(always) == between((0, SLOTS))
    assert SMALL_RING.footprint(twice, "r", 0) == 0
    assert SMALL_RING.demand(Cycle(1e6, [])).num_periods == 1


def test_segments_grow_to_whole_slots_and_join() -> None:
    segments = [(0.2, 1.0), (1.9, 0.0), (7.5, 1.0), (2.0, 0.5)]
    assert timeline.in_slots(segments) == ((0, 3), (7, 2))


RANGES = st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(0, 2 * SLOTS)), max_size=6)


@SMALL
@given(ranges=RANGES, shift=st.integers(-SLOTS, 3 * SLOTS))
def test_slots_turn_around_the_ring(ranges: list[tuple[int, int]], shift: int) -> None:
    plain = {(start + i) % SLOTS for start, length in ranges for i in range(length)}
    slots = slots_in(ranges, SLOTS)
    assert slots_of(slots) == sorted(plain)
    assert slots_of(turned(slots, shift, SLOTS)) == sorted((s + shift) % SLOTS for s in plain)


# --- the shift -----------------------------------------------------------------------------------


def shift_of(
    segments: Sequence[tuple[int, int]], windows: Sequence[tuple[int, int]], limit: int
) -> int | None:
    """The smallest shift of all segments into the same free windows, none of which wraps."""
    last = max([0, *(end for _, end in windows), *(start + length for start, length in segments)])
    num_slots = last + limit + 1
    free = slots_in([(start, end - start) for start, end in windows], num_slots)
    busy = free ^ ((1 << num_slots) - 1)
    return smallest_shift([(slots_in(segments, num_slots), busy)], limit, num_slots)


@pytest.mark.parametrize("case", golden("micro_shift"))
def test_smallest_shift_is_as_derived_by_hand(case: dict[str, Any]) -> None:
    assert shift_of(case["segs"], case["free"], int(case["T"] * case["alpha"])) == case["delta"]


@SMALL
@given(
    wanted=st.lists(st.tuples(RANGES, RANGES), max_size=3),
    limit=st.integers(0, SLOTS),
)
def test_smallest_shift_equals_a_scan(
    wanted: list[tuple[list[tuple[int, int]], list[tuple[int, int]]]], limit: int
) -> None:
    pools = [(slots_in(one, SLOTS), slots_in(other, SLOTS)) for one, other in wanted]

    def fits(shift: int) -> bool:
        return not any(
            (slot + shift) % SLOTS in slots_of(busy)
            for slots, busy in pools
            for slot in slots_of(slots)
        )

    scanned = next((shift for shift in range(limit + 1) if fits(shift)), None)
    assert smallest_shift(pools, limit, SLOTS) == scanned


@pytest.mark.parametrize("case", golden("table2_plexrl"))
def test_bubble_is_what_a_cycle_leaves_free(case: dict[str, Any]) -> None:
    """PlexRL Table 2, from the ring: what one job leaves free of its own node."""
    busy_s = sum(case["ops"])
    cycle = Cycle(case["cycle"], [Segment("train", case["cycle"] - busy_s, busy_s)])
    busy = RING.footprint(RING.demand(cycle), "train", 0)
    bubble = 1 - len(slots_of(busy)) / HORIZON_SLOTS
    assert bubble == pytest.approx(case["bubble"], abs=0.006)


# --- jobs on the ring ----------------------------------------------------------------------------

NODES = [NodeId(f"{pool}{i}") for pool in ("r", "t") for i in range(3)]


@st.composite
def members(draw: st.DrawFn) -> Member:
    period = draw(st.integers(4, 50))
    segments = draw(
        st.lists(
            st.builds(
                Segment,
                st.sampled_from(["r", "t"]),
                st.integers(0, period - 1),
                st.integers(1, max(1, period // 3)),
            ),
            max_size=3,
        )
    )
    nodes = {
        pool: [
            NodeId(f"{pool}{i}")
            for i in draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True))
        ]
        for pool in ("r", "t")
    }
    began_s = float(draw(st.integers(0, 2 * SLOTS)))
    cycle = Cycle(float(period), segments)
    return Member("job", 0.0, {}, cycle=cycle, nodes=nodes, began_s=began_s)


class Naive:
    """A count of jobs a node and slot."""

    def __init__(self) -> None:
        self.counts = {node: [0] * SLOTS for node in NODES}

    def slots(self, member: Member, pool: str, origin: int) -> set[int]:
        assert member.cycle is not None
        count = max(1, round(SLOTS / member.cycle.period_s))
        return {
            (origin + k * SLOTS // count + int(s.offset_s) + i) % SLOTS
            for k in range(count)
            for s in member.cycle.segments
            if s.pool == pool
            for i in range(int(s.duration_s))
        }

    def add(self, member: Member) -> None:
        for pool, names in member.nodes.items():
            for slot in self.slots(member, pool, int(member.began_s)):
                for node in names:
                    self.counts[node][slot] += 1

    def is_busy(self, names: list[NodeId], slot: int) -> bool:
        return any(self.counts[node][slot] for node in names)

    def num_met(self, member: Member, origin: int) -> int:
        """Slots, counted for each pool, in which the member would be busy beside another."""
        return sum(
            self.is_busy(names, slot)
            for pool, names in member.nodes.items()
            for slot in self.slots(member, pool, origin)
        )


@FEW
@given(there=st.lists(members(), max_size=4), asked=members(), limit=st.integers(0, SLOTS))
def test_shift_is_the_smallest_that_fits_every_period(
    there: list[Member], asked: Member, limit: int
) -> None:
    naive = Naive()
    for member in there:
        naive.add(member)
    assert asked.cycle is not None
    demand, origin = SMALL_RING.demand(asked.cycle), int(asked.began_s)
    scanned = next(
        (shift for shift in range(limit + 1) if not naive.num_met(asked, origin + shift)), None
    )
    assert SMALL_RING.find_shift(there, asked.nodes, demand, origin, limit) == scanned


@FEW
@given(there=st.lists(members(), max_size=4), asked=members())
def test_overlap_is_the_share_of_time_that_both_want(there: list[Member], asked: Member) -> None:
    naive = Naive()
    for member in there:
        naive.add(member)
    assert asked.cycle is not None
    demand, origin = SMALL_RING.demand(asked.cycle), int(asked.began_s)
    share = SMALL_RING.overlap_share(there, asked.nodes, demand, origin)
    assert share == naive.num_met(asked, origin) / SLOTS
    for pool, names in asked.nodes.items():
        busy = SMALL_RING.busy(there, pool, names)
        assert slots_of(busy) == [slot for slot in range(SLOTS) if naive.is_busy(names, slot)]


def test_cycle_that_is_unknown_or_too_short_for_slots_is_never_busy() -> None:
    unknown = Member("a", 0.0, {}, nodes={"t": [NODES[3]]})
    short = Member("b", 0.0, {}, cycle=Cycle(5.0, [Segment("t", 0, 5)]), nodes={"t": [NODES[3]]})
    assert RING.busy([unknown, short], "t", [NODES[3]]) == 0
    assert slots_of(SMALL_RING.busy([short], "t", [NODES[3]])) == between((0, SLOTS))
