"""Draws are pure functions of (seed, sample, position), and look uniform."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseloom.worker.backends.rng import uniforms

PINNED = [[[0.13870941009372473, 0.18436667416244745]], [[0.6935121389105916, 0.42321144812740386]]]


@given(st.lists(st.integers(-(2**63), 2**64), min_size=1, max_size=4), st.integers(0, 3))
def test_uniforms_depend_on_seed_sample_and_position_only(seeds: list[int], which: int) -> None:
    together = uniforms(seeds, 5, 7)
    p = which % len(seeds)
    alone = uniforms([seeds[p]], 3, 4)
    assert np.array_equal(together[p, :3, :4], alone[0])


def test_uniforms_are_as_they_always_were() -> None:
    """A change of the generator would change every run's tokens: this pins it."""
    assert uniforms([0, 1], 1, 2).tolist() == PINNED


def test_uniforms_fill_the_unit_interval_evenly_on_every_axis() -> None:
    draws = uniforms(list(range(40)), 40, 40)
    assert 0 <= draws.min() < 1e-3
    assert 1 - 1e-3 < draws.max() < 1
    for axes in ((1, 2), (0, 2), (0, 1)):
        # The mean of 1600 uniforms has a standard deviation of 0.0072; 40 of them stay within 4.
        assert np.abs(draws.mean(axis=axes) - 0.5).max() < 0.029


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_uniforms_of_neighbours_are_uncorrelated(axis: int) -> None:
    draws = np.moveaxis(uniforms(list(range(40)), 40, 40), axis, 0)
    correlation = np.corrcoef(draws[:-1].ravel(), draws[1:].ravel())[0, 1]
    assert abs(correlation) < 0.02
