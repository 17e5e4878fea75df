"""The losses against their formulas, position by position."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from phaseloom.common.contract.operations import Datum, ForwardBackward, Loss
from phaseloom.worker.backends.losses import combined, loss_sum, metric_names, pass_metrics

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


METRICS = ["gap_abs:sum", "gap:max", "kl_k1:sum", "kl_k3:sum", "clipped:sum", "ratio:max"]


def _metrics(
    args: ForwardBackward, lp: list[float], q: list[float], coefficient: list[float]
) -> dict[str, float]:
    lp_N, q_N, coefficient_N = map(torch.tensor, (lp, q, coefficient))
    loss = loss_sum(args, lp_N, q_N, coefficient_N)
    row = pass_metrics(args, loss, lp_N, q_N, coefficient_N)
    names = metric_names(args)
    return dict(zip(names, combined(names, [row]).tolist(), strict=True))


@pytest.mark.parametrize("loss", [loss for loss in Loss if loss is not Loss.CROSS_ENTROPY])
def test_metrics_are_those_of_the_definitions(loss: Loss) -> None:
    args = ForwardBackward(NO_BATCH, loss, clip_low=0.9, clip_high=1.3)
    used = [(lp, q, a) for lp, q, a in zip(LP, Q, COEFFICIENT, strict=True) if a != 0]
    gaps = [lp - q for lp, q, _ in used]
    ratios = [math.exp(gap) for gap in gaps]
    clipped = 0
    if loss is Loss.PPO:
        pairs = zip(ratios, (a for *_, a in used), strict=True)
        clipped = sum(min(max(r, 0.9), 1.3) * a < r * a for r, a in pairs)
    if loss is Loss.CISPO:
        clipped = sum(not 0.9 <= ratio <= 1.3 for ratio in ratios)
    metrics = _metrics(args, *map(list, zip(*used, strict=True)))
    assert [*metrics] == ["loss:sum", *METRICS]
    del metrics["loss:sum"]
    assert metrics == pytest.approx(
        {
            "gap_abs:sum": sum(map(abs, gaps)),
            "gap:max": max(map(abs, gaps)),
            "kl_k1:sum": -sum(gaps),
            "kl_k3:sum": sum(ratio - 1 - math.log(ratio) for ratio in ratios),
            "clipped:sum": clipped,
            "ratio:max": max(ratios),
        },
        rel=1e-6,
    )


def test_documentation_defines_every_metric() -> None:
    text = (Path(__file__).parents[4] / "docs" / "metrics.md").read_text()
    names = metric_names(ForwardBackward(NO_BATCH, Loss.PPO, entropy=True))
    assert [name for name in names if f"`{name}`" not in text] == []


def test_k3_keeps_the_digits_of_a_small_gap() -> None:
    gap = 2.0**-20
    metrics = _metrics(ForwardBackward(NO_BATCH, Loss.PPO), [-1.0 + gap], [-1.0], [1.0])
    assert metrics["kl_k3:sum"] == pytest.approx(gap**2 / 2, rel=1e-5)


@pytest.mark.parametrize("loss", [Loss.PPO, Loss.IMPORTANCE_SAMPLING, Loss.CISPO, Loss.DRO])
def test_metrics_of_extreme_gaps_are_finite(loss: Loss) -> None:
    huge = 3e38
    metrics = _metrics(
        ForwardBackward(NO_BATCH, loss), [-0.1, -huge, -math.inf], [-huge, -0.1, huge], [1.0] * 3
    )
    assert all(math.isfinite(metrics[name]) for name in METRICS)
    assert metrics["gap:max"] >= huge


def test_metrics_combine_by_their_suffix_and_without_positions() -> None:
    args = ForwardBackward(NO_BATCH, Loss.PPO, clip_low=0.9, clip_high=1.3)
    names = metric_names(args)
    whole = _metrics(args, LP, Q, COEFFICIENT)
    rows = []
    for part in (slice(0, 1), slice(1, 1), slice(1, 4)):
        lp_N, q_N, a_N = (torch.tensor(values[part]) for values in (LP, Q, COEFFICIENT))
        rows.append(pass_metrics(args, loss_sum(args, lp_N, q_N, a_N), lp_N, q_N, a_N))
    assert combined(names, rows).tolist() == pytest.approx([*whole.values()], rel=1e-6)
    assert not combined(names, []).any()
