"""Jobs that train adapters on one base, on a mesh: from the files to a checkpoint of `peft`."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from peft import PeftModel

from phaseloom import client
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.statemgr.checkpoints.marker import MARKER_FILE
from tests.support.jobs import TENANT, kill_rank, running_mesh, tenant
from tests.support.node import STEP, lesson
from tests.support.pretrained import loaded, save_model

pytestmark = pytest.mark.timeout(240)
NODES = [
    NodeConfig("rollout-0", "rollout", [16 * 2**20]),
    NodeConfig("train-0", "train", [16 * 2**20]),
]
ADAPTER = client.Adapter(rank=4, alpha=8.0)
PROMPT = [1, 5, 9]
NUM_TOKENS = 12
GREEDY = client.SamplingParams(NUM_TOKENS, temperature=0.0, ignore_eos=True)


def specs(adapter: client.Adapter = ADAPTER) -> list[client.DeploymentSpec]:
    model = client.ModelSpec(registered="tiny", adapter=adapter)
    return [
        client.DeploymentSpec("policy", "train", "fsdp", model, trainable=True),
        client.DeploymentSpec("sampler", "rollout", "sampler", model),
    ]


async def said(sampler: client.Deployment) -> list[int]:
    result = await sampler.generate([client.Prompt(PROMPT)], GREEDY)
    return client.int32s(result.sequences[0][0].tokens)


def with_peft(base: Path, adapter: Path) -> list[int]:
    """What `transformers` and `peft` say with a base and a checkpoint on it."""
    model: Any = PeftModel.from_pretrained(loaded(base), str(adapter)).eval()
    made = model.generate(
        input_ids=torch.tensor([PROMPT]),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
    )
    return made[0, len(PROMPT) :].tolist()  # type: ignore[no-any-return]


async def train(policy: client.Deployment, steps: range) -> None:
    for number in steps:
        batch = lesson(number)
        policy.forward_backward(batch.batch, batch.loss)
        await policy.optim_step(replace(STEP.adam, learning_rate=0.05))


async def test_adapters_of_several_jobs_are_trained_on_one_base_whoever_is_killed(
    short_dir: Path, tmp_path: Path
) -> None:
    directory = await asyncio.to_thread(save_model, tmp_path / "model")
    config = MeshConfig(nodes=NODES, models={"tiny": str(directory)})
    async with running_mesh(config, short_dir) as (mesh, log), tenant(mesh) as connection:
        quiet = await connection.submit_job("quiet", specs())
        await train(quiet.deployment("policy"), range(6))
        expected = await quiet.deployment("policy").save_state("end")

        job = await connection.submit_job("mine", specs())
        policy, sampler = job.deployment("policy"), job.deployment("sampler")
        await train(policy, range(3))
        before = await said(sampler)
        kill_rank(mesh, "mine.policy")
        await train(policy, range(3, 6))
        synced = await sampler.sync_weights(policy.publish_weights())
        after = await said(sampler)
        assert after != before
        kill_rank(mesh, "mine.sampler")
        assert await said(sampler) == after
        saved = await policy.save_state("end")
        assert saved.weights_sha256 == expected.weights_sha256
        assert synced.version == 13
        checkpoint = mesh.run_dir / "checkpoints" / TENANT / saved.path
        assert await asyncio.to_thread(with_peft, directory, checkpoint) == after

        # Another job goes on from it; one of another rank cannot.
        other = await connection.submit_job("other", specs())
        loading = other.deployment("sampler").load_state("end", source="mine/policy")
        await loading
        assert await said(other.deployment("sampler")) == after
        larger = await connection.submit_job(
            "larger", [replace(spec, max_adapters=2) for spec in specs(client.Adapter(rank=5))[1:]]
        )
        with pytest.raises(CallerError, match="rank 4 and alpha 8, this deployment rank 5"):
            await larger.deployment("sampler").load_state("end", source="mine/policy")

        await check_adapters_of_another_program(other, larger, checkpoint, directory)
        bases = await asyncio.to_thread(list, mesh.run_dir.rglob("bases/*"))
        names = {path.name for path in bases if path.suffix != ".lock"}
        assert len(names) == 1, "one base, whoever runs it"
        # The caller has the outcome at times before the log has it.
        await log.until(lambda _: len(log.failures()) == 8)
        await log.caught_up()
        assert {each.key.job for each in log.failures()} == {"larger", "other"}


async def check_adapters_of_another_program(
    same: client.Job, larger: client.Job, checkpoint: Path, base: Path
) -> None:
    """Their configs say another scale, another base, or what nobody here supports.

    Args: same: its adapter is that of the checkpoint. larger: reads adapters of any scale.
    """
    own, reader = same.deployment("sampler"), larger.deployment("sampler")
    expected = await said(own)

    async def save_variant(name: str, **fields: Any) -> Path:
        copy = checkpoint.parent / name
        await asyncio.to_thread(
            shutil.copytree, checkpoint, copy, ignore=shutil.ignore_patterns(MARKER_FILE)
        )
        path = copy / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
        return copy

    def named(name: str) -> client.NamedWeights:
        return client.NamedWeights("policy", job="mine", checkpoint=name)

    await save_variant("same", use_rslora=True, lora_alpha=4.0)
    await own.load_state("same", source="mine/policy")
    assert await said(own) == expected
    copy = await save_variant("rslora", use_rslora=True)
    with pytest.raises(CallerError, match="rank 4 and alpha 16, this deployment rank 4 and alpha"):
        await own.load_state("rslora", source="mine/policy")
    result = await reader.generate([client.Prompt(PROMPT)], GREEDY, weights=named("rslora"))
    drawn = client.int32s(result.sequences[0][0].tokens)
    assert drawn == await asyncio.to_thread(with_peft, base, copy) != expected
    for name, fields, message in (
        ("pattern", {"alpha_pattern": {"q_proj": 2.0}}, "the same rank and alpha in all layers"),
        ("pissa", {"init_lora_weights": "pissa"}, "init_lora_weights"),
        ("dora", {"use_dora": True}, "use_dora"),
    ):
        await save_variant(name, **fields)
        with pytest.raises(CallerError, match=message) as caught:
            await own.load_state(name, source="mine/policy")
        assert caught.value.info.code is Code.FAILED_PRECONDITION
        with pytest.raises(CallerError, match=message) as caught:
            await reader.generate([client.Prompt(PROMPT)], GREEDY, weights=named(name))
        assert caught.value.info.field == "args.weights.checkpoint"
    assert await said(own) == expected


async def test_adapter_that_cannot_be_had_is_refused(short_dir: Path, tmp_path: Path) -> None:
    directory = await asyncio.to_thread(save_model, tmp_path / "model")
    config = MeshConfig(nodes=NODES, models={"tiny": str(directory)})
    async with running_mesh(config, short_dir) as (mesh, _), tenant(mesh) as connection:
        policy = specs()[0]
        assert policy.model.adapter is not None

        async def refused(name: str, spec: client.DeploymentSpec) -> tuple[Code, str]:
            with pytest.raises(CallerError) as caught:
                await connection.submit_job(name, [spec])
            return caught.value.info.code, caught.value.info.field.rpartition("model.")[2]

        drawn = client.ModelSpec(config={"model_type": "llama"}, adapter=ADAPTER)
        for name, model, code, field in (
            ("drawn", drawn, Code.INVALID_ARGUMENT, "adapter"),
            (
                "rank",
                replace(policy.model, adapter=client.Adapter(rank=0)),
                Code.INVALID_ARGUMENT,
                "adapter.rank",
            ),
            (
                "alpha",
                replace(policy.model, adapter=client.Adapter(alpha=-1.0)),
                Code.INVALID_ARGUMENT,
                "adapter.alpha",
            ),
            (
                "layers",
                replace(policy.model, adapter=client.Adapter(targets=("q_proj", "q_proj"))),
                Code.INVALID_ARGUMENT,
                "adapter.targets",
            ),
        ):
            assert await refused(name, replace(policy, model=model)) == (code, field)
        noop = replace(policy, backend="noop")
        assert await refused("noop", noop) == (Code.FAILED_PRECONDITION, "adapter")
