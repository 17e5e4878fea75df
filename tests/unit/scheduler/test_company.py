"""Placement that counts on rollouts side by side: when they are, and what is promised then."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from phaseloom.common.contract.events import JobSubmitted, PhaseTrace, SchedulerConfigured
from phaseloom.common.contract.ids import JobKey
from phaseloom.common.contract.specs import (
    Capabilities,
    Cycle,
    JobSpec,
    KindSlowdown,
    Residency,
    Segment,
    SlowdownTable,
)
from phaseloom.common.process.slowdowns import SUB_STAGES, read
from phaseloom.scheduler.core.planning import groups
from phaseloom.scheduler.core.planning.weave.company import Guest, slowdown_beside
from phaseloom.scheduler.core.policies.registry import PLACEMENT
from phaseloom.scheduler.core.policies.sharing_view import rollouts_beside
from phaseloom.scheduler.core.state.cluster import Demand, Host, Need, Placed
from phaseloom.simulator.tables import PAPER_TABLE, TWO_CORES_TABLE
from tests.support.world import CONFIG, STATE_BYTES, TENANT, World, node_up, spec
from tests.unit.scheduler.weave_cluster import empty, job, keep, pin

POLICY = PLACEMENT["coexec_repack"]


def table_of(alone: float, beside: float = 1.0, **spread: float) -> SlowdownTable:
    """Rollouts on any share are slower by one number, and beside one another by one more."""
    greatest = {share: (alone, alone * spread.get("greatest", 1.0)) for share in (0.25, 0.5)}
    shares = {0.25: alone, 0.5: alone, 1.0: 1.0}
    kinds = {kind: KindSlowdown(shares, spread=greatest) for kind in SUB_STAGES}
    factors = {kind: dict.fromkeys(SUB_STAGES, beside) for kind in SUB_STAGES}
    return SlowdownTable("test", kinds, (0.25, 0.5), factors)


# --- what is sure --------------------------------------------------------------------------------


def test_slowdowns_are_those_of_the_worst_sub_stage_at_their_greatest() -> None:
    assert rollouts_beside(table_of(1.1, 1.2), 2) == pytest.approx((1.32,))
    assert rollouts_beside(table_of(1.1, 1.2, greatest=1.25), 2) == pytest.approx((1.65,))
    slow = table_of(1.1)
    kinds = {**slow.kinds, "prefill": KindSlowdown({0.5: 1.7, 1.0: 1.0})}
    assert rollouts_beside(replace(slow, kinds=kinds), 2) == pytest.approx((1.7,))


def test_only_as_many_are_counted_on_as_surely_gain() -> None:
    """Each one more adds a twentieth of what one does alone, at least."""
    assert rollouts_beside(table_of(1.0), 4) == (1.0, 1.0, 1.0)
    assert rollouts_beside(table_of(1.2, 1.1), 4) == pytest.approx((1.32,))
    assert rollouts_beside(table_of(2.0), 4) == ()
    assert rollouts_beside(table_of(1.0), 1) == ()


def test_the_tables_that_were_measured() -> None:
    """Two cores carry two rollouts; by the paper's numbers whole rollouts hinder one another."""
    (slowdown,) = rollouts_beside(read(TWO_CORES_TABLE), 2)
    assert 1.1 < slowdown < 1.3
    assert rollouts_beside(read(PAPER_TABLE), 4) == ()


def test_a_table_that_lacks_a_sub_stage_promises_nothing() -> None:
    kinds = {"decode_small": KindSlowdown({0.5: 1.0, 1.0: 1.0})}
    assert rollouts_beside(SlowdownTable("test", kinds), 2) == ()


# --- who can be beside whom ----------------------------------------------------------------------

NEED = Need(1, 1, 300, (Demand("sampler"),))
SAMPLER = Capabilities(("forward", "generate"), divides=True, most_units=1)


def host(**changes: Any) -> Host:
    fields = {
        "rollout_slowdowns": (1.2, 1.3),
        "device_bytes": 700,
        "backends": {"sampler": SAMPLER},
    }
    return Host("r0", "rollout", 1, 1000, 1.0, **{**fields, **changes})  # type: ignore[arg-type]


def guest(**changes: Any) -> Guest:
    return Guest(NEED, 1.5, is_exclusive=False, takes_turns=False)._replace(**changes)


