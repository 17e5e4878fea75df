"""How well sub-stages predict the next rollout: a recorded decision log, read once more.

The profiler tells two things of a job's rollouts: their usual duration, and the sub-stages that
most of them go through, with the usual duration of each (`PhaseTrace`). For each rollout that has
ended, what the newest trace before its end said is compared with what came: its duration with the
usual one, and with the sum of its sub-stages; and each sub-stage with the one predicted in its
place, where the rollout has gone through the predicted ones.

An error is the difference as a share of what came.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec

from phaseloom.common.contract import events
from phaseloom.common.contract.events import KindEstimate, StepRun
from phaseloom.common.contract.ids import JobKey
from phaseloom.common.contract.operations import Outcome
from phaseloom.common.observability.substages import FINE_EDGES, split_runs
from phaseloom.simulator.tracing import quantile


class StagePredictions(msgspec.Struct, frozen=True):
    """The errors of what was predicted of a run's rollouts."""

    operations: int
    """The rollouts of which both were known before."""
    duration_error_p50: float | None
    """The median of |usual duration − real duration| / real duration; None where there are none."""
    duration_error_p90: float | None
    stages_error_p50: float | None
    """The same with the sum of the usual sub-stages in place of the usual duration."""
    stages_error_p90: float | None
    foreseen: float | None
    """The share of the rollouts that went through the predicted sub-stages."""
    stage_error_p50: float | None
    """The median of |usual − real duration| / real duration of their single sub-stages."""
    stage_error_p90: float | None


def stage_predictions(log: Iterable[events.Event]) -> StagePredictions:
    """The errors over all rollouts that completed. Args: log: from its first entry on."""
    known: dict[tuple[JobKey, str, str], KindEstimate] = {}
    usual: list[float] = []
    sums: list[float] = []
    single: list[float] = []
    num_foreseen = 0
    for event in log:
        for part in events.parts(event):
            match part:
                case events.PhaseTrace():
                    known |= {(part.job, e.deployment, e.kind): e for e in part.estimates}
                case events.OperationFinished(outcome=Outcome.COMPLETED, replay=False):
                    key = part.key
                    estimate = known.get((key.job_key, key.deployment, part.kind))
                    if not part.steps or estimate is None or not estimate.sub_stages:
                        continue
                    usual.append(_error(estimate.duration_s, part.duration_s))
                    sums.append(_error(_longest_s(estimate.sub_stages), part.duration_s))
                    came = [s for _, runs in _replicas(part.steps) for s in split_runs(runs)]
                    if _shape(came) == _shape(estimate.sub_stages):
                        num_foreseen += 1
                        pairs = zip(estimate.sub_stages, came, strict=True)
                        single += [_error(e.duration_s, real.duration_s) for e, real in pairs]
    return StagePredictions(
        operations=len(usual),
        duration_error_p50=_share(usual, 0.5),
        duration_error_p90=_share(usual, 0.9),
        stages_error_p50=_share(sums, 0.5),
        stages_error_p90=_share(sums, 0.9),
        foreseen=num_foreseen / len(usual) if usual else None,
        stage_error_p50=_share(single, 0.5),
        stage_error_p90=_share(single, 0.9),
    )


def _error(predicted_s: float, real_s: float) -> float:
    return abs(predicted_s - real_s) / real_s


def _replicas(steps: Iterable[StepRun]) -> list[tuple[int, list[StepRun]]]:
    return [(replica, list(runs)) for replica, runs in groupby(steps, key=lambda r: r.replica)]


def _longest_s(steps: Iterable[StepRun]) -> float:
    """The time of the slowest replica."""
    return max(sum(run.duration_s for run in runs) for _, runs in _replicas(steps))


def _shape(stages: Sequence[StepRun]) -> list[tuple[int, int]]:
    """The replica and the bucket of each sub-stage."""
    return [(s.replica, bisect_right(FINE_EDGES, s.tokens / s.steps)) for s in stages]


def _share(errors: Sequence[float], share: float) -> float | None:
    return quantile(sorted(errors), share) if errors else None
