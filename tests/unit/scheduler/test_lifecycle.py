"""The life of operations, sessions and jobs beside what a device runs next."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phaseloom.common.contract.api import Explanation
from phaseloom.common.contract.commands import (
    CancelOperation,
    Permit,
    ReleaseVersions,
    SealState,
    StartWpg,
    StopWpg,
)
from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.common.contract.events import (
    ActivationRefused,
    CancelRequested,
    DrainRequested,
    JobFinished,
    JobSubmitted,
    NodeLost,
    OperationFinished,
    PhaseDeclared,
    QueuedOperation,
    SessionLost,
    SessionOpened,
    WpgLost,
)
from phaseloom.common.contract.ids import JobKey, NodeId, OperationKey
from phaseloom.common.contract.operations import Outcome
from phaseloom.common.contract.specs import JobSpec, SchedulerConfig
from phaseloom.scheduler.core.core import Core
from phaseloom.scheduler.core.state import outputs
from phaseloom.scheduler.core.state.outputs import Answer, PutView
from phaseloom.scheduler.core.state.transitions import JobState, OpState, WpgState
from tests.support.world import CONFIG, TENANT, World, deployment, node_up, spec

T = TypeVar("T")

A = JobKey(TENANT, "a")
POLICY = deployment("a", "policy")
SAMPLER = deployment("a", "sampler")
BAD = ErrorInfo(Code.INVALID_ARGUMENT, "bad")
CANCELLED, COMPLETED, EXPIRED, FAILED = (
    Outcome.CANCELLED,
    Outcome.COMPLETED,
    Outcome.EXPIRED,
    Outcome.FAILED,
)


def configured(**fields: object) -> SchedulerConfig:
    return msgspec.structs.replace(CONFIG, **fields)


def ready(world: World | None = None, *jobs: str) -> World:
    """Jobs that are active, nothing queued."""
    world = world or World()
    for job in jobs or ("a",):
        world.submit(job)
    world.run()
    return world


def key(name: str, slot: int | str, job: str = "a") -> OperationKey:
    return OperationKey(TENANT, job, name, str(slot))


def outputs_of(world: World, kind: type[T]) -> list[T]:
    return [o for made in world.outputs for o in made if isinstance(o, kind)]


def completion(world: World, op: OperationKey) -> ErrorInfo:
    """The error that the scheduler wrote as an operation's outcome."""
    written = outputs_of(world, outputs.WriteCompletion)
    error = [o.completion.error for o in written if o.key == op][-1]
    assert error is not None
    return error


def until_permitted(world: World, op: OperationKey) -> Permit:
    """Step by step, until a command permits the operation that is queued."""
    num_seen = len(world.commands)
    for _ in range(1000):
        for command in world.commands[num_seen:]:
            if isinstance(command, Permit) and command.operation == op:
                return command
        world.run(until_s=world.now_s + 0.005)
        world.now_s += 0.005
    raise AssertionError(f"{op} has no permit")


def cancel(world: World, op: OperationKey) -> Answer:
    request = f"cancel-{len(world.log)}"
    answers = [o for o in world.feed(CancelRequested(op, request)) if isinstance(o, Answer)]
    assert [answer.request for answer in answers] == [request]
    return answers[0]


def explained(answer: Answer) -> Explanation:
    assert answer.explanation is not None, answer.error
    return answer.explanation


def refused(answer: Answer) -> ErrorInfo:
    assert answer.error is not None, answer.explanation
    return answer.error


# --- cancel -------------------------------------------------------------------------------------


def test_cancelled_operation_without_a_permit_keeps_its_place_and_fails_what_names_it() -> None:
    world = ready()
    world.queue("a", "policy", 2, "publish_weights")
    world.queue("a", "policy", 3, "optim_step")
    world.queue("a", "sampler", 1, "generate", after=(("policy", 2),))
    world.run()
    assert explained(cancel(world, key("policy", 2))).state == "cancelled"
    world.queue("a", "policy", 1, "optim_step")
    world.run()
    assert world.done == {
        "t.a.policy.1": COMPLETED,
        "t.a.policy.2": CANCELLED,
        "t.a.policy.3": COMPLETED,
        "t.a.sampler.1": FAILED,
    }
    assert completion(world, key("policy", 2)).code is Code.ABORTED


