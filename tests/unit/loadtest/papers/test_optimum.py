"""The yardstick: against hand-made cases, and against every partition tried one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.papers import optimum
from loadtest.papers.optimum import (
    Job,
    Partition,
    Present,
    Pricing,
    Span,
    Terms,
    cheapest_partition,
    regrouping_bound,
)

GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "opt_partition.json").read_text())


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


def naive_optimum(jobs: list[Job], pricing: Pricing) -> float:
    """Every partition, one by one."""
    tried = []
    for parts in partitions(jobs):
        prices = [pricing.price(frozenset(part)) for part in parts]
        if None not in prices:
            tried.append(sum(price or 0.0 for price in prices))
    return min(tried)


def partition(jobs: list[Job], pricing: Pricing) -> Partition:
    present = Present(pricing)
    for each in jobs:
        present.come(each)
    return present.partition()


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
    found = partition(jobs, pricing)
    assert found.price_per_hour == pytest.approx(naive_optimum(jobs, pricing))
    assert found.bound_per_hour == found.price_per_hour


@settings(max_examples=25, deadline=None)
@given(st.lists(JOB, min_size=2, max_size=7), st.data())
def test_who_comes_and_goes_leaves_what_would_be_found_anew(
    rows: list[tuple[float, float, float, int, int]], data: st.DataObject
) -> None:
    jobs = jobs_of(rows)
    pricing = Pricing(Terms(max_group_jobs=4))
    present = Present(pricing)
    there: list[Job] = []
    for each in jobs:
        present.come(each)
        there.append(each)
        if len(there) > 1 and data.draw(st.booleans()):
            present.partition()
            present.go(there.pop(data.draw(st.integers(0, len(there) - 1))))
    found = present.partition()
    anew = partition(sorted(there), Pricing(Terms(max_group_jobs=4)))
    assert found.price_per_hour == pytest.approx(anew.price_per_hour)
    assert sorted(name for names in found.groups for name in names) == sorted(
        each.name for each in there
    )


def crowd(num_jobs: int) -> list[Job]:
    rows = [
        (40.0 + 37 * i % 300, 30.0 + 53 * i % 250, 1.1 + i % 9 / 10, 1, 0) for i in range(num_jobs)
    ]
    return jobs_of(rows)


def test_solver_and_subsets_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ortools")
    jobs = crowd(9)
    by_subsets = cheapest_partition(jobs)
    monkeypatch.setattr(optimum, "BY_SUBSETS", 0)
    by_solver = cheapest_partition(jobs)
    assert by_solver.price_per_hour == pytest.approx(by_subsets.price_per_hour)
    assert by_solver.bound_per_hour == by_solver.price_per_hour


@settings(max_examples=30, deadline=None)
@given(st.lists(JOB, min_size=1, max_size=6), st.sampled_from([0.0, 1e-6, 1e-4, 1e-3]))
def test_a_bound_is_never_above_the_optimum(
    rows: list[tuple[float, float, float, int, int]], effort: float
) -> None:
    """However early the solver has to stop, down to before its first solution."""
    pytest.importorskip("ortools")
    jobs = jobs_of(rows)
    pricing = Pricing(Terms(max_group_jobs=4), effort=effort)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimum, "BY_SUBSETS", 0)
        found = partition(jobs, pricing)
    best = naive_optimum(jobs, pricing)
    assert 0 <= found.bound_per_hour <= best + 1e-6
    assert found.price_per_hour >= best - 1e-6
    assert found.price_per_hour == pytest.approx(
        sum(
            pricing.price(frozenset(each for each in jobs if each.name in names)) or 0.0
            for names in found.groups
        )
    )


def test_an_effort_ends_the_search_with_a_bound_the_same_each_time() -> None:
    pytest.importorskip("ortools")
    jobs = crowd(24)
    exact = cheapest_partition(jobs)
    hurried = [partition(jobs, Pricing(effort=0.002)) for _ in range(2)]
    assert hurried[0] == hurried[1]
    assert 0 < hurried[0].bound_per_hour < exact.bound_per_hour
    assert exact.bound_per_hour == exact.price_per_hour <= hurried[0].price_per_hour
    patient = partition(jobs, Pricing(effort=10.0))
    assert patient.bound_per_hour == patient.price_per_hour == exact.price_per_hour


def test_overlapping_node_sets_are_timed_by_the_max_plus_system() -> None:
    """Two wide jobs and one narrow share five nodes only if nobody is delayed too much."""
    wide = [job(f"w{i}", 100, 10, 1.9, rollout_nodes=2) for i in range(3)]
    assert cheapest_partition(wide).price_per_hour == pytest.approx(2 * 14.8 * 2 + 42.24)


def test_the_bound_is_the_price_of_whoever_is_there() -> None:
    """Two perfect partners share for one hour of three."""
    a, b = job("a", 100, 100, 1.0), job("b", 100, 100, 1.0)
    pricing = Pricing()
    spans = [Span(a, 0.0, 2.0), Span(b, 1.0, 3.0)]
    assert regrouping_bound(spans, pricing) == pytest.approx((3 * 57.04, 3 * 57.04))
    assert regrouping_bound(spans, pricing).gap == 0.0
    apart = [Span(a, 0.0, 1.0), Span(b, 2.0, 3.0)]
    assert regrouping_bound(apart, pricing).bound == pytest.approx(2 * 57.04)


def test_what_is_not_proven_is_told_over_time() -> None:
    pytest.importorskip("ortools")
    spans = [Span(each, 0.0, 2.0) for each in crowd(24)]
    exact = regrouping_bound(spans, Pricing())
    hurried = regrouping_bound(spans, Pricing(effort=0.002))
    assert exact.gap == 0.0
    assert hurried.bound < exact.bound <= exact.price <= hurried.price
    assert hurried.gap >= exact.bound / hurried.bound - 1.0 > 0.0
