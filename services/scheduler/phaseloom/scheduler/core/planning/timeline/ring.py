"""The circular horizon: slot `t mod L` stands for every second t (PlexRL §5.2.1).

A periodic job is laid on it once, for ever: its period is rounded so that a whole number of periods
fills the ring. Deviation from PlexRL, which does not say how a period that does not divide the
horizon goes on past the wrap: cut at the wrap, a footprint would be right for one turn only and
would have to be laid anew in every other; rounded, it is off by at most T / (2·⌊L/T⌋) seconds a
period (under 1 % up to T = 570 s), less than cycles jitter. A job whose period is longer than the
ring has one period on it.

Ranges are half-open, in whole slots. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, floor

HORIZON_SLOTS = 28_800
"""Of one second: eight hours."""

Range = tuple[int, int]
"""[start, end) in slots."""


def pieces(start: int, length: int, num_slots: int) -> list[Range]:
    """What [start, start + length) covers of the ring: one range, or two where it wraps."""
    if length <= 0:
        return []
    if length >= num_slots:
        return [(0, num_slots)]
    first = start % num_slots
    last = first + length
    if last <= num_slots:
        return [(first, last)]
    return [(0, last - num_slots), (first, num_slots)]


def num_periods(period_s: float, num_slots: int) -> int:
    """How many of them fill the ring, once rounded; at least one."""
    return max(1, round(num_slots / period_s))


def starts(period_s: float, num_slots: int) -> list[int]:
    """Where each period begins, from 0, in slots."""
    count = num_periods(period_s, num_slots)
    return [k * num_slots // count for k in range(count)]


def in_slots(segments: Iterable[tuple[float, float]]) -> list[tuple[int, int]]:
    """(offset, duration) of each segment, grown to whole slots; empty ones are left out.

    Args: segments: (offset_s, duration_s) pairs. Returns: sorted, those that touch joined.
    """
    whole = ((floor(a), ceil(a + d)) for a, d in segments if d > 0)
    return [(start, end - start) for start, end in merged(whole)]


def footprint(
    segments: Sequence[tuple[int, int]], period_starts: Sequence[int], origin: int, num_slots: int
) -> list[Range]:
    """Every slot of the ring in which a job is busy: sorted, disjoint, those that touch joined.

    Args: segments: as `in_slots` gives them. origin: the slot in which its cycle begins.
    """
    return merged(
        piece
        for start in period_starts
        for offset, length in segments
        for piece in pieces(origin + start + offset, length, num_slots)
    )


def merged(ranges: Iterable[Range]) -> list[Range]:
    """The same slots as sorted, disjoint ranges that do not touch."""
    union: list[Range] = []
    for start, end in sorted(ranges):
        if union and start <= union[-1][1]:
            if end > union[-1][1]:
                union[-1] = (union[-1][0], end)
        else:
            union.append((start, end))
    return union


def overlap(one: Sequence[Range], other: Sequence[Range]) -> int:
    """In how many slots both are. Args: each sorted and disjoint. Cost: linear."""
    total = i = j = 0
    while i < len(one) and j < len(other):
        (start, end), (begin, stop) = one[i], other[j]
        total += max(0, min(end, stop) - max(start, begin))
        if end <= stop:
            i += 1
        else:
            j += 1
    return total


def minus(ranges: Sequence[Range], taken: Sequence[Range]) -> list[Range]:
    """What is left of the first. Args: each sorted and disjoint. Cost: linear."""
    left: list[Range] = []
    i = 0
    for first, end in ranges:
        start = first
        while i < len(taken) and taken[i][1] <= start:
            i += 1
        k = i
        while k < len(taken) and taken[k][0] < end:
            if taken[k][0] > start:
                left.append((start, taken[k][0]))
            start = max(start, taken[k][1])
            k += 1
        if start < end:
            left.append((start, end))
    return left
