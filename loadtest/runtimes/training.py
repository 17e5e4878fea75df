"""A training step of the backend `fsdp`, of one rank, beside plain torch.

Both have the model of transformers with the same weights, the same batch, loss, clipping and fused
AdamW, and one thread. In bfloat16 both step on float32 masters. A step of ours is what a rank does
for `forward_backward` and `optim_step`: checks, packing, finiteness and norm of the gradients.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from msgspec.structs import replace

from loadtest.records import Record
from loadtest.runtimes import models
from phaseloom.common.contract.operations import (
    AdamParams,
    Datum,
    ForwardBackward,
    Loss,
    OptimStep,
)
from phaseloom.common.contract.specs import DeploymentSpec
from phaseloom.worker.backends.fsdp.backend import FsdpBackend
from phaseloom.worker.backends.model import TORCH_DTYPES, build_model, weights_dtype
from phaseloom.worker.state.heap import Heap

ROWS, LENGTH = 4, 256
_LOGPROB = -math.log(models.VOCABULARY)
_ADVANTAGE = 1 / (ROWS * LENGTH)
_CLIP_LOW, _CLIP_HIGH, _GRAD_CLIP = 0.8, 1.2, 1.0
_ADAM = AdamParams(1e-5, grad_clip_norm=_GRAD_CLIP)
_CLOSE = 0.02
"""The relative difference that the losses of both sides may have: the bits of bfloat16."""

Step = Callable[[], float]
"""Takes a training step; returns the loss before it."""


def measure(num_rounds: int, hidden: int, layers: int) -> list[Record]:
    return [
        figure
        for dtype in ("float32", "bfloat16")
        for figure in _measure(models.spec("fsdp", hidden, layers, dtype=dtype), dtype, num_rounds)
    ]


def _measure(spec: DeploymentSpec, dtype: str, num_rounds: int) -> list[Record]:
    heap = Heap(FsdpBackend.plan(spec).heap_bytes)
    backend = FsdpBackend(spec, heap)
    try:
        return [_compared(f"train_step_fsdp_{dtype}", [_ours(backend), _plain(spec)], num_rounds)]
    finally:
        backend.close()


def _compared(name: str, sides: list[Step], num_rounds: int) -> Record:
    rates: list[list[float]] = [[], []]
    for number in range(-1, num_rounds):
        losses = [0.0, 0.0]
        for side in (0, 1) if number % 2 else (1, 0):
            started_s = time.perf_counter()
            losses[side] = sides[side]()
            if number >= 0:  # the first round warms up
                rates[side].append(ROWS * LENGTH / (time.perf_counter() - started_s))
        assert math.isclose(*losses, rel_tol=_CLOSE), f"they compute different things: {losses}"
    return Record(
        name=name,
        value=round(median(rates[0]), 1),
        unit="tokens/s",
        limit="plain torch: the same model, batch, loss and AdamW",
        limit_value=round(median(rates[1]), 1),
        ratio=round(median(a / b for a, b in zip(*rates, strict=True)), 3),
        aim="≥ 0.95",
    )


def _ours(backend: FsdpBackend) -> Step:
    batch = [
        Datum(
            text[:-1],
            text[1:],
            logprobs=[_LOGPROB] * LENGTH,
            advantages=[_ADVANTAGE] * LENGTH,
        )
        for text in models.texts(ROWS, LENGTH + 1)
    ]
    args = ForwardBackward(batch, Loss.PPO, _CLIP_LOW, _CLIP_HIGH)
    step = OptimStep(_ADAM)

    def run() -> float:
        backend.check_forward_backward(args)
        result = backend.forward_backward(args)
        backend.check_optim_step(step)
        backend.optim_step(step)
        return result.metrics["loss:sum"]

    return run


def _plain(spec: DeploymentSpec) -> Step:
    dtype = TORCH_DTYPES[weights_dtype(spec.model)]
    drawn = replace(spec.model, config={**spec.model.config, "dtype": "float32"})
    model: Any = build_model(drawn)
    parameters = [*model.parameters()]
    masters = parameters
    if dtype != torch.float32:
        masters = [torch.nn.Parameter(each.detach().clone()) for each in parameters]
        for each in parameters:
            each.data = each.data.to(dtype)
    adam = torch.optim.AdamW(
        masters,
        lr=_ADAM.learning_rate,
        betas=(_ADAM.beta1, _ADAM.beta2),
        eps=_ADAM.eps,
        weight_decay=_ADAM.weight_decay,
        fused=True,
    )
    tokens = torch.tensor(models.texts(ROWS, LENGTH + 1))

    def run() -> float:
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.float().flatten(0, 1)
        lp = -torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="none")
        ratio = torch.exp(lp - _LOGPROB)
        clipped = ratio.clamp(_CLIP_LOW, _CLIP_HIGH)
        loss = -torch.minimum(ratio * _ADVANTAGE, clipped * _ADVANTAGE).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        if masters is not parameters:
            for master, each in zip(masters, parameters, strict=True):
                master.grad, each.grad = each.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, _GRAD_CLIP)
        adam.step()
        adam.zero_grad()
        with torch.no_grad():
            for master, each in zip(masters, parameters, strict=True):
                if master is not each:
                    each.copy_(master)
        return float(loss.detach())

    return run
