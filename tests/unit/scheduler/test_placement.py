"""Jobs get a place in a node group, wait for one, are measured, drift and move."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from phaseloom.common.contract.api import JobStatus
from phaseloom.common.contract.commands import StartWpg
from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.common.contract.events import (
    DeploymentCreated,
    DeploymentDeleted,
    JobFinished,
    JobSubmitted,
    NodeLost,
    PhaseTrace,
    PlannedMove,
    ReplanComputed,
    SchedulerConfigured,
)
from phaseloom.common.contract.ids import JobKey, NodeId
from phaseloom.common.contract.operations import Outcome
from phaseloom.common.contract.specs import Cycle, JobSpec, Segment
from phaseloom.scheduler.core.core import Core
from phaseloom.scheduler.core.placement import repack
from phaseloom.scheduler.core.planning import admission
from phaseloom.scheduler.core.planning.groups import group_of, join, leave
from phaseloom.scheduler.core.planning.weave.candidates import trial_member_of
from phaseloom.scheduler.core.planning.weave.period import is_overloaded
from phaseloom.scheduler.core.policies.registry import PLACEMENT
from phaseloom.scheduler.core.state.cluster import (
    Cluster,
    Decision,
    Member,
    Move,
    Placed,
    Placement,
    Waits,
)
from phaseloom.scheduler.core.state.outputs import Answer, ComputeReplan, PublishNotice, PutView
from phaseloom.scheduler.core.state.transitions import JobState
from tests.support.world import CONFIG, TENANT, World, node_up, spec

CYCLE = Cycle(10.0, [Segment("rollout", 0, 5.0), Segment("train", 5.0, 3.0)])


def world_of(*nodes: str, policy: str = "pack", duty_limit: float = 0.5) -> World:
    """Args: nodes: beside r0 and t0, in the pools of their first letters."""
    config = replace(CONFIG, placement=policy, duty_limit=duty_limit)
    world = World(config=config)
    world.run()
    for name in ("r0", "t0", *nodes):
        pool = {"r": "rollout", "t": "train", "x": "tpu"}[name[0]]
        up = node_up(name, pool, revision=2)
        world.feed(replace(up, price_per_hour=3.0 if pool == "train" else 1.0))
    return world


def submit(
    world: World,
    name: str,
    *pools: str,
    cycle: Cycle | None = None,
    may_wait: bool = True,
    slo: float = 0.0,
    tenant: str = TENANT,
) -> Answer:
    """Args: pools: of its deployments; a sampler and a policy where none are named."""
    specs = [spec(pool, pool, trainable=pool == "train") for pool in pools or ("rollout", "train")]
    job = JobSpec(slo, specs, cycle, may_wait=may_wait)
    made = world.feed(JobSubmitted(JobKey(tenant, name), job, f"submit-{name}"))
    (answer,) = [output for output in made if isinstance(output, Answer)]
    return answer


def status(answer: Answer) -> JobStatus:
    assert answer.status is not None
    return answer.status


def error_of(world: World, name: str) -> ErrorInfo:
    error = world.core.state.jobs[f"{TENANT}.{name}"].error
    assert error is not None
    return error


def finish(world: World, name: str) -> None:
    world.feed(JobFinished(JobKey(TENANT, name), "finish"))
    world.run()


def state(world: World, name: str) -> JobState:
    return world.core.state.jobs[f"{TENANT}.{name}"].state


def nodes(world: World, name: str) -> set[str]:
    """Where its deployments are."""
    mine = [d for d in world.core.state.deployments.values() if d.key.job == name]
    return {node for deployment in mine for node in deployment.nodes}


def placed_as(world: World, name: str, tenant: str = TENANT) -> str:
    """What the job's newest view says of its place."""
    views = [o for made in world.outputs for o in made if isinstance(o, PutView)]
    return next(v.status.placement for v in reversed(views) if v.job == JobKey(tenant, name))


def told(world: World, what: str) -> list[str]:
    every = [output for made in world.outputs for output in made]
    return [o.reason for o in every if isinstance(o, PublishNotice) and o.title == what]


def trace(name: str, cycle: Cycle = CYCLE, drift: float = 0.0) -> PhaseTrace:
    return PhaseTrace(
        JobKey(TENANT, name),
        cycle.period_s,
        cycle.segments,
        [],
        worst_period_s=cycle.period_s,
        drift=drift,
    )


