"""Micro-shift: the smallest delay of a cycle that puts every segment into free time.

Source: PlexRL §4.3.2, eq. 1-2. The cost J(δ) = w1·(t_end(δ) − T)/T + w2·δ/T, with t_end = max(a_i +
d_i) + δ, grows with δ: the best shift is the smallest that fits. It is 0 or brings some segment to
the start of a window, so that each step goes to the next such δ; no grid is searched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
