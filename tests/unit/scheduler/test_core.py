"""The scheduler's core in a world of obedient, dying and late nodes."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phaseloom.common.contract.commands import OpenActivation, StartWpg
from phaseloom.common.contract.errors import Code, ErrorInfo, ResourceError
from phaseloom.common.contract.events import JobFinished, KindEstimate, PhaseTrace, SessionOpened
from phaseloom.common.contract.ids import DeploymentKey, JobKey
from phaseloom.common.contract.operations import Outcome
from phaseloom.scheduler.core.core import Core
from phaseloom.scheduler.core.dispatch import explain
from phaseloom.scheduler.core.dispatch.dispatch import RETRY_PAUSE_S
from phaseloom.scheduler.core.state.outputs import Answer
from phaseloom.scheduler.core.state.step import Step
from phaseloom.scheduler.core.state.transitions import JobState, WpgState
from phaseloom.scheduler.core.state.tree import CORE_VERSION
from phaseloom.scheduler.core.wpgs.wpgs import FIRST_PAUSE_S, STEADY_S
from tests.support.replay import restored_at_every_step
from tests.support.world import CONFIG, World, deployment, node_up

STEPS = 4


def train(world: World, job: str, steps: int = STEPS) -> None:
    """A synchronous GRPO job's operations, all queued at once, ordered by seq and `after`."""
    policy = sampler = reference = 0
    for _ in range(steps):
        for kind in ("forward_backward", "forward_backward", "optim_step", "publish_weights"):
            policy += 1
            after = (("reference", reference),) if reference and kind == "forward_backward" else ()
            world.queue(job, "policy", policy, kind, after=after)
        sampler += 1
        world.queue(
            job, "sampler", sampler, "sync_weights", after=(("policy", policy),), version=policy
        )
        sampler += 1
        world.queue(job, "sampler", sampler, "generate")
        reference += 1
        world.queue(job, "reference", reference, "forward", after=(("sampler", sampler),))


TWO_EACH = {f"{pool[0]}{index}": pool for pool in ("rollout", "train") for index in range(2)}
"""Two nodes of each pool."""


def two_jobs(world: World, num_ranks: int = 1, num_nodes: int = 1) -> World:
    for job in ("a", "b"):
        world.submit(job, num_ranks=num_ranks, num_nodes=num_nodes)
    world.run()
    for job in ("a", "b"):
        train(world, job)
    return world


def undisturbed(seal_every: int = 0) -> World:
    config = msgspec.structs.replace(CONFIG, seal_every=seal_every)
    world = two_jobs(World(config=config))
    world.run()
    return world


def test_two_jobs_complete_every_operation_in_order() -> None:
    world = undisturbed()
    assert set(world.done.values()) == {Outcome.COMPLETED}
    assert len(world.done) == 2 * STEPS * 7
    for job in ("a", "b"):
        policy = [
            seq
            for _, _, op in world.runs
            if op.startswith(f"t.{job}.policy.")
            for seq in [int(op.rsplit(".", 1)[1])]
        ]
        assert policy == list(range(1, STEPS * 4 + 1))


def test_device_runs_one_operation_at_a_time() -> None:
    world = undisturbed()
    for pool in (("policy",), ("sampler", "reference")):
        runs = sorted(r for r in world.runs if r[2].split(".")[2] in pool)
        for (_, end, _), (start, _, _) in itertools.pairwise(runs):
            assert start >= end - 1e-9


def test_same_log_gives_same_outputs() -> None:
    """I7: what a restart, a second leader or a simulation would do."""
    world = undisturbed(seal_every=4)
    world.check_replay(snapshot_every=0)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_restart_from_snapshot_gives_same_outputs(share: float) -> None:
    world = undisturbed(seal_every=4)
    cut = int(len(world.log) * share)
    first = Core()
    for sequence, (time_s, event) in enumerate(world.log[:cut], start=1):
        first.step(sequence, time_s, event)
    second = Core.restore(first.snapshot())
    for sequence, (time_s, event) in enumerate(world.log[cut:], start=cut + 1):
        assert second.step(sequence, time_s, event) == world.outputs[sequence - 1]


def test_snapshot_of_another_core_version_is_refused() -> None:
    payload = msgspec.msgpack.decode(Core().snapshot())
    payload["core_version"] += 1
    with pytest.raises(ResourceError, match="core version"):
        Core.restore(msgspec.msgpack.encode(payload))


