"""Co-execution without a barrier: budgets that guard the SLO, and moves that save money."""

from __future__ import annotations

from math import inf
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from phaseloom.common.contract.ids import NodeId
from phaseloom.scheduler.core.planning import groups
from phaseloom.scheduler.core.planning.weave.candidates import (
    MOVE_S,
    RESERVE,
    holds,
    shape,
    trial_member_of,
)
from phaseloom.scheduler.core.planning.weave.fifo import late_shares, worst_iterations_s
from phaseloom.scheduler.core.planning.weave.period import timing_of
from phaseloom.scheduler.core.planning.weave.search import search_state_of
from phaseloom.scheduler.core.policies.registry import PLACEMENT
from phaseloom.scheduler.core.state.cluster import Cluster, Member, Move
from tests.unit.scheduler.weave_cluster import empty, job, keep, partition, pin

POLICY = PLACEMENT["coexec_repack"]


def place(cluster: Cluster, member: Member) -> str:
    """The group that it joins; empty: one of its own."""
    return keep(cluster, member, POLICY.place(cluster, member)).group


def replan(cluster: Cluster) -> list[Move]:
    """And carry it out, as the core does: in order, each move leaving a valid cluster."""
    assert POLICY.replan is not None
    moves = POLICY.replan(groups.copy(cluster))
    for move in moves:
        member = groups.group_of(cluster, move.job).members[move.job]
        groups.leave(cluster, move.job)
        groups.join(cluster, member, move.placed)
        groups.validate(cluster)
    return moves


def lived(member: Member, iterations: int, seconds: float) -> Member:
    member.iterations = iterations
    member.alone_s = iterations * timing_of(member).solo_s
    member.iterated_s = member.submitted_s + seconds
    return member


# --- budgets -------------------------------------------------------------------------------------


def test_the_budget_is_what_the_slo_leaves_of_a_life() -> None:
    cluster = empty()
    cluster.now_s = 2000.0
    member = lived(job("a", 60, 40, 1.5, iterations=100), 10, 1900.0)
    candidate = trial_member_of(cluster, member)
    assert candidate.num_left == 90
    assert candidate.budget_s == pytest.approx(150 * 100 - 1900)
    member.began_s = 1950.0
    assert trial_member_of(cluster, member).budget_s == pytest.approx(150 * 100 - 1900 - MOVE_S)


def test_an_iteration_under_way_counts_once_it_is_overdue() -> None:
    cluster = empty()
    member = lived(job("a", 60, 40, 1.5, iterations=100), 10, 1000.0)
    cluster.now_s = 1150.0
    assert trial_member_of(cluster, member).budget_s == pytest.approx(150 * 100 - 1000)
    cluster.now_s = 1700.0
    assert trial_member_of(cluster, member).budget_s == pytest.approx(150 * 100 - 1500)


def test_what_was_saved_alone_may_be_spent_beside_others() -> None:
    """Two alike on one pair of nodes take 300 s for 200: more than 1.2 allows a newcomer."""
    for iterations, may in ((0, False), (80, True)):
        cluster = empty(1)
        old = lived(job("old", 150, 50, 1.2, iterations=100), iterations, 200.0 * iterations)
        cluster.now_s = 200.0 * iterations
        pin(cluster, "", old, ["r000"], ["t000"])
        new = job("new", 150, 50, 2.0, iterations=100)
        new.submitted_s = cluster.now_s
        joined = POLICY.place(cluster, new)
        assert hasattr(joined, "group") == may, joined


def test_a_job_that_is_lost_to_its_slo_is_not_starved() -> None:
    cluster = empty()
    member = lived(job("late", 60, 40, 1.1, iterations=100), 90, 30_000.0)
    assert trial_member_of(cluster, member).budget_s == pytest.approx(10 * 110)


def test_a_job_of_unknown_length_spends_nothing_in_advance() -> None:
    cluster = empty()
    member = lived(job("open", 60, 40, 1.5), 100, 10_000.0)
    candidate = trial_member_of(cluster, member)
    assert candidate.budget_s == pytest.approx(150 * candidate.num_left)


