"""GRPO on a registered model, such as SmolLM2-135M, which completes a few worked lines.

    python examples/grpo_pretrained.py --model smollm2 --tokenizer /models/smollm2

The prompt is text: four problems with their answers, then one without. So the model needs no
warm-up, and an answer is a token or two. The job has two deployments, which start from the same
files: `policy` learns on the train pool, `sampler` answers on the rollout pool. With `--adapter 16`
the job trains a LoRA adapter of that rank in place of all weights. `grpo.py` is the longer story,
with a reference model and checkpoints; what both report is the same.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from grpo import most_varied, normalised, report_line
from tasks import import_reasoning_gym

from phaseloom.client import (
    AdamParams,
    Adapter,
    Datum,
    DeploymentSpec,
    Job,
    Loss,
    ModelSpec,
    PhaseloomError,
    Prompt,
    SamplingParams,
    Sequence,
    connect,
    float32s,
    int32s,
)

TASKS: dict[str, dict[str, int]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "letter_counting": {"min_words": 1, "max_words": 2},
}
NUM_SHOTS = 4
_SIZE = 10_000_000
_EVAL_SEED = 1_000_000_007
_NEWLINE = "Ċ"
"""How vocabularies of bytes spell a line's end."""


@dataclass(frozen=True)
class Settings:
    steps: int = 8
    prompts: int = 8
    group: int = 16
    train_groups: int = 4
    """The groups of a step that are trained on: those whose answers differ most in reward."""
    max_tokens: int = 5
    learning_rate: float = 2e-5
    adapter_learning_rate: float = 5e-4
    """The learning rate where an adapter is trained in place of all weights."""
    grad_clip: float = 1.0
    eval_prompts: int = 96
    seed: int = 0


@dataclass(frozen=True)
class Problem:
    tokens: list[int]
    item: dict[str, Any]


class FewShotTask:
    """A reasoning-gym dataset: each item is asked as the line after some that are answered."""

    def __init__(self, name: str, tokenizer: Any, seed: int) -> None:
        import_reasoning_gym()
        import reasoning_gym

        self._dataset = reasoning_gym.create_dataset(name, seed=seed, size=_SIZE, **TASKS[name])
        # The same shots for every seed: they are a part of the task.
        shown = reasoning_gym.create_dataset(name, seed=5, size=NUM_SHOTS, **TASKS[name])
        self._name = name
        self._tokenizer = tokenizer
        self._shots = "".join(f"{self._line(item)} {item['answer']}\n" for item in shown)
        vocabulary = tokenizer.get_vocab()
        self.stops = sorted(i for text, i in vocabulary.items() if _NEWLINE in text)

    def problems(self) -> Iterator[Problem]:
        for item in self._dataset:
            tokens = self._tokenizer.encode(self._shots + self._line(item))
            yield Problem(tokens, item)

    def reward(self, problem: Problem, sample: Sequence) -> float:
        """The dataset's own score of the line's rest."""
        text = self._tokenizer.decode(int32s(sample.tokens)).partition("\n")[0].strip()
        return float(self._dataset.score_answer(text, problem.item))

    def _line(self, item: dict[str, Any]) -> str:
        known = item["metadata"]
        if self._name == "chain_sum":
            return f"{known['expression']} ="
        return f"{known['target_letter']} in {' '.join(known['span'])} ="


async def train(
    job: Job,
    task: FewShotTask,
    held_out: list[Problem],
    settings: Settings,
    adam: AdamParams,
    *,
    report: Callable[..., None],
    barrier: Callable[[str], Awaitable[None]],
) -> None:
    """Evaluate, train, evaluate again; each event is reported as it happens."""
    policy, sampler = job.deployment("policy"), job.deployment("sampler")
    sampling = SamplingParams(settings.max_tokens, stop_token_ids=task.stops)
    problems = task.problems()
    rng = random.Random(settings.seed)

    async def evaluate(when: str) -> float:
        asked = prompts(held_out, random.Random(_EVAL_SEED))
        answers = (await sampler.generate(asked, sampling)).sequences
        reward = statistics.fmean(
            task.reward(problem, sample)
            for problem, (sample,) in zip(held_out, answers, strict=True)
        )
        report("eval", name=when, reward=reward)
        return reward

    reward_start = await evaluate("start")
    await barrier("start")
    start_t = time.time()
    for number in range(1, settings.steps + 1):
        asked = list(islice(problems, settings.prompts))
        groups = (await sampler.generate(prompts(asked, rng), sampling, settings.group)).sequences
        rewards = [[task.reward(asked[i], s) for s in g] for i, g in enumerate(groups)]
        chosen = most_varied(rewards, settings.train_groups)
        batch = with_advantages(
            [asked[i] for i in chosen], [groups[i] for i in chosen], [rewards[i] for i in chosen]
        )
        gradients = policy.forward_backward(batch, Loss.PPO)
        stepped = policy.optim_step(adam)
        published = policy.publish_weights()
        synced = sampler.sync_weights(published)
        for operation in (gradients, stepped, published, synced):
            await operation
        report("step", step=number, reward=statistics.fmean(chain.from_iterable(rewards)))
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