def test_snapshot_that_is_refused_for_its_core_version_need_not_be_readable() -> None:
    later = CORE_VERSION + 1
    other = {"core_version": later, "state": {"nodes": "of another shape"}}
    payload = msgspec.msgpack.encode(other)
    with pytest.raises(ResourceError, match=f"of core version {later}") as caught:
        Core.restore(payload)
    assert caught.value.info.code is Code.FAILED_PRECONDITION
    assert caught.value.info.remedy


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    kills=st.lists(
        st.tuples(
            st.floats(0.0, 12.0),
            st.sampled_from(["a", "b"]),
            st.sampled_from(["policy", "sampler", "reference"]),
            st.booleans(),
        ),
        max_size=6,
    ),
    seal_every=st.sampled_from([0, 2, 4]),
    spread=st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]),
)
def test_states_after_kills_equal_states_without(
    seed: int,
    kills: list[tuple[float, str, str, bool]],
    seal_every: int,
    spread: tuple[int, int],
) -> None:
    """I2: whatever dies, on whichever of its nodes, every mutation is in the state once, in
    order."""
    expected = undisturbed()
    config = msgspec.structs.replace(CONFIG, seal_every=seal_every)
    world = World(config=config, seed=seed, num_devices=2, node_names=dict(TWO_EACH))
    two_jobs(world, *spread)
    start_s = world.now_s
    for at_s, job, name, after_done in sorted(kills):
        world.run(until_s=start_s + at_s)
        world.now_s = max(world.now_s, start_s + at_s)
        key = deployment(job, name)
        node = world.random.choice(world.core.state.deployments[str(key)].nodes)
        world.kill(key, after_done=after_done, on=node)
    world.run()
    assert world.done == expected.done
    assert world.states() == expected.states()
    assert all(d.wpg.state is WpgState.READY for d in world.core.state.deployments.values())


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), num_nodes=st.sampled_from([1, 2]))
def test_arrival_order_does_not_matter(seed: int, num_nodes: int) -> None:
    """I1: replicas of a router overtake one another."""
    expected = undisturbed()
    world = World(node_names=dict(TWO_EACH))
    for job in ("a", "b"):
        world.submit(job, num_ranks=num_nodes, num_nodes=num_nodes)
    world.run()
    scratch = World()
    for job in ("a", "b"):
        train(scratch, job)
    events = list(scratch.payloads.values())
    random.Random(seed).shuffle(events)
    world.payloads.update(scratch.payloads)
    for event in events:
        world.later(world.random.uniform(0, 3.0), event)
        if world.random.random() < 0.3:  # delivered twice
            world.later(world.random.uniform(0, 3.0), event)
    world.run()
    assert world.done == expected.done
    assert world.states() == expected.states()


def test_node_that_comes_back_rebuilds_what_it_held() -> None:
    world = two_jobs(World(config=msgspec.structs.replace(CONFIG, seal_every=3)))
    world.run(until_s=world.now_s + 2.0)
    world.lose_train_node()
    world.run()
    assert world.states() == undisturbed().states()


def test_sync_waits_for_a_version_that_was_lost_until_it_is_cut_again() -> None:
    """Published and not yet synced: its only copy was in the memory of the node that died."""
    world = World()
    for job in ("a", "b"):
        world.submit(job)
    world.run()
    world.queue("a", "policy", 1, "optim_step")
    world.queue("a", "policy", 2, "publish_weights")
    world.run()
    world.lose_train_node()
    world.queue("a", "sampler", 1, "sync_weights", after=(("policy", 2),), version=2)
    world.queue("b", "sampler", 1, "generate")
    world.run()
    assert set(world.done.values()) == {Outcome.COMPLETED}
    order = [op.split(".", 1)[1] for _, _, op in world.runs]
    assert order[2:] == ["b.sampler.1", "a.policy.1", "a.policy.2", "a.sampler.1"]


