"""Operations that read a weights version by its name: how long it stays, and who may read it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from phaseloom.common.contract.commands import Permit, ReleaseVersions
from phaseloom.common.contract.errors import Code
from phaseloom.common.contract.events import (
    DeploymentDeleted,
    JobFinished,
    JobSubmitted,
    QueuedOperation,
)
from phaseloom.common.contract.ids import JobKey, OperationKey, VersionKey
from phaseloom.common.contract.operations import Outcome
from phaseloom.common.contract.specs import (
    Adapter,
    DeploymentSpec,
    JobSpec,
    ModelDirectory,
    ModelFile,
    ModelSpec,
    SchedulerConfig,
)
from phaseloom.scheduler.core.core import Core
from phaseloom.scheduler.core.dispatch import ready
from phaseloom.scheduler.core.state import outputs
from phaseloom.scheduler.core.state.step import Step
from phaseloom.scheduler.core.validate import validate
from tests.support.world import CONFIG, TENANT, World, deployment, spec

POLICY = deployment("a", "policy")
ADAPTER = Adapter(rank=4, targets=("q_proj", "v_proj"))
TTL_S = 100.0
_QUIET_S = 5.0
"""Longer than what is queued takes to end."""


def model(adapter: Adapter | None = ADAPTER, blake3: str = "b3") -> ModelSpec:
    files = ModelDirectory("/models/tiny", [ModelFile("model.safetensors", 1, blake3)])
    return ModelSpec({"model_type": "llama"}, registered="tiny", pinned=files, adapter=adapter)


def sampler(own: ModelSpec | None = None, **changes: Any) -> DeploymentSpec:
    own = model() if own is None else own
    return replace(spec("sampler", "rollout"), model=own, max_adapters=2, **changes)


def trainer(adapter: Adapter) -> DeploymentSpec:
    """A trainer, in place of the sampler."""
    return replace(sampler(model(adapter)), max_adapters=0, trainable=True)


def submit(world: World, job: str, *specs: DeploymentSpec) -> None:
    world.later(0, JobSubmitted(JobKey(TENANT, job), JobSpec(deployments=[*specs]), f"do-{job}"))


def queue(
    world: World,
    job: str,
    name: str,
    slot: int | str,
    kind: str,
    version: VersionKey | None = None,
    ttl_s: float = 0.0,
    payer: str = "",
) -> str:
    key = OperationKey(TENANT, job, name, str(slot))
    event = QueuedOperation(key, f"id-{key}", kind, version=version, ttl_s=ttl_s, payer=payer)
    world.kinds[key.deployment_key, slot] = kind
    world.payloads[str(key)] = event
    world.later(0, event)
    return str(key)


def published(*ttls_s: float, config: SchedulerConfig = CONFIG) -> World:
    """A job `a` that has published as many versions, and a job `b` with a sampler."""
    world = World(config=config)
    policy = replace(spec("policy", "train", trainable=True), model=model())
    submit(world, "a", policy, spec("sampler", "rollout"))
    submit(world, "b", sampler())
    for seq, ttl_s in enumerate(ttls_s, 1):
        queue(world, "a", "policy", seq, "publish_weights", ttl_s=ttl_s)
    settle(world)
    return world


def settle(world: World, quiet_s: float = _QUIET_S) -> None:
    until_s = world.now_s + quiet_s
    world.run(until_s)
    world.now_s = until_s
    validate(world.core.state)


def there(world: World) -> list[int]:
    return sorted(version.seq for version in world.versions)


def refusal(world: World, key: str) -> tuple[Code, str]:
    written = [
        output.completion
        for made in world.outputs
        for output in made
        if isinstance(output, outputs.WriteCompletion) and str(output.key) == key
    ]
    assert written, f"{key} was not refused"
    error = written[0].error
    assert error is not None
    assert error.remedy
    return error.code, error.field


def test_devices_time_counts_as_that_of_the_job_whose_weights_are_read() -> None:
    """Of a version, and of a checkpoint, which may be that of a job that is gone."""
    world = published(TTL_S)
    before_s = device_s(world, "a")
    queue(world, "b", "sampler", 1, "generate", VersionKey(POLICY, 1), payer="a")
    queue(world, "b", "sampler", 2, "forward", payer="a")
    queue(world, "b", "sampler", 3, "forward")
    queue(world, "b", "sampler", 4, "forward", payer="gone")
    settle(world)
    ran_s = [end_s - start_s for start_s, end_s, key in world.runs if ".b.sampler." in key]
    assert len(ran_s) == 4
    assert device_s(world, "a") - before_s == pytest.approx(sum(ran_s[:2]))
    assert device_s(world, "b") == pytest.approx(sum(ran_s[2:]))


def test_operations_of_several_jobs_take_turns_where_not_all_have_room() -> None:
    """One job's many requests kept those of another waiting until all of them had begun."""
    world = published(TTL_S, config=replace(CONFIG, max_reading=4))
    flood = [queue(world, "b", "sampler", f"f{n}", "generate", payer="a") for n in range(40)]
    few = [queue(world, "b", "sampler", f"g{n}", "generate", payer="c") for n in range(3)]
    own = queue(world, "b", "sampler", "own", "forward")
    settle(world)
    began = [str(c.operation) for c in world.commands if isinstance(c, Permit)]
    order = [key for key in began if ".b.sampler." in key]
    assert sorted(order) == sorted([*flood, *few, own])
    # The first four had begun before the others came.
    assert order[:4] == flood[:4]
    assert {*few, own} <= {*order[4:12]}
    assert [key for key in order if key in flood] == flood
    world.check_replay(snapshot_every=1)


