"""Finds a job's cycle from its executed operations: the period, and the segments on each pool.

An RL loop does some things exactly once per turn, even if everything else varies. The search merges
consecutive operations of one kind into an item. It tries each recurring item as an anchor and calls
the stretch from one anchor to the next a turn. The most frequent anchor whose turns mostly have the
same items wins, provided that these items account for most of the job's time:

- An optimizer step that occurs several times per turn fails, because most of its stretches contain
  no generation.
- A checkpoint every ten turns loses, because it is rarer than the turn itself.
- The number of times an item occurs within a turn may vary.
- Warm-up steps, evaluations and an irregular first turn are outvoted, and medians ignore single
  slow turns.

Pure. Cost: O(n log n) in the number of operations. `profile` calls it at a bounded rate.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from statistics import median

from phaseloom.common.contract.specs import Segment
from phaseloom.common.observability.intervals import Interval, intersect, merge, total

MIN_CYCLES = 3
"""Minimum number of cycles with the same items before a cycle is reported."""
MAX_CYCLES = 8
"""Maximum number of cycles to use, newest first."""
MIN_COVERAGE = 0.65
"""Minimum share of the job's time that the items of a usual turn must account for."""
MIN_SPLIT = 0.05
"""Minimum gap between two segments of a pool, as a share of the period. Operations that are closer
together belong to one segment."""

Item = tuple[str, str, str]
"""(pool, deployment, kind)"""


@dataclass(frozen=True, slots=True)
class Span:
    """One executed operation, or a run of operations of one kind, on the job's own clock."""

    pool: str
    deployment: str
    kind: str
    start_s: float
    end_s: float

    @property
    def item(self) -> Item:
        return (self.pool, self.deployment, self.kind)

    @property
    def interval(self) -> Interval:
        return (self.start_s, self.end_s)


@dataclass(frozen=True, slots=True)
class Cycle:
    period_s: float
    segments: list[Segment]
    num_operations: dict[Item, float]
    """Number of operations of each item in a usual turn."""
    num_turns: int


def find_cycle(spans: Sequence[Span]) -> Cycle | None:
    """Return the job's current cycle, or None if too few similar turns have been seen.

    Args: spans: executed operations of one job, in any order.
    """
    ordered = sorted(spans, key=lambda s: (s.start_s, s.end_s))
    items = merge_runs(ordered)
    for anchor in anchors(items):
        turns = _turns(anchor, items)
        usual, similar = _vote(turns)
        is_certain = len(similar) >= MIN_CYCLES and 2 * len(similar) >= len(turns)
        if is_certain and _coverage(turns, usual) >= MIN_COVERAGE:
            return _cycle(_turns(_first(turns, usual), items), ordered)
    return None


def _turns(anchor: Item, items: Sequence[Span]) -> list[list[Span]]:
    """Return the newest stretches from one anchor to the next, both included, oldest first."""
    starts = [i for i, span in enumerate(items) if span.item == anchor][-(MAX_CYCLES + 1) :]
    return [list(items[a : b + 1]) for a, b in pairwise(starts)]


def _items(turn: Sequence[Span]) -> frozenset[Item]:
    return frozenset(span.item for span in turn[:-1])


def _vote(turns: Sequence[Sequence[Span]]) -> tuple[frozenset[Item], list[Sequence[Span]]]:
    """Return the most common set of items in a turn, and the turns that have exactly this set."""
    usual = Counter(_items(turn) for turn in turns).most_common(1)[0][0]
    return usual, [turn for turn in turns if _items(turn) == usual]


def _first(turns: Sequence[Sequence[Span]], usual: frozenset[Item]) -> Item:
    """Return the item that starts a turn. It occurs once per turn and is the first on its pool.

    This rule makes the cycle of a loop independent of the operations before it.
    """
    _, similar = _vote(turns)
    counts = [Counter(span.item for span in turn[:-1]) for turn in similar]
    unique_items = [item for item in usual if all(count[item] == 1 for count in counts)]
    firsts = Counter(
        after.item
        for turn in similar
        for before, after in pairwise(turn)
        if before.pool != after.pool
    )
    return min(unique_items, key=lambda item: (2 * firsts[item] < len(similar), item))


