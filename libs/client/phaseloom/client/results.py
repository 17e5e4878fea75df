"""What operations give a controller: plain lists, whatever the wire carried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from phaseloom.common.arrays import float32s, int32s
from phaseloom.common.errors import InternalError
from phaseloom.common.messages import (
    ForwardBackwardResult,
    ForwardResult,
    GenerateResult,
    OptimStepResult,
    Result,
)

_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "sum": sum,
    "min": min,
    "max": max,
    "mean": lambda values: sum(values) / len(values),
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One continuation of a prompt, the stop token included."""

    tokens: list[int]
    logprobs: list[float]
    """Of each token, under the weights that sampled it."""
    stop_reason: str
    """`stop` or `length`."""


@dataclass(frozen=True, slots=True)
class Generation:
    sequences: list[list[Sample]]
    """[prompt][sample]"""


@dataclass(frozen=True, slots=True)
class LogProbs:
    logprobs: list[list[float]]
    """[datum][position], of the targets."""


def merge_generate(parts: list[Result]) -> Generation:
    sequences = []
    for part in parts:
        if not isinstance(part, GenerateResult):
            raise _unexpected(part)
        sequences += [
            [Sample(int32s(s.tokens), float32s(s.logprobs), s.stop_reason) for s in samples]
            for samples in part.sequences
        ]
    return Generation(sequences)


def merge_forward(parts: list[Result]) -> LogProbs:
    logprobs = []
    for part in parts:
        if not isinstance(part, ForwardResult):
            raise _unexpected(part)
        logprobs += [float32s(values) for values in part.logprobs]
    return LogProbs(logprobs)


def merge_metrics(parts: list[Result]) -> dict[str, float]:
    """Metrics over all parts, each by the reduction that its name ends with (`loss:sum`)."""
    collected: dict[str, list[float]] = {}
    for part in parts:
        if not isinstance(part, ForwardBackwardResult | OptimStepResult):
            raise _unexpected(part)
        for name, value in part.metrics.items():
            collected.setdefault(name, []).append(value)
    return {
        name: _REDUCTIONS.get(name.rpartition(":")[2], sum)(values)
        for name, values in collected.items()
    }


def only(parts: list[Result]) -> Result:
    """Of an operation that is never split."""
    (part,) = parts
    return part


def _unexpected(part: Result) -> InternalError:
    return InternalError(f"the operation was answered with a {type(part).__name__}")
