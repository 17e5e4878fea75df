"""Makes vLLM sample with our sampler's draws by (seed, sample, position).

A logits processor chooses each row's token, as our sampler does, and makes it the only choice. vLLM
then decodes greedily. It computes log-probabilities before the processor runs, so they are the
model's own. Written for vLLM's model runner V1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from phaseloom.common.contract.operations import SamplingParams
from phaseloom.worker.backends.rng import uniform, wrapped
from phaseloom.worker.backends.shaping import Shaping, inverted, is_plain, temperature_of

KEY: Final = "phaseloom"
"""The key of a request's `Draw` in its `extra_args`."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How the tokens of one request are drawn."""

    seed: int
    sample: int
    params: SamplingParams
    prompt: list[int]
    """The prompt's tokens, without those generated earlier."""
    generated: list[int]
    """Tokens of an earlier answer, which the request continues."""


class _Row:
    """One request in vLLM's batch."""

    def __init__(self, draw: Draw, output: list[int], vocab_size: int) -> None:
        """Args: output: the request's new tokens so far. It is vLLM's own list, which grows."""
        self.draw = draw
        self.output = output
        params = draw.params
        self.shaping: Shaping | None = None
        """None if only the temperature shapes the distribution."""
        self._num_seen = 0
        if not is_plain(params):
            self.shaping = Shaping(params, [draw.prompt], [draw.generated], vocab_size)

    def catch_up(self) -> None:
        """Record the tokens that were added since the last call.

        vLLM discards tokens that it samples after part of a prompt, so only its own list is right.
        """
        assert self.shaping is not None
        new = self.output[self._num_seen :]
        self.shaping.add([0] * len(new), new)
        self._num_seen += len(new)


class Draws(LogitsProcessor):  # type: ignore[misc]
    """Draws the next token of every row with a `Draw`. Other rows are decoded greedily."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}
        self._vocab_size = int(vllm_config.model_config.get_vocab_size())

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, _, output in batch_update.added:
            draw: Any = (params.extra_args or {}).get(KEY)
            self._rows.pop(index, None)
            if draw is not None:
                self._rows[index] = _Row(draw, output, self._vocab_size)
        for source, target, direction in batch_update.moved:
            self._move(source, target, is_swap=direction is MoveDirectionality.SWAP)

    def _move(self, source: int, target: int, *, is_swap: bool) -> None:
        moved, replaced = self._rows.pop(source, None), self._rows.pop(target, None)
        if moved is not None:
            self._rows[target] = moved
        if is_swap and replaced is not None:
            self._rows[source] = replaced

    def apply(self, logits_BV: torch.Tensor) -> torch.Tensor:
        by_temperature: dict[float, list[int]] = {}
        for index in sorted(self._rows):
            row = self._rows[index]
            if row.shaping is not None:
                row.catch_up()
                draws_1 = _uniforms([row])
                tokens_1, _ = row.shaping.draw(
                    torch.zeros(1, dtype=torch.int64), logits_BV[index : index + 1].cpu(), draws_1
                )
                _choose(logits_BV, [index], tokens_1)
            else:
                by_temperature.setdefault(temperature_of(row.draw.params), []).append(index)
        for temperature, indices in by_temperature.items():
            draws_R = _uniforms([self._rows[index] for index in indices]).to(logits_BV.device)
            is_all = len(indices) == logits_BV.shape[0]
            logits_RV = (logits_BV if is_all else logits_BV[indices]).float()
            probabilities_RV = torch.softmax(logits_RV / temperature, dim=-1)
            _choose(logits_BV, indices, inverted(probabilities_RV, draws_R))
        return logits_BV


def _choose(logits_BV: torch.Tensor, rows: list[int], tokens_R: torch.Tensor) -> None:
    """Make these tokens the likeliest of their rows."""
    rows_R = torch.tensor(rows, device=logits_BV.device)
    # A row without a drawable token gets any: vLLM has taken its log-probabilities, which are NaN.
    tokens_R = tokens_R.to(logits_BV.device).clamp(max=logits_BV.shape[-1] - 1)
    logits_BV[rows_R, tokens_R] = torch.inf


def _uniforms(rows: list[_Row]) -> torch.Tensor:
    return torch.from_numpy(
        uniform(
            wrapped([row.draw.seed for row in rows]),
            [row.draw.sample for row in rows],
            [len(row.draw.generated) + len(row.output) for row in rows],
        )
    )