# --- waiting for a place -------------------------------------------------------------------------


def test_nodes_may_come_before_the_logs_first_configuration() -> None:
    core = Core()
    core.step(1, 1.0, node_up("t0", "train"))
    core.step(2, 2.0, SchedulerConfigured(CONFIG))
    core.step(
        3, 3.0, JobSubmitted(JobKey("t", "a"), JobSpec(deployments=[spec("p", "train")]), "s")
    )
    assert core.state.cluster.placed == {"t.a": "g1"}


def test_job_that_may_not_wait_is_refused_with_the_numbers_that_others_wait_with() -> None:
    world = world_of(policy="isolated")
    submit(world, "a")
    waiting = status(submit(world, "b"))
    assert waiting.state == "submitted"
    numbers = "needs 1 of pool rollout (0 free)"
    assert waiting.error is not None
    assert numbers in waiting.error.message
    refused = status(submit(world, "c", may_wait=False))
    assert refused.state == "rejected"
    assert refused.error is not None
    assert (refused.error.code, refused.error.field) == (
        Code.RESOURCE_EXHAUSTED,
        "spec.may_wait",
    )
    assert "may_wait is false" in refused.error.message
    finish(world, "a")
    assert nodes(world, "b") == {"r0", "t0"}


def test_placement_names_the_limit_on_jobs_only_if_it_applies_to_the_job() -> None:
    """`pack` lets any number of best-effort jobs of unknown cycle share nodes."""
    world = world_of(policy="pack")
    placements = [status(submit(world, name)).placement for name in "abcdefg"]
    assert "as job 7; its nodes are in use" in placements[-1]
    assert not [text for text in placements if "at most" in text]


def test_refused_job_tells_how_much_it_lacks() -> None:
    world = world_of(policy="isolated")
    submit(world, "a")
    refused = status(submit(world, "b", may_wait=False))
    assert refused.error is not None
    assert "needs 1 of pool rollout (0 free)" in refused.error.message


def test_job_that_waits_holds_back_later_ones_of_its_pools_and_no_others() -> None:
    world = world_of("t1", policy="isolated")
    submit(world, "a")
    submit(world, "b")  # waits for a rollout node
    behind = status(submit(world, "c", "train"))
    assert behind.state == "submitted", "a train node is free, and b came first"
    assert behind.error is not None
    assert "an older job waits for pool train" in behind.error.message
    submit(world, "d", "tpu")  # of which there is no node at all
    submit(world, "e", "tpu")
    world.feed(node_up("x0", "tpu"))
    assert [state(world, name) for name in "de"] == [JobState.PROFILING, JobState.SUBMITTED]
    finish(world, "a")
    assert (nodes(world, "b"), nodes(world, "c")) == ({"r0", "t0"}, {"t1"})


def test_pool_without_any_node_holds_nobody_off_the_others() -> None:
    world = world_of(policy="isolated")
    submit(world, "a", "train", "tpu")
    assert state(world, "a") is JobState.SUBMITTED
    assert status(submit(world, "b", "train")).state == "profiling"


def test_job_that_the_nodes_that_are_up_could_never_serve_holds_nobody_back() -> None:
    world = world_of("x0", policy="isolated")
    world.feed(NodeLost(NodeId("x0"), 2, "unplugged"))
    submit(world, "a", "train", "tpu")
    two_nodes = [spec("policy", "train", trainable=True, num_ranks=2, num_nodes=2)]
    world.feed(JobSubmitted(JobKey(TENANT, "b"), JobSpec(deployments=two_nodes), "submit-b"))
    submit(world, "c", "train")
    submit(world, "d", "train")
    finish(world, "c")
    assert nodes(world, "d") == {"t0"}
    world.feed(node_up("x0", "tpu", revision=3))
    submit(world, "e", "train")
    finish(world, "d")
    assert nodes(world, "a") == {"t0", "x0"}, "now an end of a job helps, and it came first"
    assert state(world, "e") is JobState.SUBMITTED


def test_policy_that_lets_overtake_asks_for_every_job() -> None:
    world = world_of("t1", policy="backfill_greedy", duty_limit=0.3)
    for name in "ab":
        submit(world, name, cycle=Cycle(10.0, [Segment("rollout", 0, 9), Segment("train", 9, 1)]))
    assert state(world, "b") is JobState.SUBMITTED, "the rollout node is full"
    train = Cycle(10.0, [Segment("train", 0, 5.0)])
    assert status(submit(world, "c", "train", cycle=train)).state == "placed"


