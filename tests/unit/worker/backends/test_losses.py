"""The losses against their formulas, position by position."""

from __future__ import annotations

import math

import pytest
import torch

from phaseloom.common.contract.operations import Datum, ForwardBackward, Loss
from phaseloom.worker.backends.losses import loss_sum

LP = [-0.5, -2.0, -1.0, -3.0]
Q = [-1.0, -1.0, -1.1, -2.9]
COEFFICIENT = [1.5, -0.5, 0.0, 2.0]
NO_BATCH: list[Datum] = []


def _ppo(lp: float, q: float, a: float) -> float:
    ratio = math.exp(lp - q)
    return -min(ratio * a, min(max(ratio, 0.9), 1.3) * a)


def _cispo(lp: float, q: float, a: float) -> float:
    return -min(max(math.exp(lp - q), 0.9), 1.3) * a * lp


def _dro(lp: float, q: float, a: float) -> float:
    return -(a * lp - 0.15 * (lp - q) ** 2)


EXPECTED = {
    Loss.CROSS_ENTROPY: lambda lp, q, a: -a * lp,
    Loss.IMPORTANCE_SAMPLING: lambda lp, q, a: -math.exp(lp - q) * a,
    Loss.PPO: _ppo,
    Loss.CISPO: _cispo,
    Loss.DRO: _dro,
}


@pytest.mark.parametrize("loss", list(Loss))
def test_loss_sum_is_the_sum_of_the_formula(loss: Loss) -> None:
    args = ForwardBackward(NO_BATCH, loss, clip_low=0.9, clip_high=1.3, beta=0.3)
    actual = loss_sum(args, torch.tensor(LP), torch.tensor(Q), torch.tensor(COEFFICIENT))
    expected = sum(EXPECTED[loss](*each) for each in zip(LP, Q, COEFFICIENT, strict=True))
    assert actual.item() == pytest.approx(expected, rel=1e-6)


def test_ppo_gives_no_gradient_when_the_ratio_is_clipped() -> None:
    lp = torch.tensor([0.0, 0.0], requires_grad=True)
    args = ForwardBackward(NO_BATCH, Loss.PPO, clip_low=0.8, clip_high=1.2)
    loss = loss_sum(args, lp, torch.tensor([-1.0, -1.0]), torch.tensor([1.0, -1.0]))
    torch.autograd.backward(loss)
    assert lp.grad is not None
    assert lp.grad[0] == 0
    assert lp.grad[1] == pytest.approx(math.e)


def test_cispo_keeps_the_gradient_where_the_ratio_is_clipped() -> None:
    lp = torch.tensor([0.0, 0.0], requires_grad=True)
    args = ForwardBackward(NO_BATCH, Loss.CISPO, clip_low=0.8, clip_high=1.2)
    loss = loss_sum(args, lp, torch.tensor([-1.0, 1.0]), torch.tensor([1.0, -1.0]))
    torch.autograd.backward(loss)
    assert lp.grad is not None
    assert lp.grad.tolist() == pytest.approx([-1.2, 0.8])


@pytest.mark.parametrize("gap", [85.0, 200.0])
def test_ppo_with_an_overflowing_ratio_has_the_clipped_loss_and_no_gradient(gap: float) -> None:
    lp = torch.tensor([-1.0, -1.0], requires_grad=True)
    args = ForwardBackward(NO_BATCH, Loss.PPO, clip_low=0.8, clip_high=1.2)
    loss = loss_sum(args, lp, torch.tensor([-1.0 - gap, -1.0]), torch.tensor([2.0, 1.0]))
    torch.autograd.backward(loss)
    assert loss.item() == pytest.approx(-1.2 * 2 - 1)
    assert lp.grad is not None
    assert lp.grad.tolist() == [0.0, -1.0]


@pytest.mark.parametrize("loss", [Loss.PPO, Loss.IMPORTANCE_SAMPLING])
def test_overflowing_ratio_without_advantage_counts_nothing(loss: Loss) -> None:
    lp = torch.tensor([-1.0, -1.0], requires_grad=True)
    total = loss_sum(
        ForwardBackward(NO_BATCH, loss), lp, torch.tensor([-300.0, -1.0]), torch.tensor([0.0, 1.0])
    )
    torch.autograd.backward(total)
    assert total.item() == -1.0
    assert lp.grad is not None
    assert lp.grad.tolist() == [0.0, -1.0]


def test_ppo_with_an_overflowing_ratio_and_a_negative_advantage_is_infinite() -> None:
    args = ForwardBackward(NO_BATCH, Loss.PPO)
    assert loss_sum(args, torch.zeros(1), torch.tensor([-300.0]), -torch.ones(1)) == torch.inf
