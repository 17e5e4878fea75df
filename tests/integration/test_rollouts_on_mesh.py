"""Rollouts that go on with new weights from their next token.

One mesh for all tests: each has a job of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import pytest_asyncio

from phaseloom import client
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.supervisor import Mesh
from phaseloom.client import (
    AdamParams,
    Batching,
    Deployment,
    MeshJob,
    Progress,
    Prompt,
    PublishWeightsResult,
    RolloutResult,
    RuntimeEvent,
    SamplingParams,
    Sequence,
    VersionRun,
    continued,
    float32s,
    int32s,
)
from phaseloom.common.contract.operations import Outcome
from tests.support.directories import short_directory
from tests.support.jobs import Log, kill_rank, running_mesh, tenant
from tests.support.node import lesson, policy_spec, sampler_spec

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = 2000
"""New tokens of a rollout: more than there is time for before the first update."""
NUM_SAMPLES = 3
MESH = MeshConfig(
    nodes=[
        NodeConfig("rollout-0", "rollout", [8 * 2**20]),
        NodeConfig("train-0", "train", [8 * 2**20]),
    ]
)
PROMPTS = [Prompt([1, 2, 3], seed=5), Prompt([4, 5], seed=6)]
SAMPLING = SamplingParams(LONG, ignore_eos=True)


@dataclass
class World:
    mesh: Mesh
    log: Log
    tenant: client.Mesh


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world() -> AsyncIterator[World]:
    with short_directory() as directory:
        async with running_mesh(MESH, directory) as (mesh, log), tenant(mesh) as connection:
            yield World(mesh, log, connection)


class Rolling:
    """A job with a policy and a sampler, and how far its rollouts are."""

    def __init__(self, job: MeshJob, mesh: Mesh) -> None:
        self.policy, self.sampler = job.deployment("policy"), job.deployment("sampler")
        self._mesh, self._name = mesh, job.name
        self._drawn = asyncio.Event()
        job.runtime_hook(self._on_event)

    def _on_event(self, event: RuntimeEvent) -> None:
        if isinstance(event, Progress) and event.num_done:
            self._drawn.set()

    async def drawing(self) -> None:
        """Wait until a rollout is told to have drawn more tokens."""
        self._drawn.clear()
        await self._drawn.wait()

    def kill_sampler(self) -> None:
        kill_rank(self._mesh, f"{self._name}.sampler")

    def publish(
        self, *, after_a_step: int | None = None
    ) -> client.OperationHandle[PublishWeightsResult]:
        if after_a_step is not None:
            args = lesson(after_a_step)
            self.policy.forward_backward(args.batch, args.loss)
            self.policy.optim_step(AdamParams(1e-1))
        return self.policy.publish_weights()


@asynccontextmanager
async def rolling(
    world: World, name: str, batching: Batching = Batching.OPERATION
) -> AsyncIterator[Rolling]:
    size = LONG + 10
    specs = [
        policy_spec(max_position_embeddings=size),
        sampler_spec(positions=size, batching=batching),
    ]
    job = await world.tenant.submit_job(name, specs)
    yield Rolling(job, world.mesh)
    await job.finish()
    await world.log.caught_up()
    # What had not begun when an update came was cancelled.
    failures = [f for f in world.log.failures() if f.key.job == name]
    assert [f for f in failures if f.outcome is not Outcome.CANCELLED] == []


def flat(result: RolloutResult) -> list[tuple[Sequence, list[VersionRun]]]:
    pairs = []
    for sequences, runs in zip(result.sequences, result.versions, strict=True):
        pairs += [*zip(sequences, runs, strict=True)]
    return pairs


async def from_here(
    sampler: Deployment, prompt: Prompt, sample: int, drawn: list[int], num_tokens: int
) -> list[int]:
    """The next tokens of a sample after those drawn, with the sampler's weights as they are."""
    start = continued(prompt, Sequence(drawn, [], "partial"), sample)
    sampling = SamplingParams(len(drawn) + num_tokens, ignore_eos=True)
    ((sequence,),) = (await sampler.generate([start], sampling)).sequences
    return list(int32s(sequence.tokens))


async def test_updates_with_equal_weights_change_no_token(world: World) -> None:
    async with rolling(world, "equal") as job:
        expected = await job.sampler.generate(PROMPTS, SAMPLING, NUM_SAMPLES)
        rollout = job.sampler.rollout(PROMPTS, SAMPLING, NUM_SAMPLES)
        versions = [0]
        for _ in range(2):
            await job.drawing()
            published = job.publish()
            await job.sampler.update_weights(published)
            versions.append(published.seq)
        result = await rollout
        assert rollout.done()
        for (mine, runs), theirs in zip(
            flat(result), [s for group in expected.sequences for s in group], strict=True
        ):
            assert int32s(mine.tokens) == int32s(theirs.tokens)
            assert list(float32s(mine.logprobs)) == pytest.approx(
                list(float32s(theirs.logprobs)), abs=1e-4
            )
            assert mine.stop_reason == "length"
            assert [run.version for run in runs] == versions
            assert sum(run.num_tokens for run in runs) == LONG


