"""Deployments over several nodes: one order, all claims at once, one life; and their moves."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phaseloom.common.contract.commands import (
    CloseActivation,
    MirrorState,
    OpenActivation,
    Permit,
    SealState,
    StartWpg,
    StopWpg,
)
from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.common.contract.events import (
    JobFinished,
    JobSubmitted,
    NodeLost,
    PlannedMove,
    ReplanComputed,
    SealCommitted,
    SealFailed,
    StateMirrored,
    WpgStarted,
)
from phaseloom.common.contract.ids import DeploymentKey, JobKey, NodeId
from phaseloom.common.contract.operations import Outcome
from phaseloom.common.contract.specs import Cycle, JobSpec, Segment
from phaseloom.scheduler.core.dispatch import explain
from phaseloom.scheduler.core.dispatch.dispatch import MAX_REFUSALS
from phaseloom.scheduler.core.policies.registry import PLACEMENT
from phaseloom.scheduler.core.state.cluster import Cluster, Decision, Member, Placed, Placement
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.step import Step
from phaseloom.scheduler.core.state.transitions import JobState, WpgState
from tests.support.world import CONFIG, STATE_BYTES, TENANT, World, deployment, spec

POOLS = ("rollout", "train")
NODES = {f"{pool[0]}{index}": pool for pool in POOLS for index in range(5)}
CYCLE = Cycle(10.0, [Segment("rollout", 0.0, 5.0), Segment("train", 5.0, 5.0)])
SAMPLER, POLICY = deployment("a01", "sampler"), deployment("a01", "policy")


def on(digits: str) -> dict[str, list[NodeId]]:
    """Nodes of each pool: those of these numbers."""
    return {pool: [NodeId(f"{pool[0]}{digit}") for digit in digits] for pool in POOLS}


def by_name(cluster: Cluster, member: Member) -> Decision:
    """Every job is of one group, and on the nodes that its name tells: `a01` on 0 and 1."""
    digits = member.job.rpartition(".")[2][1:]
    return Placed(next(iter(cluster.groups), ""), on(digits))


@pytest.fixture(autouse=True, scope="module")
def fixture_placement() -> Iterator[None]:
    PLACEMENT["by_name"] = Placement(by_name)
    yield
    del PLACEMENT["by_name"]


def world_of(*jobs: str, seed: int = 0, **changes: object) -> World:
    """Jobs that are up on the nodes that they name, and have nothing to do."""
    config = msgspec.structs.replace(CONFIG, placement="by_name", **changes)
    world = World(config=config, seed=seed, node_names=dict(NODES))
    for job in jobs:
        num_nodes = len(job) - 1
        specs = [
            spec("sampler", "rollout", num_ranks=num_nodes, num_nodes=num_nodes),
            spec("policy", "train", trainable=True, num_ranks=num_nodes, num_nodes=num_nodes),
        ]
        key = JobKey(TENANT, job)
        job_spec = JobSpec(deployments=specs, cycle=CYCLE)
        world.later(0, JobSubmitted(key, job_spec, f"submit-{job}"))
    world.run()
    return world


def of(world: World, key: DeploymentKey) -> Deployment:
    return world.core.state.deployments[str(key)]


Told = StartWpg | StopWpg | OpenActivation | CloseActivation | SealState | MirrorState


def told(world: World, kind: type[Told], key: DeploymentKey) -> list[str]:
    """Nodes that were told so, in order."""
    of_kind = [c for c in world.commands if isinstance(c, kind)]
    return [c.node for c in of_kind if c.deployment == key]


def run_of(world: World, operation: str) -> tuple[float, float]:
    """(start, end) of an operation's last run."""
    return next((start, end) for start, end, op in reversed(world.runs) if op == f"t.{operation}")


def advance(world: World, seconds: float) -> None:
    until_s = world.now_s + seconds
    world.run(until_s=until_s)
    world.now_s = max(world.now_s, until_s)


