"""Generation: right log-probabilities, draws that depend on the request alone, clear refusals."""

from __future__ import annotations

import collections
import gc
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from phaseloom.common.contract.arrays import float32s, int32s
from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.operations import (
    AdamParams,
    Datum,
    Forward,
    ForwardBackward,
    Generate,
    GenerateResult,
    Loss,
    OptimStep,
    Prompt,
    SamplingParams,
)
from phaseloom.worker.backends.base import Backend
from phaseloom.worker.backends.model import build_model
from phaseloom.worker.backends.sampler import backend as sampler_module
from phaseloom.worker.backends.sampler.rows import draw
from phaseloom.worker.state.heap import Heap
from tests.support.tinymodel import VOCAB
from tests.unit.worker.backends.models import batch, generate, running, spec

PROMPTS = [Prompt([3, 1, 4, 1, 5, 9], 1), Prompt([2], 2), Prompt([6, 5, 3], 3)]


@pytest.fixture
def sampler() -> Iterator[tuple[Backend, Heap]]:
    with running(spec("sampler")) as built:
        yield built


def _tokens(result: GenerateResult) -> list[list[list[int]]]:
    return [[int32s(sample.tokens) for sample in samples] for samples in result.sequences]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False},
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
        {"model_type": "qwen2"},
    ],
    ids=["qwen3", "untied", "llama", "qwen2"],
)
def test_generated_logprobs_are_those_of_a_plain_forward(changes: dict[str, Any]) -> None:
    """Incremental decoding of a padded batch against `transformers` on each whole sequence."""
    deployment = spec("sampler", **changes)
    model = build_model(deployment.model)
    with running(deployment) as (backend, _):
        result = generate(backend, Generate(PROMPTS, SamplingParams(9, 1.0, [0, 1]), 6))[0]
    for prompt, samples in zip(PROMPTS, result.sequences, strict=True):
        for sample in samples:
            answer, start = int32s(sample.tokens), len(prompt.tokens) - 1
            tokens = int32s(prompt.tokens) + answer
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([tokens[:-1]])).logits[0, start:]
            expected = torch.log_softmax(logits, -1).gather(-1, torch.tensor(answer)[:, None])
            actual = torch.tensor(float32s(sample.logprobs))
            torch.testing.assert_close(actual, expected[:, 0], rtol=1e-4, atol=1e-5)


DEEP = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "changes",
    [
        {"initializer_range": 0.02},
        {"initializer_range": 0.02, **DEEP},
        {"initializer_range": 0.1, **DEEP},
        {"initializer_range": 0.5, **DEEP, "model_type": "llama"},
        {"initializer_range": 1.0},
    ],
    ids=["as drawn", "as drawn, deep", "deep", "large logits, deep", "large logits"],
)
def test_generated_logprobs_are_the_trainers(changes: dict[str, Any], dtype: str) -> None:
    """Equal but for sums in the layers, in the weights' dtype, where a step of decoding adds up in
    another order than a whole sequence. A softmax in float64 on both sides changes nothing of
    that.

    The bounds are those of docs/gateway.md: units in the last place of the largest logit, and 1e-6
    for float32 weights as they are drawn, whose logits are small.
    """
    changes = {**changes, "dtype": dtype}
    with running(spec("sampler", **changes)) as (sampler, _), running(spec(**changes)) as (fsdp, _):
        policy: Any = fsdp
        (result,) = generate(sampler, Generate(PROMPTS, SamplingParams(24), 4))
        worst, largest = 0.0, 0.0
        for prompt, samples in zip(PROMPTS, result.sequences, strict=True):
            for sample in samples:
                tokens = [*int32s(prompt.tokens), *int32s(sample.tokens)]
                scored = policy.forward(Forward([Datum(tokens[:-1], tokens[1:])]))
                own = float32s(scored.logprobs[0])[len(prompt.tokens) - 1 :]
                told = float32s(sample.logprobs)
                worst = max(worst, *(abs(x - y) for x, y in zip(own, told, strict=True)))
                largest = max(largest, _largest_logit(changes, tokens[:-1]))
    unit = float(np.spacing(np.float32(largest)))
    if dtype == "float32":
        assert worst <= 32 * unit
        assert worst <= 1e-6 or changes["initializer_range"] > 0.02
    else:
        assert 0.0 < worst <= 4 * unit * 2**16


def _largest_logit(changes: dict[str, Any], tokens: list[int]) -> float:
    model = build_model(spec(**changes).model)
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([tokens])).logits.abs().max())


