"""Registered models on a mesh: from the operator's command line to a checkpoint."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file
from transformers import AutoTokenizer

from phaseloom import client
from phaseloom.cli import models
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.events import SealCommitted, WpgLost
from phaseloom.common.contract.specs import ModelDirectory
from phaseloom.demo.command import demo
from tests.integration.test_cli_jobs import shown
from tests.support.jobs import TENANT, kill_rank, running_mesh, tenant
from tests.support.node import STEP, lesson
from tests.support.pretrained import TOKENIZER_FILES, loaded, save_model
from tests.support.tinymodel import config

pytestmark = pytest.mark.timeout(240)
NODES = [
    NodeConfig("rollout-0", "rollout", [16 * 2**20]),
    NodeConfig("train-0", "train", [16 * 2**20] * 2),
]
TINY = client.ModelSpec(registered="tiny")
PROMPT = [1, 5, 9]
NUM_TOKENS = 12
GREEDY = client.SamplingParams(NUM_TOKENS, temperature=0.0, ignore_eos=True)


def specs(layout: client.Layout | None = None) -> list[client.DeploymentSpec]:
    layout = layout or client.Layout()
    return [
        client.DeploymentSpec("policy", "train", "fsdp", TINY, trainable=True, layout=layout),
        client.DeploymentSpec("sampler", "rollout", "sampler", TINY),
    ]


def greedy(directory: Path) -> list[int]:
    """What `transformers` says with a model directory."""
    said: Any = loaded(directory).generate(
        torch.tensor([PROMPT]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
    )
    return said[0, len(PROMPT) :].tolist()  # type: ignore[no-any-return]


async def said(sampler: client.Deployment) -> list[int]:
    result = await sampler.generate([client.Prompt(PROMPT)], GREEDY)
    return client.int32s(result.sequences[0][0].tokens)


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
async def test_job_starts_from_the_files_and_its_checkpoint_is_a_model_directory(
    short_dir: Path, tmp_path: Path, num_ranks: int
) -> None:
    directory = await asyncio.to_thread(save_model, tmp_path / "model")
    config = MeshConfig(nodes=NODES, models={"tiny": str(directory)})
    async with running_mesh(config, short_dir) as (mesh, log), tenant(mesh) as connection:
        job = await connection.submit_job("mine", specs(client.Layout(dp=num_ranks)))
        policy, sampler = job.deployment("policy"), job.deployment("sampler")
        before = await asyncio.to_thread(greedy, directory)
        assert await said(sampler) == before
        sampler.sync_weights(policy.publish_weights())
        assert await said(sampler) == before, "both read the same files"
        for number in range(4):
            batch = lesson(number)
            policy.forward_backward(batch.batch, batch.loss)
            policy.optim_step(replace(STEP.adam, learning_rate=0.05))
        sampler.sync_weights(policy.publish_weights())
        after = await said(sampler)
        assert after != before
        saved = await policy.save_state("trained")
        checkpoint = mesh.run_dir / "checkpoints" / TENANT / saved.path
        assert await asyncio.to_thread(greedy, checkpoint) == after
        check_companions(directory, checkpoint)
        # A checkpoint is a model's directory: another job can begin where this one ended.
        await asyncio.to_thread(shown, models.add, "trained", checkpoint, run=mesh.run_dir)
        again = replace(specs()[1], model=client.ModelSpec(registered="trained"))
        other = await connection.submit_job("other", [again])
        assert await said(other.deployment("sampler")) == after
        await log.caught_up()
        assert log.failures() == []
        await check_foreign(policy, sampler, checkpoint)


async def check_foreign(
    policy: client.Deployment, sampler: client.Deployment, checkpoint: Path
) -> None:
    """A directory of another program is loaded, read by name and begun with, although its names
    lack their first part and it has the tied head twice."""
    model = await asyncio.to_thread(loaded, checkpoint)
    foreign = checkpoint.with_name("foreign")
    foreign.mkdir()
    (foreign / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    tensors = {name.removeprefix("model."): t.clone() for name, t in model.state_dict().items()}
    assert "lm_head.weight" in tensors
    save_file(tensors, foreign / "model.safetensors", {"format": "pt"})

    trained = await said(sampler)
    batch = lesson(9)
    for _ in range(2):
        policy.forward_backward(batch.batch, batch.loss)
        policy.optim_step(replace(STEP.adam, learning_rate=0.05))
    scores = await policy.forward(batch.batch)
    sampler.sync_weights(policy.publish_weights())
    assert await said(sampler) != trained
    named = client.NamedWeights("policy", checkpoint="foreign")
    drawn = await sampler.generate([client.Prompt(PROMPT)], GREEDY, weights=named)
    assert client.int32s(drawn.sequences[0][0].tokens) == trained
    read = await policy.forward(batch.batch, weights=named)
    await policy.load_state("foreign")
    assert (await policy.forward(batch.batch)).logprobs == read.logprobs != scores.logprobs
    sampler.sync_weights(policy.publish_weights())
    assert await said(sampler) == trained
    save_file({**tensors, "layers.0.extra": torch.zeros(2)}, foreign / "model.safetensors")
    for refused in (policy.load_state("foreign"), policy.forward(batch.batch, weights=named)):
        with pytest.raises(CallerError, match="extra") as raised:
            await refused
        assert raised.value.info.code is Code.FAILED_PRECONDITION


def check_companions(directory: Path, checkpoint: Path) -> None:
    for name in TOKENIZER_FILES:
        assert (checkpoint / name).read_bytes() == (directory / name).read_bytes(), name
    factory: Any = AutoTokenizer
    assert factory.from_pretrained(checkpoint)("w5 w9")["input_ids"] == [5, 9]


async def test_operator_adds_lists_and_removes(short_dir: Path, tmp_path: Path) -> None:
    directory = await asyncio.to_thread(save_model, tmp_path / "model")
    other = await asyncio.to_thread(save_model, tmp_path / "other", seed=4)
    async with running_mesh(MeshConfig(nodes=NODES), short_dir) as (mesh, _):

        async def run(call: Any, *arguments: object) -> str:
            return await asyncio.to_thread(shown, call, *arguments, run=mesh.run_dir)

        assert "none yet" in await asyncio.to_thread(command_line, "list", mesh.run_dir)
        for _ in range(2):  # the same again is no harm
            told = await run(models.add, "tiny", directory)
            assert "registered tiny: qwen3, 16,480 parameters in bfloat16" in told
        assert "16,480" in await run(models.list_models)
        with pytest.raises(CallerError, match="already registered for another") as taken:
            await run(models.add, "tiny", other)
        assert taken.value.info.code is Code.ALREADY_EXISTS

        async with tenant(mesh) as connection:
            job = await connection.submit_job("mine", specs()[1:])
            expected = await asyncio.to_thread(greedy, directory)
            assert await said(job.deployment("sampler")) == expected
            await run(models.remove, "tiny")
            assert "none yet" in await run(models.list_models)
            with pytest.raises(CallerError, match="no registered model") as gone:
                await run(models.remove, "tiny")
            assert gone.value.info.code is Code.NOT_FOUND
            # The job goes on with what its model's name stood for, whatever that is now.
            await run(models.add, "tiny", other)
            kill_rank(mesh, "mine.sampler")
            assert await said(job.deployment("sampler")) == expected


def command_line(command: str, run: Path) -> str:
    words = ["-m", "phaseloom.cli.main", "model", command, "--run", str(run)]
    done = subprocess.run([sys.executable, *words], check=True, capture_output=True, text=True)
    return done.stdout


async def test_job_whose_model_cannot_be_had_is_refused(short_dir: Path, tmp_path: Path) -> None:
    directory = await asyncio.to_thread(save_model, tmp_path / "model")
    config = MeshConfig(nodes=NODES, models={"tiny": str(directory)})
    async with running_mesh(config, short_dir) as (mesh, _), tenant(mesh) as connection:

        async def refusal(name: str, model: client.ModelSpec) -> client.CallerError:
            with pytest.raises(CallerError) as refused:
                await connection.submit_job(name, [replace(specs()[1], model=model)])
            return refused.value

        unknown = await refusal("unknown", client.ModelSpec(registered="huge"))
        assert unknown.info.code is Code.NOT_FOUND
        assert unknown.info.field == "spec.deployments[0].model.registered"
        assert "phaseloom model" in unknown.info.remedy
        other = await refusal("other", client.ModelSpec({"hidden_size": 64}, registered="tiny"))
        assert other.info.field == "spec.deployments[0].model.config.hidden_size"
        own = await refusal("own", client.ModelSpec(pinned=ModelDirectory("/etc", [])))
        assert own.info.field == "spec.deployments[0].model.pinned"

        await asyncio.to_thread(move_away, directory)
        gone = await refusal("late", TINY)
        assert gone.info.code is Code.NOT_FOUND
        assert f"node rollout-0 has no {directory}" in gone.info.message
        assert "same path" in gone.info.remedy


def move_away(directory: Path) -> None:
    directory.rename(directory.with_name("elsewhere"))


async def test_sealed_deployment_is_rebuilt_without_the_files(
    short_dir: Path, tmp_path: Path
) -> None:
    directory = await asyncio.to_thread(save_model, tmp_path / "model")
    config = MeshConfig(nodes=NODES, models={"tiny": str(directory)}, seal_every=1)
    async with running_mesh(config, short_dir) as (mesh, log), tenant(mesh) as connection:
        job = await connection.submit_job("mine", specs()[:1])
        policy = job.deployment("policy")
        batch = lesson(0)
        policy.forward_backward(batch.batch, batch.loss)
        await policy.optim_step(STEP.adam)
        await log.until(lambda event: isinstance(event, SealCommitted))
        before = (await policy.save_state("before")).weights_sha256
        await asyncio.to_thread(move_away, directory)
        kill_rank(mesh, "mine.policy")
        policy.forward_backward(batch.batch, batch.loss)
        await policy.optim_step(STEP.adam)
        assert len(log.starts("mine.policy")) == 2
        # A checkpoint without the tokenizer would be half of one: it is refused, and work goes on.
        with pytest.raises(CallerError, match="cannot be copied") as refused:
            await policy.save_state("after")
        assert refused.value.info.code is Code.NOT_FOUND
        await asyncio.to_thread(move_back, directory)
        assert (await policy.save_state("later")).weights_sha256 != before


def move_back(directory: Path) -> None:
    directory.with_name("elsewhere").rename(directory)


@pytest.mark.parametrize("adapter", [pytest.param(None, marks=pytest.mark.slow), 4])
async def test_demo_trains_a_pretrained_model(
    adapter: int | None, short_dir: Path, tmp_path: Path
) -> None:
    directory = await asyncio.to_thread(save_model, tmp_path / "model", max_position_embeddings=256)
    ended = await demo(
        pretrained=directory,
        adapter=adapter,
        steps=1,
        jobs=("chain_sum",),
        run_dir=short_dir / "run",
    )
    assert ended == 0
    summary = json.loads(await asyncio.to_thread((short_dir / "run/summary.json").read_text))
    assert summary["jobs"][0]["steps"] == 1
    assert summary["operations"]["failed"] == 0


@pytest.mark.parametrize(("pretrained", "adapter"), [(None, 4), (Path("model"), 0)])
async def test_demo_refuses_an_adapter_without_a_model_or_a_rank(
    pretrained: Path | None, adapter: int, tmp_path: Path
) -> None:
    if pretrained is not None:
        pretrained = await asyncio.to_thread(save_model, tmp_path / pretrained)
    with pytest.raises(CallerError) as refused:
        await demo(pretrained=pretrained, adapter=adapter, run_dir=tmp_path / "run")
    assert refused.value.info.field == "adapter"
    assert refused.value.info.remedy


async def test_config_that_no_rank_can_build_is_refused_at_the_first_start(
    short_dir: Path,
) -> None:
    """It ended as INTERNAL after five starts."""
    refusals: list[tuple[str, dict[str, Any], str, int]] = [
        ("large", {"vocab_size": 2**62}, "spec.deployments[0].model.config.vocab_size", 0),
        ("unknown", {"hidden_act": "no such"}, "model.config", 1),
        ("padding", {"pad_token_id": 10**6}, "model.config", 2),
    ]
    async with (
        running_mesh(MeshConfig(nodes=NODES), short_dir) as (mesh, log),
        tenant(mesh) as connection,
    ):
        for name, changes, field, num_failures in refusals:
            model = client.ModelSpec(config(**changes))
            with pytest.raises(CallerError) as refused:
                await connection.submit_job(name, [replace(specs()[1], model=model)])
            assert refused.value.info.code is Code.INVALID_ARGUMENT
            assert refused.value.info.field == field
            losses = [event for event in log.events if isinstance(event, WpgLost)]
            codes = [loss.error.code for loss in losses]
            assert codes.count(Code.INVALID_ARGUMENT) == num_failures