def test_configuration_that_makes_room_places_who_waits() -> None:
    world = world_of(policy="isolated")
    submit(world, "a")
    submit(world, "b")
    world.feed(SchedulerConfigured(replace(CONFIG, placement="pack")))
    assert nodes(world, "b") == {"r0", "t0"}


# --- cold and warm starts ------------------------------------------------------------------------


def test_two_cold_jobs_share_one_node_of_each_pool() -> None:
    world = world_of()
    assert status(submit(world, "a")).state == "profiling"
    assert status(submit(world, "b")).state == "placed"
    world.run()
    assert [state(world, name) for name in "ab"] == [JobState.ACTIVE] * 2
    assert nodes(world, "a") == nodes(world, "b") == {"r0", "t0"}


def test_any_number_of_cold_jobs_shares_where_nothing_is_free() -> None:
    world = world_of()
    for number in range(8):
        assert status(submit(world, f"j{number}")).state == ("placed" if number else "profiling")
        world.run()
        world.feed(trace(f"j{number}"))


def test_cold_jobs_fill_nodes_that_are_all_alike_evenly() -> None:
    world = world_of("r1", "t1", policy="spread")
    for name in "abcd":
        submit(world, name)
    cluster = world.core.state.cluster
    assert [len(group.members) for group in cluster.groups.values()] == [2, 2]


def test_job_with_a_known_cycle_is_not_profiled() -> None:
    world = world_of()
    assert status(submit(world, "a", cycle=CYCLE)).state == "placed"
    assert not group_of(world.core.state.cluster, "t.a").is_closed


def test_job_is_alone_until_its_cycle_is_known_and_then_moves_where_it_is_cheaper() -> None:
    world = world_of("r1", "t1")
    for name in "ab":
        submit(world, name)
    world.run()
    assert (nodes(world, "a"), nodes(world, "b")) == ({"r0", "t0"}, {"r1", "t1"})
    world.feed(replace(trace("a"), period_s=0.0))
    assert group_of(world.core.state.cluster, "t.a").is_closed, "no cycle was found yet"
    place = placed_as(world, "a")
    assert "alone (reason when placed: alone on free nodes at first, to measure its cycle)" in place
    assert place.endswith(", its cycle is being measured")
    world.feed(trace("a"))
    assert not group_of(world.core.state.cluster, "t.a").is_closed
    assert "measured" not in placed_as(world, "a")
    world.feed(trace("b"))
    world.run()
    assert nodes(world, "b") == {"r0", "t0"}
    assert told(world, "job moved")
    assert world.core.state.cluster.free == {"rollout": ["r1"], "train": ["t1"]}


def test_iterations_are_counted_against_what_the_job_expects() -> None:
    world = world_of()
    specs = [spec("policy", "train", trainable=True)]
    cycle = Cycle(10.0, [Segment("train", 0, 5.0, worst_s=7.0)])
    job = JobSpec(deployments=specs, cycle=cycle, duration_s=120.0)
    world.feed(JobSubmitted(JobKey(TENANT, "a"), job, "s"))
    world.run()
    for seq, kind in enumerate(("forward_backward", "optim_step", "optim_step"), start=1):
        world.queue("a", "policy", seq, kind)
    world.run()
    member = group_of(world.core.state.cluster, "t.a").members["t.a"]
    assert (member.iterations, member.num_iterations) == (2, 10)
    assert member.ends_s - member.began_s == 240.0, "twice as long, at the duty limit"


def test_iterations_of_several_optimizer_steps_are_counted_by_their_last() -> None:
    """A policy and a critic are both trained in each, say."""
    world = world_of()
    specs = [spec("policy", "train", trainable=True)]
    cycle = Cycle(10.0, [Segment("train", 0, 5.0)], num_optim_steps=2)
    world.feed(JobSubmitted(JobKey(TENANT, "a"), JobSpec(deployments=specs, cycle=cycle), "s"))
    world.run()
    for seq in range(1, 8):
        world.queue("a", "policy", seq, "optim_step")
    world.run()
    member = group_of(world.core.state.cluster, "t.a").members["t.a"]
    assert (member.iterations, member.num_optim_steps) == (3, 1)
    world.feed(replace(trace("a", cycle), num_optim_steps=3))
    assert (member.iterations, member.num_optim_steps) == (2, 1), "as measured, not as declared"
    assert member.cycle is not None
    assert member.cycle.period_s == 10.0


