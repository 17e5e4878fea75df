"""Data of the contract as numpy arrays, checked against the model and the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from phaseloom.common.errors import CallerError
from phaseloom.common.messages import Datum, Float32s, Forward, ForwardBackward, Int32s, Loss

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Sample:
    """One datum of T positions; `coefficient`: weights or advantages. Zeroes without a loss."""

    tokens_T: Ints
    targets_T: Ints
    q_T: Floats
    coefficient_T: Floats


def ints(values: Int32s, field: str) -> Ints:
    """Raises: CallerError: bytes that are no whole number of int32."""
    if isinstance(values, list):
        return np.array(values, dtype=np.int64)
    if len(values) % 4:
        raise CallerError(f"{len(values)} bytes are no whole number of int32", field=field)
    return np.frombuffer(values, dtype="<i4").astype(np.int64)


def floats(values: Float32s, field: str) -> Floats:
    """Raises: CallerError: bytes that are no whole number of float32, or a value not finite."""
    if isinstance(values, list):
        with np.errstate(over="ignore"):
            array = np.array(values, dtype=np.float32)
    elif len(values) % 4:
        raise CallerError(f"{len(values)} bytes are no whole number of float32", field=field)
    else:
        array = np.frombuffer(values, dtype="<f4").astype(np.float32)
    if not np.isfinite(array).all():
        raise CallerError(
            "it holds a value that is not a finite float32", field=field, remedy="mask it out"
        )
    return array


def check_tokens(tokens_T: Ints, vocab_size: int, field: str) -> None:
    """Raises: CallerError: a token id outside [0, vocab_size)."""
    if tokens_T.size and (tokens_T.min() < 0 or tokens_T.max() >= vocab_size):
        worst = tokens_T.max() if tokens_T.max() >= vocab_size else tokens_T.min()
        raise CallerError(
            f"token id {worst} is out of the vocabulary",
            field=field,
            remedy=f"use ids from 0 to {vocab_size - 1}",
        )


def forward_samples(args: Forward, vocab_size: int) -> list[Sample]:
    """Raises: CallerError: naming the field that is at fault."""
    _check_not_empty(args.batch)
    return [
        _tokens_and_targets(datum, vocab_size, f"args.batch[{i}]")
        for i, datum in enumerate(args.batch)
    ]


def loss_samples(args: ForwardBackward, vocab_size: int) -> list[Sample]:
    """Raises: CallerError: naming the field that is at fault."""
    _check_not_empty(args.batch)
    if args.loss is Loss.PPO and not 0 <= args.clip_low <= args.clip_high:
        raise CallerError(
            f"[{args.clip_low}, {args.clip_high}] is no range of ratios",
            field="args.clip_low",
            remedy="use bounds around 1, e.g. 0.8 and 1.2",
        )
    return [
        _loss_sample(args.loss, datum, vocab_size, f"args.batch[{i}]")
        for i, datum in enumerate(args.batch)
    ]


def _check_not_empty(batch: Sequence[Datum]) -> None:
    if not batch:
        raise CallerError("the batch is empty", field="args.batch", remedy="send at least 1 datum")


def _tokens_and_targets(datum: Datum, vocab_size: int, field: str) -> Sample:
    tokens_T = ints(datum.tokens, f"{field}.tokens")
    if tokens_T.size == 0:
        raise CallerError("it has no tokens", field=f"{field}.tokens")
    targets_T = ints(datum.targets, f"{field}.targets")
    _check_length(targets_T.size, tokens_T.size, f"{field}.targets")
    check_tokens(tokens_T, vocab_size, f"{field}.tokens")
    check_tokens(targets_T, vocab_size, f"{field}.targets")
    zeroes_T = np.zeros(tokens_T.size, dtype=np.float32)
    return Sample(tokens_T, targets_T, zeroes_T, zeroes_T)


def _check_length(size: int, expected: int, field: str) -> None:
    if size != expected:
        raise CallerError(
            f"it has length {size} and not that of tokens, {expected}",
            field=field,
            remedy="give one value a token",
        )


def _loss_sample(loss: Loss, datum: Datum, vocab_size: int, field: str) -> Sample:
    sample = _tokens_and_targets(datum, vocab_size, field)
    num_tokens = sample.tokens_T.size

    def required(name: str, values: Float32s | None) -> Floats:
        if values is None:
            raise CallerError(
                f"the loss {loss} needs {name}", field=f"{field}.{name}", remedy=f"send {name}"
            )
        array_T = floats(values, f"{field}.{name}")
        _check_length(array_T.size, num_tokens, f"{field}.{name}")
        return array_T

    if loss is Loss.CROSS_ENTROPY:
        return replace(sample, coefficient_T=required("weights", datum.weights))
    return replace(
        sample,
        q_T=required("logprobs", datum.logprobs),
        coefficient_T=required("advantages", datum.advantages),
    )
