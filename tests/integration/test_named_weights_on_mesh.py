"""Operations that name weights: one sampler reads the adapters of several jobs of its tenant, and
deployments of whole models read one another's weights, and keep their own."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from phaseloom import client
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.client import Batching, NamedWeights
from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError
from phaseloom.common.contract.events import OperationFinished, QueuedOperation, WpgLost
from phaseloom.common.contract.specs import Layout
from tests.support.jobs import Log, kill_rank, running_mesh, tenant
from tests.support.node import STEP, lesson
from tests.support.pretrained import save_model
from tests.support.statedaemon import flip_in_file

pytestmark = pytest.mark.timeout(240)
MIB = 2**20
PROMPTS = [client.Prompt([1, 5, 9], seed=3), client.Prompt([2, 4, 6, 8], seed=4)]
SAMPLING = client.SamplingParams(24, ignore_eos=True)
LONG = client.SamplingParams(700, ignore_eos=True)
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


def paid(job: str, log: Log) -> dict[str, float]:
    """The devices' time, by pool, that a job has to pay by what is in the log."""
    queued = {str(each.key): each for each in log.events if isinstance(each, QueuedOperation)}
    device_s: dict[str, float] = defaultdict(float)
    for ran in log.events:
        if not isinstance(ran, OperationFinished) or ran.kind == "save_state":
            continue
        if (queued[str(ran.key)].payer or ran.key.job) != job:
            continue
        name = ran.key.deployment
        num_devices = 2 if name == "pair" or (ran.key.job, name) == ("second", "policy") else 1
        device_s["train" if name == "policy" else "rollout"] += (
            ran.duration_s * ran.share * num_devices
        )
    return {**device_s}


async def check_device_time(connection: client.Mesh, log: Log) -> None:
    """The devices' time of an operation is that of the job whose weights it names, and of those
    that ran at once on a rank each has its part."""
    jobs = ("first", "second", "shared")
    async with asyncio.timeout(60):  # scheduler and this log may read an end later than its caller
        for job in jobs:
            while (await connection.status(job)).device_s != pytest.approx(paid(job, log)):
                await asyncio.sleep(0.05)
    shares = [
        ran.share
        for ran in log.events
        if isinstance(ran, OperationFinished) and ran.key.deployment_key.deployment == "sampler"
    ]
    assert min(shares) < 1.0, "none ran at the same time as another"
    payers = {each.payer for each in log.events if isinstance(each, QueuedOperation)}
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


WHOLE = client.ModelSpec(registered="tiny")


async def digests(*deployments: client.Deployment, name: str) -> list[str]:
    return [(await each.save_state(name)).weights_sha256 for each in deployments]


async def check_misfits(
    adapted: client.Deployment, samplers: list[client.Deployment], own: list[list[int]]
) -> None:
    """What cannot be read refuses the operation that names it, and nothing else.

    Args: adapted: a policy that trains an adapter. own: what the samplers' own weights draw.
    """
    await adapted.save_state("kept")
    lora = await trained(adapted, range(1))
    misfit, field = Code.FAILED_PRECONDITION, "args.weights"
    for sampling in samplers:
        version, other, broken, unnamed = [
            sampling.generate(PROMPTS, SAMPLING, 2, weights=each)
            for each in (lora, replace(KEPT, job="adapted"), KEPT, None)
        ]
        assert await refusal(version) == (misfit, field)
        assert await refusal(other) == (misfit, f"{field}.checkpoint")
        with pytest.raises(PhaseloomError) as caught:
            await broken
        assert caught.value.info.code is Code.DATA_LOSS
        assert tokens(await unnamed) == own


