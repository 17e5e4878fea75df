"""The policies that co-execution is compared with."""

from __future__ import annotations

import pytest

from phaseloom.scheduler.core.policies.registry import PLACEMENT
from phaseloom.scheduler.core.state.cluster import Need, Placed, Waits
from tests.unit.scheduler.weave_cluster import empty, job, keep, partition, pin


def test_solo_shares_nothing_and_waits_for_nodes() -> None:
    cluster = empty(1)
    place = PLACEMENT["solo"].place
    keep(cluster, job("a", 10, 10), place(cluster, job("a", 10, 10)))
    decision = place(cluster, job("b", 10, 10))
    assert isinstance(decision, Waits)
    assert "1 of pool rollout (0 free), 1 of pool train (0 free)" in decision.reason


def test_colocated_takes_nodes_of_the_one_pool_that_a_job_declares() -> None:
    cluster = empty()
    monolithic = job("a", 100, 100)
    monolithic.needs = {"train": Need(2)}
    placed = keep(cluster, monolithic, PLACEMENT["colocated"].place(cluster, monolithic))
    assert placed.nodes == {"train": ["t000", "t001"]}
    assert len(cluster.free["rollout"]) == 20


def test_random_repeats_itself_and_looks_at_memory_but_at_no_slo() -> None:
    def run() -> set[frozenset[str]]:
        cluster = empty(40, host_gb=1000)
        for i in range(30):
            arriving = job(f"j{i}", 100, 100, 1.0, mr=300, mt=300)
            keep(cluster, arriving, PLACEMENT["random"].place(cluster, arriving))
        return partition(cluster)

    groups = run()
    assert groups == run()
    assert max(map(len, groups)) == 3, "as many as memory allows, whatever their SLO"
    assert len(groups) < 25


@pytest.mark.parametrize("policy", ["random", "most_idle"])
def test_groups_are_no_larger_than_the_limit(policy: str) -> None:
    cluster = empty(40, max_group_jobs=2)
    for i in range(20):
        arriving = job(f"j{i}", 100, 100, 1.0)
        keep(cluster, arriving, PLACEMENT[policy].place(cluster, arriving))
    assert max(map(len, partition(cluster))) == 2


def test_most_idle_takes_the_idlest_group_and_its_idlest_node() -> None:
    cluster = empty()
    place = PLACEMENT["most_idle"].place
    pin(cluster, "", job("a", 100, 100), ["r000"], ["t000"])
    pin(cluster, "", job("b", 100, 100), ["r001"], ["t001"])
    pin(cluster, "g2", job("c", 10, 10), ["r002"], ["t001"])
    arriving = job("d", 500, 500, 1.0)
    placed = keep(cluster, arriving, place(cluster, arriving))
    assert placed.group == "g2", "its second rollout node does next to nothing"
    assert placed.nodes["rollout"] == ["r002"]


def test_gavel_shares_whole_groups_by_the_time_that_slos_need() -> None:
    cluster = empty(2)
    place = PLACEMENT["gavel"].place
    for name, slo, group in (("a", 2.0, ""), ("b", 2.0, "g1"), ("c", 3.0, ""), ("d", 1.6, "g2")):
        arriving = job(name, 100, 100, slo)
        assert keep(cluster, arriving, place(cluster, arriving)).group == group
    decision = place(cluster, job("e", 100, 100, 1.5))
    assert isinstance(decision, Waits)
    assert "67% of a group's time" in decision.reason
    assert not isinstance(decision, Placed)
