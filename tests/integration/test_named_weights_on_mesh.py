"""Operations that name weights: one sampler reads the adapters of several jobs of its tenant."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from phaseloom import client
from phaseloom.cli.supervisor import MeshConfig, NodeConfig
from phaseloom.client import Batching, NamedWeights
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.events import OperationFinished, QueuedOperation
from phaseloom.common.contract.specs import Layout
from tests.support.jobs import Log, kill_rank, running_mesh, tenant
from tests.support.node import STEP, lesson
from tests.support.pretrained import save_model

pytestmark = pytest.mark.timeout(240)
MIB = 2**20
PROMPTS = [client.Prompt([1, 5, 9], seed=3), client.Prompt([2, 4, 6, 8], seed=4)]
SAMPLING = client.SamplingParams(24, ignore_eos=True)
LONG = client.SamplingParams(1500, ignore_eos=True)
BATCH = [client.Datum([1, 2, 3, 4], [2, 3, 4, 5])]
TTL_S = 600.0
KEPT = NamedWeights("policy", job="first", checkpoint="kept")


def model(rank: int) -> client.ModelSpec:
    adapter = client.Adapter(rank=rank, alpha=4.0 * rank, seed=rank)
    return client.ModelSpec(registered="tiny", adapter=adapter)


def policy(rank: int, num_ranks: int = 1) -> client.DeploymentSpec:
    return client.DeploymentSpec(
        "policy", "train", "fsdp", model(rank), trainable=True, layout=Layout(dp=num_ranks)
    )


def sampler(rank: int, name: str = "sampler") -> client.DeploymentSpec:
    return client.DeploymentSpec(name, "rollout", "sampler", model(rank), batching=Batching.SHARED)


async def trained(
    policy: client.Deployment, steps: range, ttl_s: float = TTL_S
) -> client.OperationHandle[client.PublishWeightsResult]:
    """A version that is published after these steps."""
    for number in steps:
        batch = lesson(number)
        policy.forward_backward(batch.batch, batch.loss)
        policy.optim_step(replace(STEP.adam, learning_rate=0.05))
    published = policy.publish_weights(ttl_s=ttl_s)
    await published
    return published


def tokens(result: client.GenerateResult) -> list[list[int]]:
    return [client.int32s(each.tokens) for group in result.sequences for each in group]


async def refusal(operation: client.OperationHandle[object]) -> tuple[Code, str]:
    with pytest.raises(CallerError) as caught:
        await operation
    assert caught.value.info.remedy
    return caught.value.info.code, caught.value.info.field


async def check_refusals(
    shared: client.Deployment, own: client.Deployment, older: int, gone: int
) -> None:
    """Args: shared, own: samplers with room for adapters and without. older: a version of the job
    `first`. gone: one that it had."""
    named = NamedWeights("policy", older, "first")
    for weights, code, field in (
        (replace(named, version=99), Code.NOT_FOUND, "version"),
        (replace(named, version=gone), Code.NOT_FOUND, "version"),
        (replace(named, job="nobody"), Code.NOT_FOUND, "job"),
        (replace(named, version=0), Code.INVALID_ARGUMENT, "version"),
        (replace(named, checkpoint="kept"), Code.INVALID_ARGUMENT, "checkpoint"),
        (replace(KEPT, checkpoint="none"), Code.NOT_FOUND, "checkpoint"),
    ):
        refused = shared.generate(PROMPTS, SAMPLING, weights=weights)
        assert await refusal(refused) == (code, f"args.weights.{field}")
    plain = (Code.FAILED_PRECONDITION, "args.weights")
    assert await refusal(own.generate(PROMPTS, SAMPLING, weights=named)) == plain
    assert await refusal(own.forward(BATCH, weights=named)) == plain
    assert await refusal(own.forward(BATCH, weights=KEPT)) == plain


async def check_device_time(connection: client.Mesh, log: Log) -> None:
    """The devices' time of an operation is that of the job whose weights it names, and of those
    that ran at once on a rank each has its part."""
    await log.caught_up()
    jobs = {"first", "second", "shared"}
    queued = {str(each.key): each for each in log.events if isinstance(each, QueuedOperation)}
    expected = {job: Counter[str]() for job in jobs}
    for ran in log.events:
        if not isinstance(ran, OperationFinished) or ran.kind == "save_state":
            continue
        name = ran.key.deployment
        num_devices = 2 if name == "pair" or (ran.key.job, name) == ("second", "policy") else 1
        pool = "train" if name == "policy" else "rollout"
        payer = queued[str(ran.key)].payer or ran.key.job
        expected[payer][pool] += ran.duration_s * ran.share * num_devices
    for job in jobs:
        status = await connection.status(job)
        assert status.device_s == pytest.approx(expected[job])
    shares = [
        ran.share
        for ran in log.events
        if isinstance(ran, OperationFinished) and ran.key.deployment_key.deployment == "sampler"
    ]
    assert min(shares) < 1.0, "none ran at the same time as another"
    payers = {each.payer for each in queued.values()}
    assert payers == {"", "first", "second"}


async def test_one_sampler_draws_with_the_adapters_of_several_jobs(
    short_dir: Path, tmp_path: Path
) -> None:
    directory = await asyncio.to_thread(
        save_model, tmp_path / "model", max_position_embeddings=2048
    )
    nodes = [
        NodeConfig("rollout-0", "rollout", [16 * MIB] * 2),
        NodeConfig("train-0", "train", [16 * MIB] * 2),
    ]
    config = MeshConfig(nodes=nodes, models={"tiny": str(directory)})
    async with running_mesh(config, short_dir) as (mesh, log), tenant(mesh) as connection:
        first = await connection.submit_job("first", [policy(4), sampler(4)])
        second = await connection.submit_job("second", [policy(2, num_ranks=2), sampler(2)])
        shared_spec = replace(sampler(4), max_adapters=2)
        pair = replace(sampler(4, "pair"), max_adapters=2, layout=Layout(dp=2))
        job = await connection.submit_job("shared", [shared_spec, pair])
        shared = job.deployment("sampler")

        own = first.deployment("sampler")
        older = await trained(first.deployment("policy"), range(2))
        await own.sync_weights(older)
        expected = [tokens(await own.generate(PROMPTS, SAMPLING, 2))]
        long = tokens(await own.generate(PROMPTS, LONG))
        gone = await trained(first.deployment("policy"), range(2, 3), ttl_s=0.0)
        newest = await trained(first.deployment("policy"), range(3, 5))
        await own.sync_weights(newest)
        expected.append(tokens(await own.generate(PROMPTS, SAMPLING, 2)))
        other = second.deployment("sampler")
        theirs = await trained(second.deployment("policy"), range(2))  # written in two parts
        await other.sync_weights(theirs)
        expected.append(tokens(await other.generate(PROMPTS, SAMPLING, 2)))
        expected.append(tokens(await shared.generate(PROMPTS, SAMPLING, 2)))
        assert len({str(each) for each in expected}) == len(expected)

        # Three versions and its own weights at once, for two places; then over two ranks.
        named = [older, newest, theirs, None]
        for sampling in (shared, job.deployment("pair")):
            drawn = [sampling.generate(PROMPTS, SAMPLING, 2, weights=each) for each in named]
            assert [tokens(await each) for each in drawn] == expected
            scored = await sampling.forward(BATCH, weights=newest)
            [lp] = (await first.deployment("policy").forward(BATCH)).logprobs
            assert np.abs(np.array(lp) - np.array(scored.logprobs[0])).max() <= 1e-5
        await check_device_time(connection, log)

        # Whatever is killed, an operation draws with what it names.
        handle = shared.generate(PROMPTS, LONG, weights=older, stream=True)
        async for _ in handle.stream():
            kill_rank(mesh, "shared.sampler")
            break
        assert tokens(await handle) == long
        assert tokens(await shared.generate(PROMPTS, SAMPLING, 2)) == expected[3]

        await check_refusals(shared, own, older.seq, gone.seq)

        # The versions of a job that has ended are nobody's any more, its checkpoints stay.
        await first.deployment("policy").save_state("kept")
        await first.finish()
        ended = shared.generate(PROMPTS, SAMPLING, weights=older)
        assert await refusal(ended) == (Code.NOT_FOUND, "args.weights.version")
        assert tokens(await shared.generate(PROMPTS, SAMPLING, 2, weights=theirs)) == expected[2]
        for sampling in (shared, job.deployment("pair")):
            drawn = [sampling.generate(PROMPTS, SAMPLING, 2, weights=each) for each in (KEPT, None)]
            assert [tokens(await each) for each in drawn] == [expected[1], expected[3]]
            again = await sampling.forward(BATCH, weights=KEPT)
            assert np.abs(np.array(lp) - np.array(again.logprobs[0])).max() <= 1e-5
        await log.caught_up()
        jobs = sorted(each.key.job for each in log.failures() if each.incarnation)
        assert jobs == ["first", "shared"], "checkpoints that are not there, or not read here"
