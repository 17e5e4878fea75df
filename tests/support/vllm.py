"""The Python with vLLM that the tests of that backend run ranks in, and what they ask of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from phaseloom.common.contract.specs import DeploymentSpec, ModelSpec
from tests.support.tinymodel import config

PYTHON = Path(os.environ.get("VLLM_PYTHON", ".venv-vllm/bin/python")).absolute()
SCRATCH_BYTES = 2 * 2**20
MISSING_HERE = "this Python has no vLLM: make test-vllm runs it in one that has"
MISSING = f"there is no vLLM at {PYTHON}: make test-vllm installs it"

needs_vllm_python = pytest.mark.skipif(not PYTHON.exists(), reason=MISSING)
"""For tests whose ranks run in that Python, and they themselves in any."""


def tiny(model_type: str = "qwen3", **changes: Any) -> dict[str, Any]:
    """A config with heads as large as vLLM's attention on CPUs needs."""
    sizes = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": 128}
    return config(model_type, **{**sizes, **changes})


def spec(backend: str = "vllm", name: str = "sampler", **changes: Any) -> DeploymentSpec:
    model = ModelSpec(tiny(), init_seed=7)
    scratch_bytes = SCRATCH_BYTES if backend == "vllm" else 0
    return DeploymentSpec(
        name, "rollout", backend, model, **{"scratch_bytes": scratch_bytes, **changes}
    )
