"""Whole chains of two jobs on one worker, run to their ends under a policy.

What policies choose from, and `greedy`, `lookahead` and `fair`, are the scheduler's own
(`scheduler.core.planning.chains`); their rivals are here.
"""

from __future__ import annotations

from typing import NamedTuple

from phaseloom.common.contract.specs import SlowdownTable
from phaseloom.scheduler.core.planning.chains import (
    DONE_S,
    WAIT,
    Chain,
    Pair,
    PairProgress,
    PairState,
    Policy,
    Rates,
    fair,
    greedy,
    lookahead,
)


def serial(pair: Pair, state: PairState, progress: PairProgress) -> Rates:
    """The first job to its end, then the second: nothing overlaps."""
    return (1.0, 0.0) if pair.stages(state)[0] is not None else (0.0, 1.0)


def static(pair: Pair, state: PairState, progress: PairProgress) -> Rates:
    """Half of the device for each, whether or not the other uses its half."""
    kinds = [stage.kind if stage else WAIT for stage in pair.stages(state)]
    halves = [0.0 if stage is None else 1.0 for stage in pair.stages(state)]
    for which, kind in enumerate(kinds):
        if kind == WAIT:
            continue
        other = kinds[1 - which]
        table = pair.table
        slow = table.alone(kind, 0.5) if other == WAIT else table.slowdown(kind, 0.5, other)
        halves[which] = 1 / slow
    if WAIT not in kinds and not pair.table.fits(*kinds):
        waits = 0 if state[1].has_begun else 1
        halves[waits], halves[1 - waits] = 0.0, 1 / pair.table.alone(kinds[1 - waits], 0.5)
    return halves[0], halves[1]


def rollouts(pair: Pair, state: PairState, progress: PairProgress) -> Rates:
    """Rollouts beside rollouts; all else has the device alone (as where only serving is shared)."""
    first, second = pair.stages(state)
    if first and second and WAIT not in (first.kind, second.kind):
        alone = [rates for rates in pair.options(state) if 0.0 in rates]
        if not (first.kind.startswith("decode") and second.kind.startswith("decode")) and alone:
            return alone[0]
    return greedy(pair, state, progress)


def operations(pair: Pair, state: PairState, progress: PairProgress) -> Rates:
    """What gets most done as far as whole operations tell, each taken for whichever of its
    sub-stages loses most: the decision where nobody knows which one runs."""
    first, second = pair.stages(state)
    options = pair.options(state)
    if first is None or second is None or WAIT in (first.kind, second.kind):
        return options[0]
    kinds = _kinds(pair.first, first.operation), _kinds(pair.second, second.operation)
    together = pair.table.rates(first.kind, second.kind)
    gains = _worst_gains(pair.table, *kinds) if together else []
    alone = options[len(together) :]
    if alone and max(gains, default=0.0) <= 1.0:
        return alone[0]
    return together[gains.index(max(gains))]


def _kinds(chain: Chain, operation: int) -> set[str]:
    return {stage.kind for stage in chain if stage.operation == operation} - {WAIT}


def _worst_gains(table: SlowdownTable, first: set[str], second: set[str]) -> list[float]:
    """For each split the sum of both speeds, at least; 0 where their memory does not fit."""
    if not all(table.fits(one, other) for one in first for other in second):
        return [0.0 for _ in table.splits]
    return [
        1 / max(table.slowdown(one, share, other) for one in first for other in second)
        + 1 / max(table.slowdown(other, 1 - share, one) for one in first for other in second)
        for share in table.splits
    ]


POLICIES: dict[str, Policy] = {
    "serial": serial,
    "static": static,
    "rollouts": rollouts,
    "operations": operations,
    "greedy": greedy,
    "lookahead": lookahead,
    "fair": fair,
}


class Run(NamedTuple):
    makespan_s: float
    slowdowns: tuple[float, float]
    """For each job, its time over that alone, until the first of the two was through."""


def run(pair: Pair, policy: Policy) -> Run:
    """Run both chains to their ends."""
    state, time_s = pair.start, 0.0
    done_s = slowdowns = (0.0, 0.0)
    totals_s = pair.total_s
    while any(left > DONE_S for left in pair.remaining_s(state)):
        rates = policy(pair, state, PairProgress(done_s, time_s))
        took_s, state = pair.advance(state, rates)
        time_s += took_s
        left_s = pair.remaining_s(state)
        done_s = totals_s[0] - left_s[0], totals_s[1] - left_s[1]
        if not any(slowdowns) and min(left_s) <= DONE_S:
            slowdowns = (time_s / max(done_s[0], DONE_S), time_s / max(done_s[1], DONE_S))
    return Run(time_s, slowdowns)
