"""Two jobs on one device: chains of sub-stages that run in turns or side by side.

Nothing that has begun is stopped: an operation keeps part of the device to its end, through all of
its sub-stages, unless one of them needs memory that another operation has. So a policy decides what
begins, and how the device is split among what runs.

Multiplexing policies ask about a live device, and the simulator runs whole chains, by the same
functions. Cost: `lookahead` looks at up to (splits + 1)^`WINDOW` ends, the others at the splits.
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
"""The kind of a stage that needs no device: a tool call, or waiting for the slowest worker."""
WINDOW = 3
"""The number of decisions that `lookahead` looks ahead (JigsawRL §4.4)."""
TAIL = 0.6
"""The part of the shorter remainder that `lookahead` expects not to overlap with the longer one."""
TOLERANCE = 0.03
"""The difference of progress that `fair` lets stand, as a share of the time, where progress is
known exactly."""
DONE_S = 1e-9
"""A stage with less work left than this has ended; rounding leaves such remainders."""

Rates = tuple[float, float]
"""The speed of each of the two jobs, 1 as alone on the whole device; 0: it does not run."""


class Stage(NamedTuple):
    kind: str
    seconds: float
    """The time alone on the whole device."""
    operation: int
    """The number of the operation in its job. Stages of one operation follow one another."""


Chain = Sequence[Stage]


class Place(NamedTuple):
    """The place of a job in its chain."""

    at: int
    """The index of the stage."""
    left_s: float
    """The rest of the stage, in seconds at full speed."""
    has_begun: bool
    """Whether the operation of the stage has begun."""


State = tuple[Place, Place]


@dataclass(frozen=True)
class Pair:
    """Two chains on one worker, under one table."""

    first: Chain
    second: Chain
    table: SlowdownTable

    @cached_property
    def _rest_s(self) -> tuple[list[float], list[float]]:
        """For each chain, the time of all stages from an index on."""
        return _rests(self.first), _rests(self.second)

    @property
    def start(self) -> State:
        return _at(self.first, 0), _at(self.second, 0)

    @property
    def total_s(self) -> tuple[float, float]:
        return self._rest_s[0][0], self._rest_s[1][0]

    def stages(self, state: State) -> tuple[Stage | None, Stage | None]:
        """The present stage of each job; None: it is through."""
        chains = (self.first, self.second)
        first, second = (
            chain[place.at] if place.at < len(chain) else None
            for chain, place in zip(chains, state, strict=True)
        )
        return first, second

    def remaining_s(self, state: State) -> tuple[float, float]:
        """The rest of each job's chain, in seconds at full speed."""
        first, second = (
            place.left_s + rest[min(place.at + 1, len(rest) - 1)]
            for place, rest in zip(state, self._rest_s, strict=True)
        )
        return first, second

    def options(self, state: State) -> list[Rates]:
        """All choices at a state: side by side under each split, or one of the two alone."""
        first, second = self.stages(state)
        if first is None or second is None:
            return [(float(first is not None), float(second is not None))]
        if WAIT in (first.kind, second.kind):
            return [(1.0, 1.0)]
        found = self.table.rates(first.kind, second.kind)
        if not state[1].has_begun:
            found.append((1.0, 0.0))
        if not state[0].has_begun:
            found.append((0.0, 1.0))
        return found or [(1.0, 0.0), (0.0, 1.0)]

    def advance(self, state: State, rates: Rates) -> tuple[float, State]:
        """Run at these speeds until a stage ends: the time that it takes, and where that leads."""
        took_s = min(place.left_s / rate for place, rate in zip(state, rates, strict=True) if rate)
        first, second = (
            _moved(chain, place, took_s * rate) if rate else place
            for chain, place, rate in zip((self.first, self.second), state, rates, strict=True)
        )
        return took_s, (first, second)


def _rests(chain: Chain) -> list[float]:
    return [*accumulate((stage.seconds for stage in reversed(chain)), initial=0.0)][::-1]


def _at(chain: Chain, index: int, *, has_begun: bool = False) -> Place:
    return Place(index, chain[index].seconds if index < len(chain) else 0.0, has_begun)


def _moved(chain: Chain, place: Place, work_s: float) -> Place:
    left_s = place.left_s - work_s
    if left_s > DONE_S:
        return Place(place.at, left_s, True)
    after = place.at + 1
    goes_on = after < len(chain) and chain[after].operation == chain[place.at].operation
    return _at(chain, after, has_begun=goes_on)


class Progress(NamedTuple):
    """The facts that a policy may know beside the present state: how far each job has come, and in
    which time."""

    done_s: tuple[float, float]
    time_s: float
    tolerance: float = TOLERANCE
    """The difference, as a share of the time, that is none."""


Policy = Callable[[Pair, State, Progress], Rates]


def greedy(pair: Pair, state: State, progress: Progress) -> Rates:
    """The choice that gets most done just now."""
    return max(pair.options(state), key=sum)


def fair(pair: Pair, state: State, progress: Progress) -> Rates:
    """The choice that gets most done just now, among those that keep the jobs level or bring them
    nearer."""
    first_s, second_s = progress.done_s
    now = abs(first_s - second_s)

    def score(rates: Rates) -> tuple[bool, float]:
        took_s, _ = pair.advance(state, rates)
        apart = abs(first_s - second_s + (rates[0] - rates[1]) * took_s)
        tolerated = progress.tolerance * (progress.time_s + took_s)
        return apart <= max(tolerated, now), sum(rates)

    return max(pair.options(state), key=score)


def lookahead(pair: Pair, state: State, progress: Progress) -> Rates:
    """The choice that leads to the least expected end, over all choices of `WINDOW` decisions.

    Beyond the window, the longer remainder and `TAIL` of the shorter one are taken to be left: the
    paper leaves this cost open.
    """

    def end_s(state: State, window: int) -> float:
        left_s = pair.remaining_s(state)
        if window == 0 or 0.0 in left_s:
            return max(left_s) + TAIL * min(left_s)
        return min(follow(state, rates, window) for rates in pair.options(state))

    def follow(state: State, rates: Rates, window: int) -> float:
        took_s, after = pair.advance(state, rates)
        return took_s + end_s(after, window - 1)

    return min(pair.options(state), key=lambda rates: follow(state, rates, WINDOW))