def test_job_whose_weights_are_named_is_the_one_that_is_kept_waiting() -> None:
    """Its SLO counts, and the wait is its: the sampler's job may have none."""
    world = published(TTL_S)
    queue(world, "b", "sampler", 1, "generate")
    settle(world)
    jobs = world.core.state.jobs
    jobs["t.a"].spec = replace(jobs["t.a"].spec, slo=2.0)  # placement would keep it apart
    before = jobs["t.a"].progress.lag_s, jobs["t.b"].progress.lag_s
    queue(world, "a", "sampler", 1, "generate")
    queue(world, "b", "sampler", 2, "generate", VersionKey(POLICY, 1), payer="a")
    queue(world, "b", "sampler", 3, "generate", VersionKey(POLICY, 1), payer="a")
    world.run(until_s=world.now_s)
    state = world.core.state
    waiting = state.deployments["t.b.sampler"].queue
    step = Step(state, state.sequence, world.now_s)
    ops = [op for op in waiting.operations.values() if op.payer]
    assert len(ops) == 2
    assert all(ready.slack_s(step, state.deployments["t.b.sampler"], op) < 1e9 for op in ops)
    queued_s = world.now_s
    settle(world)
    began_s = [start_s for start_s, _, key in world.runs if key == "t.b.sampler.2"]
    waited_s = began_s[0] - queued_s
    assert waited_s > 0
    assert state.jobs["t.a"].progress.lag_s - before[0] >= waited_s
    assert state.jobs["t.b"].progress.lag_s == before[1]


def device_s(world: World, job: str) -> float:
    return sum(world.core.state.jobs[f"{TENANT}.{job}"].device_s.values())


def test_version_stays_for_its_time_after_newer_ones_and_after_each_reading() -> None:
    world = published(TTL_S, 0.0, 0.0)
    assert there(world) == [1, 3], "the second was for nobody once there was a third"
    settle(world, TTL_S - 3 * _QUIET_S)
    read = queue(world, "b", "sampler", "r1", "generate", VersionKey(POLICY, 1))
    settle(world)
    assert world.done[read] is Outcome.COMPLETED
    [permit] = [c for c in world.commands if isinstance(c, Permit) and str(c.operation) == read]
    assert permit.adapter == ADAPTER
    assert permit.ticket is not None
    assert permit.ticket.version == VersionKey(POLICY, 1)
    settle(world, TTL_S - 2 * _QUIET_S)
    assert there(world) == [1, 3], "its time began anew"
    settle(world, 3 * _QUIET_S)
    assert there(world) == [3]
    nodes = {c.node for c in world.commands if isinstance(c, ReleaseVersions)}
    assert nodes == {"t0", "r0"}, "the sampler's node has a copy"


def test_version_stays_while_an_operation_names_it() -> None:
    world = published(0.0)
    reads = [
        queue(world, "b", "sampler", slot, "generate", VersionKey(POLICY, 1))
        for slot in (2, "r1")  # the first waits for operation 1
    ]
    queue(world, "a", "policy", 2, "publish_weights")
    settle(world)
    assert there(world) == [1, 2]
    restored = Core.restore(world.core.snapshot())
    assert restored.state == world.core.state
    queue(world, "b", "sampler", 1, "generate")
    settle(world)
    assert [world.done[read] for read in reads] == [Outcome.COMPLETED] * 2
    assert there(world) == [2]
    late = queue(world, "b", "sampler", 3, "generate", VersionKey(POLICY, 1))
    settle(world)
    assert refusal(world, late) == (Code.NOT_FOUND, "args.weights.version")


@pytest.mark.parametrize(
    ("reader", "field"),
    [
        (replace(sampler(), max_adapters=0), "args.weights"),
        (trainer(replace(ADAPTER, alpha=3.0)), "args.weights"),
        (trainer(replace(ADAPTER, rank=8)), "args.weights"),
        (sampler(model(adapter=None)), "args.weights"),
        (sampler(model(blake3="another")), "args.weights"),
        (sampler(model(Adapter(rank=3, targets=ADAPTER.targets))), "args.weights"),
        (sampler(model(Adapter(rank=8, targets=("q_proj",)))), "args.weights"),
    ],
)
def test_deployment_that_cannot_read_the_version_refuses(
    reader: DeploymentSpec, field: str
) -> None:
    world = published(TTL_S)
    submit(world, "c", reader)
    read = queue(world, "c", "sampler", "r1", "forward", VersionKey(POLICY, 1))
    settle(world)
    assert refusal(world, read) == (Code.FAILED_PRECONDITION, field)


