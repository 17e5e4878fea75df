"""Thousands of operations that end with one event are ended by many short steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.common.contract.events import (
    DeploymentDeleted,
    DrainRequested,
    JobFinished,
    JobSubmitted,
    QueuedOperation,
    SessionOpened,
    TimerFired,
    WpgLost,
)
from phaseloom.common.contract.ids import JobKey, NodeId, OperationKey
from phaseloom.common.contract.operations import Outcome
from phaseloom.common.contract.specs import JobSpec
from phaseloom.scheduler.core import core as core_module
from phaseloom.scheduler.core.core import Core
from phaseloom.scheduler.core.state import outputs
from phaseloom.scheduler.core.state.step import MAX_AT_ONCE, Step
from phaseloom.scheduler.core.state.upgrades import UPGRADES
from tests.support.replay import restored_at_every_step
from tests.support.world import CONFIG, TENANT, World, deployment, spec

A = JobKey(TENANT, "a")
POLICY, SAMPLER = deployment("a", "policy"), deployment("a", "sampler")
FAILED = Outcome.FAILED
NUM_OPEN = 5 * MAX_AT_ONCE // 2


def ready() -> World:
    """Job a with a checkpoint to fall back to, and job b."""
    world = World(config=msgspec.structs.replace(CONFIG, seal_every=2))
    world.submit("a")
    world.submit("b")
    world.run()
    world.feed(SessionOpened(A, 1))
    world.saves["t.a.policy.2"] = {"policy": "best"}
    kinds = ("optim_step", "save_state", "publish_weights", "optim_step", "optim_step")
    for seq, kind in enumerate(kinds, 1):
        queue(world, "policy", seq, kind)
    world.run()
    return world


def queue(
    world: World,
    name: str,
    slot: int | str,
    kind: str,
    after: tuple[tuple[str, int], ...] = (),
    version: int | None = None,
    timeout_s: float = 0.0,
    session: int = 1,
) -> None:
    queued = world.queue("a", name, slot, kind, after=after, version=version)
    world.drop(lambda pending: pending is queued)
    event = msgspec.structs.replace(queued, session=session, timeout_s=timeout_s)
    world.payloads[str(event.key)] = event
    world.feed(event)


def finish(world: World) -> None:
    world.feed(JobFinished(A, "end"))


def delete(world: World) -> None:
    world.feed(DeploymentDeleted(SAMPLER, "delete"))


def drain(world: World) -> None:
    world.feed(DrainRequested(A, "drain"))


def fall_back(world: World) -> None:
    world.kill(POLICY)
    ranks = world.ranks.pop(POLICY)
    unreadable = ErrorInfo(Code.DATA_LOSS, "the seal cannot be read")
    world.feed(WpgLost(POLICY, ranks.incarnation, NodeId("t0"), unreadable))


def delete_policy(world: World) -> None:
    world.feed(DeploymentDeleted(POLICY, "delete"))


def fail_dependency(world: World) -> None:
    refused = ErrorInfo(Code.INVALID_ARGUMENT, "a router refused it")
    world.feed(QueuedOperation(OperationKey(TENANT, "a", "policy", "6"), "id", "", error=refused))


WAYS: dict[str, tuple[Callable[[World], None], tuple[tuple[str, int], ...]]] = {
    "finish": (finish, ()),
    "delete": (delete, ()),
    "drain": (drain, ()),
    "fall back": (fall_back, ()),
    "delete what others wait for": (delete_policy, (("policy", 6),)),
    "fail what others wait for": (fail_dependency, (("policy", 6),)),
}


def written(made: list[outputs.Output]) -> int:
    return sum(isinstance(output, outputs.WriteCompletion) for output in made)


def fill(world: World, way: str, slots: list[int | str]) -> None:
    """Queue operations that end in this way, with all that an end must clear away."""
    _, after = WAYS[way]
    if way == "drain":
        after = (("policy", 9),)
    for slot in slots:
        queue(world, "sampler", slot, "generate", after=after, version=3, timeout_s=1e6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_ordered", [True, False])
def test_operations_that_end_together_end_in_short_steps(way: str, is_ordered: bool) -> None:
    world = ready()
    # Ordered ones are behind a gap, so that none runs.
    fill(world, way, [2 + i if is_ordered else f"r{i}" for i in range(NUM_OPEN)])
    num_before = len(world.log)
    end, _ = WAYS[way]
    end(world)
    # An operation of another job that comes now does not wait until all have ended.
    queued = world.queue("b", "sampler", "rother", "generate")
    world.run()
    ended = {key: done for key, done in world.done.items() if key.startswith("t.a.sampler.")}
    assert len(ended) == NUM_OPEN
    assert set(ended.values()) == {FAILED}
    sizes = [written(made) for made in world.outputs[num_before:]]
    assert max(sizes) <= MAX_AT_ONCE + 1  # One was refused by a router.
    last = max(index for index, made in enumerate(world.outputs) if written(made))
    other = next(index for index, (_, event) in enumerate(world.log) if event is queued)
    assert other < last
    state = world.core.state
    assert (state.woken, state.endings, state.is_continuing) == ([], [], False)
    assert not any(timer.startswith("expire/") for timer in state.timers)
    assert not any(n.readers for job in state.jobs.values() for n in job.versions.named.values())
    assert not any(key.startswith("t.a.sampler") for key in world.payloads)
    _, made = restored_at_every_step(world.log)
    assert made == world.outputs


@dataclass(frozen=True)
class Drawn:
    name: str
    kind: str
    after: tuple[tuple[str, int], ...]
    version: int | None
    timeout_s: float


KINDS = {"policy": ["optim_step", "forward_backward", "forward"], "sampler": ["generate"]}
NAMES = st.sampled_from(sorted(KINDS))
DRAWN = NAMES.flatmap(
    lambda name: st.builds(
        Drawn,
        st.just(name),
        st.sampled_from(KINDS[name]),
        st.lists(st.tuples(NAMES, st.integers(1, 16)), max_size=2).map(tuple),
        st.sampled_from([None, 3] if name == "sampler" else [None]),
        st.sampled_from([0.0, 1e6]),
    )
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(DRAWN, min_size=1, max_size=12),
    st.sampled_from(sorted(WAYS)),
    st.booleans(),
    st.integers(1, 3),
)
def test_end_in_many_steps_is_the_end_in_one(
    drawn: list[Drawn], way: str, has_gap: bool, room: int
) -> None:
    def ended(at_once: int) -> World:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(core_module, "Step", partial(Step, room=at_once))
            world = ready()
            seqs = {"policy": 7, "sampler": 1 + has_gap}
            for op in drawn:
                queue(world, op.name, seqs[op.name], op.kind, op.after, op.version, op.timeout_s)
                seqs[op.name] += 1
            WAYS[way][0](world)
            world.run()
            _, made = restored_at_every_step(world.log)
            assert made == world.outputs
        return world

    split, whole = ended(room), ended(1000)
    assert split.done == whole.done
    states = []
    for world in (split, whole):
        tree = msgspec.to_builtins(world.core.state)["deployments"]
        states.append({name: (d["queue"], d["wpg"]["state"]) for name, d in tree.items()})
    assert states[0] == states[1]


def test_operations_of_the_next_job_of_the_name_do_not_wait_for_the_outcomes_of_the_last() -> None:
    world = ready()
    fill(world, "finish", [2 + i for i in range(NUM_OPEN)])
    finish(world)
    submitted = len(world.log)
    deployments = [spec("sampler", "rollout")]
    world.feed(JobSubmitted(A, JobSpec(deployments=deployments), "again"))
    world.feed(SessionOpened(A, 2))
    seq = 2 + NUM_OPEN
    queue(world, "sampler", seq, "generate", session=2)
    world.run()
    assert any(written(made) for made in world.outputs[submitted:])
    assert world.done.pop(f"t.a.sampler.{seq}") is Outcome.COMPLETED
    assert len([key for key in world.done if key.startswith("t.a.sampler.")]) == NUM_OPEN


def test_rest_of_an_end_continues_after_a_restart() -> None:
    """The timer is in the snapshot, and the shell fires those that are."""
    world = ready()
    fill(world, "finish", [2 + i for i in range(NUM_OPEN)])
    finish(world)
    core = Core.restore(world.core.snapshot())
    timer = next(timer for timer in core.state.timers if timer.startswith("continue/"))
    num_left = sum(len(ending.ops) for ending in core.state.endings)
    sequence = len(world.log)
    for _ in range(2):  # A second leader may fire it again.
        sequence += 1
        made = core.step(sequence, world.now_s, TimerFired(timer))
        num_left -= written(made)
    assert num_left == NUM_OPEN - 2 * MAX_AT_ONCE


def test_snapshot_of_version_1_names_readers_as_this_one_does() -> None:
    world = ready()
    queue(world, "sampler", "rone", "generate", (("policy", 9),), version=3)
    tree = msgspec.to_builtins(world.core.state)
    (named,) = [n for n in tree["jobs"]["t.a"]["versions"]["named"].values() if n["readers"]]
    expected = dict(named["readers"])
    key = {"tenant": TENANT, "job": "a", "deployment": "sampler", "slot": "rone"}
    named["readers"] = [key]
    UPGRADES[1](tree)
    assert named["readers"] == expected == {"t.a.sampler.rone": "t.a.sampler"}
