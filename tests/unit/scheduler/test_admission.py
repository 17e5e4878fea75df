"""What is decided before and beside a placement policy."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec import structs

from phaseloom.common.contract.errors import Code
from phaseloom.common.contract.events import PhaseTrace
from phaseloom.common.contract.ids import JobKey, NodeId
from phaseloom.common.contract.specs import Capabilities, Cycle, Segment
from phaseloom.scheduler.core.planning import admission, groups
from phaseloom.scheduler.core.policies.registry import PLACEMENT
from phaseloom.scheduler.core.state.cluster import (
    Cluster,
    Decision,
    Demand,
    Host,
    Member,
    Need,
    Placed,
    Placement,
    Refused,
    Waits,
)
from tests.unit.scheduler.test_groups import CYCLE, cluster_of, host, member, on


def _first_group(cluster: Cluster, job: Member) -> Decision:
    """The first group that is open, whatever it has; never free nodes."""
    for group in cluster.groups.values():
        if not group.is_closed:
            return Placed(group.name, {pool: names[:1] for pool, names in group.nodes.items()})
    return Waits("every group is closed")


FIRST_GROUP = Placement(_first_group)
SHARE_NO_SUCH_GROUP = {"isolated", "solo", "colocated", "coexec_repack"}
"""Policies whose jobs share nothing, are of one pool, or all train on the same nodes."""


# --- decide --------------------------------------------------------------------------------------


def test_job_without_a_cycle_gets_nodes_of_its_own_where_enough_are_free() -> None:
    cluster = cluster_of(2)
    groups.join(cluster, member("a"), on("r0", "t0"))
    decision = admission.decide(cluster, member("b", None), FIRST_GROUP)
    assert isinstance(decision, Placed)
    assert (decision.group, decision.nodes) == ("", {"rollout": ["r1"], "train": ["t1"]})
    shares = admission.decide(cluster, member("b", None, rollout=2), FIRST_GROUP)
    assert isinstance(shares, Placed)
    assert shares.group == "g1", "one pool has not enough: the policy decides"
    assert admission.decide(cluster, member("c"), FIRST_GROUP) == shares, "its cycle is known"


def test_nodes_of_its_own_are_the_smallest_and_cheapest_that_fit() -> None:
    cluster = Cluster()
    for name, num_devices, price in (("x0", 8, 1.0), ("x1", 2, 9.0), ("x2", 2, 3.0), ("x3", 1, 0)):
        groups.host_up(cluster, Host(NodeId(name), "train", num_devices, 10, price))
    job = Member("t.a", 0.0, {"train": Need(num_nodes=2, num_devices=2)})
    placed = admission.nodes_of_its_own(cluster, job)
    assert placed is not None
    assert placed.nodes == {"train": ["x2", "x1"]}


def test_closed_group_is_opened_only_for_who_has_no_other_place() -> None:
    cluster = cluster_of(1)
    groups.join(cluster, member("a", None), on("r0", "t0"))
    decision = admission.decide(cluster, member("b", None), FIRST_GROUP)
    assert isinstance(decision, Placed)
    assert decision.group == "g1"
    assert cluster.groups["g1"].is_closed, "nobody has joined it yet"
    groups.join(cluster, member("b", None), decision)
    assert not cluster.groups["g1"].is_closed


@pytest.mark.parametrize("cycle", [CYCLE, None], ids=["known", "unknown"])
@pytest.mark.parametrize("policy", sorted(PLACEMENT))
def test_job_of_two_pools_makes_two_groups_of_one_pool_each_one(
    policy: str, cycle: Cycle | None
) -> None:
    cluster = Cluster()
    for name, pool in (("r0", "rollout"), ("t0", "train"), ("t1", "train")):
        groups.host_up(cluster, host(name, pool))
        light = Cycle(100.0, [Segment(pool, 0, 5)]) if cycle is not None else None
        groups.join(cluster, Member(f"t.on-{name}", 0.0, {pool: Need()}, light), on(name))
    both = member("both", cycle)
    decision = admission.decide(cluster, both, PLACEMENT[policy])
    if policy in SHARE_NO_SUCH_GROUP and isinstance(decision, Waits):
        return
    assert isinstance(decision, Placed), decision
    assert (decision.group, decision.merged) == ("g1", "g2")
    groups.join(cluster, both, decision)
    groups.validate(cluster)
    assert list(cluster.groups["g1"].members) == ["t.on-r0", "t.on-t0", "t.both"]
    assert cluster.groups.keys() == {"g1", "g3"}
    assert groups.leave(cluster, "t.both") == []
    assert groups.leave(cluster, "t.on-r0") == ["r0"]
    groups.validate(cluster)
    assert list(cluster.groups["g1"].members) == ["t.on-t0"]


def test_policy_that_shares_nothing_lets_wait_though_closed_groups_were_opened() -> None:
    cluster = cluster_of(1)
    groups.join(cluster, member("a", None), on("r0", "t0"))
    never = Placement(lambda cluster, job: Waits("no"))
    assert admission.decide(cluster, member("b"), never) == Waits("no")
    assert cluster.groups["g1"].is_closed


@pytest.mark.parametrize(
    ("need", "says"),
    [
        (Need(num_devices=4), ("needs 4 devices", "no node has more than 2")),
        (Need(host_bytes=500), ("needs 500 bytes", "more than 100")),
        (Need(num_devices=2, host_bytes=50), ("needs 50 bytes", "2 devices has more than 10")),
    ],
)
def test_what_no_node_could_ever_hold_is_refused_with_the_numbers(
    need: Need, says: tuple[str, str]
) -> None:
    cluster = Cluster()
    groups.host_up(cluster, Host(NodeId("x0"), "train", 1, 100, 1.0))
    groups.host_up(cluster, Host(NodeId("x1"), "train", 2, 10, 1.0))
    decision = admission.decide(cluster, Member("t.a", 0.0, {"train": need}), FIRST_GROUP)
    assert isinstance(decision, Refused)
    assert decision.error.code is Code.RESOURCE_EXHAUSTED
    assert all(part in decision.error.message for part in says), decision.error.message


def test_backend_that_no_node_of_the_pool_has_is_refused_with_those_that_there_are() -> None:
    cluster = Cluster()
    for name, backends in (("x0", ["fsdp", "noop"]), ("x1", ["noop", "sampler"])):
        able = {backend: Capabilities(("forward",)) for backend in backends}
        known = Host(NodeId(name), "train", 1, 100, 1.0, backends=able)
        groups.host_up(cluster, known)

    def decide(*names: str) -> Decision:
        need = Need(demands=tuple(map(Demand, names)))
        return admission.decide(cluster, Member("t.a", 0.0, {"train": need}), FIRST_GROUP)

    for names in (["vllm"], ["fsdp", "sampler"]):
        decision = decide(*names)
        assert isinstance(decision, Refused)
        assert decision.error.field == "spec.deployments.backend"
        assert "whose nodes offer fsdp, noop, sampler" in decision.error.message
        assert "worker.interpreters" in decision.error.remedy
    placed = decide("sampler", "noop")
    assert isinstance(placed, Placed)
    assert placed.nodes == {"train": ["x1"]}
    groups.host_up(cluster, Host(NodeId("x2"), "train", 1, 100, 1.0))
    assert isinstance(decide("vllm"), Placed), "a node that does not tell is asked"


ABLE = Capabilities(
    ("forward", "forward_backward"),
    axes=("dp", "tp"),
    model_types=("llama", "qwen3"),
    dtypes=("float32",),
)


@pytest.mark.parametrize(
    ("demand", "field", "instead"),
    [
        (Demand("fsdp", axes=("tp", "pp"), model_type="llama"), "layout.pp", "dp, tp"),
        (Demand("fsdp", model_type="bloom"), "model.config.model_type", "llama, qwen3"),
        (Demand("fsdp", model_type="llama", dtype="float8"), "model.config.dtype", "float32"),
        (Demand("fsdp", model_type="llama", is_shared=True), "batching", "operation"),
        (Demand("sampler", trains=True), "trainable", "false"),
        (Demand("sampler", caches_prefixes=True), "prefix_cache", "false"),
    ],
)
def test_what_no_node_can_do_by_the_backend_is_refused_with_what_it_can(
    demand: Demand, field: str, instead: str
) -> None:
    cluster = Cluster()
    able = {"fsdp": ABLE, "sampler": Capabilities(("generate",), joins=True)}
    groups.host_up(cluster, Host(NodeId("x0"), "train", 1, 100, 1.0, backends=able))
    member = Member("t.a", 0.0, {"train": Need(demands=(demand,))})
    decision = admission.decide(cluster, member, FIRST_GROUP)
    assert isinstance(decision, Refused)
    assert decision.error.code is Code.FAILED_PRECONDITION
    assert decision.error.field == f"spec.deployments.{field}"
    assert instead in decision.error.remedy


def test_job_goes_to_the_node_that_can_do_what_it_asks_for() -> None:
    cluster = Cluster()
    wide = structs.replace(ABLE, axes=("dp", "tp", "pp"))
    for name, able in (("x0", ABLE), ("x1", wide)):
        known = Host(NodeId(name), "train", 1, 100, 1.0, backends={"fsdp": able})
        groups.host_up(cluster, known)
    demand = Demand("fsdp", True, ("pp",), "qwen3", "float32")
    member = Member("t.a", 0.0, {"train": Need(demands=(demand,))})
    placed = admission.decide(cluster, member, FIRST_GROUP)
    assert isinstance(placed, Placed)
    assert placed.nodes == {"train": ["x1"]}


def test_job_waits_for_nodes_that_are_down_or_unknown() -> None:
    cluster = Cluster()
    groups.host_up(cluster, host("x0", "train"))
    groups.host_up(cluster, Host(NodeId("x1"), "train", 4, 10, 1.0))
    groups.host_down(cluster, NodeId("x1"))

    def why(need: Need, pool: str = "train") -> str:
        decision = admission.decide(cluster, Member("t.a", 0.0, {pool: need}), FIRST_GROUP)
        assert isinstance(decision, Waits)
        return decision.reason

    assert why(Need(), "tpu") == "pool 'tpu': no node of this pool has ever registered"
    large = "every node that is large enough is down or drained"
    assert why(Need(num_devices=4)) == f"pool 'train': {large}"
    groups.host_down(cluster, NodeId("x0"))
    assert why(Need()) == "pool 'train': every node is down or drained"


def test_pools_that_a_waiting_job_keeps_from_later_ones() -> None:
    cluster = cluster_of(1)
    assert admission.blocked_pools(cluster, member("a")) == {"rollout", "train"}
    without_a_node = Member("t.a", 0.0, {"rollout": Need(), "tpu": Need()})
    assert admission.blocked_pools(cluster, without_a_node) == set()
    of_too_few = Member("t.a", 0.0, {"rollout": Need(num_nodes=2)})
    assert admission.blocked_pools(cluster, of_too_few) == set()
    groups.host_down(cluster, NodeId("t0"))
    assert admission.blocked_pools(cluster, member("a")) == set()


def test_nodes_among_respect_host_memory_and_prefer_the_least_used() -> None:
    cluster = cluster_of(3)
    first = Member("t.a", 0.0, {"train": Need(2, 1, 600)}, CYCLE)
    groups.join(cluster, first, Placed("", {"train": [NodeId("t0"), NodeId("t1")]}))
    small = Member("t.b", 0.0, {"train": Need(1, 1, 300)}, CYCLE)
    nodes = admission.nodes_among(cluster, cluster.groups["g1"], small)
    assert nodes == {"train": ["t0"]}
    groups.join(cluster, small, Placed("g1", nodes))
    other = Member("t.c", 0.0, {"train": Need(1, 1, 300)}, CYCLE)
    assert admission.nodes_among(cluster, cluster.groups["g1"], other) == {"train": ["t1"]}
    full = Member("t.d", 0.0, {"train": Need(2, 1, 400)}, CYCLE)
    nodes = admission.nodes_among(cluster, cluster.groups["g1"], full)
    assert nodes == {"train": ["t1", "t2"]}, "an exact fit, and a free one"
    too_much = Member("t.e", 0.0, {"train": Need(2, 1, 900)}, CYCLE)
    assert admission.nodes_among(cluster, cluster.groups["g1"], too_much) is None


# --- cycles as measured --------------------------------------------------------------------------


def trace(period_s: float, segments: Sequence[Segment], worst_s: float = 0.0) -> PhaseTrace:
    return PhaseTrace(JobKey("t", "a"), period_s, list(segments), [], worst_period_s=worst_s)


def test_measured_cycle_spreads_its_worst_case_over_the_segments() -> None:
    made = admission.cycle_of(trace(10.0, [Segment("rollout", 0, 6), Segment("train", 6, 2)], 15.0))
    assert made == Cycle(10.0, [Segment("rollout", 0, 6, 9.0), Segment("train", 6, 2, 3.0)])
    assert made.worst_period_s == 14.0
    assert admission.cycle_of(trace(0.0, [])) is None


def test_segment_that_runs_into_the_next_cycle_is_cut_there() -> None:
    made = admission.cycle_of(trace(10.0, [Segment("train", 0, 4), Segment("rollout", 7, 5)]))
    assert made is not None
    assert [(s.pool, s.offset_s, s.duration_s) for s in made.segments] == [
        ("rollout", 0.0, 2.0),
        ("train", 0.0, 4.0),
        ("rollout", 7.0, 3.0),
    ]


# --- the duty-ratio bound ------------------------------------------------------------------------

HALVES = Cycle(100.0, [Segment("rollout", 0, 50), Segment("train", 50, 50)])


def pinned(job: str, cycle: Cycle | None, rollout: str = "r0", train: str = "t0") -> Member:
    made = member(job, cycle)
    made.nodes = {"rollout": [NodeId(rollout)], "train": [NodeId(train)]}
    return made


def test_members_that_share_no_node_do_not_wait() -> None:
    apart = [pinned("a", HALVES), pinned("b", HALVES, "r1", "t1")]
    assert admission.waiting_share(apart) == {"t.a": 0.0, "t.b": 0.0}


def test_two_cycles_that_interlock_settle_without_waiting() -> None:
    """Rollout of one beside training of the other: they wait once, at the start."""
    shares = admission.waiting_share([pinned("a", HALVES), pinned("b", HALVES)])
    assert shares == {"t.a": 0.0, "t.b": 0.0}


def test_third_cycle_makes_everybody_wait_a_third_of_the_time() -> None:
    three = [pinned(name, HALVES) for name in "abc"]
    shares = admission.waiting_share(three)
    assert shares == pytest.approx(dict.fromkeys(["t.a", "t.b", "t.c"], 1 / 3))


def test_switches_count_as_waiting() -> None:
    """Each half is followed by a switch: 120 s for what takes 100 s alone."""
    shares = admission.waiting_share([pinned("a", HALVES), pinned("b", HALVES)], switch_s=10.0)
    assert shares == pytest.approx({"t.a": 1 / 6, "t.b": 1 / 6})


def test_overlapping_segments_of_one_job_do_not_wait_for_each_other() -> None:
    """One-step-asynchronous: both pools at once."""
    both = Cycle(100.0, [Segment("rollout", 0, 100), Segment("train", 0, 80)])
    assert admission.waiting_share([pinned("a", both), pinned("b", HALVES, "r1", "t1")])["t.a"] == 0
    shares = admission.waiting_share([pinned("a", both), pinned("b", both, "r1")])
    assert shares == pytest.approx({"t.a": 0.375, "t.b": 0.375}), "160 s of training in each turn"


def test_member_of_which_nothing_is_known_is_left_out() -> None:
    assert admission.waiting_share([pinned("a", None), pinned("b", HALVES)]) == {"t.b": 0.0}


def test_periods_of_very_different_length_are_predicted_all_the_same() -> None:
    short = Cycle(1.0, [Segment("rollout", 0, 0.5), Segment("train", 0.5, 0.5)])
    long = Cycle(10_000.0, [Segment("rollout", 0, 5_000), Segment("train", 5_000, 5_000)])
    shares = admission.waiting_share([pinned("a", short), pinned("b", long)])
    assert shares["t.a"] > 0.9
    assert shares["t.b"] < 0.1
