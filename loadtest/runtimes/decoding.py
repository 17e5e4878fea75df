"""Tokens a second of the vLLM backend beside vLLM alone, and how long either takes to start.

Both engines are in this process, with the same engine settings, model and prompts. vLLM alone has
weights of its own and draws by its own sampler. On CPUs it packs the weights of linear layers into
another form, which the backend cannot have in its heap: it is measured with its weights as they
are, which is the limit, and packed. Sequences are of fixed length, so all sides make as many
tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from loadtest.records import Record
from loadtest.runtimes import models
from phaseloom.common.contract.specs import DeploymentSpec
from phaseloom.worker.backends.base import ALONE, Unwatched
from phaseloom.worker.backends.vllm.backend import VllmBackend, settings_of
from phaseloom.worker.backends.vllm.engine import engine_args
from phaseloom.worker.backends.vllm.loader import load_into
from phaseloom.worker.backends.vllm.replica import join
from phaseloom.worker.state.heap import Heap

_PROMPT_TOKENS = 64
_AIM = "≥ 0.97"


@dataclass(frozen=True)
class Load:
    rows: int
    tokens: int


def _ours(spec: DeploymentSpec, load: Load) -> Callable[[], None]:
    memory = VllmBackend.plan(spec)
    backend = VllmBackend(spec, Heap(memory.heap_bytes, memory.scratch_bytes))
    args = models.request(load.rows, _PROMPT_TOKENS, load.tokens)
    return lambda: backend.generate([args], Unwatched())


def _alone(spec: DeploymentSpec, load: Load, *, is_packed: bool) -> Callable[[], None]:
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
        for i, tokens in enumerate(models.texts(load.rows, _PROMPT_TOKENS)):
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


def measure(spec: DeploymentSpec, load: Load, num_rounds: int) -> list[Record]:
    join(spec.layout, ALONE)  # the engines' process group, which a backend makes itself
    # The first engine of a process imports much: none of those that are compared is the first.
    packed = _alone(spec, load, is_packed=True)
    started_s = time.perf_counter()
    ours = _ours(spec, load)
    start_s = time.perf_counter() - started_s
    started_s = time.perf_counter()
    alone = _alone(spec, load, is_packed=False)
    alone_s = time.perf_counter() - started_s
    sides = (ours, alone, packed)
    rates: list[list[float]] = [[] for _ in sides]
    for number in range(-1, num_rounds):
        for side in (0, 1, 2) if number % 2 else (2, 1, 0):
            began_s = time.perf_counter()
            sides[side]()
            if number >= 0:  # the first round warms up
                rates[side].append(load.rows * load.tokens / (time.perf_counter() - began_s))
    name = f"decode_vllm_{load.rows}_sequences_of_{load.tokens}"
    return [
        _rate(name, rates[0], "vLLM alone", rates[1], _AIM),
        _rate(f"{name}_against_packed", rates[0], "vLLM alone, weights packed", rates[2], ""),
        Record(
            "start_vllm_engine",
            round(start_s, 3),
            "s",
            "vLLM alone",
            round(alone_s, 3),
            round(start_s / alone_s, 3),
        ),
    ]


def _rate(name: str, ours: list[float], limit: str, limits: list[float], aim: str) -> Record:
    ratio = median(own / bare for own, bare in zip(ours, limits, strict=True))
    values = round(median(ours), 1), round(median(limits), 1)
    return Record(name, values[0], "tokens/s", limit, values[1], round(ratio, 3), aim)
