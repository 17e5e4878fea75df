"""A job whose sampler is vLLM, in an interpreter of its own, on the whole mesh."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from phaseloom import client
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.state import state
from phaseloom.common.contract.arrays import int32s
from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError
from phaseloom.common.contract.events import ActivationOpened
from phaseloom.common.contract.operations import AdamParams, GenerateResult, Outcome
from phaseloom.common.contract.specs import Layout
from phaseloom.demo.command import demo
from tests.support import vllm
from tests.support.jobs import TENANT, kill_rank, running_mesh, tenant
from tests.support.node import lesson
from tests.support.pretrained import TOKENIZER_FILES, loaded, save_model

pytestmark = [pytest.mark.vllm, vllm.needs_vllm_python]

INTERPRETERS = {"vllm": str(vllm.PYTHON)}
MESH = MeshConfig(
    nodes=[
        NodeConfig("rollout-0", "rollout", [16 * 2**20] * 4, interpreters=INTERPRETERS),
        NodeConfig("train-0", "train", [16 * 2**20, 16 * 2**20]),
    ],
    seal_every=4,
)
PROMPTS = [client.Prompt([1, 2, 3], seed=5), client.Prompt([7, 8, 9, 10, 11], seed=6)]
PROMPT = [1, 5, 9]
NUM_TOKENS = 12
SAMPLED = client.SamplingParams(40, temperature=0.9, ignore_eos=True)


async def draws(sampler: client.Deployment) -> list[list[int]]:
    generated = await sampler.generate(PROMPTS, SAMPLED, num_samples=4)
    return [list(s.tokens) for group in generated.sequences for s in group]


@pytest.mark.parametrize(
    ("dp", "layout"),
    [
        (1, Layout()),
        (2, Layout()),
        (2, Layout(tp=2)),
        (1, Layout(pp=2)),
        (2, Layout(dp=2, tp=2)),
    ],
    ids=["1 to 1", "2 to 1", "2 to tp 2", "1 to pp 2", "2 to dp 2 tp 2"],
)
async def test_vllm_syncs_what_fsdp_published_and_draws_what_our_sampler_draws(
    dp: int, layout: Layout, short_dir: Path
) -> None:
    in_shared_memory = set(os.listdir("/dev/shm"))
    async with running_mesh(MESH, short_dir) as (mesh, log), tenant(mesh) as connection:
        policy_spec = replace(
            vllm.spec("fsdp", "policy"), pool="train", trainable=True, layout=Layout(dp=dp)
        )
        specs = [policy_spec, vllm.spec(layout=layout), vllm.spec("sampler", "own")]
        job = await connection.submit_job("job", specs)
        policy, sampler, own = (job.deployment(name) for name in ("policy", "sampler", "own"))
        first = await draws(sampler)
        assert first == await draws(own)
        for step in range(2):
            args = lesson(step)
            await policy.forward_backward(args.batch, args.loss)
            await policy.optim_step(AdamParams(1e-1))
        published = policy.publish_weights()
        await sampler.sync_weights(published)
        await own.sync_weights(published)
        learned = await draws(sampler)
        assert learned != first
        assert learned == await draws(own)
        saved = await own.save_state("own")
        for number in range(2):
            kill_rank(mesh, "job.sampler")
            assert await draws(sampler) == learned
            again = await sampler.save_state(f"after-{number}")
            assert again.weights_sha256 == saved.weights_sha256
        await job.finish()
        assert log.failures() == []
    assert {name for name in os.listdir("/dev/shm") if "shm" in name} <= in_shared_memory


async def test_vllm_syncs_an_adapter_that_two_ranks_train_and_draws_what_our_sampler_draws(
    short_dir: Path, tmp_path: Path
) -> None:
    """The ranks' state is the adapter's; what a kill leaves draws the same."""
    directory = await asyncio.to_thread(save_model, tmp_path / "model", **vllm.tiny())
    config = replace(MESH, models={"tiny": str(directory)})
    model = client.ModelSpec(registered="tiny", adapter=client.Adapter(rank=4, alpha=8.0))
    specs = [
        client.DeploymentSpec(
            "policy", "train", "fsdp", model, trainable=True, layout=Layout(dp=2)
        ),
        replace(vllm.spec(layout=Layout(tp=2)), model=model),
        client.DeploymentSpec("own", "rollout", "sampler", model),
    ]
    async with running_mesh(config, short_dir) as (mesh, log), tenant(mesh) as connection:
        job = await connection.submit_job("job", specs)
        policy, sampler, own = (job.deployment(name) for name in ("policy", "sampler", "own"))
        first = await draws(sampler)
        assert first == await draws(own)
        for step in range(3):
            args = lesson(step)
            await policy.forward_backward(args.batch, args.loss)
            await policy.optim_step(AdamParams(5e-2))
        published = policy.publish_weights()
        await sampler.sync_weights(published)
        await own.sync_weights(published)
        learned = await draws(sampler)
        assert learned != first
        assert learned == await draws(own)
        kill_rank(mesh, "job.sampler")
        assert await draws(sampler) == learned
        saved = [await each.save_state(each.name) for each in (sampler, own)]
        assert saved[0].weights_sha256 == saved[1].weights_sha256
        checkpoint = mesh.run_dir / "checkpoints" / TENANT / saved[0].path
        names = {path.name for path in checkpoint.iterdir()}
        assert {"adapter_model.safetensors", "adapter_config.json"} <= names
        await job.finish()
        assert log.failures() == []


async def test_vllm_reads_weights_by_name_and_keeps_its_own(
    short_dir: Path, tmp_path: Path
) -> None:
    """All weights on one rank and on two, adapters on two: the tokens of our own sampler, though
    the beginning of the prompts is in the KV cache with other weights."""
    directory = await asyncio.to_thread(save_model, tmp_path / "model", **vllm.tiny())
    config = replace(MESH, models={"tiny": str(directory)})
    whole = client.ModelSpec(registered="tiny")
    adapted = replace(whole, adapter=client.Adapter(rank=4, alpha=8.0))
    wider = replace(whole, adapter=client.Adapter(rank=8, alpha=4.0, seed=3))
    shared = client.Batching.SHARED
    prompts = [client.Prompt([*(n % 29 for n in range(40)), end], seed=end) for end in (5, 9)]
    sampled = client.SamplingParams(12, temperature=0.9, ignore_eos=True)

    def policy(name: str, model: client.ModelSpec) -> client.DeploymentSpec:
        return client.DeploymentSpec(name, "train", "fsdp", model, trainable=True)

    def sampler(
        name: str, backend: str, model: client.ModelSpec, **changes: Any
    ) -> client.DeploymentSpec:
        return replace(vllm.spec(backend, name, batching=shared, **changes), model=model)

    specs = [
        policy("whole", whole),
        policy("lora", adapted),
        sampler("own", "sampler", whole),
        sampler("mixed", "sampler", wider, max_adapters=2),
        sampler("one", "vllm", whole),
        sampler("two", "vllm", whole, layout=Layout(tp=2)),
        sampler("adapters", "vllm", wider, layout=Layout(tp=2), max_adapters=2),
    ]
    async with running_mesh(config, short_dir) as (mesh, log), tenant(mesh) as connection:
        job = await connection.submit_job("job", specs)
        named: dict[str, list[Any]] = {}
        for name in ("whole", "lora"):
            trainer = job.deployment(name)
            for step in range(2):
                args = lesson(step)
                trainer.forward_backward(args.batch, args.loss)
                trainer.optim_step(AdamParams(5e-2))
                if not step:
                    await trainer.save_state("kept")
            published = trainer.publish_weights(ttl_s=600.0)
            await published
            kept = client.NamedWeights(name, checkpoint="kept")
            named[name] = [published, kept, None, published]
        pairs = [("own", "whole", "one"), ("own", "whole", "two"), ("mixed", "lora", "adapters")]
        for ours, trainer_name, theirs in pairs:
            drawn = {}
            reader = job.deployment(theirs)
            before = (await reader.save_state("before")).weights_sha256
            for name in (ours, theirs):
                asked = [
                    job.deployment(name).generate(prompts, sampled, 2, weights=each)
                    for each in named[trainer_name]
                ]
                drawn[name] = [
                    [list(int32s(s.tokens)) for group in (await each).sequences for s in group]
                    for each in asked
                ]
            assert drawn[theirs] == drawn[ours]
            assert len({str(each) for each in drawn[ours]}) == 3
            batch = [client.Datum([1, 2, 3, 4], [2, 3, 4, 5])]
            scored = await reader.forward(batch, weights=named[trainer_name][0])
            [lp] = (await job.deployment(trainer_name).forward(batch)).logprobs
            assert list(scored.logprobs[0]) == pytest.approx(list(lp), abs=1e-4)
            missing = replace(named[trainer_name][1], checkpoint="none")
            with pytest.raises(CallerError) as caught:
                await reader.generate(prompts, sampled, weights=missing)
            assert caught.value.info.code is Code.NOT_FOUND
            kill_rank(mesh, f"job.{theirs}")
            again = await reader.generate(prompts, sampled, 2, weights=named[trainer_name][1])
            assert [list(int32s(s.tokens)) for g in again.sequences for s in g] == drawn[ours][1]
            assert (await reader.save_state("after")).weights_sha256 == before
        await log.caught_up()
        assert {e.error.code for e in log.failures() if e.error} == {Code.NOT_FOUND}


async def test_job_for_vllm_is_refused_where_no_node_has_it(short_dir: Path) -> None:
    mesh_config = replace(MESH, nodes=[NodeConfig("rollout-0", "rollout", [2**20])])
    async with running_mesh(mesh_config, short_dir) as (mesh, _), tenant(mesh) as connection:
        with pytest.raises(CallerError) as raised:
            await connection.submit_job("job", [vllm.spec()])
        assert raised.value.info.code is Code.FAILED_PRECONDITION
        assert raised.value.info.field == "spec.deployments.backend"
        assert "interpreters" in raised.value.info.remedy


async def test_two_jobs_on_one_device_take_turns_and_draw_the_same_bits(
    short_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The device has room for one of them only, its KV cache included."""
    room = vllm.SCRATCH_BYTES + 2**20  # of weights, 0.5 MiB
    node = NodeConfig("rollout-0", "rollout", [room], interpreters=INTERPRETERS)
    config = replace(MESH, nodes=[node])
    async with running_mesh(config, short_dir) as (mesh, log), tenant(mesh) as connection:
        jobs = [await connection.submit_job(name, [vllm.spec()]) for name in ("a", "b")]
        samplers = [job.deployment("sampler") for job in jobs]
        drawn: list[list[GenerateResult]] = [[], []]
        for _ in range(4):
            for sampler, results in zip(samplers, drawn, strict=True):
                asked = sampler.generate(PROMPTS, SAMPLED, num_samples=4, prompt_logprobs=True)
                results.append(await asked)
        for results in drawn:
            assert all(result == results[0] for result in results)
        kill_rank(mesh, "a.sampler")
        again = await samplers[0].generate(PROMPTS, SAMPLED, num_samples=4, prompt_logprobs=True)
        assert again == drawn[0][0]
        assert await asyncio.to_thread(state, run=mesh.run_dir, json=True) == 0
        (line,) = capsys.readouterr().out.splitlines()
        deployments = json.loads(line)["report"]["deployments"]
        assert [each["scratch_bytes"] for each in deployments] == [vllm.SCRATCH_BYTES] * 2
        for each in deployments:
            taken = each["heap_bytes"] + vllm.SCRATCH_BYTES if each["resident"] else 0
            assert each["device_bytes"] == taken
        assert [each["resident"] for each in deployments].count(True) == 1
        for job in jobs:
            await job.finish()
        await log.caught_up()
        opened = [e for e in log.events if isinstance(e, ActivationOpened)]
        assert len([e for e in opened if e.displaced]) >= 7
        assert log.failures() == []


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=["one rank", "tp 2"])
async def test_switches_through_a_synced_version_change_no_bit(
    layout: Layout, short_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM's heap is laid out otherwise than the version, which is the only copy in host memory."""
    rollout = [vllm.SCRATCH_BYTES + 2**20] * layout.num_ranks
    nodes = [replace(MESH.nodes[0], devices=rollout), MESH.nodes[1]]
    policy_spec = replace(vllm.spec("fsdp", "policy"), pool="train", trainable=True)
    async with (
        running_mesh(replace(MESH, nodes=nodes), short_dir) as (mesh, log),
        tenant(mesh) as connection,
    ):
        job = await connection.submit_job("a", [policy_spec, vllm.spec(layout=layout)])
        policy, sampler = job.deployment("policy"), job.deployment("sampler")
        neighbour = await connection.submit_job("b", [vllm.spec(layout=layout)])
        for step in range(2):
            args = lesson(step)
            await policy.forward_backward(args.batch, args.loss)
            await policy.optim_step(AdamParams(1e-1))
            await sampler.sync_weights(policy.publish_weights())
            results = []
            for _ in range(3):
                generating = sampler.generate(PROMPTS, SAMPLED, num_samples=4, prompt_logprobs=True)
                results.append(await generating)
                await draws(neighbour.deployment("sampler"))
            assert all(result == results[0] for result in results)
        assert await asyncio.to_thread(state, run=mesh.run_dir, json=True, node="rollout-0") == 0
        (line,) = capsys.readouterr().out.splitlines()
        copies = json.loads(line)["report"]["shared_copies"]
        held = [copy for copy in copies if copy["version"] is not None]
        assert [len(copy["users"]) for copy in held] == [layout.num_ranks]
        assert log.failures() == []


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2)], ids=["tp", "pp"])
async def test_requests_join_stop_and_are_cancelled_on_two_ranks(
    layout: Layout, short_dir: Path
) -> None:
    """A kill in the middle of it changes no token."""
    long = replace(SAMPLED, max_tokens=120)
    node = NodeConfig("rollout-0", "rollout", [16 * 2**20] * 2, interpreters=INTERPRETERS)
    config = replace(MESH, nodes=[node])
    async with running_mesh(config, short_dir) as (mesh, log), tenant(mesh) as connection:
        spec = vllm.spec(layout=layout, batching=client.Batching.SHARED)
        job = await connection.submit_job("job", [spec])
        sampler = job.deployment("sampler")
        whole = await draws(sampler)
        running = sampler.generate(PROMPTS, long, num_samples=64)
        joined = [sampler.generate([PROMPTS[i % 2]], SAMPLED, num_samples=4) for i in range(4)]
        for i, each in enumerate(joined):
            drawn = [list(s.tokens) for (group,) in [(await each).sequences] for s in group]
            assert drawn == whole[4 * (i % 2) : 4 * (i % 2) + 4]
        assert not running.done()
        await running.stop()
        stopped = [s for group in (await running).sequences for s in group]
        assert "partial" in {s.stop_reason for s in stopped}
        for number in range(8):
            beside = sampler.generate(PROMPTS, long, num_samples=4)
            kept = sampler.generate(PROMPTS, SAMPLED, num_samples=4)
            if number % 2:
                await sampler.generate(PROMPTS, replace(SAMPLED, max_tokens=1 + number))
            await beside.cancel()
            assert [list(s.tokens) for g in (await kept).sequences for s in g] == whole
            with suppress(asyncio.CancelledError, PhaseloomError):
                await beside
        again = asyncio.ensure_future(draws(sampler))
        kill_rank(mesh, "job.sampler")
        assert await again == whole
        await job.finish()
        await log.caught_up()
        assert {event.outcome for event in log.failures()} <= {Outcome.CANCELLED}


