"""Rollouts that go on with new weights from their next token, on the whole mesh."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from phaseloom import client
from phaseloom.cli.supervisor import Mesh, MeshConfig, NodeConfig
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
from tests.support.jobs import kill_rank, running_mesh, tenant
from tests.support.node import lesson, policy_spec, sampler_spec

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


class Rolling:
    """A job with a policy and a sampler, and how far its rollouts are."""

    def __init__(self, job: MeshJob, mesh: Mesh) -> None:
        self.mesh = mesh
        self.policy, self.sampler = job.deployment("policy"), job.deployment("sampler")
        self._drawn = asyncio.Event()
        job.runtime_hook(self._on_event)

    def _on_event(self, event: RuntimeEvent) -> None:
        if isinstance(event, Progress) and event.num_done:
            self._drawn.set()

    async def drawing(self) -> None:
        """Wait until a rollout is told to have drawn more tokens."""
        self._drawn.clear()
        await self._drawn.wait()

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
    directory: Path, batching: Batching = Batching.OPERATION
) -> AsyncIterator[Rolling]:
    size = LONG + 10
    specs = [
        policy_spec(max_position_embeddings=size),
        sampler_spec(positions=size, batching=batching),
    ]
    async with running_mesh(MESH, directory) as (mesh, log), tenant(mesh) as connection:
        job = await connection.submit_job("rolling", specs)
        yield Rolling(job, mesh)
        await job.finish()
        await log.caught_up()
        # What had not begun when an update came was cancelled.
        assert [f for f in log.failures() if f.outcome is not Outcome.CANCELLED] == []


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


async def test_updates_with_equal_weights_change_no_token(short_dir: Path) -> None:
    async with rolling(short_dir) as job:
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


async def test_tokens_after_an_update_are_those_of_the_new_weights(short_dir: Path) -> None:
    async with rolling(short_dir) as job:
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
    batching: Batching, short_dir: Path
) -> None:
    """What has not begun when the update comes is asked for once more; a `generate` is not."""
    async with rolling(short_dir, batching) as job:
        rollouts = [job.sampler.rollout([prompt], SAMPLING) for prompt in PROMPTS * 2]
        await job.drawing()
        published = job.publish(after_a_step=2)
        await job.sampler.update_weights(published)
        results = [await rollout for rollout in rollouts]
        assert all(runs[-1].version == published.seq for r in results for _, runs in flat(r))
        for result in results:
            ((sequence, runs),) = flat(result)
            assert sum(run.num_tokens for run in runs) == LONG == len(int32s(sequence.tokens))


async def test_rank_that_is_killed_around_updates_loses_no_sample(short_dir: Path) -> None:
    async with rolling(short_dir) as job:
        rollout = job.sampler.rollout(PROMPTS, SAMPLING, NUM_SAMPLES)
        await job.drawing()
        first = asyncio.create_task(job.sampler.update_weights(job.publish(after_a_step=1)))
        kill_rank(job.mesh, "rolling.sampler")
        await first
        await job.drawing()
        kill_rank(job.mesh, "rolling.sampler")
        published = job.publish(after_a_step=2)
        await job.sampler.update_weights(published)
        for sequence, runs in flat(await rollout):
            assert sum(run.num_tokens for run in runs) == LONG == len(int32s(sequence.tokens))
            assert runs[-1].version == published.seq
            assert sequence.stop_reason == "length"


async def test_rollout_is_stopped_with_what_it_has(short_dir: Path) -> None:
    async with rolling(short_dir) as job:
        running = job.sampler.rollout(PROMPTS, SAMPLING, NUM_SAMPLES)
        waiting = job.sampler.rollout(PROMPTS[:1], SAMPLING)
        await job.drawing()
        await waiting.stop()
        await running.stop()
        for sequence, runs in flat(await running):
            assert sequence.stop_reason == "partial"
            assert 0 < len(int32s(sequence.tokens)) == sum(run.num_tokens for run in runs) < LONG
        ((sequence, runs),) = flat(await waiting)
        assert (list(int32s(sequence.tokens)), runs, sequence.stop_reason) == ([], [], "partial")


async def test_rollout_ends_with_its_job(short_dir: Path) -> None:
    async with running_mesh(MESH, short_dir) as (mesh, _), tenant(mesh) as connection:
        job = await connection.submit_job("rolling", [sampler_spec(positions=LONG + 10)])
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
