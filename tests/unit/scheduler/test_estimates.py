"""How long something is expected to go on that has run for a while."""

from __future__ import annotations

import random
from statistics import median

import pytest

from phaseloom.scheduler.core.devices.estimates import still_s

SIGMA = 0.25
P95_S = 1.509
"""exp(1.645 · SIGMA), where the median is 1 s."""


@pytest.mark.parametrize("ran_s", [0.2, 0.8, 1.0, 1.3])
def test_rest_is_the_median_of_those_that_have_not_ended(ran_s: float) -> None:
    drawn = random.Random(1)
    lasted = [drawn.lognormvariate(0.0, SIGMA) for _ in range(50_000)]
    rest_s = median(s - ran_s for s in lasted if s > ran_s)
    assert still_s(1.0, P95_S, ran_s) == pytest.approx(rest_s, rel=0.05)


def test_rest_is_up_to_the_median_where_no_spread_is_known() -> None:
    assert still_s(1.0, 0.0, 0.25) == pytest.approx(0.75)
    assert still_s(1.0, 0.0, 2.0) == 0.0
    assert still_s(1.0, 1.0, 2.0) == 0.0


def test_what_has_not_begun_takes_its_median_from_then_on() -> None:
    assert still_s(1.0, P95_S, -0.5) == pytest.approx(1.5)


def test_rest_of_what_runs_for_ever_is_finite() -> None:
    assert 0.0 <= still_s(1.0, P95_S, 1e6) < 1e6
