"""GRPO on a small language model: an ordinary program that holds no model.

    python examples/grpo.py --task chain_sum

The job has three deployments: `policy` learns on the train pool; `sampler` and `reference` run on
the rollout pool. Calls return at once, so that all operations of a step are on their way before the
first has run; the program awaits only the results that it needs itself. Every random choice comes
from the seed. With `--checkpoint-every`, a program that was killed and is started again goes on
from its last checkpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice

from settings import MODEL, SETTINGS, Settings
from tasks import STOP, Problem, Task, decode, encode

from phaseloom.client import (
    AdamParams,
    CallerError,
    Checkpoint,
    Code,
    Cycle,
    Datum,
    DeploymentSpec,
    Float32s,
    GenerateResult,
    Job,
    Layout,
    Loss,
    ModelSpec,
    OperationHandle,
    PhaseloomError,
    Prompt,
    PublishWeightsResult,
    RolloutResult,
    SamplingParams,
    SaveStateResult,
    Segment,
    Sequence,
    connect,
    float32s,
    int32s,
)

BEFORE_WARM_UP = -1
SETTABLE = (
    "steps",
    "prompts",
    "micro_batches",
    "warmup_steps",
    "seed",
    "checkpoint_every",
    "ahead",
    "rounds",
)
"""The settings that options of the command line can change."""

Report = Callable[..., None]
Barrier = Callable[[str], Awaitable[None]]


def deployments(
    settings: Settings,
    *,
    rollout_backend: str = "sampler",
    kv_cache_bytes: int = 0,
    train_backend: str = "fsdp",
    train_layout: Layout | None = None,
    pool: str = "",
) -> list[DeploymentSpec]:
    """Deployments of the job.

    Args: kv_cache_bytes: of the sampler on vLLM; 0: room for some sequences.
          train_layout: of the policy; None: on one device.
          pool: of all deployments; empty: they are on two pools.
    """
    model = ModelSpec(MODEL, init_seed=settings.seed)
    layout = train_layout or Layout()
    train, rollout = pool or "train", pool or "rollout"
    return [
        DeploymentSpec("policy", train, train_backend, model, trainable=True, layout=layout),
        DeploymentSpec("sampler", rollout, rollout_backend, model, scratch_bytes=kv_cache_bytes),
        DeploymentSpec("reference", rollout, "sampler", model),
    ]


def declared(rollout_s: float, train_s: float) -> Cycle:
    """The cycle of a step that runs alone. A job that declares it need not be profiled first."""
    segments = [Segment("rollout", 0.0, rollout_s), Segment("train", rollout_s, train_s)]
    return Cycle(rollout_s + train_s, segments)


@dataclass
class Memory:
    """All that a new controller must know beside the settings; checkpoints carry it."""

    step: int = BEFORE_WARM_UP
    """The last step that is done."""
    reward_start: float = 0.0
    start_t: float = 0.0
    reference: str = ""
    """The checkpoint of the reference, which keeps the weights of the warm-up."""


def save(job: Job, memory: Memory) -> OperationHandle[SaveStateResult]:
    """Save the policy as it is now, with this program's memory and the reference's checkpoint."""
    return job.deployment("policy").save_state(
        f"{job.session}-{memory.step}",
        controller_blob=json.dumps(asdict(memory)).encode(),
        checkpoints={"reference": memory.reference} if memory.reference else {},
        keep=2,
    )


async def train(  # noqa: PLR0912, PLR0915 - one story, told in its order
    job: Job,
    name: str,
    settings: Settings,
    report: Report,
    barrier: Barrier,
    *,
    last: Checkpoint | None = None,
) -> None:
    """Warm up, evaluate, train, evaluate again; each event is reported as it happens.

    `last` is the checkpoint to go on from, where an earlier run of this program left one.
    """
    policy, sampler, reference = map(job.deployment, ("policy", "sampler", "reference"))
    task = Task(name, settings.seed)
    problems = task.problems()
    held_out = list(islice(Task(name, settings.eval_seed).problems(), settings.eval_prompts))
    rng = random.Random(settings.seed)
    sampling = SamplingParams(settings.max_tokens, stop_token_ids=[STOP])

    async def evaluate(when: str) -> float:
        asked = prompts(held_out, random.Random(settings.eval_seed))
        sequences = (await sampler.generate(asked, sampling)).sequences
        scores = [task.reward(p, answer(s)) for p, (s,) in zip(held_out, sequences, strict=True)]
        reward = statistics.fmean(scores)
        report("eval", name=when, reward=reward)
        return reward

    memory = Memory()
    if last is not None:
        # This comes behind the operations that the earlier run left open, and replaces all state.
        memory = Memory(**json.loads(last.controller_blob))
        policy.load_state(last.checkpoints["policy"])
        report("resumed", step=memory.step)
    elif settings.checkpoint_every:
        await save(job, memory)

    # Warm-up: teach the form of an answer, so that not every reward is zero.
    size = settings.warmup_batch
    warming_up = [worked(list(islice(problems, size))) for _ in range(settings.warmup_steps)]
    if memory.step == BEFORE_WARM_UP:
        adam = AdamParams(settings.warmup_rate, grad_clip_norm=settings.grad_clip)
        steps = []
        for batch in warming_up:
            steps += [policy.forward_backward(batch, Loss.CROSS_ENTROPY), policy.optim_step(adam)]
        for step in steps:
            await step
        report("warmup", steps=settings.warmup_steps)
        published = policy.publish_weights()
        reference.sync_weights(published)
        sampler.sync_weights(published)
        memory.reward_start = await evaluate("start")
        await barrier("start")
        memory.step, memory.start_t = 0, time.time()
        if settings.checkpoint_every:
            memory.reference = f"{job.session}-warm"
            await reference.save_state(memory.reference)
            await save(job, memory)
    else:
        reference.load_state(memory.reference)
        published = policy.publish_weights()
        sampler.sync_weights(published)
        prompts(list(islice(problems, settings.prompts * memory.step)), rng)

    # GRPO. The first rollouts; every later one is submitted behind an update, `ahead` steps before
    # it is trained on. Its log-probabilities are those that its tokens were drawn with, so the loss
    # weighs by how far the policy has moved since.
    adam = AdamParams(settings.learning_rate, grad_clip_norm=settings.grad_clip)
    ask = sampler.rollout if settings.in_flight else sampler.generate
    ahead: deque[tuple[list[Problem], Awaitable[GenerateResult | RolloutResult]]] = deque()

    def roll_out(step: int) -> None:
        if step <= settings.steps:
            asked = list(islice(problems, settings.prompts))
            ahead.append((asked, ask(prompts(asked, rng), sampling, settings.group)))

    async def renew(published: OperationHandle[PublishWeightsResult]) -> None:
        if settings.in_flight:
            await sampler.update_weights(published)
        else:
            sampler.sync_weights(published)

    for number in range(settings.ahead + 1):
        roll_out(memory.step + 1 + number)
    for number in range(memory.step + 1, settings.steps + 1):
        asked, rollout = ahead.popleft()
        groups = (await rollout).sequences
        rewards = [[task.reward(asked[i], answer(s)) for s in g] for i, g in enumerate(groups)]
        # A group whose answers are equally good teaches nothing: train on those that differ most.
        chosen = most_varied(rewards, settings.train_groups)
        answers = [(asked[i], sample) for i in chosen for sample in groups[i]]
        referred = (await reference.forward([scored(p, s) for p, s in answers])).logprobs
        batch = with_advantages(answers, [rewards[i] for i in chosen], referred, settings.kl)

        # Submit the whole update at once, then the next rollout, which waits for the new weights.
        size = -(-len(batch) // settings.micro_batches)
        gradients = [
            policy.forward_backward(batch[first : first + size], settings.loss)
            for first in range(0, len(batch), size)
        ]
        stepped = policy.optim_step(adam)
        published = policy.publish_weights()
        update = [*gradients, stepped, published]
        if settings.checkpoint_every and number % settings.checkpoint_every == 0:
            memory.step = number
            update.append(save(job, memory))
        ends_round = number % -(-settings.steps // max(1, settings.rounds)) == 0
        if number < settings.steps:
            await renew(published)
            if not ends_round:
                roll_out(number + 1 + settings.ahead)
        for operation in update:
            await operation
        report("step", step=number, reward=statistics.fmean(chain.from_iterable(rewards)))
        if ends_round and number < settings.steps:
            await barrier("round")
            roll_out(number + 1 + settings.ahead)
    end_t = time.time()
    await barrier("end")

    sampler.sync_weights(published)
    reward_end = await evaluate("end")
    saved = await policy.save_state(f"{job.session}-final" if last else "final")
    report(
        "done",
        weights_sha256=saved.weights_sha256,
        reward_start=memory.reward_start,
        reward_end=reward_end,
        grpo_start_t=memory.start_t,
        grpo_end_t=end_t,
    )


def prompts(problems: list[Problem], rng: random.Random) -> list[Prompt]:
    return [Prompt(encode(problem.prompt), seed=rng.getrandbits(31)) for problem in problems]


def answer(sample: Sequence) -> str:
    return decode(int32s(sample.tokens))


def worked(problems: list[Problem]) -> list[Datum]:
    """A batch of worked answers, weighted so that the mean over their tokens is minimised."""
    total = sum(len(problem.worked_answer) + 1 for problem in problems)
    batch = []
    for problem in problems:
        tokens = [*encode(problem.prompt + problem.worked_answer), STOP]
        skip = len(problem.prompt) - 1
        weights = [0.0] * skip + [1.0 / total] * (len(tokens) - 1 - skip)
        batch.append(Datum(tokens[:-1], tokens[1:], weights=weights))
    return batch


def with_advantages(
    answers: list[tuple[Problem, Sequence]],
    rewards: list[list[float]],
    reference: Iterable[Float32s],
    kl: float,
) -> list[Datum]:
    """A batch with advantages: each reward against its group's, less the drift from the reference.

    The loss is the mean over all tokens.
    """
    advantages = chain.from_iterable(map(normalised, rewards))
    total = sum(len(int32s(sample.tokens)) for _, sample in answers)
    batch = []
    for (problem, sample), advantage, ref in zip(answers, advantages, reference, strict=True):
        skip = len(problem.prompt) - 1
        both = zip(float32s(sample.logprobs), float32s(ref)[skip:], strict=True)
        gains = [(advantage - kl * (own - other)) / total for own, other in both]
        batch.append(scored(problem, sample, [0.0] * skip + gains))
    return batch


def normalised(rewards: list[float]) -> list[float]:
    mean = statistics.fmean(rewards)
    return [(reward - mean) / (spread(rewards) + 1e-6) for reward in rewards]


def spread(rewards: list[float]) -> float:
    """The standard deviation, in floats; `statistics.pstdev` would compute exact fractions."""
    mean = statistics.fmean(rewards)
    return math.sqrt(statistics.fmean([(reward - mean) ** 2 for reward in rewards]))


def most_varied(rewards: list[list[float]], count: int) -> list[int]:
    """The indices of the `count` groups with the largest spread, in ascending order."""
    ranked = sorted(range(len(rewards)), key=lambda i: -spread(rewards[i]))
    return sorted(ranked[:count])


def scored(problem: Problem, sample: Sequence, advantages: list[float] | None = None) -> Datum:
    """A sample to train on: position i predicts token i + 1, and the prompt counts nothing."""
    tokens = encode(problem.prompt) + int32s(sample.tokens)
    logprobs = [0.0] * (len(problem.prompt) - 1) + float32s(sample.logprobs)
    return Datum(tokens[:-1], tokens[1:], logprobs=logprobs, advantages=advantages)


def report_line(event: str, **values: object) -> None:
    print(json.dumps({"event": event, "t": time.time(), **values}), flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--task", choices=SETTINGS, default="chain_sum")
    parser.add_argument("--job", help="the job's name; default: the task's")
    parser.add_argument("--wait", action="store_true", help="for a line on stdin at each barrier")
    parser.add_argument("--slo", type=float, default=0.0, help="slowdown that it tolerates")
    parser.add_argument(
        "--cycle",
        type=float,
        nargs=2,
        metavar=("ROLLOUT_S", "TRAIN_S"),
        help="of a step alone; default: it is profiled",
    )
    parser.add_argument(
        "--may-wait",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="for a place; else it is refused where there is none now",
    )
    parser.add_argument(
        "--in-flight", action="store_true", help="rollouts go on with new weights while they run"
    )
    parser.add_argument("--rollout-backend", choices=("sampler", "vllm"), default="sampler")
    parser.add_argument("--kv-cache-bytes", type=int, default=0, help="of vllm, on each device")
    parser.add_argument("--train-backend", choices=("fsdp", "megatron"), default="fsdp")
    parser.add_argument("--pool", default="", help="of all deployments; default: two pools")
    for axis, ranks in (("dp", "data"), ("tp", "tensor"), ("pp", "pipeline")):
        parser.add_argument(f"--{axis}", type=int, default=1, help=f"{ranks} parallel ranks")
    for name in SETTABLE:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    options = parser.parse_args()
    given = {name: getattr(options, name) for name in SETTABLE}
    given["in_flight"] = options.in_flight or None
    settings = replace(
        SETTINGS[options.task], **{name: v for name, v in given.items() if v is not None}
    )

    async def barrier(name: str) -> None:
        report_line("barrier", name=name)
        if options.wait and not await asyncio.to_thread(sys.stdin.readline):
            raise EOFError("stdin ended before the barrier was lifted")

    async with connect() as mesh:
        name = options.job or options.task
        try:
            job = await mesh.submit_job(
                name,
                deployments(
                    settings,
                    rollout_backend=options.rollout_backend,
                    kv_cache_bytes=options.kv_cache_bytes,
                    train_backend=options.train_backend,
                    train_layout=Layout(dp=options.dp, tp=options.tp, pp=options.pp),
                    pool=options.pool,
                ),
                slo=options.slo,
                cycle=declared(*options.cycle) if options.cycle else None,
                may_wait=options.may_wait,
                config=asdict(settings),
                checkpoints=["final"],
            )
        except CallerError as error:
            runs_already = error.info.code is Code.ALREADY_EXISTS and error.info.field == "job"
            if not (runs_already and settings.checkpoint_every):
                raise
            job = await mesh.attach(name)  # an earlier run of this program began it
        report_line("ready", job=job.name, task=options.task, steps=settings.steps)

        def report(event: str, **values: float | str) -> None:
            report_line(event, **values)
            if event == "step":  # for the curves of the console
                job.report({"reward": float(values["reward"])}, step=int(values["step"]))

        training = train(job, options.task, settings, report, barrier, last=job.checkpoint)
        if settings.checkpoint_every:
            # Whatever stops the program, it can be started again and goes on from the last one.
            await training
            await job.finish()
        else:
            async with job:  # ends it; Ctrl-C leaves it as it is
                await training


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except PhaseloomError as error:
        sys.exit(f"grpo.py: {error}")
