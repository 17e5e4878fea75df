"""Nodes that are left: drained on request, away for too long, gone for good; and what a job's
durability is worth then."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from phaseloom.common.contract.api import NodeStatus
from phaseloom.common.contract.commands import (
    MirrorState,
    Permit,
    ReleaseVersions,
    SealState,
    StartWpg,
    StopWpg,
)
from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.common.contract.events import (
    DeploymentCreated,
    DeploymentDeleted,
    JobFinished,
    JobSubmitted,
    NodeDrainRequested,
    NodeLost,
    StateMirrored,
)
from phaseloom.common.contract.ids import JobKey, NodeId, VersionKey
from phaseloom.common.contract.operations import Outcome
from phaseloom.common.contract.specs import Cycle, Durability, JobSpec, Segment
from phaseloom.scheduler.core.state.outputs import Answer, PublishNotice, SendCommand
from phaseloom.scheduler.core.state.transitions import JobState, WpgState
from tests.support.replay import restored_at_every_step
from tests.support.world import CONFIG, TENANT, World, deployment, node_up, spec

POLICY = deployment("a", "policy")
CYCLE = Cycle(10.0, [Segment("rollout", 0.0, 5.0), Segment("train", 5.0, 5.0)])
CYCLE_OF_TRAINING = Cycle(5.0, [Segment("train", 0.0, 5.0)])
GRACE_S = 5.0
GONE_S = 50.0


def world_of(*nodes: str, durability: Durability = Durability.NODE) -> World:
    """A job that is up, has trained two steps and is sealed; r0 and t0 are its nodes."""
    pools = {"r": "rollout", "t": "train"}
    config = replace(CONFIG, seal_every=2, node_grace_s=GRACE_S, node_gone_s=GONE_S)
    world = World(config=config, node_names={name: pools[name[0]] for name in ("r0", "t0", *nodes)})
    specs = [spec("sampler", "rollout"), spec("policy", "train", trainable=True)]
    job = JobSpec(deployments=specs, cycle=CYCLE, durability=durability)
    world.later(0, JobSubmitted(JobKey(TENANT, "a"), job, "submit"))
    world.run()
    train(world, 1, 2)
    world.run()
    return world


def train(world: World, first: int, last: int) -> None:
    """Rollout, step, publish, sync."""
    for step in range(first - 1, last):
        policy, sampler = 3 * step, 2 * step
        before = (("policy", policy),) if step else ()
        kind = "sync_weights" if step else "generate"
        world.queue("a", "sampler", sampler + 1, kind, after=before, version=policy or None)
        world.queue("a", "sampler", sampler + 2, "generate")
        rollout = (("sampler", sampler + 2),)
        world.queue("a", "policy", policy + 1, "forward_backward", after=rollout)
        world.queue("a", "policy", policy + 2, "optim_step")
        world.queue("a", "policy", policy + 3, "publish_weights")


def nodes(world: World, name: str = "policy") -> list[NodeId]:
    return world.core.state.deployments[f"{TENANT}.a.{name}"].nodes


def state(world: World) -> WpgState:
    return world.core.state.deployments[str(POLICY)].wpg.state


def job_state(world: World) -> JobState:
    return world.core.state.jobs[f"{TENANT}.a"].state


def ask(world: World, node: str, *, undo: bool = False, gone: bool = False) -> Answer:
    made = world.feed(NodeDrainRequested(NodeId(node), "drain", undo=undo, gone=gone))
    (answer,) = [output for output in made if isinstance(output, Answer)]
    return answer


def status(world: World, node: str, **how: bool) -> NodeStatus:
    answer = ask(world, node, **how)
    assert answer.node is not None, answer.error
    return answer.node


def lose(world: World, node: str) -> None:
    world.lose_node(node)
    revision = world.core.state.nodes[node].revision
    world.feed(NodeLost(NodeId(node), revision, "unplugged"))


def after(world: World, seconds: float) -> None:
    world.run(until_s=world.now_s + seconds)
    world.now_s += seconds


def told(world: World) -> list[str]:
    return [
        output.title
        for made in world.outputs
        for output in made
        if isinstance(output, PublishNotice)
    ]


def undisturbed(steps: int) -> World:
    world = world_of()
    train(world, 3, steps)
    world.run()
    return world


def ends_as_undisturbed(world: World) -> None:
    assert set(world.done.values()) == {Outcome.COMPLETED}
    assert world.states() == undisturbed(4).states()
    _, made = restored_at_every_step(world.log)
    assert made == world.outputs


# --- drained -------------------------------------------------------------------------------------


def test_what_is_on_a_drained_node_goes_to_a_free_one_and_nothing_new_comes() -> None:
    world = world_of("t1")
    train(world, 3, 4)
    after(world, 0.3)
    assert [d.deployment for d in status(world, "t0").deployments] == ["policy"]
    world.run()
    assert nodes(world) == ["t1"]
    assert nodes(world, "sampler") == ["r0"]
    ends_as_undisturbed(world)
    assert "node is empty" in told(world)
    job = JobSpec(deployments=[spec("policy", "train", trainable=True)], cycle=CYCLE)
    world.feed(JobSubmitted(JobKey(TENANT, "b"), job, "submit-b"))
    world.run()
    assert world.core.state.deployments[f"{TENANT}.b.policy"].nodes == ["t1"]
    again = status(world, "t0", undo=True)
    assert (again.is_draining, again.deployments) == (False, [])
    assert world.core.state.cluster.free["train"] == ["t0"]


def test_who_finds_no_room_runs_on_and_leaves_once_there_is_some() -> None:
    world = world_of()
    train(world, 3, 4)
    (why,) = status(world, "t0").waits_for
    assert "no other node of pool 'train' has room" in why
    world.run()
    assert nodes(world) == ["t0"]
    ends_as_undisturbed(world)
    world.node_names["t9"] = "train"
    world.feed(node_up("t9", "train"))
    world.run()
    assert nodes(world) == ["t9"]
    assert state(world) is WpgState.READY


def test_drained_node_that_restarts_is_drained_still() -> None:
    world = world_of("t1")
    status(world, "t1")
    world.bring_back("t1")
    assert world.core.state.cluster.free["train"] == []
    assert status(world, "t1").is_draining


def test_drained_node_that_was_away_for_long_is_drained_still() -> None:
    world = world_of("t1")
    status(world, "t1")
    lose(world, "t1")
    after(world, 2 * GRACE_S)
    world.bring_back("t1")
    assert world.core.state.cluster.free["train"] == []
    assert status(world, "t1").is_draining


def test_drain_is_undone_while_the_node_is_away() -> None:
    world = world_of("t1")
    status(world, "t1")
    lose(world, "t1")
    after(world, 2 * GRACE_S)
    assert not status(world, "t1", undo=True).is_draining
    world.bring_back("t1")
    assert world.core.state.cluster.free["train"] == ["t1"]


def test_drain_of_what_is_not_there_is_refused_and_so_is_a_loss_of_what_is_up() -> None:
    world = world_of()
    error = ask(world, "t7").error
    assert error is not None
    assert (error.code, "t0" in error.remedy) == (Code.NOT_FOUND, True)
    error = ask(world, "t0", gone=True).error
    assert error is not None
    assert error.code is Code.FAILED_PRECONDITION


# --- of several nodes -----------------------------------------------------------------------------


@pytest.mark.parametrize("durability", [Durability.NODE, Durability.REMOTE])
def test_node_that_stays_keeps_its_part_when_another_is_left(durability: Durability) -> None:
    world = spanning(durability)
    status(world, "t0")
    world.run()
    assert nodes(world) == ["t2", "t1"]
    assert state(world) is WpgState.READY


def test_node_with_a_copy_of_one_part_gets_another() -> None:
    """t2 has that of t0: of what t1 had it gets the copy that t3 has, and not its own."""
    world = spanning(Durability.REMOTE)
    assert world.core.state.deployments[str(POLICY)].durability.replicas == [
        ["t0", "t2"],
        ["t1", "t3"],
    ]
    world.feed(NodeDrainRequested(NodeId("t3"), "drain"))
    lose(world, "t1")
    world.run()
    assert nodes(world) == ["t0", "t2"]
    assert state(world) is WpgState.READY


def test_node_that_stays_has_room_for_what_is_there_already() -> None:
    """Nodes have 1000 bytes of host memory: it takes 600 of t1, and goes on taking 600."""
    world = spanning(Durability.NODE, host_bytes=600)
    world.feed(NodeDrainRequested(NodeId("t3"), "drain"))
    status(world, "t0")
    world.run()
    assert nodes(world) == ["t2", "t1"]
    (reason,) = [
        output.reason
        for made in world.outputs
        for output in made
        if isinstance(output, PublishNotice) and output.title == "job moved"
    ]
    assert reason == "moved off t0 to t1, t2", "it has not left its group"


def spanning(durability: Durability, host_bytes: int = 0) -> World:
    """A policy on t0 and t1, sealed; t2 and t3 are free."""
    config = replace(CONFIG, seal_every=2, node_grace_s=GRACE_S, node_gone_s=GONE_S)
    world = World(config=config, node_names={f"t{i}": "train" for i in range(4)})
    policy = spec("policy", "train", trainable=True, num_ranks=2, num_nodes=2)
    policy = replace(policy, host_bytes=host_bytes)
    job = JobSpec(deployments=[policy], cycle=CYCLE_OF_TRAINING, durability=durability)
    world.later(0, JobSubmitted(JobKey(TENANT, "a"), job, "submit"))
    world.run()
    for seq in (1, 3):
        world.queue("a", "policy", seq, "forward_backward")
        world.queue("a", "policy", seq + 1, "optim_step")
    world.run()
    assert world.core.state.deployments[str(POLICY)].durability.seal_seq
    return world


# --- away ----------------------------------------------------------------------------------------


def test_remote_state_goes_on_elsewhere_after_the_grace() -> None:
    world = world_of("t1", durability=Durability.REMOTE)
    (seal, *_) = [c for c in world.commands if isinstance(c, SealState)]
    assert seal.replicas == {"t1": "t1:1"}
    train(world, 3, 4)
    lose(world, "t0")
    after(world, GRACE_S / 2)
    assert (nodes(world), state(world)) == (["t0"], WpgState.LOST)
    world.run()
    assert nodes(world) == ["t1"]
    (*_, start) = [c for c in world.commands if isinstance(c, StartWpg)]
    assert start.seal_seq == seal.seq
    ends_as_undisturbed(world)


def test_state_that_one_disk_has_waits_for_its_node() -> None:
    world = world_of("t1")
    train(world, 3, 4)
    lose(world, "t0")
    after(world, GONE_S - GRACE_S)
    assert (nodes(world), state(world)) == (["t0"], WpgState.LOST)
    world.bring_back("t0")
    world.run()
    assert nodes(world) == ["t0"]
    ends_as_undisturbed(world)


def test_state_without_a_seal_is_made_again_elsewhere() -> None:
    """Of the sampler: its seeds, and the weights that it synced last."""
    world = world_of("r1")
    train(world, 3, 4)
    lose(world, "r0")
    world.run()
    assert nodes(world, "sampler") == ["r1"]
    ends_as_undisturbed(world)


def test_remote_seal_needs_another_node_and_says_so() -> None:
    world = world_of(durability=Durability.REMOTE)
    (seal, *_) = [c for c in world.commands if isinstance(c, SealState)]
    assert seal.replicas == {"r0": "r0:1"}
    world.feed(NodeDrainRequested(NodeId("r0"), "drain"))
    train(world, 3, 6)
    world.run()
    assert "not sealed" in told(world)


# --- copies that count ---------------------------------------------------------------------------


def test_copy_on_a_drained_node_is_made_again_elsewhere_and_then_it_may_be_switched_off() -> None:
    world = world_of("t1", "t2", durability=Durability.REMOTE)
    told_at_once = status(world, "t1")
    assert told_at_once.deployments == []
    (why,) = told_at_once.waits_for
    assert "t2 is fetching a copy" in why
    world.run()
    assert status(world, "t1").waits_for == []
    train(world, 3, 4)
    lose(world, "t1")
    status(world, "t1", gone=True)
    lose(world, "t0")
    status(world, "t0", gone=True)
    world.run()
    assert nodes(world) == ["t2"]
    ends_as_undisturbed(world)


def test_copy_that_nobody_can_take_is_told_and_made_once_somebody_can() -> None:
    world = world_of("t1", durability=Durability.REMOTE)
    status(world, "r0")
    (why,) = status(world, "t1").waits_for
    assert "no other node can take a copy" in why
    world.node_names["t2"] = "train"
    world.feed(node_up("t2", "train"))
    world.run()
    assert status(world, "t1").waits_for == []
    assert world.core.state.deployments[str(POLICY)].durability.replicas == [["t0", "t1", "t2"]]


def test_copy_that_fails_is_tried_on_another_node_later() -> None:
    world = world_of("t1", "t2", "t3", durability=Durability.REMOTE)
    world.mirror_error = ErrorInfo(Code.RESOURCE_EXHAUSTED, "the disk is full")
    status(world, "t1")
    after(world, 1.0)
    (why,) = status(world, "t1").waits_for
    assert "t2 could not take a copy, next try in" in why
    world.mirror_error = None
    world.run()
    assert status(world, "t1").waits_for == []
    assert world.core.state.deployments[str(POLICY)].durability.replicas == [["t0", "t1", "t3"]]
    train(world, 3, 4)
    world.run()
    assert world.core.state.stopping == {}, "t2 has forgotten what it may have got"


def test_copy_under_way_to_a_node_that_starts_anew_is_asked_for_again() -> None:
    world = world_of("t1", "t2", durability=Durability.REMOTE)
    status(world, "t1")
    world.drop(lambda event: isinstance(event, StateMirrored))
    world.bring_back("t2")
    world.run()
    assert status(world, "t1").waits_for == []


def test_seal_that_is_made_meanwhile_has_copies_of_its_own() -> None:
    world = world_of("t1", "t2", durability=Durability.REMOTE)
    world.mirror_error = ErrorInfo(Code.UNAVAILABLE, "away")
    status(world, "t1")
    train(world, 3, 4)
    world.run()
    assert status(world, "t1").waits_for == []
    assert world.core.state.deployments[str(POLICY)].durability.replicas == [["t0", "t2"]]
    assert {node for node, files in world.files.items() if files} == {"t0", "t2"}


def test_part_on_a_drained_node_goes_to_one_that_has_no_other_part() -> None:
    world = spanning(Durability.REMOTE)
    assert world.core.state.deployments[str(POLICY)].durability.replicas == [
        ["t0", "t2"],
        ["t1", "t3"],
    ]
    world.node_names["t4"] = "train"
    world.feed(node_up("t4", "train"))
    status(world, "t3")
    world.run()
    assert world.core.state.deployments[str(POLICY)].durability.replicas == [
        ["t0", "t2"],
        ["t1", "t3", "t4"],
    ]
    assert status(world, "t3").waits_for == []


def retaining(*more: str) -> World:
    """The sampler holds what a policy on t0 has published that is deleted since."""
    world = world_of(*more)
    train(world, 3, 3)
    world.run()
    world.feed(DeploymentDeleted(POLICY, "delete"))
    world.run()
    assert list(world.core.state.jobs[f"{TENANT}.a"].versions.retained.values()) == [["t0"]]
    return world


def sync_another(world: World) -> None:
    """A policy of the same name publishes, and the deleted one's version is needed no more."""
    policy = spec("policy", "train", trainable=True)
    world.feed(DeploymentCreated(JobKey(TENANT, "a"), policy, "create"))
    after(world, 1.0)
    first = world.core.state.deployments[str(POLICY)].queue.first_seq
    world.queue("a", "policy", first, "publish_weights")
    seq = world.core.state.deployments[f"{TENANT}.a.sampler"].queue.next_seq
    world.queue("a", "sampler", seq, "sync_weights", after=(("policy", first),), version=first)


