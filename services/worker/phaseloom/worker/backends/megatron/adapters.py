"""Adapters (LoRA) on Megatron's layers, each of which may fuse several layers of the model.

If a layer's outputs are split over tensor-parallel ranks, each rank holds its rows of B and the
whole of A. If its inputs are split, each rank holds its columns of A and the whole of B. Only A·x
moves between ranks, and it is as narrow as the adapter's rank. It is gathered before B, or
reduce-scattered after A, just as x and y are for the weights (sequence parallelism).

A matrix that every rank holds therefore sees only part of the columns on each, and its gradients
are summed over the ranks (`gradients`). The head's A is the exception: its input is gathered
already.

Shapes: T columns, B rows, r the adapter's rank, H inputs, F outputs on this rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import nn
from torch.nn import functional as F

from phaseloom.worker.backends.layout import Shard
from phaseloom.worker.backends.lora.adapters import file_name
from phaseloom.worker.backends.megatron.slices import Adapted, AdaptedPart, Spread


@dataclass(frozen=True)
class Part:
    """This rank's matrices for one of the model's layers."""

    outputs: int
    """The layer's outputs on this rank."""
    a_rH: nn.Parameter | None
    b_Fr: nn.Parameter | None
    """None if the layer has no adapter."""


class Added:
    """The output that adapters add to one of Megatron's linear layers."""

    def __init__(self, spread: Spread, parts: Sequence[Part], scale: float, *, tp: int) -> None:
        """Args: parts: the model's layers that Megatron's layer fuses, in the order of its
        outputs."""
        self._spread, self._parts, self._scale = spread, parts, scale
        self._is_split = tp > 1

    def __call__(self, x_TBH: torch.Tensor, y_TBF: torch.Tensor) -> torch.Tensor:
        a_rH = torch.cat([part.a_rH for part in self._parts if part.a_rH is not None])
        mixed_TBr = F.linear(x_TBH, a_rH)
        if self._is_split:
            mixed_TBr = self._moved(mixed_TBr)
        outputs, start = [], 0
        for part in self._parts:
            if part.b_Fr is None:
                outputs.append(y_TBF.new_zeros(*y_TBF.shape[:-1], part.outputs))
                continue
            rank = part.b_Fr.shape[1]
            outputs.append(F.linear(mixed_TBr[..., start : start + rank], part.b_Fr))
            start += rank
        return torch.add(y_TBF, torch.cat(outputs, -1), alpha=self._scale)

    def _moved(self, mixed_TBr: torch.Tensor) -> torch.Tensor:
        moved: torch.Tensor
        match self._spread:
            case Spread.OUTPUTS:
                moved = gather_from_sequence_parallel_region(mixed_TBr)
            case Spread.INPUTS:
                moved = reduce_scatter_to_sequence_parallel_region(mixed_TBr)
            case Spread.IDS:
                moved = copy_to_tensor_model_parallel_region(mixed_TBr)
        return moved


def adapt(
    stage: nn.Module,
    adapted: Sequence[Adapted],
    parameters: Mapping[str, nn.Parameter],
    scale: float,
    *,
    tp: int,
) -> None:
    """Make the layers of a stage add an adapter's output.

    Args: parameters: the rank's slices of A and B, by their names in files.
    """
    for layer in adapted:
        parts = [
            Part(part.outputs, *(parameters.get(name) for name in _names(part)))
            for part in layer.parts
        ]
        stage.get_submodule(layer.module).register_forward_hook(
            _adding(Added(layer.spread, parts, scale, tp=tp))
        )


def matrix_shards(adapted: Sequence[Adapted]) -> dict[str, Shard]:
    """Return the rank's slices of all A and B, sorted by their names in files."""
    shards: dict[str, Shard] = {}
    for part in (part for layer in adapted for part in layer.parts):
        if part.a is not None and part.b is not None:
            shards |= dict(zip(_names(part), (part.a, part.b), strict=True))
    return {name: shards[name] for name in sorted(shards)}


def _names(part: AdaptedPart) -> tuple[str, str]:
    return file_name(part.layer, "lora_A"), file_name(part.layer, "lora_B")


def _adding(added: Added) -> Any:
    def hook(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        y, bias = output
        return added(inputs[0], y), bias

    return hook