async def check_trainers_of_adapters(connection: client.Mesh, adapted: client.Deployment) -> None:
    """A trainer reads the versions and checkpoints of another, over two ranks too, and itself an
    older one, if they could take the place of its own; to go on as if it had not."""
    older = await trained(adapted, range(1, 3))
    scores = [(await adapted.forward(BATCH)).logprobs[0]]
    await adapted.save_state("older")
    await trained(adapted, range(3, 4))
    assert (await adapted.forward(BATCH, weights=older)).logprobs[0] == scores[0]
    scores.append((await adapted.forward(BATCH)).logprobs[0])
    assert scores[0] != scores[1]
    kept = replace(KEPT, job="adapted", checkpoint="older")
    peers = await connection.submit_job(
        "peers",
        [
            replace(policy(4, num_ranks=2), name="pair"),
            replace(policy(4, num_ranks=2), name="twin"),
            replace(policy(8), name="wider"),
        ],
    )
    pair, twin, wider = (peers.deployment(name) for name in ("pair", "twin", "wider"))
    for weights in (older, kept):
        told = (await pair.forward(BATCH, weights=weights)).logprobs[0]
        assert np.abs(np.array(told) - np.array(scores[0])).max() <= 1e-5
    misfit, field = Code.FAILED_PRECONDITION, "args.weights"
    assert await refusal(wider.forward(BATCH, weights=older)) == (misfit, field)
    assert await refusal(wider.forward(BATCH, weights=kept)) == (misfit, f"{field}.checkpoint")
    for each in (pair, twin):
        await trained(each, range(2))
    own, twins = await digests(pair, twin, name="end")
    assert own == twins, "it has read nothing"
    await peers.finish()


async def test_deployments_read_all_weights_by_their_names_and_keep_their_own(
    short_dir: Path, tmp_path: Path
) -> None:
    """Samplers of one rank and of two on two nodes, and the trainer itself, over two ranks. A twin
    that reads nothing trains to the same bits."""
    directory = await asyncio.to_thread(
        save_model, tmp_path / "model", max_position_embeddings=2048
    )
    nodes = [NodeConfig(f"rollout-{number}", "rollout", [16 * MIB] * 2) for number in range(2)]
    nodes.append(NodeConfig("train-0", "train", [16 * MIB] * 2))
    config = MeshConfig(nodes=nodes, models={"tiny": str(directory)})
    own = replace(sampler(4, "own"), model=WHOLE, prefix_cache=True)
    alone = replace(own, name="alone")
    spread = replace(own, name="spread", layout=Layout(dp=2), num_nodes=2, prefix_cache=False)
    trains = replace(policy(4, num_ranks=2), model=WHOLE)
    async with running_mesh(config, short_dir) as (mesh, log), tenant(mesh) as connection:
        first = await connection.submit_job("first", [trains, own])
        job = await connection.submit_job("shared", [alone, spread])
        trainer, direct = first.deployment("policy"), first.deployment("own")
        samplers = [job.deployment("alone"), job.deployment("spread")]
        before = await digests(*samplers, name="before")

        expected, scores, versions = [], [], []
        for number in range(2):
            versions.append(await trained(trainer, range(2 * number, 2 * number + 2)))
            await direct.sync_weights(versions[-1])
            expected.append(tokens(await direct.generate(PROMPTS, SAMPLING, 2)))
            scores.append((await trainer.forward(BATCH)).logprobs[0])
        long = tokens(await direct.generate(PROMPTS, LONG))
        await trainer.save_state("kept")
        expected.append(tokens(await samplers[0].generate(PROMPTS, SAMPLING, 2)))
        assert len({str(each) for each in expected}) == 3

        older, newest = versions
        for sampling in samplers:
            named = [older, newest, None, KEPT, older]
            drawn = [sampling.generate(PROMPTS, SAMPLING, 2, weights=each) for each in named]
            scored = [sampling.forward(BATCH, weights=each) for each in (older, KEPT)]
            assert [tokens(await each) for each in drawn] == [expected[i] for i in (0, 1, 2, 1, 0)]
            for each, lp in zip(scored, scores, strict=True):
                assert np.abs(np.array((await each).logprobs[0]) - np.array(lp)).max() <= 1e-5
        again = [trainer.forward(BATCH, weights=each) for each in (older, None, KEPT)]
        assert [(await each).logprobs[0] for each in again] == [scores[i] for i in (0, 1, 1)]

        adapted = await connection.submit_job("adapted", [policy(4)])
        [file] = mesh.run_dir.glob("checkpoints/*/first/policy/kept/model*.safetensors")
        flip_in_file(file, file.stat().st_size - 9)
        await check_misfits(adapted.deployment("policy"), samplers, expected[2])
        await check_trainers_of_adapters(connection, adapted.deployment("policy"))

        # Whatever is killed, an operation draws with what it names.
        for sampling in samplers:
            handle = sampling.generate(PROMPTS, LONG, weights=newest, stream=True)
            async for _ in handle.stream():
                kill_rank(mesh, f"shared.{sampling.name}")
                break
            assert tokens(await handle) == long
            assert tokens(await sampling.generate(PROMPTS, SAMPLING, 2)) == expected[2]
        assert await digests(*samplers, name="after") == before

        twin = (await connection.submit_job("twin", [trains])).deployment("policy")
        for number in range(2):
            await trained(twin, range(2 * number, 2 * number + 2))
        for learner in (trainer, twin):
            await trained(learner, range(4, 6))
        [own_digest, twins] = await digests(trainer, twin, name="last")
        assert own_digest == twins
        await log.caught_up()