def test_version_of_a_deleted_policy_is_copied_from_its_drained_node() -> None:
    world = retaining()
    (why,) = status(world, "t0").waits_for
    assert "weights version t.a.policy.6" in why
    assert "r0 is fetching a copy" in why, "where it is read"
    (*_, mirror) = [c for c in world.commands if isinstance(c, MirrorState)]
    assert (mirror.node, mirror.sources, mirror.seal_seq) == ("r0", ["t0:1"], 0)
    assert mirror.keeps is not None
    assert mirror.keeps.version == VersionKey(POLICY, 6)
    world.run()
    assert status(world, "t0").waits_for == []
    assert "node is empty" in told(world)
    lose(world, "t0")
    world.kill(deployment("a", "sampler"))
    world.run()
    (*_, permit) = [c for c in world.commands if isinstance(c, Permit)]
    assert (permit.kind, permit.sources) == ("sync_weights", ["r0:1", "t0:1"])
    world.feed(JobFinished(JobKey(TENANT, "a"), "end"))
    forgets = [c for c in world.commands if isinstance(c, StopWpg) and c.deployment == POLICY]
    assert forgets[-1].node == "r0"
    _, made = restored_at_every_step(world.log)
    assert made == world.outputs


def test_version_that_is_released_while_it_is_copied_is_dropped_where_it_comes() -> None:
    world = retaining("t1")
    status(world, "t0")
    mirrored = next(e for e in world.pending() if isinstance(e, StateMirrored))
    world.drop(lambda event: event is mirrored)
    sync_another(world)
    world.run()
    assert world.core.state.jobs[f"{TENANT}.a"].versions.retained == {}
    made = world.feed(mirrored)
    (release,) = [o.command for o in made if isinstance(o, SendCommand)]
    assert isinstance(release, ReleaseVersions)
    assert (release.node, release.versions) == ("r0", [VersionKey(POLICY, 6)])
    assert world.core.state.jobs[f"{TENANT}.a"].versions.copying == {}