def test_alone_nothing_is_slower_and_of_too_many_nothing_is_known() -> None:
    small = guest(need=replace(NEED, host_bytes=100))
    found = [slowdown_beside(host(), [small] * count) for count in (1, 2, 3, 4)]
    assert found == [1.0, 1.2, 1.3, None]


@pytest.mark.parametrize(
    "other",
    [
        guest(slo=1.1),
        guest(is_exclusive=True),
        guest(takes_turns=True),
        guest(need=replace(NEED, host_bytes=401)),
        guest(need=replace(NEED, host_bytes=0)),
        guest(need=replace(NEED, num_nodes=2)),
        guest(need=replace(NEED, num_devices=2)),
        guest(need=replace(NEED, demands=(Demand("sampler", trains=True),))),
        guest(need=replace(NEED, demands=(Demand("sampler", has_adapter=True),))),
    ],
    ids=[
        "its SLO is tighter",
        "it asks to be alone",
        "placement has chosen so",
        "no room on the device",
        "its size is not known",
        "on two nodes",
        "on two devices",
        "it trains there",
        "it has an adapter",
    ],
)
def test_rollouts_take_turns_where(other: Guest) -> None:
    assert slowdown_beside(host(), [guest(), guest()]) == 1.2
    assert slowdown_beside(host(), [guest(), other]) is None


@pytest.mark.parametrize(
    "backend",
    [
        replace(SAMPLER, divides=False),
        replace(SAMPLER, most_units=0),
    ],
    ids=["its bits depend on the share", "a forward pass of it fills the device"],
)
def test_rollouts_take_turns_on_a_backend_that(backend: Capabilities) -> None:
    assert slowdown_beside(host(backends={"sampler": backend}), [guest(), guest()]) is None
    assert slowdown_beside(host(backends={}), [guest(), guest()]) == 1.2


# --- what is promised ----------------------------------------------------------------------------


def decided(beside: tuple[float, ...], slo: float, **second: Any) -> Placed:
    """The place of a second job like the first one: most of their iterations are rollouts."""
    cluster = empty(beside=beside)
    first = job("a", 300, 75, slo, iterations=100, mr=300)
    pin(cluster, "", first, ["r000"], ["t000"])
    other = job("b", 300, 75, slo, iterations=100, **{"mr": 300, **second})
    return keep(cluster, other, POLICY.place(cluster, other))


def test_a_second_job_shares_the_rollout_node_where_in_turns_it_takes_one_of_its_own() -> None:
    alone = decided((), 1.5)
    assert alone.nodes["rollout"] != ["r000"]
    assert "beside" not in alone.reason
    shared = decided((1.2,), 1.5)
    assert shared.nodes == {"rollout": ["r000"], "train": ["t000"]}
    assert shared.reason == (
        "shares with 1 other job; all stay within their SLO budget; its rollouts run next to "
        "those of 1 other job and take up to 1.20 times as long as alone"
    )


def test_company_that_breaks_the_slo_is_not_taken() -> None:
    """300 s of rollout take 360 s, and 75 s of training may wait for as long: 510 of 375 s."""
    assert decided((1.2,), 1.4).nodes["rollout"] == ["r000"]
    assert decided((1.2,), 1.15).nodes["rollout"] != ["r000"]
    assert decided((1.45,), 1.4).nodes["rollout"] != ["r000"]
    assert decided((1.2,), 1.5, mr=401).nodes["rollout"] != ["r000"]


# --- in the core ---------------------------------------------------------------------------------

SHARING = replace(
    CONFIG,
    placement="coexec_repack",
    ordering="fcfs",
    multiplexing="greedy",
    slowdowns=table_of(1.1),
    quantum_s=5.0,
    idle_grace_s=0.0,
    speculative_switch_in=False,
)


def mesh(**changes: Any) -> World:
    """One node of two units for rollouts, and one for training."""
    world = World(replace(SHARING, **changes), duration_s=1.0)
    for name, pool in world.node_names.items():
        up = node_up(
            name,
            pool,
            units=2,
            memory_bytes=10 * STATE_BYTES,
            residency=Residency.SHARED,
            revision=2,
        )
        world.revisions[name] = 2
        world.later(0, up)
    return world


