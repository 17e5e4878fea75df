"""Sequences longer than `max_position_embeddings`, where rotary positions are extended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from phaseloom.common.contract.arrays import float32s, int32s
from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.operations import (
    Datum,
    Forward,
    ForwardBackward,
    Generate,
    Loss,
    Prompt,
    SamplingParams,
)
from phaseloom.common.contract.specs import ModelSpec
from tests.support.saved import save
from tests.support.tinymodel import VOCAB, config
from tests.unit.worker.backends.models import generate, running, spec
from tests.unit.worker.backends.test_fsdp import plain_logprobs

CONTEXT = 64
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0},
}
BEGINNING = [(7 * number) % VOCAB for number in range(18)]
SAMPLES = [[*BEGINNING, *range(length)] for length in (2, 3, 9, 12, 27)] + [[5, 6, 7]]
PROMPTS = [Prompt(tokens) for tokens in ([3, 1, 4], BEGINNING, SAMPLES[3])]
NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def _model(rope: str) -> ModelSpec:
    values = {"initializer_range": 0.3, "max_position_embeddings": 16, **NO_TOKENS}
    parameters = {"rope_theta": 10_000.0, **ROPES[rope]}
    return ModelSpec(config("llama", rope_parameters=parameters, **values), init_seed=7)


def _opened(directory: Path) -> Any:
    """A new one each time: the frequencies of dynamic positions depend on earlier calls."""
    factory: Any = AutoModelForCausalLM
    return factory.from_pretrained(directory).eval()


@pytest.mark.parametrize("rope", ROPES)
def test_long_sequences_are_scored_as_transformers_scores_each_alone(
    rope: str, tmp_path: Path
) -> None:
    data = [Datum(tokens[:-1], tokens[1:]) for tokens in SAMPLES]
    with running(replace(spec(), model=_model(rope))) as (backend, heap):
        for _ in range(2):  # the first call leaves nothing behind
            scored = backend.forward(Forward(data)).logprobs
        trained = [replace(d, weights=[1.0] * len(int32s(d.tokens))) for d in data]
        args = ForwardBackward(trained, Loss.CROSS_ENTROPY)
        loss = backend.forward_backward(args).metrics["loss:sum"]
        save(backend, heap, tmp_path)
        too_long = Datum([1] * (CONTEXT + 1), [1] * (CONTEXT + 1))
        with pytest.raises(CallerError, match=f"exceed the {CONTEXT} positions"):
            backend.check_forward(Forward([too_long]))
    with torch.no_grad():
        expected = [plain_logprobs(_opened(tmp_path), datum) for datum in data]
    for actual, values in zip(scored, expected, strict=True):
        torch.testing.assert_close(torch.tensor(float32s(actual)), values, rtol=1e-4, atol=1e-4)
    assert loss == pytest.approx(-sum(values.sum().item() for values in expected), rel=1e-4)


@pytest.mark.parametrize("rope", ROPES)
def test_long_prompts_are_continued_as_transformers_continues_each_alone(
    rope: str, tmp_path: Path
) -> None:
    sampler = replace(spec("sampler"), model=_model(rope))
    if rope == "dynamic":
        with (
            pytest.raises(CallerError, match="prefix cache"),
            running(replace(sampler, prefix_cache=True)),
        ):
            pass
    with running(sampler) as (backend, heap):
        (result,) = generate(backend, Generate(PROMPTS, SamplingParams(20, 0.0), 1))
        save(backend, heap, tmp_path)
    for prompt, (sample,) in zip(PROMPTS, result.sequences, strict=True):
        ids = torch.tensor([int32s(prompt.tokens)])
        generated = _opened(tmp_path).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=20,
            do_sample=False,
            pad_token_id=0,
        )
        assert int32s(sample.tokens) == generated[0, ids.shape[1] :].tolist()
