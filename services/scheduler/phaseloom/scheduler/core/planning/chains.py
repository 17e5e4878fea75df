"""Two jobs on one device: chains of sub-stages that run one after another or side by side.

A running operation is never stopped. It keeps part of the device until its end, through all of its
sub-stages, unless one of them needs memory that another operation occupies. A policy therefore
decides which operation starts, and how the running ones split the device.

Multiplexing policies use these functions for a live device, and the simulator for whole chains.
Cost: `lookahead` evaluates up to (splits + 1)^`WINDOW` outcomes, the other policies one per split.
Source: JigsawRL §4.4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from phaseloom.common.contract.specs import SlowdownTable

WAIT = "wait"
"""Kind of a stage that needs no device: a tool call, or waiting for the slowest worker."""
WINDOW = 3
"""Number of decisions that `lookahead` looks ahead (JigsawRL §4.4)."""
TAIL = 0.6
"""Fraction of the shorter job's remaining time that `lookahead` expects not to overlap with the
longer job's."""
TOLERANCE = 0.03
"""Progress difference, as a fraction of the time, that `fair` tolerates when progress is known
exactly."""
DONE_S = 1e-9
"""A stage with less remaining work than this has ended. Rounding leaves such remainders."""

Rates = tuple[float, float]
"""Speed of each of the two jobs, where 1 is the speed alone on the whole device and 0 means
stopped."""


class Stage(NamedTuple):
    kind: str
    seconds: float
    """Duration alone on the whole device."""
    operation: int
    """Number of the operation within its job. Stages of one operation are consecutive."""


Chain = Sequence[Stage]


class ChainPosition(NamedTuple):
    """A job's position in its chain."""

    at: int
    left_s: float
    """Remaining time of the stage at full speed."""
    has_begun: bool
    """Whether the stage's operation has started."""


PairState = tuple[ChainPosition, ChainPosition]


@dataclass(frozen=True)
class Pair:
    """Two chains on one worker, with a table of slowdowns."""

    first: Chain
    second: Chain
    table: SlowdownTable

    @cached_property
    def _rest_s(self) -> tuple[list[float], list[float]]:
        """Per chain and index, the total duration of the stages from that index on."""
        return _rests(self.first), _rests(self.second)

    @property
    def start(self) -> PairState:
        return _at(self.first, 0), _at(self.second, 0)

    @property
    def total_s(self) -> tuple[float, float]:
        return self._rest_s[0][0], self._rest_s[1][0]

    def stages(self, state: PairState) -> tuple[Stage | None, Stage | None]:
        """Current stage of each job. None: the job has finished."""
        chains = (self.first, self.second)
        first, second = (
            chain[place.at] if place.at < len(chain) else None
            for chain, place in zip(chains, state, strict=True)
        )
        return first, second

    def remaining_s(self, state: PairState) -> tuple[float, float]:
        """Remaining duration of each job's chain at full speed."""
        first, second = (
            place.left_s + totals[min(place.at + 1, len(totals) - 1)]
            for place, totals in zip(state, self._rest_s, strict=True)
        )
        return first, second

    def options(self, state: PairState) -> list[Rates]:
        """List all choices in a state: side by side with each split, or one of the two alone."""
        first, second = self.stages(state)
        if first is None or second is None:
            return [(float(first is not None), float(second is not None))]
        if WAIT in (first.kind, second.kind):
            return [(1.0, 1.0)]
        rates = self.table.rates(first.kind, second.kind)
        if not state[1].has_begun:
            rates.append((1.0, 0.0))
        if not state[0].has_begun:
            rates.append((0.0, 1.0))
        return rates or [(1.0, 0.0), (0.0, 1.0)]

    def advance(self, state: PairState, rates: Rates) -> tuple[float, PairState]:
        """Run at these speeds until a stage ends. Returns the time that takes and the new state."""
        took_s = min(place.left_s / rate for place, rate in zip(state, rates, strict=True) if rate)
        first, second = (
            _moved(chain, place, took_s * rate) if rate else place
            for chain, place, rate in zip((self.first, self.second), state, rates, strict=True)
        )
        return took_s, (first, second)


def _rests(chain: Chain) -> list[float]:
    return [*accumulate((stage.seconds for stage in reversed(chain)), initial=0.0)][::-1]


def _at(chain: Chain, index: int, *, has_begun: bool = False) -> ChainPosition:
    return ChainPosition(index, chain[index].seconds if index < len(chain) else 0.0, has_begun)


def _moved(chain: Chain, place: ChainPosition, work_s: float) -> ChainPosition:
    left_s = place.left_s - work_s
    if left_s > DONE_S:
        return ChainPosition(place.at, left_s, True)
    after = place.at + 1
    goes_on = after < len(chain) and chain[after].operation == chain[place.at].operation
    return _at(chain, after, has_begun=goes_on)


class PairProgress(NamedTuple):
    """History for policies: how far each job has come, and in how much time."""

    done_s: tuple[float, float]
    time_s: float
    tolerance: float = TOLERANCE
    """Difference, as a fraction of the time, that counts as none."""


Policy = Callable[[Pair, PairState, PairProgress], Rates]


def greedy(pair: Pair, state: PairState, progress: PairProgress) -> Rates:
    """Choose the highest combined speed."""
    return max(pair.options(state), key=sum)


def fair(pair: Pair, state: PairState, progress: PairProgress) -> Rates:
    """Choose the highest combined speed that keeps the jobs' progress level or brings it closer
    together."""
    first_s, second_s = progress.done_s
    now = abs(first_s - second_s)

    def score(rates: Rates) -> tuple[bool, float]:
        took_s, _ = pair.advance(state, rates)
        apart = abs(first_s - second_s + (rates[0] - rates[1]) * took_s)
        tolerated = progress.tolerance * (progress.time_s + took_s)
        return apart <= max(tolerated, now), sum(rates)

    return max(pair.options(state), key=score)


def lookahead(pair: Pair, state: PairState, progress: PairProgress) -> Rates:
    """Choose by the earliest expected end, over all combinations of the next `WINDOW` decisions.

    Beyond the window, the remaining time is estimated as the longer remainder plus `TAIL` times the
    shorter one. The paper does not define this cost.
    """

    def end_s(state: PairState, window: int) -> float:
        left_s = pair.remaining_s(state)
        if window == 0 or 0.0 in left_s:
            return max(left_s) + TAIL * min(left_s)
        return min(follow(state, rates, window) for rates in pair.options(state))

    def follow(state: PairState, rates: Rates, window: int) -> float:
        took_s, after = pair.advance(state, rates)
        return took_s + end_s(after, window - 1)

    return min(pair.options(state), key=lambda rates: follow(state, rates, WINDOW))