def test_steps_before_the_cycle_was_known_are_counted_again_by_it() -> None:
    world = world_of()
    world.feed(
        JobSubmitted(
            JobKey(TENANT, "a"), JobSpec(deployments=[spec("policy", "train", trainable=True)]), "s"
        )
    )
    world.run()
    for seq in range(1, 8):
        world.queue("a", "policy", seq, "optim_step")
    world.run()
    member = group_of(world.core.state.cluster, "t.a").members["t.a"]
    assert (member.iterations, member.alone_s) == (7, 0.0)
    world.feed(replace(trace("a"), num_optim_steps=2))
    assert (member.iterations, member.num_optim_steps) == (3, 1)
    assert member.alone_s == 3 * 10.0
    world.feed(replace(trace("a"), num_optim_steps=1))
    assert (member.iterations, member.alone_s) == (7, 6 * 10.0)


# --- drift ---------------------------------------------------------------------------------------

LONG = Cycle(16.0, [Segment("rollout", 0, 12.0), Segment("train", 12.0, 3.0)])
TRAINING = Cycle(10.0, [Segment("rollout", 0, 2.0), Segment("train", 2.0, 8.0)])
LONGER = Cycle(32.0, [Segment("rollout", 0, 28.0), Segment("train", 28.0, 3.0)])


def drifting(*more: str) -> World:
    """Two jobs fill a group, a third one's is alone."""
    world = world_of(*more, duty_limit=0.3)
    for name in "ab":
        submit(world, name, cycle=CYCLE)
    world.run()
    assert nodes(world, "a") == nodes(world, "b") == {"r0", "t0"}
    return world


def test_drift_within_what_the_group_can_carry_is_only_noted() -> None:
    world = drifting("r1", "t1")
    a_little = Cycle(11.0, [Segment("rollout", 0, 5.5), Segment("train", 5.5, 3.0)])
    world.feed(trace("b", a_little, drift=0.1))
    group = group_of(world.core.state.cluster, "t.b")
    known = group.members["t.b"].cycle
    assert known is not None
    assert known.period_s == 11.0
    assert set(group.members) == {"t.a", "t.b"}


def test_job_whose_drift_is_too_much_for_its_group_is_placed_anew_that_one_alone() -> None:
    world = drifting("r1", "t1")
    world.feed(trace("b", LONGER, drift=2.2))
    world.run()
    assert nodes(world, "a") == {"r0", "t0"}
    assert "r1" in nodes(world, "b")
    (reason,) = told(world, "job moved")
    assert "its cycle now takes 32 s" in reason


def test_job_that_drifts_and_has_nowhere_to_go_is_told_of_and_stays() -> None:
    world = drifting()
    world.feed(trace("b", LONGER, drift=2.2))
    world.run()
    assert nodes(world, "b") == {"r0", "t0"}
    assert len(told(world, "job drifted")) == 1
    world.feed(trace("b", LONG, drift=-0.5))
    assert len(told(world, "job drifted")) == 1, "it was too much before"


def test_cycle_longer_than_its_declared_worst_case_counts_as_drift() -> None:
    world = drifting("r1", "t1")
    world.feed(trace("b", CYCLE))
    assert group_of(world.core.state.cluster, "t.b").version == 2, "as declared: no news"
    world.feed(trace("b", LONGER))
    world.run()
    assert "r1" in nodes(world, "b")


def trained(policy: str, *durations_s: float) -> tuple[World, Member]:
    """A job of ten iterations, of 10 s by its profile, with an iteration for each duration."""
    world = world_of("r1", "t1", policy=policy)
    specs = [spec(pool, pool, trainable=pool == "train") for pool in ("rollout", "train")]
    job = JobSpec(2.0, specs, TRAINING, duration_s=100.0)
    world.feed(JobSubmitted(JobKey(TENANT, "a"), job, "s"))
    world.run()
    for seq, duration_s in enumerate(durations_s, start=1):
        world.duration_s = duration_s
        world.queue("a", "train", seq, "optim_step")
        world.run()
    return world, group_of(world.core.state.cluster, "t.a").members["t.a"]


