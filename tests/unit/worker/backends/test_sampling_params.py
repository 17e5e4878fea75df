"""What shapes a draw, against the processors of `transformers`, which mean the same as vLLM's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from phaseloom.common.contract.arrays import float32s, int32s
from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.operations import Generate, Prompt, SamplingParams, Sequence
from phaseloom.worker.backends.base import Backend
from phaseloom.worker.backends.model import build_model
from phaseloom.worker.backends.rng import uniforms
from tests.support.tinymodel import VOCAB
from tests.unit.worker.backends.models import generate, running, spec

SPEC = spec("sampler", initializer_range=0.3)
PROMPTS = [Prompt([3, 1, 4, 1, 5, 9], 1), Prompt([2], 2), Prompt([6, 5, 3, 5], 3)]
NUM_SAMPLES, LENGTH = 4, 12
PLAIN = SamplingParams(LENGTH)
CASES: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 3},
    "more than the vocabulary": {"top_k": 1000},
    "top_p": {"top_p": 0.6},
    "least top_p": {"top_p": 1e-9},
    "min_p": {"min_p": 0.2, "temperature": 1.5},
    "repetition": {"repetition_penalty": 1.8},
    "repetition greedy": {"repetition_penalty": 1.8, "temperature": 0.0},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9, "presence_penalty": -0.5},
    "bad words": {"bad_words": [[7], [3, 4], [8, 1, 2], [5, 5]]},
    "bad words greedy": {"bad_words": [[i, i] for i in range(VOCAB - 1)], "temperature": 0.0},
    "all": {
        "temperature": 0.8,
        "top_k": 12,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "bad_words": [[7], [3, 4]],
    },
}


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    with running(SPEC) as (built, _):
        yield built


@pytest.fixture(scope="module")
def model() -> Any:
    return build_model(SPEC.model)


def _next(model: Any, params: SamplingParams, prompt: list[int], answer: list[int]) -> Any:
    """The shaped logits (1, V) of the next token."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[:, -1].float()
    # These look at the answer alone.
    outputs = torch.tensor([answer], dtype=torch.int64)
    for word in params.bad_words:
        if len(word) <= len(answer) + 1:
            logits = NoBadWordsLogitsProcessor([word])(outputs, logits)
    seen: Any = torch.tensor([prompt + answer])
    logits = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(seen, logits)
    counts = torch.bincount(outputs[0], minlength=VOCAB)
    logits = logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    if params.temperature == 0:
        return logits
    logits = logits / params.temperature
    if params.min_p:
        logits = MinPLogitsWarper(params.min_p)(seen, logits)
    if params.top_k:
        logits = TopKLogitsWarper(params.top_k)(seen, logits)
    return TopPLogitsWarper(params.top_p)(seen, logits) if params.top_p < 1 else logits


def _expected(model: Any, params: SamplingParams, prompt: Prompt) -> list[list[int]]:
    draws = uniforms([prompt.seed], NUM_SAMPLES, LENGTH)[0]
    samples = []
    for sample in range(NUM_SAMPLES):
        answer: list[int] = []
        for position in range(LENGTH):
            logits = _next(model, params, int32s(prompt.tokens), answer)[0]
            if params.temperature == 0:
                answer.append(int(logits.argmax()))
                continue
            cdf = np.cumsum(torch.softmax(logits, -1).double().numpy())
            answer.append(int(np.searchsorted(cdf, draws[sample, position] * cdf[-1], "right")))
        samples.append(answer)
    return samples


def _sequences(backend: Backend, *asked: SamplingParams) -> list[list[list[Sequence]]]:
    results = generate(backend, *[Generate(PROMPTS, each, NUM_SAMPLES) for each in asked])
    return [result.sequences for result in results]


