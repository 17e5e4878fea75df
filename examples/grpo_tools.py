"""GRPO on a model that answers in several turns, with a retriever and a calculator.

    python examples/grpo_tools.py --tool-seconds 0.2

A trajectory is a conversation: the model writes a line, the environment answers it, until a line is
the answer. Each line is a `generate` of its own, and trajectories go on independently: while one
waits for its tool the sampler serves others, and while all wait the device is another job's. With
`--together` all trajectories of a step take their turns together instead: one `generate` has a line
of each, then all of their tools are called, and the next turn begins when the slowest has answered.
That is fewer operations, and a wait at every turn. A trajectory whose tool failed is told and left
out; it is not the model's fault. `grpo.py` is the longer story, with a reference model and
checkpoints.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from grpo import Barrier, Report, normalised, report_line, spread
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
from phaseloom.client import Sequence as Sample

MAX_TURNS = 6
MAX_TURN_TOKENS = 10
MAX_POSITIONS = 160
SETTABLE = ("steps", "questions", "group", "warmup_steps", "warmup_batch", "eval_questions", "seed")
"""The settings that options of the command line can change."""
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
    together: bool = False
    """Whether all trajectories of a step take their turns together."""


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
            if not await answered(environment, trajectory, sequences[0], rng):
                break
    except (ToolError, PhaseloomError) as error:
        trajectory.failure = str(error)
    return trajectory


async def converse_together(
    sampler: Deployment, environment: Environment, tries: Sequence[tuple[Question, random.Random]]
) -> list[Trajectory]:
    """Try questions turn by turn: one `generate` for all that go on, then all of their tools."""
    trajectories = [Trajectory(question, encode(question.text + "\n")) for question, _ in tries]

    async def answered_or_failed(
        trajectory: Trajectory, sequence: Sample, rng: random.Random
    ) -> bool:
        try:
            return await answered(environment, trajectory, sequence, rng)
        except ToolError as error:
            trajectory.failure = str(error)
            return False

    going = [(each, rng) for each, (_, rng) in zip(trajectories, tries, strict=True)]
    for _ in range(MAX_TURNS):
        if not going:
            break
        prompts = [Prompt([*each.tokens], seed=rng.getrandbits(31)) for each, rng in going]
        try:
            sequences = (await sampler.generate(prompts, _SAMPLING)).sequences
        except PhaseloomError as error:
            for each, _ in going:
                each.failure = str(error)
            break
        go_on = await asyncio.gather(
            *(
                answered_or_failed(each, sequence, rng)
                for (each, rng), (sequence,) in zip(going, sequences, strict=True)
            )
        )
        going = [each for each, goes_on in zip(going, go_on, strict=True) if goes_on]
    return trajectories


async def answered(
    environment: Environment, trajectory: Trajectory, sequence: Sample, rng: random.Random
) -> bool:
    """Take the model's turn, and let the environment answer it.

    Returns: whether the conversation goes on; else the turn was the model's answer.
    Raises:  ToolError: the tool gave no answer.
    """
    tokens = int32s(sequence.tokens)
    trajectory.write(tokens, float32s(sequence.logprobs))
    turn = decode(tokens).removesuffix("\n")
    reply = await environment.call(turn, rng)
    trajectory.reward += environment.reward(trajectory.question, turn, reply)
    if reply is None:
        return False
    trajectory.read(reply)
    return True


async def train(
    job: Job, environment: Environment, settings: Settings, report: Report, barrier: Barrier
) -> None:
    """Warm up, evaluate, train, evaluate again; each event is reported as it happens."""
    policy, sampler = job.deployment("policy"), job.deployment("sampler")
    rng = random.Random(settings.seed)

    async def try_all(
        questions: list[Question], count: int, rng: random.Random
    ) -> list[list[Trajectory]]:
        """[question][try], of those that did not fail."""
        tries = [
            (question, random.Random(rng.getrandbits(64)))
            for question in questions
            for _ in range(count)
        ]
        if settings.together:
            tried = await converse_together(sampler, environment, tries)
        else:
            tried = await asyncio.gather(*(converse(sampler, environment, *each) for each in tries))
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
    report("warmup", steps=settings.warmup_steps)
    reward_start = await evaluate("start")
    await barrier("start")

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
    await barrier("end")
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


def model_of(settings: Settings) -> ModelSpec:
    return ModelSpec({**MODEL, "max_position_embeddings": MAX_POSITIONS}, init_seed=settings.seed)


def deployments(model: ModelSpec, pool: str = "") -> list[DeploymentSpec]:
    """Deployments of the job. Args: pool: of both; empty: they are on two pools."""
    return [
        DeploymentSpec("policy", pool or "train", "fsdp", model, trainable=True),
        DeploymentSpec("sampler", pool or "rollout", "sampler", model),
    ]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--job", default="tools", help="the job's name")
    parser.add_argument("--tool-seconds", type=float, default=0.0, help="mean time of a call")
    parser.add_argument("--tool-faults", type=float, default=0.0, help="share of calls that fail")
    parser.add_argument("--call-reward", type=float, default=0.0, help="of each call understood")
    parser.add_argument("--together", action="store_true", help="all take their turns together")
    parser.add_argument("--pool", default="", help="of all deployments; default: two pools")
    parser.add_argument("--wait", action="store_true", help="for a line on stdin at each barrier")
    for name in SETTABLE:
        default = getattr(Settings, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    options = parser.parse_args()
    given = {name: getattr(options, name) for name in SETTABLE}
    settings = Settings(**given, together=options.together)
    environment = Environment(
        seconds=options.tool_seconds, faults=options.tool_faults, call_reward=options.call_reward
    )

    async def barrier(name: str) -> None:
        report_line("barrier", name=name)
        if options.wait and not await asyncio.to_thread(sys.stdin.readline):
            raise EOFError("stdin ended before the barrier was lifted")

    async with connect() as mesh:
        job = await mesh.submit_job(
            options.job,
            deployments(model_of(settings), options.pool),
            config=asdict(settings),
            checkpoints=["final"],
        )
        report_line("ready", job=job.name, steps=settings.steps)
        async with job:  # ends it; Ctrl-C leaves it as it is
            await train(job, environment, settings, report_line, barrier)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except PhaseloomError as error:
        sys.exit(f"grpo_tools.py: {error}")