def test_what_a_job_may_take_goes_by_its_iterations_as_they_were() -> None:
    """One that grows has not saved what its first iterations would take now, and one that shrinks
    does not do more of them."""
    world, member = trained("coexec_repack", 8.0, 8.0, 9.0, 12.0, 13.0)
    assert (member.iterations, member.num_iterations) == (5, 10)
    began_s = world.core.state.jobs["t.a"].progress.began_s
    took_s = member.iterated_s - began_s - member.lag_s
    assert member.alone_s == pytest.approx(took_s)
    longer = Cycle(20.0, [Segment("rollout", 0, 12.0), Segment("train", 12.0, 8.0)])
    world.feed(trace("a", longer, drift=1.0))
    candidate = trial_member_of(world.core.state.cluster, member)
    assert candidate.num_left == 5
    assert candidate.budget_s < 2.0 * (took_s + 5 * 20.0) < 2.0 * 10 * 20.0


def test_cycle_follows_the_last_iterations_where_budgets_are_planned_by_it() -> None:
    """A profile is a median of many, and late: until it came, one job's iterations took twice as
    long beside another's as planned, and its SLO was lost."""
    for usual_s in (20.0, 4.0):
        world, member = trained("coexec_repack", *[usual_s] * 20)
        assert member.cycle is not None
        period_s = member.cycle.period_s
        assert period_s == pytest.approx(usual_s, rel=0.3)
        assert len(member.recent_s) < 20, "those since then are compared with the new cycle"
        assert member.cycle.segments[1].duration_s == pytest.approx(0.8 * period_s)
        assert world.core.state.is_replan_due or world.core.state.replanning
    for as_planned in ([15.0, 16.0], [15.0, 16.0, 4.0, 8.0, 14.0]):
        _, member = trained("coexec_repack", *as_planned)
        assert member.cycle == TRAINING
    _, member = trained("coexec", *[20.0] * 20)
    assert member.cycle == TRAINING


def test_profile_that_changes_with_chance_is_no_drift_where_iterations_are_compared() -> None:
    longer = Cycle(13.0, [Segment("rollout", 0, 2.6), Segment("train", 2.6, 10.4)])
    for policy, follows in (("coexec", True), ("coexec_repack", False)):
        world, member = trained(policy, 10.0, 10.0)
        world.feed(trace("a", longer, drift=0.3))
        assert member.cycle is not None
        assert member.cycle.period_s == (13.0 if follows else 10.0)


def test_worst_case_that_was_seen_before_a_drift_is_not_the_one_after_it() -> None:
    """The longest of a profile's window is of the cycle as it was."""
    world, member = trained("coexec", 10.0)
    shorter = Cycle(7.0, [Segment("rollout", 0, 1.4), Segment("train", 1.4, 5.6)])
    world.feed(replace(trace("a", shorter, drift=-0.3), worst_period_s=10.0))
    assert member.cycle is not None
    assert member.cycle.period_s == 7.0
    assert member.cycle.worst_period_s == pytest.approx(7.0)


def test_drift_is_judged_by_the_bound_that_the_policy_places_by() -> None:
    """A group past the round robin's saturation is sound while everybody keeps within its budget,
    and is not once somebody cannot."""
    world = world_of("r1", "t1", policy="coexec_repack")
    for name in "ab":
        submit(world, name, cycle=TRAINING, slo=2.0)
    world.run()
    assert nodes(world, "a") == nodes(world, "b") == {"r0", "t0"}
    group = group_of(world.core.state.cluster, "t.a")
    assert is_overloaded(group), "by the rule of the round robin"
    world.feed(trace("b", Cycle(10.5, [*TRAINING.segments[:1], Segment("train", 2.0, 8.5)]), 0.05))
    assert set(group.members) == {"t.a", "t.b"}
    world.feed(trace("b", Cycle(17.0, [*TRAINING.segments[:1], Segment("train", 2.0, 15.0)]), 0.6))
    world.run()
    assert set(group.members) == {"t.a"}
    assert nodes(world, "b") == {"r1", "t1"}
    (reason,) = told(world, "job moved")
    assert "its cycle now takes 17 s" in reason


# --- nodes ---------------------------------------------------------------------------------------