def test_version_is_cut_again_though_the_state_was_replaced_since() -> None:
    """The sampler holds what the policy published before it loaded a checkpoint."""
    world = World()
    world.submit("a")
    world.run()
    for seq, kind in enumerate(("optim_step", "publish_weights", "load_state", "optim_step"), 1):
        world.queue("a", "policy", seq, kind)
    world.queue("a", "sampler", 1, "sync_weights", after=(("policy", 2),), version=2)
    world.run()
    expected = world.states()
    world.lose_train_node()
    world.run()
    world.kill(deployment("a", "sampler"))
    world.run()
    assert world.states() == expected


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    losses=st.lists(
        st.tuples(st.floats(0.0, 12.0), st.sampled_from(sorted(TWO_EACH))), min_size=1, max_size=3
    ),
    seal_every=st.sampled_from([0, 2, 4]),
    num_nodes=st.sampled_from([1, 2]),
)
def test_states_after_losses_of_a_node_equal_states_without(
    seed: int, losses: list[tuple[float, str]], seal_every: int, num_nodes: int
) -> None:
    config = msgspec.structs.replace(CONFIG, seal_every=seal_every)
    world = World(config=config, seed=seed, node_names=dict(TWO_EACH))
    two_jobs(world, num_nodes, num_nodes)
    start_s = world.now_s
    for at_s, node in sorted(losses):
        world.run(until_s=start_s + at_s)
        world.now_s = max(world.now_s, start_s + at_s)
        world.lose_node(node)
        world.bring_back(node)
    world.run()
    assert world.done == undisturbed().done
    assert world.states() == undisturbed().states()
    _, made = restored_at_every_step(world.log)
    assert made == world.outputs


def test_permit_that_comes_back_is_given_again_after_a_pause() -> None:
    """What the operation needs cannot be reached; the device is others' meanwhile."""
    world = World()
    for job in ("a", "b"):
        world.submit(job)
    world.run()
    world.queue("a", "policy", 1, "publish_weights")
    world.run()
    world.queue("a", "sampler", 1, "sync_weights", after=(("policy", 1),), version=1)
    world.run(until_s=world.now_s + 0.01)
    world.return_permit(deployment("a", "sampler"))
    returned_s = world.now_s
    world.queue("b", "sampler", 1, "generate")
    world.run()
    assert world.done["t.a.sampler.1"] is Outcome.COMPLETED
    (_, _, first), (_, _, other), (start_s, _, again) = world.runs[-3:]
    assert (first, other, again) == ("t.a.sampler.1", "t.b.sampler.1", "t.a.sampler.1")
    assert start_s >= returned_s + RETRY_PAUSE_S


def test_refused_operation_fails_and_leaves_no_gap() -> None:
    world = World()
    world.submit("a")
    world.run()
    bad = ErrorInfo(Code.INVALID_ARGUMENT, "empty batch", field="args.batch")
    world.queue("a", "policy", 2, "publish_weights", error=bad)
    world.queue("a", "policy", 3, "optim_step")
    world.queue("a", "policy", 1, "forward_backward")
    world.run()
    assert world.done == {
        "t.a.policy.1": Outcome.COMPLETED,
        "t.a.policy.2": Outcome.FAILED,
        "t.a.policy.3": Outcome.COMPLETED,
    }


def test_operation_behind_a_newer_session_in_the_log_is_refused() -> None:
    world = World()
    world.submit("a")
    world.run()
    early, late = (
        msgspec.structs.replace(world.queue("a", "sampler", seq, "generate"), session=1)
        for seq in (1, 2)
    )
    world.feed(early)
    world.feed(SessionOpened(JobKey("t", "a"), 2))
    world.feed(late)
    world.run()
    assert world.done["t.a.sampler.1"] is Outcome.COMPLETED
    assert world.done["t.a.sampler.2"] is Outcome.FAILED


def test_gap_holds_back_what_comes_after_it() -> None:
    world = World()
    world.submit("a")
    world.run()
    world.queue("a", "policy", 2, "optim_step")
    world.run()
    assert world.done == {}
    world.queue("a", "policy", 1, "forward_backward")
    world.run()
    assert [op for _, _, op in world.runs] == ["t.a.policy.1", "t.a.policy.2"]


def test_operation_after_a_failed_one_fails_too() -> None:
    world = World()
    world.submit("a")
    world.run()
    bad = ErrorInfo(Code.INVALID_ARGUMENT, "no")
    world.queue("a", "sampler", 1, "generate", after=(("policy", 1),))
    world.queue("a", "policy", 1, "publish_weights", error=bad)
    world.run()
    assert world.done["t.a.sampler.1"] is Outcome.FAILED


def test_unordered_reading_operation_runs_beside_a_gap() -> None:
    world = World()
    world.submit("a")
    world.run()
    world.queue("a", "sampler", 2, "generate")
    world.queue("a", "sampler", "rabc", "generate")
    world.run()
    assert world.done == {"t.a.sampler.rabc": Outcome.COMPLETED}


def test_operation_of_unknown_deployment_fails() -> None:
    world = World()
    world.queue("nobody", "policy", 1, "optim_step")
    world.run()
    assert world.done == {"t.nobody.policy.1": Outcome.FAILED}


