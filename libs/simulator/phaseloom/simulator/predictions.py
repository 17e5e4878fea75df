"""How well starts and durations are predicted: a recorded decision log, folded once more.

For each operation that waits for a device, `explain` is asked as soon as the operation is ready, as
if its controller had asked then. What it predicts is compared with the start that the log tells
later. Nothing is recorded for this: the scheduler is a fold over the log, so the answer is the one
that the live scheduler would have given.

The error is the difference between the predicted wait and the real one, as a share of the real one.
Waits below `LEAST_S` are left out: they are the latency of the bus and of processes, of which the
scheduler knows nothing, and their relative errors say nothing.

A duration is predicted as the scheduler's decisions do it: by the newest phase trace before the
operation's end. Those of kinds that are not measured yet are left out, and those below
`LEAST_DURATION_S`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from phaseloom.common.contract import events
from phaseloom.common.contract.ids import JobKey, OperationKey
from phaseloom.common.contract.operations import Outcome
from phaseloom.scheduler.core.core import Core
from phaseloom.scheduler.core.dispatch import explain, ready
from phaseloom.scheduler.core.state.step import Step
from phaseloom.simulator.tracing import quantile

LEAST_S = 0.05
"""The shortest wait that counts."""
LEAST_DURATION_S = 0.01
"""The shortest duration that counts."""

Entry = tuple[int, float, events.Event]
"""An entry of the decision log: its sequence, the time at which the log took it, the event."""


class Prediction(NamedTuple):
    """A prediction for one operation, made when it was ready, and the time that came true."""

    operation: str
    kind: str
    predicted_s: float
    """The predicted wait."""
    waited_s: float
    """The time from when it was ready until it started."""

    @property
    def error(self) -> float:
        """The difference as a share of the wait."""
        return abs(self.predicted_s - self.waited_s) / self.waited_s


class PredictedStarts(msgspec.Struct, frozen=True):
    """The errors of the predicted starts of a run, over the operations that waited for a device."""

    operations: int
    """The operations that waited for at least 50 ms."""
    error_p50: float | None
    """The median of |predicted − real wait| / real wait; None where no operation waited."""
    error_p90: float | None
    error_seconds_p50: float | None
    """The median of |predicted − real wait|, in seconds."""
    error_seconds_p90: float | None
    bias_seconds: float | None
    """The mean of predicted − real wait, in seconds: below 0, operations start later than told."""


class PredictedDurations(msgspec.Struct, frozen=True):
    """The errors of the predicted durations of a run's operations."""

    operations: int
    """The operations of at least 10 ms whose kind had been measured."""
    error_p50: float | None
    """The median of |predicted − real duration| / real duration; None where there were none."""
    error_p90: float | None


def durations(entries: Iterable[Entry]) -> PredictedDurations:
    """The errors of the predicted durations of all operations that completed.

    Args: entries: the log from its first entry on.
    """
    usual_s: dict[tuple[JobKey, str, str], float] = {}
    errors = []
    for _, _, event in entries:
        for part in events.parts(event):
            match part:
                case events.PhaseTrace():
                    for e in part.estimates:
                        usual_s[part.job, e.deployment, e.kind] = e.duration_s
                case events.OperationFinished(key=key, outcome=Outcome.COMPLETED, replay=False):
                    predicted_s = usual_s.get((key.job_key, key.deployment, part.kind))
                    if predicted_s is not None and part.duration_s >= LEAST_DURATION_S:
                        errors.append(abs(predicted_s - part.duration_s) / part.duration_s)
    if not errors:
        return PredictedDurations(0, None, None)
    errors.sort()
    return PredictedDurations(len(errors), quantile(errors, 0.5), quantile(errors, 0.9))


def predictions(entries: Iterable[Entry]) -> list[Prediction]:
    """The predictions for all operations that had to wait for a device, however short.

    Args: entries: the log from its first entry on.
    """
    core = Core()
    predicted: dict[OperationKey, tuple[float, float]] = {}
    found = []
    for sequence, time_s, event in entries:
        for part in events.parts(event):
            if isinstance(part, events.OperationFinished) and part.key in predicted:
                asked_s, wait_s = predicted.pop(part.key)
                waited_s = part.started_unix_s - asked_s
                if wait_s >= 0.0 and not part.replay:
                    found.append(Prediction(str(part.key), part.kind, wait_s, waited_s))
        core.step(sequence, time_s, event)
        _ask(Step(core.state, sequence, core.state.now_s), predicted)
    return found


def _ask(step: Step, predicted: dict[OperationKey, tuple[float, float]]) -> None:
    """Ask for a prediction of each operation that is ready, and was not before."""
    for deployment in step.state.deployments.values():
        for op in ready.operations(step, deployment):
            if op.key not in predicted:
                _, start_s = explain.queue_position(step, deployment, op)
                predicted[op.key] = step.now_s, start_s


def accuracy(found: Iterable[Prediction]) -> PredictedStarts:
    """The quantiles of the errors of all operations that waited for `LEAST_S` or longer."""
    waited = [p for p in found if p.waited_s >= LEAST_S]
    if not waited:
        return PredictedStarts(0, None, None, None, None, None)
    errors = sorted(p.error for p in waited)
    seconds = sorted(abs(p.predicted_s - p.waited_s) for p in waited)
    return PredictedStarts(
        operations=len(waited),
        error_p50=quantile(errors, 0.5),
        error_p90=quantile(errors, 0.9),
        error_seconds_p50=quantile(seconds, 0.5),
        error_seconds_p90=quantile(seconds, 0.9),
        bias_seconds=sum(p.predicted_s - p.waited_s for p in waited) / len(waited),
    )
