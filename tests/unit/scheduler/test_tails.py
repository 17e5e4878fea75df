"""The devices that the long tail of a `generate` frees: who gets them, and what comes after."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from phaseloom.common.contract.commands import OpenActivation, Permit
from phaseloom.common.contract.events import JobSubmitted
from phaseloom.common.contract.ids import JobKey
from phaseloom.common.contract.operations import Outcome
from phaseloom.common.contract.specs import Batching, DeploymentSpec, JobSpec, Residency
from tests.support.world import CONFIG, TENANT, World, deployment, node_up, spec


def world_of(
    residency: Residency = Residency.JOB,
    *,
    batching: Batching = Batching.SHARED,
    tail_share: float = 0.2,
    others: tuple[str, ...] = ("b",),
) -> World:
    """A sampler of job a over four devices; others' with a device each."""
    config = replace(CONFIG, max_reading=2, idle_grace_s=5.0)
    world = World(num_devices=4, config=config, gathers=True, duration_s=10.0)
    for name, pool in (("r0", "rollout"), ("t0", "train")):
        up = node_up(name, pool, num_devices=4, revision=2, residency=residency)
        world.later(0, up)
    sampler = replace(
        spec("sampler", "rollout", num_ranks=4), batching=batching, tail_share=tail_share
    )
    submit(world, "a", sampler)
    for job in others:
        submit(world, job, spec("sampler", "rollout"))
    world.run()
    return world


def submit(world: World, job: str, of: DeploymentSpec) -> None:
    world.later(0, JobSubmitted(JobKey(TENANT, job), JobSpec(deployments=[of]), f"submit-{job}"))


def permit_of(world: World, operation: str) -> Permit:
    return next(
        c
        for c in reversed(world.commands)
        if isinstance(c, Permit) and str(c.operation) == f"t.{operation}"
    )


def run_of(world: World, operation: str) -> tuple[float, float]:
    return next((start, end) for start, end, op in reversed(world.runs) if op == f"t.{operation}")


def opened(world: World, job: str) -> int:
    key = deployment(job, "sampler")
    return sum(isinstance(c, OpenActivation) and c.deployment == key for c in world.commands)


def test_another_job_begins_before_the_tail_ends() -> None:
    world = world_of()
    world.queue("a", "sampler", 1, "generate")
    world.queue("b", "sampler", 1, "generate")
    world.run()
    (begun, ended), (other, _) = run_of(world, "a.sampler.1"), run_of(world, "b.sampler.1")
    assert other == pytest.approx(begun + (ended - begun) / 2)
    (kept,) = permit_of(world, "a.sampler.1").tail_on
    (place,) = world.core.state.deployments["t.b.sampler"].places
    assert world.core.state.deployments["t.a.sampler"].places[kept] != place


@pytest.mark.parametrize(("residency", "again"), [(Residency.JOB, 2), (Residency.SHARED, 1)])
def test_needs_an_activation_again_where_another_came_in_its_place(
    residency: Residency, again: int
) -> None:
    world = world_of(residency)
    world.queue("a", "sampler", 1, "generate")
    world.queue("b", "sampler", 1, "generate")
    world.run()
    world.queue("a", "sampler", 2, "generate")
    world.run()
    assert opened(world, "a") == again
    assert set(world.done.values()) == {Outcome.COMPLETED}
    assert len(world.done) == 3


def test_what_follows_waits_for_the_tail() -> None:
    world = world_of()
    world.queue("a", "sampler", 1, "generate")
    world.run(until_s=world.now_s + 1)
    (begun, ended) = run_of(world, "a.sampler.1")
    world.run(until_s=(begun + ended) / 2 + 0.1)
    assert world.core.state.deployments["t.a.sampler"].activation.idle_ranks
    world.queue("a", "sampler", 2, "generate")
    world.run()
    assert run_of(world, "a.sampler.2")[0] >= ended


def test_nothing_is_freed_where_others_have_joined() -> None:
    world = world_of()
    world.queue("a", "sampler", 1, "generate")
    world.queue("a", "sampler", 2, "generate")
    world.queue("b", "sampler", 1, "generate")
    world.run()
    assert run_of(world, "b.sampler.1")[0] >= run_of(world, "a.sampler.1")[1]


def test_ranks_that_die_in_the_tail_leave_others_in_peace() -> None:
    world = world_of()
    world.queue("a", "sampler", 1, "generate")
    world.queue("b", "sampler", 1, "generate")
    world.run(until_s=world.now_s + 1)
    (begun, ended) = run_of(world, "a.sampler.1")
    world.run(until_s=(begun + ended) / 2 + 0.5)
    other = run_of(world, "b.sampler.1")
    world.kill(deployment("a", "sampler"))
    world.run()
    assert run_of(world, "b.sampler.1") == other
    assert len([op for _, _, op in world.runs if op == "t.a.sampler.1"]) == 2
    assert set(world.done.values()) == {Outcome.COMPLETED}


