"""When a continuation ends: the model's own end tokens, the caller's, and strings in the text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from phaseloom.common.contract.arrays import float32s, int32s
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.operations import (
    Datum,
    Forward,
    Generate,
    Prompt,
    SamplingParams,
    Sequence,
)
from phaseloom.common.contract.specs import DeploymentSpec, ModelSpec
from phaseloom.worker.backends.base import Backend
from tests.support.tinymodel import VOCAB, config
from tests.unit.worker.backends.models import generate, running, spec

PROMPTS = [Prompt([3, 1, 4], seed) for seed in range(4)]
TEXTS = ["ab", "b", "", "ca", "a", "c"] + [chr(ord("d") + i) for i in range(VOCAB - 6)]


def _spec(texts: list[str], **changes: Any) -> DeploymentSpec:
    model = ModelSpec(config(**changes), init_seed=7, token_texts=texts)
    return DeploymentSpec("sampler", "rollout", "sampler", model)


def _samples(backend: Backend, sampling: SamplingParams) -> list[Sequence]:
    (result,) = generate(backend, Generate(PROMPTS, sampling, 8))
    return [sample for samples in result.sequences for sample in samples]


def _first_end(tokens: list[int], ends: set[int]) -> int:
    """How many tokens there are up to the first end."""
    return next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))


@pytest.mark.parametrize(("eos", "ends"), [(5, {5}), ([5, 7], {5, 7}), ([7, 999], {7})])
def test_model_ends_a_sequence_unless_its_end_is_ignored(
    eos: int | list[int], ends: set[int]
) -> None:
    with running(_spec([], eos_token_id=eos)) as (backend, _):
        whole = _samples(backend, SamplingParams(20, ignore_eos=True))
        ended = _samples(backend, SamplingParams(20))
        stopped = _samples(backend, SamplingParams(20, stop_token_ids=[11]))
    assert {sample.stop_reason for sample in whole} == {"length"}
    for actual, also in ((ended, set[int]()), (stopped, {11})):
        reasons = set()
        for sample, full in zip(actual, whole, strict=True):
            tokens = int32s(full.tokens)
            count = _first_end(tokens, ends | also)
            assert int32s(sample.tokens) == tokens[:count]
            assert sample.stop_reason == ("stop" if tokens[count - 1] in ends | also else "length")
            reasons.add(sample.stop_reason)
        assert reasons == {"stop", "length"}


def test_model_without_an_end_goes_on_to_the_limit() -> None:
    with running(spec("sampler")) as (backend, _):
        assert {s.stop_reason for s in _samples(backend, SamplingParams(9))} == {"length"}


@pytest.mark.parametrize("stops", [["abc"], ["b"], ["ca", "ij"], ["k", "aa"]])
def test_sequence_ends_with_the_tokens_that_complete_a_string(stops: list[str]) -> None:
    """Texts of several letters, of one, of none: a string may begin and end within a token."""
    with running(_spec(TEXTS)) as (backend, _):
        whole = _samples(backend, SamplingParams(40))
        ended = _samples(backend, SamplingParams(40, stop_strings=stops))
    reasons = set()
    for sample, full in zip(ended, whole, strict=True):
        tokens, text, count = int32s(full.tokens), "", 0
        for token in tokens:
            text += TEXTS[token]
            count += 1
            if any(stop in text for stop in stops):
                break
        assert int32s(sample.tokens) == tokens[:count]
        assert len(float32s(sample.logprobs)) == count
        found = any(stop in text for stop in stops)
        assert sample.stop_reason == ("stop" if found else "length")
        reasons.add(sample.stop_reason)
    assert "stop" in reasons


def test_string_of_the_prompt_alone_does_not_count() -> None:
    with running(_spec(TEXTS)) as (backend, _):
        ending_in_a = [Prompt([4], seed) for seed in range(16)]
        sampling = SamplingParams(1, stop_strings=["ab", "aa", "ac"])
        (result,) = generate(backend, Generate(ending_in_a, sampling))
    for (sample,) in result.sequences:
        (token,) = int32s(sample.tokens)
        assert sample.stop_reason == ("stop" if token == 0 else "length")


def test_string_of_one_request_does_not_end_another() -> None:
    with running(_spec(TEXTS)) as (backend, _):
        plain = Generate(PROMPTS, SamplingParams(30), 4)
        stopping = Generate(PROMPTS, SamplingParams(30, stop_strings=["b", "c"]), 4)
        together = generate(backend, plain, stopping)
        for args, result in zip((plain, stopping), together, strict=True):
            (alone,) = generate(backend, args)
            for own, other in zip(result.sequences, alone.sequences, strict=True):
                assert [s.tokens for s in own] == [s.tokens for s in other]


def test_strings_are_refused_without_the_texts_to_find_them_in() -> None:
    with running(spec("sampler")) as (backend, _), pytest.raises(CallerError) as raised:
        backend.check_generate(Generate(PROMPTS, SamplingParams(1, stop_strings=["a"])))
    assert raised.value.info.code is Code.FAILED_PRECONDITION
    assert raised.value.info.field == "args.sampling.stop_strings"


def test_empty_string_is_refused() -> None:
    with running(_spec(TEXTS)) as (backend, _), pytest.raises(CallerError) as raised:
        backend.check_generate(Generate(PROMPTS, SamplingParams(1, stop_strings=["a", ""])))
    assert raised.value.info.field == "args.sampling.stop_strings"


@pytest.mark.parametrize("backend", ["sampler", "fsdp"])
def test_texts_that_are_not_one_a_token_are_refused(backend: str) -> None:
    short = replace(_spec(TEXTS[:-1]), backend=backend)
    with pytest.raises(CallerError) as raised, running(short):
        pass
    assert raised.value.info.field == "model.token_texts"


def test_prompt_logprobs_are_those_that_forward_gives() -> None:
    """Bit for bit; the first token has none, and a prompt of one token only that."""
    prompts = [Prompt([3, 1, 4, 1, 5]), Prompt([2]), Prompt([3, 1, 9])]
    with running(spec("sampler")) as (backend, _):
        plain, asked = generate(
            backend,
            Generate(prompts, SamplingParams(3), 2),
            Generate(prompts, SamplingParams(3, 0.5), 2, prompt_logprobs=True),
        )
        tokens = [int32s(prompt.tokens) for prompt in prompts]
        data = [Datum(tokens_T[:-1], tokens_T[1:]) for tokens_T in tokens if len(tokens_T) > 1]
        first, last = backend.forward(Forward(data)).logprobs
        (only,) = generate(backend, Generate(prompts[1:2], SamplingParams(1), 1, True))
    assert plain.prompt_logprobs == []
    expected = [[0.0, *float32s(first)], [0.0], [0.0, *float32s(last)]]
    assert [float32s(lp) for lp in asked.prompt_logprobs] == expected
    assert [float32s(lp) for lp in only.prompt_logprobs] == [[0.0]]


def test_likeliest_tokens_of_prompts_are_the_models() -> None:
    """Every token's log-probability is what `forward` gives for it as a target."""
    prompts, num_top = [Prompt([3, 1, 4, 1, 5]), Prompt([2]), Prompt([3, 1, 9])], 4
    with running(spec("sampler")) as (backend, _):
        plain, asked = generate(
            backend,
            Generate(prompts, SamplingParams(2), 2, prompt_logprobs=True),
            Generate(prompts, SamplingParams(2), 2, True, num_top),
        )
        assert asked.prompt_logprobs == plain.prompt_logprobs
        assert plain.prompt_top_tokens == plain.prompt_top_logprobs == []
        for prompt, ids, lps in zip(
            prompts, asked.prompt_top_tokens, asked.prompt_top_logprobs, strict=True
        ):
            tokens = int32s(prompt.tokens)
            ids_TK = np.array(int32s(ids)).reshape(len(tokens), num_top)
            lp_TK = np.array(float32s(lps), dtype=np.float32).reshape(len(tokens), num_top)
            assert not ids_TK[0].any()
            assert not lp_TK[0].any()
            for t in range(1, len(tokens)):
                data = [Datum(tokens[:t], [*tokens[1:t], token]) for token in range(VOCAB)]
                lp_V = [float32s(lp)[-1] for lp in backend.forward(Forward(data)).logprobs]
                likeliest = sorted(range(VOCAB), key=lambda token: -lp_V[token])[:num_top]
                assert list(ids_TK[t]) == likeliest
                assert list(lp_TK[t]) == pytest.approx([lp_V[i] for i in likeliest], abs=1e-6)
        (everything,) = generate(backend, Generate(prompts[:1], SamplingParams(1), 1, True, 20))
    assert len(int32s(everything.prompt_top_tokens[0])) == 5 * min(20, VOCAB)