def submit(world: World, name: str, *, slo: float = 1.5, exclusive: bool = False) -> None:
    specs = [
        replace(spec("policy", "train", trainable=True), host_bytes=STATE_BYTES),
        replace(spec("sampler", "rollout"), host_bytes=STATE_BYTES),
    ]
    cycle = Cycle(10.0, [Segment("rollout", 0.0, 8.0), Segment("train", 8.0, 2.0)])
    described = JobSpec(slo, specs, cycle, duration_s=1000.0, exclusive=exclusive)
    world.later(0, JobSubmitted(JobKey(TENANT, name), described, f"submit-{name}"))
    world.run()


def is_placed(world: World, name: str) -> bool:
    return f"{TENANT}.{name}" in world.core.state.cluster.placed


def test_two_jobs_share_a_device_in_space_where_in_turns_the_second_waits() -> None:
    world = mesh(multiplexing="off")
    for name in "ab":
        submit(world, name)
    assert not is_placed(world, "b"), "two of 8 s take turns in no 15 s beside 2 s each"
    world = mesh()
    for name in "ab":
        submit(world, name)
    assert is_placed(world, "b")
    world.queue("a", "sampler", 1, "generate")
    world.queue("b", "sampler", 1, "generate")
    world.run()
    (_, ends, _), (begins, _, _) = world.runs
    assert begins < ends, "they run side by side"


@pytest.mark.parametrize(
    "changes",
    [
        {"slowdowns": None},
        {"slowdowns": table_of(2.0)},
        {"multiplexing": "fair"},
        {"ordering": "round_robin"},
    ],
    ids=["no table", "no gain", "a policy that may let it wait", "nobody overtakes"],
)
def test_placement_counts_on_nothing_with(changes: dict[str, Any]) -> None:
    world = mesh(**changes)
    for name in "ab":
        submit(world, name)
    assert not is_placed(world, "b")


def test_a_job_that_asks_to_be_alone_is_counted_beside_nobody() -> None:
    world = mesh()
    submit(world, "a", exclusive=True)
    submit(world, "b")
    assert not is_placed(world, "b")


def test_a_table_that_comes_later_makes_room() -> None:
    """The configuration is an entry of the log: a change of it reaches the nodes that are there."""
    world = mesh(slowdowns=None)
    for name in "ab":
        submit(world, name)
    world.feed(SchedulerConfigured(SHARING))
    world.run()
    assert is_placed(world, "b")
    world.check_replay()


@pytest.mark.parametrize(("slo", "is_beside"), [(1.9, False), (0.0, True)])
def test_training_takes_turns_where_placement_has_promised_by_that(
    slo: float, *, is_beside: bool
) -> None:
    """By the table it would gain beside other training; without an SLO nothing was promised."""
    world = mesh()
    for name in "ab":
        submit(world, name, slo=slo)
    assert is_placed(world, "b")
    world.queue("a", "policy", 1, "forward_backward")
    world.queue("b", "policy", 1, "forward_backward")
    world.run()
    (_, ends, _), (begins, _, _) = world.runs
    assert (begins < ends) == is_beside


# --- what company costs is no drift --------------------------------------------------------------


@pytest.mark.parametrize(("period_s", "is_drift"), [(10.9, False), (11.5, True), (8.0, True)])
def test_a_longer_cycle_is_drift_only_beyond_what_company_explains(
    period_s: float, *, is_drift: bool
) -> None:
    """Beside one another rollouts of these two may take 1.1 times as long."""
    world = mesh()
    for name in "ab":
        submit(world, name)
    segments = [Segment("rollout", 0.0, 0.8 * period_s), Segment("train", 0.8 * period_s, 2.0)]
    drift = period_s / 10.0 - 1.0
    key = JobKey(TENANT, "a")
    world.feed(PhaseTrace(key, period_s, segments, [], worst_period_s=period_s, drift=drift))
    member = groups.group_of(world.core.state.cluster, str(key)).members[str(key)]
    assert member.cycle is not None
    assert (member.cycle.period_s != 10.0) == is_drift


def test_an_iteration_that_company_has_slowed_down_took_no_longer_alone() -> None:
    member = job("a", 80, 20, 1.5, iterations=100)
    groups.iterated(member, 115.0, 0.0, 0.0, slowdown=1.2)
    assert member.alone_s == pytest.approx(100.0)
    groups.iterated(member, 115.0 + 90.0, 0.0, 0.0, slowdown=1.2)
    assert member.alone_s == pytest.approx(190.0)
    groups.iterated(member, 205.0 + 180.0, 0.0, 0.0, slowdown=1.2)
    assert member.alone_s == pytest.approx(340.0), "company explains a fifth of it"
