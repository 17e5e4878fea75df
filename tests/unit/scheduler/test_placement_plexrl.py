"""PlexRL's placement policies: who shares with whom, who waits and why, and who may overtake."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phaseloom.common.contract.ids import NodeId
from phaseloom.common.contract.specs import Cycle, Segment
from phaseloom.scheduler.core.planning import groups
from phaseloom.scheduler.core.planning.sharing.backfill import earliest_start
from phaseloom.scheduler.core.planning.timeline import HORIZON_SLOTS, RING, slots_in
from phaseloom.scheduler.core.policies.registry import PLACEMENT
from phaseloom.scheduler.core.state.cluster import (
    Cluster,
    Decision,
    Host,
    Limits,
    Member,
    Need,
    Placed,
    Waits,
)

SHARING = ["pack", "spread", "spread_backfill", "backfill_greedy"]
ALL = ["isolated", *SHARING]
GB = 2**30


def cluster_of(num_train: int = 4, num_rollout: int = 0, **limits: Any) -> Cluster:
    cluster = Cluster(limits=Limits(**{"max_group_jobs": 2, **limits}))
    for pool, count in (("train", num_train), ("rollout", num_rollout)):
        for i in range(count):
            groups.host_up(cluster, Host(f"{pool}{i}", pool, 8, 1000 * GB, 1.0))  # type: ignore[arg-type]
    return cluster


def cycle(period_s: float = 300.0, train_s: float = 60.0) -> Cycle:
    return Cycle(period_s, [Segment("train", 0.0, train_s)])


def job(name: str, num_nodes: int = 1, ends_s: float = 0.0, **changes: Any) -> Member:
    given_: dict[str, Any] = {"slo": 0.0, "cycle": cycle(), "ends_s": ends_s, **changes}
    gb = given_.pop("gb", 100)
    given_.setdefault("needs", {"train": Need(num_nodes, 8, gb * GB)})
    return Member(job=name, **given_)


def place(cluster: Cluster, policy: str, member: Member) -> Decision:
    """And keep it, or let it wait."""
    decision = PLACEMENT[policy].place(cluster, member)
    if isinstance(decision, Placed):
        groups.join(cluster, member, decision)
    elif member not in cluster.waiting:
        cluster.waiting.append(member)
    groups.validate(cluster)
    return decision


def placed(cluster: Cluster, policy: str, member: Member) -> Placed:
    decision = place(cluster, policy, member)
    assert isinstance(decision, Placed), decision
    return decision


def waits(cluster: Cluster, policy: str, member: Member) -> str:
    decision = place(cluster, policy, member)
    assert isinstance(decision, Waits), decision
    return decision.reason


@pytest.mark.parametrize("policy", ALL)
def test_first_job_gets_nodes_of_its_own(policy: str) -> None:
    cluster = cluster_of(4)
    decision = placed(cluster, policy, job("a", 3))
    assert decision.group == ""
    assert decision.nodes == {"train": ["train0", "train1", "train2"]}
    assert "3 of train" in decision.reason


def test_isolated_waits_where_sharing_would_do() -> None:
    cluster = cluster_of(2)
    placed(cluster, "isolated", job("a", 1))
    why = waits(cluster, "isolated", job("b", 2))
    assert "2 of pool train (1 free)" in why


def test_pack_fills_groups_and_spread_fills_nodes() -> None:
    packed, spread = cluster_of(4), cluster_of(4)
    for name in ("a", "b", "c", "d"):
        placed(packed, "pack", job(name))
        placed(spread, "spread", job(name))
    assert [list(group.members) for group in packed.groups.values()] == [["a", "b"], ["c", "d"]]
    assert [list(group.members) for group in spread.groups.values()] == [["a"], ["b"], ["c"], ["d"]]


def test_spread_takes_the_lowest_duty_of_groups_with_as_few_jobs() -> None:
    cluster = cluster_of(2)
    placed(cluster, "spread", job("busy", cycle=cycle(train_s=150)))
    placed(cluster, "spread", job("idle", cycle=cycle(train_s=30)))
    assert placed(cluster, "spread", job("new")).group == "g2"


@pytest.mark.parametrize("scale", [1.0, 0.01])
@pytest.mark.parametrize("policy", ["pack", "spread"])
def test_commensurate_periods_and_no_interference_are_preferred(policy: str, scale: float) -> None:
    """Of two groups in use as much, the one whose job has twice the period (PlexRL §7.1); cycles of
    a few seconds are too short for the timeline, there the periods alone tell."""
    cluster = cluster_of(2)
    for name, period_s in (("odd", 437.0 * scale), ("even", 600.0 * scale)):
        spec = cycle(period_s, 0.2 * period_s)
        groups.join(
            cluster, job(name, cycle=spec), Placed("", {"train": [cluster.free["train"][0]]})
        )
    decision = placed(cluster, policy, job("new", cycle=cycle(300.0 * scale, 60.0 * scale)))
    assert decision.group == "g2"
    assert "overlaps with other jobs 0.0% of the time" in decision.reason


def test_second_job_is_shifted_into_the_gap_of_the_first() -> None:
    cluster = cluster_of(1)
    placed(cluster, "spread", job("a"))
    decision = placed(cluster, "spread", job("b"))
    assert decision.shift_s == 60
    busy = RING.busy(cluster.groups["g1"].members.values(), "train", [NodeId("train0")])
    assert busy == slots_in([(300 * period, 120) for period in range(96)], HORIZON_SLOTS)


def test_group_that_nobody_is_shifted_clear_of_tells_how_much_they_meet() -> None:
    cluster = cluster_of(1)
    placed(cluster, "spread", job("a", cycle=cycle(289.0, 58.0)))
    decision = placed(cluster, "spread", job("b", cycle=cycle(285.0, 58.0)))
    assert decision.shift_s == 0
    assert "overlaps with other jobs 4." in decision.reason


@pytest.mark.parametrize("policy", SHARING)
def test_limits_hold_and_the_answer_names_them(policy: str) -> None:
    full = cluster_of(1)
    placed(full, policy, job("a"))
    placed(full, policy, job("b"))
    assert "1 have 2 jobs" in waits(full, policy, job("c"))
    small = cluster_of(1)
    placed(small, policy, job("a", gb=600))
    assert "1 have too few nodes or too little host memory" in waits(
        small, policy, job("b", gb=401)
    )
    busy = cluster_of(1, duty_limit=0.3)
    placed(busy, policy, job("a", cycle=cycle(train_s=250)))
    why = waits(busy, policy, job("b", cycle=cycle(train_s=250)))
    assert "would make a job wait too long" in why
    assert "limit 30%" in why


def test_memory_that_fits_exactly_is_shared() -> None:
    cluster = cluster_of(1)
    placed(cluster, "spread", job("a", gb=600))
    assert placed(cluster, "spread", job("b", gb=400)).group == "g1"


@pytest.mark.parametrize("has_slo", ["a", "b"])
def test_an_slo_bounds_the_wait_of_its_job(has_slo: str) -> None:
    """Together they ask for more than all of the node's time: each is held up, as best effort."""
    slos = {"a": 0.0, "b": 0.0, has_slo: 1.05}
    cluster = cluster_of(1)
    placed(cluster, "spread", job("a", slo=slos["a"], cycle=cycle(289.0, 170.0)))
    waits(cluster, "spread", job("b", slo=slos["b"], cycle=cycle(285.0, 170.0)))
    groups.leave(cluster, "a")
    cluster.waiting.clear()
    placed(cluster, "spread", job("a", cycle=cycle(289.0, 170.0)))
    placed(cluster, "spread", job("b", cycle=cycle(285.0, 170.0)))