def test_cancelled_reading_operation_that_runs_is_told_by_its_leader() -> None:
    world = ready()
    world.queue("a", "sampler", 1, "generate")
    until_permitted(world, key("sampler", 1))
    assert explained(cancel(world, key("sampler", 1))).state == "permitted"
    assert isinstance(world.commands[-1], CancelOperation)
    world.queue("a", "sampler", 2, "generate")
    world.run()
    assert world.done == {"t.a.sampler.1": CANCELLED, "t.a.sampler.2": COMPLETED}
    assert not outputs_of(world, outputs.WriteCompletion)


def test_mutating_operation_that_runs_cannot_be_cancelled() -> None:
    world = ready()
    world.queue("a", "policy", 1, "optim_step")
    until_permitted(world, key("policy", 1))
    error = refused(cancel(world, key("policy", 1)))
    assert error.code is Code.FAILED_PRECONDITION
    assert "is already running" in error.message
    world.kill(POLICY)  # now it may or may not have taken effect
    assert refused(cancel(world, key("policy", 1))).code is Code.FAILED_PRECONDITION
    world.run()
    assert world.done == {"t.a.policy.1": COMPLETED}


@pytest.mark.parametrize(
    ("op", "code"),
    [
        (key("policy", 1), Code.FAILED_PRECONDITION),
        (key("policy", 3), Code.FAILED_PRECONDITION),
        (key("policy", 9), Code.NOT_FOUND),
        (key("sampler", "rnone"), Code.NOT_FOUND),
        (key("policy", 1, job="nobody"), Code.NOT_FOUND),
    ],
    ids=["ended", "refused above a gap", "unknown seq", "unknown slot", "unknown job"],
)
def test_cancel_of_what_is_not_open_is_refused(op: OperationKey, code: Code) -> None:
    world = ready()
    world.queue("a", "policy", 1, "optim_step")
    world.queue("a", "policy", 3, "optim_step", error=BAD)
    world.run()
    assert refused(cancel(world, op)).code is code


def test_cancelled_reading_operation_whose_workers_die_is_not_run_again() -> None:
    world = ready()
    world.queue("a", "sampler", 1, "generate")
    until_permitted(world, key("sampler", 1))
    world.core.state.deployments["t.a.sampler"].queue.operations[1].is_cancelled = True
    world.kill(SAMPLER)
    world.run()
    assert world.done == {"t.a.sampler.1": CANCELLED}
    assert len(world.runs) == 1


# --- expiry -------------------------------------------------------------------------------------


def queue_for(world: World, timeout_s: float, slot: int, kind: str = "optim_step") -> None:
    op = key("policy", slot)
    event = QueuedOperation(op, f"id-{op}", kind, timeout_s=timeout_s)
    world.payloads[str(op)] = event
    world.later(0, event)


def test_operation_without_a_permit_in_time_expires_and_leaves_no_gap() -> None:
    world = ready()
    queue_for(world, 2.0, 2)
    world.queue("a", "sampler", 1, "generate", after=(("policy", 2),))
    queued_s = world.now_s
    world.run()
    assert world.done == {"t.a.policy.2": EXPIRED, "t.a.sampler.1": FAILED}
    assert world.now_s == pytest.approx(queued_s + 2.0, abs=0.1)
    assert completion(world, key("policy", 2)).code is Code.DEADLINE_EXCEEDED
    world.queue("a", "policy", 1, "optim_step")
    world.queue("a", "policy", 3, "optim_step")
    world.run()
    assert world.done["t.a.policy.3"] is COMPLETED


def test_operation_with_a_permit_in_time_does_not_expire() -> None:
    world = ready(World(duration_s=10.0))
    queue_for(world, 2.0, 1)
    world.run()
    assert world.done == {"t.a.policy.1": COMPLETED}
    assert not world.core.state.timers