def run_until(world: World, is_so: Callable[[], bool]) -> None:
    for _ in range(2000):
        if is_so():
            return
        world.run(until_s=world.next_s)
    raise AssertionError("it never comes to that")


def train(world: World, job: str, steps: int, *, first: int = 1) -> None:
    """Rollout, step, publish, sync: `steps` times."""
    for step in range(first - 1, first - 1 + steps):
        policy, sampler = 3 * step, 2 * step
        before = (("policy", policy),) if step else ()
        version = policy if step else None
        kind = "sync_weights" if step else "generate"
        world.queue(job, "sampler", sampler + 1, kind, after=before, version=version)
        world.queue(job, "sampler", sampler + 2, "generate")
        rollout = (("sampler", sampler + 2),)
        world.queue(job, "policy", policy + 1, "forward_backward", after=rollout)
        world.queue(job, "policy", policy + 2, "optim_step")
        world.queue(job, "policy", policy + 3, "publish_weights")


def undisturbed(job: str, steps: int) -> World:
    world = world_of(job)
    train(world, job, steps)
    world.run()
    return world


# --- One life -------------------------------------------------------------------------------------


def test_every_node_starts_its_own_ranks_and_the_job_is_up_with_the_last() -> None:
    world = world_of("a10")
    policy = deployment("a10", "policy")
    starts = [c for c in world.commands if isinstance(c, StartWpg) and c.deployment == policy]
    assert [(c.node, c.rank_offset, c.devices, c.nodes) for c in starts] == [
        ("t1", 0, [0], ["t1", "t0"]),
        ("t0", 1, [0], ["t1", "t0"]),
    ]
    assert of(world, policy).node == "t1", "the first leads"
    job = world.core.state.jobs["t.a10"]
    assert job.state is JobState.ACTIVE
    world.check_replay()


def test_wpg_is_up_once_all_of_its_nodes_say_so() -> None:
    world = world_of("a01")
    policy = of(world, POLICY)
    world.kill(POLICY)
    run_until(world, lambda: policy.wpg.state is WpgState.STARTING)
    run_until(world, lambda: len(policy.wpg.starting_on) == 1)
    assert str(policy.wpg.state) == "starting"
    run_until(world, lambda: not policy.wpg.starting_on)
    assert str(policy.wpg.state) == "ready"


def test_permits_follow_when_the_activation_is_open_on_every_node() -> None:
    """The world asserts it of each; here it is told why an operation waits meanwhile."""
    world = world_of("a01")
    world.queue("a01", "policy", 1, "forward_backward")
    policy = of(world, POLICY)
    run_until(world, lambda: policy.activation.is_opening)
    assert sorted(told(world, OpenActivation, POLICY)) == ["t0", "t1"]
    run_until(world, lambda: len(policy.activation.opening_on) == 1)
    assert not policy.activation.running
    state = world.core.state
    step = Step(state, state.sequence, world.now_s)
    why = explain.explain(step, policy, policy.queue.operations[1])
    assert why.waits_for == [f"its activation to open on {policy.activation.opening_on[0]}"]
    world.run()
    assert world.done == {"t.a01.policy.1": Outcome.COMPLETED}
    world.check_replay()


def test_what_was_opened_for_may_be_cancelled_meanwhile() -> None:
    """The devices are nobody's then, and others go on."""
    world = world_of("a01", "b0")
    world.queue("a01", "policy", 1, "forward_backward")
    policy = of(world, POLICY)
    run_until(world, lambda: policy.activation.is_opening)
    world.cancel("a01", "policy", 1)
    world.queue("b0", "policy", 1, "forward_backward")
    world.run()
    assert world.done == {
        "t.a01.policy.1": Outcome.CANCELLED,
        "t.b0.policy.1": Outcome.COMPLETED,
    }