def test_a_job_that_drifts_keeps_a_reserve_within_what_it_may_spend() -> None:
    for slo, keeps_s in ((1.5, (1.5 - RESERVE) * 100), (1.02, 100.0)):
        member = lived(job("a", 60, 40, slo, iterations=100), 10, 1000.0 * slo)
        assert trial_member_of(empty(), member).budget_s == pytest.approx(90 * slo * 100)
        member.has_drifted = True
        assert trial_member_of(empty(), member).budget_s == pytest.approx(90 * keeps_s)


def punctual(percentile: float) -> Cluster:
    cluster = empty()
    cluster.limits = replace(cluster.limits, slo_percentile=percentile)
    return cluster


def test_a_percentile_leaves_a_job_so_many_late_iterations() -> None:
    member = lived(job("a", 60, 40, 1.5, iterations=100), 40, 4000.0)
    member.num_late = 2
    assert trial_member_of(punctual(0.0), member).late == inf
    assert trial_member_of(punctual(95.0), member).late == pytest.approx(3.0)
    member.num_late = 7
    late = trial_member_of(punctual(95.0), member).late
    assert late == pytest.approx(0.05 * 60), "it is lost, and the job is not to be starved"
    assert trial_member_of(punctual(95.0), job("b", 60, 40, 0.0, iterations=100)).late == inf


def test_what_was_saved_alone_is_not_spent_on_late_iterations() -> None:
    """80 of 100 iterations were alone, so the mean allows the others 300 s each: 240 s are the most
    that a single one may take."""
    for percentile, may in ((0.0, True), (75.0, True), (95.0, False)):
        cluster = empty(1)
        cluster.limits = replace(cluster.limits, slo_percentile=percentile)
        cluster.now_s = 200.0 * 80
        old = lived(job("old", 150, 50, 1.2, iterations=100), 80, 200.0 * 80)
        pin(cluster, "", old, ["r000"], ["t000"])
        new = job("new", 150, 50, 2.0, iterations=100)
        new.submitted_s = cluster.now_s
        assert hasattr(POLICY.place(cluster, new), "group") == may, percentile


@given(
    st.lists(st.tuples(st.integers(20, 300), st.integers(20, 300)), min_size=2, max_size=4),
    st.sampled_from([1.2, 1.5, 2.0]),
    st.sampled_from([50.0, 90.0, 95.0, 100.0]),
)
@settings(max_examples=40, deadline=None)
def test_a_group_that_holds_is_late_no_more_often_than_its_percentile(
    phases: list[tuple[int, int]], slo: float, percentile: float
) -> None:
    """The bound binds: in every orbit that is found, and for any part of the group."""
    cluster = punctual(percentile)
    members = [job(f"j{i}", r, t, slo, iterations=200) for i, (r, t) in enumerate(phases)]
    for member in members:
        member.nodes = {"rollout": [NodeId("r000")], "train": [NodeId("t000")]}
    group = tuple(trial_member_of(cluster, member) for member in members)
    if holds(group, 0.0, is_changed=True):
        allowed_s = tuple(candidate.timing.allowed_s for candidate in group)
        for share in late_shares(shape(group), 0.0, allowed_s):
            assert share * 200 <= (1 - percentile / 100) * 200 + 1e-6


def test_late_iterations_are_those_of_the_queues() -> None:
    """Two alike on one pair of nodes take turns: each waits for the longer phase of the other."""
    jobs = ((150.0, 50.0, 0.0, (0,)), (150.0, 50.0, 0.0, (0,)))
    assert late_shares(jobs, 0.0, (300.0, 299.0)) == (0.0, 1.0)
    assert late_shares(jobs, 5.0, (309.0, 311.0)) == (1.0, 0.0)
    alone = ((150.0, 50.0, 0.0, (0,)),)
    assert late_shares(alone, 5.0, (200.0,)) == (0.0,)