def test_operation_that_may_have_taken_effect_does_not_expire() -> None:
    """Its workers die while it runs, and its time is over before the next ones are up."""
    world = ready()
    queue_for(world, 0.2, 1)
    until_permitted(world, key("policy", 1))
    world.kill(POLICY)
    world.run()
    assert world.done == {"t.a.policy.1": COMPLETED}


def test_operation_whose_activation_was_refused_after_its_time_expires() -> None:
    world = ready()
    queue_for(world, 0.01, 1)
    permit = until_permitted(world, key("policy", 1))
    world.ranks[POLICY].running.clear()
    world.now_s += 0.1
    full = ErrorInfo(Code.RESOURCE_EXHAUSTED, "full")
    world.feed(ActivationRefused(POLICY, permit.epoch, NodeId("t0"), full))
    assert world.done == {"t.a.policy.1": EXPIRED}


# --- gradients ----------------------------------------------------------------------------------

FB, STEP = "forward_backward", "optim_step"


def partials(world: World) -> list[str]:
    return [str(c.operation) for c in world.commands if isinstance(c, Permit) and c.partial]


def test_step_after_an_incomplete_batch_is_partial_and_throws_its_gradients_away() -> None:
    world = ready()
    world.queue("a", "policy", 1, FB)
    world.queue("a", "policy", 2, FB, error=BAD)
    world.queue("a", "policy", 3, STEP)
    world.run()
    assert world.done["t.a.policy.3"] is FAILED
    assert world.payloads == {}, "what has no effect any more is still in the stream"
    for seq, kind in enumerate((FB, FB, STEP), 4):
        world.queue("a", "policy", seq, kind)
    world.run()
    assert partials(world) == ["t.a.policy.3"]
    assert world.states()[POLICY] == (4, 5, 6)
    world.kill(POLICY)
    world.run()
    assert world.states()[POLICY] == (4, 5, 6), "rebuilt with gradients that were thrown away"


@pytest.mark.parametrize("kind", [FB, ""], ids=["refused", "never published"])
def test_step_of_another_batch_is_not_partial(kind: str) -> None:
    world = ready()
    world.queue("a", "policy", 3, kind, error=BAD)  # of the batch after the first step
    for seq, sound in ((1, FB), (2, STEP), (4, STEP)):
        world.queue("a", "policy", seq, sound)
    world.run()
    assert partials(world) == ["t.a.policy.4"]
    assert world.states()[POLICY] == (1, 2)


@pytest.mark.parametrize("how", ["failed", "cancelled", "expired"])
def test_batch_is_incomplete_however_a_part_of_it_ended(how: str) -> None:
    world = ready()
    if how == "failed":
        world.failing["t.a.policy.1"] = BAD
        world.queue("a", "policy", 1, FB)
    elif how == "expired":
        world.queue("a", "policy", 2, STEP)
        queue_for(world, 0.5, 3, FB)
        world.run()
        world.queue("a", "policy", 1, STEP)
    else:
        world.queue("a", "policy", 3, FB)
        world.run()
        cancel(world, key("policy", 3))
        world.queue("a", "policy", 1, STEP)
        world.queue("a", "policy", 2, STEP)
    world.queue("a", "policy", 4 if how != "failed" else 2, STEP)
    world.run()
    assert len(partials(world)) == 1


def test_loaded_state_has_no_incomplete_batch() -> None:
    world = ready()
    world.queue("a", "policy", 1, FB, error=BAD)
    world.queue("a", "policy", 2, "load_state")
    world.queue("a", "policy", 3, STEP)
    world.run()
    assert partials(world) == []


def test_partial_step_whose_workers_died_is_permitted_again_to_zero_the_gradients() -> None:
    """Its outcome may be stored; what the next incarnation made again must go all the same."""
    world = ready()
    world.queue("a", "policy", 1, FB)
    world.queue("a", "policy", 2, FB, error=BAD)
    world.queue("a", "policy", 3, STEP)
    until_permitted(world, key("policy", 3))
    world.kill(POLICY)
    world.run()
    steps = [c for c in world.commands if isinstance(c, Permit) and c.kind == STEP]
    assert [(permit.partial, permit.replay) for permit in steps] == [(True, False), (True, True)]
    assert world.states()[POLICY] == ()
    world.queue("a", "policy", 4, FB)
    world.queue("a", "policy", 5, STEP)
    world.run()
    assert world.states()[POLICY] == (4, 5)


