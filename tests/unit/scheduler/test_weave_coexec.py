"""Algorithm 1: packed into bubbles, beside one with just enough new nodes, or alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from phaseloom.scheduler.core.planning import groups
from phaseloom.scheduler.core.planning.groups import bounds_of
from phaseloom.scheduler.core.planning.weave.period import (
    group_phases,
    is_overloaded,
    period_s,
    timing_of,
)
from phaseloom.scheduler.core.policies.registry import PLACEMENT
from phaseloom.scheduler.core.state.cluster import Cluster, Placed, Waits
from tests.unit.scheduler.weave_cluster import empty, job, keep, pin

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "algorithm1.json").read_text())
place = PLACEMENT["coexec"].place


def member(row: dict[str, Any]) -> Any:
    more = {key: row[key] for key in ("nr", "nt", "mr", "mt")}
    return job(f"j{row['id']}", row["R"], row["T"], row["slo"], **more)


def cluster_of(case: dict[str, Any]) -> tuple[Cluster, list[dict[int, str]]]:
    """And, of each group, the names of its rollout nodes by the case's numbers."""
    cluster = empty(host_gb=case.get("host", 2048))
    names: list[dict[int, str]] = []
    for rows in case["groups"]:
        trains = list(cluster.free["train"][: rows["nT"]])
        rolls: dict[int, str] = {}
        group = ""
        for row in rows["jobs"]:
            free = iter(cluster.free["rollout"])
            numbers = rows["place"][str(row["id"])]
            for number in numbers:
                if number not in rolls:
                    rolls[number] = next(free)
            pin(cluster, group, member(row), [rolls[n] for n in numbers], list(trains))
            group = f"g{cluster.num_groups}"
        names.append(rolls)
    return cluster, names


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_placement_is_that_of_the_golden_case(case: dict[str, Any]) -> None:
    cluster, names = cluster_of(case)
    expect = case["expect"]
    before = groups.cost(cluster)
    new_member = member(case["job"])
    placed = keep(cluster, new_member, place(cluster, new_member))
    group = "" if expect["group"] is None else f"g{expect['group'] + 1}"
    assert placed.group == group, case["why"]
    own = names[expect["group"]] if group else {}
    numbers = {name: number for number, name in own.items()}
    used = [numbers[node] for node in placed.nodes["rollout"] if node in numbers]
    assert used in expect.get("any_nodes", [expect.get("nodes")]), case["why"]
    assert len(placed.nodes["rollout"]) - len(used) == expect["new"]
    assert groups.cost(cluster) - before == pytest.approx(expect["delta"])


def test_no_slo_is_broken_when_jobs_keep_coming() -> None:
    """Whatever is placed, everybody's settled period stays within its SLO."""
    cluster = empty(60, switch_s=5.0)
    for i in range(60):
        arriving = job(f"j{i}", 50 + 37 * i % 400, 25 + 53 * i % 300, 1.0 + i % 10 / 10)
        keep(cluster, arriving, place(cluster, arriving))
    assert len(cluster.groups) < 50
    for group in cluster.groups.values():
        settled_s = period_s(group_phases(group, 5.0))
        assert all(settled_s <= timing_of(m).allowed_s + 1e-6 for m in group.members.values())


def test_switches_are_planned_on_nodes_that_are_shared() -> None:
    """Two perfect partners at SLO 1 weave for free only if a switch takes no time."""
    for switch_s, count in ((0.0, 1), (5.0, 2)):
        cluster = empty(switch_s=switch_s)
        for name in ("a", "b"):
            arriving = job(name, 100, 100, 1.0)
            keep(cluster, arriving, place(cluster, arriving))
        assert len(cluster.groups) == count


def test_a_job_of_few_iterations_is_not_let_in_where_joining_breaks_its_slo() -> None:
    """The settled period is within its SLO, but it waits for its turn first."""
    for iterations, group in ((2, ""), (200, "g1"), (0, "g1")):
        cluster = empty()
        pin(cluster, "", job("a", 100, 100, 1.2), ["r000"], ["t000"])
        arriving = job("b", 100, 100, 1.2, iterations=iterations)
        assert keep(cluster, arriving, place(cluster, arriving)).group == group


