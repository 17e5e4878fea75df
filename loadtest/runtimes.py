"""`make bench-runtimes`: tokens a second of the vLLM backend beside vLLM alone.

It runs in the environment that has vLLM. Both engines are in this process, with the same engine
settings, model and prompts, and take turns in changing order. vLLM alone has weights of its own and
draws by its own sampler. On CPUs it packs the weights of linear layers into another form, which the
backend cannot have in its heap: it is measured with its weights as they are, which is the limit,
and packed. A figure is the median over rounds, a ratio the median of the rounds' ratios. Sequences
are of fixed length, so all sides make as many tokens.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import cyclopts
import torch
from rich.console import Console

from loadtest.records import LATEST, Record, describe, record
from phaseloom.common.contract.operations import Generate, GenerateResult, Prompt, SamplingParams
from phaseloom.common.contract.specs import DeploymentSpec, ModelSpec
from phaseloom.worker.backends.vllm.backend import VllmBackend, settings_of
from phaseloom.worker.backends.vllm.engine import engine_args
from phaseloom.worker.backends.vllm.loader import load_into
from phaseloom.worker.state.heap import Heap

_FILE = LATEST.with_name("runtimes.json")
_POSITIONS = 512
_PROMPT_TOKENS = 64
_AIM = "≥ 0.97"


@dataclass(frozen=True)
class _Load:
    rows: int
    tokens: int


class _Nobody:
    """A `Watch` for a call that nobody joins or cancels."""

    def joined(self) -> list[Generate]:
        return []

    def is_cancelled(self, i: int) -> bool:
        return False

    def is_stopped(self, i: int) -> bool:
        return False

    def progress(self, i: int, num_done: int, num_total: int) -> None:
        pass

    def ended(self, i: int, result: GenerateResult | None) -> None:
        pass


def _spec(hidden: int, layers: int) -> DeploymentSpec:
    config = {
        "model_type": "qwen3",
        "vocab_size": 4096,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(1, hidden // 128),
        "head_dim": 64,
        "max_position_embeddings": _POSITIONS,
        "tie_word_embeddings": True,
    }
    return DeploymentSpec(
        "sampler", "rollout", "vllm", ModelSpec(config), scratch_bytes=256 * 2**20
    )


def _prompts(load: _Load) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(4096) for _ in range(_PROMPT_TOKENS)] for _ in range(load.rows)]


def _ours(spec: DeploymentSpec, load: _Load) -> Callable[[], None]:
    memory = VllmBackend.plan(spec)
    backend = VllmBackend(spec, Heap(memory.heap_bytes, memory.scratch_bytes))
    prompts = [Prompt(tokens, seed=i) for i, tokens in enumerate(_prompts(load))]
    args = Generate(prompts, SamplingParams(load.tokens, ignore_eos=True))
    return lambda: backend.generate([args], _Nobody())


def _alone(spec: DeploymentSpec, load: _Load, *, is_packed: bool) -> Callable[[], None]:
    from vllm import SamplingParams as VllmParams
    from vllm.inputs import TokensPrompt
    from vllm.v1.engine.llm_engine import LLMEngine

    with engine_args(settings_of(spec)) as args:
        args.logits_processors = None
        if is_packed:
            args.load_format = "dummy"
        load_into(_fill)
        engine = LLMEngine.from_engine_args(args)
        load_into(None)

    def run() -> None:
        engine.reset_prefix_cache()
        for i, tokens in enumerate(_prompts(load)):
            params = VllmParams(
                temperature=1.0,
                seed=i,
                max_tokens=load.tokens,
                ignore_eos=True,
                detokenize=False,
                logprobs=0,
            )
            engine.add_request(f"{i}", TokensPrompt(prompt_token_ids=tokens), params)
        while engine.has_unfinished_requests():
            engine.step()

    return run


def _fill(model: torch.nn.Module, dtype: torch.dtype) -> None:
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)


def measure(spec: DeploymentSpec, load: _Load, rounds: int) -> list[Record]:
    started = time.perf_counter()
    ours = _ours(spec, load)
    start_s = time.perf_counter() - started
    started = time.perf_counter()
    sides = [ours, _alone(spec, load, is_packed=False)]
    alone_s = time.perf_counter() - started
    sides.append(_alone(spec, load, is_packed=True))
    rates: list[list[float]] = [[] for _ in sides]
    for number in range(-1, rounds):
        for side in (0, 1, 2) if number % 2 else (2, 1, 0):
            began = time.perf_counter()
            sides[side]()
            if number >= 0:  # the first round warms up
                rates[side].append(load.rows * load.tokens / (time.perf_counter() - began))
    name = f"vLLM backend, {load.rows} sequences of {load.tokens}"
    value, *limits = (statistics.median(each) for each in rates)
    ratios = [
        statistics.median(a / b for a, b in zip(rates[0], each, strict=True)) for each in rates[1:]
    ]
    return [
        Record(name, value, "tokens/s", "vLLM alone", limits[0], ratios[0], _AIM),
        Record(
            f"{name}, against packed",
            value,
            "tokens/s",
            "vLLM alone, weights packed",
            limits[1],
            ratios[1],
        ),
        Record("vLLM engine start", start_s, "s", "vLLM alone", alone_s, start_s / alone_s, ""),
    ]


app = cyclopts.App(name="runtimes", help=__doc__)


@app.default
def bench(
    *,
    rounds: int = 5,
    rows: int = 32,
    tokens: int = 128,
    hidden: Annotated[int, cyclopts.Parameter(help="Hidden size, a multiple of 128.")] = 256,
    layers: int = 4,
    file: Path = _FILE,
) -> None:
    """Measure tokens a second of the vLLM backend and of vLLM alone, in turns.

    Parameters
    ----------
    rounds
        How often the two take turns.
    rows
        Sequences that are decoded together.
    tokens
        New tokens of each.
    layers
        Layers of the model.
    file
        Where the figures are merged by name.
    """
    torch.set_num_threads(1)
    figures = measure(_spec(hidden, layers), _Load(rows, tokens), rounds)
    record(figures, describe("torch"), file)
    for each in figures:
        Console().print(
            f"{each.name}: {each.value:.4g} {each.unit}, {each.limit} {each.limit_value:.4g}, "
            f"ratio {each.ratio:.2f} {each.aim}"
        )


if __name__ == "__main__":
    sys.exit(app())