def prompts(problems: list[Problem], rng: random.Random) -> list[Prompt]:
    return [Prompt(problem.tokens, seed=rng.getrandbits(31)) for problem in problems]


def with_advantages(
    problems: list[Problem], groups: list[list[Sequence]], rewards: list[list[float]]
) -> list[Datum]:
    """Samples to train on, each with its reward against its group's. The loss is the mean over all
    tokens."""
    total = sum(len(int32s(sample.tokens)) for group in groups for sample in group)
    batch = []
    for problem, group, scores in zip(problems, groups, rewards, strict=True):
        for sample, advantage in zip(group, normalised(scores), strict=True):
            answer = int32s(sample.tokens)
            tokens = problem.tokens + answer
            masked = [0.0] * (len(problem.tokens) - 1)
            batch.append(
                Datum(
                    tokens[:-1],
                    tokens[1:],
                    logprobs=masked + float32s(sample.logprobs),
                    advantages=masked + [advantage / total] * len(answer),
                )
            )
    return batch


def directory(text: str) -> str:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {text}")
    return text


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--task", choices=TASKS, default="chain_sum")
    parser.add_argument("--job", help="the job's name; default: the task's")
    parser.add_argument("--wait", action="store_true", help="for a line on stdin at each barrier")
    parser.add_argument("--model", required=True, help="the registered model's name")
    parser.add_argument(
        "--tokenizer", type=directory, required=True, help="a directory with its tokenizer"
    )
    parser.add_argument("--adapter", type=int, metavar="RANK", help="train a LoRA adapter")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--rollout-backend", choices=("sampler", "vllm"), default="sampler")
    parser.add_argument("--kv-cache-bytes", type=int, default=0, help="of vllm, on each device")
    options = parser.parse_args()
    settings = Settings(steps=options.steps, seed=options.seed)

    async def barrier(name: str) -> None:
        report_line("barrier", name=name)
        if options.wait and not await asyncio.to_thread(sys.stdin.readline):
            raise EOFError("stdin ended before the barrier was lifted")

    tokenizer = await asyncio.to_thread(load_tokenizer, options.tokenizer)
    task = FewShotTask(options.task, tokenizer, settings.seed)
    unseen = FewShotTask(options.task, tokenizer, _EVAL_SEED)
    held_out = list(islice(unseen.problems(), settings.eval_prompts))
    adapter = Adapter(options.adapter, alpha=2.0 * options.adapter) if options.adapter else None
    model = ModelSpec(registered=options.model, adapter=adapter)
    rate = settings.adapter_learning_rate if adapter else settings.learning_rate
    adam = AdamParams(rate, grad_clip_norm=settings.grad_clip)
    deployments = [
        DeploymentSpec("policy", "train", "fsdp", model, trainable=True),
        DeploymentSpec(
            "sampler",
            "rollout",
            options.rollout_backend,
            model,
            scratch_bytes=options.kv_cache_bytes,
        ),
    ]
    async with connect() as mesh:
        job = await mesh.submit_job(
            options.job or options.task,
            deployments,
            config=asdict(settings),
            checkpoints=["final"],
        )
        report_line("ready", job=job.name, task=options.task, steps=settings.steps)
        async with job:  # ends it; Ctrl-C leaves it as it is
            await train(job, task, held_out, settings, adam, report=report_line, barrier=barrier)


def load_tokenizer(directory: str) -> Any:
    from transformers import AutoTokenizer

    factory: Any = AutoTokenizer
    return factory.from_pretrained(directory)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except PhaseloomError as error:
        sys.exit(f"grpo_pretrained.py: {error}")
