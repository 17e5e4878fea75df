"""The snapshot of a `save_state`: its deployment goes on while it is written; none is lost."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from phaseloom.common.contract.commands import OpenActivation, Permit, SealState
from phaseloom.common.contract.events import CancelRequested, NodeDrainRequested, StateSnapshotTaken
from phaseloom.common.contract.ids import NodeId, OperationKey
from phaseloom.common.contract.operations import Outcome
from phaseloom.scheduler.core.dispatch.explain import explain
from phaseloom.scheduler.core.placement import evacuation
from phaseloom.scheduler.core.state.operation import Op
from phaseloom.scheduler.core.state.outputs import Answer, PutView
from phaseloom.scheduler.core.state.step import Step
from phaseloom.scheduler.core.state.transitions import OpState
from tests.support.replay import restored_at_every_step
from tests.support.world import CONFIG, TENANT, World, deployment, node_up

POLICY = deployment("a", "policy")
LONG_S = 50.0
"""To write a checkpoint."""


def key(slot: int | str, job: str = "a") -> OperationKey:
    return OperationKey(TENANT, job, "policy", str(slot))


def world(*jobs: str, write_s: float = LONG_S, seed: int = 0) -> World:
    config = msgspec.structs.replace(CONFIG, seal_every=3)
    made = World(config=config, write_s=write_s, seed=seed)
    for job in jobs or ("a",):
        made.submit(job)
    made.run()
    return made


def queue(world: World, *kinds: str, first: int = 1, job: str = "a") -> None:
    for seq, kind in enumerate(kinds, start=first):
        world.queue(job, "policy", seq, kind)


def soon(world: World) -> None:
    """All that needs no checkpoint to be durable."""
    world.run(until_s=world.now_s + LONG_S / 4)


def outcomes(world: World) -> dict[int, Outcome]:
    return {seq: world.done[str(key(seq))] for seq in range(1, 99) if str(key(seq)) in world.done}


def permits(world: World) -> list[str]:
    return [c.operation.slot for c in world.commands if isinstance(c, Permit)]


def test_mutations_go_on_while_a_checkpoint_is_written() -> None:
    w = world()
    queue(w, "forward_backward", "save_state", "optim_step", "forward_backward")
    soon(w)
    assert set(outcomes(w)) == {1, 3, 4}
    assert w.saved == {str(key(2)): (1,)}
    w.run()
    assert outcomes(w)[2] is Outcome.COMPLETED
    assert w.core.state.deployments[str(POLICY)].queue.next_seq == 5


def test_another_job_is_switched_in_while_a_checkpoint_is_written() -> None:
    w = world("a", "b")
    queue(w, "forward_backward", "save_state")
    soon(w)
    queue(w, "forward_backward", job="b")
    soon(w)
    opened = [c for c in w.commands if isinstance(c, OpenActivation)]
    assert opened[-1].displaces == [POLICY]
    assert str(key(1, "b")) in w.done
    assert str(key(2)) not in w.done


def test_what_names_the_checkpoint_waits_until_it_is_durable() -> None:
    w = world()
    queue(w, "save_state")
    w.queue("a", "sampler", 1, "generate", after=(("policy", 1),))
    soon(w)
    assert not w.done
    w.run()
    assert len(w.done) == 2


def test_rebuild_saves_again_in_its_place_what_was_not_durable() -> None:
    w = world()
    queue(w, "forward_backward", "optim_step", "save_state", "forward_backward", "optim_step")
    soon(w)
    assert set(outcomes(w)) == {1, 2, 4, 5}
    w.kill(POLICY)
    num_before = len(permits(w))
    w.run()
    assert permits(w)[num_before:] == ["1", "2", "3", "4", "5"]
    assert outcomes(w)[3] is Outcome.COMPLETED
    assert w.saved[str(key(3))] == (1, 2)
    assert w.states()[POLICY] == (1, 2, 4, 5)


def test_what_replaces_the_state_does_not_hide_a_checkpoint_of_the_one_before() -> None:
    w = world()
    queue(w, "forward_backward", "save_state", "load_state", "forward_backward")
    soon(w)
    w.kill(POLICY)
    w.run()
    assert w.saved[str(key(2))] == (1,)
    assert w.states()[POLICY] == ("loaded by 3", 4)


def test_nothing_is_sealed_past_a_checkpoint_that_is_not_durable() -> None:
    w = world()
    queue(w, "save_state", *["forward_backward", "optim_step"] * 20)
    soon(w)
    assert set(outcomes(w)) == set(range(2, 42))
    assert not [c for c in w.commands if isinstance(c, SealState)]
    w.run()
    assert [c for c in w.commands if isinstance(c, SealState)]


def moves_while_it_saves() -> World:
    """A policy on t0, which is drained while a checkpoint is written; t1 is free."""
    w = World(config=msgspec.structs.replace(CONFIG, seal_every=3), write_s=LONG_S)
    w.node_names["t1"] = "train"
    w.later(0, node_up("t1", "train"))
    w.submit("a")
    w.run()
    queue(w, "forward_backward", "optim_step", "save_state")
    w.run(until_s=w.now_s + 2.0)
    w.feed(NodeDrainRequested(NodeId("t0"), "drain"))
    return w


def policy_view(w: World) -> str:
    views = [o.status for made in w.outputs for o in made if isinstance(o, PutView)]
    return next(d.moving for d in views[-1].deployments if d.name == "policy")


def test_deployment_that_is_to_move_runs_on_while_its_checkpoint_is_written() -> None:
    w = moves_while_it_saves()
    queue(w, *["forward_backward", "optim_step"] * 5, first=4)
    soon(w)
    assert set(outcomes(w)) == {1, 2, *range(4, 14)}
    here = evacuation.status(Step(w.core.state, w.core.state.sequence, w.now_s), NodeId("t0"))
    (why,) = here.waits_for
    assert why == f"{POLICY} moves to t1: waiting for save_state 3 to become durable"
    assert policy_view(w) == "to t1: waiting for save_state 3 to become durable"
    w.run()
    assert outcomes(w)[3] is Outcome.COMPLETED
    assert w.core.state.deployments[str(POLICY)].nodes == ["t1"]
    assert policy_view(w) == ""
    assert w.states()[POLICY] == (1, 2, *range(4, 14))
    _, made = restored_at_every_step(w.log)
    assert made == w.outputs


def test_further_checkpoint_waits_for_the_move_that_waits_for_the_one_before() -> None:
    """A controller that always saves would never let it go."""
    w = moves_while_it_saves()
    queue(w, "optim_step", "save_state", "optim_step", first=4)
    soon(w)
    assert set(outcomes(w)) == {1, 2, 4}
    policy = w.core.state.deployments[str(POLICY)]
    step = Step(w.core.state, w.core.state.sequence, w.now_s)
    why = explain(step, policy, policy.queue.operations[5])
    move = "the move of its deployment to t1"
    assert why.waits_for == [f"{move}: waiting for save_state 3 to become durable"]
    w.run()
    assert set(outcomes(w).values()) == {Outcome.COMPLETED}
    assert policy.nodes == ["t1"]
    assert w.saved[str(key(5))] == (1, 2, 4)


def test_checkpoint_without_an_order_is_made_again_of_what_is_there_then() -> None:
    w = world()
    queue(w, "forward_backward")
    w.queue("a", "policy", "free", "save_state")
    soon(w)
    queue(w, "optim_step", first=2)
    soon(w)
    assert str(key("free")) not in w.done
    w.kill(POLICY)
    w.run()
    assert w.done[str(key("free"))] is Outcome.COMPLETED


def test_cut_of_a_life_that_is_over_counts_for_nothing() -> None:
    w = world()
    queue(w, "save_state", "forward_backward")
    permit = next(c for c in iter_permits(w) if c.operation == key(1))
    w.kill(POLICY)
    w.feed(StateSnapshotTaken(key(1), permit.epoch, permit.incarnation))
    op = w.core.state.deployments[str(POLICY)].queue.operations[1]
    assert (op.state, op.has_snapshot) == (OpState.QUEUED, False)
    w.run()
    assert set(outcomes(w)) == {1, 2}


def iter_permits(w: World) -> list[Permit]:
    while not any(isinstance(c, Permit) for c in w.commands):
        w.run(until_s=w.next_s)
    return [c for c in w.commands if isinstance(c, Permit)]


def test_cancel_of_a_checkpoint_that_is_being_written_leaves_its_outcome_to_its_leader() -> None:
    w = world()
    queue(w, "save_state", "forward_backward")
    soon(w)
    made = w.feed(CancelRequested(key(1), "c"))
    (answer,) = [o for o in made if isinstance(o, Answer)]
    assert answer.explanation is not None
    assert answer.explanation.state == "permitted"
    w.run()
    assert set(outcomes(w)) == {1, 2}


class Counted(dict[int, Op]):
    """Operations on the books, and how often one was looked up."""

    num_lookups = 0

    def get(self, seq: int, default: Any = None) -> Any:
        self.num_lookups += 1
        return super().get(seq, default)


def test_head_behind_a_long_cut_is_not_searched_for_again() -> None:
    w = world()
    queue(w, "save_state", *["forward"] * 200, "optim_step")
    soon(w)
    policy = w.core.state.deployments[str(POLICY)]
    assert (policy.queue.next_seq, policy.queue.head_seq) == (1, 203)
    policy.queue.operations = counted = Counted(policy.queue.operations)
    assert policy.queue.head_seq == 203
    assert counted.num_lookups == 0
    queue(w, "optim_step", first=203)
    soon(w)
    assert policy.queue.head_seq == 204
    w.run()
    assert policy.queue.next_seq == policy.queue.head_seq == 204


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    kinds=st.lists(
        st.sampled_from(
            ["forward_backward", "optim_step", "save_state", "save_state", "forward", "load_state"]
        ),
        min_size=3,
        max_size=14,
    ),
    kills=st.lists(st.floats(0.05, 6.0), max_size=3),
)
def test_every_checkpoint_is_of_the_state_at_its_place_whatever_dies(
    seed: int, kinds: list[str], kills: list[float]
) -> None:
    w = world(write_s=1.0, seed=seed)
    queue(w, *kinds)
    start_s = w.now_s
    for after_s in sorted(kills):
        w.run(until_s=start_s + after_s)
        w.now_s = max(w.now_s, start_s + after_s)
        if POLICY in w.ranks:
            w.kill(POLICY)
    w.run()
    expected: tuple[object, ...] = ()
    for seq, kind in enumerate(kinds, start=1):
        if kind == "save_state":
            assert w.done[str(key(seq))] is Outcome.COMPLETED
            assert w.saved[str(key(seq))] == expected
        elif kind == "load_state":
            expected = (f"loaded by {seq}",)
        elif kind != "forward":
            expected = (*expected, seq)
    assert w.states()[POLICY] == expected
