"""Tiny models and data for the backends' tests."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from phaseloom.common.contract.operations import Datum, Generate, GenerateResult, Loss
from phaseloom.common.contract.specs import DeploymentSpec, ModelSpec
from phaseloom.worker.backends import backend_factory
from phaseloom.worker.backends.base import Backend
from phaseloom.worker.state.heap import Heap
from tests.support.looker import Looker
from tests.support.tinymodel import VOCAB, config


def spec(backend: str = "fsdp", *, trainable: bool | None = None, **changes: Any) -> DeploymentSpec:
    model = ModelSpec(config(**changes), init_seed=7)
    is_trainable = backend == "fsdp" if trainable is None else trainable
    return DeploymentSpec("policy", "train", backend, model, trainable=is_trainable)


@contextmanager
def running(deployment: DeploymentSpec) -> Iterator[tuple[Backend, Heap]]:
    factory = backend_factory(deployment.backend)
    memory = factory.plan(deployment)
    heap = Heap(memory.heap_bytes, memory.scratch_bytes)
    backend = factory(deployment, heap)
    try:
        yield backend, heap
    finally:
        backend.close()


def generate(backend: Backend, *requests: Generate) -> list[GenerateResult]:
    """All in one call, and nobody cancels."""
    for args in requests:
        backend.check_generate(args)
    results = watched(backend, requests, Looker())
    return [result for result in results if result is not None]


def watched(
    backend: Backend, requests: Sequence[Generate], watch: Looker
) -> list[GenerateResult | None]:
    """The results of a call, and of what joined it, by the requests' places."""
    backend.generate(requests, watch)
    return watch.ordered


def batch(seed: int = 0, groups: int = 3, samples: int = 4, loss: Loss = Loss.PPO) -> list[Datum]:
    """Continuations of a few prompts, as GRPO trains on: weights or advantages 0 on prompts."""
    rng = random.Random(seed)
    data = []
    for _ in range(groups):
        prompt = _tokens(rng, rng.randint(2, 5))
        for _ in range(samples):
            answer = _tokens(rng, rng.randint(1, 6))
            tokens, masked = prompt + answer, [0.0] * (len(prompt) - 1)
            weights = masked + [1.0] * len(answer)
            logprobs = masked + [rng.uniform(-4, -2) for _ in answer]
            advantages = masked + [rng.uniform(-1, 1)] * len(answer)
            if loss is Loss.CROSS_ENTROPY:
                data.append(Datum(tokens[:-1], tokens[1:], weights=weights))
            else:
                trained = Datum(tokens[:-1], tokens[1:], logprobs=logprobs, advantages=advantages)
                data.append(trained)
    return data


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]
