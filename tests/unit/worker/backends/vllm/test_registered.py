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
PROMPTS = [[1, 5, 9], [2, 7, 1, 8, 2, 8], [3]]
GREEDY = SamplingParams(NUM_TOKENS, temperature=0.0, ignore_eos=True)
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {"tie_word_embeddings": False},
    "qwen2": {},
    "mistral": {},
    "gemma2": {},
    "phi3": {"pad_token_id": 0},
    "granite": {},
    "smollm3": {"pad_token_id": 0},
}

_kept: list[tuple[Backend, Heap]] = []
"""An engine that is collected takes vLLM's process groups with it; a rank has one engine only."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_greedy_tokens_of_a_registered_model_are_those_of_transformers(
    tmp_path: Path, model_type: str, dtype: torch.dtype
) -> None:
    changes = vllm.tiny(model_type, **ARCHITECTURES[model_type])
    directory = save_model(tmp_path / "model", **changes)
    backend = filled(directory, str(dtype).removeprefix("torch."))
    model = loaded(directory, dtype)
    assert said(backend) == [transformers_says(model, prompt) for prompt in PROMPTS]


def filled(directory: Path, dtype: str) -> Backend:
    model = pinned(directory, dtype=dtype)
    spec = replace(vllm.spec(), model=model)
    factory = backend_factory("vllm")
    memory = factory.plan(spec)
    heap = Heap(memory.heap_bytes, memory.scratch_bytes)
    backend = factory(spec, heap)
    _kept.append((backend, heap))
    assert model.pinned is not None
    names = [slot.name for slot in backend.version_slots]
    is_tied = bool(backend.config["tie_word_embeddings"])
    pretrained.fill(heap, backend.slots, model.pinned, names=names, ties_embeddings=is_tied)
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


def transformers_says(model: Any, prompt: list[int]) -> list[int]:
    text = model.generate(
        torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
    )
    return text[0, len(prompt) :].tolist()  # type: ignore[no-any-return]