def test_a_group_must_hold_after_every_departure() -> None:
    """First in, first out: a departure can delay those who stay, so groups that keep their budgets
    only as long as all are there do not hold."""
    refused = 0
    for seed in range(300):
        draws = Random(seed)
        members = [
            job(f"j{i}", draws.uniform(50, 300), draws.uniform(50, 300), iterations=1000)
            for i in range(3)
        ]
        candidates = tuple(
            trial_member_of(empty(), member)._replace(nodes=(f"n{draws.randrange(2)}",))
            for member in members
        )
        settled_s = worst_iterations_s(shape(candidates), 0.0)
        exact = tuple(
            candidate._replace(budget_s=(mean_s + 1e-3) * candidate.num_left)
            for candidate, mean_s in zip(candidates, settled_s, strict=True)
        )
        worse = any(
            mean_s > candidate.budget_s / candidate.num_left
            for k in range(3)
            for part in [exact[:k] + exact[k + 1 :]]
            for mean_s, candidate in zip(worst_iterations_s(shape(part), 0.0), part, strict=True)
        )
        assert holds(exact, 0.0, is_changed=False) != worse
        refused += worse
    assert 0 < refused < 300


# --- placement -----------------------------------------------------------------------------------


def test_a_saturated_group_is_joined_where_everybody_tolerates_it() -> None:
    """Algorithm 1 prunes it: T_load = T_cycle."""
    cluster = empty()
    for name in ("a", "b", "c"):
        arriving = job(name, 100, 100, 2.0, iterations=500)
        assert place(cluster, arriving) == ("" if name == "a" else "g1")


def test_a_best_effort_job_of_known_length_shares() -> None:
    cluster = empty()
    pin(cluster, "", job("a", 100, 100, 2.0, iterations=500), ["r000"], ["t000"])
    assert place(cluster, job("patient", 100, 100, 0.0, iterations=500)) == "g1"


def test_short_jobs_are_not_held_to_long_ones() -> None:
    """Strict round robin would take 500 s for the short one: SLO 2 allows 120."""
    cluster = empty()
    pin(cluster, "", job("long", 400, 30, 2.0, iterations=500), ["r000"], ["t000"])
    short = job("short", 40, 20, 2.0, iterations=5000)
    assert place(cluster, short) == "g1"
    alone = empty()
    pin(alone, "", job("long", 400, 30, 2.0, iterations=500), ["r000"], ["t000"])
    strict = PLACEMENT["coexec"].place(alone, job("short", 40, 20, 2.0, iterations=5000))
    assert keep(alone, job("short", 40, 20, 2.0), strict).group == ""


def test_a_job_of_few_iterations_with_a_tight_slo_stays_alone() -> None:
    cluster = empty()
    pin(cluster, "", job("a", 100, 100, 2.0, iterations=500), ["r000"], ["t000"])
    assert place(cluster, job("hasty", 90, 90, 1.05, iterations=3)) == ""


def test_jobs_of_several_nodes_are_packed_on_node_sets() -> None:
    cluster = empty()
    for name in ("a", "b"):
        place(cluster, job(name, 100, 100, 1.9, nr=2, nt=2, iterations=500))
    assert partition(cluster) == {frozenset("ab")}
    assert len(cluster.groups["g1"].nodes["rollout"]) == 2


# --- replanning ----------------------------------------------------------------------------------


def lonely_pair(iterations: int) -> Cluster:
    """Each alone on nodes of its own, though they would weave perfectly."""
    cluster = empty()
    for i, name in enumerate("ab"):
        member = job(name, 100, 100, 1.5, iterations=iterations)
        pin(cluster, "", member, [f"r{i:03d}"], [f"t{i:03d}"])
    return cluster


def test_groups_that_fit_together_are_merged() -> None:
    cluster = lonely_pair(500)
    before = groups.cost(cluster)
    moves = replan(cluster)
    assert len(moves) == 1
    assert partition(cluster) == {frozenset("ab")}
    assert groups.cost(cluster) == pytest.approx(before / 2)
    assert replan(cluster) == []