def test_keys_and_values_are_held_for_the_rows_that_still_decode(
    sampler: tuple[Backend, Heap],
) -> None:
    """There is no pool that could be too large for a tail, and nothing is left of it afterwards."""
    backend: Any = sampler[0]
    before_bytes = _cached_bytes()
    held_bytes: list[int] = []
    backend.at_boundary = lambda: held_bytes.append(_cached_bytes() - before_bytes)
    short, long = SamplingParams(4, 1.0), SamplingParams(20, 1.0)
    generate(backend, Generate(PROMPTS, short, 5), Generate(PROMPTS[:1], long))
    assert held_bytes[0] > 0
    assert held_bytes[-2] <= held_bytes[0] / 8
    assert _cached_bytes() == before_bytes


def _cached_bytes() -> int:
    """The bytes of all tensors of four dimensions: keys and values are (B, K, S, D)."""
    gc.collect()
    found = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.dim() == 4]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in found}
    return sum(storage.nbytes() for storage in storages.values())


def test_greedy_generation_is_what_transformers_generates(
    sampler: tuple[Backend, Heap],
) -> None:
    model: Any = build_model(spec("sampler").model)
    (greedy,) = generate(sampler[0], Generate(PROMPTS, SamplingParams(12, 0.0), 2))
    (first, *_), *_ = _tokens(greedy)
    ids = torch.tensor([int32s(PROMPTS[0].tokens)])
    expected = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert first == expected[0, ids.shape[1] :].tolist()


def test_samples_depend_on_their_prompt_and_seed_only(sampler: tuple[Backend, Heap]) -> None:
    backend, _ = sampler
    together = _tokens(generate(backend, Generate(PROMPTS, SamplingParams(8, 1.0, [0]), 5))[0])
    assert together == _tokens(
        generate(backend, Generate(PROMPTS, SamplingParams(8, 1.0, [0]), 5))[0]
    )
    for prompt, expected in zip(PROMPTS, together, strict=True):
        alone = _tokens(generate(backend, Generate([prompt], SamplingParams(8, 1.0, [0]), 3))[0])
        assert alone == [expected[:3]]
    longer = _tokens(generate(backend, Generate(PROMPTS, SamplingParams(11, 1.0, [0]), 5))[0])
    assert [[s[:8] for s in samples] for samples in longer] == together


def test_samples_differ_between_samples_and_seeds(sampler: tuple[Backend, Heap]) -> None:
    twins = [Prompt([1, 2, 3], 10), Prompt([1, 2, 3], 11)]
    result = _tokens(generate(sampler[0], Generate(twins, SamplingParams(12), 4))[0])
    assert len({tuple(sample) for samples in result for sample in samples}) == 8