def batches(world: World, parts: list[list[bool]]) -> World:
    """Queue batches of which some parts are refused, each followed by a step and a publish."""
    ready(world)
    seq = 0
    for batch in parts:
        for is_sound in batch:
            seq += 1
            world.queue("a", "policy", seq, FB, error=None if is_sound else BAD)
        world.queue("a", "policy", seq + 1, STEP)
        world.queue("a", "policy", seq + 2, "publish_weights")
        seq += 2
    return world


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    parts=st.lists(st.lists(st.booleans(), min_size=1, max_size=3), min_size=1, max_size=4),
    kills=st.lists(st.tuples(st.floats(0.0, 8.0), st.booleans()), max_size=4),
    seal_every=st.sampled_from([0, 1, 2]),
)
def test_states_after_kills_equal_states_without_though_batches_are_incomplete(
    seed: int, parts: list[list[bool]], kills: list[tuple[float, bool]], seal_every: int
) -> None:
    """I2: a step takes effect on the whole of its batch or not at all, whatever dies."""
    expected = batches(World(), parts)
    expected.run()
    world = batches(World(config=configured(seal_every=seal_every), seed=seed), parts)
    start_s = world.now_s
    for at_s, is_lost in sorted(kills):
        world.run(until_s=start_s + at_s)
        world.now_s = max(world.now_s, start_s + at_s)
        if is_lost:
            world.lose_train_node()
        else:
            world.kill(POLICY)
    world.run()
    assert world.done == expected.done
    assert world.states()[POLICY] == expected.states()[POLICY]


def test_state_with_gradients_is_not_sealed() -> None:
    """A refused step would throw them away, and a start from the seal would bring them back."""
    world = ready(World(config=configured(seal_every=2)))
    for seq, kind in enumerate((FB, "publish_weights", FB, "publish_weights"), 1):
        world.queue("a", "policy", seq, kind)
    world.run()
    assert not any(isinstance(c, SealState) for c in world.commands)
    world.queue("a", "policy", 5, STEP)
    world.run()
    assert [c.seq for c in world.commands if isinstance(c, SealState)] == [5]


# --- after --------------------------------------------------------------------------------------

Queue = Callable[[World], None]


def _two(world: World) -> None:
    world.queue("a", "policy", 1, STEP, after=(("sampler", 1),))
    world.queue("a", "sampler", 1, "generate", after=(("policy", 1),))


def _three(world: World) -> None:
    world.queue("a", "policy", 1, STEP, after=(("sampler", 1),))
    world.queue("a", "sampler", 1, "generate", after=(("reference", 1),))
    world.queue("a", "reference", 1, "forward", after=(("policy", 1),))


def _through_the_order(world: World) -> None:
    """policy 2 comes after policy 1, which comes after sampler 1, which comes after policy 2."""
    world.queue("a", "policy", 1, STEP, after=(("sampler", 1),))
    world.queue("a", "policy", 2, STEP)
    world.queue("a", "sampler", 1, "generate", after=(("policy", 2),))


def _closed_by_the_order(world: World) -> None:
    """As before, and the one that closes it names nothing."""
    world.queue("a", "policy", 1, STEP, after=(("sampler", 1),))
    world.queue("a", "sampler", 1, "generate", after=(("policy", 2),))
    world.queue("a", "policy", 2, STEP)


def _itself(world: World) -> None:
    world.queue("a", "policy", 1, STEP, after=(("policy", 1),))