async def test_registered_model_on_vllm_says_what_transformers_says_and_is_saved_whole(
    short_dir: Path, tmp_path: Path
) -> None:
    changes = vllm.tiny("llama", initializer_range=0.2, tie_word_embeddings=False)
    directory = await asyncio.to_thread(save_model, tmp_path / "model", **changes)
    config = replace(MESH, models={"tiny": str(directory)})
    model = client.ModelSpec(registered="tiny")
    async with running_mesh(config, short_dir) as (mesh, log), tenant(mesh) as connection:
        policy_spec = client.DeploymentSpec("policy", "train", "fsdp", model, trainable=True)
        job = await connection.submit_job("job", [policy_spec, replace(vllm.spec(), model=model)])
        policy, sampler = job.deployment("policy"), job.deployment("sampler")
        assert await greedy(sampler) == await asyncio.to_thread(transformers_says, directory)
        for number in range(4):
            batch = lesson(number)
            policy.forward_backward(batch.batch, batch.loss)
            policy.optim_step(AdamParams(5e-2))
        sampler.sync_weights(policy.publish_weights())
        learned = await greedy(sampler)
        assert learned != await asyncio.to_thread(transformers_says, directory)
        saved = await sampler.save_state("learned")
        assert saved.weights_sha256 == (await policy.save_state("policy")).weights_sha256
        checkpoint = mesh.run_dir / "checkpoints" / TENANT / saved.path
        assert await asyncio.to_thread(transformers_says, checkpoint) == learned
        for name in TOKENIZER_FILES:
            assert (checkpoint / name).read_bytes() == (directory / name).read_bytes(), name
        await job.finish()
        assert log.failures() == []


