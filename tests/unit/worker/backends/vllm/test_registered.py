"""Registered models under vLLM, in both dtypes: the tokens of transformers, from the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from phaseloom.common.contract.arrays import int32s
from phaseloom.common.contract.operations import Generate, Prompt, SamplingParams
from phaseloom.worker.backends import backend_factory, pretrained
from phaseloom.worker.backends.base import Backend
from phaseloom.worker.state.heap import Heap
from tests.support import vllm
from tests.support.looker import Looker
from tests.support.pretrained import loaded, pinned, save_model

NUM_TOKENS = 24
ROUNDING = 0.125
"""What bfloat16 may move a logit of about 8 by, in a model of two layers."""
PROMPTS = [[1, 5, 9], [2, 7, 1, 8, 2, 8], [3]]
GREEDY = SamplingParams(NUM_TOKENS, temperature=0.0, ignore_eos=True)
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {"tie_word_embeddings": False},
    "qwen2": {},
    "mistral": {},
    "gemma2": {},
    "granite": {"attention_multiplier": 32**-0.5},
}

_kept: list[tuple[Backend, Heap]] = []
"""An engine that is collected takes vLLM's process groups with it; a rank has one engine only."""


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_greedy_tokens_of_a_registered_model_are_those_of_transformers(
    tmp_path: Path, model_type: str
) -> None:
    directory = saved(tmp_path / "model", model_type)
    model = loaded(directory)
    assert said(filled(directory, "float32")) == [says(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_greedy_tokens_in_bfloat16_are_those_of_transformers_but_for_its_rounding(
    tmp_path: Path, model_type: str
) -> None:
    """Kernels add up in different orders: two tokens that are as likely may change places."""
    directory = saved(tmp_path / "model", model_type)
    model = loaded(directory, torch.bfloat16)
    num_equal = 0
    for prompt, answer in zip(PROMPTS, said(filled(directory, "bfloat16")), strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        short_by = logits.max(-1).values - chosen
        assert short_by.max() <= ROUNDING
        num_equal += int((short_by == 0).sum())
    assert num_equal >= 0.9 * len(PROMPTS) * NUM_TOKENS


def saved(directory: Path, model_type: str) -> Path:
    """A model of weights that spread its logits, and do not blow up bfloat16's rounding."""
    changes = vllm.tiny(model_type, **ARCHITECTURES[model_type])
    return save_model(directory, initializer_range=0.2, **changes)


def filled(directory: Path, dtype: str) -> Backend:
    model = pinned(directory, dtype=dtype)
    spec = replace(vllm.spec(), model=model)
    factory = backend_factory("vllm")
    memory = factory.plan(spec)
    heap = Heap(memory.heap_bytes, memory.scratch_bytes)
    backend = factory(spec, heap)
    _kept.append((backend, heap))
    assert model.pinned is not None
    pretrained.fill(heap, backend.slots, model)
    backend.weights_changed()
    assert {slot.dtype for slot in backend.slots} == {dtype}
    return backend


def said(backend: Backend) -> list[list[int]]:
    args = Generate([Prompt(prompt) for prompt in PROMPTS], GREEDY)
    backend.check_generate(args)
    looker = Looker()
    backend.generate([args], looker)
    (result,) = looker.ordered
    assert result is not None
    return [int32s(group[0].tokens) for group in result.sequences]


def says(model: Any, prompt: list[int]) -> list[int]:
    text = model.generate(
        torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
    )
    return text[0, len(prompt) :].tolist()  # type: ignore[no-any-return]