def switches(world: World) -> int:
    return sum(isinstance(c, OpenActivation) for c in world.commands)


def test_idle_grace_holds_the_device_for_its_job() -> None:
    """Reward computation between generate and forward must not cost a switch."""
    world = World()
    for job in ("a", "b"):
        world.submit(job)
    world.run()
    world.queue("a", "sampler", 1, "generate")
    world.run(until_s=world.now_s + 0.001)
    world.queue("b", "sampler", 1, "generate")
    end_s = world.runs[0][1]
    world.run(until_s=end_s + 0.02)
    world.queue("a", "reference", 1, "forward")  # 20 ms later: within the grace
    world.run()
    order = [op.split(".", 1)[1] for _, _, op in world.runs]
    assert order == ["a.sampler.1", "a.reference.1", "b.sampler.1"]
    gap_s = world.runs[2][0] - world.runs[1][1]
    assert gap_s == pytest.approx(CONFIG.idle_grace_s, abs=1e-6)


def test_hold_ends_when_the_job_waits_for_another_pool() -> None:
    world = World()
    for job in ("a", "b"):
        world.submit(job)
    world.run()
    world.queue("a", "sampler", 1, "generate")
    world.queue("a", "sampler", 2, "generate", after=(("policy", 1),))
    world.queue("b", "sampler", 1, "generate")
    world.run()
    assert world.runs[1][0] == pytest.approx(world.runs[0][1])


def test_hold_ends_when_the_profiler_expects_nothing_soon() -> None:
    world = World()
    for job in ("a", "b"):
        world.submit(job)
    world.run()
    estimate = KindEstimate("policy", "publish_weights", 0.01, next_gap_s=0.4, count=9)
    world.feed(PhaseTrace(JobKey("t", "a"), 1.0, [], [estimate]))
    world.queue("a", "policy", 1, "publish_weights")
    world.queue("b", "policy", 1, "optim_step")
    world.run()
    assert world.runs[1][0] == pytest.approx(world.runs[0][1])


@pytest.mark.parametrize(
    ("gap_s", "held_s"), [(0.01, 0.03), (0.04, 0.06), (0.061, 0.0)], ids=["short", "known", "late"]
)
def test_hold_lasts_until_the_usual_gap_is_overdue(gap_s: float, held_s: float) -> None:
    world = World()
    for job in ("a", "b"):
        world.submit(job)
    world.run()
    estimate = KindEstimate("sampler", "generate", 0.1, next_gap_s=gap_s, count=9)
    world.feed(PhaseTrace(JobKey("t", "a"), 1.0, [], [estimate]))
    world.queue("a", "sampler", 1, "generate")
    world.queue("b", "sampler", 1, "generate")
    world.run()
    assert world.runs[1][0] - world.runs[0][1] == pytest.approx(held_s, abs=1e-6)


def test_endless_job_does_not_starve_another() -> None:
    world = World()
    for job in ("a", "b"):
        world.submit(job)
    world.run()
    for seq in range(1, 101):
        world.queue("a", "policy", seq, "forward_backward")
    world.run(until_s=world.now_s + 0.01)
    queued_s = world.now_s
    world.queue("b", "policy", 1, "forward_backward")
    world.run()
    start_s = next(start for start, _, op in world.runs if op == "t.b.policy.1")
    assert start_s - queued_s < CONFIG.quantum_s + 2 * 1.5 * world.duration_s


def test_seal_lets_the_stream_be_deleted() -> None:
    world = undisturbed(seal_every=4)
    left = {name for name in world.payloads if ".policy." in name}
    assert len(left) < 2 * STEPS * 4 / 2, "mutations under the floor are still in the stream"


def test_last_state_is_rebuilt_from_the_newest_seal() -> None:
    world = undisturbed(seal_every=4)
    key = deployment("a", "policy")
    world.kill(key)
    starts = starts_of(world, key)
    assert starts[-1].seal_seq == max(world.seals[key])


def test_job_name_cannot_be_used_twice() -> None:
    world = World()
    world.submit("a")
    world.run()
    world.submit("a")
    world.run()
    answers = [o for outputs in world.outputs for o in outputs if isinstance(o, Answer)]
    assert answers[-1].error is not None
    assert answers[-1].error.code is Code.ALREADY_EXISTS


