"""Node groups: whatever comes and goes, every node and every job is where the books say."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phaseloom.common.contract.ids import JobKey, NodeId
from phaseloom.common.contract.specs import (
    Cycle,
    DeploymentSpec,
    JobSpec,
    Layout,
    ModelSpec,
    Segment,
)
from phaseloom.scheduler.core.planning import groups
from phaseloom.scheduler.core.state.cluster import Cluster, Host, Limits, Member, Need, Placed

POOLS = ("rollout", "train")
CYCLE = Cycle(100.0, [Segment("rollout", 0, 60), Segment("train", 60, 40)])


def host(name: str, pool: str, price: float = 1.0) -> Host:
    return Host(NodeId(name), pool, 1, 1000, price)


def cluster_of(num_nodes: int = 4) -> Cluster:
    cluster = Cluster(now_s=50.0)
    for pool in POOLS:
        for number in range(num_nodes):
            groups.host_up(cluster, host(f"{pool[0]}{number}", pool))
    return cluster


def member(job: str, cycle: Cycle | None = CYCLE, **num_nodes: int) -> Member:
    needs = {pool: Need(num_nodes.get(pool, 1)) for pool in POOLS}
    return Member(job=f"t.{job}", slo=0.0, needs=needs, cycle=cycle)


def on(*names: str, group: str = "") -> Placed:
    return Placed(
        group,
        {pool: [NodeId(n) for n in names if n[0] == pool[0]] for pool in POOLS},
    )


def nodes(group: str, cluster: Cluster) -> set[str]:
    return {name for names in cluster.groups[group].nodes.values() for name in names}


# --- iterations -----------------------------------------------------------------------------------


def test_iteration_counts_for_what_it_took_net_of_waits() -> None:
    """Not for its worst case: what other jobs may cost is a multiple of the time that it took."""
    worst = [Segment("rollout", 0, 60, worst_s=90), Segment("train", 60, 40)]
    job = member("a", Cycle(100.0, worst))
    groups.iterated(job, now_s=230.0, began_s=100.0, lag_s=20.0)
    assert job.alone_s == 110.0
    groups.iterated(job, now_s=430.0, began_s=100.0, lag_s=130.0)
    assert job.alone_s == 110.0 + 90.0
    assert (job.iterations, job.iterated_s) == (2, 430.0)


def test_iteration_that_a_fault_held_up_counts_for_twice_its_cycle() -> None:
    job = member("a")
    groups.iterated(job, now_s=5000.0, began_s=100.0, lag_s=20.0)
    assert job.alone_s == 200.0


def drawn(mean_s: float, deviation: float, seed: int, count: int) -> list[float]:
    """Lognormal iterations. Args: deviation: relative to the mean."""
    sigma = math.sqrt(math.log(1 + deviation**2))
    draws = random.Random(seed)
    return [mean_s * math.exp(draws.gauss(-(sigma**2) / 2, sigma)) for _ in range(count)]


def first_trend(job: Member, durations_s: list[float]) -> tuple[int, float]:
    """The iteration that shows a changed cycle, and its period. (0, 0) if none does."""
    for number, duration_s in enumerate(durations_s, start=1):
        job.recent_s = [*job.recent_s[1 - groups.LONGEST_TREND :], duration_s]
        period_s = groups.trend_of(job)
        if period_s is not None:
            return number, period_s
    return 0, 0.0


@pytest.mark.parametrize("deviation", [0.0, 0.1, 0.3, 0.6])
def test_iterations_that_only_vary_are_hardly_ever_a_trend(deviation: float) -> None:
    runs = [first_trend(member("a"), drawn(100.0, deviation, seed, 200)) for seed in range(100)]
    mistaken = [run for run in runs if run[0]]
    assert len(mistaken) <= 5, mistaken


@pytest.mark.parametrize(
    ("factor", "deviation", "within"),
    [(1.1, 0.0, 5), (0.9, 0.0, 5), (1.3, 0.1, 20), (1.6, 0.3, 40), (0.6, 0.3, 20)],
)
def test_changed_cycle_is_followed_soon(factor: float, deviation: float, within: int) -> None:
    for seed in range(20):
        number, period_s = first_trend(member("a"), drawn(100.0 * factor, deviation, seed, 60))
        assert 5 <= number <= within, seed
        assert period_s == pytest.approx(100.0 * factor, rel=0.25)


def test_slow_drift_of_a_steady_job_is_followed() -> None:
    number, period_s = first_trend(member("a"), [100.0 + 0.5 * i for i in range(60)])
    assert 100.0 + 0.5 * number == pytest.approx(period_s, rel=0.03)
    assert number < 20


def test_iteration_whose_phases_overlap_counts_for_its_cycle() -> None:
    """The waits of both pass at once, and are counted twice."""
    job = member("a", Cycle(70.0, [Segment("rollout", 0, 60), Segment("train", 20, 40)]))
    groups.iterated(job, now_s=230.0, began_s=100.0, lag_s=80.0)
    assert job.alone_s == 70.0
    assert groups.trend_of(job) is None


# --- what a job needs ----------------------------------------------------------------------------


def test_needs_are_the_most_of_each_pool_and_host_memory_adds_up() -> None:
    def spec(name: str, pool: str, num_nodes: int, ranks: int, host_bytes: int) -> DeploymentSpec:
        return DeploymentSpec(
            name,
            pool,
            "noop",
            ModelSpec({}),
            layout=Layout(dp=ranks),
            num_nodes=num_nodes,
            host_bytes=host_bytes,
        )

    specs = [
        spec("sampler", "rollout", 2, 16, 100),
        spec("reference", "rollout", 1, 4, 30),
        spec("policy", "train", 1, 8, 500),
    ]
    made = groups.member_of(JobKey("t", "a"), JobSpec(1.5, specs, CYCLE), 7.0)
    assert (made.job, made.slo, made.cycle, made.submitted_s) == ("t.a", 1.5, CYCLE, 7.0)
    noop = (groups.demand_of(specs[2]),)
    shared = tuple(sorted({groups.demand_of(specs[0]), *noop}))
    assert made.needs == {"rollout": Need(2, 8, 130, shared), "train": Need(1, 8, 500, noop)}


@pytest.mark.parametrize(("slo", "ends_s"), [(0.0, 250.0), (1.5, 200.0)])
def test_latest_end_allows_for_the_wait_that_may_be(slo: float, ends_s: float) -> None:
    cluster = Cluster(now_s=50.0, limits=Limits(duty_limit=0.5))
    job = member("a")
    job.slo = slo
    groups.set_end(cluster, job, 100.0)
    assert job.ends_s == ends_s
    groups.set_end(cluster, job, 0.0)
    assert job.ends_s == 0.0, "not known"


# --- coming and going ----------------------------------------------------------------------------


def test_join_takes_free_nodes_and_leave_gives_back_what_nobody_else_uses() -> None:
    cluster = cluster_of()
    groups.join(cluster, member("a", rollout=2), on("r1", "r0", "t0"))
    groups.join(cluster, member("b"), on("r1", "t3", group="g1"))
    groups.validate(cluster)
    assert nodes("g1", cluster) == {"r0", "r1", "t0", "t3"}
    assert cluster.free == {"rollout": ["r2", "r3"], "train": ["t1", "t2"]}
    assert sorted(groups.leave(cluster, "t.a")) == ["r0", "t0"]
    groups.validate(cluster)
    assert nodes("g1", cluster) == {"r1", "t3"}
    assert groups.leave(cluster, "t.a") == [], "it has left"
    groups.leave(cluster, "t.b")
    assert cluster.groups == {}
    assert cluster.free == cluster_of().free


def test_cost_is_of_the_nodes_that_belong_to_groups() -> None:
    cluster = Cluster()
    for name, pool, price in (("r0", "rollout", 2.0), ("t0", "train", 5.0), ("t1", "train", 7.0)):
        groups.host_up(cluster, host(name, pool, price))
    assert groups.cost(cluster) == 0
    groups.join(cluster, member("a"), on("r0", "t1"))
    assert groups.cost(cluster) == 9.0


def test_group_of_a_job_without_a_cycle_is_closed_until_it_is_measured_or_shared() -> None:
    cluster = cluster_of()
    assert groups.join(cluster, member("a", None), on("r0", "t0")).is_closed
    assert groups.join(cluster, member("b", None), on("r1", "t1")).is_closed
    groups.set_cycle(cluster, "t.a", CYCLE)
    assert not groups.group_of(cluster, "t.a").is_closed
    assert not groups.join(cluster, member("c", None), on("r1", "t1", group="g2")).is_closed
    assert not groups.join(cluster, member("d"), on("r2", "t2")).is_closed
    groups.validate(cluster)


def test_node_that_is_down_keeps_its_group_and_is_free_only_once_it_is_back() -> None:
    cluster = cluster_of(1)
    groups.join(cluster, member("a"), on("r0", "t0"))
    groups.host_down(cluster, NodeId("r0"))
    assert groups.group_of(cluster, "t.a").nodes["rollout"] == ["r0"]
    groups.leave(cluster, "t.a")
    groups.validate(cluster)
    assert cluster.free["rollout"] == []
    groups.host_up(cluster, host("r0", "rollout"))
    assert cluster.free["rollout"] == ["r0"]
    groups.validate(cluster)


def test_member_that_takes_fewer_nodes_releases_the_rest() -> None:
    cluster = cluster_of()
    groups.join(cluster, member("a", rollout=2), on("r0", "r1", "t0"))
    fewer = {"rollout": Need(1)}
    assert groups.repin(cluster, "t.a", fewer, {"rollout": [NodeId("r1")]}) == ["r0", "t0"]
    groups.validate(cluster)
    groups.repin(cluster, "t.a", {"train": Need(1)}, {"train": [NodeId("t2")]})
    groups.validate(cluster)
    assert nodes("g1", cluster) == {"t2"}


def test_copy_and_its_origin_know_nothing_of_one_another() -> None:
    cluster = cluster_of(2)
    groups.join(cluster, member("a"), on("r0", "t0"))
    groups.join(cluster, member("b"), on("r1", "t1"))
    copied = groups.copy(cluster)
    groups.validate(copied)
    groups.leave(copied, "t.b")
    groups.validate(copied)
    groups.validate(cluster)
    assert cluster.placed == {"t.a": "g1", "t.b": "g2"}


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_cluster_stays_consistent_whatever_comes_and_goes(data: st.DataObject) -> None:
    cluster = cluster_of(3)
    serial = 0
    for _ in range(data.draw(st.integers(1, 25))):
        step = data.draw(st.sampled_from(["join", "join", "leave", "repin", "down", "up"]))
        placed = sorted(cluster.placed)
        name = NodeId(data.draw(st.sampled_from(sorted(cluster.hosts))))
        if step == "join":
            group = data.draw(st.sampled_from(["", *cluster.groups]))
            chosen = _some_nodes(data, cluster, group)
            if chosen is not None:
                serial += 1
                counts = {pool: len(names) for pool, names in chosen.items()}
                cycle = data.draw(st.sampled_from([None, CYCLE]))
                job = member(str(serial), cycle, **counts)
                groups.join(cluster, job, Placed(group, chosen))
        elif step == "leave" and placed:
            groups.leave(cluster, data.draw(st.sampled_from(placed)))
        elif step == "repin" and placed:
            job_name = data.draw(st.sampled_from(placed))
            chosen = _some_nodes(data, cluster, cluster.placed[job_name])
            if chosen is not None:
                needs = {pool: Need(len(names)) for pool, names in chosen.items()}
                groups.repin(cluster, job_name, needs, chosen)
        elif step == "down":
            groups.host_down(cluster, name)
        elif step == "up":
            groups.host_up(cluster, host(name, cluster.hosts[name].pool))
        groups.validate(cluster)
    for job_name in sorted(cluster.placed):
        groups.leave(cluster, job_name)
    for name in sorted(cluster.hosts):
        groups.host_up(cluster, host(name, cluster.hosts[name].pool))
    groups.validate(cluster)
    assert cluster.free == cluster_of(3).free, "nothing is lost"
    assert not cluster.groups


def _some_nodes(
    data: st.DataObject, cluster: Cluster, group: str
) -> dict[str, list[NodeId]] | None:
    """One or two of each pool, of the group and of the free ones."""
    chosen = {}
    for pool in POOLS:
        own = cluster.groups[group].nodes.get(pool, []) if group else []
        names = [*own, *cluster.free[pool]]
        if not names:
            return None
        picks = st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True)
        chosen[pool] = data.draw(picks)
    return chosen


@given(order=st.permutations(["fsdp", "megatron", "noop", "sampler", "vllm", "noop"]))
def test_what_a_job_asks_of_backends_does_not_depend_on_the_order(order: list[str]) -> None:
    """Also not on that of a set, which is another one in a process that restored a snapshot."""
    specs = [DeploymentSpec(f"d{i}", "train", name, ModelSpec({})) for i, name in enumerate(order)]
    (need,) = groups.needs_of(specs).values()
    assert [demand.backend for demand in need.demands] == sorted(set(order))
