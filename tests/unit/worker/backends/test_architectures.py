"""Every architecture against `transformers`: training, sampling, and checkpoints that it opens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from phaseloom.common.contract.arrays import float32s, int32s
from phaseloom.common.contract.operations import (
    Forward,
    ForwardBackward,
    Generate,
    GenerateResult,
    Loss,
    Prompt,
    SamplingParams,
)
from phaseloom.common.contract.specs import ModelSpec
from phaseloom.common.contract.state_layout import Role
from phaseloom.worker.backends.capabilities import MODEL_TYPES
from phaseloom.worker.backends.model import build_model
from phaseloom.worker.backends.sampler.decoder import BodyDecoder, LlamaDecoder, decoder_of
from tests.support.looker import Looker
from tests.support.saved import save
from tests.support.tinymodel import config
from tests.unit.worker.backends.models import batch, generate, running, spec, watched
from tests.unit.worker.backends.test_fsdp import plain_logprobs, plain_loss, tensors

pytestmark = pytest.mark.long

# Windows are shorter than the samples, and layers of both kinds where the architecture has both.
BOTH = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
CHANGES: dict[str, dict[str, Any]] = {
    **{model_type: {} for model_type in MODEL_TYPES},
    "cohere2": BOTH,
    "exaone4": BOTH,
    "gemma2": {**BOTH, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.5},
    "gemma3_text": BOTH,
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "ministral": BOTH,
    "mistral": {"sliding_window": 4},
    "olmo3": BOTH,
    "phi3": {"sliding_window": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "qwen2": {**BOTH, "use_sliding_window": True},
    "starcoder2": {"sliding_window": 4},
}
PROMPTS = [Prompt([3, 1, 4, 1, 5, 9], 1), Prompt([2], 2), Prompt([6, 5, 3], 3)]
NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def _model(model_type: str) -> ModelSpec:
    """Weights far from zero, so that every part of the model matters."""
    changes = {"initializer_range": 0.3, **NO_TOKENS, **CHANGES[model_type]}
    return ModelSpec(config(model_type, **changes), init_seed=7)


def _tokens(result: GenerateResult) -> list[list[int]]:
    return [int32s(sample.tokens) for samples in result.sequences for sample in samples]


def _of_files(name: str, parameter: torch.Tensor, found: dict[str, torch.Tensor]) -> torch.Tensor:
    """A parameter's gradient, put together where files have a tensor an expert."""
    prefix, _, last = name.rpartition(".")
    if not prefix.endswith(".experts"):
        return found[f"{name}.grad"]
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[last]
    experts = [
        torch.cat([found[f"{prefix}.{expert}.{part}.weight.grad"] for part in parts])
        for expert in range(parameter.shape[0])
    ]
    return torch.stack(experts)


@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES))
def test_training_is_that_of_transformers(model_type: str, tmp_path: Path) -> None:
    """Loss and gradients, of samples that share prefixes; the checkpoint is the model."""
    plain = build_model(_model(model_type))
    args = ForwardBackward(batch(3, loss=Loss.PPO), Loss.PPO)
    loss = plain_loss(plain, args)
    torch.autograd.backward(loss)
    with running(replace(spec(), model=_model(model_type))) as (backend, heap):
        assert backend.forward_backward(args).metrics["loss:sum"] == pytest.approx(loss.item())
        gradients = tensors(backend, heap, Role.GRADIENT)
        scored = backend.forward(Forward(args.batch)).logprobs
        save(backend, heap, tmp_path)
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None, name
        largest = parameter.grad.abs().max().item()
        assert largest > 0, name
        actual = _of_files(name, parameter, gradients)
        torch.testing.assert_close(actual, parameter.grad, rtol=0, atol=2e-5 * largest)
    # Eager: `transformers`' other kernels leave out the cap of Gemma 2's attention.
    factory: Any = AutoModelForCausalLM
    opened: Any = factory.from_pretrained(tmp_path, attn_implementation="eager")
    with torch.no_grad():
        expected = torch.cat([plain_logprobs(opened.eval(), datum) for datum in args.batch])
    actual = torch.cat([torch.tensor(float32s(each)) for each in scored])
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES))
def test_sampling_is_that_of_transformers(model_type: str) -> None:
    """Greedy tokens, and log-probabilities of drawn ones while finished rows leave the batch; the
    same tokens where they join others."""
    plain: Any = build_model(_model(model_type))
    with running(replace(spec("sampler"), model=_model(model_type))) as (backend, _):
        first = Generate(PROMPTS, SamplingParams(12, 0.0), 1)
        then = Generate(PROMPTS, SamplingParams(9, 1.0, [0, 1, 2]), 6)
        (greedy,) = generate(backend, first)
        (drawn,) = generate(backend, then)
        together = watched(backend, [first], Looker(join_at={9: [then]}))
    for actual, alone in zip(together, (greedy, drawn), strict=True):
        assert actual is not None
        assert _tokens(actual) == _tokens(alone)
    for prompt, (sample,), drawn_samples in zip(
        PROMPTS, greedy.sequences, drawn.sequences, strict=True
    ):
        ids = torch.tensor([int32s(prompt.tokens)])
        generated = plain.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            pad_token_id=0,
        )
        assert int32s(sample.tokens) == generated[0, ids.shape[1] :].tolist()
        for each in drawn_samples:
            answer = int32s(each.tokens)
            tokens = torch.tensor([int32s(prompt.tokens) + answer])
            with torch.no_grad():
                logits_TV = plain(input_ids=tokens[:, :-1]).logits[0, ids.shape[1] - 1 :]
            lp_T = torch.log_softmax(logits_TV, -1).gather(-1, torch.tensor(answer)[:, None])[:, 0]
            actual_T = torch.tensor(float32s(each.logprobs))
            torch.testing.assert_close(actual_T, lp_T, rtol=1e-4, atol=1e-4)


def test_own_decoder_runs_only_what_it_knows() -> None:
    assert isinstance(decoder_of(build_model(_model("qwen3"))), LlamaDecoder)
    whole = ModelSpec(config("mistral", sliding_window=64, **NO_TOKENS))
    assert isinstance(decoder_of(build_model(whole)), LlamaDecoder)
    assert isinstance(decoder_of(build_model(_model("mistral"))), BodyDecoder)
    assert isinstance(decoder_of(build_model(_model("qwen2"))), BodyDecoder)
    assert isinstance(decoder_of(build_model(_model("gemma"))), BodyDecoder)