def test_nodes_that_are_down_take_nobody() -> None:
    cluster = cluster_of(1)
    placed(cluster, "spread", job("a"))
    groups.host_down(cluster, cluster.hosts["train0"].node)  # type: ignore[index]
    assert "(0 free)" in waits(cluster, "spread", job("b"))


def test_pool_that_is_used_too_much_is_not_shared() -> None:
    """Training nodes are shared, rollout nodes are the job's own (PlexRL §6.2)."""
    cluster = cluster_of(1, num_rollout=2, duty_limit=0.2)
    whole = Cycle(300.0, [Segment("rollout", 0.0, 240.0), Segment("train", 240.0, 60.0)])
    needs = {"rollout": Need(1, 8), "train": Need(1, 8)}
    placed(cluster, "spread", job("a", cycle=whole, needs=needs))
    decision = placed(cluster, "spread", job("b", cycle=whole, needs=needs))
    assert decision.group == "g1"
    assert decision.nodes == {"rollout": ["rollout1"], "train": ["train0"]}


@pytest.mark.parametrize("policy", SHARING)
def test_unmeasured_job_shares_where_it_must_but_not_with_a_promise(policy: str) -> None:
    cluster = cluster_of(2)
    placed(cluster, policy, job("promised", slo=2.0))
    placed(cluster, policy, job("other", 1))
    if policy == "pack":  # it has put both on one node
        groups.leave(cluster, "other")
        groups.join(cluster, job("other"), Placed("", {"train": ["train1"]}))  # type: ignore[list-item]
    decision = placed(cluster, policy, job("cold", cycle=None))
    assert decision.group == cluster.placed["other"]