def test_word_of_a_node_that_comes_again_after_its_loss_does_not_bring_it_back() -> None:
    world = world_of("t1", policy="isolated")
    world.feed(NodeLost(NodeId("t0"), 2, "unplugged"))
    world.feed(node_up("t0", "train", revision=2))
    submit(world, "a", "train")
    assert nodes(world, "a") == {"t1"}


# --- moving --------------------------------------------------------------------------------------


def test_nodes_that_a_job_leaves_are_free_once_it_has_left_them(gather: str) -> None:
    world = three_groups(gather)
    for name in "bc":
        world.queue(name, "rollout", 1, "generate")
    world.run(until_s=world.now_s)
    world.feed(repack.compute(question(world)))
    free = world.core.state.cluster.free
    assert free["rollout"] == ["r3"], "the operations of b and c have not ended"
    submit(world, "e", cycle=CYCLE)
    submit(world, "f", cycle=CYCLE)
    assert nodes(world, "e") == {"r3", "t3"}
    assert state(world, "f") is JobState.SUBMITTED
    world.run()
    assert nodes(world, "f") < {"r1", "r2", "t1", "t2"}
    assert {pool: len(names) for pool, names in free.items()} == {"rollout": 1, "train": 1}
    assert set(world.done.values()) == {Outcome.COMPLETED}


def test_cycle_of_a_job_that_moved_begins_with_its_move() -> None:
    world = drifting("r1", "t1")
    world.run(until_s=world.now_s)
    world.now_s += 500.0
    world.feed(trace("b", LONGER, drift=2.2))
    member = group_of(world.core.state.cluster, "t.b").members["t.b"]
    assert member.began_s == world.now_s + member.shift_s


def test_move_that_a_lost_node_prevented_is_made_once_the_node_is_back() -> None:
    world = drifting("r1", "t1")
    world.queue("b", "rollout", 1, "generate")
    world.run(until_s=world.now_s)
    world.feed(trace("b", LONGER, drift=2.2))
    assert "r0" in nodes(world, "b"), "it has first to end what runs"
    world.feed(NodeLost(NodeId("r1"), 2, "unplugged"))
    world.run()
    pins = group_of(world.core.state.cluster, "t.b").members["t.b"].nodes
    assert pins["rollout"] == ["r1"]
    assert "r0" in nodes(world, "b"), "a guest where it was"
    world.feed(node_up("r1", "rollout", revision=3))
    world.run()
    assert "r1" in nodes(world, "b")
    assert set(world.done.values()) == {Outcome.COMPLETED}


# --- planning for the whole cluster --------------------------------------------------------------


def _gather(cluster: Cluster) -> list[Move]:
    """Everybody to the oldest group: what a plan builds on, it names."""
    moves = []
    target = next(iter(cluster.groups.values()))
    for job in list(cluster.placed):
        if cluster.placed[job] == target.name:
            continue
        placed = Placed(target.name, dict(target.nodes), "all together")
        member = cluster.groups[cluster.placed[job]].members[job]
        leave(cluster, job)
        join(cluster, member, placed)
        moves.append(Move(job, placed))
    return moves


def _spread_out(cluster: Cluster, member: Member) -> Decision:
    return admission.nodes_of_its_own(cluster, member) or Waits("nothing is free")


