"""What is made of the measured times."""

from __future__ import annotations

import pytest

from loadtest.roundtrip import Round, figures, quantile


@pytest.mark.parametrize(
    ("num", "share", "expected"),
    [(1, 0.5, 1), (2, 0.5, 1), (3, 0.5, 2), (100, 0.5, 50), (100, 0.99, 99), (200, 0.99, 198)],
)
def test_quantile_is_the_smallest_value_that_covers_the_share(
    num: int, share: float, expected: float
) -> None:
    assert quantile([float(n) for n in range(1, num + 1)], share) == expected


def test_ratio_is_the_median_of_the_rounds_ratios_when_one_round_is_disturbed() -> None:
    """In the second round something else took the machine while the mesh had its turn."""
    rounds = [
        Round(mesh=[0.0015] * 10, raw=[0.001] * 10),
        Round(mesh=[0.0300] * 10, raw=[0.002] * 10),
        Round(mesh=[0.0030] * 10, raw=[0.002] * 10),
    ]

    p50, p99 = figures(rounds)

    assert (p50.name, p50.unit) == ("operation_round_trip_p50", "ms")
    assert (p50.value, p50.limit_value, p50.ratio) == (3.0, 2.0, 1.5)
    assert (p99.name, p99.ratio) == ("operation_round_trip_p99", 1.5)
