"""Draining a job, and deployments that come and go while it runs."""

from __future__ import annotations

from typing import TypeVar

import pytest
from msgspec.structs import replace

from phaseloom.common.contract.api import JobStatus
from phaseloom.common.contract.commands import Permit, ReleaseVersions, StartWpg, StopWpg
from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.common.contract.events import (
    DeploymentCreated,
    DeploymentDeleted,
    DrainRequested,
    JobFinished,
)
from phaseloom.common.contract.ids import DeploymentKey, JobKey, NodeId, OperationKey, VersionKey
from phaseloom.common.contract.operations import Outcome
from phaseloom.common.contract.specs import DeploymentSpec, Layout
from phaseloom.scheduler.core.core import Core
from phaseloom.scheduler.core.state import outputs
from phaseloom.scheduler.core.state.outputs import Answer
from phaseloom.scheduler.core.state.transitions import JobState, WpgState
from tests.support.world import CONFIG, TENANT, World, deployment, lost, node_up, spec

T = TypeVar("T")

A = JobKey(TENANT, "a")
POLICY = deployment("a", "policy")
SAMPLER = deployment("a", "sampler")
JUDGE = deployment("a", "judge")
COMPLETED, FAILED = Outcome.COMPLETED, Outcome.FAILED


def ready(world: World | None = None) -> World:
    """Job a is active, nothing queued."""
    world = world or World()
    world.submit("a")
    world.run()
    return world


def key(name: str, slot: int | str) -> OperationKey:
    return OperationKey(TENANT, "a", name, str(slot))


def ask(world: World, event: DrainRequested | DeploymentCreated | DeploymentDeleted) -> Answer:
    answers = [o for o in world.feed(event) if isinstance(o, Answer)]
    assert [answer.request for answer in answers] == [event.request]
    return answers[0]


def drain(world: World) -> Answer:
    return ask(world, DrainRequested(A, f"drain-{len(world.log)}"))


def create(world: World, new: DeploymentSpec) -> Answer:
    return ask(world, DeploymentCreated(A, new, f"create-{len(world.log)}"))


def delete(world: World, name: str) -> Answer:
    return ask(world, DeploymentDeleted(deployment("a", name), f"delete-{len(world.log)}"))


def status(answer: Answer) -> JobStatus:
    assert answer.status is not None, answer.error
    return answer.status


def refused(answer: Answer) -> ErrorInfo:
    assert answer.error is not None, answer.status
    return answer.error


def sent(world: World, kind: type[T]) -> list[T]:
    return [command for command in world.commands if isinstance(command, kind)]


def error_of(world: World, op: OperationKey) -> ErrorInfo:
    """That the scheduler wrote as an operation's outcome."""
    written = [o for made in world.outputs for o in made if isinstance(o, outputs.WriteCompletion)]
    error = next(o.completion.error for o in reversed(written) if o.key == op)
    assert error is not None
    return error


def until_permitted(world: World, op: OperationKey) -> None:
    for _ in range(1000):
        if any(command.operation == op for command in sent(world, Permit)):
            return
        world.run(until_s=world.now_s + 0.005)
        world.now_s += 0.005
    raise AssertionError(f"{op} has no permit")


# --- drain --------------------------------------------------------------------------------------


def test_drained_job_ends_done_once_what_was_open_has_ended() -> None:
    world = ready()
    world.queue("a", "policy", 1, "forward_backward")
    world.queue("a", "policy", 2, "publish_weights")
    world.queue("a", "sampler", 1, "sync_weights", after=(("policy", 2),), version=2)
    world.queue("a", "sampler", "rone", "generate", after=(("policy", 2),))
    until_permitted(world, key("policy", 1))
    assert status(drain(world)).state == "draining"
    world.queue("a", "policy", 3, "optim_step")
    world.run()
    assert world.done == {
        "t.a.policy.1": COMPLETED,
        "t.a.policy.2": COMPLETED,
        "t.a.policy.3": FAILED,
        "t.a.sampler.1": COMPLETED,
        "t.a.sampler.rone": COMPLETED,
    }
    refusal = error_of(world, key("policy", 3))
    assert (refusal.code, "is draining" in refusal.message) == (
        Code.FAILED_PRECONDITION,
        True,
    )
    assert world.core.state.jobs["t.a"].state is JobState.DONE
    assert all(d.wpg.state is WpgState.STOPPED for d in world.core.state.deployments.values())


