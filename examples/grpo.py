"""GRPO on a small language model: an ordinary program that holds no model.

    python examples/grpo.py --task chain_sum --steps 100

Three deployments: `policy` learns on the train pool; `sampler` and `reference` run on the rollout
pool. Calls return at once, so a step's operations are all on their way before the first has run;
`await` is for what the program itself needs. Every random choice comes from seeds given here.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tasks import ALPHABET, STOP, Problem, Task, decode, encode

from phaseloom.client import (
    AdamParams,
    Datum,
    DeploymentSpec,
    Job,
    Loss,
    ModelSpec,
    Prompt,
    SamplingParams,
    connect,
    float32s,
    int32s,
)


@dataclass(frozen=True)
class Settings:
    steps: int = 100
    prompts: int = 16
    """Problems a step; each is answered `group` times."""
    group: int = 16
    micro_batches: int = 4
    max_tokens: int = 8
    seed: int = 0
    warmup_steps: int = 200
    warmup_batch: int = 64
    warmup_rate: float = 1e-3
    learning_rate: float = 1e-4
    kl: float = 0.01
    grad_clip: float = 1.0
    loss: Loss = Loss.IMPORTANCE_SAMPLING
    eval_prompts: int = 256
    eval_seed: int = 10_000_019
    """Far from the training items: item i of a dataset draws from its seed + i."""
    model: dict[str, Any] = field(
        default_factory=lambda: {
            "model_type": "qwen3",
            "vocab_size": len(ALPHABET),
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "max_position_embeddings": 64,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": STOP,
        }
    )


SETTINGS = {
    "chain_sum": Settings(prompts=16, max_tokens=4, warmup_steps=200),
    "letter_counting": Settings(prompts=8, max_tokens=20, warmup_steps=50),
}


def deployments(settings: Settings) -> list[DeploymentSpec]:
    model = ModelSpec(settings.model, init_seed=settings.seed)
    return [
        DeploymentSpec("policy", "train", "fsdp", model, trainable=True, seed=settings.seed),
        DeploymentSpec("sampler", "rollout", "sampler", model, seed=settings.seed + 1),
        DeploymentSpec("reference", "rollout", "sampler", model, seed=settings.seed + 2),
    ]


async def train(
    job: Job,
    task: str,
    settings: Settings,
    report: Callable[..., None],
    barrier: Callable[[str], Awaitable[None]],
) -> None:
    """Warm up, train, evaluate before and after; what happens is reported event by event."""
    policy, sampler, reference = map(job.deployment, ("policy", "sampler", "reference"))
    data = Task(task, seed=settings.seed, size=1_000_000)
    problems = itertools.cycle(data.problems())
    held_out = list(held_out_problems(task, settings))
    rng = random.Random(settings.seed)
    sampling = SamplingParams(settings.max_tokens, stop_token_ids=[STOP])

    def prompts(of: list[Problem]) -> list[Prompt]:
        return [Prompt(encode(problem.prompt), seed=rng.getrandbits(31)) for problem in of]

    async def evaluate() -> float:
        result = await sampler.generate(prompts(held_out), sampling)
        answers = [answer(samples[0].tokens) for samples in result.sequences]
        return statistics.fmean(map(data.reward, held_out, answers))

    # Warm-up: teach the form of an answer, so that some rewards are not zero.
    adam = AdamParams(settings.warmup_rate, grad_clip_norm=settings.grad_clip)
    for _ in range(settings.warmup_steps):
        batch = [worked(next(problems)) for _ in range(settings.warmup_batch)]
        policy.forward_backward(batch, Loss.CROSS_ENTROPY)
        warmed_up = policy.optim_step(adam)
        await warmed_up
    published = policy.publish_weights()
    reference.sync_weights(published)
    sampler.sync_weights(published)
    report("warmup", steps=settings.warmup_steps)
    reward_start = await evaluate()
    report("eval", name="start", reward=reward_start)
    await barrier("start")

    adam = replace_rate(adam, settings.learning_rate)
    start_s = time.time()
    asked = list(itertools.islice(problems, settings.prompts))
    generated = sampler.generate(prompts(asked), sampling, settings.group)
    for step in range(1, settings.steps + 1):
        groups = (await generated).sequences
        batch = [
            datum(problem, int32s(sample.tokens), float32s(sample.logprobs))
            for problem, samples in zip(asked, groups, strict=True)
            for sample in samples
        ]
        referred = reference.forward(batch)
        rewards = [
            [data.reward(problem, answer(sample.tokens)) for sample in samples]
            for problem, samples in zip(asked, groups, strict=True)
        ]
        logprobs = [float32s(values) for values in (await referred).logprobs]
        batch = with_advantages(batch, rewards, logprobs, settings.kl)

        # The whole update at once, and the next rollout behind it.
        size = -(-len(batch) // settings.micro_batches)
        for first in range(0, len(batch), size):
            policy.forward_backward(batch[first : first + size], settings.loss)
        policy.optim_step(adam)
        published = policy.publish_weights()
        synced = sampler.sync_weights(published)
        if step < settings.steps:
            asked = list(itertools.islice(problems, settings.prompts))
            generated = sampler.generate(prompts(asked), sampling, settings.group)
        report("step", step=step, reward=statistics.fmean(itertools.chain(*rewards)))
    await published
    end_s = time.time()
    await barrier("end")

    await synced
    reward_end = await evaluate()
    report("eval", name="end", reward=reward_end)
    saved = await policy.save_state("final")
    report(
        "done",
        weights_sha256=saved.weights_sha256,
        reward_start=reward_start,
        reward_end=reward_end,
        grpo_start_t=start_s,
        grpo_end_t=end_s,
    )
