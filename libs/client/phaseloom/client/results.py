"""Results as a controller gets them: the parts of a split operation merged, arrays as lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from phaseloom.common.contract.arrays import float32s, int32s
from phaseloom.common.contract.errors import InternalError
from phaseloom.common.contract.operations import (
    ForwardBackwardResult,
    ForwardResult,
    GenerateResult,
    Result,
    Sequence,
)

R = TypeVar("R")

_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "sum": sum,
    "min": min,
    "max": max,
    "mean": lambda values: sum(values) / len(values),
}


def merge_generate(parts: list[Result]) -> GenerateResult:
    generated = _all(parts, GenerateResult)
    return GenerateResult(
        [
            [Sequence(int32s(s.tokens), float32s(s.logprobs), s.stop_reason) for s in samples]
            for part in generated
            for samples in part.sequences
        ],
        [float32s(values) for part in generated for values in part.prompt_logprobs],
    )


def merge_forward(parts: list[Result]) -> ForwardResult:
    return ForwardResult(
        [float32s(values) for part in _all(parts, ForwardResult) for values in part.logprobs]
    )


def merge_forward_backward(parts: list[Result]) -> ForwardBackwardResult:
    """The metrics over all parts, each by the reduction that its name ends with (`loss:sum`)."""
    collected: dict[str, list[float]] = {}
    for part in _all(parts, ForwardBackwardResult):
        for name, value in part.metrics.items():
            collected.setdefault(name, []).append(value)
    return ForwardBackwardResult(
        {
            name: _REDUCTIONS.get(name.rpartition(":")[2], sum)(values)
            for name, values in collected.items()
        }
    )


def only(kind: type[R]) -> Callable[[list[Result]], R]:
    """The merge for an operation that is never split: the result of its only part."""

    def merge(parts: list[Result]) -> R:
        (result,) = _all(parts, kind)
        return result

    return merge


def _all(parts: list[Result], kind: type[R]) -> list[R]:
    checked: list[R] = [part for part in parts if isinstance(part, kind)]
    if len(checked) != len(parts):
        names = ", ".join(type(part).__name__ for part in parts)
        raise InternalError(f"{names} came where {kind.__name__} was due")
    return checked
