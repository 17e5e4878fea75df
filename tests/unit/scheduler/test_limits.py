"""Limits of a tenant's jobs, deployments, ranks and names."""

from __future__ import annotations

from msgspec.structs import replace

from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.common.contract.events import (
    DeploymentCreated,
    DeploymentDeleted,
    Event,
    JobFinished,
    JobSubmitted,
)
from phaseloom.common.contract.ids import DeploymentKey, JobKey
from phaseloom.common.contract.operations import Outcome
from phaseloom.common.contract.specs import (
    DeploymentSpec,
    JobSpec,
    SchedulerConfig,
    SchedulerSettings,
)
from phaseloom.scheduler.core.state.outputs import Answer, WriteCompletion
from phaseloom.scheduler.core.state.tree import State
from phaseloom.scheduler.main import Config
from tests.support.world import CONFIG, TENANT, World, spec


def limited(**bounds: int) -> World:
    world = World(config=replace(CONFIG, **bounds))
    world.run()
    return world


def error_of(world: World, event: Event) -> ErrorInfo | None:
    (answer,) = (output for output in world.feed(event) if isinstance(output, Answer))
    return answer.error


def submit(world: World, job: str, *specs: DeploymentSpec, tenant: str = TENANT) -> str:
    """Submit a job. Returns: the bound that refused it, or an empty string."""
    deployments = list(specs) or [spec("policy", "train")]
    event = JobSubmitted(JobKey(tenant, job), JobSpec(deployments=deployments), f"submit-{job}")
    return bound_of(error_of(world, event))


def bound_of(error: ErrorInfo | None) -> str:
    if error is None:
        return ""
    assert error.code is Code.RESOURCE_EXHAUSTED
    assert int(error.details["used"]) > int(error.details["limit"])
    assert error.details["bound"] in error.remedy
    assert error.field
    return error.details["bound"]


def create(world: World, job: str, new: DeploymentSpec) -> str:
    return bound_of(error_of(world, DeploymentCreated(JobKey(TENANT, job), new, "create")))


def test_ended_jobs_make_room_and_other_tenants_have_their_own() -> None:
    world = limited(max_jobs=2)
    assert [submit(world, name) for name in "abc"] == ["", "", "max_jobs"]
    assert "t.c" not in world.core.state.jobs
    assert submit(world, "c", tenant="other") == ""
    world.feed(JobFinished(JobKey(TENANT, "a"), "finish"))
    assert submit(world, "c") == ""
    assert submit(world, "a") == "max_jobs"
    world.check_replay(snapshot_every=1)


def test_deployments_of_all_jobs_count() -> None:
    world = limited(max_deployments=3)
    assert submit(world, "a", spec("policy", "train"), spec("sampler", "rollout")) == ""
    assert submit(world, "b", spec("policy", "train"), spec("sampler", "rollout")) == (
        "max_deployments"
    )
    assert create(world, "a", spec("judge", "rollout")) == ""
    assert create(world, "a", spec("other", "rollout")) == "max_deployments"
    world.feed(DeploymentDeleted(DeploymentKey(TENANT, "a", "judge"), "delete"))
    assert create(world, "a", spec("other", "rollout")) == ""


def test_ranks_count_and_not_only_deployments() -> None:
    world = limited(max_ranks=8)
    assert submit(world, "a", spec("policy", "train", num_ranks=9)) == "max_ranks"
    assert submit(world, "a", spec("policy", "elsewhere", num_ranks=8)) == ""
    assert submit(world, "b") == "max_ranks"


def test_names_of_ended_jobs_and_deleted_deployments_count() -> None:
    world = limited(max_names=3)
    for name in ("a", "b", "c"):
        assert submit(world, name) == ""
        world.feed(JobFinished(JobKey(TENANT, name), "finish"))
    assert submit(world, "d") == "max_names"
    assert submit(world, "a") == "", "its name exists already"
    for name in ("x", "y"):
        assert create(world, "a", spec(name, "rollout")) == ""
        world.feed(DeploymentDeleted(DeploymentKey(TENANT, "a", name), "delete"))
    assert create(world, "a", spec("z", "rollout")) == "max_names"
    assert create(world, "a", spec("y", "rollout")) == ""


def publish(world: World, seq: int, ttl_s: float) -> None:
    event = world.queue("a", "policy", seq, "publish_weights")
    world.drop(lambda pending: pending is event)
    world.later(0, replace(event, ttl_s=ttl_s))


def test_versions_that_may_be_named_count_from_when_they_are_queued_until_they_expire() -> None:
    world = World(config=replace(CONFIG, max_versions=2))
    world.submit("a")
    world.run()
    for seq, ttl_s in ((1, 100.0), (2, 0.0), (3, 100.0), (4, 100.0), (5, 0.0)):
        publish(world, seq, ttl_s)
    world.run(until_s=world.now_s + 10)
    failed = [key for key, outcome in world.done.items() if outcome is not Outcome.COMPLETED]
    assert failed == ["t.a.policy.4"]
    written = [o for made in world.outputs for o in made if isinstance(o, WriteCompletion)]
    assert [bound_of(o.completion.error) for o in written] == ["max_versions"]
    world.run()  # They expire.
    for seq in (6, 8):
        publish(world, seq, 100.0)
    world.run(until_s=world.now_s + 10)
    publish(world, 9, 100.0)  # 8 waits behind a gap, and counts.
    world.run(until_s=world.now_s + 10)
    assert world.done["t.a.policy.6"] is Outcome.COMPLETED
    assert world.done["t.a.policy.9"] is Outcome.FAILED
    world.check_replay(snapshot_every=1)


def test_limit_of_one_tenant_replaces_the_default() -> None:
    world = World(config=replace(CONFIG, max_jobs=1, tenant_limits={"big": {"max_jobs": 2}}))
    world.run()
    assert [submit(world, name) for name in "ab"] == ["", "max_jobs"]
    assert [submit(world, name, tenant="big") for name in "abc"] == ["", "", "max_jobs"]


def test_logs_from_before_the_limits_are_replayed_without_them() -> None:
    settings = SchedulerSettings()
    assert settings.max_jobs
    assert SchedulerConfig.of(Config()).max_jobs == settings.max_jobs
    assert CONFIG.max_jobs == CONFIG.max_deployments == CONFIG.max_ranks == CONFIG.max_names == 0
    assert CONFIG.max_versions == 0


def test_bytes_of_outcomes_expire_or_are_dropped_by_the_minute() -> None:
    state = State(config=replace(CONFIG, outcome_retention_s=3600.0))
    for time_s, num_bytes in ((0.0, 1), (59.0, 2), (61.0, 4), (600.0, 8)):
        state.advance(1, time_s)
        state.add_outcome("a", num_bytes)
    state.add_outcome("b", 16)
    assert (state.outcome_bytes("a", 600.0), state.outcome_bytes("b", 600.0)) == (15, 16)
    assert state.outcome_bytes("a", 3661.0) == 12
    state.drop_outcomes("a", before_s=130.0)
    assert (state.outcome_bytes("a", 600.0), state.outcome_bytes("b", 600.0)) == (8, 16)
    state.advance(2, 10_000.0)
    state.add_outcome("a", 32)
    assert state.outcomes["a"] == {166: 32}, "expired minutes are forgotten"
    assert state.outcome_bytes("c", 0.0) == 0