def test_version_that_is_released_after_its_copy_failed_is_not_copied_any_more() -> None:
    world = retaining("t1")
    world.mirror_error = ErrorInfo(Code.RESOURCE_EXHAUSTED, "its memory is full")
    status(world, "t0")
    after(world, 0.5)
    job = world.core.state.jobs[f"{TENANT}.a"]
    assert [copying.has_failed for copying in job.versions.copying.values()] == [True]
    sync_another(world)
    after(world, 3.0)
    assert job.versions.retained == {}
    assert job.versions.copying == {}


def test_everything_is_forgotten_wherever_a_copy_was() -> None:
    world = world_of("t1", "t2", durability=Durability.REMOTE)
    status(world, "t1")
    train(world, 3, 4)
    world.run()
    assert {node for node, files in world.files.items() if files} == {"t0", "t2"}
    world.feed(JobFinished(JobKey(TENANT, "a"), "end"))
    world.run()
    assert not any(world.files.values())
    assert world.core.state.stopping == {}


# --- gone ----------------------------------------------------------------------------------------


def test_job_falls_back_as_a_whole_when_its_seal_is_gone() -> None:
    world = world_of("t1")
    checkpoints = {"policy": "best"}
    world.saves[f"{TENANT}.a.policy.rsave"] = checkpoints
    world.queue("a", "policy", "rsave", "save_state")
    world.run()
    train(world, 3, 3)
    world.run()
    lose(world, "t0")
    world.run()
    assert job_state(world) is JobState.ROLLED_BACK
    error = world.core.state.jobs[f"{TENANT}.a"].error
    assert error is not None
    assert "node t0 is gone" in error.message
    assert nodes(world) == ["t1"]
    assert world.states()[POLICY] == world.checkpoints[POLICY, "best"]
    assert nodes(world, "sampler") == ["r0"]
    assert world.core.state.deployments[f"{TENANT}.a.sampler"].wpg.incarnation == 2, "it alone"