@pytest.mark.slow
@pytest.mark.parametrize("is_adapter", [True, False], ids=["adapter", "all weights"])
async def test_checkpoint_that_goes_while_it_is_read_draws_its_own_tokens_or_is_not_found(
    short_dir: Path, tmp_path: Path, is_adapter: bool
) -> None:
    """Overwritten and deleted under operations that name it: on one rank, and over two on one node
    and on two, of which none may draw with other weights than the other."""
    directory = await asyncio.to_thread(
        save_model, tmp_path / "model", max_position_embeddings=2048
    )
    nodes = [NodeConfig(f"rollout-{number}", "rollout", [16 * MIB] * 2) for number in range(2)]
    nodes.append(NodeConfig("train-0", "train", [16 * MIB]))
    config = MeshConfig(nodes=nodes, models={"tiny": str(directory)})
    async with running_mesh(config, short_dir) as (mesh, log), tenant(mesh) as connection:
        own = model(4) if is_adapter else WHOLE
        first = await connection.submit_job("first", [replace(policy(4), model=own)])
        alone = replace(sampler(4), model=own, max_adapters=int(is_adapter))
        pair = replace(alone, name="pair", layout=Layout(dp=2))
        spread = replace(pair, name="spread", num_nodes=2)
        job = await connection.submit_job("shared", [alone, pair, spread])
        samplers = [job.deployment(each.name) for each in (alone, pair, spread)]
        trainer, moving = first.deployment("policy"), replace(KEPT, checkpoint="moving")

        def draw(sampling: client.Deployment) -> client.OperationHandle[client.GenerateResult]:
            return sampling.generate(PROMPTS, SAMPLING, weights=moving)

        expected = []
        for number in range(2):
            await trained(trainer, range(2 * number, 2 * number + 2))
            await trainer.save_state(f"kept-{number}")
            await trainer.save_state("moving", overwrite=True)
            drawn = [tokens(await draw(sampling)) for sampling in samplers]
            assert drawn == [drawn[0]] * 3
            expected.append(drawn[0])
        assert expected[0] != expected[1]

        async def overwrite() -> None:
            for turn in range(6):
                trainer.load_state(f"kept-{turn % 2}")
                await trainer.save_state("moving", overwrite=True)

        async def read_until(done: asyncio.Task[None], sampling: client.Deployment) -> None:
            while not done.done():
                assert tokens(await draw(sampling)) in expected

        async with asyncio.TaskGroup() as tasks:
            overwriting = tasks.create_task(overwrite())
            for sampling in samplers:
                tasks.create_task(read_until(overwriting, sampling))

        # One that has begun ends as ever; those that come at the same time do either.
        long = tokens(await samplers[0].generate(PROMPTS, LONG, weights=moving))
        begun = samplers[0].generate(PROMPTS, LONG, weights=moving, stream=True)
        async for _ in begun.stream():
            break
        deleted = trainer.delete_checkpoint("moving")
        outcomes = await asyncio.gather(
            *(draw(samplers[turn % 3]) for turn in range(9)), return_exceptions=True
        )
        await deleted
        assert tokens(await begun) == long
        for outcome in outcomes:
            if isinstance(outcome, client.GenerateResult):
                assert tokens(outcome) == expected[1]
            else:
                assert isinstance(outcome, CallerError), outcome
        for sampling in samplers:
            gone = (Code.NOT_FOUND, "args.weights.checkpoint")
            assert await refusal(draw(sampling)) == gone
        await log.caught_up()
        failures = {(e.error.code, e.error.field) for e in log.failures() if e.error}
        assert failures == {gone}
        lost = [e.error.message for e in log.events if isinstance(e, WpgLost)]
        assert not [message for message in lost if "cannot continue" in message]