def test_waves_give_the_tokens_of_one_batch(
    sampler: tuple[Backend, Heap], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = Generate(PROMPTS, SamplingParams(8, 1.0, [0]), 5)
    whole = _tokens(generate(sampler[0], args)[0])
    monkeypatch.setattr(sampler_module, "WAVE_TOKENS", 1)
    assert _tokens(generate(sampler[0], args)[0]) == whole


def test_sequences_end_with_the_stop_token_or_at_the_limit(sampler: tuple[Backend, Heap]) -> None:
    stops, limit = [0, 5, 7], 10
    result = generate(sampler[0], Generate(PROMPTS, SamplingParams(limit, 1.0, stops), 20))[0]
    reasons = collections.Counter()  # type: collections.Counter[str]
    for sample in (sample for samples in result.sequences for sample in samples):
        tokens = int32s(sample.tokens)
        assert len(tokens) == len(float32s(sample.logprobs))
        assert not set(tokens[:-1]) & set(stops)
        assert sample.stop_reason == ("stop" if tokens[-1] in stops else "length")
        assert sample.stop_reason == "stop" or len(tokens) == limit
        reasons[sample.stop_reason] += 1
    assert set(reasons) == {"stop", "length"}


def test_draw_follows_the_distribution_and_never_draws_the_impossible() -> None:
    count = 4000
    logits = torch.tensor([[math.log(0.5), -torch.inf, math.log(0.2), math.log(0.3)]])
    draws = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens, logprobs = draw(logits.expand(count, -1), draws, 1.0)
    assert torch.bincount(tokens, minlength=4).tolist() == [2000, 0, 800, 1200]
    assert logprobs[0].item() == pytest.approx(math.log(0.5))
    edges = torch.tensor([0.0, 1 - 2.0**-32], dtype=torch.float64)
    assert draw(logits.expand(2, -1), edges, 1.0)[0].tolist() == [0, 3]


def test_draw_at_another_temperature_gives_logprobs_at_temperature_one() -> None:
    logits = torch.log(torch.tensor([[0.64, 0.36]])).expand(1000, -1)
    draws = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    tokens, logprobs = draw(logits, draws, 2.0)
    # sqrt(0.64) : sqrt(0.36) = 0.8 : 0.6
    assert torch.bincount(tokens).tolist() == [571, 429]
    assert logprobs[0].item() == pytest.approx(math.log(0.64), rel=1e-5)
    assert set(draw(logits, draws, 0.0)[0].tolist()) == {0}


def test_generation_is_bit_equal_when_memory_is_lost_between_calls(
    sampler: tuple[Backend, Heap],
) -> None:
    backend, heap = sampler
    args = Generate(PROMPTS, SamplingParams(8, 1.0, [0]), 5)
    before = generate(backend, args)[0], backend.forward(Forward(batch()))
    content = bytes(heap.buffer)
    heap.release()
    heap.buffer[:] = content
    backend.weights_changed()
    assert (generate(backend, args)[0], backend.forward(Forward(batch()))) == before


def test_generation_uses_weights_brought_into_the_heap(sampler: tuple[Backend, Heap]) -> None:
    backend, heap = sampler
    with running(spec("fsdp")) as (policy, trained):
        policy.forward_backward(ForwardBackward(batch(loss=Loss.CROSS_ENTROPY), Loss.CROSS_ENTROPY))
        policy.optim_step(OptimStep(AdamParams(0.1)))
        heap.buffer[:] = trained.buffer[: heap.num_bytes]
        backend.weights_changed()
        assert backend.weights_sha256() == policy.weights_sha256()
        assert backend.forward(Forward(batch())) == policy.forward(Forward(batch()))
    (samples,) = generate(backend, Generate(PROMPTS[:1], SamplingParams(4)))[0].sequences
    tokens = int32s(PROMPTS[0].tokens) + int32s(samples[0].tokens)
    (scored,) = backend.forward(Forward([Datum(tokens[:-1], tokens[1:])])).logprobs
    assert float32s(scored)[-4:] == pytest.approx(float32s(samples[0].logprobs), abs=1e-4)


BAD = {
    "no prompts": (Generate([], SamplingParams(1)), "args.prompts"),
    "empty prompt": (Generate([*PROMPTS, Prompt([])], SamplingParams(1)), "args.prompts[3].tokens"),
    "token": (Generate([Prompt([VOCAB])], SamplingParams(1)), "args.prompts[0].tokens"),
    "too long": (Generate([Prompt([1] * 60)], SamplingParams(5)), "args.prompts[0].tokens"),
    "no samples": (Generate(PROMPTS, SamplingParams(1), 0), "args.num_samples"),
    "no new tokens": (Generate(PROMPTS, SamplingParams(0)), "args.sampling.max_tokens"),
    "temperature": (Generate(PROMPTS, SamplingParams(1, -1.0)), "args.sampling.temperature"),
    "stop": (Generate(PROMPTS, SamplingParams(1, 1.0, [VOCAB])), "args.sampling.stop_token_ids"),
}


@pytest.mark.parametrize("case", BAD)
def test_generate_names_the_field_at_fault(sampler: tuple[Backend, Heap], case: str) -> None:
    args, field = BAD[case]
    with pytest.raises(CallerError) as raised:
        generate(sampler[0], args)
    assert raised.value.info.field == field


def test_sample_longer_than_the_models_positions_is_refused(sampler: tuple[Backend, Heap]) -> None:
    sampler[0].check_forward(Forward([Datum([1] * 64, [2] * 64)]))
    with pytest.raises(CallerError, match="positions of the model") as raised:
        sampler[0].check_forward(Forward([Datum([1] * 65, [2] * 65)]))
    assert raised.value.info.field == "args.batch[0].tokens"


def test_sampler_refuses_to_train(sampler: tuple[Backend, Heap]) -> None:
    args = ForwardBackward(batch(), Loss.PPO)
    for call in (
        lambda: sampler[0].check_forward_backward(args),
        lambda: sampler[0].forward_backward(args),
        lambda: sampler[0].optim_step(OptimStep(AdamParams(1.0))),
    ):
        with pytest.raises(CallerError, match="fsdp"):
            call()