def test_idle_job_ends_at_once_when_it_is_drained() -> None:
    world = ready()
    assert status(drain(world)).state == "done"
    assert status(drain(world)).state == "done"


def test_operation_behind_what_was_never_published_does_not_hold_a_drain_up() -> None:
    """2 may be on its way still: it is refused when it comes."""
    world = ready()
    world.queue("a", "policy", 1, "optim_step")
    world.queue("a", "policy", 3, "optim_step")
    world.queue("a", "sampler", 1, "generate", after=(("policy", 3),))
    world.queue("a", "sampler", "rone", "generate", after=(("policy", 9),))
    until_permitted(world, key("policy", 1))
    drain(world)
    world.queue("a", "policy", 2, "optim_step")
    world.run()
    assert world.done == {
        "t.a.policy.1": COMPLETED,
        "t.a.policy.2": FAILED,
        "t.a.policy.3": FAILED,
        "t.a.sampler.1": FAILED,
        "t.a.sampler.rone": FAILED,
    }
    assert "policy 2, which must run first" in error_of(world, key("policy", 3)).message
    assert "is draining" in error_of(world, key("policy", 2)).message
    assert world.core.state.jobs["t.a"].state is JobState.DONE


def test_workers_that_die_while_the_job_drains_are_rebuilt_for_what_is_open() -> None:
    world = ready()
    for seq in (1, 2, 3):
        world.queue("a", "policy", seq, "optim_step")
    until_permitted(world, key("policy", 2))
    drain(world)
    world.kill(POLICY)
    world.run()
    assert set(world.done.values()) == {COMPLETED}
    assert world.core.state.jobs["t.a"].state is JobState.DONE


def test_draining_job_can_be_cancelled() -> None:
    world = ready()
    world.queue("a", "policy", 1, "optim_step")
    until_permitted(world, key("policy", 1))
    drain(world)
    world.feed(JobFinished(A, "cancel", failed=True))
    assert world.core.state.jobs["t.a"].state is JobState.FAILED


def test_job_without_a_place_is_not_drained() -> None:
    world = World(config=replace(CONFIG, placement="isolated"))
    world.submit("first")
    ready(world)
    assert refused(drain(world)).code is Code.FAILED_PRECONDITION
    nobody = DrainRequested(JobKey(TENANT, "nobody"), "drain")
    assert refused(ask(world, nobody)).code is Code.NOT_FOUND


# --- create -------------------------------------------------------------------------------------


def test_created_deployment_starts_beside_the_others_and_runs() -> None:
    world = ready()
    world.later(0, node_up("r1", "rollout"))
    world.run()
    shown = status(create(world, spec("judge", "rollout")))
    assert shown.state == "active"
    assert [d.name for d in shown.deployments][-1] == "judge"
    assert shown.deployments[-1].node == shown.deployments[0].node, "where the job is already"
    world.queue("a", "judge", 1, "forward")
    world.queue("a", "sampler", 1, "generate", after=(("judge", 1),))
    world.run()
    assert set(world.done.values()) == {COMPLETED}


def test_created_deployment_goes_elsewhere_where_the_jobs_node_cannot_take_it() -> None:
    world = ready()
    world.later(0, node_up("r1", "rollout", num_devices=2))
    world.run()
    create(world, spec("judge", "rollout", num_ranks=2))
    world.run()
    assert world.core.state.deployments[str(JUDGE)].node == NodeId("r1")
    assert world.core.state.deployments[str(JUDGE)].wpg.state is WpgState.READY


@pytest.mark.parametrize(
    ("new", "code", "field"),
    [
        (spec("sampler", "rollout"), Code.ALREADY_EXISTS, "spec.name"),
        (spec("judge", "gpu"), Code.UNAVAILABLE, "spec.pool"),
        (
            replace(spec("judge", "rollout"), layout=Layout(dp=4)),
            Code.RESOURCE_EXHAUSTED,
            "spec.layout",
        ),
    ],
    ids=["exists", "pool", "devices"],
)
def test_deployment_that_cannot_be_added_is_refused(
    new: DeploymentSpec, code: Code, field: str
) -> None:
    world = ready()
    before = Core.restore(world.core.snapshot()).state.deployments
    error = refused(create(world, new))
    assert (error.code, error.field) == (code, field)
    assert world.core.state.deployments.keys() == before.keys()


