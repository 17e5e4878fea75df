"""The cut of an operation's forward steps into sub-stages (JigsawRL §4.1).

A step belongs to a bucket by its tokens: prefilled ones and rows that decode. A sub-stage ends
where another bucket holds for `WINDOW` steps, at the first of those steps, so single steps of
another kind make none. Cost: O(steps).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

EDGES = (128, 1024)
"""The paper's bucket edges, in tokens a step: three buckets."""
WINDOW = 10
"""The number of steps for which another bucket must hold."""


class SubStage(NamedTuple):
    bucket: int
    start: int
    """The first step."""
    end: int
    """The step after the last."""


def cut(
    tokens: Sequence[int], edges: Sequence[int] = EDGES, window: int = WINDOW
) -> list[SubStage]:
    """The sub-stages of an operation, which begins in the bucket of its first step.

    Args: tokens: the number of tokens in each forward step of one replica.
          edges: the lower edges of all buckets but the first, ascending.
    """
    starts: list[tuple[int, int]] = []
    at = 0
    for bucket, run in groupby(tokens, key=lambda number: bisect_right(edges, number)):
        length = sum(1 for _ in run)
        if not starts or (length >= window and bucket != starts[-1][0]):
            starts.append((bucket, at))
        at += length
    ends = [*(start for _, start in starts[1:]), *([at] if starts else [])]
    return [SubStage(bucket, start, end) for (bucket, start), end in zip(starts, ends, strict=True)]