@pytest.mark.parametrize(
    ("queue", "closing", "cycle"),
    [
        (_two, "sampler.1", "sampler 1 after policy 1 after sampler 1"),
        (_three, "reference.1", "reference 1 after policy 1 after sampler 1 after reference 1"),
        (
            _through_the_order,
            "sampler.1",
            "sampler 1 after policy 2 after policy 1 after sampler 1",
        ),
        (
            _closed_by_the_order,
            "policy.2",
            "policy 2 after policy 1 after sampler 1 after policy 2",
        ),
        (_itself, "policy.1", "policy 1 after policy 1"),
    ],
    ids=["two", "three", "through the order", "closed by the order", "itself"],
)
def test_operation_that_closes_a_cycle_fails_and_names_it(
    queue: Queue, closing: str, cycle: str
) -> None:
    world = ready()
    queue(world)
    world.run()
    name, seq = closing.split(".")
    error = completion(world, key(name, seq))
    assert error.code is Code.FAILED_PRECONDITION
    assert cycle in error.message
    assert not any(d.queue.operations for d in world.core.state.deployments.values()), (
        "one waits still"
    )


def test_reading_operations_that_run_together_are_no_cycle() -> None:
    """sampler 2 does not wait for sampler 1."""
    world = ready()
    world.queue("a", "policy", 1, STEP, after=(("sampler", 2),))
    world.queue("a", "sampler", 1, "generate", after=(("policy", 1),))
    world.queue("a", "sampler", 2, "generate")
    world.run()
    assert set(world.done.values()) == {COMPLETED}
    assert len(world.done) == 3


def test_operation_waits_for_what_is_not_published_yet() -> None:
    world = ready()
    world.queue("a", "sampler", 1, "generate", after=(("policy", 1),))
    world.run()
    assert world.done == {}
    world.queue("a", "policy", 1, STEP)
    world.run()
    assert set(world.done.values()) == {COMPLETED}


# --- sessions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_lost", [True, False])
def test_lost_controller_leaves_its_queue_and_no_claim_on_the_device(is_lost: bool) -> None:
    world = ready(World(config=configured(idle_grace_s=5.0)), "a", "b")
    world.feed(SessionOpened(A, 1))
    queue_in(world, 1, "sampler", {1: "generate", 2: "generate"})
    until_permitted(world, key("sampler", 1))
    world.queue("b", "sampler", 1, "generate")
    if is_lost:
        world.feed(SessionLost(A, 1))
    world.run()
    assert set(world.done.values()) == {COMPLETED}
    assert len(world.done) == 3
    end_s = max(end_s for _, end_s, op in world.runs if op.startswith("t.a."))
    (start_s,) = [start_s for start_s, _, op in world.runs if op.startswith("t.b.")]
    assert start_s - end_s == pytest.approx(0.0 if is_lost else 5.0)


def test_phases_end_with_their_controller() -> None:
    world = ready()
    job = world.core.state.jobs["t.a"]
    for session, ended_by in ((1, SessionLost(A, 1)), (2, SessionOpened(A, 3))):
        world.feed(SessionOpened(A, session))
        world.feed(PhaseDeclared(A, session, "rollout", is_open=True))
        assert list(job.controller.phases) == ["rollout"]
        world.feed(ended_by)
        assert not job.controller.phases
    world.feed(PhaseDeclared(A, 2, "rollout", is_open=True))  # came late, of a session that is over
    assert not job.controller.phases


def test_word_of_an_older_sessions_loss_changes_nothing() -> None:
    world = ready()
    job = world.core.state.jobs["t.a"]
    world.feed(SessionOpened(A, 1))
    world.feed(SessionOpened(A, 2))
    world.feed(SessionLost(A, 1))
    assert job.controller.is_attached
    world.feed(SessionLost(A, 2))
    assert not job.controller.is_attached
    world.feed(SessionOpened(A, 2))  # its heartbeat is back
    assert job.controller.is_attached


# --- roll-back ----------------------------------------------------------------------------------

UNREADABLE = ErrorInfo(Code.DATA_LOSS, "the seal cannot be read")


def with_checkpoint(world: World) -> World:
    """A job that has trained, made a checkpoint, and trained on."""
    ready(world)
    world.feed(SessionOpened(A, 1))
    queue_in(world, 1, "policy", {1: STEP, 2: "publish_weights"})
    world.run()
    world.saves["t.a.policy.3"] = {"policy": "best"}
    queue_in(world, 1, "policy", {3: "save_state", 4: STEP, 5: "publish_weights", 6: STEP})
    queue_in(world, 1, "sampler", {1: "generate"})
    world.run()
    return world


