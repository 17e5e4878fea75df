"""Rollouts of several jobs on the same devices, with their long tails gathered and without.

Each job is a sampler over all devices of one node, and rolls out again as soon as it has answers:
the devices are never short of work. A sample ends at each token with the same chance, or at the
limit: most are short and a few are many times as long. With and without take turns, with the same
prompts; every token is compared.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path
from statistics import median

import msgspec

from loadtest.records import Machine, describe
from phaseloom.cli.supervisor import Mesh, MeshConfig, NodeConfig
from phaseloom.client import (
    Batching,
    DeploymentSpec,
    GenerateResult,
    ModelSpec,
    Prompt,
    SamplingParams,
    connect,
    float32s,
    int32s,
)
from phaseloom.client import Mesh as Connection
from phaseloom.common.contract.specs import Layout

TENANT = "demo"
TAIL_SHARE = 0.2
_VOCABULARY = 32
_ENDING = 2
"""Of the tokens so many are `a` and so many `b`; `ab` ends a sample."""
_DEVICE_BYTES = 16 * 2**20


class Settings(msgspec.Struct, frozen=True):
    rounds: int = 7
    jobs: int = 2
    devices: int = 4
    steps: int = 3
    """Rollouts of each job in a round, one after the other."""
    prompts: int = 32
    samples: int = 8
    """Samples of each prompt."""
    max_tokens: int = 1000


class TailReport(msgspec.Struct, frozen=True):
    machine: Machine
    settings: Settings
    whole_s: list[float]
    """Seconds of each round without tails gathered: from the first rollout to the last answer."""
    gathered_s: list[float]
    num_samples: int
    """Samples that were compared."""
    num_different: int
    """Of those, the ones with other tokens than without."""
    logprob_error: float
    """The largest difference of any log-probability."""
    length_p50: int
    """New tokens of a sample."""
    length_p80: int
    length_max: int

    @property
    def gains(self) -> list[float]:
        """How many times more is done in the same time, by round."""
        pairs = zip(self.whole_s, self.gathered_s, strict=True)
        return sorted(whole / gathered for whole, gathered in pairs)

    @property
    def gain(self) -> float:
        return median(self.gains)


async def run(settings: Settings, directory: Path) -> TailReport:
    """Measure. Args: directory: an existing one, for the mesh."""
    node = NodeConfig("rollout-0", "rollout", [_DEVICE_BYTES] * settings.devices)
    seconds: dict[float, list[float]] = {0.0: [], TAIL_SHARE: []}
    comparison = _Comparison()
    async with Mesh(MeshConfig(nodes=[node], tenants=[TENANT]), directory) as mesh:
        await mesh.ready()
        password = mesh.credentials.tenants[TENANT]
        async with connect(mesh.url, TENANT, password) as connection:
            for number in range(settings.rounds + 1):
                answers = []
                for share, taken in seconds.items():
                    taken_s, results = await _round(settings, connection, number, share)
                    answers.append(results)
                    if number:  # the first round warms up
                        taken.append(taken_s)
                comparison.add(*answers)
    lengths = sorted(comparison.lengths)
    return TailReport(
        describe("torch"),
        settings,
        seconds[0.0],
        seconds[TAIL_SHARE],
        len(lengths),
        comparison.num_different,
        comparison.logprob_error,
        *(lengths[int(share * (len(lengths) - 1))] for share in (0.5, 0.8, 1.0)),
    )


async def _round(
    settings: Settings, connection: Connection, number: int, tail_share: float
) -> tuple[float, list[GenerateResult]]:
    """Seconds of all rollouts of all jobs at once, and their answers in order."""
    name = f"round-{number}-{'gathered' if tail_share else 'whole'}"
    jobs = [
        await connection.submit_job(f"{name}-{index}", [_spec(settings, tail_share)])
        for index in range(settings.jobs)
    ]
    samplers = [job.deployment("sampler") for job in jobs]
    for sampler in samplers:
        await sampler.generate([Prompt([1])], SamplingParams(1))
    answers: list[list[GenerateResult]] = [[] for _ in jobs]

    async def control(index: int) -> None:
        for step in range(settings.steps):
            first = ((number * settings.jobs + index) * settings.steps + step) * settings.prompts
            prompts = [Prompt([1, 2, 3], first + i) for i in range(settings.prompts)]
            sampling = SamplingParams(settings.max_tokens, stop_strings=["ab"], ignore_eos=True)
            rollout = samplers[index].generate(prompts, sampling, settings.samples)
            answers[index].append(await rollout)

    begun_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for index in range(settings.jobs):
            group.create_task(control(index))
    taken_s = time.perf_counter() - begun_s
    for job in jobs:
        await job.finish()
    return taken_s, [*itertools.chain.from_iterable(answers)]


def _spec(settings: Settings, tail_share: float) -> DeploymentSpec:
    config = {
        "model_type": "qwen3",
        "vocab_size": _VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": settings.max_tokens + 16,
        "tie_word_embeddings": True,
    }
    letters = "a" * _ENDING + "b" * _ENDING
    texts = [*letters, *("c" for _ in range(_VOCABULARY - len(letters)))]
    return DeploymentSpec(
        "sampler",
        "rollout",
        "sampler",
        ModelSpec(config, token_texts=texts),
        batching=Batching.SHARED,
        layout=Layout(dp=settings.devices),
        tail_share=tail_share,
    )


class _Comparison:
    """The answers without tails gathered beside those with."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.num_different = 0
        self.logprob_error = 0.0

    def add(self, whole: list[GenerateResult], gathered: list[GenerateResult]) -> None:
        for one, other in zip(whole, gathered, strict=True):
            samples = zip(
                itertools.chain.from_iterable(one.sequences),
                itertools.chain.from_iterable(other.sequences),
                strict=True,
            )
            for first, second in samples:
                self.lengths.append(len(int32s(first.tokens)))
                if int32s(first.tokens) != int32s(second.tokens):
                    self.num_different += 1
                    continue
                pairs = zip(float32s(first.logprobs), float32s(second.logprobs), strict=True)
                error = max(abs(a - b) for a, b in pairs)
                self.logprob_error = max(self.logprob_error, error)
