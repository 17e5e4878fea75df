"""A tiny pretrained model on disk, as `transformers` saves one, with a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from phaseloom.common.contract.specs import ModelSpec
from phaseloom.common.tensors.modelfiles import read_model
from tests.support.tinymodel import VOCAB, config

TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
SHARD_BYTES = 12_000
"""Makes two files and more of the tiny model."""


def save_model(
    directory: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 3, **changes: Any
) -> Path:
    """Save the tiny model in shards. Args: changes: of its config."""
    # Weights so large that it says different tokens.
    values = {"initializer_range": 0.5, **config(**changes)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        factory: Any = AutoModelForCausalLM
        model = factory.from_config(
            AutoConfig.for_model(values.pop("model_type"), **values), dtype=dtype
        )
    model.save_pretrained(directory, max_shard_size=SHARD_BYTES)
    words = {f"w{number}": number for number in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer).save_pretrained(directory)
    return directory


def pinned(directory: Path, **changes: Any) -> ModelSpec:
    """The spec of a registered model as the job API pins it. Args: changes: of its config."""
    model = read_model("tiny", directory)
    values = {key: value for key, value in model.config.items() if key != "dtype"}
    return ModelSpec(values | changes, registered="tiny", pinned=model.directory)


def loaded(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model as `transformers` opens it."""
    factory: Any = AutoModelForCausalLM
    return factory.from_pretrained(directory, dtype=dtype).eval()