@pytest.mark.parametrize("how", ["waited for", "said"])
def test_job_without_a_checkpoint_fails_when_its_seal_is_gone(how: str) -> None:
    world = world_of("t1")
    lose(world, "t0")
    if how == "said":
        assert status(world, "t0", gone=True).is_gone
    world.run()
    assert job_state(world) is JobState.FAILED
    error = world.core.state.jobs[f"{TENANT}.a"].error
    assert error is not None
    assert (error.code, error.details["node"]) == (Code.DATA_LOSS, "t0")


def test_remote_state_survives_the_loss_for_good() -> None:
    world = world_of("t1", durability=Durability.REMOTE)
    train(world, 3, 4)
    lose(world, "t0")
    status(world, "t0", gone=True)
    world.run()
    assert nodes(world) == ["t1"]
    ends_as_undisturbed(world)


def test_copy_on_a_node_that_was_gone_is_forgotten_when_that_is_back() -> None:
    world = world_of("t1", durability=Durability.REMOTE)
    assert world.files[NodeId("t1")]
    lose(world, "t1")
    status(world, "t1", gone=True)
    world.bring_back("t1")
    world.run()
    assert not world.files[NodeId("t1")]
    assert world.core.state.stopping == {}


# --- whatever happens ----------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_nodes=st.integers(1, 2),
    num_free=st.integers(0, 3),
    durability=st.sampled_from(Durability),
    happens=st.lists(
        st.tuples(
            st.sampled_from(["drain", "undo", "lose", "back", "kill"]),
            st.integers(0, 4),
            st.sampled_from([0.0, 0.1, 0.7, 2.0, 2 * GRACE_S]),
        ),
        max_size=12,
    ),
)
@example(0, 2, 3, Durability.REMOTE, [("drain", 0, 2.0), ("drain", 1, 0.0), ("lose", 1, 0.0)])
def test_nothing_is_lost_and_nothing_hangs_whatever_nodes_do(
    seed: int,
    num_nodes: int,
    num_free: int,
    durability: Durability,
    happens: list[tuple[str, int, float]],
) -> None:
    config = replace(CONFIG, seal_every=2, node_grace_s=GRACE_S)
    names = {f"t{index}": "train" for index in range(num_nodes + num_free)}
    world = World(config=config, node_names=names, seed=seed, write_s=1.0)
    policy = spec("policy", "train", trainable=True, num_ranks=num_nodes, num_nodes=num_nodes)
    job = JobSpec(deployments=[policy], cycle=CYCLE_OF_TRAINING, durability=durability)
    world.later(0, JobSubmitted(JobKey(TENANT, "a"), job, "submit"))
    world.run()
    kinds = ["forward_backward", "optim_step", "publish_weights", "save_state"] * 5
    for seq, kind in enumerate(kinds, start=1):
        world.queue("a", "policy", seq, kind)
    down: set[str] = set()
    for what, number, then_s in happens:
        node = sorted(names)[number % len(names)]
        if what in ("drain", "undo"):
            world.feed(NodeDrainRequested(NodeId(node), "request", undo=what == "undo"))
        elif what == "lose" and node not in down:
            down.add(node)
            lose(world, node)
        elif what == "back":
            down.discard(node)
            world.lose_node(node)
            world.bring_back(node)
        elif what == "kill" and POLICY in world.ranks:
            world.kill(POLICY)
        after(world, then_s)
    for node in sorted(names):
        world.feed(NodeDrainRequested(NodeId(node), "request", undo=True))
    for node in sorted(down):
        world.bring_back(node)
    world.run()
    assert [world.done[f"{POLICY}.{seq}"] for seq in range(1, len(kinds) + 1)] == [
        Outcome.COMPLETED
    ] * len(kinds)
    mutations = [seq for seq in range(1, len(kinds) + 1) if seq % 4 in (1, 2)]
    assert world.states()[POLICY] == tuple(mutations)
    _, made = restored_at_every_step(world.log)
    assert made == world.outputs
    world.feed(JobFinished(JobKey(TENANT, "a"), "end"))
    world.run()
    assert not any(world.files.values())
    assert world.core.state.stopping == {}


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_nodes=st.integers(1, 2),
    happens=st.lists(
        st.tuples(
            st.sampled_from(["drain", "undo", "back", "kill", "full", "off", "off"]),
            st.integers(0, 5),
            st.sampled_from([0.0, 0.1, 0.7, 2.0, 20.0]),
        ),
        max_size=12,
    ),
)
@example(
    0,
    2,
    [("drain", 0, 20.0), ("drain", 1, 0.0), ("drain", 5, 0.0), ("undo", 1, 0.0), ("back", 1, 0.0)],
)
@example(9, 2, [("drain", 0, 2.0), ("off", 3, 0.0)])
@example(
    1,
    2,
    [("drain", 4, 2.0), ("full", 0, 0.0), ("drain", 2, 0.0), ("drain", 3, 0.0), ("undo", 2, 0.0)],
)
@example(215, 1, [("back", 0, 2.0), ("drain", 0, 0.0), ("back", 0, 0.0)])
def test_drained_nodes_that_nothing_counts_on_are_switched_off_for_good_and_nothing_is_lost(
    seed: int, num_nodes: int, happens: list[tuple[str, int, float]]
) -> None:
    names = [f"t{index}" for index in range(6)]
    config = replace(CONFIG, seal_every=2)
    world = World(config=config, node_names=dict.fromkeys(names, "train"), seed=seed)
    policy = spec("policy", "train", trainable=True, num_ranks=num_nodes, num_nodes=num_nodes)
    job = JobSpec(deployments=[policy], cycle=CYCLE_OF_TRAINING, durability=Durability.REMOTE)
    world.later(0, JobSubmitted(JobKey(TENANT, "a"), job, "submit"))
    world.run()
    kinds = ["forward_backward", "optim_step", "publish_weights"] * 6
    for seq, kind in enumerate(kinds, start=1):
        world.queue("a", "policy", seq, kind)
    off = _disturbed(world, names, happens)
    _lose_one_of_its_nodes(world, names, off)
    for node in sorted(set(names) - off):
        world.feed(NodeDrainRequested(NodeId(node), "request", undo=True))
    world.run()
    assert job_state(world) is JobState.ACTIVE
    assert {world.done[f"{POLICY}.{seq}"] for seq in range(1, len(kinds) + 1)} == {
        Outcome.COMPLETED
    }
    assert world.states()[POLICY] == tuple(seq for seq in range(1, len(kinds) + 1) if seq % 3)
    _, made = restored_at_every_step(world.log)
    assert made == world.outputs
    world.feed(JobFinished(JobKey(TENANT, "a"), "end"))
    world.run()
    for node in sorted(off):
        world.bring_back(node)
    world.run()
    assert not any(world.files.values())


