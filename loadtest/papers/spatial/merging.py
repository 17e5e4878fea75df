"""When the long tails of one job's workers are better gathered on one (JigsawRL §4.3).

`gain_literal_s` is the paper's ΔT as printed. It adds times that run at once, and leaves the
gathered tail as fast as alone; `gain_s` is what is meant: the last end without, and with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Tail(NamedTuple):
    """A worker's rest of a rollout, and the work that runs beside it."""

    seconds: float
    slowdown: float
    other_s: float
    other_slowdown: float
    move_s: float
    """The time to compute the keys and values of its samples on another worker."""


class Gathered(NamedTuple):
    """All tails on one worker."""

    seconds: float
    target: int
    """The worker that goes on."""
    other_slowdown: float
    """The slowdown of the work that runs beside the gathered tail."""
    slowdown: float = 1.0
    """The slowdown of the gathered tail itself; the paper leaves it out."""


def gain_literal_s(tails: Sequence[Tail], gathered: Gathered) -> float:
    """The paper's ΔT: tails are moved where it is above 0."""
    stay_s = max(t.slowdown * t.seconds for t in tails) + max(
        t.other_slowdown * t.other_s for t in tails
    )
    return stay_s - (gathered.seconds + _moves_s(tails, gathered) + _others_s(tails, gathered))


def gain_s(tails: Sequence[Tail], gathered: Gathered) -> float:
    """The time by which both jobs are through earlier with the tails gathered."""
    stay_s = max(max(t.slowdown * t.seconds, t.other_slowdown * t.other_s) for t in tails)
    tail_s = _moves_s(tails, gathered) + gathered.slowdown * gathered.seconds
    return stay_s - max(tail_s, _others_s(tails, gathered))


def _moves_s(tails: Sequence[Tail], gathered: Gathered) -> float:
    return sum(tail.move_s for i, tail in enumerate(tails) if i != gathered.target)


def _others_s(tails: Sequence[Tail], gathered: Gathered) -> float:
    """The time at which the last of the work beside the tails is done."""
    alone = [tail.other_s for i, tail in enumerate(tails) if i != gathered.target]
    return max(gathered.other_slowdown * tails[gathered.target].other_s, *alone)


def balanced(
    total: int, workers: int, target: int, slowdown: float, fixed: float = 0.0
) -> list[int]:
    """The batch of each worker with which all end together though one is slowed down.

    Args: fixed: the time of a batch that does not grow with it, in times of one sample.
    Source: JigsawRL §4.3, T(bs_i) / T(bs_t) = s for every worker i but t.
    """
    others = workers - 1
    at_target = (total - others * fixed * (slowdown - 1)) / (1 + others * slowdown)
    sizes = [0] * workers
    sizes[target] = max(0, round(at_target))
    each, more = divmod(total - sizes[target], others)
    rest = [i for i in range(workers) if i != target]
    for place, i in enumerate(rest):
        sizes[i] = each + (place < more)
    return sizes