def test_job_that_ends_takes_no_deployment() -> None:
    world = ready()
    world.queue("a", "policy", 1, "optim_step")
    until_permitted(world, key("policy", 1))
    drain(world)
    assert refused(create(world, spec("judge", "rollout"))).code is Code.FAILED_PRECONDITION
    world.run()
    assert refused(create(world, spec("judge", "rollout"))).code is Code.FAILED_PRECONDITION
    assert refused(delete(world, "sampler")).code is Code.FAILED_PRECONDITION


def test_deployment_created_while_its_job_waits_is_placed_with_it() -> None:
    world = World(config=replace(CONFIG, placement="isolated"))
    world.submit("first")
    ready(world)
    assert status(create(world, spec("judge", "rollout"))).state == "submitted"
    world.feed(JobFinished(JobKey(TENANT, "first"), "finish"))
    world.run()
    assert world.core.state.jobs["t.a"].state is JobState.ACTIVE
    assert world.core.state.deployments[str(JUDGE)].wpg.state is WpgState.READY


def test_created_deployment_that_cannot_start_ends_alone() -> None:
    world = ready()
    create(world, spec("judge", "rollout"))
    world.queue("a", "judge", 1, "forward")
    started = sent(world, StartWpg)[-1]
    world.ranks.pop(JUDGE)
    refusal = ErrorInfo(Code.INVALID_ARGUMENT, "no such model", field="spec.model")
    world.feed(replace(lost(JUDGE, started.incarnation, started.node), error=refusal))
    world.queue("a", "policy", 1, "optim_step")
    world.run()
    job = world.core.state.jobs["t.a"]
    assert job.state is JobState.ACTIVE
    assert world.core.state.deployments[str(JUDGE)].wpg.error == refusal
    assert world.done == {"t.a.judge.1": FAILED, "t.a.policy.1": COMPLETED}
    world.queue("a", "judge", 2, "forward")
    world.run()
    assert "could not start: no such model" in error_of(world, key("judge", 2)).message
    delete(world, "judge")
    create(world, spec("judge", "rollout"))
    world.queue("a", "judge", 3, "forward")
    world.run()
    assert world.done["t.a.judge.3"] is COMPLETED


# --- delete -------------------------------------------------------------------------------------


def test_deleted_deployment_ends_its_operations_and_those_that_come_after_them() -> None:
    world = ready()
    world.queue("a", "sampler", 1, "generate")
    world.queue("a", "sampler", 2, "generate", after=(("policy", 7),))
    world.queue("a", "reference", 1, "forward", after=(("sampler", 2),))
    world.queue("a", "reference", 2, "forward", after=(("sampler", 9),))
    until_permitted(world, key("sampler", 1))
    shown = status(delete(world, "sampler"))
    assert [d.name for d in shown.deployments] == ["reference", "policy"]
    for seq in (1, 2):
        assert error_of(world, key("sampler", seq)).code is Code.ABORTED
    world.queue("a", "reference", 3, "forward")
    world.queue("a", "sampler", 3, "generate")
    world.run()
    assert world.done["t.a.reference.3"] is COMPLETED
    for name, seq in (("reference", 1), ("reference", 2), ("sampler", 3)):
        assert error_of(world, key(name, seq)).code is Code.NOT_FOUND, (name, seq)
    stop = sent(world, StopWpg)[-1]
    assert (stop.deployment, stop.forget) == (SAMPLER, True)
    assert not world.core.state.stopping, "its node has confirmed"