def test_nobody_takes_a_device_whose_deployment_is_being_switched_in_elsewhere() -> None:
    """Or two could switch each other out for ever."""
    world = world_of("a01", "b12", quantum_s=0.0)
    for seq in range(1, 21):
        for job in ("a01", "b12"):
            world.queue(job, "policy", seq, "load_state")
    world.run()
    assert len(world.done) == 40
    world.check_replay()


def test_state_that_one_node_must_give_up_stays_on_the_others() -> None:
    world = world_of("a01", "b1")
    world.queue("a01", "policy", 1, "load_state")
    world.run()
    world.queue("b1", "policy", 1, "load_state")
    world.run()
    policy = of(world, POLICY)
    assert policy.activation.epoch == 0, "an activation ends whole"
    nodes = world.core.state.nodes
    assert nodes["t0"].devices[0].slots[0].resident == [str(POLICY)]
    assert nodes["t1"].devices[0].slots[0].resident == ["t.b1.policy"]
    world.queue("a01", "policy", 2, "load_state")
    world.run()
    assert world.done["t.a01.policy.2"] is Outcome.COMPLETED


# --- Refused on one node --------------------------------------------------------------------------


def opens_of(world: World, key: DeploymentKey) -> list[OpenActivation]:
    return [c for c in world.commands if isinstance(c, OpenActivation) and c.deployment == key]


def test_one_refusal_aborts_the_activation_on_every_node() -> None:
    world = world_of("a01", "b0")
    world.queue("b0", "policy", 1, "load_state")
    world.run()
    world.queue("a01", "policy", 1, "forward_backward")
    policy = of(world, POLICY)
    run_until(world, lambda: len(policy.activation.opening_on) == 1)
    refusing = policy.activation.opening_on[0]
    (command,) = [c for c in opens_of(world, POLICY) if c.node == refusing]
    world.refuse(command)
    others = [node for node in policy.nodes if node != refusing]
    assert told(world, CloseActivation, POLICY) == others
    assert policy.activation.epoch == 0
    assert not any(d.slots[0].running for n in world.core.state.nodes.values() for d in n.devices)
    world.run()
    assert world.done["t.a01.policy.1"] is Outcome.COMPLETED
    assert len(opens_of(world, POLICY)) == 4
    world.check_replay()


def test_late_word_of_an_aborted_activation_opens_nothing() -> None:
    world = world_of("a01")
    world.queue("a01", "policy", 1, "forward_backward")
    policy = of(world, POLICY)
    run_until(world, lambda: policy.activation.is_opening)
    assert len(policy.activation.opening_on) == 2
    world.refuse(opens_of(world, POLICY)[0])
    run_until(world, lambda: "t1" in world.ranks[POLICY].opened)
    assert not policy.activation.running
    world.run()
    assert world.done == {"t.a01.policy.1": Outcome.COMPLETED}


def test_operation_fails_after_refusals_on_whichever_node() -> None:
    world = world_of("a01")
    world.queue("a01", "policy", 1, "forward_backward")
    world.queue("a01", "policy", 2, "optim_step")
    policy = of(world, POLICY)
    for attempt in range(3):
        run_until(world, lambda: policy.activation.is_opening)
        world.refuse(opens_of(world, POLICY)[2 * attempt + attempt % 2])
    world.run()
    assert world.done["t.a01.policy.1"] is Outcome.FAILED
    assert "t.a01.policy.2" in world.done


# --- One node dies --------------------------------------------------------------------------------


def test_ranks_killed_on_one_node_end_the_life_on_all() -> None:
    world = world_of("a01")
    train(world, "a01", 3)
    run_until(world, lambda: "t.a01.policy.4" in world.done)
    policy = of(world, POLICY)
    incarnation = policy.wpg.incarnation
    world.kill(POLICY, on=NodeId("t1"))
    assert policy.wpg.state is WpgState.LOST
    assert told(world, StopWpg, POLICY) == ["t0"]
    assert policy.wpg.dying_on == ["t0"], "its death is to be confirmed"
    assert policy.wpg.incarnation == incarnation
    world.run()
    assert policy.wpg.incarnation == incarnation + 1
    assert set(world.done.values()) == {Outcome.COMPLETED}
    assert world.states() == undisturbed("a01", 3).states()
    world.check_replay()


