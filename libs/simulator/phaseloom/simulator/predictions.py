"""Errors of predicted starts and durations, from folding a recorded decision log again.

For each operation that waits for a device, this module calls `explain` when the operation becomes
ready, and compares the predicted start with the start in the log. Runs record nothing extra for
this. The scheduler is a fold over the log, so the answer is the one that the live scheduler would
have given.

The error of a start is the difference between the predicted and the real wait, divided by the real
one. Waits below `LEAST_S` are ignored: they are latencies of the bus and of processes, which the
scheduler does not know.

The predicted duration is the estimate of the newest phase trace before the operation ended. Kinds
without an estimate and operations below `LEAST_DURATION_S` are ignored.
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
"""Shortest wait that counts."""
LEAST_DURATION_S = 0.01
"""Shortest duration that counts."""

Entry = tuple[int, float, events.Event]
"""An entry of the decision log: its sequence, the time at which the log stored it, the event."""


class Prediction(NamedTuple):
    """A prediction for one operation, made when it became ready, and its real wait."""

    operation: str
    kind: str
    predicted_s: float
    waited_s: float
    """Time from ready until started."""

    @property
    def error(self) -> float:
        """Difference relative to the real wait."""
        return abs(self.predicted_s - self.waited_s) / self.waited_s


class PredictedStarts(msgspec.Struct, frozen=True):
    """Errors of the predicted starts of a run, over the operations that waited for a device."""

    operations: int
    """Operations that waited for at least 50 ms."""
    error_p50: float | None
    """Median of |predicted − real wait| / real wait; None if no operation waited."""
    error_p90: float | None
    error_seconds_p50: float | None
    """Median of |predicted − real wait|, in seconds."""
    error_seconds_p90: float | None
    bias_seconds: float | None
    """Mean of predicted − real wait, in seconds. Negative: operations start later than
    predicted."""


class PredictedDurations(msgspec.Struct, frozen=True):
    """Errors of the predicted durations of a run's operations."""

    operations: int
    """Operations of at least 10 ms whose kind had an estimate."""
    error_p50: float | None
    """Median of |predicted − real duration| / real duration; None if there were no operations."""
    error_p90: float | None


def durations(entries: Iterable[Entry]) -> PredictedDurations:
    """Return the errors of the predicted durations of all completed operations.

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
    """Return the predictions for all operations that waited for a device, however briefly.

    Args: entries: the log from its first entry on.
    """
    core = Core()
    predicted: dict[OperationKey, tuple[float, float]] = {}
    results = []
    for sequence, time_s, event in entries:
        for part in events.parts(event):
            if isinstance(part, events.OperationFinished) and part.key in predicted:
                ready_s, wait_s = predicted.pop(part.key)
                waited_s = part.started_unix_s - ready_s
                if wait_s >= 0.0 and not part.replay:
                    results.append(Prediction(str(part.key), part.kind, wait_s, waited_s))
        core.step(sequence, time_s, event)
        step = Step(core.state, sequence, core.state.now_s)
        for deployment in step.state.deployments.values():
            for op in ready.operations(step, deployment):
                if op.key not in predicted:
                    _, start_s = explain.queue_position(step, deployment, op)
                    predicted[op.key] = step.now_s, start_s
    return results


def accuracy(starts: Iterable[Prediction]) -> PredictedStarts:
    """Return quantiles of the errors of all operations that waited for `LEAST_S` or longer."""
    waited = [p for p in starts if p.waited_s >= LEAST_S]
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
