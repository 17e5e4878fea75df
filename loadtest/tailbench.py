"""Rollouts of two jobs on the same devices, with their long tails gathered and without.

Each job is a sampler over all devices of one node. A sample ends at each token with the same
chance, or at the limit: most are short and a few are many times as long. With and without take
turns, with the same prompts.

A real model shows that every token is the same. It says little about time, because its four devices
share this machine's cores: what one leaves idle, another has already. So the gain is measured with
ranks that compute nothing and wait as long as a device would take, once with rollouts one behind
the other and once with training elsewhere between them.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path
from statistics import median

import msgspec

from loadtest.records import Machine, describe
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.supervisor import Mesh
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
_NUM_JOBS = 2
_NUM_DEVICES = 4
_NUM_PROMPTS = 32


class Settings(msgspec.Struct, frozen=True):
    rounds: int = 3
    """Rounds of each case."""
    steps: int = 3
    """Rollouts of each job in a round, one after the other."""
    samples: int = 4
    """Samples of each prompt."""
    max_tokens: int = 1000
    model_rounds: int = 13
    """Rounds of the real model."""
    step_s: float = 0.004
    """Time of a decoding step, in which 15 GB of weights are read at 4 TB/s: 7B in bfloat16."""
    row_s: float = 0.00002
    """Time that each row adds to a step."""
    prompt_token_s: float = 0.0001
    """Time that a prompt's token takes, those of a continued sample included."""
    mean_tokens: int = 250
    train_s: float = 1.0
    """Time of training between two rollouts of a job, on other devices: a quarter of theirs."""


class Case(msgspec.Struct, frozen=True):
    name: str
    whole_s: list[float]
    """Seconds of each round without tails gathered: from the first rollout to the last answer."""
    gathered_s: list[float]

    @property
    def gains(self) -> list[float]:
        """How many times more is done in the same time, in order."""
        pairs = zip(self.whole_s, self.gathered_s, strict=True)
        return sorted(whole / gathered for whole, gathered in pairs)

    @property
    def gain(self) -> float:
        return median(self.gains)


class TailReport(msgspec.Struct, frozen=True):
    machine: Machine
    settings: Settings
    cases: list[Case]
    num_samples: int
    """Samples of the real model that were compared."""
    num_different: int
    """Of those, the ones with other tokens than without."""
    logprob_error: float
    """The largest difference of any log-probability."""
    length_p50: int
    """New tokens of a sample."""
    length_p80: int
    length_max: int


class _Comparison:
    """The answers of a real model without tails gathered beside those with."""

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


class _Bench:
    def __init__(self, settings: Settings, connection: Connection) -> None:
        self._settings = settings
        self._connection = connection
        self._seeds = itertools.count(step=_NUM_PROMPTS)

    async def case(
        self,
        name: str,
        spec: DeploymentSpec,
        rounds: int,
        train_s: float = 0.0,
        comparison: _Comparison | None = None,
    ) -> Case:
        """Run rounds of a case, with and without in turns; one before them warms up."""
        seconds: dict[float, list[float]] = {0.0: [], TAIL_SHARE: []}
        for number in range(rounds + 1):
            first = next(self._seeds)
            answers = []
            for share, taken in seconds.items():
                self._seeds = itertools.count(first, _NUM_PROMPTS)
                job = f"{name.replace(' ', '-')}-{number}-{'gathered' if share else 'whole'}"
                shared = msgspec.structs.replace(spec, tail_share=share)
                taken_s, results = await self._round(job, shared, train_s)
                answers.append(results)
                if number:
                    taken.append(taken_s)
            if comparison is not None:
                comparison.add(*answers)
        return Case(name, seconds[0.0], seconds[TAIL_SHARE])

    async def _round(
        self, name: str, spec: DeploymentSpec, train_s: float
    ) -> tuple[float, list[GenerateResult]]:
        """Seconds of all rollouts of all jobs at once, and their answers in order."""
        jobs = [
            await self._connection.submit_job(f"{name}-{index}", [spec])
            for index in range(_NUM_JOBS)
        ]
        samplers = [job.deployment(spec.name) for job in jobs]
        for sampler in samplers:
            await sampler.generate([Prompt([1])], SamplingParams(1))
        seeds = [[next(self._seeds) for _ in range(self._settings.steps)] for _ in jobs]
        answers: list[list[GenerateResult]] = [[] for _ in jobs]
        sampling = SamplingParams(self._settings.max_tokens, stop_strings=["ab"], ignore_eos=True)

        async def control(index: int) -> None:
            for step, seed in enumerate(seeds[index]):
                if step:
                    await asyncio.sleep(train_s)
                prompts = [Prompt([1, 2, 3], seed + i) for i in range(_NUM_PROMPTS)]
                rollout = samplers[index].generate(prompts, sampling, self._settings.samples)
                answers[index].append(await rollout)

        begun_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for index in range(_NUM_JOBS):
                group.create_task(control(index))
        taken_s = time.perf_counter() - begun_s
        for job in jobs:
            await job.finish()
        return taken_s, [*itertools.chain.from_iterable(answers)]


async def run(settings: Settings, directory: Path) -> TailReport:
    """Measure. Args: directory: an existing one, for the mesh."""
    node = NodeConfig("rollout-0", "rollout", [_DEVICE_BYTES] * _NUM_DEVICES)
    comparison = _Comparison()
    waiting, model = _waiting(settings), _model(settings)
    async with Mesh(MeshConfig(nodes=[node], tenants=[TENANT]), directory) as mesh:
        await mesh.ready()
        password = mesh.credentials.tenants[TENANT]
        async with connect(mesh.url, TENANT, password) as connection:
            bench = _Bench(settings, connection)
            cases = [
                await bench.case("one behind the other", waiting, settings.rounds),
                await bench.case("training between", waiting, settings.rounds, settings.train_s),
                await bench.case(
                    "a real model", model, settings.model_rounds, comparison=comparison
                ),
            ]
    lengths = sorted(comparison.lengths)
    return TailReport(
        describe("torch"),
        settings,
        cases,
        len(lengths),
        comparison.num_different,
        comparison.logprob_error,
        *(lengths[int(share * (len(lengths) - 1))] for share in (0.5, 0.8, 1.0)),
    )


def _waiting(settings: Settings) -> DeploymentSpec:
    """Ranks that compute nothing and take a device's time."""
    decode = {
        "step_s": settings.step_s,
        "row_s": settings.row_s,
        "prompt_token_s": settings.prompt_token_s,
        "mean_tokens": settings.mean_tokens,
    }
    return _over_all("noop", ModelSpec({"decode": decode}))


def _model(settings: Settings) -> DeploymentSpec:
    config = {
        "model_type": "qwen3",
        "vocab_size": _VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": settings.max_tokens + 16,
        "tie_word_embeddings": True,
    }
    letters = "a" * _ENDING + "b" * _ENDING
    texts = [*letters, *("c" for _ in range(_VOCABULARY - len(letters)))]
    return _over_all("sampler", ModelSpec(config, token_texts=texts))


def _over_all(backend: str, model: ModelSpec) -> DeploymentSpec:
    return DeploymentSpec(
        "sampler",
        "rollout",
        backend,
        model,
        batching=Batching.SHARED,
        layout=Layout(dp=_NUM_DEVICES),
    )
