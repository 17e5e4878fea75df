"""The models and requests that the runtimes are measured with."""

from __future__ import annotations

import random
from typing import Any

from phaseloom.common.contract.operations import Generate, Prompt, SamplingParams
from phaseloom.common.contract.specs import DeploymentSpec, ModelSpec

VOCABULARY = 4096
POSITIONS = 512
SCRATCH_BYTES = 256 * 2**20


def spec(
    backend: str, hidden: int, layers: int, *, dtype: str = "float32", **changes: Any
) -> DeploymentSpec:
    """A deployment of a model like Qwen 3. Args: hidden: its hidden size, a multiple of 128."""
    config = {
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "head_dim": 64,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": True,
        "dtype": dtype,
    }
    trains = backend == "fsdp"
    return DeploymentSpec(
        "policy" if trains else "sampler",
        "train" if trains else "rollout",
        backend,
        ModelSpec(config),
        trainable=trains,
        scratch_bytes=SCRATCH_BYTES if backend == "vllm" else 0,
        **changes,
    )


def texts(rows: int, length: int) -> list[list[int]]:
    """Rows of random tokens: no two begin alike, and all are of this length."""
    rng = random.Random(1)
    return [[rng.randrange(VOCABULARY) for _ in range(length)] for _ in range(rows)]


def request(rows: int, prompt_tokens: int, new_tokens: int) -> Generate:
    prompts = [Prompt(tokens, seed=i) for i, tokens in enumerate(texts(rows, prompt_tokens))]
    return Generate(prompts, SamplingParams(new_tokens, ignore_eos=True))
