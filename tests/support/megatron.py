"""The Python with Megatron-core in which tests run ranks of that backend, and what they train."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from phaseloom.common.contract.specs import DeploymentSpec, Layout, ModelSpec
from tests.support.tinymodel import config

PYTHON = Path(os.environ.get("MEGATRON_PYTHON", ".venv-megatron/bin/python")).absolute()
MISSING_HERE = "this Python has no Megatron-core: make test-megatron runs it in one that has"
MISSING = f"there is no Megatron-core at {PYTHON}: make test-megatron installs it"

needs_megatron_python = pytest.mark.skipif(not PYTHON.exists(), reason=MISSING)
"""For tests whose ranks run in that Python, and they themselves in any."""


def tiny(model_type: str = "qwen3", **changes: Any) -> dict[str, Any]:
    """A config of sizes whose slices are aligned: 29 token ids, which no layout splits evenly."""
    sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96}
    return config(model_type, **{**sizes, **changes})


EXPERTS = tiny(
    "qwen3_moe",
    num_experts=12,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    norm_topk_prob=True,
)
"""Twelve experts: by name the eleventh comes before the third."""


def spec(
    layout: Layout | None = None, model: dict[str, Any] | None = None, **changes: Any
) -> DeploymentSpec:
    """Args: model: its config. changes: of the deployment."""
    values = {"backend": "megatron", "trainable": True, **changes}
    return DeploymentSpec(
        name="policy",
        pool="train",
        model=ModelSpec(tiny() if model is None else model, init_seed=7),
        layout=layout or Layout(),
        **values,
    )
