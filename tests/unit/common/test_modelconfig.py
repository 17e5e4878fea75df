"""The longest sequence of a model, by its config."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from phaseloom.common.contract.modelconfig import context_tokens

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"n_positions": 64}, 64),
        ({"max_position_embeddings": 128}, 128),
        ({"max_position_embeddings": 128, "rope_scaling": None}, 128),
        ({"max_position_embeddings": 128, "rope_scaling": {"type": "linear", "factor": 2}}, 256),
        ({"max_position_embeddings": 128, "rope_scaling": {"type": "dynamic", "factor": 2.5}}, 320),
        ({"max_position_embeddings": 100, "rope_parameters": YARN}, 400),
        ({"max_position_embeddings": 400, "rope_parameters": YARN}, 400),
        ({"max_position_embeddings": 500, "rope_parameters": YARN}, 500),
        ({"max_position_embeddings": 100, "rope_parameters": {**YARN, "factor": None}}, 100),
        (
            {
                "max_position_embeddings": 128,
                "original_max_position_embeddings": 64,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
            },
            256,
        ),
        ({"max_position_embeddings": 128, "rope_scaling": {**YARN, "rope_type": "llama3"}}, 128),
        ({"max_position_embeddings": 128, "rope_scaling": {**YARN, "rope_type": "longrope"}}, 128),
        (
            {
                "max_position_embeddings": 128,
                "rope_parameters": {
                    "full_attention": YARN,
                    "sliding_attention": {"rope_type": "default"},
                },
            },
            400,
        ),
        (
            {
                "model_type": "gemma3_text",
                "max_position_embeddings": 128,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            128,
        ),
    ],
)
def test_context_is_extended_by_the_factor_of_the_original_one(
    config: dict[str, Any], expected: int | None
) -> None:
    assert context_tokens(config) == expected
    if "max_position_embeddings" not in config:
        return
    # Gateways read the file, workers what transformers makes of it.
    values = {"model_type": "llama", **config}
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if "full_attention" not in rope and rope.get("rope_type") not in ("llama3", "longrope"):
        made = AutoConfig.for_model(values.pop("model_type"), **values)
        assert context_tokens(made.to_dict()) == expected
