"""Split an operation's forward steps into sub-stages (JigsawRL §4.1).

The tokens of a step (prefilled ones plus decoding rows) determine its bucket. A sub-stage ends when
another bucket persists for `WINDOW` steps, at the first of those steps. So a few deviating steps do
not start a sub-stage.

Ranks record steps as runs (`StepRecord`): consecutive steps whose tokens lie between the same two
powers of two. If the bucket edges are powers of two, splitting runs gives the same result as
splitting steps, unless there were so many runs that the shortest were merged. Ranks, the profiler
and the simulator call this module. Cost: O(steps) for a record, O(runs) for a split.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

from phaseloom.common.contract.events import MAX_STEP_RUNS, StepRun

EDGES = (128, 1024)
"""The paper's bucket edges, in tokens per step. They make three buckets."""
FINE_EDGES = (8, 32, *EDGES)
"""The paper's edges and two lower ones, so that batches of a few dozen rows also have a tail."""
WINDOW = 10
"""Number of steps for which another bucket must persist."""
_MAX_RECORDED = 256
"""Number of runs at which a record is shortened to half."""


class SubStage(NamedTuple):
    bucket: int
    start: int
    """Index of the first step, or of the first run of steps."""
    end: int
    """Index after the last step or run."""


def split_steps(
    tokens: Sequence[float],
    edges: Sequence[int] = EDGES,
    window: int = WINDOW,
    steps: Sequence[int] = (),
) -> list[SubStage]:
    """Split an operation into sub-stages. It starts in the bucket of its first step.

    Args:   tokens: tokens of each forward step of one replica, or tokens per step of each run of
                steps.
            edges: lower edges of all buckets but the first, ascending.
            steps: number of steps in each run; empty: one.
    """
    counts = steps or [1] * len(tokens)
    starts: list[tuple[int, int]] = []
    index = 0
    for bucket, group in groupby(tokens, key=lambda number: bisect_right(edges, number)):
        end = index + sum(1 for _ in group)
        # Shorter excursions into another bucket belong to the sub-stage before them.
        if not starts or (sum(counts[index:end]) >= window and bucket != starts[-1][0]):
            starts.append((bucket, index))
        index = end
    ends = [*(start for _, start in starts[1:]), *([index] if starts else [])]
    return [SubStage(bucket, start, end) for (bucket, start), end in zip(starts, ends, strict=True)]


def split_runs(
    runs: Sequence[StepRun], edges: Sequence[int] = FINE_EDGES, window: int = 0
) -> list[StepRun]:
    """Return the sub-stages of one replica, each as one run of all its steps.

    Args:   window: see `split_steps`. 0: the paper's value, or a tenth of the steps if there are
                fewer than a hundred, because in a rollout of twenty steps no bucket persists for
                ten.
    """
    tokens, steps = [run.tokens / run.steps for run in runs], [run.steps for run in runs]
    window = window or min(WINDOW, max(1, sum(steps) // 10))
    parts = split_steps(tokens, edges, window, steps)
    return [_merge(runs[part.start : part.end]) for part in parts]


def merge_shortest(runs: Sequence[StepRun], max_runs: int = MAX_STEP_RUNS) -> list[StepRun]:
    """Reduce the runs to at most `max_runs` over the same steps. The run with the fewest steps is
    repeatedly merged into the one before it."""
    merged = list(runs)
    while len(merged) > max(1, max_runs):
        index = min(range(1, len(merged)), key=lambda i: merged[i].steps)
        merged[index - 1 : index + 1] = [_merge(merged[index - 1 : index + 1])]
    return merged


def combine_replicas(runs: Sequence[Sequence[StepRun]]) -> list[StepRun]:
    """Combine the runs of the replicas, shortened to fit `MAX_STEP_RUNS` in total. If there are too
    many replicas, only the first ones are included, with one run each.

    Args:   runs: the runs of each replica.
    """
    reported = runs[:MAX_STEP_RUNS]
    max_runs = MAX_STEP_RUNS // max(1, len(reported))
    return [
        StepRun(run.steps, run.tokens, run.duration_s, replica)
        for replica, replica_runs in enumerate(reported)
        for run in merge_shortest(replica_runs, max_runs)
    ]


def _merge(runs: Sequence[StepRun]) -> StepRun:
    return StepRun(
        sum(run.steps for run in runs),
        sum(run.tokens for run in runs),
        sum(run.duration_s for run in runs),
        runs[0].replica,
    )


class StepRecord:
    """The forward steps of a running operation on one rank."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        """Args:   now: returns seconds on a monotonic clock."""
        self._now = now
        self._since_s = now()
        self._runs: list[StepRun] = []
        self._level = -1

    def stepped(self, tokens: int) -> None:
        """Record the end of a step over `tokens` tokens, at least one."""
        now_s = self._now()
        step = StepRun(1, tokens, now_s - self._since_s)
        self._since_s = now_s
        # Equal bit lengths mean that the tokens lie between the same two powers of two.
        if tokens.bit_length() == self._level:
            self._runs[-1] = _merge([self._runs[-1], step])
            return
        self._level = tokens.bit_length()
        self._runs.append(step)
        if len(self._runs) > _MAX_RECORDED:
            self._runs = merge_shortest(self._runs, _MAX_RECORDED // 2)

    @property
    def runs(self) -> list[StepRun]:
        """The runs recorded up to now, at most `MAX_STEP_RUNS`."""
        return merge_shortest(self._runs)
