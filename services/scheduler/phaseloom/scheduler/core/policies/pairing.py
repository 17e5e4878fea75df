"""Multiplexing policies that plan on chains: may an operation start next to the running one?

A chain is the predicted sequence of a job's sub-stages: the running operation, those queued behind
it, and what usually follows, with the durations measured by the profiler. Measured durations
include the share under which an operation ran, so training that mostly ran on part of a device
appears longer than it would be on the whole device.
"""

from __future__ import annotations

from phaseloom.scheduler.core.planning.chains import (
    WAIT,
    ChainPosition,
    Pair,
    PairProgress,
    Policy,
    Rates,
)
from phaseloom.scheduler.core.policies.sharing_view import Claim, Multiplexing, SharingView

TOLERANCE = 0.1
"""Progress difference between two jobs, as a fraction of the time, that counts as equal on a live
device. Live progress is only approximate: slowdowns by co-located operations are not counted, and a
job that waits by its own choice counts as progressing."""


def by_chains(choose: Policy, otherwise: Multiplexing, *, looks_ahead: bool) -> Multiplexing:
    """Build a multiplexing policy from a policy on the chains of two jobs.

    Args: otherwise: the policy for all other cases: not exactly two jobs, no table of slowdowns, or
        no prediction.
          looks_ahead: whether `choose` considers what follows the current operations. If so,
              `otherwise` also decides when the follow-up operations of one of the jobs are unknown.
              A job with an unknown future looks as if it were about to finish, so its operation
              would be postponed for nothing. In fact, its controller calls the next operation only
              after this one has ended.
    """

    def share(view: SharingView) -> list[int] | None:
        counts = otherwise.share(view)
        if view.newcomer is None or view.slowdowns is None or len(view.running) != 1:
            return counts
        first, second = view.claims
        if first.job == second.job or not first.stages or not second.stages:
            return counts
        pair = Pair(first.ahead, second.ahead, view.slowdowns)
        stages = pair.stages(pair.start)
        if any(stage is None or stage.kind == WAIT for stage in stages):
            return counts
        if looks_ahead and min(len(first.ahead), len(second.ahead)) == 1:
            return counts
        (at, left_s, _), newcomer = pair.start
        state = (ChainPosition(at, left_s, has_begun=True), newcomer)
        rates = choose(pair, state, _progress(first, second))
        return _counts(view, pair.options(state).index(rates), rates)

    return Multiplexing(share, predicts=True)


def _progress(first: Claim, second: Claim) -> PairProgress:
    """Estimate both jobs' progress over the younger job's lifetime, at their average pace."""
    time_s = min(first.age_s, second.age_s)
    done_s = [
        time_s * (1 - claim.lag_s / claim.age_s) if claim.age_s else 0.0
        for claim in (first, second)
    ]
    return PairProgress((done_s[0], done_s[1]), time_s, TOLERANCE)


def _counts(view: SharingView, option: int, rates: Rates) -> list[int] | None:
    """Units of each claim under the chosen split. Units that one cannot use go to the other."""
    if 0.0 in rates:
        return None
    assert view.slowdowns is not None
    first, second = view.claims
    first_count = min(max(1, round(view.slowdowns.splits[option] * view.units)), view.units - 1)
    if first.most_units:
        first_count = min(first_count, first.most_units)
    second_count = view.units - first_count
    if second.most_units and second_count > second.most_units:
        second_count = second.most_units
        most_first = first.most_units or view.units
        first_count = min(most_first, view.units - second_count)
    return [first_count, second_count]
