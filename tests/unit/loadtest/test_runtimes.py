"""The bench of the runtimes, small: both sides were measured, and did the same work."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.runtimes import models, switching, training


def test_training_step_is_measured_beside_plain_torch_in_both_dtypes() -> None:
    """The bench itself fails where the two sides' losses differ."""
    figures = training.measure(1, hidden=128, layers=1)
    assert [each.name for each in figures] == [
        "train_step_fsdp_float32",
        "train_step_fsdp_bfloat16",
    ]
    for figure in figures:
        assert min(figure.value, figure.limit_value, figure.ratio) > 0


@pytest.mark.parametrize("backend", ["sampler", "fsdp"])
async def test_switches_of_a_backend_are_measured_beside_plain_copies(
    backend: str, short_dir: Path
) -> None:
    (figure,) = await switching.measure(models.spec(backend, 128, 1), short_dir / "s", 1)
    assert figure.name.startswith(f"switch_{backend}_")
    assert min(figure.value, figure.limit_value, figure.ratio) > 0
