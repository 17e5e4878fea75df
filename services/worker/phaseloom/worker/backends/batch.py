"""Data of the contract as numpy arrays: checked, then padded into buckets of similar length.

Padding is on the right: under causal attention no real position sees it, so no mask is needed.
Buckets depend on the lengths alone, so the same operation always computes the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phaseloom.common.errors import CallerError
from phaseloom.common.messages import Datum, Float32s, Forward, ForwardBackward, Int32s, Loss

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

PASS_OVERHEAD_TOKENS = 96
"""What one more pass costs, in tokens of padding: measured on a 0.8 M model on a CPU thread."""

PASS_TOKENS = 4096
"""Most tokens in a pass, padding included: bounds activation memory. One sample may exceed it."""


@dataclass(frozen=True)
class Sample:
    """One datum. T positions; `q` and `coefficient` (weights or advantages) only for losses."""

    tokens_T: Ints
    targets_T: Ints
    q_T: Floats | None = None
    coefficient_T: Floats | None = None


@dataclass(frozen=True)
class Bucket:
    """Samples padded to one length; `rows[b]` is the place of row b in the operation's batch."""

    rows: list[int]
    tokens_BT: Ints
    targets_BT: Ints
    q_BT: Floats
    coefficient_BT: Floats

    @property
    def first_used(self) -> int:
        """The first column where any row has a nonzero coefficient; T where none has."""
        used_T = self.coefficient_BT.any(axis=0)
        return int(used_T.argmax()) if used_T.any() else used_T.size


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
    return Sample(tokens_T, targets_T)


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
        coefficient_T = required("weights", datum.weights)
        q_T = np.zeros(num_tokens, dtype=np.float32)
    else:
        q_T = required("logprobs", datum.logprobs)
        coefficient_T = required("advantages", datum.advantages)
    return Sample(sample.tokens_T, sample.targets_T, q_T, coefficient_T)


def buckets(samples: Sequence[Sample]) -> list[Bucket]:
    """Samples sorted by length, cut where padding would cost more than another pass."""
    order = sorted(range(len(samples)), key=lambda i: samples[i].tokens_T.size)
    groups: list[list[int]] = []
    for i in order:
        if groups and _fits(groups[-1], samples, i):
            groups[-1].append(i)
        else:
            groups.append([i])
    return [_pad(rows, samples) for rows in groups]


def _fits(group: list[int], samples: Sequence[Sample], i: int) -> bool:
    length = samples[i].tokens_T.size
    extra_padding = (length - samples[group[-1]].tokens_T.size) * len(group)
    return extra_padding <= PASS_OVERHEAD_TOKENS and length * (len(group) + 1) <= PASS_TOKENS


def _pad(rows: list[int], samples: Sequence[Sample]) -> Bucket:
    shape = (len(rows), samples[rows[-1]].tokens_T.size)
    tokens_BT = np.zeros(shape, dtype=np.int64)
    targets_BT = np.zeros(shape, dtype=np.int64)
    q_BT = np.zeros(shape, dtype=np.float32)
    coefficient_BT = np.zeros(shape, dtype=np.float32)
    for b, i in enumerate(rows):
        sample = samples[i]
        length = sample.tokens_T.size
        tokens_BT[b, :length] = sample.tokens_T
        targets_BT[b, :length] = sample.targets_T
        if sample.q_T is not None:
            q_BT[b, :length] = sample.q_T
        if sample.coefficient_T is not None:
            coefficient_BT[b, :length] = sample.coefficient_T
    return Bucket(rows, tokens_BT, targets_BT, q_BT, coefficient_BT)