def _disturbed(world: World, names: list[str], happens: list[tuple[str, int, float]]) -> set[str]:
    """Returns: nodes that were drained, and switched off once nothing counted on them."""
    off: set[str] = set()
    for what, number, then_s in happens:
        node = names[number]
        if node in off:
            continue
        if what in ("drain", "undo"):
            world.feed(NodeDrainRequested(NodeId(node), "request", undo=what == "undo"))
        elif what == "back":
            world.lose_node(node)
            world.bring_back(node)
        elif what == "kill" and POLICY in world.ranks:
            world.kill(POLICY)
        elif what == "full":
            full = ErrorInfo(Code.RESOURCE_EXHAUSTED, "the disk is full")
            world.mirror_error = None if world.mirror_error else full
        elif what == "off":
            known = status(world, node)
            if known.deployments or known.waits_for:
                continue
            lose(world, node)
            status(world, node, gone=True)
            off.add(node)
        after(world, then_s)
    return off


def _lose_one_of_its_nodes(world: World, names: list[str], off: set[str]) -> None:
    """For good, unasked: what `remote` is for."""
    world.mirror_error = None
    world.run()
    staying = set(names) - world.core.state.closing.keys()
    copies = world.core.state.deployments[str(POLICY)].durability.replicas
    is_safe = all(len(staying.intersection(part)) >= 2 for part in copies)
    free = staying - set(nodes(world)) - {node for part in copies for node in part}
    assert is_safe or not free, "there was room for copies"
    if is_safe and len(staying) > len(nodes(world)):
        home = nodes(world)[0]
        lose(world, home)
        status(world, home, gone=True)
        off.add(home)