def test_finished_job_frees_its_node_for_the_next_isolated_one() -> None:
    world = World(config=msgspec.structs.replace(CONFIG, placement="isolated"))
    world.submit("a")
    world.submit("b")
    world.run()
    jobs = world.core.state.jobs
    assert {n: j.state for n, j in jobs.items()} == {
        "t.a": JobState.ACTIVE,
        "t.b": JobState.SUBMITTED,
    }
    world.queue("a", "policy", 2, "optim_step")  # never to run: 1 is missing
    world.run()
    world.feed(JobFinished(JobKey("t", "a"), "x"))
    world.run()
    assert jobs["t.a"].state is JobState.DONE
    assert jobs["t.b"].state is JobState.ACTIVE
    assert world.done["t.a.policy.2"] is Outcome.FAILED
    assert world.core.state.deployments["t.a.policy"].queue.operations == {}


def is_anything_running(world: World) -> bool:
    nodes = world.core.state.nodes.values()
    return any(device.slots[0].running for node in nodes for device in node.devices)


def kill_while_something_runs(world: World, key: DeploymentKey) -> None:
    while not is_anything_running(world):
        world.run(until_s=world.now_s + 0.01)
        world.now_s += 0.01
    world.kill(key)


def test_operation_that_kills_its_workers_again_and_again_fails() -> None:
    world = World(config=msgspec.structs.replace(CONFIG, max_losses=2))
    world.submit("a")
    world.run()
    world.queue("a", "policy", 1, "publish_weights")
    world.queue("a", "policy", 2, "optim_step")
    key = deployment("a", "policy")
    for _ in range(3):
        kill_while_something_runs(world, key)
    world.run()
    assert world.done == {"t.a.policy.1": Outcome.FAILED, "t.a.policy.2": Outcome.COMPLETED}


def test_long_chain_of_failures_ends_without_recursion() -> None:
    world = World()
    world.submit("a")
    world.run()
    length = 400
    for seq in range(2, length + 1):
        world.queue("a", "sampler", seq, "generate", after=(("policy", seq),))
        world.queue("a", "policy", seq, "optim_step", after=(("sampler", seq - 1),))
    bad = ErrorInfo(Code.INVALID_ARGUMENT, "no")
    world.queue("a", "policy", 1, "optim_step", error=bad)
    world.queue("a", "sampler", 1, "generate", after=(("policy", 1),))
    world.run()
    assert len(world.done) == 2 * length
    assert set(world.done.values()) == {Outcome.FAILED}


def test_job_fails_when_its_node_returns_without_its_device() -> None:
    world = World()
    world.submit("a")
    world.run()
    fewer = msgspec.structs.replace(node_up("t0", "train", revision=2), devices=[])
    world.feed(fewer)
    world.run()
    job = world.core.state.jobs["t.a"]
    assert job.state is JobState.FAILED
    assert job.error is not None
    assert "device 0" in job.error.message


def test_ended_job_leaves_nothing_in_its_operation_stream() -> None:
    world = two_jobs(World())
    world.run()
    for job in ("a", "b"):
        world.feed(JobFinished(JobKey("t", job), f"finish-{job}"))
    world.run()
    assert world.payloads == {}


def test_late_copy_of_a_done_operation_is_deleted() -> None:
    world = World()
    world.submit("a")
    world.run()
    event = world.queue("a", "sampler", 1, "generate")
    world.run()
    world.payloads[str(event.key)] = event  # stored again after the original was deleted
    world.feed(event)
    assert str(event.key) not in world.payloads
    assert len(world.runs) == 1


def test_unordered_operation_that_kills_its_workers_again_and_again_fails() -> None:
    world = World(config=msgspec.structs.replace(CONFIG, max_losses=2))
    world.submit("a")
    world.run()
    world.queue("a", "sampler", "rpoison", "generate")
    key = deployment("a", "sampler")
    for _ in range(3):
        kill_while_something_runs(world, key)
    world.run()
    assert world.done == {"t.a.sampler.rpoison": Outcome.FAILED}


def starts_of(world: World, key: DeploymentKey) -> list[StartWpg]:
    return [c for c in world.commands if isinstance(c, StartWpg) and c.deployment == key]


def die_while_idle(world: World, key: DeploymentKey) -> float:
    """Kill a WPG while nothing runs; returns the seconds until its next incarnation begins."""
    world.run()
    assert not is_anything_running(world)
    died_s, num_starts = world.now_s, len(starts_of(world, key))
    world.kill(key)
    while len(starts_of(world, key)) == num_starts:
        world.run(until_s=world.next_s)
    return world.now_s - died_s


