"""The cut of an operation's forward steps into sub-stages (JigsawRL §4.1).

A step belongs to a bucket by its tokens: prefilled ones and rows that decode. A sub-stage ends
where another bucket holds for `WINDOW` steps, at the first of those steps, so single steps of
another kind make none.

Ranks record their steps as runs (`StepRecord`): consecutive steps whose tokens lie between the same
two powers of two. So with edges that are powers of two, runs are cut as their steps would be,
unless there were too many and the shortest were merged. Called by ranks, the profiler and the
simulator. Cost: O(steps) for a record, O(runs) for a cut.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

from phaseloom.common.contract.events import MAX_STEP_RUNS, StepRun

EDGES = (128, 1024)
"""The paper's bucket edges, in tokens a step: three buckets."""
FINE_EDGES = (8, 32, *EDGES)
"""The paper's edges, and two below them: where a full batch is of a few dozen rows it has a tail
too."""
WINDOW = 10
"""The number of steps for which another bucket must hold."""
_MAX_RECORDED = 256
"""The number of runs at which a record is shortened to half of it."""


class SubStage(NamedTuple):
    bucket: int
    start: int
    """The first step, or the first run of steps."""
    end: int
    """The step or run after the last."""


def cut(
    tokens: Sequence[float],
    edges: Sequence[int] = EDGES,
    window: int = WINDOW,
    steps: Sequence[int] = (),
) -> list[SubStage]:
    """The sub-stages of an operation, which begins in the bucket of its first step.

    Args: tokens: the number of tokens in each forward step of one replica; or a step's, in each run
                  of steps.
          edges: the lower edges of all buckets but the first, ascending.
          steps: the number of steps in each run; empty: one.
    """
    counts = steps or [1] * len(tokens)
    starts: list[tuple[int, int]] = []
    at = 0
    for bucket, same in groupby(tokens, key=lambda number: bisect_right(edges, number)):
        end = at + sum(1 for _ in same)
        if not starts or (sum(counts[at:end]) >= window and bucket != starts[-1][0]):
            starts.append((bucket, at))
        at = end
    ends = [*(start for _, start in starts[1:]), *([at] if starts else [])]
    return [SubStage(bucket, start, end) for (bucket, start), end in zip(starts, ends, strict=True)]


def cut_runs(
    runs: Sequence[StepRun], edges: Sequence[int] = FINE_EDGES, window: int = 0
) -> list[StepRun]:
    """The sub-stages of one replica, each as one run of all its steps.

    Args: window: as of `cut`; 0: the paper's or, of fewer than a hundred steps, a tenth of them: in
                  a rollout of twenty steps nothing ever holds for ten.
    """
    tokens, steps = [run.tokens / run.steps for run in runs], [run.steps for run in runs]
    window = window or min(WINDOW, max(1, sum(steps) // 10))
    parts = cut(tokens, edges, window, steps)
    return [_joined(runs[part.start : part.end]) for part in parts]


def shortened(runs: Sequence[StepRun], most: int = MAX_STEP_RUNS) -> list[StepRun]:
    """At most so many runs over the same steps: the run with the fewest steps goes into the one
    before it, until they are few enough."""
    left = list(runs)
    while len(left) > max(1, most):
        place = min(range(1, len(left)), key=lambda i: left[i].steps)
        left[place - 1 : place + 1] = [_joined(left[place - 1 : place + 1])]
    return left


def of_replicas(runs: Sequence[Sequence[StepRun]]) -> list[StepRun]:
    """The runs of an operation: of each replica as many as there is room for, of the first replicas
    at least one.

    Args: runs: each replica's.
    """
    told = runs[:MAX_STEP_RUNS]
    each = MAX_STEP_RUNS // max(1, len(told))
    return [
        StepRun(run.steps, run.tokens, run.duration_s, replica)
        for replica, some in enumerate(told)
        for run in shortened(some, each)
    ]


def _joined(runs: Sequence[StepRun]) -> StepRun:
    return StepRun(
        sum(run.steps for run in runs),
        sum(run.tokens for run in runs),
        sum(run.duration_s for run in runs),
        runs[0].replica,
    )


class StepRecord:
    """The forward steps of an operation on one rank, while it runs."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        """Begin. Args: now: gives seconds, on a clock that only goes forward."""
        self._now = now
        self._since_s = now()
        self._runs: list[StepRun] = []
        self._level = -1

    def stepped(self, tokens: int) -> None:
        """Note that a step over so many tokens, at least one, has ended."""
        now_s = self._now()
        step = StepRun(1, tokens, now_s - self._since_s)
        self._since_s = now_s
        if tokens.bit_length() == self._level:
            self._runs[-1] = _joined([self._runs[-1], step])
            return
        self._level = tokens.bit_length()
        self._runs.append(step)
        if len(self._runs) > _MAX_RECORDED:
            self._runs = shortened(self._runs, _MAX_RECORDED // 2)

    @property
    def runs(self) -> list[StepRun]:
        """The runs so far, at most `MAX_STEP_RUNS`."""
        return shortened(self._runs)