@pytest.mark.parametrize("name", ["t0", "t1"], ids=["leader's", "another"])
def test_lost_node_is_waited_for_and_the_whole_is_rebuilt(name: str) -> None:
    world = world_of("a01")
    train(world, "a01", 3)
    run_until(world, lambda: "t.a01.policy.4" in world.done)
    world.lose_node(name)
    world.feed(NodeLost(NodeId(name), 1, "its lease ran out"))
    (other,) = {"t0", "t1"} - {name}
    assert told(world, StopWpg, POLICY) == [other]
    num_starts = len(told(world, StartWpg, POLICY))
    world.run()
    policy = of(world, POLICY)
    assert (policy.wpg.state, policy.wpg.dying_on) == (WpgState.LOST, [])
    assert len(told(world, StartWpg, POLICY)) == num_starts, "started without a node"
    world.bring_back(name)
    world.run()
    assert set(world.done.values()) == {Outcome.COMPLETED}
    assert world.states() == undisturbed("a01", 3).states()
    world.check_replay()


def test_node_that_comes_back_waits_for_the_dead_on_the_others() -> None:
    """Its agent was restarted at once: the other node's ranks are still to be killed."""
    world = world_of("a01")
    world.lose_node("t1")
    num_starts = len(told(world, StartWpg, POLICY))
    world.bring_back("t1")
    policy = of(world, POLICY)
    assert policy.wpg.dying_on == ["t0"]
    assert len(told(world, StartWpg, POLICY)) == num_starts
    world.run()
    assert policy.wpg.state is WpgState.READY


def test_nodes_that_begin_with_other_states_are_not_taken_for_one() -> None:
    world = world_of("a01")
    world.kill(POLICY)
    policy = of(world, POLICY)
    run_until(world, lambda: policy.wpg.state is WpgState.STARTING)
    world.drop(lambda event: isinstance(event, WpgStarted))
    for node, applied in (("t0", 0), ("t1", 3)):
        started = WpgStarted(POLICY, policy.wpg.incarnation, NodeId(node), STATE_BYTES, applied)
        world.feed(started)
    job = world.core.state.jobs["t.a01"]
    assert job.state is JobState.FAILED
    assert job.error is not None
    assert job.error.code is Code.DATA_LOSS


def test_ended_job_is_forgotten_on_every_node() -> None:
    world = world_of("a01")
    world.feed(JobFinished(JobKey(TENANT, "a01"), "end"))
    assert told(world, StopWpg, POLICY) == ["t0", "t1"]
    world.run()
    assert world.core.state.stopping == {}
    assert not world.ranks
    world.check_replay()


# --- Seals ----------------------------------------------------------------------------------------


def sealed_once(world: World) -> Deployment:
    """Up to the commands of the first seal."""
    train(world, "a01", 2)
    run_until(world, lambda: bool(told(world, SealState, POLICY)))
    return of(world, POLICY)


def test_seal_counts_once_every_node_has_committed_its_part() -> None:
    world = world_of("a01", seal_every=1)
    policy = sealed_once(world)
    assert told(world, SealState, POLICY) == ["t0", "t1"]
    run_until(world, lambda: len(policy.durability.seal_parts) == 1)
    assert policy.durability.seal_seq == 0
    run_until(world, lambda: policy.durability.seal_seq > 0)
    assert policy.durability.sealing == 0
    world.run()
    world.check_replay()


def test_permit_names_the_seal_that_every_node_must_have_cut_before() -> None:
    """Commands to two nodes come in any order; a share must not overtake the cut of a seal."""
    world = world_of("a01", seal_every=1)
    seq = sealed_once(world).durability.sealing
    world.drop(lambda event: isinstance(event, SealCommitted))
    num_told = len(world.commands)
    train(world, "a01", 1, first=3)
    world.run()
    permits = [c for c in world.commands[num_told:] if isinstance(c, Permit)]
    of_policy = [p.sealing for p in permits if p.operation.deployment_key == POLICY]
    assert of_policy
    assert set(of_policy) == {seq}


