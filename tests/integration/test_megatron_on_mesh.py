"""Jobs trained by Megatron-core, in an interpreter of its own, on the whole mesh."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from phaseloom import client
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.supervisor import Mesh
from phaseloom.common.contract.arrays import float32s, int32s
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.events import WpgStarted
from phaseloom.common.contract.operations import AdamParams, Datum, Loss
from phaseloom.common.contract.specs import DeploymentSpec, Layout, ModelSpec
from tests.support import megatron, vllm
from tests.support.jobs import kill_rank, running_mesh, tenant
from tests.support.node import lesson
from tests.support.pretrained import save_model

pytestmark = [pytest.mark.megatron, megatron.needs_megatron_python]

MESH = MeshConfig(
    nodes=[
        NodeConfig(
            "node-0", "train", [4 * 2**20] * 4, interpreters={"megatron": str(megatron.PYTHON)}
        )
    ],
    seal_every=4,
)
"""One node of four devices, on which the sampler lives, too."""
STEPS = 4
ADAM = AdamParams(1e-2)
PROMPTS = [client.Prompt([1, 2, 3], seed=5), client.Prompt([7, 8, 9, 10], seed=6)]
SAMPLING = client.SamplingParams(8, temperature=1.0, ignore_eos=True)
NUM_SAMPLES = 4
BATCH = [Datum([1, 2, 3, 4], [2, 3, 4, 5])]


def sampler_spec(model: dict[str, Any] | None = None) -> DeploymentSpec:
    own = megatron.spec(model=model, backend="sampler", trainable=False)
    return replace(own, name="sampler")


def graded(step: int, generated: client.GenerateResult) -> list[Datum]:
    """Samples with the advantage of their group: even tokens are good."""
    data = []
    for number, (prompt, group) in enumerate(zip(PROMPTS, generated.sequences, strict=True)):
        rewards = [sum(t % 2 == 0 for t in int32s(each.tokens)) for each in group]
        mean = sum(rewards) / len(rewards)
        for sample, reward in zip(group, rewards, strict=True):
            start = [*int32s(prompt.tokens)]
            answer = [*int32s(sample.tokens)]
            masked = [0.0] * (len(start) - 1)
            advantage = reward - mean + 0.1 * (step + number + 1)
            data.append(
                Datum(
                    [*start, *answer][:-1],
                    [*start, *answer][1:],
                    logprobs=[*masked, *float32s(sample.logprobs)],
                    advantages=[*masked, *([advantage] * len(answer))],
                )
            )
    return data


async def learn(
    connection: client.Mesh, name: str, policy_spec: DeploymentSpec, kill_in: Mesh | None = None
) -> tuple[list[float], list[list[int]], str]:
    """The loss of each step, all tokens drawn, and the digest of the weights in the end.

    Args: kill_in: kill one of the policy's ranks between a gradient and its step, and once more
          while a step is computed.
    """
    specs = [policy_spec, sampler_spec(policy_spec.model.config)]
    job = await connection.submit_job(name, specs)
    policy, sampler = job.deployment("policy"), job.deployment("sampler")
    losses, drawn = [], []
    for step in range(STEPS):
        generated = await sampler.generate(PROMPTS, SAMPLING, num_samples=NUM_SAMPLES)
        drawn += [list(int32s(s.tokens)) for group in generated.sequences for s in group]
        trained = policy.forward_backward(graded(step, generated), Loss.PPO)
        if kill_in is not None and step == 2:
            kill_rank(kill_in, f"{name}.policy")
        losses.append((await trained).metrics["loss:sum"])
        if kill_in is not None and step == 1:
            kill_rank(kill_in, f"{name}.policy")
        await policy.optim_step(ADAM)
        await sampler.sync_weights(policy.publish_weights())
    saved = await policy.save_state("last")
    assert saved.weights_sha256 == (await sampler.save_state("last")).weights_sha256
    await job.finish()
    return losses, drawn, saved.weights_sha256


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        pytest.param(Layout(tp=2), megatron.tiny(), id="tp 2"),
        pytest.param(Layout(cp=2), megatron.tiny(), id="cp 2"),
        pytest.param(Layout(dp=2, ep=2), megatron.EXPERTS, id="experts, ep 2"),
    ],
)
async def test_grpo_of_two_ranks_is_the_same_to_the_bit_after_kills(
    layout: Layout, model: dict[str, Any], short_dir: Path
) -> None:
    async with running_mesh(MESH, short_dir) as (mesh, log), tenant(mesh) as connection:
        fsdp = megatron.spec(model=model, backend="fsdp")
        expected, _, _ = await learn(connection, "fsdp", fsdp)
        pair = megatron.spec(layout, model)
        undisturbed = await learn(connection, "pair", pair)
        assert undisturbed[0][0] == pytest.approx(expected[0], rel=1e-3, abs=1e-3)
        assert await learn(connection, "killed", pair, kill_in=mesh) == undisturbed
        await log.caught_up()
        starts = [str(e.deployment) for e in log.events if isinstance(e, WpgStarted)]
        assert starts.count("demo.killed.policy") == 3
        assert log.failures() == []


async def test_checkpoint_goes_on_in_other_layouts_and_backends(short_dir: Path) -> None:
    """Four ranks, two by two, save what fsdp then loads and trains on, and then a pipeline."""
    config = replace(MESH, checkpoint_root=str(short_dir / "kept"))
    data = [Datum([1, 2, 3, 4], [2, 3, 4, 5], weights=[1.0] * 4)]
    turns = {
        "square": megatron.spec(Layout(tp=2, pp=2)),
        "fsdp": megatron.spec(backend="fsdp"),
        "line": megatron.spec(Layout(pp=2)),
    }
    digest, norms = "", []
    for name, spec in turns.items():
        async with (
            running_mesh(config, short_dir / name) as (mesh, log),
            tenant(mesh) as connection,
        ):
            policy = (await connection.submit_job("job", [spec])).deployment("policy")
            if digest:
                assert (await policy.load_state("last")).weights_sha256 == digest
            else:
                await policy.forward_backward(data, Loss.CROSS_ENTROPY)
                await policy.optim_step(ADAM)
                digest = (await policy.save_state("last")).weights_sha256
            await policy.forward_backward(data, Loss.CROSS_ENTROPY)
            norms.append((await policy.optim_step(ADAM)).metrics["grad_norm:mean"])
            assert log.failures() == []
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-4)


async def test_forward_reads_what_other_layouts_and_backends_saved_and_published(
    short_dir: Path,
) -> None:
    """Each trainer scores with the other's weights, by a checkpoint's name and by a version's, and
    goes on as one that has not."""
    batch = [Datum([1, 2, 3, 4], [2, 3, 4, 5])]
    data = [replace(batch[0], weights=[1.0] * 4)]
    layouts = {"tp": Layout(tp=2), "pp": Layout(pp=2)}
    specs = [replace(megatron.spec(layout), name=name) for name, layout in layouts.items()]
    specs.append(replace(megatron.spec(backend="fsdp"), name="fsdp"))
    async with running_mesh(MESH, short_dir) as (mesh, log), tenant(mesh) as connection:
        job = await connection.submit_job("job", specs)
        own: dict[str, tuple[list[float], str]] = {}
        named: dict[str, list[Any]] = {}
        for number, spec in enumerate(specs):
            trainer = job.deployment(spec.name)
            for _ in range(number + 1):
                await trainer.forward_backward(data, Loss.CROSS_ENTROPY)
                await trainer.optim_step(ADAM)
            digest = (await trainer.save_state("kept")).weights_sha256
            published = trainer.publish_weights(ttl_s=600.0)
            await published
            named[spec.name] = [published, client.NamedWeights(spec.name, checkpoint="kept")]
            own[spec.name] = ([*(await trainer.forward(batch)).logprobs[0]], digest)
        for spec in specs:
            trainer = job.deployment(spec.name)
            asked = {
                other: [trainer.forward(batch, weights=each) for each in weights]
                for other, weights in named.items()
            }
            for other, operations in asked.items():
                for each in operations:
                    found = [*(await each).logprobs[0]]
                    assert found == pytest.approx(own[other][0], rel=1e-4, abs=1e-5)
            assert [*(await trainer.forward(batch)).logprobs[0]] == own[spec.name][0]
            assert (await trainer.save_state("after")).weights_sha256 == own[spec.name][1]
        await log.caught_up()
        assert log.failures() == []


async def test_model_that_a_layout_does_not_split_is_refused_with_the_field(
    short_dir: Path,
) -> None:
    async with running_mesh(MESH, short_dir) as (mesh, _), tenant(mesh) as connection:
        with pytest.raises(CallerError) as raised:
            await connection.submit_job("job", [megatron.spec(Layout(tp=3))])
        assert raised.value.info.code is Code.FAILED_PRECONDITION
        assert raised.value.info.field == "layout.tp"
        assert "divisor" in raised.value.info.remedy


async def test_ranks_on_two_nodes_compute_the_same_bits_as_on_one_after_kills(
    short_dir: Path,
) -> None:
    """Two by two ranks: each node has a stage of the pipeline, of two tensor-parallel ranks."""
    (node,) = MESH.nodes
    nodes = [replace(node, name=f"node-{number}") for number in range(2)]
    config = replace(MESH, nodes=nodes)
    spec = megatron.spec(Layout(tp=2, pp=2))
    async with running_mesh(config, short_dir) as (mesh, log), tenant(mesh) as connection:
        on_one = await learn(connection, "one", spec)
        on_two = replace(spec, num_nodes=2)
        assert await learn(connection, "two", on_two) == on_one
        assert await learn(connection, "killed", on_two, kill_in=mesh) == on_one
        await log.caught_up()
        started = [e for e in log.events if isinstance(e, WpgStarted)]
        for name, number in (("one", 1), ("two", 2), ("killed", 2)):
            own = [e for e in started if str(e.deployment) == f"demo.{name}.policy"]
            assert len({e.node for e in own}) == number
        assert log.failures() == []


@vllm.needs_vllm_python
@pytest.mark.usefixtures("cold_nodes")
async def test_vllm_of_two_ranks_takes_what_two_ranks_of_megatron_publish(short_dir: Path) -> None:
    """Steps of GRPO on samples that vLLM draws. Megatron's rows of queries and vLLM's fused ones
    differ, and our own sampler, which has the whole model, draws the same tokens."""
    (node,) = MESH.nodes
    interpreters = {**node.interpreters, "vllm": str(vllm.PYTHON)}
    config = replace(MESH, nodes=[replace(node, interpreters=interpreters)])
    model = ModelSpec(vllm.tiny(), init_seed=7)
    specs = [
        replace(megatron.spec(Layout(tp=2)), model=model),
        replace(vllm.spec(layout=Layout(tp=2)), pool="train"),
        replace(sampler_spec(), name="own", model=model),
    ]
    async with running_mesh(config, short_dir) as (mesh, log), tenant(mesh) as connection:
        job = await connection.submit_job("job", specs)
        policy, sampler, own = (job.deployment(each.name) for each in specs)
        drawn: list[list[list[int]]] = []
        for step in range(3):
            for each in (own, sampler):
                generated = await each.generate(PROMPTS, SAMPLING, num_samples=NUM_SAMPLES)
                drawn.append([list(int32s(s.tokens)) for g in generated.sequences for s in g])
            await policy.forward_backward(graded(step, generated), Loss.PPO)
            await policy.optim_step(AdamParams(1e-1))
            published = policy.publish_weights()
            for each in (sampler, own):
                await each.sync_weights(published)
        assert drawn[0] == drawn[1] != drawn[2] == drawn[3] != drawn[4] == drawn[5]
        assert log.failures() == []


async def check_trainers_read_by_name(
    policy: client.Deployment,
    other: client.Deployment,
    published: Sequence[client.OperationHandle[client.PublishWeightsResult]],
) -> None:
    """A trainer of Megatron reads its own older versions and checkpoints, and so does one of fsdp.

    Args: published: two versions; the last one is of the weights that `policy` has, as is its
          checkpoint `end`.
    """
    now = (await policy.forward(BATCH)).logprobs
    named: list[client.OperationHandle[client.PublishWeightsResult] | client.NamedWeights] = [
        *published,
        client.NamedWeights("policy", job="job", checkpoint="end"),
    ]
    scored = [(await policy.forward(BATCH, weights=each)).logprobs for each in named]
    assert scored[0] != scored[1] == scored[2] == now
    for weights, own in zip(named, scored, strict=True):
        told = (await other.forward(BATCH, weights=weights)).logprobs
        assert told[0] == pytest.approx(own[0], abs=1e-5)


@vllm.needs_vllm_python
async def test_adapter_that_two_ranks_train_is_drawn_with_by_all_samplers_and_goes_on_in_fsdp(
    short_dir: Path, tmp_path: Path
) -> None:
    """By `sync_weights` and by name, on our own sampler and on vLLM; what a kill leaves is the same
    to the bit."""
    directory = await asyncio.to_thread(save_model, tmp_path / "model", **vllm.tiny())
    (node,) = MESH.nodes
    interpreters = {**node.interpreters, "vllm": str(vllm.PYTHON)}
    nodes = [replace(node, interpreters=interpreters)]
    config = replace(MESH, nodes=nodes, models={"tiny": str(directory)})
    model = client.ModelSpec(registered="tiny", adapter=client.Adapter(rank=4, alpha=8.0))
    policy_spec = replace(megatron.spec(Layout(tp=2)), model=model)
    samplers = [
        replace(vllm.spec(backend, backend, max_adapters=2), pool="train", model=model)
        for backend in ("sampler", "vllm")
    ]

    async def step(policy: client.Deployment, number: int) -> None:
        args = lesson(number)
        policy.forward_backward(args.batch, args.loss)
        await policy.optim_step(AdamParams(5e-2))

    async with running_mesh(config, short_dir) as (mesh, log), tenant(mesh) as connection:
        quiet = (await connection.submit_job("quiet", [policy_spec])).deployment("policy")
        for number in range(4):
            await step(quiet, number)
        expected = (await quiet.save_state("end")).weights_sha256

        job = await connection.submit_job("job", [policy_spec, *samplers])
        policy = job.deployment("policy")
        readers = [job.deployment(each.name) for each in samplers]

        async def drawn(weights: client.OperationHandle[Any] | None = None) -> list[list[int]]:
            """What both samplers draw alike."""
            answers = []
            for reader in readers:
                made = await reader.generate(PROMPTS, SAMPLING, NUM_SAMPLES, weights=weights)
                answers.append([list(int32s(s.tokens)) for g in made.sequences for s in g])
            assert answers[0] == answers[1]
            return answers[0]

        published, said = [], [await drawn()]
        for number in range(4):
            await step(policy, number)
            if number == 1:
                kill_rank(mesh, "job.policy")
            if number % 2:
                published.append(policy.publish_weights(ttl_s=600.0))
                for reader in readers:
                    await reader.sync_weights(published[-1])
                said.append(await drawn())
        assert said[0] != said[1] != said[2]
        assert await drawn(published[0]) == said[1]
        assert await drawn() == said[2]
        assert (await policy.save_state("end")).weights_sha256 == expected

        on_fsdp = replace(policy_spec, backend="fsdp", layout=Layout())
        other = (await connection.submit_job("other", [on_fsdp])).deployment("policy")
        await check_trainers_read_by_name(policy, other, published)
        for each in (policy, quiet):
            await step(each, 4)
        later = [(await each.save_state("later")).weights_sha256 for each in (policy, quiet)]
        assert later[0] == later[1], "it has read nothing"
        loaded = await other.load_state("end", source="job/policy")
        assert loaded.weights_sha256 == expected
        await step(other, 4)
        await log.caught_up()
        assert log.failures() == []
