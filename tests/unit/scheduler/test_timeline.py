"""The ring of coming time against naive lists: trees, free ranges, shifts, reservations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phaseloom.common.contract.ids import NodeId
from phaseloom.common.contract.specs import Cycle, Segment
from phaseloom.scheduler.core.planning.timeline import ring
from phaseloom.scheduler.core.planning.timeline.ring import FreeRanges, common
from phaseloom.scheduler.core.planning.timeline.segment_tree import SegmentTree
from phaseloom.scheduler.core.planning.timeline.timeline import Timeline, smallest_shift

GOLDEN = Path(__file__).parents[2] / "golden"
SLOTS = 40
SMALL = settings(max_examples=100, deadline=None)
FEW = settings(max_examples=40, deadline=None)


def golden(name: str) -> list[Any]:
    cases = json.loads((GOLDEN / f"{name}.json").read_text())["cases"]
    assert cases
    return [pytest.param(case, id=case["name"]) for case in cases]


def slots_of(ranges: list[tuple[int, int]]) -> list[int]:
    return [slot for start, end in ranges for slot in range(start, end)]


# --- the tree ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", golden("segment_tree"))
def test_tree_answers_as_derived_by_hand(case: dict[str, Any]) -> None:
    tree = SegmentTree([case["init"]] * case["L"])
    for kind, start, length, amount, expected in case["ops"]:
        if kind == "add":
            tree.add(start, length, amount)
        else:
            assert tree.minimum(start, length) == expected


@SMALL
@given(
    values=st.lists(st.integers(-5, 5), min_size=1, max_size=70),
    changes=st.lists(
        st.tuples(st.integers(0, 200), st.integers(1, 70), st.integers(-4, 4)), max_size=25
    ),
)
def test_tree_equals_a_list(values: list[int], changes: list[tuple[int, int, int]]) -> None:
    tree, plain = SegmentTree(values), list(values)
    for start, asked, amount in changes:
        length = min(asked, len(plain))
        tree.add(start, length, amount)
        around = [(start + i) % len(plain) for i in range(length)]
        for slot in around:
            plain[slot] += amount
        assert tree.minimum(start + amount, length) == min(
            plain[(start + amount + i) % len(plain)] for i in range(length)
        )
    assert tree.values() == plain


@pytest.mark.parametrize("num_ranges", [10, 900])
def test_tree_takes_many_changes_at_once(num_ranges: int) -> None:
    """Few are made one by one, many by building it anew: the same tree."""
    changes = {(i % 1000, i % 1000 + 1 + i % 7): i % 5 - 2 for i in range(num_ranges)}
    one_by_one, at_once = SegmentTree([3] * 1010), SegmentTree([3] * 1010)
    for (start, end), amount in changes.items():
        one_by_one.add(start, end - start, amount)
    at_once.add_all(changes)
    assert at_once.values() == one_by_one.values()
    assert at_once.minimum(5, 700) == one_by_one.minimum(5, 700)
    assert len(set(at_once.values())) > 3


def test_tree_refuses_a_minimum_over_nothing() -> None:
    with pytest.raises(ValueError, match="0 slots"):
        SegmentTree([1, 2]).minimum(0, 0)


# --- the ring ------------------------------------------------------------------------------------


def test_footprint_of_a_period_that_does_not_divide_the_ring_comes_out_even() -> None:
    """Periods of 289 s and of 285 s: 100 and 101 on the ring, none cut at the wrap."""
    for period_s, count in ((289.0, 100), (285.0, 101)):
        begins = ring.starts(period_s, ring.HORIZON_SLOTS)
        assert len(begins) == count
        steps = {b - a for a, b in zip(begins, [*begins[1:], ring.HORIZON_SLOTS], strict=True)}
        assert max(steps) - min(steps) <= 1
        assert max(abs(step - period_s) for step in steps) < 1 + 0.005 * period_s
        busy = ring.footprint([(0, 50)], begins, 17, ring.HORIZON_SLOTS)
        assert len(slots_of(busy)) == 50 * count


def test_footprint_goes_on_past_the_wrap() -> None:
    assert ring.footprint([(8, 6)], [0, 20], 0, SLOTS) == [(8, 14), (28, 34)]
    assert ring.footprint([(8, 6)], [0, 20], 10, SLOTS) == [(0, 4), (18, 24), (38, 40)]
    assert ring.footprint([(0, 99)], [0], 10, SLOTS) == [(0, SLOTS)]
    assert ring.starts(1e6, SLOTS) == [0]


def test_segments_grow_to_whole_slots_and_join() -> None:
    assert ring.in_slots([(0.2, 1.0), (1.9, 0.0), (7.5, 1.0), (2.0, 0.5)]) == [(0, 3), (7, 2)]


RANGES = st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(1, 12)), max_size=6).map(
    lambda parts: ring.merged((s, min(SLOTS, s + n)) for s, n in parts)
)


@SMALL
@given(one=RANGES, other=RANGES)
def test_ranges_subtract_and_overlap_as_sets_do(
    one: list[tuple[int, int]], other: list[tuple[int, int]]
) -> None:
    a, b = set(slots_of(one)), set(slots_of(other))
    assert slots_of(ring.minus(one, other)) == sorted(a - b)
    assert ring.overlap(one, other) == len(a & b)
    both = common([FreeRanges(SLOTS, one), FreeRanges(SLOTS, other)], SLOTS)
    assert slots_of(both.ranges()) == sorted(a & b)


# --- free ranges ---------------------------------------------------------------------------------


@SMALL
@given(
    changes=st.lists(
        st.tuples(st.booleans(), st.integers(0, SLOTS - 1), st.integers(1, 15)), max_size=20
    )
)
def test_free_ranges_equal_a_list_of_slots(changes: list[tuple[bool, int, int]]) -> None:
    free, plain = FreeRanges(SLOTS), [True] * SLOTS
    for takes, start, length in changes:
        end = min(SLOTS, start + length)
        if takes:
            was_free = [slot for slot in range(start, end) if plain[slot]]
            assert slots_of(free.take(start, end)) == was_free
        else:
            free.give(start, end)
        plain[start:end] = [not takes] * (end - start)
        ranges = free.ranges()
        assert slots_of(ranges) == [slot for slot in range(SLOTS) if plain[slot]]
        assert all(a[1] < b[0] for a, b in pairwise(ranges))
        assert free.holds(start, end) == (not takes)


@SMALL
@given(ranges=RANGES, at=st.integers(0, 3 * SLOTS), length=st.integers(1, SLOTS))
def test_first_fit_and_next_start_equal_a_scan(
    ranges: list[tuple[int, int]], at: int, length: int
) -> None:
    free, plain = FreeRanges(SLOTS, ranges), [False] * SLOTS
    for slot in slots_of(ranges):
        plain[slot] = True
    places = range(at, at + 2 * SLOTS)
    fitting = (p for p in places if all(plain[(p + i) % SLOTS] for i in range(length)))
    assert free.first_fit(at, length) == next(fitting, None)
    begins = (p for p in places if p > at and plain[p % SLOTS] and not plain[(p - 1) % SLOTS])
    assert free.next_start(at) == next(begins, None)


# --- the shift -----------------------------------------------------------------------------------


def shift_of(
    segments: Sequence[tuple[float, float]], windows: Sequence[tuple[float, float]], limit: float
) -> float | None:
    """The smallest shift of all segments into the same free windows, which do not wrap."""

    def first_fit(at: float, length: float) -> float | None:
        return next((max(at, s) for s, e in windows if max(at, s) + length <= e), None)

    return smallest_shift([(a, d, first_fit) for a, d in segments], limit, 0.0)


@pytest.mark.parametrize("case", golden("micro_shift"))
def test_smallest_shift_is_as_derived_by_hand(case: dict[str, Any]) -> None:
    assert shift_of(case["segs"], case["free"], case["T"] * case["alpha"]) == case["delta"]


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
    assert shift_of(segments, windows, SLOTS * alpha) == scanned


@pytest.mark.parametrize("case", golden("table2_plexrl"))
def test_bubble_is_what_a_cycle_leaves_free(case: dict[str, Any]) -> None:
    """PlexRL Table 2, from the ring: what one job leaves free of its own node."""
    node = NodeId("n")
    timeline = Timeline({node: "train"})
    busy_s = sum(case["ops"])
    cycle = Cycle(case["cycle"], [Segment("train", case["cycle"] - busy_s, busy_s)])
    assert timeline.reserve("job", {"train": [node]}, timeline.demand(cycle), 0)
    bubble = sum(timeline.capacity("train")) / timeline.num_slots
    assert bubble == pytest.approx(case["bubble"], abs=0.006)


# --- reservations --------------------------------------------------------------------------------

NODES = {NodeId(f"{pool}{i}"): pool for pool in ("r", "t") for i in range(3)}


@st.composite
def jobs(draw: st.DrawFn) -> tuple[dict[str, list[NodeId]], Cycle, int]:
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
    return nodes, Cycle(float(period), segments), draw(st.integers(0, 2 * SLOTS))


class Naive:
    """A count of jobs a node and slot."""

    def __init__(self) -> None:
        self.counts = {node: [0] * SLOTS for node in NODES}

    def slots(self, cycle: Cycle, pool: str, origin: int) -> set[int]:
        count = max(1, round(SLOTS / cycle.period_s))
        return {
            (origin + k * SLOTS // count + int(s.offset_s) + i) % SLOTS
            for k in range(count)
            for s in cycle.segments
            if s.pool == pool
            for i in range(int(s.duration_s))
        }

    def add(self, nodes: dict[str, list[NodeId]], cycle: Cycle, origin: int, amount: int) -> None:
        for pool, names in nodes.items():
            for slot in self.slots(cycle, pool, origin):
                for node in names:
                    self.counts[node][slot] += amount

    def fits(self, nodes: dict[str, list[NodeId]], cycle: Cycle, origin: int) -> bool:
        return all(
            self.counts[node][slot] == 0
            for pool, names in nodes.items()
            for slot in self.slots(cycle, pool, origin)
            for node in names
        )

    def capacity(self, pool: str) -> list[int]:
        counts = [self.counts[node] for node in NODES if NODES[node] == pool]
        return [sum(count[slot] == 0 for count in counts) for slot in range(SLOTS)]


def check(timeline: Timeline, naive: Naive) -> None:
    for pool in ("r", "t"):
        assert timeline.capacity(pool) == naive.capacity(pool)
    for node, counts in naive.counts.items():
        free = [slot for slot, count in enumerate(counts) if count == 0]
        assert slots_of(timeline._tracks[node].free.ranges()) == free


@FEW
@given(st.lists(st.tuples(jobs(), st.booleans()), max_size=6), st.randoms(use_true_random=False))
def test_reservations_equal_a_naive_count_and_releases_undo_them(
    asked: list[tuple[tuple[dict[str, list[NodeId]], Cycle, int], bool]], order: Any
) -> None:
    timeline, naive = Timeline(NODES, SLOTS, 1), Naive()
    reserved: list[int] = []
    for i, ((nodes, cycle, origin), may_overlap) in enumerate(asked):
        demand = timeline.demand(cycle)
        fits = naive.fits(nodes, cycle, origin)
        assert (timeline.find_shift(nodes, demand, origin, 0) is not None) == fits
        assert timeline.reserve(str(i), nodes, demand, origin, may_overlap) == (fits or may_overlap)
        if fits or may_overlap:
            reserved.append(i)
            naive.add(nodes, cycle, origin, 1)
        check(timeline, naive)
    order.shuffle(reserved)
    for i in reserved:
        nodes, cycle, origin = asked[i][0]
        timeline.release(str(i))
        naive.add(nodes, cycle, origin, -1)
        check(timeline, naive)
    check(timeline, Naive())


@FEW
@given(st.lists(jobs(), max_size=4), jobs(), st.integers(0, SLOTS))
def test_shift_is_the_smallest_that_fits_every_period(
    there: list[tuple[dict[str, list[NodeId]], Cycle, int]],
    asked: tuple[dict[str, list[NodeId]], Cycle, int],
    limit: int,
) -> None:
    timeline, naive = Timeline(NODES, SLOTS, 1), Naive()
    for i, (nodes, cycle, origin) in enumerate(there):
        timeline.reserve(str(i), nodes, timeline.demand(cycle), origin, may_overlap=True)
        naive.add(nodes, cycle, origin, 1)
    nodes, cycle, origin = asked
    scanned = next(
        (shift for shift in range(limit + 1) if naive.fits(nodes, cycle, origin + shift)), None
    )
    assert timeline.find_shift(nodes, timeline.demand(cycle), origin, limit) == scanned
    search = timeline.search
    assert search.looked_at >= 1
    assert search.pruned <= search.looked_at


def test_overlap_is_the_share_of_time_that_both_want() -> None:
    timeline = Timeline(NODES, SLOTS, 1)
    nodes = {"t": [NodeId("t0")]}
    demand = timeline.demand(Cycle(20.0, [Segment("t", 0, 8)]))
    timeline.reserve("a", nodes, demand, 0)
    assert timeline.overlap_share(nodes, demand, 4) == 2 * 4 / SLOTS
    assert timeline.overlap_share(nodes, demand, 8) == 0
    assert timeline.overlap_share({"t": [NodeId("t1")]}, demand, 0) == 0


def test_closed_nodes_are_no_capacity() -> None:
    """With every node full, the tree alone says that there is nothing to look for."""
    timeline = Timeline({NodeId("a"): "t", NodeId("b"): "t"}, SLOTS, 1)
    demand = timeline.demand(Cycle(20.0, [Segment("t", 0, 8)]))
    timeline.reserve("one", {"t": [NodeId("a")]}, demand, 0)
    timeline.set_open(NodeId("a"), False)
    assert timeline.capacity("t") == [1] * SLOTS
    timeline.set_open(NodeId("b"), False)
    assert timeline.num_free("t", 0, SLOTS) == 0
    assert timeline.find_shift({"t": [NodeId("a")]}, demand, 0, 20) is None
    assert timeline.search.pruned == timeline.search.looked_at > 0
    timeline.set_open(NodeId("a"), True)
    timeline.release("one")
    assert timeline.capacity("t") == [1] * SLOTS
    timeline.remove_node(NodeId("a"))
    assert timeline.capacity("t") == [0] * SLOTS
