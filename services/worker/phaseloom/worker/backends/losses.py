"""The losses of the contract, as plain sums over N positions.

lp is the learner's log-probability of the target, q the sampler's, and r = exp(lp − q).
"""

from __future__ import annotations

import torch

from phaseloom.common.contract.operations import ForwardBackward, Loss

_NO_OVERFLOW = 80.0
"""A log-ratio whose exponential is finite in float32, and above every clip bound."""


def loss_sum(
    args: ForwardBackward, lp_N: torch.Tensor, q_N: torch.Tensor, coefficient_N: torch.Tensor
) -> torch.Tensor:
    """Sum the loss of `args` over positions.

    Args: coefficient_N: weights (cross_entropy) or advantages.
    """
    if args.loss is Loss.CROSS_ENTROPY:
        return -(coefficient_N * lp_N).sum()
    if args.loss is Loss.DRO:
        return -(coefficient_N * lp_N - args.beta / 2 * (lp_N - q_N) ** 2).sum()
    log_ratio_N = lp_N - q_N
    # exp overflows above 88. A masked position must not count as 0 · inf, nor a clipped one.
    is_unused_N = coefficient_N == 0
    if args.loss is Loss.PPO:
        is_unused_N |= (coefficient_N > 0) & (log_ratio_N > _NO_OVERFLOW)
    log_ratio_N = log_ratio_N.where(~is_unused_N, log_ratio_N.detach().clamp(max=_NO_OVERFLOW))
    ratio_N = torch.exp(log_ratio_N)
    if args.loss is Loss.CISPO:
        weight_N = ratio_N.detach().clamp(args.clip_low, args.clip_high)
        return -(weight_N * coefficient_N * lp_N).sum()
    objective_N = ratio_N * coefficient_N
    if args.loss is Loss.PPO:
        clipped_N = ratio_N.clamp(args.clip_low, args.clip_high) * coefficient_N
        objective_N = torch.minimum(objective_N, clipped_N)
    return -objective_N.sum()
