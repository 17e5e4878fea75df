"""Find a job's cycle in the operations it ran: how long it is, and which pools it uses when.

An RL loop does some things exactly once per turn, whatever else varies. So: merge consecutive
operations of one kind into an item, take the rarest item that recurs as the anchor, and call the
stretch from one anchor to the next a cycle if it holds the same items as most of its neighbours.
Warm-up steps, evaluations and a first irregular turn have other items and fall out by vote.
Pure; cost O(n log n) in the operations given. Called by `profile` at its bounded rate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from phaseloom.common.intervals import Interval, intersect, merge, total
from phaseloom.common.messages import Segment

MIN_CYCLES = 3
"""Cycles with the same items that must have been seen."""
MAX_CYCLES = 8
"""Newest cycles looked at."""
MIN_SPLIT = 0.05
"""Gap, as a share of the period, below which two operations on a pool are one segment."""

Item = tuple[str, str, str]
"""(pool, deployment, kind)"""


@dataclass(frozen=True, slots=True)
class Span:
    """One executed operation, or a run of one kind; seconds on the job's own clock."""

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


def find_cycle(spans: Sequence[Span]) -> Cycle | None:
    """The job's present cycle, or None while too few alike were seen.

    Args: spans: executed operations of one job, oldest first or not.
    """
    items = merge_runs(sorted(spans, key=lambda s: (s.start_s, s.end_s)))
    anchor = choose_anchor(items)
    if anchor is None:
        return None
    starts = [i for i, span in enumerate(items) if span.item == anchor][-(MAX_CYCLES + 1) :]
    turns = [items[a:b] for a, b in pairwise(starts)]
    periods = [items[b].start_s - items[a].start_s for a, b in pairwise(starts)]
    contents = [frozenset(Counter(span.item for span in turn).items()) for turn in turns]
    usual, votes = Counter(contents).most_common(1)[0]
    if votes < MIN_CYCLES or 2 * votes < len(turns):
        return None
    alike = [i for i, content in enumerate(contents) if content == usual]
    period_s = median(periods[i] for i in alike)
    return Cycle(period_s, usual_segments([segments_of(turns[i], period_s) for i in alike]))


def merge_runs(spans: Sequence[Span]) -> list[Span]:
    """Consecutive operations of one kind of one deployment, as one span each."""
    runs: list[Span] = []
    for span in spans:
        if runs and runs[-1].item == span.item:
            runs[-1] = replace(runs[-1], end_s=max(runs[-1].end_s, span.end_s))
        else:
            runs.append(span)
    return runs


def choose_anchor(items: Sequence[Span]) -> Item | None:
    """The rarest item seen often enough; of equals, one that comes first on its pool.

    Counts that differ by one count as equal: the window cuts a cycle somewhere.
    """
    counts = Counter(span.item for span in items)
    often = {item: n for item, n in counts.items() if n > MIN_CYCLES}
    if not often:
        return None
    firsts = Counter(after.item for before, after in pairwise(items) if before.pool != after.pool)
    rarest = min(often.values())
    candidates = [item for item, n in often.items() if n <= rarest + 1]
    return min(candidates, key=lambda item: (2 * firsts[item] < counts[item], item))


def segments_of(turn: Sequence[Span], period_s: float) -> list[Segment]:
    """One cycle's runs per pool, offsets from its first span.

    Two operations on a pool belong to different segments when the job spent most of a gap worth
    speaking of on another pool. A gap that it spent on nobody's device (rewards, a tool call)
    stays inside the segment: coming back is cheaper there than leaving.
    """
    origin_s = turn[0].start_s
    segments: list[Segment] = []
    for pool in {span.pool for span in turn}:
        elsewhere = merge(span.interval for span in turn if span.pool != pool)
        own = merge(span.interval for span in turn if span.pool == pool)
        start_s, end_s = own[0]
        for gap_end_s, next_end_s in own[1:]:
            gap = (end_s, gap_end_s)
            is_long = gap_end_s - end_s >= MIN_SPLIT * period_s
            if is_long and total(intersect([gap], elsewhere)) >= 0.5 * (gap_end_s - end_s):
                segments.append(Segment(pool, start_s - origin_s, end_s - start_s))
                start_s = gap_end_s
            end_s = next_end_s
        segments.append(Segment(pool, start_s - origin_s, end_s - start_s))
    return sorted(segments, key=lambda s: (s.offset_s, s.pool))


def usual_segments(cycles: Sequence[list[Segment]]) -> list[Segment]:
    """Medians over the cycles whose pools follow one another as in most of them."""
    shapes = [tuple(segment.pool for segment in cycle) for cycle in cycles]
    usual = Counter(shapes).most_common(1)[0][0]
    alike = [c for c, shape in zip(cycles, shapes, strict=True) if shape == usual]
    return [
        Segment(
            pool,
            median(c[i].offset_s for c in alike),
            median(c[i].duration_s for c in alike),
        )
        for i, pool in enumerate(usual)
    ]