def queue_in(world: World, session: int, name: str, kinds: dict[int, str]) -> None:
    for seq, kind in kinds.items():
        op = key(name, seq)
        event = QueuedOperation(op, f"id-{op}", kind, session=session)
        world.payloads[str(op)] = event
        world.kinds[op.deployment_key, seq] = kind
        world.later(0, event)


def lose_seal(world: World) -> None:
    """The policy's workers die, and what they are to start from cannot be read."""
    world.kill(POLICY)
    ranks = world.ranks.pop(POLICY)
    world.feed(WpgLost(POLICY, ranks.incarnation, NodeId("t0"), UNREADABLE))


def test_job_that_cannot_be_rebuilt_falls_back_to_its_checkpoint_whole() -> None:
    world = with_checkpoint(World(config=configured(seal_every=2)))
    trained = world.checkpoints[POLICY, "best"]
    assert world.states()[POLICY] != trained
    queue_in(world, 1, "policy", {8: STEP})  # 7 is missing
    world.run()
    lose_seal(world)
    world.run()
    job = world.core.state.jobs["t.a"]
    assert job.state is JobState.ROLLED_BACK
    assert job.error is not None
    assert job.error.details == {"rolled_back_to": "best"}
    error = completion(world, key("policy", 8))
    assert (error.code, error.details) == (Code.ABORTED, {"rolled_back_to": "best"})
    starts = {c.deployment: c for c in world.commands if isinstance(c, StartWpg)}
    assert (starts[POLICY].checkpoint, starts[POLICY].applied) == ("best", 8)
    assert starts[POLICY].seal_seq == 0
    assert (starts[SAMPLER].checkpoint, starts[SAMPLER].applied) == ("", 1)
    assert starts[SAMPLER].incarnation == 2, "one deployment alone fell back"
    assert world.states()[POLICY] == trained
    assert any(isinstance(c, ReleaseVersions) for c in world.commands)


def test_job_that_fell_back_goes_on_with_a_new_session() -> None:
    world = with_checkpoint(World(config=configured(seal_every=2)))
    trained = world.checkpoints[POLICY, "best"]
    lose_seal(world)
    world.run()
    queue_in(world, 1, "policy", {7: STEP})  # of the session that does not know
    world.run()
    error = completion(world, key("policy", 7))
    assert (error.code, error.details) == (Code.ABORTED, {"rolled_back_to": "best"})
    world.feed(SessionOpened(A, 2))
    job = world.core.state.jobs["t.a"]
    assert job.state is JobState.ACTIVE
    assert job.error is None
    queue_in(world, 2, "policy", {8: STEP})
    world.run()
    assert world.states()[POLICY] == (*trained, 8)
    world.kill(POLICY)  # no seal since: from the checkpoint again, and what came after it
    world.run()
    assert world.states()[POLICY] == (*trained, 8)


def test_job_that_lost_a_payload_it_must_run_again_falls_back() -> None:
    """The operation stream above the seal is not whole: the replayed operation comes out dirty."""
    world = with_checkpoint(World())
    world.kill(POLICY)
    permit = until_permitted(world, key("policy", 1))
    world.run(until_s=world.now_s)
    gone = ErrorInfo(Code.DATA_LOSS, "the payload is not in its stream")
    finished = OperationFinished(
        permit.operation,
        permit.kind,
        COMPLETED,
        permit.epoch,
        permit.incarnation,
        world.now_s,
        0.0,
        replay=True,
        dirty=True,
        error=gone,
    )
    world.feed(finished)
    world.run()
    assert world.core.state.jobs["t.a"].state is JobState.ROLLED_BACK
    assert world.states()[POLICY] == world.checkpoints[POLICY, "best"]


def test_job_without_a_checkpoint_that_cannot_be_rebuilt_fails() -> None:
    world = ready(World(config=configured(seal_every=2)))
    for seq in (1, 2, 3):
        world.queue("a", "policy", seq, STEP)
    world.run()
    lose_seal(world)
    world.run()
    job = world.core.state.jobs["t.a"]
    assert job.state is JobState.FAILED
    assert job.error == UNREADABLE


