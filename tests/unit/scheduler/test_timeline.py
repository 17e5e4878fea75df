"""The ring of coming time against naive lists: footprints, free ranges, shifts, overlaps."""

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
    Demand,
    FreeRanges,
    Ring,
    smallest_shift,
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


def slots_of(ranges: list[tuple[int, int]]) -> list[int]:
    return [slot for start, end in ranges for slot in range(start, end)]


# --- the ring ------------------------------------------------------------------------------------


def test_footprint_of_a_period_that_does_not_divide_the_ring_comes_out_even() -> None:
    """Periods of 289 s and of 285 s: 100 and 101 on the ring, none cut at the wrap."""
    for period_s, count in ((289.0, 100), (285.0, 101)):
        begins = timeline.starts(period_s, HORIZON_SLOTS)
        assert len(begins) == count
        steps = {b - a for a, b in zip(begins, [*begins[1:], HORIZON_SLOTS], strict=True)}
        assert max(steps) - min(steps) <= 1
        assert max(abs(step - period_s) for step in steps) < 1 + 0.005 * period_s
        demand = Demand(HORIZON_SLOTS // count, begins, {"t": [(0, 50)]})
        busy = RING.footprint(demand, "t", 17)
        assert len(slots_of(busy)) == 50 * count


def test_footprint_goes_on_past_the_wrap() -> None:
    twice = Demand(20, [0, 20], {"t": [(8, 6)]})
    assert SMALL_RING.footprint(twice, "t", 0) == [(8, 14), (28, 34)]
    assert SMALL_RING.footprint(twice, "t", 10) == [(0, 4), (18, 24), (38, 40)]
    assert SMALL_RING.footprint(Demand(SLOTS, [0], {"t": [(0, 99)]}), "t", 10) == [(0, SLOTS)]
    assert SMALL_RING.footprint(twice, "r", 0) == []
    assert timeline.starts(1e6, SLOTS) == [0]


def test_segments_grow_to_whole_slots_and_join() -> None:
    assert timeline.in_slots([(0.2, 1.0), (1.9, 0.0), (7.5, 1.0), (2.0, 0.5)]) == [(0, 3), (7, 2)]


RANGES = st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(1, 12)), max_size=6).map(
    lambda parts: timeline.merged((s, min(SLOTS, s + n)) for s, n in parts)
)


@SMALL
@given(one=RANGES, other=RANGES)
def test_ranges_overlap_as_sets_do(
    one: list[tuple[int, int]], other: list[tuple[int, int]]
) -> None:
    assert timeline.overlap(one, other) == len(set(slots_of(one)) & set(slots_of(other)))


# --- free ranges ---------------------------------------------------------------------------------


@SMALL
@given(busy=RANGES, at=st.integers(0, 3 * SLOTS), length=st.integers(1, SLOTS))
def test_first_fit_equals_a_scan(busy: list[tuple[int, int]], at: int, length: int) -> None:
    free, plain = FreeRanges(SLOTS, busy), [True] * SLOTS
    for slot in slots_of(busy):
        plain[slot] = False
    places = range(at, at + 2 * SLOTS)
    fitting = (p for p in places if all(plain[(p + i) % SLOTS] for i in range(length)))
    assert free.first_fit(at, length) == next(fitting, None)


# --- the shift -----------------------------------------------------------------------------------


def shift_of(
    segments: Sequence[tuple[int, int]], windows: Sequence[tuple[int, int]], limit: int
) -> int | None:
    """The smallest shift of all segments into the same free windows, which do not wrap."""

    def first_fit(at: int, length: int) -> int | None:
        return next((max(at, s) for s, e in windows if max(at, s) + length <= e), None)

    return smallest_shift([(a, d, first_fit) for a, d in segments], limit)


@pytest.mark.parametrize("case", golden("micro_shift"))
def test_smallest_shift_is_as_derived_by_hand(case: dict[str, Any]) -> None:
    assert shift_of(case["segs"], case["free"], int(case["T"] * case["alpha"])) == case["delta"]


@SMALL
@given(
    segments=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=4),
    windows=RANGES,
    alpha=st.sampled_from([0.25, 0.5, 1.0]),
)
def test_smallest_shift_equals_a_scan(
    segments: list[tuple[int, int]], windows: list[tuple[int, int]], alpha: float
) -> None:
    def fits(shift: int) -> bool:
        return all(
            any(s <= a + shift and a + shift + d <= e for s, e in windows) for a, d in segments
        )

    scanned = next((shift for shift in range(int(SLOTS * alpha) + 1) if fits(shift)), None)
    assert shift_of(segments, windows, int(SLOTS * alpha)) == scanned


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
    assert RING.busy([unknown, short], "t", [NODES[3]]) == []
    assert SMALL_RING.busy([short], "t", [NODES[3]]) == [(0, SLOTS)]