def test_seal_that_failed_on_one_node_is_none() -> None:
    world = world_of("a01", seal_every=1)
    policy = sealed_once(world)
    seq = policy.durability.sealing
    world.drop(lambda event: isinstance(event, SealCommitted))
    full = ErrorInfo(Code.RESOURCE_EXHAUSTED, "the disk is full")
    world.feed(SealFailed(POLICY, seq, NodeId("t0"), full))
    world.feed(SealCommitted(POLICY, seq, NodeId("t1"), []))
    assert (policy.durability.seal_seq, policy.durability.sealing) == (0, 0)
    world.run()


def test_late_word_of_an_earlier_seal_that_failed_ends_no_other() -> None:
    """Both nodes failed, and one says so when the next seal is being made: whoever is permitted
    then must wait for that on every node still."""
    world = world_of("a01", seal_every=1)
    policy = sealed_once(world)
    first = policy.durability.sealing
    full = ErrorInfo(Code.RESOURCE_EXHAUSTED, "the disk is full")
    world.drop(lambda event: isinstance(event, SealCommitted))
    world.feed(SealFailed(POLICY, first, NodeId("t0"), full))
    run_until(world, lambda: bool(policy.durability.sealing))
    second = policy.durability.sealing
    assert second > first
    world.feed(SealFailed(POLICY, first, NodeId("t1"), full))
    assert policy.durability.sealing == second
    run_until(world, lambda: policy.durability.seal_seq == second)
    world.run()
    world.check_replay()


def test_part_that_is_committed_after_a_loss_completes_the_seal() -> None:
    """All parts are on disk: the seal is as good as any."""
    world = world_of("a01", seal_every=1)
    policy = sealed_once(world)
    seq = policy.durability.sealing
    run_until(world, lambda: len(policy.durability.seal_parts) == 1)
    world.kill(POLICY)
    assert policy.durability.sealing == 0
    run_until(world, lambda: policy.durability.seal_seq == seq)
    world.run()
    assert set(world.done.values()) == {Outcome.COMPLETED}
    assert world.states() == undisturbed("a01", 2).states()


# --- Moves ----------------------------------------------------------------------------------------


def move(world: World, job: str, digits: str) -> None:
    """What a plan for the whole cluster would say: to free nodes, in a group of its own."""
    cluster = world.core.state.cluster
    name = cluster.placed[f"t.{job}"]
    planned = PlannedMove(JobKey(TENANT, job), "", on(digits), "cheaper")
    versions = {name: cluster.groups[name].version}
    world.feed(ReplanComputed(0, [planned], cluster.num_groups, versions))


def homes(world: World, job: str) -> dict[str, list[NodeId]]:
    return {name: of(world, deployment(job, name)).nodes for name in ("sampler", "policy")}


@pytest.mark.parametrize("moment", [f"policy.{seq}" for seq in range(3, 9)])
@pytest.mark.parametrize(("job", "target"), [("a01", "23"), ("a0", "3")], ids=["two", "one"])
def test_deployment_moves_under_load_and_nothing_is_lost(
    job: str, target: str, moment: str
) -> None:
    world = world_of(job)
    train(world, job, 4)
    run_until(world, lambda: f"t.{job}.{moment}" in world.done)
    move(world, job, target)
    world.run()
    assert homes(world, job) == {"sampler": on(target)["rollout"], "policy": on(target)["train"]}
    assert len(world.done) == 20
    assert set(world.done.values()) == {Outcome.COMPLETED}
    assert world.states() == undisturbed(job, 4).states()
    devices = [d for digit in job[1:] for d in world.core.state.nodes[f"t{digit}"].devices]
    assert not any(
        d.slots[0].placed or d.slots[0].resident or d.slots[0].ready or d.slots[0].holder
        for d in devices
    )
    world.check_replay()