def test_a_newcomer_that_dies_leaves_the_tail_in_peace() -> None:
    world = world_of()
    world.queue("a", "sampler", 1, "generate")
    world.queue("b", "sampler", 1, "generate")
    world.run(until_s=world.now_s + 1)
    (begun, ended) = run_of(world, "a.sampler.1")
    world.run(until_s=(begun + ended) / 2 + 0.5)
    world.kill(deployment("b", "sampler"))
    world.run()
    assert run_of(world, "a.sampler.1") == (begun, ended)
    assert set(world.done.values()) == {Outcome.COMPLETED}


@pytest.mark.parametrize(
    "world",
    [
        world_of(batching=Batching.OPERATION),
        world_of(tail_share=0.0),
        world_of(others=()),
    ],
    ids=["a batch each", "never", "nobody else"],
)
def test_tail_is_not_gathered(world: World) -> None:
    world.queue("a", "sampler", 1, "generate")
    world.run()
    assert permit_of(world, "a.sampler.1").tail_on == []


def test_other_operations_have_no_tail() -> None:
    world = world_of()
    world.queue("a", "sampler", 1, "forward")
    world.run()
    assert permit_of(world, "a.sampler.1").tail_on == []


def over_four(world: World, *jobs: str, **changes: object) -> None:
    """Samplers of other jobs over the same four devices."""
    for job in jobs:
        changed = {"batching": Batching.SHARED, **changes}
        submit(world, job, replace(spec("sampler", "rollout", num_ranks=4), **changed))
    world.run()


def test_another_rollout_over_the_same_devices_begins_without_the_tails() -> None:
    world = world_of(others=())
    over_four(world, "b")
    world.queue("a", "sampler", 1, "generate")
    world.queue("b", "sampler", 1, "generate")
    world.run()
    (begun, ended), (other, _) = run_of(world, "a.sampler.1"), run_of(world, "b.sampler.1")
    assert other == pytest.approx(begun + (ended - begun) / 2)
    first, second = permit_of(world, "a.sampler.1"), permit_of(world, "b.sampler.1")
    assert sorted([*first.tail_on, *second.ranks]) == [0, 1, 2, 3]
    world.queue("a", "sampler", 2, "generate")
    world.queue("b", "sampler", 2, "generate")
    world.run()
    assert set(world.done.values()) == {Outcome.COMPLETED}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("forward", {}),
        ("generate", {"batching": Batching.OPERATION}),
        ("generate", {"tail_share": 0.0}),
    ],
)
def test_what_needs_all_its_ranks_waits_for_the_tail(kind: str, changes: dict[str, object]) -> None:
    world = world_of(others=("c",))
    over_four(world, "b", **changes)
    world.queue("a", "sampler", 1, "generate")
    world.queue("b", "sampler", 1, kind)
    world.run()
    assert permit_of(world, "a.sampler.1").tail_on
    assert run_of(world, "b.sampler.1")[0] >= run_of(world, "a.sampler.1")[1]
    assert permit_of(world, "b.sampler.1").ranks == []


@pytest.mark.parametrize("dies", ["a", "b"])
def test_either_may_die_while_one_is_in_its_tail_and_the_other_in_part(dies: str) -> None:
    world = world_of(others=())
    over_four(world, "b")
    world.queue("a", "sampler", 1, "generate")
    world.queue("b", "sampler", 1, "generate")
    world.run(until_s=world.now_s + 1)
    begun, ended = run_of(world, "a.sampler.1")
    world.run(until_s=(begun + ended) / 2 + 0.5)
    assert permit_of(world, "b.sampler.1").ranks
    world.kill(deployment(dies, "sampler"))
    world.run()
    assert len([op for _, _, op in world.runs if op == f"t.{dies}.sampler.1"]) == 2
    assert len(world.runs) == 3
    assert set(world.done.values()) == {Outcome.COMPLETED}


@pytest.mark.parametrize("residency", Residency)
def test_rollouts_take_turns_for_ever_tail_by_tail(residency: Residency) -> None:
    world = world_of(residency, others=())
    over_four(world, "b", "c")
    for step in range(1, 6):
        for job in "abc":
            world.queue(job, "sampler", step, "generate")
            world.run(until_s=world.now_s + 3)
    world.run()
    assert len(world.done) == 15
    assert set(world.done.values()) == {Outcome.COMPLETED}
    assert any(isinstance(c, Permit) and c.ranks for c in world.commands)
