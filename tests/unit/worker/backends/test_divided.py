"""Training on a share of a device: the same bits with one thread, with two, and as they change."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from phaseloom.worker.backends.fsdp.backend import NORM_BLOCK, _blockwise_square
from phaseloom.worker.config import EXACT_MATH


def digests(*arguments: str) -> list[str]:
    environment = {**os.environ, **EXACT_MATH, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.unit.worker.backends.divided_child", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


@pytest.mark.parametrize(
    ("size", "model_type", "dtype"),
    [
        ("tiny", "qwen3", "float32"),
        pytest.param("small", "qwen3", "float32", marks=pytest.mark.slow),
        pytest.param("small", "llama", "bfloat16", marks=pytest.mark.slow),
        pytest.param("medium", "qwen3", "float32", marks=pytest.mark.slow),
    ],
)
def test_training_gives_the_same_bits_with_any_share(
    size: str, model_type: str, dtype: str
) -> None:
    """Log-probabilities, norms that are clipped, gradients and weights, of rows of odd lengths."""
    found = digests(size, model_type, dtype)
    assert len(found) == 3
    assert len(set(found)) == 1


def test_norm_is_the_same_bits_with_any_number_of_threads() -> None:
    flat = torch.randn(100 * NORM_BLOCK + 17, generator=torch.Generator().manual_seed(1))
    before = torch.get_num_threads()
    found = set()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.add(_blockwise_square(flat).item())
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1
    assert found.pop() == pytest.approx(flat.double().square().sum().item())