def _cycle(turns: Sequence[Sequence[Span]], operations: Sequence[Span]) -> Cycle | None:
    usual, similar = _vote(turns)
    if len(similar) < MIN_CYCLES:
        return None
    edges = [(turn[0].start_s, turn[-1].start_s) for turn in similar]
    period_s = median(end - start for start, end in edges)
    starts_s = {item: [s.start_s for s in operations if s.item == item] for item in usual}
    return Cycle(
        period_s,
        usual_segments([segments_of(turn[:-1], period_s) for turn in similar]),
        {
            item: median(bisect_left(starts, b) - bisect_left(starts, a) for a, b in edges)
            for item, starts in starts_s.items()
        },
        len(turns),
    )


def _coverage(turns: Sequence[Sequence[Span]], usual: frozenset[Item]) -> float:
    """Return the share of the turns' time that was spent on the usual items."""
    spent_s: Counter[bool] = Counter()
    for turn in turns:
        for span in turn[:-1]:
            spent_s[span.item in usual] += span.end_s - span.start_s  # type: ignore[assignment]
    return spent_s[True] / (spent_s.total() or 1.0)


def merge_runs(spans: Sequence[Span]) -> list[Span]:
    """Merge consecutive operations of one kind and deployment into one span."""
    runs = []
    for _, run in groupby(spans, key=lambda span: span.item):
        first, *later = run
        end_s = max((span.end_s for span in later), default=first.end_s)
        is_longer = end_s > first.end_s
        runs.append(replace(first, end_s=end_s) if is_longer else first)
    return runs


def anchors(items: Sequence[Span]) -> list[Item]:
    """Return the items that occurred often enough to recur, most frequent first."""
    counts = Counter(span.item for span in items)
    often = [item for item, n in counts.items() if n > MIN_CYCLES]
    return sorted(often, key=lambda item: (-counts[item], item))


def segments_of(turn: Sequence[Span], period_s: float) -> list[Segment]:
    """Return the segments of one turn on each pool, with offsets from its first span.

    Two operations on a pool belong to different segments if the gap between them is at least
    `MIN_SPLIT` of the period and the job spent most of it on another pool. A gap without device
    work (rewards, a tool call) stays inside the segment, because keeping the device is cheaper than
    switching away and back.
    """
    origin_s = turn[0].start_s
    segments: list[Segment] = []
    for pool in {span.pool for span in turn}:
        elsewhere = merge(span.interval for span in turn if span.pool != pool)
        on_pool = merge(span.interval for span in turn if span.pool == pool)
        start_s, end_s = on_pool[0]
        for gap_end_s, next_end_s in on_pool[1:]:
            gap = (end_s, gap_end_s)
            is_long = gap_end_s - end_s >= MIN_SPLIT * period_s
            if is_long and total(intersect([gap], elsewhere)) >= 0.5 * (gap_end_s - end_s):
                segments.append(Segment(pool, start_s - origin_s, end_s - start_s))
                start_s = gap_end_s
            end_s = next_end_s
        segments.append(Segment(pool, start_s - origin_s, end_s - start_s))
    return sorted(segments, key=lambda s: (s.offset_s, s.pool))


def usual_segments(cycles: Sequence[list[Segment]]) -> list[Segment]:
    """Return the median segments of the cycles that use the pools in the most common order."""
    shapes = [tuple(segment.pool for segment in cycle) for cycle in cycles]
    usual = Counter(shapes).most_common(1)[0][0]
    similar = [c for c, shape in zip(cycles, shapes, strict=True) if shape == usual]
    return [
        Segment(
            pool,
            median(c[i].offset_s for c in similar),
            median(c[i].duration_s for c in similar),
        )
        for i, pool in enumerate(usual)
    ]