def test_move_seals_what_trains_and_replays_nothing_then() -> None:
    world = world_of("a0")
    policy = of(world, deployment("a0", "policy"))
    train(world, "a0", 1)
    world.run()
    move(world, "a0", "3")
    world.run()
    assert told(world, SealState, policy.key) == ["t0"]
    (*_, start) = [
        c for c in world.commands if isinstance(c, StartWpg) and c.deployment == policy.key
    ]
    assert (start.node, start.seal_seq) == ("t3", 3)
    assert [op for _, _, op in world.runs if op.startswith("t.a0.policy")] == [
        f"t.a0.policy.{seq}" for seq in (1, 2, 3)
    ]


def test_gradients_are_made_again_and_not_sealed() -> None:
    """A seal would bring them back after a step was refused and had thrown them away."""
    world = world_of("a0")
    policy = of(world, deployment("a0", "policy"))
    world.queue("a0", "policy", 1, "forward_backward")
    world.run()
    move(world, "a0", "3")
    world.run()
    assert told(world, SealState, policy.key) == []
    runs = [op for _, _, op in world.runs]
    assert runs == ["t.a0.policy.1"] * 2
    world.queue("a0", "policy", 2, "optim_step")
    world.run()
    assert world.ranks[policy.key].state == (1, 2)


def test_what_runs_ends_and_what_comes_waits_and_is_told_why() -> None:
    world = world_of("a0")
    sampler = of(world, deployment("a0", "sampler"))
    world.queue("a0", "sampler", "rone", "generate")
    run_until(world, lambda: bool(sampler.activation.running))
    move(world, "a0", "3")
    world.queue("a0", "sampler", "rtwo", "generate")
    run_until(world, lambda: "rtwo" in sampler.queue.unordered)
    assert sampler.nodes == ["r0"], "what runs has not ended"
    assert len(sampler.activation.running) == 1, "it would have run beside the other"
    state = world.core.state
    step = Step(state, state.sequence, world.now_s)
    why = explain.explain(step, sampler, sampler.queue.unordered["rtwo"])
    (reason,) = why.waits_for
    assert reason == "the move of its deployment to r3: waiting for running operations to end"
    world.run()
    assert [op for _, _, op in world.runs] == ["t.a0.sampler.rone", "t.a0.sampler.rtwo"]
    assert sampler.nodes == ["r3"]


def test_old_node_keeps_the_seal_until_there_is_one_where_it_is_now() -> None:
    world = world_of("a01")
    train(world, "a01", 1)
    world.run()
    policy = of(world, POLICY)
    move(world, "a01", "23")
    world.run()
    assert policy.move.stale_holders == ["t0", "t1"]
    world.kill(POLICY)
    world.run()
    assert policy.wpg.state is WpgState.READY, "it is rebuilt from it once more"
    train(world, "a01", 1, first=2)
    world.run()
    move(world, "a01", "40")
    world.run()
    stops = [c for c in world.commands if isinstance(c, StopWpg) and c.forget]
    assert [c.node for c in stops if c.deployment == POLICY] == ["t1"], "t0 is where it goes"
    assert (policy.nodes, policy.move.stale_holders) == (["t0", "t4"], ["t2", "t3"])
    assert policy.wpg.state is WpgState.READY
    assert world.core.state.stopping == {}
    world.feed(JobFinished(JobKey(TENANT, "a01"), "end"))
    world.run()
    assert world.core.state.stopping == {}
    assert world.seals.get(POLICY, {}) == {}
    world.check_replay()


