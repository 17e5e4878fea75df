"""What is made of the measured times."""

from __future__ import annotations

import asyncio

import pytest

from loadtest.records import quantile
from loadtest.roundtrip import Round, Turn, figures, turn


@pytest.mark.parametrize(
    ("num", "share", "expected"),
    [(1, 0.5, 1), (2, 0.5, 1), (3, 0.5, 2), (100, 0.5, 50), (100, 0.99, 99), (200, 0.99, 198)],
)
def test_quantile_is_the_smallest_value_that_covers_the_share(
    num: int, share: float, expected: float
) -> None:
    assert quantile([float(n) for n in range(1, num + 1)], share) == expected


def _round(one: float, two: float, raw: float) -> Round:
    """Ten operations of each side, one after another."""
    return {
        routers: Turn([seconds] * 10, 10 * seconds)
        for routers, seconds in ((1, one), (2, two), (0, raw))
    }


def test_ratio_is_the_median_of_the_rounds_ratios_when_one_round_is_disturbed() -> None:
    """In the second round something else took the machine while the mesh had its turn."""
    rounds = [_round(0.0015, 0.002, 0.001), _round(0.03, 0.04, 0.002), _round(0.003, 0.004, 0.002)]

    records = {record.name: record for record in figures(1, rounds)}

    p50 = records["round_trip_p50_1_in_flight_1_router"]
    assert (p50.value, p50.limit_value, p50.ratio, p50.aim) == (3.0, 2.0, 1.5, "≤ 1.5")
    assert records["round_trip_p99_1_in_flight_2_routers"].ratio == 2.0
    rate = records["throughput_1_in_flight_1_router"]
    assert rate.unit == "operations/s"
    assert rate.ratio == pytest.approx(1 / 1.5, abs=1e-3)


def test_a_second_router_is_held_against_one_router_in_the_same_round() -> None:
    rounds = [_round(0.002, 0.001, 0.001), _round(0.02, 0.01, 0.001)]
    records = {record.name: record for record in figures(256, rounds)}
    assert records["second_router_throughput_256_in_flight"].ratio == 2.0


async def test_turn_keeps_as_many_calls_in_flight_as_asked() -> None:
    running = 0
    most = 0

    async def call() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    done = await turn(call, 4, 10)

    assert len(done.times_s) == 10
    assert done.times_s == sorted(done.times_s)
    assert most == 4
