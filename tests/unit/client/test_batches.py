"""Splitting and packing of batches."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseloom.client.batches import MAX_PART_BYTES, split_batch, split_prompts
from phaseloom.common.contract.arrays import float32s, int32s
from phaseloom.common.contract.codec import encode
from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.operations import Datum, Forward, Operation, Prompt, SamplingParams
from phaseloom.common.contract.streams import MAX_PAYLOAD_BYTES

lengths = st.lists(st.integers(min_value=1, max_value=40), min_size=1, max_size=30)


def datum(num_tokens: int, first: int = 0) -> Datum:
    tokens = list(range(first, first + num_tokens))
    return Datum(tokens, tokens, weights=[0.5] * num_tokens)


@given(lengths, st.integers(min_value=600, max_value=3000))
def test_parts_are_the_batch_in_order_and_each_fits(sizes: list[int], limit: int) -> None:
    batch = [datum(size, first=i) for i, size in enumerate(sizes)]
    parts = split_batch(batch, limit)
    tokens = [int32s(d.tokens) for part in parts for d in part]
    assert tokens == [d.tokens for d in batch]
    assert all(part for part in parts)
    assert all(len(encode(part)) <= limit for part in parts)


@given(lengths)
def test_neighbouring_parts_would_not_fit_together(sizes: list[int]) -> None:
    limit = 1000
    parts = split_batch([datum(size) for size in sizes], limit)
    for left, right in pairwise(parts):
        assert len(split_batch([*left, right[0]], limit)) == 2


def test_largest_part_fits_in_a_message() -> None:
    num_tokens = 1000
    count = MAX_PART_BYTES // (12 * num_tokens)
    (part, *_) = split_batch([datum(num_tokens)] * count)
    payload = encode(Operation("x" * 32, 1, Forward(part)))
    assert MAX_PART_BYTES * 0.9 < len(payload) < MAX_PAYLOAD_BYTES


def test_prompts_are_split_by_the_size_of_what_they_sample() -> None:
    prompts = [Prompt([1], seed=i) for i in range(10)]
    sampling = SamplingParams(max_tokens=117)
    parts = split_prompts(prompts, sampling, num_samples=2, limit_bytes=6000)
    assert [[prompt.seed for prompt in part] for part in parts] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
        [9],
    ]


def test_empty_batch_stays_one_part() -> None:
    """The router refuses it by name; here it must not vanish."""
    assert split_batch([]) == [[]]


def test_packing_keeps_the_values() -> None:
    original = Datum([1, 2**31 - 1], [0, 5], logprobs=[-0.5, 0.0])
    ((packed,),) = split_batch([original])
    assert packed.weights is None
    assert packed.advantages is None
    assert packed.logprobs is not None
    assert int32s(packed.tokens) == original.tokens
    assert float32s(packed.logprobs) == original.logprobs
    assert isinstance(packed.tokens, bytes)


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (Datum([2**31], [1]), "batch[0].tokens"),
        (Datum([1], ["a"]), "batch[0].targets"),  # type: ignore[list-item]
        (Datum([1], [1], advantages=[None]), "batch[0].advantages"),  # type: ignore[list-item]
    ],
)
def test_what_cannot_be_packed_is_named(bad: Datum, field: str) -> None:
    with pytest.raises(CallerError) as error:
        split_batch([bad])
    assert error.value.info.field == field


def test_sample_that_fits_in_no_message_is_named() -> None:
    with pytest.raises(CallerError) as error:
        split_batch([datum(1), datum(100)], limit_bytes=500)
    assert error.value.info.field == "batch[1]"
    with pytest.raises(CallerError) as error:
        split_prompts([Prompt([1])], SamplingParams(1000), num_samples=1, limit_bytes=500)
    assert error.value.info.field == "prompts[0]"


def test_what_is_no_prompt_and_no_sample_is_refused_and_the_place_named() -> None:
    """A list of tokens where a `Prompt` is due is what one tries first."""
    wrong: Any = [[1, 2]]
    with pytest.raises(CallerError, match="Prompt") as refused:
        split_prompts(wrong, SamplingParams(4), num_samples=1)
    assert refused.value.info.field == "prompts[0]"
    with pytest.raises(CallerError, match="Datum") as refused:
        split_batch(wrong)
    assert refused.value.info.field == "batch[0]"