def test_seal_that_fails_does_not_keep_it() -> None:
    world = world_of("a0")
    policy = of(world, deployment("a0", "policy"))
    train(world, "a0", 1)
    world.run()
    move(world, "a0", "3")
    assert policy.durability.sealing == 3
    world.drop(lambda event: isinstance(event, SealCommitted))
    world.feed(SealFailed(policy.key, 3, NodeId("t0"), ErrorInfo(Code.INTERNAL, "torn")))
    world.run()
    assert policy.nodes == ["t3"]
    assert told(world, SealState, policy.key) == ["t0"], "once is enough"
    assert world.ranks[policy.key].state == undisturbed("a0", 1).ranks[policy.key].state


def test_it_runs_on_where_it_is_while_a_node_that_it_is_to_go_to_is_down() -> None:
    world = world_of("a0")
    policy = of(world, deployment("a0", "policy"))
    train(world, "a0", 2)
    run_until(world, lambda: "t.a0.policy.2" in world.done)
    move(world, "a0", "3")
    world.lose_node("t3")
    world.feed(NodeLost(NodeId("t3"), 1, "its lease ran out"))
    world.run()
    assert policy.move.relocation is not None
    assert policy.nodes == ["t0"]
    assert len(world.done) == 10
    world.bring_back("t3")
    world.run()
    assert policy.nodes == ["t3"]
    assert set(world.done.values()) == {Outcome.COMPLETED}
    assert world.states() == undisturbed("a0", 2).states()
    world.check_replay()


def moved_under_way(duration_s: float) -> World:
    """A policy trains while it is moved; each of its operations takes about so long."""
    world = world_of("a0")
    world.duration_s = duration_s
    for seq in range(1, 13):
        world.queue("a0", "policy", seq, "optim_step")
    run_until(world, lambda: "t.a0.policy.2" in world.done)
    move(world, "a0", "3")
    world.run()
    assert of(world, deployment("a0", "policy")).nodes == ["t3"]
    assert world.ranks[deployment("a0", "policy")].state == tuple(range(1, 13))
    world.check_replay()
    return world


def ran_twice(world: World) -> int:
    runs = [op for _, _, op in world.runs]
    return len(runs) - len(set(runs))


def test_what_is_quick_to_run_again_is_run_again() -> None:
    world = moved_under_way(0.01)
    assert ran_twice(world) > 0, "it did not go on while its state was copied"
    assert told(world, SealState, deployment("a0", "policy")) == ["t0"]


def test_what_takes_longer_than_the_copy_is_sealed_again_before_it_leaves() -> None:
    world = moved_under_way(5.0)
    assert ran_twice(world) == 0
    assert told(world, SealState, deployment("a0", "policy")) == ["t0", "t0"]
    assert told(world, MirrorState, deployment("a0", "policy")) == ["t3", "t3"]


def test_move_is_put_off_while_a_node_cannot_take_the_copy() -> None:
    world = world_of("a0")
    policy = of(world, deployment("a0", "policy"))
    train(world, "a0", 1)
    world.run()
    world.mirror_error = ErrorInfo(Code.RESOURCE_EXHAUSTED, "its disk is full")
    move(world, "a0", "3")
    train(world, "a0", 2, first=2)
    advance(world, 30.0)
    assert policy.nodes == ["t0"]
    assert set(world.done.values()) == {Outcome.COMPLETED}
    assert len(world.done) == 15, "it did not go on where it is"
    assert len(told(world, MirrorState, policy.key)) == 3, "after 0, 5 and 15 s"
    world.mirror_error = None
    world.run()
    assert policy.nodes == ["t3"]
    world.check_replay()


def test_node_that_restarts_while_it_fetches_is_asked_again() -> None:
    """Its next life may come before anybody has missed the last one."""
    world = world_of("a0")
    policy = of(world, deployment("a0", "policy"))
    train(world, "a0", 1)
    world.run()
    move(world, "a0", "3")
    run_until(world, lambda: told(world, MirrorState, policy.key) == ["t3"])
    world.drop(lambda event: isinstance(event, StateMirrored) and event.node == "t3")
    world.lose_node("t3")
    world.bring_back("t3")
    world.run()
    assert policy.nodes == ["t3"]