def test_trainer_reads_an_adapter_that_could_take_the_place_of_its_own() -> None:
    world = published(TTL_S)
    submit(world, "c", trainer(replace(ADAPTER, seed=7)))
    read = queue(world, "c", "sampler", "r1", "forward", VersionKey(POLICY, 1))
    settle(world)
    assert world.done[read] is Outcome.COMPLETED


@pytest.mark.parametrize("adapter", [ADAPTER, None], ids=["adapter", "all weights"])
def test_deployment_over_several_nodes_reads_versions_of_its_kind_alone(
    adapter: Adapter | None,
) -> None:
    """All of its nodes may ask for the version; a deployment of the other kind refuses."""
    world = World(node_names={"t0": "train", "r0": "rollout", "r1": "rollout"})
    kinds = {"same": model(adapter), "other": model(None if adapter else ADAPTER)}
    submit(world, "a", replace(spec("policy", "train", trainable=True), model=kinds["same"]))
    for name, own in kinds.items():
        room = 2 if own.adapter else 0
        reader = spec("sampler", "rollout", num_ranks=2, num_nodes=2)
        submit(world, name, replace(reader, model=own, max_adapters=room))
    queue(world, "a", "policy", 1, "publish_weights", ttl_s=TTL_S)
    settle(world)
    read, misfit = (
        queue(world, name, "sampler", "r1", "generate", VersionKey(POLICY, 1)) for name in kinds
    )
    settle(world)
    assert world.done[read] is Outcome.COMPLETED
    [permit] = [c for c in world.commands if isinstance(c, Permit) and str(c.operation) == read]
    assert permit.adapter == adapter
    assert permit.ticket is not None
    assert sorted(permit.ticket.nodes) == ["r0", "r1"]
    assert refusal(world, misfit) == (Code.FAILED_PRECONDITION, "args.weights")


@pytest.mark.parametrize("is_killed", [False, True])
def test_operation_may_name_a_version_whose_end_the_log_does_not_have_yet(is_killed: bool) -> None:
    """Its caller has the outcome before the log has it: the version was said not to exist."""
    world = published()
    queue(world, "a", "policy", 1, "publish_weights", ttl_s=TTL_S)
    while not world.core.state.deployments[str(POLICY)].activation.running:
        world.run(until_s=world.next_s)
    if is_killed:
        world.kill(POLICY)
    read = queue(world, "b", "sampler", "r1", "generate", VersionKey(POLICY, 1))
    settle(world)
    assert world.done[read] is Outcome.COMPLETED
    never = queue(world, "b", "sampler", "r2", "generate", VersionKey(POLICY, 2))
    settle(world)
    assert refusal(world, never) == (Code.NOT_FOUND, "args.weights.version")


def test_version_of_nobody_is_not_found() -> None:
    world = published(TTL_S)
    for slot, job, seq, field in (
        ("r1", "a", 7, "args.weights.version"),
        ("r2", "nobody", 1, "args.weights.job"),
    ):
        version = VersionKey(deployment(job, "policy"), seq)
        read = queue(world, "b", "sampler", slot, "generate", version)
        settle(world)
        assert refusal(world, read) == (Code.NOT_FOUND, field)


@pytest.mark.parametrize("is_deleted", [True, False])
def test_versions_that_may_be_named_end_with_their_policy(is_deleted: bool) -> None:
    world = published(TTL_S, 0.0)
    waiting = queue(world, "b", "sampler", 2, "generate", VersionKey(POLICY, 1))
    settle(world)
    if is_deleted:
        world.later(0, DeploymentDeleted(POLICY, "delete"))
    else:
        world.later(0, JobFinished(JobKey(TENANT, "a"), "finish"))
    settle(world)
    late = queue(world, "b", "sampler", "r1", "generate", VersionKey(POLICY, 1))
    settle(world)
    assert refusal(world, late) == (Code.NOT_FOUND, "args.weights.version")
    if is_deleted:  # the one that was named before is read yet
        queue(world, "b", "sampler", 1, "generate")
        settle(world)
        assert world.done[waiting] is Outcome.COMPLETED
    settle(world, 2 * TTL_S)
    assert there(world) == []


def test_reading_waits_until_its_version_is_made_again() -> None:
    world = published(TTL_S)
    world.kill(POLICY)
    read = queue(world, "b", "sampler", "r1", "generate", VersionKey(POLICY, 1))
    settle(world)
    assert world.done[read] is Outcome.COMPLETED
