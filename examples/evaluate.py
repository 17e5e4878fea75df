"""Training with an evaluation next to it, as a job of its own with one curve.

    phaseloom up                   # in one terminal
    python examples/evaluate.py    # in another, with the variables that it prints

Every fifth step publishes a version that can be named for ten minutes. The evaluation samples with
exactly that version, however far the training has come by then. It has its own place in the mesh's
order, its own share of the devices and its own curve on the console, and training never waits for
it. The model, its reward and its samples are those of `hello.py`.
"""

from __future__ import annotations

import asyncio
import sys
from statistics import fmean

from hello import MODEL, PROMPT, reward, scored

from phaseloom.client import (
    AdamParams,
    DeploymentSpec,
    MeshJob,
    OperationHandle,
    PhaseloomError,
    Prompt,
    PublishWeightsResult,
    SamplingParams,
    connect,
    int32s,
)

STEPS, EVERY = 15, 5
HELD_OUT = [Prompt(PROMPT, seed=1000 + number) for number in range(16)]
PINNED_S = 600.0
"""How long a version waits for its evaluation after newer ones are published."""


async def evaluate(
    job: MeshJob, published: OperationHandle[PublishWeightsResult], step: int
) -> None:
    version = (await published).version
    sampler = job.deployment("sampler")
    drawn = await sampler.generate(HELD_OUT, SamplingParams(6), weights=published)
    rewards = [reward(int32s(sample.tokens)) for (sample,) in drawn.sequences]
    job.report({"reward": fmean(rewards)}, step=step)
    print(f"evaluated step {step}, version {version}: reward {fmean(rewards):.2f}", flush=True)


async def train(job: MeshJob, evaluation: MeshJob, group: asyncio.TaskGroup) -> None:
    policy, sampler = job.deployment("policy"), job.deployment("sampler")
    first = policy.publish_weights(ttl_s=PINNED_S)
    group.create_task(evaluate(evaluation, first, 0))
    for step in range(1, STEPS + 1):
        prompt = Prompt(PROMPT, seed=step)
        drawn = await sampler.generate([prompt], SamplingParams(6), num_samples=32)
        (samples,) = drawn.sequences
        rewards = [reward(int32s(sample.tokens)) for sample in samples]
        mean = fmean(rewards)
        batch = [scored(s, r - mean) for s, r in zip(samples, rewards, strict=True)]
        trained = policy.forward_backward(batch, "importance_sampling")
        stepped = policy.optim_step(AdamParams(1e-2, grad_clip_norm=1.0))
        is_evaluated = step % EVERY == 0
        published = policy.publish_weights(ttl_s=PINNED_S if is_evaluated else 0.0)
        synced = sampler.sync_weights(published)
        if is_evaluated:
            group.create_task(evaluate(evaluation, published, step))
        metrics = (await trained).metrics | (await stepped).metrics
        await synced
        job.report({"reward": mean, **metrics}, step=step)


async def main() -> None:
    sampler = DeploymentSpec("sampler", "rollout", "sampler", MODEL)
    async with connect() as mesh:
        policy = DeploymentSpec("policy", "train", "fsdp", MODEL, trainable=True)
        training = await mesh.submit_job("evaluated", [policy, sampler])
        async with training:
            evaluation = await mesh.submit_job("evaluation", [sampler])
            async with evaluation, asyncio.TaskGroup() as group:
                await train(training, evaluation, group)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except* PhaseloomError as errors:
        sys.exit("\n".join(f"evaluate.py: {error}" for error in errors.exceptions))
