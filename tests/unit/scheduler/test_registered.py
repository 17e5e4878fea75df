"""Registered models in a job's spec: what the job API pins, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.specs import (
    DeploymentSpec,
    JobSpec,
    ModelDirectory,
    ModelFile,
    ModelSpec,
    RegisteredModel,
)
from phaseloom.scheduler.registered import pin_deployment, pin_job

DIRECTORY = ModelDirectory("/models/tiny", [ModelFile("model.safetensors", 8, "ab")])
TINY = RegisteredModel(
    "tiny", DIRECTORY, {"model_type": "llama", "hidden_size": 32, "dtype": "bfloat16"}, 2, ["F32"]
)


async def model_of(name: str) -> RegisteredModel | None:
    return TINY if name == "tiny" else None


def deployment(model: ModelSpec) -> DeploymentSpec:
    return DeploymentSpec("policy", "train", "fsdp", model, trainable=True)


async def test_name_becomes_config_and_files() -> None:
    spec = deployment(ModelSpec(registered="tiny", token_texts=["a"]))
    pinned = await pin_deployment(spec, model_of, "spec")
    expected = ModelSpec(
        {"model_type": "llama", "hidden_size": 32},
        token_texts=["a"],
        registered="tiny",
        pinned=DIRECTORY,
    )
    assert pinned == replace(spec, model=expected)


async def test_dtype_of_the_files_is_not_that_of_the_ranks_unless_asked_for() -> None:
    spec = deployment(ModelSpec({"dtype": "bfloat16"}, registered="tiny"))
    pinned = await pin_deployment(spec, model_of, "spec")
    assert pinned.model.config["dtype"] == "bfloat16"


async def test_config_with_a_seed_stays_as_it_is() -> None:
    spec = deployment(ModelSpec({"model_type": "llama"}, init_seed=3))
    assert await pin_deployment(spec, model_of, "spec") is spec


@pytest.mark.parametrize(
    ("model", "code", "field"),
    [
        (ModelSpec(registered="other"), Code.NOT_FOUND, "registered"),
        (ModelSpec(registered="a b"), Code.INVALID_ARGUMENT, "registered"),
        (
            ModelSpec({"hidden_size": 64}, registered="tiny"),
            Code.INVALID_ARGUMENT,
            "config.hidden_size",
        ),
        (ModelSpec({"new": 1}, registered="tiny"), Code.INVALID_ARGUMENT, "config.new"),
        (ModelSpec(pinned=DIRECTORY), Code.INVALID_ARGUMENT, "pinned"),
        (ModelSpec(registered="tiny", pinned=DIRECTORY), Code.INVALID_ARGUMENT, "pinned"),
    ],
    ids=["unknown", "no name", "another config", "more config", "own files", "name and own files"],
)
async def test_model_that_cannot_be_is_refused(model: ModelSpec, code: Code, field: str) -> None:
    job: Any = JobSpec(deployments=[deployment(ModelSpec({})), deployment(model)])
    with pytest.raises(CallerError) as refused:
        await pin_job(job, model_of, "spec")
    info = refused.value.info
    assert (info.code, info.field) == (code, f"spec.deployments[1].model.{field}")
    assert info.remedy
