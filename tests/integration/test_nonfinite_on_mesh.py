"""A training that diverges, on a mesh: it is named, and does not spread."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from phaseloom import client
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.common.contract.errors import CallerError, Code
from tests.support.jobs import running_mesh, tenant
from tests.support.node import STEP, lesson
from tests.support.tinymodel import config

pytestmark = pytest.mark.timeout(120)
PROMPT = [client.Prompt([1, 5, 9])]


@pytest.mark.parametrize("dp", [1, 2])
async def test_diverged_weights_are_named_and_published_only_on_request(
    short_dir: Path, dp: int
) -> None:
    devices = [16 * 2**20] * dp
    nodes = [NodeConfig("rollout-0", "rollout", devices), NodeConfig("train-0", "train", devices)]
    model = client.ModelSpec(config(), init_seed=7)
    layout = client.Layout(dp=dp)
    specs = [
        client.DeploymentSpec("policy", "train", "fsdp", model, trainable=True, layout=layout),
        client.DeploymentSpec("sampler", "rollout", "sampler", model, layout=layout),
    ]
    mesh_config = MeshConfig(nodes=nodes)
    async with running_mesh(mesh_config, short_dir) as (mesh, _), tenant(mesh) as connection:
        job = await connection.submit_job("sums", specs)
        policy, sampler = job.deployment("policy"), job.deployment("sampler")
        batch = lesson(0)
        policy.forward_backward(batch.batch, batch.loss)
        adam = replace(STEP.adam, learning_rate=3e38, weight_decay=3.0)
        stepped = await policy.optim_step(adam)
        assert "model.embed_tokens.weight" in stepped.nonfinite_weights
        with pytest.raises(CallerError, match="hold NaN or infinity") as refused:
            await policy.publish_weights()
        assert refused.value.info.code is Code.FAILED_PRECONDITION
        assert refused.value.info.field == "args.allow_nonfinite"
        await sampler.sync_weights(policy.publish_weights(allow_nonfinite=True))
        for operation in (
            sampler.generate(PROMPT, client.SamplingParams(4)),
            sampler.forward([client.Datum([1, 2], [2, 3])]),
        ):
            with pytest.raises(CallerError, match="NaN or infinite") as failed:
                await operation
            assert failed.value.info.code is Code.FAILED_PRECONDITION
        await job.finish()