async def greedy(sampler: client.Deployment) -> list[int]:
    params = client.SamplingParams(NUM_TOKENS, temperature=0.0, ignore_eos=True)
    result = await sampler.generate([client.Prompt(PROMPT)], params)
    return client.int32s(result.sequences[0][0].tokens)


def transformers_says(directory: Path) -> list[int]:
    text: Any = loaded(directory).generate(
        torch.tensor([PROMPT]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
    )
    return text[0, len(PROMPT) :].tolist()  # type: ignore[no-any-return]


@pytest.mark.usefixtures("cold_nodes")
async def test_demo_trains_a_pretrained_model_with_rollouts_on_vllm(
    short_dir: Path, tmp_path: Path
) -> None:
    changes = vllm.tiny("llama", max_position_embeddings=256)
    directory = await asyncio.to_thread(save_model, tmp_path / "model", **changes)
    run_dir = short_dir / "run"
    ended = await demo(
        pretrained=directory, steps=1, jobs=("chain_sum",), run_dir=run_dir, vllm=vllm.PYTHON
    )
    assert ended == 0
    summary = json.loads(await asyncio.to_thread((run_dir / "summary.json").read_text))
    assert summary["jobs"][0]["steps"] == 1
    assert summary["operations"]["failed"] == 0
    events = await asyncio.to_thread((run_dir / "events.jsonl").read_text)
    assert '"backend":"vllm"' in events
