"""The yardstick: against hand-made cases, and against every partition tried one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phaseloom.simulator import optimum
from phaseloom.simulator.optimum import (
    Job,
    Pricing,
    Span,
    Terms,
    cheapest_partition,
    regrouping_bound,
)

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "opt_partition.json").read_text())


def job(name: str, rollout_s: float, train_s: float, slo: float, **more: Any) -> Job:
    return Job(name, rollout_s, train_s, slo * (rollout_s + train_s), **more)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_optimum_is_that_of_the_golden_case(case: dict[str, Any]) -> None:
    jobs = [job(str(r["id"]), r["R"], r["T"], r["slo"]) for r in case["jobs"]]
    found = cheapest_partition(jobs)
    assert found.price_per_hour == pytest.approx(case["cost"]), case["why"]
    solo = sum(map(Pricing().solo, jobs))
    assert solo == pytest.approx(case["solo_cost"])


def partitions(jobs: list[Job]) -> Iterator[list[list[Job]]]:
    if not jobs:
        yield []
        return
    for rest in partitions(jobs[1:]):
        yield [[jobs[0]], *rest]
        for i in range(len(rest)):
            yield [*rest[:i], [jobs[0], *rest[i]], *rest[i + 1 :]]


JOB = st.tuples(
    st.integers(5, 60).map(lambda tens: 10.0 * tens),
    st.integers(5, 60).map(lambda tens: 10.0 * tens),
    st.integers(100, 220).map(lambda percent: percent / 100),
    st.sampled_from([1, 1, 2]),
    st.sampled_from([0, 400, 900]),
)
ROWS = st.lists(JOB, min_size=1, max_size=5)


def jobs_of(rows: list[tuple[float, float, float, int, int]]) -> list[Job]:
    return [
        job(f"j{i}", r, t, slo, rollout_nodes=nr, rollout_bytes=mb, train_bytes=mb)
        for i, (r, t, slo, nr, mb) in enumerate(rows)
    ]


@settings(max_examples=40, deadline=None)
@given(ROWS)
def test_optimum_equals_trying_every_partition(
    rows: list[tuple[float, float, float, int, int]],
) -> None:
    jobs = jobs_of(rows)
    pricing = Pricing(Terms(host_bytes=1300, max_group_jobs=3, switch_s=2.0))
    tried = []
    for parts in partitions(jobs):
        prices = [pricing.price(frozenset(part)) for part in parts]
        if None not in prices:
            tried.append(sum(price or 0.0 for price in prices))
    assert pricing.partition(jobs).price_per_hour == pytest.approx(min(tried))


def test_solver_and_subsets_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ortools")
    rows = [(40.0 + 37 * i % 300, 30.0 + 53 * i % 250, 1.1 + i % 9 / 10, 1, 0) for i in range(9)]
    jobs = jobs_of(rows)
    by_subsets = cheapest_partition(jobs)
    monkeypatch.setattr(optimum, "BY_SUBSETS", 0)
    assert cheapest_partition(jobs).price_per_hour == pytest.approx(by_subsets.price_per_hour)


def test_overlapping_node_sets_are_timed_by_the_max_plus_system() -> None:
    """Two wide jobs and one narrow share five nodes only if nobody is delayed too much."""
    wide = [job(f"w{i}", 100, 10, 1.9, rollout_nodes=2) for i in range(3)]
    assert cheapest_partition(wide).price_per_hour == pytest.approx(2 * 14.8 * 2 + 42.24)


def test_the_bound_is_the_price_of_whoever_is_there() -> None:
    """Two perfect partners share for one hour of three."""
    a, b = job("a", 100, 100, 1.0), job("b", 100, 100, 1.0)
    pricing = Pricing()
    spans = [Span(a, 0.0, 2.0), Span(b, 1.0, 3.0)]
    assert regrouping_bound(spans, pricing) == pytest.approx(3 * 57.04)
    apart = [Span(a, 0.0, 1.0), Span(b, 2.0, 3.0)]
    assert regrouping_bound(apart, pricing) == pytest.approx(2 * 57.04)