async def test_tokens_after_an_update_are_those_of_the_new_weights(world: World) -> None:
    async with rolling(world, "new") as job:
        before = await job.sampler.generate(PROMPTS, SamplingParams(20, ignore_eos=True), 1)
        rollout = job.sampler.rollout(PROMPTS, SAMPLING, NUM_SAMPLES)
        await job.drawing()
        published = job.publish(after_a_step=1)
        await job.sampler.update_weights(published)
        result = await rollout
        for i, prompt in enumerate(PROMPTS):
            first = list(int32s(before.sequences[i][0].tokens))
            assert list(int32s(result.sequences[i][0].tokens))[:20] == first
            for k in range(NUM_SAMPLES):
                old, new = result.versions[i][k]
                assert (old.version, new.version) == (0, published.seq)
                tokens = list(int32s(result.sequences[i][k].tokens))
                drawn = tokens[: old.num_tokens]
                rest = await from_here(job.sampler, prompt, k, drawn, 30)
                assert rest == tokens[old.num_tokens :][:30]


@pytest.mark.parametrize(
    "batching", [pytest.param(Batching.OPERATION, marks=pytest.mark.slow), Batching.SHARED]
)
async def test_rollouts_that_wait_their_turn_are_drawn_with_the_new_weights(
    batching: Batching, world: World
) -> None:
    """What has not begun when the update comes is asked for once more; a `generate` is not."""
    async with rolling(world, f"turns-{batching}", batching) as job:
        rollouts = [job.sampler.rollout([prompt], SAMPLING) for prompt in PROMPTS * 2]
        await job.drawing()
        published = job.publish(after_a_step=2)
        await job.sampler.update_weights(published)
        results = [await rollout for rollout in rollouts]
        assert all(runs[-1].version == published.seq for r in results for _, runs in flat(r))
        for result in results:
            ((sequence, runs),) = flat(result)
            assert sum(run.num_tokens for run in runs) == LONG == len(int32s(sequence.tokens))


async def test_rank_that_is_killed_around_updates_loses_no_sample(world: World) -> None:
    async with rolling(world, "killed") as job:
        rollout = job.sampler.rollout(PROMPTS, SAMPLING, NUM_SAMPLES)
        await job.drawing()
        first = asyncio.create_task(job.sampler.update_weights(job.publish(after_a_step=1)))
        job.kill_sampler()
        await first
        await job.drawing()
        job.kill_sampler()
        published = job.publish(after_a_step=2)
        await job.sampler.update_weights(published)
        for sequence, runs in flat(await rollout):
            assert sum(run.num_tokens for run in runs) == LONG == len(int32s(sequence.tokens))
            assert runs[-1].version == published.seq
            assert sequence.stop_reason == "length"


async def test_rollout_is_stopped_with_what_it_has(world: World) -> None:
    async with rolling(world, "stopped") as job:
        running = job.sampler.rollout(PROMPTS, SAMPLING, NUM_SAMPLES)
        await job.drawing()  # or the other one might overtake it on the way
        waiting = job.sampler.rollout(PROMPTS[:1], SAMPLING)
        await waiting.stop()
        await running.stop()
        for sequence, runs in flat(await running):
            assert sequence.stop_reason == "partial"
            assert 0 < len(int32s(sequence.tokens)) == sum(run.num_tokens for run in runs) < LONG
        ((sequence, runs),) = flat(await waiting)
        assert (list(int32s(sequence.tokens)), runs, sequence.stop_reason) == ([], [], "partial")


async def test_rollout_ends_with_its_job(world: World) -> None:
    job = await world.tenant.submit_job("ends", [sampler_spec(positions=LONG + 10)])
    sampler = job.deployment("sampler")
    rollout = sampler.rollout(PROMPTS, SAMPLING)
    none = sampler.rollout([], SAMPLING)
    assert await none == RolloutResult([], [])
    with pytest.raises(client.CallerError):
        sampler.rollout([Prompt([2**31])], SAMPLING)
    await job.finish()
    # A router may see the operation after the job's end: then it is refused, else ended.
    with pytest.raises(client.PhaseloomError) as raised:
        await rollout
    codes = (client.Code.ABORTED, client.Code.FAILED_PRECONDITION)
    assert raised.value.info.code in codes
