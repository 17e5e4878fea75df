"""What was predicted of rollouts beside what came, in a log of a few entries."""

from __future__ import annotations

import pytest

from loadtest.stage_predictions import stage_predictions
from phaseloom.common.contract.events import (
    Event,
    KindEstimate,
    OperationFinished,
    PhaseTrace,
    StepRun,
)
from phaseloom.common.contract.ids import JobKey, OperationKey
from phaseloom.common.contract.operations import Outcome

PREFILL, BATCH, TAIL = (
    StepRun(1, 640, 0.1),
    StepRun(40, 40 * 64, 0.4),
    StepRun(100, 100 * 3, 0.5),
)


def trace(*stages: StepRun, duration_s: float) -> PhaseTrace:
    estimate = KindEstimate(
        "sampler", "generate", duration_s=duration_s, next_gap_s=-1.0, count=1, sub_stages=stages
    )
    return PhaseTrace(JobKey("demo", "a"), 0.0, [], [estimate])


def rollout(seq: int, *steps: StepRun, duration_s: float) -> OperationFinished:
    return OperationFinished(
        OperationKey("demo", "a", "sampler", str(seq)),
        "generate",
        Outcome.COMPLETED,
        1,
        1,
        started_unix_s=0.0,
        duration_s=duration_s,
        steps=list(steps),
    )


def test_errors_are_those_of_the_newest_trace_before_the_end() -> None:
    log: list[Event] = [
        rollout(1, PREFILL, BATCH, TAIL, duration_s=1.0),
        trace(PREFILL, BATCH, TAIL, duration_s=1.2),
        rollout(2, PREFILL, BATCH, StepRun(200, 600, 1.0), duration_s=1.5),
    ]
    found = stage_predictions(log)
    assert found.operations == 1
    assert found.duration_error_p50 == pytest.approx(0.2)
    assert found.stages_error_p50 == pytest.approx(1 / 3)
    assert found.foreseen == 1.0
    assert found.stage_error_p50 == pytest.approx(0.0)
    assert found.stage_error_p90 == pytest.approx(0.5)


def test_a_rollout_through_other_sub_stages_is_not_foreseen() -> None:
    log: list[Event] = [
        trace(PREFILL, BATCH, TAIL, duration_s=1.0),
        rollout(1, PREFILL, BATCH, duration_s=0.5),
        rollout(2, PREFILL, BATCH, TAIL, duration_s=1.0),
    ]
    found = stage_predictions(log)
    assert (found.operations, found.foreseen) == (2, 0.5)
    assert found.stage_error_p90 == pytest.approx(0.0)


def test_of_several_replicas_the_slowest_one_counts() -> None:
    other = StepRun(40, 40 * 64, 0.8, replica=1)
    log: list[Event] = [
        trace(BATCH, other, duration_s=0.8),
        rollout(1, BATCH, other, duration_s=0.8),
    ]
    assert stage_predictions(log).stages_error_p50 == pytest.approx(0.0)


def test_nothing_is_told_where_no_rollout_was_predicted() -> None:
    found = stage_predictions([rollout(1, PREFILL, duration_s=0.1)])
    assert found.operations == 0
    assert found.stages_error_p50 is None