def test_nothing_moves_for_what_is_left_of_short_jobs() -> None:
    """Two iterations are no longer than the move itself, and the budget does not cover it."""
    assert replan(lonely_pair(2)) == []


def test_a_group_that_breaks_a_budget_is_taken_apart() -> None:
    cluster = empty()
    pin(cluster, "", job("a", 300, 50, 1.1, iterations=500), ["r000"], ["t000"])
    pin(cluster, "g1", job("b", 300, 50, 1.1, iterations=500), ["r000"], ["t000"])
    assert replan(cluster)
    state = search_state_of(cluster)
    assert all(state.holds(group, is_changed=False) for group in state.groups.values())


def test_what_cannot_be_planned_is_left_alone() -> None:
    """A cycle that is not known, a node that is down."""
    cluster = lonely_pair(500)
    cluster.groups["g1"].members["a"].cycle = None
    assert replan(cluster) == []
    cluster = lonely_pair(500)
    groups.host_down(cluster, cluster.groups["g2"].nodes["train"][0])
    assert replan(cluster) == []


JOB = st.fixed_dictionaries(
    {
        "rollout_s": st.integers(3, 60).map(lambda tens: 10.0 * tens),
        "train_s": st.integers(3, 60).map(lambda tens: 10.0 * tens),
        "slo": st.integers(100, 220).map(lambda percent: percent / 100),
        "iterations": st.integers(1, 400),
        "nr": st.sampled_from([1, 1, 1, 2]),
        "mr": st.sampled_from([100, 500]),
        "mt": st.sampled_from([100, 500]),
    }
)


@settings(max_examples=25, deadline=None)
@given(st.lists(JOB, min_size=3, max_size=9), st.data())
def test_plans_keep_memory_size_and_budgets(
    rows: list[dict[str, Any]], data: st.DataObject
) -> None:
    cluster = empty(40, host_gb=1500, switch_s=5.0, max_group_jobs=4)
    for i, row in enumerate(rows):
        place(cluster, job(f"j{i}", **row))
    leaving = data.draw(st.sets(st.sampled_from(sorted(cluster.placed)), max_size=3))
    for name in sorted(leaving):
        groups.leave(cluster, name)
    before = groups.cost(cluster)
    moved = {move.job for move in replan(cluster)}
    state = search_state_of(cluster)
    for name, candidates in state.groups.items():
        group = cluster.groups[name]
        assert len(candidates) <= 4
        left = tuple(
            candidate._replace(
                budget_s=candidate.budget_s - (MOVE_S if candidate.job in moved else 0.0)
            )
            for candidate in candidates
        )
        assert holds(left, 5.0, is_changed=False)
        for pool, nodes in group.nodes.items():
            for node in nodes:
                users = [m for m in group.members.values() if node in m.nodes[pool]]
                taken = sum(m.needs[pool].host_bytes for m in users)
                assert taken <= cluster.hosts[node].host_bytes
    assert bool(moved) or groups.cost(cluster) == before


@settings(max_examples=40, deadline=None)
@given(st.lists(JOB, min_size=3, max_size=9))
def test_the_best_place_is_that_of_a_search_through_all(rows: list[dict[str, Any]]) -> None:
    """What is passed over unseen, by a bound of its worth, could not have been better."""
    cluster = empty(40, switch_s=5.0)
    *before, newcomer = [job(f"j{i}", **{**row, "nr": 1}) for i, row in enumerate(rows)]
    for member in before:
        place(cluster, member)
    state = search_state_of(cluster)
    candidate = trial_member_of(cluster, newcomer)
    worths = []
    for group in state.groups.values():
        for nodes in {(node,) for other in group for node in other.nodes} | {("+",)}:
            bigger = (*group, candidate._replace(nodes=nodes))
            if len(group) < 5 and state.holds(bigger, is_changed=True):
                worths.append(state.worth(bigger) - state.worth(group))
    found = state.best(state.groups, candidate, inf)
    assert (found.worth if found else inf) == pytest.approx(min(worths, default=inf))