def test_wpg_that_dies_again_and_again_while_nothing_runs_fails_its_job_after_pauses() -> None:
    """No operation is to blame, so it was rebuilt without end and nobody was told."""
    world = World(config=msgspec.structs.replace(CONFIG, max_losses=3))
    world.submit("a")
    key = deployment("a", "policy")
    assert [die_while_idle(world, key) for _ in range(3)] == pytest.approx(
        [0.0, FIRST_PAUSE_S, 2 * FIRST_PAUSE_S]
    )
    world.run()
    world.kill(key)
    job = world.core.state.jobs["t.a"]
    assert job.state is JobState.FAILED
    assert job.error is not None
    assert job.error.code is Code.ABORTED
    assert "of policy died 4 times without completing an operation" in job.error.message
    assert "log" in job.error.remedy
    world.check_replay(snapshot_every=1)


def test_death_that_another_wpg_caused_counts_for_that_one_alone() -> None:
    """Idle jobs were failed for the operations of one in the process that they shared."""
    world = World(config=msgspec.structs.replace(CONFIG, max_losses=2))
    for job in ("a", "b"):
        world.submit(job)
    world.run()
    quiet, loud = deployment("a", "policy"), deployment("b", "policy")
    for seq in range(1, 3):
        world.queue("b", "policy", seq, "optim_step")
        for _ in range(3):
            kill_while_something_runs(world, loud)
            world.kill(quiet, culprits=[loud])
        world.run()
    assert world.done == dict.fromkeys(("t.b.policy.1", "t.b.policy.2"), Outcome.FAILED)
    assert world.core.state.deployments[str(quiet)].wpg.losses == 0
    assert len(starts_of(world, quiet)) == 7
    assert "rebuild/t.a.policy" not in world.core.state.timers

    # Deaths that nobody caused, and its own, count.
    for culprits in ([], [quiet, loud], [quiet]):
        world.run()
        world.kill(quiet, culprits=culprits)
    assert world.core.state.jobs["t.a"].state is JobState.FAILED
    world.check_replay(snapshot_every=1)


def test_permit_that_is_returned_before_each_death_does_not_rebuild_without_end() -> None:
    world = World(config=msgspec.structs.replace(CONFIG, max_losses=2))
    world.submit("a")
    world.run()
    world.queue("a", "policy", 1, "optim_step")
    key = deployment("a", "policy")
    for _ in range(3):
        while not is_anything_running(world):
            world.run(until_s=world.next_s)
        world.return_permit(key)
        world.kill(key)
    world.run()
    assert world.core.state.jobs["t.a"].state is JobState.FAILED
    assert world.done == {"t.a.policy.1": Outcome.FAILED}


@pytest.mark.parametrize("between", ["operation", "time"])
def test_wpg_that_was_well_in_between_has_not_died_in_a_row(between: str) -> None:
    world = World(config=msgspec.structs.replace(CONFIG, max_losses=1))
    world.submit("a")
    key = deployment("a", "policy")
    for seq in range(1, 5):
        die_while_idle(world, key)
        world.run()
        if between == "time":
            world.now_s += STEADY_S
        else:
            world.queue("a", "policy", seq, "optim_step")
            world.run()
    assert world.core.state.jobs["t.a"].state is JobState.ACTIVE


def test_explain_tells_of_a_wpg_that_waits_to_be_rebuilt() -> None:
    world = World(config=msgspec.structs.replace(CONFIG, max_losses=3))
    world.submit("a")
    key = deployment("a", "policy")
    die_while_idle(world, key)
    world.run()
    world.kill(key)
    world.queue("a", "policy", 1, "optim_step")
    world.run(until_s=world.now_s + FIRST_PAUSE_S / 2)
    state = world.core.state
    policy = state.deployments["t.a.policy"]
    step = Step(state, state.sequence, world.now_s)
    (line,) = explain.explain(step, policy, policy.queue.operations[1]).waits_for
    assert "died 2 times" in line
    assert "restart in" in line
    world.run()
    assert world.done == {"t.a.policy.1": Outcome.COMPLETED}


def test_job_fails_when_its_state_cannot_be_rebuilt() -> None:
    world = World(config=msgspec.structs.replace(CONFIG, max_losses=2))
    world.submit("a")
    world.run()
    world.queue("a", "policy", 1, "forward_backward")
    world.run()
    key = deployment("a", "policy")
    world.kill(key)
    for _ in range(2):
        kill_while_something_runs(world, key)
    world.run()
    assert world.core.state.jobs["t.a"].state is JobState.FAILED