@pytest.mark.parametrize("case", CASES)
def test_draws_are_from_the_distribution_that_transformers_makes(
    backend: Backend, model: Any, case: str
) -> None:
    params = replace(PLAIN, **CASES[case])
    (sequences,) = _sequences(backend, params)
    (plain,) = _sequences(backend, replace(PLAIN, temperature=params.temperature))
    assert case == "more than the vocabulary" or sequences != plain
    for prompt, samples in zip(PROMPTS, sequences, strict=True):
        assert [int32s(s.tokens) for s in samples] == _expected(model, params, prompt)


def test_logprobs_are_the_models_own_whatever_shapes_the_draw(backend: Backend, model: Any) -> None:
    params = replace(PLAIN, **CASES["all"], top_logprobs=5)
    (sequences,) = _sequences(backend, params)
    for prompt, samples in zip(PROMPTS, sequences, strict=True):
        for sample in samples:
            answer, start = int32s(sample.tokens), len(prompt.tokens) - 1
            tokens = torch.tensor([int32s(prompt.tokens) + answer])
            with torch.no_grad():
                logits = model(input_ids=tokens[:, :-1]).logits[0, start:]
            lp_TV = torch.log_softmax(logits, -1)
            expected_T = lp_TV.gather(-1, torch.tensor(answer)[:, None])[:, 0]
            actual_T = torch.tensor(float32s(sample.logprobs))
            torch.testing.assert_close(actual_T, expected_T, rtol=1e-4, atol=1e-4)
            top = lp_TV.topk(5, dim=-1)
            assert int32s(sample.top_tokens) == top.indices.flatten().tolist()
            actual = torch.tensor(float32s(sample.top_logprobs))
            torch.testing.assert_close(actual, top.values.flatten(), rtol=1e-4, atol=1e-4)


def test_requests_side_by_side_get_what_each_gets_alone(backend: Backend) -> None:
    """Plain ones, two shaped in different ways, and different numbers of top log-probabilities."""
    asked = [
        PLAIN,
        replace(PLAIN, **CASES["all"], top_logprobs=2),
        replace(PLAIN, **CASES["frequency"], stop_token_ids=[0, 5, 7]),
        replace(PLAIN, temperature=0.7, top_logprobs=4),
    ]
    together = _sequences(backend, *asked)
    for params, sequences in zip(asked, together, strict=True):
        (alone,) = _sequences(backend, params)
        for one, other in zip(sequences, alone, strict=True):
            assert [s.tokens for s in one] == [s.tokens for s in other]
            assert [s.top_tokens for s in one] == [s.top_tokens for s in other]
            top = [len(int32s(s.top_tokens)) for s in one]
            assert top == [params.top_logprobs * len(int32s(s.tokens)) for s in one]


@pytest.mark.parametrize("case", ["all", "bad words", "frequency", "repetition"])
def test_answer_that_goes_on_is_the_uninterrupted_one(backend: Backend, case: str) -> None:
    params = replace(PLAIN, **CASES[case])
    (whole,) = _sequences(backend, params)
    for prompt, samples in zip(PROMPTS, whole, strict=True):
        for k, sample in enumerate(samples):
            tokens = int32s(sample.tokens)
            for cut in (1, 5):
                begun = int32s(prompt.tokens) + tokens[:cut]
                again = Prompt(begun, prompt.seed, sample=k, num_generated=cut)
                (result,) = generate(backend, Generate([again], params, 1))
                assert int32s(result.sequences[0][0].tokens) == tokens[cut:]


@pytest.mark.parametrize(
    ("bad_words", "field"),
    [
        ([[1], [VOCAB]], "args.sampling.bad_words[1]"),
        ([[0, i] for i in range(VOCAB)], "args.sampling.bad_words"),
    ],
)
def test_bad_words_that_the_model_cannot_do_are_refused(
    backend: Backend, bad_words: list[list[int]], field: str
) -> None:
    with pytest.raises(CallerError) as raised:
        backend.check_generate(Generate(PROMPTS, replace(PLAIN, bad_words=bad_words)))
    assert raised.value.info.field == field