def test_job_whose_checkpoint_cannot_be_read_either_fails() -> None:
    world = with_checkpoint(World(config=configured(seal_every=2)))
    lose_seal(world)
    world.run()
    lose_seal(world)
    world.run()
    assert world.core.state.jobs["t.a"].state is JobState.FAILED


# --- outcomes that were stored ------------------------------------------------------------------


def kill_until_given_up(world: World, op: OperationKey) -> None:
    for _ in range(world.config.max_losses + 1):
        until_permitted(world, op)
        world.kill(op.deployment_key)


@pytest.mark.parametrize("is_stored", [True, False])
def test_operation_that_is_given_up_has_the_outcome_that_is_stored(is_stored: bool) -> None:
    """Its workers died again and again, once after they had stored that it was completed."""
    world = ready(World(config=configured(max_losses=2)))
    world.queue("a", "policy", 1, STEP)
    if is_stored:
        world.done["t.a.policy.1"] = COMPLETED
    kill_until_given_up(world, key("policy", 1))
    world.queue("a", "policy", 2, STEP)
    world.run()
    assert world.done["t.a.policy.1"] is (COMPLETED if is_stored else FAILED)
    assert world.states()[POLICY] == ((1, 2) if is_stored else (2,))


# --- jobs ---------------------------------------------------------------------------------------


def test_name_of_an_ended_job_can_be_used_again() -> None:
    world = ready()
    for seq in (1, 2):
        world.queue("a", "policy", seq, STEP)
    world.run()
    world.feed(JobFinished(A, "end"))
    world.run()
    before = world.core.state.deployments["t.a.policy"].wpg.incarnation
    world.submit("a")
    world.run()
    assert world.core.state.jobs["t.a"].state is JobState.ACTIVE
    assert any(isinstance(o, outputs.DropCheckpoint) for made in world.outputs for o in made)
    again = world.core.state.deployments["t.a.policy"]
    assert (again.queue.next_seq, again.durability.applied) == (3, 2)
    assert again.wpg.incarnation > before
    world.feed(SessionOpened(A, 1))
    queue_in(world, 1, "policy", {2: STEP, 3: STEP})  # 2 is a late copy
    world.run()
    assert [op for _, _, op in world.runs][2:] == ["t.a.policy.3"]
    world.kill(POLICY)
    world.run()
    assert world.states()[POLICY] == (3,)


def test_job_that_ended_long_ago_is_forgotten() -> None:
    world = ready(World(config=configured(outcome_retention_s=1000.0)))
    world.feed(JobFinished(A, "end"))
    world.run()
    state = world.core.state
    assert (state.jobs, state.deployments, state.timers) == ({}, {}, {})
    (forgotten,) = outputs_of(world, outputs.ForgetJob)
    assert forgotten.deployments == ["policy", "reference", "sampler"]


def test_name_that_is_used_again_is_not_forgotten_with_the_job_before() -> None:
    world = ready(World(config=configured(outcome_retention_s=1000.0)))
    world.feed(JobFinished(A, "end"))
    world.submit("a")
    world.run()
    assert world.core.state.jobs["t.a"].state is JobState.ACTIVE
    assert outputs_of(world, outputs.ForgetJob) == []


def test_node_that_was_away_is_told_again_to_forget_an_ended_job() -> None:
    world = ready()
    world.feed(NodeLost(NodeId("t0"), 1, "gone"))
    world.ranks.clear()
    world.feed(JobFinished(A, "end"))
    assert not any(isinstance(c, StopWpg) and c.deployment == POLICY for c in world.commands)
    world.feed(node_up("t0", "train", revision=2))
    stops = [c for c in world.commands if isinstance(c, StopWpg) and c.deployment == POLICY]
    assert [stop.forget for stop in stops] == [True]
    world.run()
    world.feed(node_up("t0", "train", revision=3))
    assert "t0" not in world.core.state.stopping, "confirmed, and not told again"
    assert len([c for c in world.commands if isinstance(c, StopWpg)]) == 1 + 2


