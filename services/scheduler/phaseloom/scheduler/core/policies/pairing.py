"""Policies on chains of sub-stages, asked whether an operation begins beside the one that runs.

Two jobs' chains are predicted from what runs, what is queued behind it, and the durations that the
profiler has measured: whatever share they were measured with, so that training which has mostly run
on a part of the device is taken to be longer than it would be on all of it.
"""

from __future__ import annotations

from phaseloom.scheduler.core.planning.chains import WAIT, Pair, Place, Policy, Progress, Rates
from phaseloom.scheduler.core.policies.sharing_view import Claim, Multiplexing, SharingView

TOLERANCE = 0.1
"""The difference of progress, as a share of the time, that a policy lets stand on a live device.
Live progress is known roughly: what an operation loses by company is not counted, and a job that
waits of its own accord is taken to get on."""


def by_chains(choose: Policy, otherwise: Multiplexing, *, looks_ahead: bool) -> Multiplexing:
    """A multiplexing policy that goes by one on chains of two jobs.

    Args: otherwise: decides where no second job comes to one that runs, where three would run, or
              where nothing is known: no table of slowdowns, no prediction.
          looks_ahead: whether the policy goes by what comes after the operations at hand. Then
              `otherwise` also decides where that is not known of one of the jobs. The job's
              controller awaits the operation, and what it calls then comes the later, the later
              that ends: as if the job were through, its operation would be put off for nothing.
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
        state = (Place(at, left_s, has_begun=True), newcomer)
        rates = choose(pair, state, _progress(first, second))
        return _counts(view, pair.options(state).index(rates), rates)

    return Multiplexing(share, predicts=True)


def _progress(first: Claim, second: Claim) -> Progress:
    """How far each would have come in the time for which the younger one is there, at the pace that
    it has had."""
    time_s = min(first.age_s, second.age_s)
    done_s = [
        time_s * (1 - each.lag_s / each.age_s) if each.age_s else 0.0 for each in (first, second)
    ]
    return Progress((done_s[0], done_s[1]), time_s, TOLERANCE)


def _counts(view: SharingView, option: int, rates: Rates) -> list[int] | None:
    """The units of each under the chosen split. What one does not keep busy the other one has."""
    if 0.0 in rates:
        return None
    assert view.slowdowns is not None
    first, second = view.claims
    count = min(max(1, round(view.slowdowns.splits[option] * view.units)), view.units - 1)
    if first.most_units:
        count = min(count, first.most_units)
    rest = view.units - count
    if second.most_units and rest > second.most_units:
        rest = second.most_units
        most = first.most_units or view.units
        count = min(most, view.units - rest)
    return [count, rest]