def test_pack_does_not_count_jobs_of_which_nothing_is_known() -> None:
    cluster = cluster_of(1)
    for name in ("a", "b", "c", "d"):
        for group in cluster.groups.values():
            group.is_closed = False
        placed(cluster, "pack", job(name, cycle=None, gb=0))
    assert len(cluster.groups["g1"].members) == 4
    assert "1 have 2 jobs" in waits(cluster, "pack", job("warm", gb=0))


# --- backfill ------------------------------------------------------------------------------------


def blocked(policy: str) -> Cluster:
    """Four nodes full until 100 and 200 s; a job of four nodes waits for them."""
    cluster = cluster_of(4, max_group_jobs=1)
    placed(cluster, policy, job("first", 2, ends_s=100.0))
    placed(cluster, policy, job("second", 1, ends_s=200.0))
    waits(cluster, policy, job("head", 4))
    return cluster


def test_head_starts_when_the_last_of_its_nodes_is_free_at_the_latest() -> None:
    cluster = blocked("spread_backfill")
    assert earliest_start(cluster, cluster.waiting[0]) == 200.0
    assert earliest_start(cluster, job("two", 2)) == 100.0
    assert earliest_start(cluster, job("one", 1)) == 0.0
    groups.leave(cluster, "second")
    assert earliest_start(cluster, cluster.waiting[0]) == 100.0


def test_backfill_lets_past_only_who_does_not_delay_the_head() -> None:
    cluster = blocked("spread_backfill")
    assert "1 would delay" in waits(cluster, "spread_backfill", job("long", ends_s=201.0))
    assert placed(cluster, "spread_backfill", job("short", ends_s=200.0)).group == ""
    assert cluster.waiting[0].job == "head"


def test_greedy_backfill_lets_past_who_fits() -> None:
    cluster = blocked("backfill_greedy")
    placed(cluster, "backfill_greedy", job("long", ends_s=201.0))
    assert earliest_start(cluster, cluster.waiting[0]) == 201.0


def test_backfill_into_a_group_counts_the_place_that_the_head_would_take() -> None:
    """Two jobs a node: the head could join once one of them ends, unless its place is taken."""
    cluster = cluster_of(2)
    for name, ends_s in (("a", 100.0), ("b", 300.0)):
        groups.join(
            cluster,
            job(name, 2, ends_s=ends_s),
            Placed(
                cluster.placed.get("a", ""),
                {"train": ["train0", "train1"]},  # type: ignore[list-item]
            ),
        )
    waits(cluster, "spread_backfill", job("head", 2))
    assert earliest_start(cluster, cluster.waiting[0]) == 100.0
    groups.leave(cluster, "a")
    assert "1 would delay" in waits(cluster, "spread_backfill", job("late", 1, ends_s=101.0))
    assert placed(cluster, "spread_backfill", cluster.waiting[0]).group == "g1"


def test_only_backfill_overtakes() -> None:
    overtaking = {name for name in ALL if PLACEMENT[name].may_overtake}
    assert overtaking == {"spread_backfill", "backfill_greedy"}


# --- determinism ---------------------------------------------------------------------------------

STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.integers(1, 3),
            st.sampled_from([200.0, 285.0, 289.0, 400.0, 3.0]),
            st.floats(0.05, 0.6),
            st.floats(10.0, 5000.0),
        ),
        st.integers(0, 9),
    ),
    min_size=4,
    max_size=14,
)


@settings(max_examples=15, deadline=None)
@given(policy=st.sampled_from(SHARING), steps=STEPS)
def test_restored_cluster_decides_as_the_one_that_went_on(policy: str, steps: list[Any]) -> None:
    """A cluster that was restored from a snapshot, in the middle of things, decides the same."""
    cluster = cluster_of(5)
    for i, step in enumerate(steps):
        cluster.now_s += 37.0
        if isinstance(step, int):
            jobs = [*cluster.placed, *(m.job for m in cluster.waiting)]
            if jobs:
                groups.leave(cluster, jobs[step % len(jobs)])
            continue
        num_nodes, period_s, duty, length_s = step
        member = job(
            f"j{i}",
            num_nodes,
            ends_s=cluster.now_s + length_s,
            cycle=cycle(period_s, duty * period_s),
            gb=10,
        )
        restored = msgspec.msgpack.decode(msgspec.msgpack.encode(cluster), type=Cluster)
        expected = PLACEMENT[policy].place(restored, msgspec.structs.replace(member))
        assert place(cluster, policy, member) == expected
