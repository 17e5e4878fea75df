"""Numbers that are NaN or infinite end only what they belong to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from msgspec.structs import replace

from phaseloom.common.contract.arrays import int32s
from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.operations import (
    Forward,
    ForwardBackward,
    Generate,
    GenerateResult,
    Loss,
    OptimStep,
    Prompt,
    SamplingParams,
)
from phaseloom.worker.backends.base import NONFINITE, Backend
from phaseloom.worker.backends.model import HeapTensors
from phaseloom.worker.rank.calls import check_numbers
from phaseloom.worker.state.heap import Heap
from tests.support.node import STEP
from tests.support.tinymodel import VOCAB
from tests.unit.worker.backends.models import batch, generate, running, spec

HEALTHY = [
    Generate([Prompt([3, 1, 4], 1)], SamplingParams(9, 1.0, ignore_eos=True), 3),
    Generate([Prompt([6, 5], 2)], SamplingParams(20, 0.0, ignore_eos=True)),
    Generate([Prompt([2], 3)], SamplingParams(12, 0.8, top_k=5, ignore_eos=True), 2),
]


@pytest.fixture
def sampler() -> Iterator[tuple[Backend, Heap]]:
    with running(spec("sampler", tie_word_embeddings=False)) as built:
        yield built


def _tokens(result: GenerateResult) -> list[list[int]]:
    return [int32s(sample.tokens) for samples in result.sequences for sample in samples]


def _poison(built: tuple[Backend, Heap], name: str, row: int, value: float) -> None:
    backend, heap = built
    slot = next(slot for slot in backend.slots if slot.name == name)
    HeapTensors(heap).view(slot)[row] = value


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"temperature": 0.0}, {"min_p": 0.1}])
def test_row_of_nan_ends_and_leaves_the_others_as_they_were(
    sampler: tuple[Backend, Heap], value: float, params: dict[str, float]
) -> None:
    backend, _ = sampler
    alone = generate(backend, *HEALTHY)
    drawn = {token for result in alone for tokens in _tokens(result) for token in tokens}
    prompts = {3, 1, 4, 6, 5, 2}
    bad = next(token for token in range(VOCAB) if token not in drawn | prompts)
    _poison(sampler, "model.embed_tokens.weight", bad, value)
    sampling = replace(SamplingParams(9), **params)
    guilty = Generate([Prompt([bad], 4), Prompt([1, 2], 5)], sampling)
    result, *others = generate(backend, guilty, *HEALTHY)
    assert [_tokens(other) for other in others] == [_tokens(one) for one in alone]
    (ended,), _ = result.sequences
    assert (ended.stop_reason, ended.tokens) == (NONFINITE, b"")
    with pytest.raises(CallerError, match="NaN or infinite"):
        check_numbers(result)
    for other in others:
        check_numbers(other)


def test_logprobs_of_nan_are_refused_and_minus_infinity_is_not(
    sampler: tuple[Backend, Heap],
) -> None:
    backend, _ = sampler
    check_numbers(backend.forward(Forward(batch())))
    _poison(sampler, "lm_head.weight", 0, torch.nan)
    with pytest.raises(CallerError, match="log-probabilities are NaN or infinite"):
        check_numbers(backend.forward(Forward(batch())))
    check_numbers(GenerateResult([], [[0.0, -torch.inf]]))


def test_tiny_temperature_is_greedy_and_a_huge_one_is_uniform(
    sampler: tuple[Backend, Heap],
) -> None:
    backend, _ = sampler
    greedy = Generate([Prompt([3, 1, 4], 1)], SamplingParams(9, 0.0, ignore_eos=True))
    (expected,) = generate(backend, greedy)
    for temperature in (1e-300, 1e-38, 5e-324, 9e-6):
        for changes in ({}, {"top_k": 5}, {"top_p": 0.5}, {"frequency_penalty": 0.0}):
            sampling = replace(greedy.sampling, temperature=temperature, **changes)
            (result,) = generate(backend, replace(greedy, sampling=sampling))
            assert _tokens(result) == _tokens(expected)
    excluded = [[token] for token in range(1, VOCAB)]
    hot = SamplingParams(3, 1.7e308, bad_words=excluded, ignore_eos=True)
    (result,) = generate(backend, replace(greedy, sampling=hot))
    assert _tokens(result) == [[0, 0, 0]]


def test_step_names_the_weights_that_it_made_infinite() -> None:
    with running(spec("fsdp")) as (policy, _):
        policy.forward_backward(ForwardBackward(batch(loss=Loss.CROSS_ENTROPY), Loss.CROSS_ENTROPY))
        assert policy.optim_step(OptimStep(STEP.adam)).nonfinite_weights == []
        assert policy.nonfinite_weights() == []
        policy.forward_backward(ForwardBackward(batch(loss=Loss.CROSS_ENTROPY), Loss.CROSS_ENTROPY))
        step = OptimStep(replace(STEP.adam, learning_rate=3e38, weight_decay=3.0))
        result = policy.optim_step(step)
        assert "model.norm.weight" in policy.nonfinite_weights()
        assert result.nonfinite_weights == policy.nonfinite_weights()[:16]


def test_large_finite_weights_are_no_fault_even_where_their_sum_overflows() -> None:
    with running(spec("fsdp")) as built:
        _poison(built, "model.embed_tokens.weight", 0, 3e38)
        assert built[0].nonfinite_weights() == []
