"""The losses of the contract, as plain sums over positions.

Shapes: B samples, T positions. lp: the learner's log-probability of the target, q: the sampler's,
r = exp(lp − q). A position that carries nothing (padding) has weight or advantage zero.
"""

from __future__ import annotations

import torch

from phaseloom.common.messages import ForwardBackward, Loss


def target_logprobs(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """log p(target) at every position, (B, T)."""
    nll = torch.nn.functional.cross_entropy(
        logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), reduction="none"
    )
    return -nll.view_as(targets_BT)


def loss_sum(
    args: ForwardBackward, lp_BT: torch.Tensor, q_BT: torch.Tensor, coefficient_BT: torch.Tensor
) -> torch.Tensor:
    """The loss of `args` summed over a batch.

    Args: coefficient_BT: weights (cross_entropy) or advantages.
    """
    if args.loss is Loss.CROSS_ENTROPY:
        return -(coefficient_BT * lp_BT).sum()
    ratio_BT = torch.exp(lp_BT - q_BT)
    objective_BT = ratio_BT * coefficient_BT
    if args.loss is Loss.PPO:
        clipped_BT = ratio_BT.clamp(args.clip_low, args.clip_high) * coefficient_BT
        objective_BT = torch.minimum(objective_BT, clipped_BT)
    return -objective_BT.sum()
