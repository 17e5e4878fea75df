"""Jobs of other architectures and of bfloat16 on the whole mesh, and of models that no backend can
do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from phaseloom import client
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.supervisor import Mesh
from phaseloom.common.contract.operations import AdamParams
from phaseloom.common.contract.specs import ModelSpec
from tests.support.jobs import kill_rank, running_mesh, tenant
from tests.support.node import lesson, policy_spec, sampler_spec
from tests.support.tinymodel import config

MESH = MeshConfig(
    nodes=[
        NodeConfig("rollout-0", "rollout", [8 * 2**20]),
        NodeConfig("train-0", "train", [16 * 2**20]),
    ],
)
GEMMA2 = ModelSpec(
    config(
        "gemma2",
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
        eos_token_id=None,
    ),
    init_seed=7,
)
EXPERTS = ModelSpec(
    config(
        "qwen3_moe",
        dtype="bfloat16",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    ),
    init_seed=7,
)
BFLOAT16 = ModelSpec(config(dtype="bfloat16"), init_seed=7)
Trained = tuple[list[float], list[list[int]], list[list[float]]]


async def train(
    connection: client.Mesh,
    name: str,
    model: ModelSpec,
    kill_in: Mesh | None = None,
    **changes: bool,
) -> Trained:
    """The loss of each batch, and what the trained sampler draws, with its log-probabilities.

    Args: kill_in: kill the policy half-way. changes: of the policy's spec.
    """
    specs = [
        replace(policy_spec(), model=model, **changes),
        replace(policy_spec("teacher"), model=model, trainable=False),
        replace(sampler_spec(), model=model),
    ]
    job = await connection.submit_job(name, specs)
    policy, sampler = job.deployment("policy"), job.deployment("sampler")
    losses = []
    for step in range(6):
        if step == 2:
            # It starts anew with other weights: so does a rebuild.
            await policy.sync_weights(job.deployment("teacher").publish_weights())
        args = lesson()
        trained = await policy.forward_backward(args.batch, args.loss)
        await policy.optim_step(AdamParams(1e-2))
        losses.append(trained.metrics["loss:sum"])
        if kill_in is not None and step == 3:
            kill_rank(kill_in, f"{name}.policy")
    await sampler.sync_weights(policy.publish_weights())
    prompts = [client.Prompt([1, 2, 3], 5), client.Prompt([4], 6)]
    drawn = await sampler.generate(prompts, client.SamplingParams(8), num_samples=2)
    await job.finish()
    samples = [sample for group in drawn.sequences for sample in group]
    return losses, [[*s.tokens] for s in samples], [[*s.logprobs] for s in samples]


@pytest.mark.parametrize("seal_every", [4, pytest.param(0, marks=pytest.mark.slow)])
async def test_job_is_the_same_to_the_bit_after_a_kill(short_dir: Path, seal_every: int) -> None:
    """Rebuilt from seal and log, or from the log alone."""
    mesh_config = replace(MESH, seal_every=seal_every)
    async with running_mesh(mesh_config, short_dir) as (mesh, log), tenant(mesh) as connection:
        models = {"gemma2": GEMMA2, "bfloat16": BFLOAT16, "experts": EXPERTS}
        for name, model in models.items():
            expected = await train(connection, name, model)
            assert expected[0][-1] < expected[0][0]
            assert await train(connection, f"{name}-killed", model, kill_in=mesh) == expected
        assert log.failures() == []


async def test_job_that_computes_activations_again_is_the_same_to_the_bit(short_dir: Path) -> None:
    async with running_mesh(MESH, short_dir) as (mesh, log), tenant(mesh) as connection:
        expected = await train(connection, "kept", BFLOAT16)
        again = await train(connection, "again", BFLOAT16, activation_checkpointing=True)
        assert again == expected
        assert log.failures() == []


REFUSED: dict[str, dict[str, Any]] = {
    "spec.deployments.model.config.model_type": {"model_type": "bloom"},
    "spec.deployments.model.config.dtype": {"dtype": "float16"},
    "model.config.layer_types": {"layer_types": ["chunked_attention"] * 2},
}


async def test_job_whose_model_no_backend_can_do_is_rejected_and_the_field_named(
    short_dir: Path,
) -> None:
    async with running_mesh(MESH, short_dir) as (mesh, _), tenant(mesh) as connection:
        for number, (field, changes) in enumerate(REFUSED.items()):
            with pytest.raises(client.CallerError) as raised:
                await connection.submit_job(f"j{number}", [policy_spec(**changes)])
            assert raised.value.info.field == field
            assert raised.value.info.remedy
