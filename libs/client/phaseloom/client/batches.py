"""Pack the arrays of a batch, and split it by samples if it does not fit in one message.

Everything here is pure. A gradient is a plain sum over samples, so the gradients of the parts add
up to that of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from msgspec.structs import replace

from phaseloom.common.contract.arrays import (
    Float32s,
    Int32s,
    length,
    pack_float32s,
    pack_int32s,
)
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.operations import Datum, Prompt, SamplingParams
from phaseloom.common.contract.streams import MAX_PAYLOAD_BYTES

MAX_PART_BYTES = MAX_PAYLOAD_BYTES * 3 // 4
"""Largest total size of the samples in one message. Headers and framing get the other quarter."""

_ITEM_OVERHEAD_BYTES = 64
_SAMPLED_TOKEN_BYTES = 8
_FLOATS = ("weights", "logprobs", "advantages")

Item = TypeVar("Item", Prompt, Datum)


def pack_prompt(prompt: Prompt, field: str) -> Prompt:
    """Return the prompt with packed arrays.

    Raises: CallerError: the value is not a Prompt, or an element is not a token id.
    """
    _check_class(Prompt, prompt, field)
    return replace(prompt, tokens=_int32s(prompt.tokens, f"{field}.tokens"))


def pack_datum(datum: Datum, field: str) -> Datum:
    """Return the sample with packed arrays.

    Raises: CallerError: the value is not a Datum, a token is not a token id, or a weight,
            log-probability or advantage is not a number.
    """
    _check_class(Datum, datum, field)
    floats = {name: _float32s(getattr(datum, name), f"{field}.{name}") for name in _FLOATS}
    return replace(
        datum,
        tokens=_int32s(datum.tokens, f"{field}.tokens"),
        targets=_int32s(datum.targets, f"{field}.targets"),
        **floats,
    )


def split_batch(batch: Iterable[Datum], limit_bytes: int = MAX_PART_BYTES) -> list[list[Datum]]:
    """Pack the samples and split them, in order, into as few parts as possible.

    Raises: CallerError: a sample is invalid or too large for one message.
    """
    packed = [pack_datum(datum, f"batch[{i}]") for i, datum in enumerate(batch)]
    return _split(packed, _datum_bytes, limit_bytes, "batch")


def split_prompts(
    prompts: Iterable[Prompt],
    sampling: SamplingParams,
    num_samples: int,
    limit_bytes: int = MAX_PART_BYTES,
    *,
    prompt_logprobs: bool = False,
    prompt_top_logprobs: int = 0,
) -> list[list[Prompt]]:
    """Pack the prompts and split them, in order, so that each part and its result fit in a message.

    Raises: CallerError: a prompt is invalid, or its samples are too large for one message.
    """
    packed = [pack_prompt(prompt, f"prompts[{i}]") for i, prompt in enumerate(prompts)]
    token_bytes = (1 + sampling.top_logprobs) * _SAMPLED_TOKEN_BYTES
    sample_bytes = sampling.max_tokens * token_bytes + _ITEM_OVERHEAD_BYTES

    def size(prompt: Prompt) -> int:
        prompt_bytes = length(prompt.tokens) * 4 + _ITEM_OVERHEAD_BYTES
        scored_bytes = (
            prompt_bytes + length(prompt.tokens) * prompt_top_logprobs * _SAMPLED_TOKEN_BYTES
        )
        # Both the request and its result must fit in one message.
        return max(
            prompt_bytes, num_samples * sample_bytes + (scored_bytes if prompt_logprobs else 0)
        )

    return _split(packed, size, limit_bytes, "prompts")


def _split(
    items: list[Item], size: Callable[[Item], int], limit_bytes: int, field: str
) -> list[list[Item]]:
    parts: list[list[Item]] = [[]]
    room = limit_bytes
    for i, item in enumerate(items):
        num_bytes = size(item)
        # Samples cannot be split, so one that exceeds a message can never be sent.
        if num_bytes > limit_bytes:
            raise CallerError(
                f"one sample takes {num_bytes} bytes, but a message holds at most {limit_bytes}",
                code=Code.INVALID_ARGUMENT,
                field=f"{field}[{i}]",
                remedy="shorten it, or request fewer samples per prompt",
            )
        if num_bytes > room:
            parts.append([])
            room = limit_bytes
        parts[-1].append(item)
        room -= num_bytes
    return parts


def _check_class(kind: type[Prompt | Datum], value: object, field: str) -> None:
    if not isinstance(value, kind):
        raise CallerError(
            f"expected {kind.__name__}, got {type(value).__name__}",
            field=field,
            remedy=f"pass {kind.__name__}(tokens, …)",
        )


def _datum_bytes(datum: Datum) -> int:
    arrays = [datum.tokens, datum.targets, datum.weights, datum.logprobs, datum.advantages]
    return _ITEM_OVERHEAD_BYTES + sum(4 * length(a) for a in arrays if a is not None)


def _int32s(values: Int32s, field: str) -> bytes:
    if isinstance(values, bytes):
        return values
    try:
        return pack_int32s(values)
    except (TypeError, OverflowError) as error:
        raise CallerError(
            f"expected int32 values: {error}", field=field, remedy="pass token ids"
        ) from None


def _float32s(values: Float32s | None, field: str) -> bytes | None:
    if values is None or isinstance(values, bytes):
        return values
    try:
        return pack_float32s(values)
    except (TypeError, OverflowError) as error:
        raise CallerError(
            f"expected float32 values: {error}", field=field, remedy="pass numbers"
        ) from None