def test_nodes_that_are_down_or_without_memory_are_not_used() -> None:
    cluster = empty(host_gb=1000)
    pin(cluster, "", job("a", 100, 20, mr=600, mt=100), ["r000"], ["t000"])
    beside = job("b", 100, 20, mr=500, mt=100)
    assert keep(cluster, beside, place(cluster, beside)).nodes["rollout"] == ["r001"]
    groups.host_down(cluster, cluster.groups["g1"].nodes["train"][0])
    late = job("c", 100, 20)
    assert keep(cluster, late, place(cluster, late)).group == ""


def test_a_job_of_several_nodes_takes_just_enough_new_ones() -> None:
    cluster = empty()
    pin(cluster, "", job("a", 100, 10, 1.3, nr=2), ["r000", "r001"], ["t000"])
    pin(cluster, "g1", job("b", 100, 10, 1.3, nr=1), ["r002"], ["t000"])
    # On r002 and one new node it would take turns with b only, and 55 s leave time for that.
    wide = job("c", 30, 10, 4.0, nr=2)
    placed = keep(cluster, wide, place(cluster, wide))
    assert placed.group == "g1"
    assert len(set(placed.nodes["rollout"])) == 2


def test_a_job_without_a_known_cycle_gets_nodes_of_its_own_or_shares_without_promises() -> None:
    cluster = empty(1)
    cold = job("cold", 1, 1, slo=0.0)
    cold.cycle = None
    keep(cluster, cold, place(cluster, cold))
    second = job("second", 1, 1, slo=0.0)
    second.cycle = None
    assert isinstance(place(cluster, second), Waits)
    cluster.groups["g1"].is_closed = False
    assert isinstance(place(cluster, second), Placed)
    promised = job("promised", 1, 1, slo=1.5)
    assert isinstance(place(cluster, promised), Waits)


def test_waiting_tells_the_numbers() -> None:
    cluster = empty(1)
    pin(cluster, "", job("a", 100, 100, 1.2), ["r000"], ["t000"])
    tight = place(cluster, job("b", 150, 100, 1.1))
    assert isinstance(tight, Waits)
    assert (
        "would take 250.0 s, but only 240.0 s are allowed (SLO 1.2 of another job)" in tight.reason
    )
    assert "1 of pool rollout (0 free)" in tight.reason
    hurried = place(cluster, job("c", 100, 100, 1.2, iterations=2))
    assert isinstance(hurried, Waits)
    assert "no slack for a job that joins midway" in hurried.reason


def test_drift_past_saturation_or_an_slo_is_overload() -> None:
    cluster = empty()
    pin(cluster, "", job("a", 100, 100, 1.5), ["r000"], ["t000"])
    group = cluster.groups["g1"]
    assert not is_overloaded(group)
    pin(cluster, "g1", job("b", 100, 100, 1.5), ["r000"], ["t000"])
    assert not is_overloaded(group)
    drifted = job("x", 120, 100, 1.5).cycle
    assert drifted is not None
    groups.set_cycle(cluster, "b", drifted)
    assert not is_overloaded(group)
    groups.set_cycle(cluster, "b", job("x", 140, 30, 1.5).cycle or drifted)
    assert is_overloaded(group)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(20, 400),
            st.integers(20, 300),
            st.integers(100, 220).map(lambda percent: percent / 100),
            st.sampled_from([1, 1, 2]),
        ),
        min_size=3,
        max_size=14,
    ),
    st.sampled_from([2, 40]),
    st.sampled_from([0.0, 5.0]),
)
def test_groups_passed_over_for_their_rollout_nodes_have_no_better_place(
    rows: list[tuple[int, int, float, int]], num_nodes: int, switch_s: float
) -> None:
    cluster = empty(num_nodes, switch_s=switch_s)
    for i, (rollout_s, train_s, slo, nr) in enumerate(rows):
        newcomer = job(f"j{i}", rollout_s, train_s, slo, nr=nr)
        decision = place(cluster, newcomer)
        seen_all = groups.copy(cluster)
        for group in seen_all.groups.values():
            group.bounds = replace(bounds_of(group), rollout_s=0.0)
        assert decision == place(seen_all, newcomer)
        if isinstance(decision, Placed):
            keep(cluster, newcomer, decision)