def test_name_of_a_deleted_deployment_goes_on_behind_its_last_operation() -> None:
    world = ready()
    for seq in (1, 2):
        world.queue("a", "sampler", seq, "generate")
    world.run()
    delete(world, "sampler")
    world.queue("a", "sampler", 3, "generate")  # it comes too late, and has its outcome
    world.run()
    shown = status(create(world, spec("sampler", "rollout")))
    assert shown.deployments[-1].next_seq == 4
    world.queue("a", "sampler", 4, "generate")
    world.queue("a", "policy", 1, "optim_step", after=(("sampler", 4),))
    world.queue("a", "policy", 2, "optim_step", after=(("sampler", 2),))
    world.run()
    assert world.done["t.a.policy.1"] is COMPLETED
    assert world.done["t.a.policy.2"] is FAILED, "that was another sampler"
    incarnations = [s.incarnation for s in sent(world, StartWpg) if s.deployment == SAMPLER]
    assert incarnations == sorted(set(incarnations))


def test_version_of_a_deleted_policy_stays_until_nobody_needs_it() -> None:
    world = ready()
    version = VersionKey(POLICY, 2)
    world.queue("a", "policy", 1, "optim_step")
    world.queue("a", "policy", 2, "publish_weights")
    world.queue("a", "sampler", 1, "sync_weights", after=(("policy", 2),), version=2)
    world.queue("a", "reference", 1, "sync_weights", after=(("policy", 2),), version=2)
    until_permitted(world, key("sampler", 1))
    delete(world, "policy")
    world.run()
    assert world.done["t.a.reference.1"] is COMPLETED, "from where the policy was"
    assert sent(world, Permit)[-1].sources == ["t0:1"]
    assert not any(version in release.versions for release in sent(world, ReleaseVersions))
    world.kill(SAMPLER)  # it is rebuilt from that version
    world.run()
    assert world.core.state.deployments[str(SAMPLER)].wpg.state is WpgState.READY
    create(world, spec("policy", "train", trainable=True))
    world.queue("a", "policy", 3, "publish_weights")
    world.run()
    assert version in world.versions, "the new policy's is another"
    for name in ("sampler", "reference"):
        world.queue("a", name, 2, "sync_weights", after=(("policy", 3),), version=3)
    world.run()
    assert version not in world.versions
    assert world.core.state.jobs["t.a"].versions.retained == {}
    assert world.core.state.jobs["t.a"].versions.published == [VersionKey(POLICY, 3)]


def test_deleted_policy_is_forgotten_with_the_last_version_of_it() -> None:
    world = ready()
    world.queue("a", "policy", 1, "publish_weights")
    world.queue("a", "sampler", 1, "sync_weights", after=(("policy", 1),), version=1)
    world.run()
    delete(world, "policy")
    world.run()
    assert [stop.forget for stop in sent(world, StopWpg)] == [False]
    delete(world, "sampler")
    world.run()
    assert {s.deployment: s.forget for s in sent(world, StopWpg)} == {POLICY: True, SAMPLER: True}
    assert not world.versions
    assert world.core.state.jobs["t.a"].versions.retained == {}


def test_job_that_ends_leaves_nothing_of_a_policy_deleted_before() -> None:
    world = ready()
    world.queue("a", "policy", 1, "publish_weights")
    world.queue("a", "sampler", 1, "sync_weights", after=(("policy", 1),), version=1)
    world.run()
    delete(world, "policy")
    world.feed(JobFinished(A, "finish"))
    world.run()
    assert not world.versions
    assert not world.core.state.stopping
    assert world.core.state.jobs["t.a"].versions.retained == {}


def test_sync_that_waits_for_a_policy_to_be_rebuilt_is_let_go_when_it_is_deleted() -> None:
    """Its workers tell whether the version is still there."""
    world = ready()
    world.queue("a", "policy", 1, "publish_weights")
    world.run()
    world.kill(POLICY)
    world.queue("a", "sampler", 1, "sync_weights", after=(("policy", 1),), version=1)
    world.run(until_s=world.now_s + 0.1)
    assert not sent(world, Permit)[1:], "it waits"
    delete(world, "policy")
    world.run()
    assert world.done["t.a.sampler.1"] is COMPLETED


def test_only_deployment_of_a_job_is_not_deleted() -> None:
    world = ready()
    assert refused(delete(world, "judge")).code is Code.NOT_FOUND
    for name in ("sampler", "reference"):
        delete(world, name)
    assert refused(delete(world, "policy")).code is Code.FAILED_PRECONDITION
    nobody = DeploymentDeleted(DeploymentKey(TENANT, "nobody", "policy"), "delete")
    assert refused(ask(world, nobody)).code is Code.NOT_FOUND
