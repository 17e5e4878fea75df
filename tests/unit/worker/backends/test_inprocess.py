"""The oracle itself: a controller's calls in order, versions, and the same weights every time."""

from __future__ import annotations

from pathlib import Path

import pytest

from phaseloom.common.contract.arrays import int32s
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.operations import AdamParams, Datum, Loss, Prompt, SamplingParams
from phaseloom.common.contract.specs import DeploymentSpec, JobSpec, ModelSpec
from tests.support.inprocess import Job
from tests.support.tinymodel import config
from tests.unit.worker.backends.models import batch

ADAM = AdamParams(1e-2)


def _job(root: Path | None = None) -> Job:
    model = ModelSpec(config(), init_seed=5)
    return Job(
        JobSpec(
            deployments=[
                DeploymentSpec("policy", "train", "fsdp", model, trainable=True),
                DeploymentSpec("sampler", "rollout", "sampler", model),
            ]
        ),
        root,
    )


async def _train(job: Job, steps: int) -> str:
    """Each rollout feeds the next update, so that every draw and every bit shows in the end."""
    policy, sampler = job.deployment("policy"), job.deployment("sampler")
    for step in range(steps):
        published = policy.publish_weights()
        sampler.sync_weights(published)
        prompts = [Prompt([1, 2, 3], seed=step), Prompt([4], seed=99 - step)]
        rollout = await sampler.generate(prompts, SamplingParams(6, 1.0, [0]), 4)
        data = []
        for prompt, samples in zip(prompts, rollout.sequences, strict=True):
            for sample in samples:
                tokens = int32s(prompt.tokens) + int32s(sample.tokens)
                data.append(Datum(tokens[:-1], tokens[1:], weights=[1.0] * (len(tokens) - 1)))
        policy.forward_backward(data[:4], Loss.CROSS_ENTROPY)
        policy.forward_backward(data[4:], "cross_entropy")
        await policy.optim_step(ADAM)
    return policy.backend.weights_sha256()


async def test_job_gives_the_same_weights_every_time() -> None:
    with _job() as first:
        once = await _train(first, 3)
    with _job() as second:
        assert await _train(second, 3) == once
        assert await _train(second, 1) != once


async def test_sync_brings_the_version_named_and_not_what_came_later() -> None:
    with _job() as job:
        policy, sampler = job.deployment("policy"), job.deployment("sampler")
        published = policy.publish_weights()
        policy.forward_backward(batch(loss=Loss.CROSS_ENTROPY), Loss.CROSS_ENTROPY)
        policy.optim_step(ADAM)
        later = policy.publish_weights()
        synced = await sampler.sync_weights(published)
        assert synced.version == published.seq == 1
        assert synced.digest == (await published).digest == sampler.backend.weights_sha256()
        assert (await sampler.sync_weights(later)).digest == policy.backend.weights_sha256()
        assert (await later).digest != (await published).digest


async def test_operation_fails_when_what_it_comes_after_has_failed() -> None:
    with _job() as job:
        policy, sampler = job.deployment("policy"), job.deployment("sampler")
        bad = policy.forward_backward([], Loss.PPO)
        behind = sampler.forward(batch(), after=[bad])
        with pytest.raises(CallerError) as raised:
            await behind
        assert raised.value.info.code is Code.FAILED_PRECONDITION
        with pytest.raises(CallerError, match="empty"):
            await bad


async def test_state_saved_and_loaded_is_the_same(tmp_path: Path) -> None:
    with _job(tmp_path) as job:
        policy = job.deployment("policy")
        await _train(job, 1)
        saved = await policy.save_state("here")
        await _train(job, 1)
        assert policy.backend.weights_sha256() != saved.weights_sha256
        assert (await policy.load_state("here")).weights_sha256 == saved.weights_sha256
        once = await _train(job, 1)
        await policy.load_state("here")
        assert await _train(job, 1) == once


async def test_deployment_refuses_a_kind_that_its_backend_lacks() -> None:
    with _job() as job, pytest.raises(CallerError, match="forward_backward"):
        job.deployment("sampler").forward_backward(batch(), Loss.PPO)
