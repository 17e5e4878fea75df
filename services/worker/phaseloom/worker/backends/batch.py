"""Samples of the contract as numpy arrays, checked against the model and the loss.

All samples of a field lie end to end in one array, and each check runs over the whole array. An
operation may have thousands of short samples: a few numpy calls for each of them would cost more
than training on them.

Shapes: S samples, N positions of all samples together, K targets per position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from phaseloom.common.contract.arrays import Float32s, Int32s, length
from phaseloom.common.contract.checks import check_num_targets
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.operations import Datum, Forward, ForwardBackward, Loss

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
FieldOf = Callable[[int], str]
"""Maps the index of an array in the request to the path of its field, for refusals."""


@dataclass(frozen=True)
class Batch:
    """The samples of an operation. Sample i has the positions `starts[i]` to `starts[i + 1]`.

    `coefficient` holds weights or advantages. It and `q`, the sampler's log-probabilities, are zero
    if there is no loss. If some sample has several targets per position, targets and coefficients
    are (N, K), with the largest K of all samples; unused entries are 0 with a coefficient of 0.
    """

    starts: Ints
    tokens_N: Ints
    targets_N: Ints
    q_N: Floats
    coefficient_N: Floats
    is_used_N: npt.NDArray[np.bool_]
    """Whether each position counts in the loss."""
    num_targets_S: Ints
    """The number of targets per position of each sample."""

    @property
    def lengths_S(self) -> Ints:
        return np.diff(self.starts)


def joined_ints(values: Sequence[Int32s], field: FieldOf) -> Ints:
    """Join arrays into one. Raises: CallerError: a value does not fit into int32."""
    try:
        return _joined(values, "<i4", field).astype(np.int64)
    except OverflowError:
        i = next(i for i, array in enumerate(values) if any(abs(v) >= 2**31 for v in array))
        raise CallerError(
            "a token id does not fit into int32", field=field(i), remedy="use 0 to 2^31 - 1"
        ) from None


def joined_floats(values: Sequence[Float32s], field: FieldOf) -> Floats:
    """Join arrays into one. Raises: CallerError: a value is not a finite float32."""
    with np.errstate(over="ignore"):
        joined_N = _joined(values, "<f4", field).astype(np.float32)
    finite_N = np.isfinite(joined_N)
    if not finite_N.all():
        raise CallerError(
            "a value is not a finite float32",
            field=field(_index_of_first_bad(values, ~finite_N)),
            remedy="replace inf, nan and values above 3.4e38; mask positions with a 0",
        )
    return joined_N


def check_tokens(tokens_N: Ints, vocab_size: int, values: Sequence[Int32s], field: FieldOf) -> None:
    """Check token ids.

    Args: tokens_N: `values`, joined.
    Raises: CallerError: a token id is outside [0, vocab_size).
    """
    bad_N = (tokens_N < 0) | (tokens_N >= vocab_size)
    if bad_N.any():
        raise CallerError(
            f"token id {tokens_N[bad_N.argmax()]} is outside the vocabulary of {vocab_size} tokens",
            field=field(_index_of_first_bad(values, bad_N)),
            remedy=f"use ids from 0 to {vocab_size - 1}",
        )


def check_samples(data: Sequence[Datum], max_positions: int) -> None:
    """Check that an operation has samples, and that none is longer than the model allows.

    Call it with a whole operation: only a rank's share of one may be empty.

    Raises: CallerError: there are no samples, or one is too long.
    """
    if not data:
        raise CallerError(
            "expected at least one sample, got an empty batch",
            field="args.batch",
            remedy="pass at least one sample",
        )
    for i, datum in enumerate(data):
        check_positions(length(datum.tokens), max_positions, f"args.batch[{i}].tokens")


def check_positions(num_tokens: int, max_positions: int, field: str, *, num_new: int = 0) -> None:
    """Check that the model has a position for each token of a sequence.

    A model with rotary positions would run past its limit without an error, and compute something
    that it was never trained for.

    Args: num_new: tokens that will follow those of the request.
    Raises: CallerError: the sequence is longer than the model's `max_position_embeddings`.
    """
    if num_tokens + num_new > max_positions:
        new = f" plus {num_new} new ones" if num_new else ""
        raise CallerError(
            f"{num_tokens} tokens{new} exceed the {max_positions} positions of the model",
            field=field,
            remedy="shorten the sequence, or lower max_tokens if it generates",
        )


def forward_batch(args: Forward, vocab_size: int) -> Batch:
    """Join the samples of a `forward` into one batch. Raises: CallerError: names the field at
    fault."""
    return _tokens_and_targets(args.batch, vocab_size)


def logprobs_request(args: ForwardBackward) -> Forward | None:
    """Return the `forward` for the log-probabilities that a `forward_backward` requests; None if it
    requests none."""
    if not args.logprobs:
        return None
    return Forward([without_loss(datum) for datum in args.batch])


def without_loss(datum: Datum) -> Datum:
    return Datum(datum.tokens, datum.targets, num_targets=datum.num_targets)


def staleness_metrics(args: ForwardBackward, batch: Batch) -> dict[str, float]:
    """Return the staleness of the tokens that count; nothing if no sample has one."""
    if all(datum.staleness is None for datum in args.batch):
        return {}
    staleness_S = np.array([datum.staleness or 0 for datum in args.batch], dtype=np.float64)
    num_used_S = np.add.reduceat(batch.is_used_N.astype(np.int64), batch.starts[:-1])
    return {
        "staleness:sum": float((staleness_S * num_used_S).sum()),
        "staleness:max": float(staleness_S[num_used_S > 0].max(initial=0.0)),
    }


def check_one_target(data: Sequence[Datum]) -> None:
    """Check that each position has one target. Raises: CallerError: a sample has several."""
    for i, datum in enumerate(data):
        if datum.num_targets != 1:
            raise CallerError(
                f"this backend supports one target per position, got {datum.num_targets}",
                code=Code.FAILED_PRECONDITION,
                field=_field("num_targets")(i),
                remedy="use the backend 'fsdp', or one target per position",
            )


def loss_batch(args: ForwardBackward, vocab_size: int) -> Batch:
    """Join the samples of a `forward_backward` into one batch.

    Raises: CallerError: names the field at fault.
    """
    if args.loss in (Loss.PPO, Loss.CISPO) and not 0 <= args.clip_low <= args.clip_high:
        raise CallerError(
            f"clip_low must be at least 0 and at most clip_high = {args.clip_high}, got "
            f"{args.clip_low}",
            field="args.clip_low",
            remedy="pass bounds of the probability ratio, such as 0.8 and 1.2",
        )
    check_num_targets(args)
    batch = _tokens_and_targets(args.batch, vocab_size)
    _check_unused(args)
    if args.loss is Loss.CROSS_ENTROPY:
        weights = [datum.weights for datum in args.batch]
        weights_N = _required("weights", weights, batch, args.loss, batch.num_targets_S)
        coefficient_N, q_N = (
            _by_position(weights_N, batch.lengths_S, batch.num_targets_S),
            batch.q_N,
        )
    else:
        q_N = _required("logprobs", [d.logprobs for d in args.batch], batch, args.loss)
        advantages = [datum.advantages for datum in args.batch]
        coefficient_N = _required("advantages", advantages, batch, args.loss)
    is_used_N = coefficient_N != 0
    if is_used_N.ndim > 1:
        is_used_N = is_used_N.any(axis=1)
    if args.loss is Loss.DRO:
        # DRO pulls towards the sampler even where the advantage is 0. Only prompt positions, whose
        # q is 0 too, do not count.
        is_used_N |= q_N != 0
    return replace(batch, q_N=q_N, coefficient_N=coefficient_N, is_used_N=is_used_N)


def _check_unused(args: ForwardBackward) -> None:
    """Check that no factor is given that the loss ignores.

    Raises: CallerError: one is given, so the caller expects an effect that it would not have.
    """
    unused, used = ("weights", "advantages")
    if args.loss is Loss.CROSS_ENTROPY:
        unused, used = used, unused
    for i, datum in enumerate(args.batch):
        if getattr(datum, unused) is not None:
            raise CallerError(
                f"the loss {args.loss} does not use {unused}",
                field=_field(unused)(i),
                remedy=f"omit it, or multiply it into {used}",
            )


def _field(name: str) -> FieldOf:
    return lambda i: f"args.batch[{i}].{name}"


def _joined(
    values: Sequence[Int32s] | Sequence[Float32s], dtype: str, field: FieldOf
) -> npt.NDArray[Any]:
    # One numpy call for all lists. Packed arrays are already in the right form.
    lists = [array for array in values if isinstance(array, list)]
    if len(lists) == len(values):
        return np.array(list(chain.from_iterable(lists)), dtype=dtype)
    for i, array in enumerate(values):
        if isinstance(array, bytes) and len(array) % 4:
            raise CallerError(
                f"expected a multiple of 4 bytes, got {len(array)} bytes",
                field=field(i),
                remedy="send little-endian values, 4 bytes each",
            )
    packed = (a if isinstance(a, bytes) else np.array(a, dtype=dtype).tobytes() for a in values)
    return np.frombuffer(b"".join(packed), dtype=dtype)


def _index_of_first_bad(
    values: Sequence[Int32s] | Sequence[Float32s], bad_N: npt.NDArray[np.bool_]
) -> int:
    ends = np.cumsum([length(array) for array in values])
    return int(np.searchsorted(ends, bad_N.argmax(), side="right"))


def _check_lengths(lengths_S: Ints, expected_S: Ints, field: FieldOf) -> None:
    differing_S = np.flatnonzero(lengths_S != expected_S)
    if differing_S.size:
        i = int(differing_S[0])
        raise CallerError(
            f"expected {expected_S[i]} values, got {lengths_S[i]}",
            field=field(i),
            remedy="pass one value per token; for targets and weights, num_targets per token",
        )


def _tokens_and_targets(data: Sequence[Datum], vocab_size: int) -> Batch:
    tokens, targets = [datum.tokens for datum in data], [datum.targets for datum in data]
    tokens_N = joined_ints(tokens, _field("tokens"))
    targets_N = joined_ints(targets, _field("targets"))
    lengths_S = np.array([length(array) for array in tokens])
    if not lengths_S.all():
        first = int(lengths_S.argmin())
        raise CallerError(
            "expected at least one token, got none",
            field=_field("tokens")(first),
            remedy="pass at least one token",
        )
    num_targets_S = np.array([datum.num_targets for datum in data], dtype=np.int64)
    if (num_targets_S < 1).any():
        raise CallerError(
            f"num_targets must be at least 1, got {num_targets_S.min()}",
            field=_field("num_targets")(int(num_targets_S.argmin())),
            remedy="use 1 or more",
        )
    expected_S = lengths_S * num_targets_S
    _check_lengths(np.array([length(a) for a in targets]), expected_S, _field("targets"))
    check_tokens(tokens_N, vocab_size, tokens, _field("tokens"))
    check_tokens(targets_N, vocab_size, targets, _field("targets"))
    zeroes_N = np.zeros(tokens_N.size, dtype=np.float32)
    starts = np.concatenate(([0], np.cumsum(lengths_S)))
    targets_N = _by_position(targets_N, lengths_S, num_targets_S)
    return Batch(starts, tokens_N, targets_N, zeroes_N, zeroes_N, zeroes_N != 0, num_targets_S)


def _by_position(
    values: npt.NDArray[Any], lengths_S: Ints, num_targets_S: Ints
) -> npt.NDArray[Any]:
    """Arrange the values of all targets, end to end, as one row per position (N, K), padded with
    zeros. If every position has one target, return them unchanged, as (N,)."""
    if (num_targets_S == 1).all():
        return values
    num_N = np.repeat(num_targets_S, lengths_S)
    rows = np.repeat(np.arange(num_N.size), num_N)
    columns = np.arange(values.size) - np.repeat(np.cumsum(num_N) - num_N, num_N)
    values_NK = np.zeros((num_N.size, num_targets_S.max()), dtype=values.dtype)
    values_NK[rows, columns] = values
    return values_NK


def _required(
    name: str,
    values: Sequence[Float32s | None],
    batch: Batch,
    loss: Loss,
    num_S: Ints | int = 1,
) -> Floats:
    provided = [array for array in values if array is not None]
    if len(provided) < len(values):
        i = next(i for i, array in enumerate(values) if array is None)
        raise CallerError(
            f"the loss {loss} needs {name}", field=_field(name)(i), remedy=f"pass {name}"
        )
    joined_N = joined_floats(provided, _field(name))
    expected_S = batch.lengths_S * num_S
    _check_lengths(np.array([length(a) for a in provided]), expected_S, _field(name))
    return joined_N
