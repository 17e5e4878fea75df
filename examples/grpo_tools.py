"""GRPO on a model that answers in several turns, with a retriever and a calculator.

    python examples/grpo_tools.py --tool-seconds 0.2

A trajectory is a conversation: the model writes a line, the environment answers it, until a line is
the answer. Each line is a `generate` of its own, and trajectories go on independently: while one
waits for its tool the sampler serves others, and while all wait the device is another job's. A
trajectory whose tool failed is told and left out; it is not the model's fault. `grpo.py` is the
longer story, with a reference model and checkpoints.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from grpo import normalised, report_line, spread
from settings import MODEL
from tasks import STOP, decode, encode
from toolbox import Environment, Question, ToolError

from phaseloom.client import (
    AdamParams,
    Datum,
    Deployment,
    DeploymentSpec,
    Job,
    Loss,
    ModelSpec,
    PhaseloomError,
    Prompt,
    SamplingParams,
    connect,
    float32s,
    int32s,
)

MAX_TURNS = 6
MAX_TURN_TOKENS = 10
MAX_POSITIONS = 160
_EVAL_SEED = 1_000_000_007
_SAMPLING = SamplingParams(MAX_TURN_TOKENS, stop_token_ids=[STOP])


@dataclass(frozen=True)
class Settings:
    steps: int = 30
    questions: int = 24
    """The questions of a step; each is tried `group` times."""
    group: int = 8
    warmup_steps: int = 100
    warmup_batch: int = 64
    warmup_rate: float = 1e-3
    learning_rate: float = 3e-4
    grad_clip: float = 1.0
    eval_questions: int = 128
    seed: int = 0


@dataclass
class Trajectory:
    """A conversation: its tokens, and which of them the model wrote."""

    question: Question
    tokens: list[int]
    logprobs: list[float] = field(default_factory=list)
    """Of each token behind the question; 0 where the environment wrote it."""
    is_own: list[bool] = field(default_factory=list)
    """Of each token behind the question: whether the model wrote it."""
    num_turns: int = 0
    reward: float = 0.0
    failure: str = ""
    """Why it is left out."""

    def write(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self.num_turns += 1
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs)
        self.is_own.extend([True] * len(tokens))

    def read(self, text: str) -> None:
        tokens = encode(text + "\n")
        self.tokens.extend(tokens)
        self.logprobs.extend([0.0] * len(tokens))
        self.is_own.extend([False] * len(tokens))

    def taught(self, weight: float) -> Datum:
        """A sample for cross-entropy, with this weight on each token that the model wrote."""
        return Datum(self.tokens[:-1], self.tokens[1:], weights=self._on_own(weight))

    def tried(self, advantage: float) -> Datum:
        """A sample for PPO, with this advantage on each token that the model wrote."""
        logprobs = self._on_own(0.0)
        logprobs[-len(self.logprobs) :] = self.logprobs
        return Datum(
            self.tokens[:-1],
            self.tokens[1:],
            logprobs=logprobs,
            advantages=self._on_own(advantage),
        )

    def _on_own(self, value: float) -> list[float]:
        """[token]: position i predicts token i + 1; what the model did not write counts nothing."""
        num_asked = len(self.tokens) - len(self.is_own)
        return [0.0] * (num_asked - 1) + [value * is_own for is_own in self.is_own]


async def converse(
    sampler: Deployment, environment: Environment, question: Question, rng: random.Random
) -> Trajectory:
    """Try a question until the model answers, has had too many turns, or a tool failed."""
    trajectory = Trajectory(question, encode(question.text + "\n"))
    try:
        while trajectory.num_turns < MAX_TURNS:
            prompt = Prompt([*trajectory.tokens], seed=rng.getrandbits(31))
            (sequences,) = (await sampler.generate([prompt], _SAMPLING)).sequences
            tokens = int32s(sequences[0].tokens)
            trajectory.write(tokens, float32s(sequences[0].logprobs))
            turn = decode(tokens).removesuffix("\n")
            reply = await environment.call(turn, rng)
            if reply is None:
                trajectory.reward = float(turn == question.answer)
                break
            trajectory.read(reply)
    except (ToolError, PhaseloomError) as error:
        trajectory.failure = str(error)
    return trajectory


async def train(
    job: Job, environment: Environment, settings: Settings, report: Callable[..., None]
) -> None:
    """Warm up, evaluate, train, evaluate again; each event is reported as it happens."""
    policy, sampler = job.deployment("policy"), job.deployment("sampler")
    rng = random.Random(settings.seed)

    async def try_all(
        questions: list[Question], count: int, rng: random.Random
    ) -> list[list[Trajectory]]:
        """[question][try], of those that did not fail."""
        seeds = [[rng.getrandbits(64) for _ in range(count)] for _ in questions]
        tried = await asyncio.gather(
            *(
                converse(sampler, environment, question, random.Random(seed))
                for question, group in zip(questions, seeds, strict=True)
                for seed in group
            )
        )
        for failed in (each for each in tried if each.failure):
            report("left_out", question=failed.question.text, why=failed.failure)
        groups = [tried[i : i + count] for i in range(0, len(tried), count)]
        return [[each for each in group if not each.failure] for group in groups]

    async def evaluate(when: str) -> float:
        chosen = random.Random(_EVAL_SEED)
        held_out = [environment.question(chosen) for _ in range(settings.eval_questions)]
        tried = [each for group in await try_all(held_out, 1, chosen) for each in group]
        reward = statistics.fmean(each.reward for each in tried)
        report("eval", name=when, reward=reward)
        return reward

    # Warm-up: teach the form of a conversation, so that not every reward is zero.
    adam = AdamParams(settings.warmup_rate, grad_clip_norm=settings.grad_clip)
    steps = []
    for _ in range(settings.warmup_steps):
        questions = [environment.question(rng) for _ in range(settings.warmup_batch)]
        batch = worked(environment, questions)
        steps += [policy.forward_backward(batch, Loss.CROSS_ENTROPY), policy.optim_step(adam)]
    for step in steps:
        await step
    sampler.sync_weights(policy.publish_weights())
    reward_start = await evaluate("start")

    start_t = time.time()
    adam = AdamParams(settings.learning_rate, grad_clip_norm=settings.grad_clip)
    for number in range(1, settings.steps + 1):
        questions = [environment.question(rng) for _ in range(settings.questions)]
        groups = await try_all(questions, settings.group, rng)
        rewards = [[each.reward for each in group] for group in groups]
        batch = with_advantages(groups, rewards)
        if batch:
            update = [policy.forward_backward(batch, Loss.PPO), policy.optim_step(adam)]
            published = policy.publish_weights()
            update += [published, sampler.sync_weights(published)]
            for operation in update:
                await operation
        done = [each for group in groups for each in group]
        report(
            "step",
            step=number,
            reward=statistics.fmean(each.reward for each in done) if done else None,
            turns=statistics.fmean(each.num_turns for each in done) if done else None,
            left_out=settings.questions * settings.group - len(done),
        )
    end_t = time.time()
    reward_end = await evaluate("end")
    saved = await policy.save_state("final")
    report(
        "done",
        weights_sha256=saved.weights_sha256,
        reward_start=reward_start,
        reward_end=reward_end,
        grpo_start_t=start_t,
        grpo_end_t=end_t,
    )


def worked(environment: Environment, questions: list[Question]) -> list[Datum]:
    """Conversations as they should be, weighted so that the mean over the model's tokens is
    minimised."""
    trajectories = []
    for question in questions:
        trajectory = Trajectory(question, encode(question.text + "\n"))
        for turn in question.worked:
            tokens = encode(turn + "\n")
            trajectory.write(tokens, [0.0] * len(tokens))
            if turn != question.worked[-1]:
                trajectory.read(environment.reply(turn))
        trajectories.append(trajectory)
    total = sum(sum(each.is_own) for each in trajectories)
    return [each.taught(1.0 / total) for each in trajectories]


def with_advantages(groups: list[list[Trajectory]], rewards: list[list[float]]) -> list[Datum]:
    """Samples to train on, each with its reward against its group's.

    A group whose rewards are equal teaches nothing, nor does one of which too many failed. The loss
    is the mean over all tokens that the model wrote.
    """
    chosen = [
        (each, advantage)
        for group, scores in zip(groups, rewards, strict=True)
        if len(group) > 1 and spread(scores) > 0.0
        for each, advantage in zip(group, normalised(scores), strict=True)
    ]
    total = sum(sum(each.is_own) for each, _ in chosen)
    return [each.tried(advantage / total) for each, advantage in chosen]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--job", default="tools", help="the job's name")
    parser.add_argument("--tool-seconds", type=float, default=0.0, help="mean time of a call")
    parser.add_argument("--tool-faults", type=float, default=0.0, help="share of calls that fail")
    for name in ("steps", "questions", "warmup_steps", "seed"):
        default = getattr(Settings, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    options = parser.parse_args()
    settings = Settings(
        steps=options.steps,
        questions=options.questions,
        warmup_steps=options.warmup_steps,
        seed=options.seed,
    )
    environment = Environment(seconds=options.tool_seconds, faults=options.tool_faults)
    model = ModelSpec({**MODEL, "max_position_embeddings": MAX_POSITIONS}, init_seed=settings.seed)
    deployments = [
        DeploymentSpec("policy", "train", "fsdp", model, trainable=True),
        DeploymentSpec("sampler", "rollout", "sampler", model),
    ]
    async with connect() as mesh:
        job = await mesh.submit_job(options.job, deployments)
        report_line("ready", job=job.name, steps=settings.steps)
        failed = True
        try:
            await train(job, environment, settings, report_line)
            failed = False
        finally:
            await job.finish(failed=failed)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except PhaseloomError as error:
        sys.exit(f"grpo_tools.py: {error}")
