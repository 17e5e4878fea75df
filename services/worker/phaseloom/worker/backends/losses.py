"""The losses of the contract, as plain sums over N positions, and the metrics that come with them.

lp is the learner's log-probability of the target, q the sampler's, and r = exp(lp − q). The suffix
of a metric's name is its reduction, over passes as over ranks and parts of an operation (`kinds`).
docs/metrics.md defines the metrics.
"""

from __future__ import annotations

from collections.abc import Sequence

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


OFF_POLICY = ("gap_abs:sum", "gap:max", "kl_k1:sum", "kl_k3:sum", "clipped:sum", "ratio:max")
"""Metrics of the losses that use the sampler's log-probabilities."""
_MAX_GAP = torch.finfo(torch.float32).max


def metric_names(args: ForwardBackward) -> list[str]:
    """Return the names of the metrics of `args`, in the order of `pass_metrics`."""
    names = ["loss:sum"]
    if args.loss is not Loss.CROSS_ENTROPY:
        names += OFF_POLICY
    return [*names, "entropy:sum"] if args.entropy else names


@torch.no_grad()
def pass_metrics(
    args: ForwardBackward,
    loss: torch.Tensor,
    lp_N: torch.Tensor,
    q_N: torch.Tensor,
    coefficient_N: torch.Tensor,
    *,
    entropy_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the metrics of one pass as (M,) float64, on the device: reading them would wait.

    Apart from the loss, they are finite even if the ratio overflows, since JSON has no infinity.
    """
    metrics = [loss.detach().double()]
    if args.loss is not Loss.CROSS_ENTROPY:
        # In float32, k3 would lose all digits of a small gap.
        gap_N = (lp_N.double() - q_N.double()).clamp(-_MAX_GAP, _MAX_GAP)
        bounded_N = gap_N.clamp(max=_NO_OVERFLOW)
        ratio_N = bounded_N.exp()
        gap_abs_N = gap_N.abs()
        metrics += [
            gap_abs_N.sum(),
            _largest(gap_abs_N),
            -gap_N.sum(),
            (bounded_N.expm1() - gap_N).sum(),
            _is_clipped(args, ratio_N, coefficient_N).sum().double(),
            _largest(ratio_N),
        ]
    if args.entropy:
        assert entropy_N is not None
        metrics.append(entropy_N.double().sum())
    return torch.stack(metrics)


def combined(names: Sequence[str], rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Reduce the (M,) metrics of several passes or ranks to one (M,), in host memory."""
    if not rows:
        return torch.zeros(len(names), dtype=torch.float64)
    table = torch.stack([*rows]).cpu()
    is_max_M = torch.tensor([name.endswith(":max") for name in names])
    return torch.where(is_max_M, table.amax(0), table.sum(0))


def _largest(values_N: torch.Tensor) -> torch.Tensor:
    # Absolute gaps and ratios are at least 0, so 0 never hides the value of another pass.
    return values_N.amax() if values_N.numel() else values_N.new_zeros(())


def _is_clipped(
    args: ForwardBackward, ratio_N: torch.Tensor, coefficient_N: torch.Tensor
) -> torch.Tensor:
    """Tell where a bound takes the place of the ratio. `ppo` clips only where that lowers the
    objective."""
    if args.loss is Loss.PPO:
        above_N = (ratio_N > args.clip_high) & (coefficient_N > 0)
        return above_N | ((ratio_N < args.clip_low) & (coefficient_N < 0))
    if args.loss is Loss.CISPO:
        return (ratio_N > args.clip_high) | (ratio_N < args.clip_low)
    return torch.zeros_like(ratio_N, dtype=torch.bool)
