"""Micro-shift: the smallest delay of a cycle that puts every segment into free time.

Source: PlexRL §4.3.2, eq. 1-2. The cost J(δ) = w1·(t_end(δ) − T)/T + w2·δ/T, with t_end = max(a_i +
d_i) + δ, grows with δ: the best shift is the smallest that fits. It is 0 or brings some segment to
the start of a window, so that each step goes to the next such δ; no grid is searched.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

N = TypeVar("N", int, float)
"""Seconds, or whole slots."""
FirstFit = Callable[[N, N], N | None]
"""(position, length) -> the earliest position from there on with so much free time, if any."""


def smallest_shift(segments: Iterable[tuple[N, N, FirstFit[N]]], limit: N, at_least: N) -> N | None:
    """The smallest δ in [at_least, limit] that puts every segment into its free time.

    Args: segments: (offset, length, where it may lie).
    Cost: the sum over the windows that are passed of one bisection a segment.
    """
    parts = list(segments)
    shift = at_least
    has_moved = True
    while has_moved:
        has_moved = False
        for offset, length, first_fit in parts:
            place = first_fit(offset + shift, length)
            if place is None or place - offset > limit:
                return None
            if place > offset + shift:
                shift = place - offset
                has_moved = True
    return shift


def micro_shift(
    segments: Sequence[tuple[float, float]],
    windows: Sequence[tuple[float, float]],
    period_s: float,
    alpha: float = 1.0,
) -> float | None:
    """Earliest shift at which every segment of a job fits the free windows.

    Args:   segments: (offset_s, duration_s) pairs within one period.
            windows: disjoint free intervals [start_s, end_s), sorted; both ends may be touched.
            alpha: the longest shift, as a share of the period.
    Returns: shift in seconds, or None where nothing fits within alpha * period_s.
    Raises: ValueError: a segment longer than the period.
    Cost:   O(S log W) a candidate shift; mutates nothing.
    """
    if any(duration > period_s for _, duration in segments):
        raise ValueError(f"a segment is longer than the period of {period_s} s")
    ends = [end for _, end in windows]

    def first_fit(at: float, length: float) -> float | None:
        later = windows[bisect_right(ends, at) :]
        return next((max(at, s) for s, e in later if max(at, s) + length <= e), None)

    return smallest_shift([(a, d, first_fit) for a, d in segments], alpha * period_s, 0.0)


def cost(
    segments: Sequence[tuple[float, float]],
    period_s: float,
    shift_s: float,
    weights: tuple[float, float] = (1.0, 1.0),
) -> float:
    """J(δ) of eq. 1. Args: weights: of the delay of the end, of that of the start."""
    end_s = max(offset + duration for offset, duration in segments) + shift_s
    return weights[0] * (end_s - period_s) / period_s + weights[1] * shift_s / period_s
