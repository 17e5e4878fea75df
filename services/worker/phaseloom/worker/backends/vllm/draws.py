"""The tokens that vLLM samples are drawn as in our own sampler: by (seed, sample, position) only.

A logits processor chooses each row's token itself, by `generation.draw`, and leaves vLLM no other:
vLLM decodes greedily, and its log-probabilities are taken before, so they are the model's own. For
vLLM's model runner V1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from phaseloom.worker.backends.generation import draw
from phaseloom.worker.backends.rng import uniform, wrapped

KEY: Final = "phaseloom"
"""Name of our parameters, a tuple as `Draw` has them, in a request's `extra_args`."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How one request's tokens are drawn."""

    seed: int
    sample: int
    temperature: float
    start: int
    """Position of its first token: above 0 where the request goes on from a partial result."""


@dataclass(frozen=True, slots=True)
class _Row:
    draw: Draw
    output: list[int]
    """Tokens of the request so far: vLLM's own list, which grows."""


class Draws(LogitsProcessor):  # type: ignore[misc]
    """Draws the next token of every row that asks for it; rows that do not are decoded greedily."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, _, output in batch_update.added:
            asked: Any = (params.extra_args or {}).get(KEY)
            self._rows.pop(index, None)
            if asked is not None:
                self._rows[index] = _Row(Draw(*asked), output)
        for one, other, direction in batch_update.moved:
            self._move(one, other, is_swap=direction is MoveDirectionality.SWAP)

    def _move(self, one: int, other: int, *, is_swap: bool) -> None:
        moved, replaced = self._rows.pop(one, None), self._rows.pop(other, None)
        if moved is not None:
            self._rows[other] = moved
        if is_swap and replaced is not None:
            self._rows[one] = replaced

    def apply(self, logits_BV: torch.Tensor) -> torch.Tensor:
        by_temperature: dict[float, list[int]] = {}
        for index in sorted(self._rows):
            by_temperature.setdefault(self._rows[index].draw.temperature, []).append(index)
        for temperature, indices in by_temperature.items():
            rows_R = torch.tensor(indices, device=logits_BV.device)
            asked = [self._rows[index] for index in indices]
            draws_R = torch.from_numpy(_uniforms(asked)).to(logits_BV.device)
            tokens_R, _ = draw(logits_BV[rows_R], draws_R, temperature)
            logits_BV[rows_R] = -torch.inf
            logits_BV[rows_R, tokens_R] = 0.0
        return logits_BV


def _uniforms(rows: list[_Row]) -> np.ndarray[Any, Any]:
    return uniform(
        wrapped([row.draw.seed for row in rows]),
        [row.draw.sample for row in rows],
        [row.draw.start + len(row.output) for row in rows],
    )
