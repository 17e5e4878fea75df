"""Fused AdamW over flat regions. It runs where the moments live.

If the moments live in host memory, the step runs on the CPU: weights and gradients come to the host
one piece at a time, and the new weights go back. The step is elementwise in float32, so cutting it
into pieces changes no bit. Imports only the standard library and torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw

PIECE = 16 * 1024 * 1024
"""Elements of a piece. Its multiple of 64 fills all lanes of vector registers."""


@dataclass(frozen=True)
class Hyperparameters:
    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@dataclass(frozen=True)
class Moments:
    """AdamW's moments, element by element like the weights."""

    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    step: torch.Tensor
    """The number of steps taken, as one float32."""


def take_step(
    weights: torch.Tensor, gradients: torch.Tensor, moments: Moments, adam: Hyperparameters
) -> None:
    """Update weights and moments in place, on the device of the moments.

    After it returns, work launched on the default stream sees the new weights.
    """
    if weights.device == moments.exp_avg.device:
        _step(weights, gradients, moments, adam)
    else:
        take_step_in_pieces(weights, gradients, moments, adam)


def take_step_in_pieces(
    weights: torch.Tensor,
    gradients: torch.Tensor,
    moments: Moments,
    adam: Hyperparameters,
    piece: int = PIECE,
) -> None:
    """Run `take_step` through host memory. Args: piece: elements of a piece, a multiple of 64."""
    is_pinned = weights.is_cuda
    size = min(piece, weights.numel())
    staged = torch.empty(2, size, dtype=weights.dtype, pin_memory=is_pinned)
    for start in range(0, weights.numel(), piece):
        part = slice(start, min(start + piece, weights.numel()))
        w, g = staged[0, : part.stop - start], staged[1, : part.stop - start]
        w.copy_(weights[part])
        g.copy_(gradients[part])
        # `adamw` increments the step counter. Each piece must count the same step, so it gets a
        # copy.
        step = moments.step.clone()
        _step(w, g, Moments(moments.exp_avg[part], moments.exp_avg_sq[part], step), adam)
        weights[part].copy_(w)
    moments.step.add_(1)


def _step(
    weights: torch.Tensor, gradients: torch.Tensor, moments: Moments, adam: Hyperparameters
) -> None:
    adamw(
        [weights],
        [gradients],
        [moments.exp_avg],
        [moments.exp_avg_sq],
        [],
        [moments.step],
        fused=True,
        amsgrad=False,
        beta1=adam.beta1,
        beta2=adam.beta2,
        lr=adam.learning_rate,
        weight_decay=adam.weight_decay,
        eps=adam.eps,
        maximize=False,
    )
