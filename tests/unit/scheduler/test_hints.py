"""Hints to nodes, in virtual time; the world asserts that those to state managers come in pairs."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phaseloom.common.contract.commands import PrefetchState, PrefetchVersion
from phaseloom.common.contract.events import CancelRequested, JobFinished, KindEstimate, PhaseTrace
from phaseloom.common.contract.ids import JobKey, OperationKey, VersionKey
from phaseloom.common.contract.specs import Residency
from tests.support.world import CONFIG, World, deployment, node_up
from tests.unit.scheduler.test_dispatch import advance, play, run_of, workloads

SMALL = 40
"""Bytes of host memory: as much as the four states on the node, and none for versions."""
GAP_S = 3.0


def world_of(*jobs: str, host_memory_bytes: int = SMALL, duration_s: float = 0.5) -> World:
    """Jobs that are up on one rollout node; nothing is switched in speculatively."""
    config = msgspec.structs.replace(CONFIG, speculative_switch_in=False, idle_grace_s=0.0)
    world = World(config=config, duration_s=duration_s)
    world.later(0, node_up("r0", "rollout", revision=2, host_memory_bytes=host_memory_bytes))
    for job in jobs:
        world.submit(job, policy=False)
    world.run()
    return world


def predict(world: World, job: str, gap_s: float = GAP_S) -> None:
    estimate = KindEstimate("sampler", "generate", 0.5, gap_s, count=9)
    world.feed(PhaseTrace(JobKey("t", job), 0.0, [], [estimate]))


def learn(world: World, job: str) -> int:
    """It generates twice, so that it is known what follows. Returns: the next seq."""
    for seq in (1, 2):
        world.queue(job, "sampler", seq, "generate")
        advance(world, 1.0)
    return 3


def hints(world: World) -> list[tuple[str, float | None]]:
    """(`<job>.<deployment>`, in so many seconds), in order."""
    return [
        (f"{c.deployment.job}.{c.deployment.deployment}", c.in_s)
        for c in world.commands
        if isinstance(c, PrefetchState)
    ]


def displaced(world: World) -> float:
    """`a` is predicted, and `b` displaces it. Returns: when the operation of `a` has ended."""
    predict(world, "a")
    learn(world, "a")
    end_s = run_of(world, "a.sampler.2")[1]
    world.queue("b", "sampler", 1, "generate")
    advance(world, 1.0)
    return end_s


def test_what_is_predicted_and_was_displaced_is_told_once_with_its_time() -> None:
    world = world_of("a", "b")
    end_s = displaced(world)
    ((name, in_s),) = hints(world)
    assert in_s is not None
    assert name == "a.sampler"
    displaced_s = next(at_s for at_s, event in world.log if at_s > end_s)
    assert in_s == pytest.approx(end_s + GAP_S - displaced_s)
    advance(world, end_s + GAP_S - world.now_s)
    world.queue("a", "sampler", 3, "generate")
    advance(world, 1.0)
    assert len(hints(world)) == 1, "switched in, it needs no hint, nor to have one withdrawn"
    world.check_replay()


def test_node_with_room_for_everything_is_told_nothing() -> None:
    world = world_of("a", "b", host_memory_bytes=120)
    displaced(world)
    assert hints(world) == []


def test_node_that_was_crowded_is_told_nothing_once_it_has_room() -> None:
    world = world_of("a", "b", "c", host_memory_bytes=120)
    assert world.core.state.crowded == ["r0"]
    world.feed(JobFinished(JobKey("t", "c"), "x"))
    world.run()
    displaced(world)
    assert hints(world) == []
    assert world.core.state.crowded == []


def test_what_is_on_its_device_is_not_told() -> None:
    world = world_of("a", "b")
    predict(world, "a")
    learn(world, "a")
    advance(world, 10.0)
    assert hints(world) == []


def test_job_of_which_nothing_is_known_is_not_told() -> None:
    world = world_of("a", "b")
    learn(world, "a")
    world.queue("b", "sampler", 1, "generate")
    advance(world, 10.0)
    assert hints(world) == []


def test_what_waits_for_the_device_is_told_while_another_runs() -> None:
    world = world_of("a", "b", duration_s=5.0)
    world.queue("a", "sampler", 1, "generate")
    advance(world, 1.0)
    world.queue("b", "sampler", 1, "generate")
    advance(world, 1.0)
    assert hints(world) == [("b.sampler", 0.0)]
    world.queue("b", "sampler", 2, "generate")
    advance(world, 20.0)
    assert hints(world) == [("b.sampler", 0.0)]


def test_hint_is_withdrawn_when_what_waited_is_cancelled() -> None:
    world = world_of("a", "b", duration_s=5.0)
    world.queue("a", "sampler", 1, "generate")
    advance(world, 1.0)
    world.queue("b", "sampler", 1, "generate")
    advance(world, 1.0)
    world.feed(CancelRequested(OperationKey("t", "b", "sampler", "1"), "x"))
    assert hints(world) == [("b.sampler", 0.0), ("b.sampler", None)]
    world.check_replay()


def test_hint_is_withdrawn_when_the_prediction_is_overdue() -> None:
    world = world_of("a", "b")
    end_s = displaced(world)
    advance(world, end_s + 1.4 * GAP_S - world.now_s)
    assert len(hints(world)) == 1
    advance(world, end_s + 1.6 * GAP_S - world.now_s)
    assert hints(world)[1:] == [("a.sampler", None)]
    world.check_replay()


def test_hint_is_withdrawn_when_the_job_does_something_else() -> None:
    world = world_of("a", "b")
    displaced(world)
    world.queue("a", "reference", 1, "forward")
    advance(world, 1.0)
    names = [(name, in_s is None) for name, in_s in hints(world)]
    assert names == [("a.sampler", False), ("a.sampler", True)]


@settings(max_examples=25, deadline=None)
@given(workload=workloads(), residency=st.sampled_from(Residency))
def test_hints_change_nothing_else(
    workload: list[tuple[float, str, str, str]], residency: Residency
) -> None:
    small, large = (play(workload, [], residency, size) for size in (30, 1000))
    assert hints(large) == []
    assert (small.runs, small.done) == (large.runs, large.done)


# --- versions that a waiting sync brings ----------------------------------------------------------


def prefetches(world: World) -> list[PrefetchVersion]:
    return [c for c in world.commands if isinstance(c, PrefetchVersion)]


def publish_and_sync(world: World, job: str) -> VersionKey:
    world.queue(job, "policy", 1, "publish_weights")
    world.queue(job, "sampler", 1, "sync_weights", after=(("policy", 1),), version=1)
    return VersionKey(deployment(job, "policy"), 1)


def test_version_is_fetched_while_its_sync_waits_for_the_device() -> None:
    world = World(duration_s=5.0)
    for job in ("a", "b"):
        world.submit(job)
    world.run()
    version = publish_and_sync(world, "a")
    world.queue("b", "sampler", 1, "generate", delay_s=4.0)
    advance(world, 8.0)
    assert "t.a.policy.1" in world.done
    (asked,) = prefetches(world)
    sampler, policy = (world.core.state.deployments[f"t.a.{d}"] for d in ("sampler", "policy"))
    assert asked.deployment == sampler.key
    assert asked.incarnation == sampler.wpg.incarnation
    assert [asked.node] == sampler.nodes
    assert asked.ticket.version == version
    assert asked.sources == [world.core.state.nodes[policy.nodes[0]].state_endpoint]
    assert "t.b.sampler.1" not in world.done, "the device is another's still"
    world.run()
    assert len(prefetches(world)) == 1
    world.check_replay()


def test_version_is_fetched_while_its_deployment_samples() -> None:
    world = World(duration_s=5.0)
    world.submit("a")
    world.run()
    publish_and_sync(world, "a")
    world.queue("a", "sampler", "rlong", "generate", delay_s=4.0)
    advance(world, 8.0)
    assert "t.a.sampler.rlong" not in world.done
    assert len(prefetches(world)) == 1
    world.run()
    assert len(world.done) == 3


def test_version_of_a_sync_that_runs_at_once_is_not_fetched_before() -> None:
    world = World()
    world.submit("a")
    world.run()
    publish_and_sync(world, "a")
    world.run()
    assert len(world.done) == 2
    assert prefetches(world) == []


@pytest.mark.parametrize("what", ["cancelled", "crowded"])
def test_version_is_not_fetched_for(what: str) -> None:
    """A sync that is cancelled, or one whose node may lack the memory."""
    world = World(duration_s=5.0)
    for job in ("a", "b"):
        world.submit(job)
    world.run()
    if what == "crowded":
        world.core.state.mark_crowded(world.core.state.deployments["t.a.sampler"].nodes[0])
    publish_and_sync(world, "a")
    world.queue("b", "sampler", 1, "generate", delay_s=4.0)
    if what == "cancelled":
        advance(world, 3.0)
        world.cancel("a", "sampler", 1)
    advance(world, 20.0)
    assert prefetches(world) == []