@pytest.fixture
def gather(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(PLACEMENT, "gather", Placement(_spread_out, _gather))
    return "gather"


def three_groups(policy: str) -> World:
    world = world_of("r1", "t1", "r2", "t2", "r3", "t3", policy=policy)
    for name in "abcd":
        submit(world, name, cycle=CYCLE)
    world.run()
    nothing_is_worth_moving(world)
    return world


def nothing_is_worth_moving(world: World) -> None:
    """Answers to all that is asked."""
    state = world.core.state
    while state.replanning:
        world.feed(ReplanComputed(state.replanning, [], state.cluster.num_groups, {}))


def question(world: World, job: str = "d") -> ComputeReplan:
    made = world.feed(JobFinished(JobKey(TENANT, job), "finish"))
    (asked,) = [output for output in made if isinstance(output, ComputeReplan)]
    return asked


def test_departure_has_moves_computed_which_an_event_brings_back(gather: str) -> None:
    world = three_groups(gather)
    asked = question(world)
    world.run()
    assert asked.cluster.placed == {"t.a": "g1", "t.b": "g2", "t.c": "g3"}
    computed = repack.compute(asked)
    assert [str(move.job) for move in computed.moves] == ["t.b", "t.c"]
    assert asked.cluster.placed["t.b"] == "g2", "it is not changed by that"
    world.feed(computed)
    world.run()
    assert nodes(world, "a") == nodes(world, "b") == nodes(world, "c") == {"r0", "t0"}
    assert world.core.state.cluster.placed == dict.fromkeys(["t.a", "t.b", "t.c"], "g1")
    assert "all together" in world.core.state.jobs["t.b"].placement_reason
    world.feed(computed)
    world.run()
    assert len(told(world, "job moved")) == 2, "the same answer again changes nothing"


def test_moves_of_groups_that_have_changed_since_are_left_out(gather: str) -> None:
    world = three_groups(gather)
    computed = repack.compute(question(world))
    world.feed(trace("b", LONG, drift=0.6))
    world.feed(computed)
    world.run()
    assert world.core.state.cluster.placed == {"t.a": "g1", "t.b": "g2", "t.c": "g3"}, (
        "c was to join the group that b would have come to"
    )
    assert told(world, "planned moves skipped") == ["2 of 2: their groups have changed meanwhile"]


def test_who_leaves_while_moves_are_computed_has_it_done_again(gather: str) -> None:
    world = three_groups(gather)
    asked = question(world)
    made = world.feed(JobFinished(JobKey(TENANT, "c"), "finish"))
    assert not [output for output in made if isinstance(output, ComputeReplan)], "one at a time"
    made = world.feed(repack.compute(asked))
    (again,) = [output for output in made if isinstance(output, ComputeReplan)]
    assert again.cluster.placed == {"t.a": "g1", "t.b": "g1"}, "what still held was done"


def test_later_moves_may_name_groups_that_earlier_ones_make(gather: str) -> None:
    world = three_groups(gather)
    asked = question(world)
    fresh = {"rollout": [NodeId("r3")], "train": [NodeId("t3")]}
    moves = [
        PlannedMove(JobKey(TENANT, "a"), "", fresh),
        PlannedMove(JobKey(TENANT, "b"), "g5", fresh),
        PlannedMove(JobKey(TENANT, "c"), "g6", fresh),
    ]
    versions = {group.name: group.version for group in asked.cluster.groups.values()}
    world.feed(JobFinished(JobKey(TENANT, "nobody"), "finish"))
    world.feed(ReplanComputed(asked.as_of, moves, asked.cluster.num_groups, versions))
    world.run()
    assert nodes(world, "a") == nodes(world, "b") == {"r3", "t3"}
    assert nodes(world, "c") == {"r2", "t2"}, "no move makes such a group"


def test_new_groups_of_a_plan_are_called_otherwise_where_others_were_made_since(
    gather: str,
) -> None:
    world = three_groups(gather)
    asked = question(world)
    submit(world, "e", "train", cycle=Cycle(10.0, [Segment("train", 0, 5.0)]))
    taken = nodes(world, "e")
    world.run()
    assert world.core.state.cluster.placed["t.e"] == "g5"
    fresh = {"rollout": [NodeId("r3")], "train": [NodeId("t2")]}
    shared = {"rollout": [NodeId("r3")], "train": [NodeId("t2")]}
    moves = [
        PlannedMove(JobKey(TENANT, "c"), "", {**fresh, "train": [NodeId("t0")]}),
        PlannedMove(JobKey(TENANT, "b"), "g5", shared),
    ]
    versions = {group.name: group.version for group in asked.cluster.groups.values()}
    world.feed(ReplanComputed(asked.as_of, moves, asked.cluster.num_groups, versions))
    world.run()
    assert taken == {"t3"}
    assert world.core.state.cluster.placed["t.b"] == "g2", "t0 is another's: the plan is void"
    assert world.core.state.cluster.placed["t.e"] == "g5"


def test_question_that_a_dead_leader_asked_is_asked_again_from_a_snapshot(gather: str) -> None:
    world = three_groups(gather)
    asked = question(world)
    restored = Core.restore(world.core.snapshot())
    again = repack.unanswered(restored.state)
    assert again is not None
    assert (again.as_of, again.cluster.placed) == (asked.as_of, asked.cluster.placed)
    world.feed(repack.compute(asked))
    assert repack.unanswered(world.core.state) is None


def test_question_that_has_become_pointless_is_answered_all_the_same(gather: str) -> None:
    world = three_groups(gather)
    question(world)
    for name in "abc":
        finish(world, name)
    world.feed(SchedulerConfigured(replace(world.config, placement="isolated")))
    pointless = repack.unanswered(Core.restore(world.core.snapshot()).state)
    assert pointless is not None
    world.feed(repack.compute(pointless))
    world.feed(SchedulerConfigured(replace(world.config, placement=gather)))
    for name in "ef":
        submit(world, name, cycle=CYCLE)
    nothing_is_worth_moving(world)
    asked = question(world, "f")
    assert asked.cluster.placed.keys() == {"t.e"}, "moves are planned again"


@pytest.mark.parametrize("change", [{"pool": "rollout"}, {"num_devices": 0}])
def test_move_to_a_node_that_has_come_back_as_another_is_left_out(
    gather: str, change: dict[str, Any]
) -> None:
    world = three_groups(gather)
    asked = question(world)
    fresh = {"rollout": [NodeId("r3")], "train": [NodeId("t3")]}
    world.feed(NodeLost(NodeId("t3"), 2, "unplugged"))
    world.feed(node_up("t3", **{"pool": "train", "revision": 3, **change}))
    moves = [PlannedMove(JobKey(TENANT, "a"), "", fresh)]
    versions = {group.name: group.version for group in asked.cluster.groups.values()}
    world.feed(ReplanComputed(asked.as_of, moves, asked.cluster.num_groups, versions))
    world.run()
    assert nodes(world, "a") == {"r0", "t0"}
    assert told(world, "planned moves skipped")


def test_log_with_moves_gives_the_same_outputs_again(gather: str) -> None:
    world = three_groups(gather)
    world.feed(repack.compute(question(world)))
    world.run()
    world.check_replay(snapshot_every=0)


# --- deployments that come and go ----------------------------------------------------------------


def test_created_deployment_takes_a_free_node_and_a_deleted_one_gives_it_back() -> None:
    world = world_of("x0")
    submit(world, "a", cycle=CYCLE)
    world.run()
    world.feed(DeploymentCreated(JobKey(TENANT, "a"), spec("judge", "tpu"), "create"))
    assert group_of(world.core.state.cluster, "t.a").nodes["tpu"] == ["x0"]
    world.run()
    judge = spec("judge", "tpu").name
    key = world.core.state.deployments[f"t.a.{judge}"].key
    world.feed(DeploymentDeleted(key, "delete"))
    world.run()
    assert world.core.state.cluster.free["tpu"] == ["x0"]
    assert nodes(world, "a") == {"r0", "t0"}


# --- in words ------------------------------------------------------------------------------------


def test_status_says_where_with_whom_and_why_and_names_no_other_tenants_job() -> None:
    world = world_of()
    submit(world, "a")
    submit(world, "b")
    submit(world, "secret", tenant="rival")
    shown = status(submit(world, "c"))
    assert shown.placement.startswith("group g1, rollout: r0; train: t0, with a, b, 1 of other")
    assert "with b, c, 1 of other tenants" in placed_as(world, "a"), "it is told who came"
    assert "with 3 of other tenants" in placed_as(world, "secret", "rival")
    finish(world, "b")
    finish(world, "c")
    assert "with 1 of other tenants" in placed_as(world, "a")
    assert placed_as(world, "b") == ""


def test_job_that_comes_to_many_changes_no_view_but_its_own() -> None:
    world = world_of()
    for number in range(12):
        submit(world, f"j{number}")
        world.run()
    made = world.feed(JobFinished(JobKey(TENANT, "j0"), "f"))
    assert {output.job.job for output in made if isinstance(output, PutView)} == {"j0"}
    assert "with 8 or more other jobs" in placed_as(world, "j11")
    for number in range(1, 9):
        finish(world, f"j{number}")
    assert "with j10, j11" in placed_as(world, "j9")


def test_started_where_placed() -> None:
    world = world_of("r1", "t1", policy="isolated")
    for name in "ab":
        submit(world, name)
    started = [c for c in world.commands if isinstance(c, StartWpg)]
    where = {(c.deployment.job, c.deployment.deployment): c.node for c in started}
    assert where["a", "rollout"] == "r0"
    assert where["b", "train"] == "t1"