def test_job_waits_for_a_pool_that_no_node_has_declared_and_says_so() -> None:
    world = World()
    specs = [spec("policy", "tpu", trainable=True)]
    world.later(0, JobSubmitted(A, JobSpec(deployments=specs), "submit"))
    world.run()
    job = world.core.state.jobs["t.a"]
    view = outputs_of(world, outputs.PutView)[-1].status
    assert (view.state, view.error) == ("submitted", job.error)
    assert job.error is not None
    assert "'tpu'" in job.error.message
    world.feed(node_up("x0", "tpu"))
    world.run()
    view = outputs_of(world, outputs.PutView)[-1].status
    assert (view.state, view.error) == ("active", None)


def test_more_open_operations_than_allowed_are_refused_with_a_time_to_retry() -> None:
    world = ready(World(config=configured(max_open_operations=2)))
    for seq in (2, 3, 4):
        world.queue("a", "policy", seq, STEP)
    world.run()
    error = completion(world, key("policy", 4))
    assert error.code is Code.RESOURCE_EXHAUSTED
    assert float(error.details["retry_after_s"]) > 0
    world.queue("a", "policy", 1, STEP, error=BAD)
    world.run()
    assert world.done["t.a.policy.3"] is COMPLETED


def test_views_do_not_grow_with_the_open_operations_and_draining_publishes_few() -> None:
    world = ready()
    num_operations = 50
    for seq in range(1, num_operations + 1):
        world.feed(world.queue("a", "policy", seq, STEP))
    world.drop(lambda event: isinstance(event, QueuedOperation))
    num_before = len(outputs_of(world, PutView))
    world.feed(DrainRequested(A, "drain"))
    world.run()
    assert len(world.done) == num_operations
    views = [view.status for view in outputs_of(world, PutView)[num_before:]]
    assert (views[0].state, views[-1].state) == (JobState.DRAINING, JobState.DONE)
    assert len(views) < num_operations / 2
    assert not any(d.open_operations for view in views for d in view.deployments)


def test_versions_that_were_released_while_their_node_was_away_are_released_again() -> None:
    """Its seal brings them back."""
    world = ready(World(config=configured(seal_every=2)))
    for seq, kind in enumerate((STEP, "publish_weights", STEP, "publish_weights"), 1):
        world.queue("a", "policy", seq, kind)
    world.run()
    policy = world.core.state.deployments["t.a.policy"]
    policy.durability.durable_versions = [2, 4]  # the seal was made before 4 was published
    world.lose_train_node()
    num_before = len(world.commands)
    world.run()
    released = [c for c in world.commands[num_before:] if isinstance(c, ReleaseVersions)]
    assert [v.seq for c in released for v in c.versions] == [2]
    assert policy.wpg.state is WpgState.READY


def test_every_outcome_has_a_state_of_an_operation() -> None:
    assert {OpState(outcome) for outcome in Outcome} <= set(OpState)


def eventful() -> World:
    """Every way in which an operation or a job can end, in one log."""
    world = with_checkpoint(World(config=configured(seal_every=2, max_losses=1)))
    queue_in(world, 1, "sampler", {2: "generate", 4: "generate"})
    until_permitted(world, key("sampler", 2))
    cancel(world, key("sampler", 2))
    cancel(world, key("sampler", 4))
    queue_in(world, 1, "policy", {7: STEP})
    kill_until_given_up(world, key("policy", 7))
    world.run()
    world.feed(SessionLost(A, 1))
    lose_seal(world)
    world.run()
    world.feed(SessionOpened(A, 2))
    queue_in(world, 2, "policy", {8: FB, 9: STEP})
    world.run()
    world.feed(JobFinished(A, "end"))
    world.submit("a")
    world.run()
    return world


@pytest.mark.parametrize("every", [1, 7])
def test_eventful_log_gives_the_same_outputs_from_whatever_snapshot(every: int) -> None:
    """I7, where a restart is likeliest: among failures."""
    world = eventful()
    core = Core()
    for sequence, (time_s, event) in enumerate(world.log, start=1):
        if sequence % every == 0:
            core = Core.restore(core.snapshot())
        assert core.step(sequence, time_s, event) == world.outputs[sequence - 1]
