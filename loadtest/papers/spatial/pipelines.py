"""Chains of sub-stages as one worker of a job sees them, drawn after published shares of time.

Response lengths are lognormal, cut off at `LONGEST` tokens. A decoding step takes as long as
reading the weights and a part that grows with its rows. A worker that is done with its rows waits
for the slowest; what comes after (reference log-probs, training) takes its published share.
"""

from __future__ import annotations

import math
from random import Random
from typing import NamedTuple

from phaseloom.common.observability.substages import split_steps
from phaseloom.scheduler.core.planning.chains import WAIT, Stage

LONGEST = 8192
PROMPT_TOKENS = 100
PREFILL_TOKENS = 8192
"""The tokens of one prefill step."""
PREFILL_S = 0.036
STEP_S = 0.012
"""The time of a decoding step with few rows."""
ROWS_TWICE = 256
"""The number of rows with which a decoding step takes twice as long as with few."""
DECODE = ("decode_small", "decode_large", "prefill")
"""The kind of sub-stage in each bucket."""


class Workload(NamedTuple):
    """A model on a task: its shares of an iteration (JigsawRL Table 1) and its lengths."""

    rollout: float
    reference: float
    train: float
    tool: float
    median_tokens: float
    sigma: float
    scale: float = 1.0
    """The factor for all times: larger models take longer."""


class Iteration(NamedTuple):
    """One iteration on one worker."""

    rollout: list[tuple[str, float]]
    """The sub-stages of the rollout (kind, seconds), with the wait for the slowest worker."""
    rollout_s: float
    """The time of the slowest worker."""


def lengths(rng: Random, workload: Workload, count: int) -> list[int]:
    mean = math.log(workload.median_tokens)
    return [
        int(min(max(8.0, rng.lognormvariate(mean, workload.sigma)), LONGEST)) for _ in range(count)
    ]


def _steps(wanted: list[int]) -> tuple[list[int], list[float]]:
    """The tokens and seconds of each forward step of a worker's rollout."""
    prefills = max(1, len(wanted) * PROMPT_TOKENS // PREFILL_TOKENS)
    tokens, seconds = [PREFILL_TOKENS] * prefills, [PREFILL_S] * prefills
    ends = sorted(wanted)
    done = 0
    for step in range(ends[-1]):
        while ends[done] <= step:
            done += 1
        rows = len(ends) - done
        tokens.append(rows)
        seconds.append(STEP_S * (1 + rows / ROWS_TWICE))
    return tokens, seconds


def decode_s(wanted: list[int]) -> float:
    """The time in which a worker draws so many tokens for each of its samples, prefill apart."""
    tokens, seconds = _steps(wanted)
    return sum(s for t, s in zip(tokens, seconds, strict=True) if t != PREFILL_TOKENS)


def iteration(rng: Random, workload: Workload, rows: int, workers: int) -> Iteration:
    """Draw an iteration of `rows` samples over so many workers, as the first of them sees it."""
    each = -(-rows // workers)
    drawn = lengths(rng, workload, each * workers)
    workers_steps = [_steps(drawn[i * each : (i + 1) * each]) for i in range(workers)]
    tokens, seconds = workers_steps[0]
    slowest_s = max(sum(times) for _, times in workers_steps)
    mine = [
        (DECODE[part.bucket], workload.scale * sum(seconds[part.start : part.end]))
        for part in split_steps(tokens)
    ]
    waits_s = slowest_s - sum(seconds)
    if waits_s > 0:
        mine.append((WAIT, workload.scale * waits_s))
    return Iteration(mine, workload.scale * slowest_s)


def chain(rng: Random, workload: Workload, iterations: int, rows: int, workers: int) -> list[Stage]:
    """A synchronous job's chain: rollout, tool, reference, training, in turn."""
    stages: list[Stage] = []
    for number in range(iterations):
        drawn = iteration(rng, workload, rows, workers)
        per = drawn.rollout_s / workload.rollout
        first = 4 * number
        stages += [Stage(kind, seconds, first) for kind, seconds in drawn.rollout]
        if workload.tool:
            stages.append(Stage(WAIT, workload.tool * per, first + 1))
        stages.append(Stage("reference", workload.reference * per, first + 2))
        stages.append(Stage("train", workload.train * per, first + 3))
    return stages
