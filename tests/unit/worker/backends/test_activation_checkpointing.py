"""Layers that are computed again in the backward pass: the same bits, in less memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.operations import AdamParams, ForwardBackward, Loss, OptimStep
from phaseloom.common.contract.specs import DeploymentSpec, Layout
from phaseloom.worker.backends import backend_factory
from phaseloom.worker.backends.base import Backend
from tests.unit.worker.backends.models import batch, running, spec
from tests.unit.worker.backends.ranks import Ranks

STEP = OptimStep(AdamParams(1e-2, weight_decay=0.1, grad_clip_norm=1.0))
CASES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "bfloat16": {"dtype": "bfloat16"},
    "gemma2": {
        "model_type": "gemma2",
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def _train(trainer: Backend | Ranks) -> list[dict[str, float]]:
    seen = []
    for seed in range(3):
        for part in range(2):
            args = ForwardBackward(batch(2 * seed + part), Loss.PPO)
            seen.append(trainer.forward_backward(args).metrics)
        seen.append(trainer.optim_step(STEP).metrics)
    trainer.forward_backward(ForwardBackward(batch(9), Loss.CISPO))
    return seen


def _checkpointing(deployment: DeploymentSpec) -> DeploymentSpec:
    return replace(deployment, activation_checkpointing=True)


@pytest.mark.parametrize("case", CASES)
def test_training_gives_the_same_bits(case: str) -> None:
    """Losses, gradient norms, weights, moments, and gradients that wait for a step."""
    plain = spec(**CASES[case])
    with running(plain) as (one, heap), running(_checkpointing(plain)) as (other, others):
        assert _train(other) == _train(one)
        assert bytes(others.buffer) == bytes(heap.buffer)


@pytest.mark.slow
def test_two_ranks_give_the_same_bits(tmp_path: Path) -> None:
    pair = replace(spec(), layout=Layout(dp=2))
    seen = []
    for name, deployment in (("kept", pair), ("again", _checkpointing(pair))):
        (tmp_path / name).mkdir()
        ranks = Ranks(deployment, tmp_path / name)
        try:
            seen.append((_train(ranks), ranks.heaps()))
        finally:
            ranks.close()
    assert seen[0] == seen[1]


def _peak_kib(how: str) -> int:
    child = subprocess.run(
        [sys.executable, "-m", "tests.unit.worker.backends.peak_child", how],
        cwd=Path(__file__).parents[4],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return int(child.stdout)


def test_backward_pass_takes_less_memory_at_its_peak() -> None:
    assert _peak_kib("checkpointing") < 0.5 * _peak_kib("plain")


@pytest.mark.parametrize("backend", ["fsdp", "sampler"])
def test_checkpointing_is_refused_where_nothing_is_trained(backend: str) -> None:
    with pytest.raises(CallerError) as raised:
        backend_factory(backend).plan(_checkpointing(spec(backend, trainable=False)))
    info = raised.value.info
    assert (info.code, info.field) == (Code.FAILED_PRECONDITION, "activation_checkpointing")
