"""One rank's work without a mesh. `phaseloom measure-slowdown` starts and times two of these.

    python -m phaseloom.worker.measuring --units 2

The process has the backends of a small job: a `sampler`, which decodes, prefills and scores, and an
`fsdp` policy, which trains. It reads `MeasureRequest`s as lines of JSON from standard input and
answers each with a line of JSON, `MeasureResult`. It computes only on the requested units, like a
rank with that share of its device.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from phaseloom.common.contract.errors import CallerError, ErrorInfo
from phaseloom.common.contract.operations import (
    AdamParams,
    Datum,
    Forward,
    ForwardBackward,
    Generate,
    Loss,
    OptimStep,
    Prompt,
    SamplingParams,
)
from phaseloom.common.contract.specs import CommandId, DeploymentSpec, ModelSpec
from phaseloom.common.process import config
from phaseloom.common.process.slowdowns import MeasureRequest, MeasureResult
from phaseloom.worker.backends import backend_factory
from phaseloom.worker.backends.base import Backend, RankGroup, Unwatched
from phaseloom.worker.config import EXACT_MATH
from phaseloom.worker.rank.computeshare import ComputeShare
from phaseloom.worker.state.heap import Heap

MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
"""The default model, with about 0.8 million parameters."""
SMALL_ROWS, LARGE_ROWS = 16, 256
DECODED_TOKENS = 8
PROMPT_TOKENS = 24
ANSWER_TOKENS = 8
PREFILLED, SCORED, TRAINED = 64, 64, 64
"""Prompts or samples in one call."""


class MeasuredCalls:
    """The calls of each kind of work, on backends in this process."""

    def __init__(self, model: ModelSpec, num_units: int) -> None:
        self._sampler = _build_backend(DeploymentSpec("sampler", "", "sampler", model), num_units)
        policy = DeploymentSpec("policy", "", "fsdp", model, trainable=True)
        self._policy = _build_backend(policy, num_units)
        self._backend = self._sampler
        self._vocab_size = _config_of(model).vocab_size
        self._share = ComputeShare(0, num_units, self._use)
        self._number = 0
        rng = random.Random(0)
        self._calls: dict[str, tuple[Any, Callable[[], object]]] = {
            "decode_small": (self._sampler, self._decode(SMALL_ROWS)),
            "decode_large": (self._sampler, self._decode(LARGE_ROWS)),
            "prefill": (self._sampler, self._prefill(rng)),
            "reference": (self._sampler, self._score(rng)),
            "train": (self._policy, self._train(rng)),
        }

    def run(self, request: MeasureRequest) -> MeasureResult:
        """Repeat the call on the units until the end time. Average the calls within the measured
        interval."""
        self._backend, call = self._calls[request.kind]
        self._number += 1
        self._share.request(request.units, CommandId(self._number, 0))
        self._share.apply_request()
        self._backend.use_threads(len(request.units))
        durations_s: list[float] = []
        last_s = 0.0
        while (start_s := time.time()) < request.until_s:
            call()
            end_s = time.time()
            last_s = end_s - start_s
            if start_s >= request.from_s and end_s <= request.until_s:
                durations_s.append(last_s)
        return MeasureResult(
            sum(durations_s) / len(durations_s) if durations_s else last_s, len(durations_s)
        )

    def _use(self, count: int) -> None:
        self._backend.use_threads(count)

    def _tokens(self, rng: random.Random, count: int) -> list[int]:
        return [rng.randrange(self._vocab_size) for _ in range(count)]

    def _decode(self, rows: int) -> Callable[[], object]:
        """Decode from prompts of one token, so that prefill is negligible."""
        request = SamplingParams(DECODED_TOKENS, ignore_eos=True)
        args = Generate([Prompt([1], seed=1)], request, num_samples=rows)
        return lambda: self._sampler.generate([args], Unwatched())

    def _prefill(self, rng: random.Random) -> Callable[[], object]:
        prompts = [Prompt(self._tokens(rng, PROMPT_TOKENS), seed=i) for i in range(PREFILLED)]
        args = Generate(prompts, SamplingParams(1, ignore_eos=True))
        return lambda: self._sampler.generate([args], Unwatched())

    def _score(self, rng: random.Random) -> Callable[[], object]:
        args = Forward(self._data(rng, SCORED))
        return lambda: self._sampler.forward(args)

    def _train(self, rng: random.Random) -> Callable[[], object]:
        batch = ForwardBackward(self._data(rng, TRAINED), Loss.PPO)
        step = OptimStep(AdamParams(1e-6, grad_clip_norm=1.0))

        def call() -> None:
            self._policy.forward_backward(batch)
            self._policy.optim_step(step)

        return call

    def _data(self, rng: random.Random, count: int) -> list[Datum]:
        """Samples with distinct prompts, and advantages on the answers."""
        data = []
        for _ in range(count):
            tokens = self._tokens(rng, PROMPT_TOKENS + ANSWER_TOKENS)
            skip = PROMPT_TOKENS - 1
            gains = [rng.uniform(-1, 1) / count for _ in range(ANSWER_TOKENS)]
            data.append(
                Datum(
                    tokens[:-1],
                    tokens[1:],
                    logprobs=[0.0] * skip + [-4.0] * ANSWER_TOKENS,
                    advantages=[0.0] * skip + gains,
                )
            )
        return data


def _build_backend(spec: DeploymentSpec, num_units: int) -> Any:
    group = RankGroup(num_units=num_units)
    factory = backend_factory(spec.backend)
    memory = factory.plan(spec, group)
    backend: Backend = factory(spec, Heap(memory.heap_bytes, memory.scratch_bytes), group)
    return backend


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--units", type=int, required=True)
    parser.add_argument("--config", type=Path, help="a model's config.json; default: a tiny model")
    arguments = parser.parse_args()
    # Match a rank that shares its device. Libraries read these variables when the first backend
    # imports them.
    for variable, value in {**EXACT_MATH, "OMP_NUM_THREADS": "1"}.items():
        config.set_for_children(variable, value)
    model = MODEL
    if arguments.config is not None:
        model = msgspec.json.decode(arguments.config.read_bytes())
    try:
        work = work_of(ModelSpec(model, init_seed=1), arguments.units)
    except CallerError as error:
        _print_result(MeasureResult(refused=of_file(error.info)))
        return
    _print_result(MeasureResult())
    for line in sys.stdin:
        _print_result(work.run(msgspec.json.decode(line, type=MeasureRequest)))


def work_of(model: ModelSpec, num_units: int) -> MeasuredCalls:
    """Prepare the calls on a model. Raises: CallerError: the model cannot be built or is too
    small."""
    config = _config_of(model)
    needed = {"vocab_size": 2, "max_position_embeddings": PROMPT_TOKENS + ANSWER_TOKENS}
    for name, minimum in needed.items():
        value = getattr(config, name, minimum)
        if value < minimum:
            raise CallerError(
                f"{name} must be {minimum} or more, got {value}",
                field=f"model.config.{name}",
                remedy="measure another model",
            )
    try:
        return MeasuredCalls(model, num_units)
    # a size of zero or less, or more than fits in memory
    except (RuntimeError, ArithmeticError) as error:
        raise CallerError(
            f"cannot build the model: {error}",
            field="model.config",
            remedy="give the config.json of a model that runs on this mesh",
        ) from error


def of_file(refused: ErrorInfo) -> ErrorInfo:
    """Rename the refused field to its name in the `--config` file."""
    return msgspec.structs.replace(refused, field=refused.field.removeprefix("model."))


def _config_of(model: ModelSpec) -> Any:
    # imports torch, so the variables must be set first
    from phaseloom.worker.backends.model import model_config

    return model_config(model)


def _print_result(ran: MeasureResult) -> None:
    print(msgspec.json.encode(ran).decode(), flush=True)


if __name__ == "__main__":
    main()