def test_replay_is_not_overtaken_for_ever() -> None:
    """First come, first served: it is as old as what waits for it."""
    world = world_of("a0", "b0", ordering="fcfs")
    world.queue("a0", "policy", 1, "optim_step")
    world.run()
    world.queue("a0", "policy", 2, "optim_step")
    for seq in range(1, 60):
        world.queue("b0", "policy", seq, "optim_step")
    world.kill(deployment("a0", "policy"))
    run_until(world, lambda: "t.a0.policy.2" in world.done)
    assert "t.b0.policy.20" not in world.done


def test_job_that_ends_on_the_way_is_forgotten_wherever_it_was() -> None:
    for seconds in (0.0, 0.05, 0.3, 0.6, 2.0):
        world = world_of("a01")
        train(world, "a01", 1)
        world.run()
        move(world, "a01", "23")
        advance(world, seconds)
        world.feed(JobFinished(JobKey(TENANT, "a01"), "end"))
        world.run()
        assert world.core.state.stopping == {}
        assert world.core.state.moving == []
        assert not world.ranks
        assert world.seals.get(POLICY, {}) == {}


# --- Whatever happens -----------------------------------------------------------------------------

JOBS = ("a01", "b12", "c20", "d0", "e210")
"""Of which any two that share a node could wait for each other."""

DISTURBANCES = ("kill", "refuse", "lose", "move", "none")


def disturb(world: World, what: str, chance: random.Random) -> None:
    alive = sorted(world.ranks, key=str)
    key = chance.choice(alive) if alive else None
    if what == "kill" and key is not None:
        world.kill(key, on=chance.choice(of(world, key).nodes), after_done=chance.random() < 0.5)
    elif what == "refuse":
        opening = [of(world, k) for k in alive if of(world, k).activation.is_opening]
        for d in opening[:1]:
            node = chance.choice(d.activation.opening_on)
            (*_, command) = [c for c in opens_of(world, d.key) if c.node == node]
            world.refuse(command)
    elif what == "lose":
        name = chance.choice(["t0", "t1", "r0", "r2"])
        world.lose_node(name)
        world.bring_back(name)
    elif what == "move" and "t.d0" in world.core.state.cluster.placed:
        here = of(world, deployment("d0", "policy"))
        if here.move.relocation is None:
            move(world, "d0", "4" if here.nodes == ["t3"] else "3")


def play(seed: int, events: list[tuple[str, float]]) -> World:
    world = world_of(*JOBS, seed=seed, seal_every=3)
    for job in JOBS:
        train(world, job, 2)
    chance = random.Random(seed)
    for what, seconds in events:
        advance(world, seconds)
        disturb(world, what, chance)
    world.run()
    return world


def is_within_refusals(events: list[tuple[str, float]]) -> bool:
    """What is refused as often as that is given up, as it should be."""
    return sum(what == "refuse" for what, _ in events) < MAX_REFUSALS


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    events=st.lists(
        st.tuples(st.sampled_from(DISTURBANCES), st.floats(0.0, 1.0)), max_size=8
    ).filter(is_within_refusals),
)
@example(seed=0, events=[("move", 0.0), ("refuse", 0.0)])
def test_nothing_deadlocks_and_nothing_is_lost_whatever_happens(
    seed: int, events: list[tuple[str, float]]
) -> None:
    """`validate` runs after each step, and the world asserts what nodes would: permits alone on
    their devices and open everywhere, no life before the death of the last is confirmed."""
    world = play(seed, events)
    assert len(world.done) == 10 * len(JOBS)
    assert set(world.done.values()) == {Outcome.COMPLETED}
    assert world.states() == play(seed, []).states()
    state = world.core.state
    assert not any(node.claims for node in state.nodes.values())
    assert not any(d.slots[0].running for node in state.nodes.values() for d in node.devices)
    assert state.moving == []
    world.check_replay()
