"""Sharing a device in space: who runs beside whom, and that no two ever use the same units.

The world asserts at every permit and at every change of a share that no two deployments on a device
may be using the same unit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from phaseloom.common.contract.commands import AdjustClaims, Permit
from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.events import ClaimsAdjusted, JobSubmitted
from phaseloom.common.contract.ids import JobKey
from phaseloom.common.contract.operations import Outcome
from phaseloom.common.contract.specs import (
    Cycle,
    JobSpec,
    KindSlowdown,
    Residency,
    Segment,
    SlowdownTable,
)
from phaseloom.common.process.slowdowns import SUB_STAGES
from phaseloom.scheduler.core.core import Core
from phaseloom.scheduler.core.dispatch.explain import explain
from phaseloom.scheduler.core.planning.chains import Stage
from phaseloom.scheduler.core.policies.registry import MULTIPLEXING, check_policies
from phaseloom.scheduler.core.policies.sharing_view import Claim, Multiplexing, SharingView
from phaseloom.scheduler.core.state.step import Step
from tests.support.world import CONFIG, STATE_BYTES, TENANT, World, deployment, node_up, spec

SHARING = replace(CONFIG, multiplexing="greedy", quantum_s=5.0, idle_grace_s=0.0)
GENERATE, TRAIN = ("generate",), ("forward_backward",)


def world_of(
    multiplexing: str = "greedy",
    *,
    units: int = 2,
    memory: int = 10,
    residency: Residency = Residency.SHARED,
    jobs: Iterable[str] = ("a", "b"),
    slowdowns: SlowdownTable | None = None,
    exclusive: Collection[str] = (),
    slos: Mapping[str, float] | None = None,
    corrects: bool = True,
    seed: int = 0,
    kind: type[World] = World,
) -> World:
    """Jobs, each with a policy and a sampler, on one device.

    Args: memory: how many of their states it holds.
    """
    config = replace(SHARING, multiplexing=multiplexing, slowdowns=slowdowns)
    config = replace(config, corrects_slowdowns=corrects)
    world = kind(config, seed, duration_s=1.0, node_names={"d0": "train"})
    up = node_up(
        "d0",
        "train",
        units=units,
        memory_bytes=memory * STATE_BYTES,
        residency=residency,
        revision=2,
    )
    world.revisions["d0"] = 2
    world.later(0, up)
    for job in jobs:
        specs = [spec("policy", "train", trainable=True), spec("sampler", "train")]
        # A job with an SLO shares with jobs of known cycles only.
        cycle = Cycle(10.0, [Segment("train", 0.0, 1.0)]) if slos else None
        slo = (slos or {}).get(job, 0.0)
        described = JobSpec(slo, specs, cycle, exclusive=job in exclusive)
        submitted = JobSubmitted(JobKey(TENANT, job), described, f"submit-{job}")
        world.later(0, submitted)
    world.run()
    return world


def run_of(world: World, operation: str) -> tuple[float, float]:
    return next((start, end) for start, end, op in reversed(world.runs) if op == f"t.{operation}")


def units_of(world: World, job: str, name: str) -> list[int] | None:
    """The units of a deployment now; None: it does not run."""
    share = world.core.state.nodes["d0"].devices[0].slots[0].share_of(str(deployment(job, name)))
    return None if share is None else share.units


def overlap_s(world: World, one: str, other: str) -> float:
    (begin, end), (also_begin, also_end) = run_of(world, one), run_of(world, other)
    return min(end, also_end) - max(begin, also_begin)


def adjustments(world: World) -> list[tuple[str, list[int], bool]]:
    told = [command for command in world.commands if isinstance(command, AdjustClaims)]
    return [(str(each.deployment), each.units, each.shrinks) for each in told]


def test_a_rollout_begins_beside_training_once_that_has_given_up_a_part() -> None:
    world = world_of()
    world.queue("a", "policy", 1, "forward_backward")
    world.queue("b", "sampler", 1, "generate")
    world.run(until_s=world.now_s + 0.1)
    assert units_of(world, "a", "policy") == [0]
    assert units_of(world, "b", "sampler") == [1]
    world.run()
    assert overlap_s(world, "a.policy.1", "b.sampler.1") > 0.3
    assert adjustments(world)[0] == ("t.a.policy", [0], True)
    assert set(world.done.values()) == {Outcome.COMPLETED}


def test_the_one_that_is_left_gets_the_whole_device_at_once() -> None:
    world = world_of()
    world.queue("a", "policy", 1, "forward_backward")
    world.queue("b", "sampler", 1, "generate")
    world.run(until_s=world.now_s + 0.1)
    first, second = run_of(world, "a.policy.1"), run_of(world, "b.sampler.1")
    world.run(until_s=min(first[1], second[1]))
    left = ("a", "policy") if second[1] < first[1] else ("b", "sampler")
    assert units_of(world, *left) == [0, 1]
    assert adjustments(world)[-1] == (str(deployment(*left)), [0, 1], False)


def test_nothing_is_given_on_before_the_rank_has_confirmed() -> None:
    world = world_of()
    world.boundary_s = 1e6
    world.queue("a", "policy", 1, "forward_backward")
    world.queue("b", "sampler", 1, "generate")
    world.run(until_s=world.now_s + 100)
    assert run_of(world, "b.sampler.1")[0] >= run_of(world, "a.policy.1")[1]


def test_who_waits_is_told_that_a_part_of_the_device_was_asked_for() -> None:
    world = world_of()
    world.boundary_s = 1e6
    world.queue("a", "policy", 1, "forward_backward")
    world.queue("b", "sampler", 1, "generate")
    world.run(until_s=world.now_s + 0.1)
    state = world.core.state
    waiting = state.deployments["t.b.sampler"]
    (op,) = waiting.queue.operations.values()
    found = explain(Step(state, state.sequence + 1, world.now_s), waiting, op)
    assert found.waits_for == [
        "device 0 of d0, which runs t.a.policy.1; it was asked to give up part of the device"
    ]


def test_an_answer_to_an_older_question_frees_nothing() -> None:
    world = world_of()
    world.boundary_s = 1e6
    world.queue("a", "policy", 1, "forward_backward")
    world.run(until_s=world.now_s + 0.01)
    world.queue("b", "sampler", "r1", "generate")
    world.run(until_s=world.now_s + 0.01)
    (asked,) = [c for c in world.commands if isinstance(c, AdjustClaims)]
    world.cancel("b", "sampler", "r1")
    assert adjustments(world)[-1] == ("t.a.policy", [0, 1], False)
    world.feed(ClaimsAdjusted(asked.deployment, asked.incarnation, asked.node, asked.id))
    assert units_of(world, "a", "policy") == [0, 1]


def test_two_of_training_are_never_put_side_by_side() -> None:
    world = world_of()
    for seq in range(1, 5):
        world.queue("a", "policy", seq, "forward_backward")
        world.queue("b", "policy", seq, "forward_backward")
    world.run()
    assert len(world.done) == 8
    assert not adjustments(world)
    ends = sorted((start, end) for start, end, _ in world.runs)
    assert all(before[1] <= after[0] for before, after in pairwise(ends))


@pytest.mark.parametrize(
    "world",
    [
        world_of("off"),
        world_of(units=1),
        world_of(memory=1),
        world_of(residency=Residency.JOB),
    ],
    ids=["it is off", "one unit", "memory of one", "jobs exclude one another"],
)
def test_nothing_runs_beside_anything_where(world: World) -> None:
    world.queue("a", "policy", 1, "forward_backward")
    world.queue("b", "sampler", 1, "generate")
    world.run()
    assert overlap_s(world, "a.policy.1", "b.sampler.1") <= 0
    assert not adjustments(world)
    assert all(not c.units for c in world.commands if isinstance(c, Permit))


def test_one_that_must_run_alone_is_overtaken_for_a_quantum_only() -> None:
    """A and B keep the device busy by turns, and training of C is never to be beside theirs."""
    world = world_of(jobs=("a", "b", "c"))
    for seq in range(1, 40):
        world.queue("a", "policy", seq, "forward_backward")
        world.queue("b", "sampler", seq, "generate")
    world.run(until_s=world.now_s + 0.5)
    asked_s = world.now_s
    world.queue("c", "policy", 1, "forward_backward")
    world.run()
    assert run_of(world, "c.policy.1")[0] < asked_s + SHARING.quantum_s + 3.0


def test_a_killed_rank_leaves_its_units_to_the_other() -> None:
    world = world_of()
    world.queue("a", "policy", 1, "forward_backward")
    world.queue("b", "sampler", 1, "generate")
    world.run(until_s=world.now_s + 0.1)
    other = run_of(world, "b.sampler.1")
    world.kill(deployment("a", "policy"))
    assert units_of(world, "a", "policy") is None
    assert units_of(world, "b", "sampler") == [0, 1]
    world.run()
    assert run_of(world, "b.sampler.1") == other
    assert set(world.done.values()) == {Outcome.COMPLETED}


def test_a_rank_killed_while_it_is_asked_for_units_frees_them_all() -> None:
    world = world_of()
    world.boundary_s = 1e6
    world.queue("a", "policy", 1, "forward_backward")
    world.queue("b", "sampler", 1, "generate")
    world.run(until_s=world.now_s + 0.1)
    assert units_of(world, "b", "sampler") is None
    world.kill(deployment("a", "policy"))
    assert units_of(world, "b", "sampler") == [0, 1]
    world.run(until_s=world.now_s + 100)
    assert set(world.done.values()) == {Outcome.COMPLETED}


def test_what_joins_a_shrinking_operation_names_only_what_is_kept() -> None:
    """The rank goes by what it was told last: a permit of all units would take back the promise."""
    world = world_of()
    world.boundary_s = 0.4
    world.queue("a", "sampler", "r1", "generate")
    world.run(until_s=world.now_s + 0.01)
    world.queue("b", "policy", 1, "forward_backward")
    world.run(until_s=world.now_s + 0.01)
    world.queue("a", "sampler", "r2", "generate")
    world.run(until_s=world.now_s + 0.01)
    joined = [c for c in world.commands if isinstance(c, Permit)][-1]
    assert str(joined.operation) == "t.a.sampler.r2"
    assert joined.units == [0]


def test_no_share_has_more_units_than_it_keeps_busy() -> None:
    """A rollout that works on one unit leaves the others free: training begins without a word."""
    greedy = MULTIPLEXING["greedy"].share
    rollout = Claim("a.sampler", "a", GENERATE, most_units=1)
    forward = Claim("b.reference", "b", ("forward",), most_units=1)
    training = Claim("c.policy", "c", TRAIN)
    assert greedy(SharingView(4, 3, [rollout])) == [1]
    assert greedy(SharingView(4, 3, [training])) == [4]
    assert greedy(SharingView(4, 3, [rollout], training)) == [1, 3]
    assert greedy(SharingView(4, 3, [training, rollout], forward)) == [2, 1, 1]


def test_static_keeps_a_part_for_each_job_whether_or_not_it_has_work() -> None:
    world = world_of("static")
    world.queue("a", "policy", 1, "forward_backward")
    world.run(until_s=world.now_s + 0.1)
    assert units_of(world, "a", "policy") == [0]
    world.queue("b", "policy", 1, "forward_backward")
    world.queue("a", "sampler", 1, "generate")
    world.run(until_s=world.now_s + 0.1)
    assert units_of(world, "b", "policy") == [1]
    assert units_of(world, "a", "sampler") is None
    world.run()
    assert not adjustments(world)


def table_of(train_on_half: float, beside: float = 1.0) -> SlowdownTable:
    """Decoding loses nothing on a half of the device, training this much, and more beside other
    training."""
    kinds = {kind: KindSlowdown({0.5: 1.0, 1.0: 1.0}) for kind in SUB_STAGES}
    kinds["train"] = KindSlowdown({0.5: train_on_half, 1.0: 1.0})
    return SlowdownTable("test", kinds, (0.5,), {"train": {"train": beside}})


def test_training_runs_beside_training_where_the_table_says_that_it_pays() -> None:
    world = world_of(slowdowns=table_of(1.4))
    world.queue("a", "policy", 1, "forward_backward")
    world.queue("b", "policy", 1, "forward_backward")
    world.run()
    assert overlap_s(world, "a.policy.1", "b.policy.1") > 0.3
    assert adjustments(world)[0] == ("t.a.policy", [0], True)


@pytest.mark.parametrize(
    "table",
    [table_of(2.0), table_of(1.95), table_of(1.4, beside=1.5)],
    ids=["a half is half as fast", "the gain is within the margin", "memory bandwidth is shared"],
)
def test_nothing_is_shared_where_the_table_says_that_it_does_not_pay(table: SlowdownTable) -> None:
    world = world_of(slowdowns=table)
    for seq in range(1, 4):
        world.queue("a", "policy", seq, "forward_backward")
        world.queue("b", "policy", seq, "forward_backward")
    world.run()
    assert len(world.done) == 6
    assert not adjustments(world)
    ends = sorted((start, end) for start, end, _ in world.runs)
    assert all(before[1] <= after[0] for before, after in pairwise(ends))


def test_a_rollout_too_is_kept_apart_where_the_table_says_so() -> None:
    """Without a table it would begin beside training."""
    kinds = {kind: KindSlowdown({0.5: 2.0, 1.0: 1.0}) for kind in SUB_STAGES}
    world = world_of(slowdowns=SlowdownTable("test", kinds, (0.5,)))
    world.queue("a", "policy", 1, "forward_backward")
    world.queue("b", "sampler", 1, "generate")
    world.run()
    assert overlap_s(world, "a.policy.1", "b.sampler.1") <= 0
    assert not adjustments(world)


def test_units_go_where_most_gets_done_by_the_table() -> None:
    """Training gains by each unit, scoring on two or more as much as on four."""
    kinds = {kind: KindSlowdown({0.25: 1.1, 0.5: 1.0, 1.0: 1.0}) for kind in SUB_STAGES}
    kinds["train"] = KindSlowdown({0.25: 3.0, 0.5: 1.7, 0.75: 1.2, 1.0: 1.0})
    table = SlowdownTable("test", kinds)
    greedy = MULTIPLEXING["greedy"].share
    training, rollout = Claim("a.policy", "a", TRAIN), Claim("b.sampler", "b", GENERATE)
    assert greedy(SharingView(4, 2, [training], rollout, table)) == [3, 1]
    assert greedy(SharingView(4, 2, [rollout], training, table)) == [1, 3]
    assert greedy(SharingView(4, 2, [training], None, table)) == [4]


@pytest.mark.parametrize("multiplexing", ["static", "greedy"])
@pytest.mark.parametrize("first", ["a", "b"])
def test_nothing_runs_beside_a_job_that_asks_to_be_alone(multiplexing: str, first: str) -> None:
    """Whichever of the two was there before. Its own operations may run side by side."""
    world = world_of(multiplexing, exclusive={"a"})
    other = "ba"["ab".index(first)]
    world.queue(first, "policy", 1, "forward_backward")
    world.queue(other, "sampler", 1, "generate")
    world.run()
    assert overlap_s(world, f"{first}.policy.1", f"{other}.sampler.1") <= 0
    assert set(world.done.values()) == {Outcome.COMPLETED}


def test_a_job_that_asks_to_be_alone_has_the_whole_device_under_a_fixed_split() -> None:
    world = world_of("static", exclusive={"a"})
    world.queue("a", "policy", 1, "forward_backward")
    world.run(until_s=world.now_s + 0.1)
    assert units_of(world, "a", "policy") == [0, 1]


@pytest.mark.parametrize(("slo", "is_beside"), [(0.0, True), (1.5, True), (1.3, False)])
def test_a_job_that_runs_is_not_slowed_down_beyond_its_slo(slo: float, *, is_beside: bool) -> None:
    """Training on half of the device takes 1.4 times as long."""
    world = world_of(slowdowns=table_of(1.4), slos={"a": slo})
    world.queue("a", "policy", 1, "forward_backward")
    world.queue("b", "sampler", 1, "generate")
    world.run()
    assert (overlap_s(world, "a.policy.1", "b.sampler.1") > 0) == is_beside


def two(table: SlowdownTable, first: Claim, second: Claim) -> SharingView:
    """A device of two units on which the first runs and the second may begin."""
    return SharingView(2, 2, [first], second, table)


def test_lookahead_leaves_a_small_gain_for_a_larger_one_that_comes() -> None:
    """Two of training gain 6 % side by side, two of decoding nothing; decoding beside training
    doubles what is done. If both jobs train and then decode, one waits until the other decodes."""
    kinds = {kind: KindSlowdown({0.5: 1.0, 1.0: 1.0}) for kind in SUB_STAGES}
    beside = {"train": {"train": 1.88}, "decode_large": {"decode_large": 2.0}}
    table = SlowdownTable("test", kinds, (0.5,), beside)
    ahead = [Stage("train", 1.0, 0), Stage("decode_large", 1.0, 1)]
    view = two(table, Claim("a.p", "a", TRAIN, ahead=ahead), Claim("b.p", "b", TRAIN, ahead=ahead))
    assert MULTIPLEXING["greedy"].share(view) == [1, 1]
    assert MULTIPLEXING["lookahead"].share(view) is None
    alone = [Stage("train", 1.0, 0)]
    view = two(table, Claim("a.p", "a", TRAIN, ahead=alone), Claim("b.p", "b", TRAIN, ahead=alone))
    assert MULTIPLEXING["lookahead"].share(view) == [1, 1]


def test_lookahead_puts_nothing_off_that_its_controller_awaits() -> None:
    """Decoding gains more beside the decoding that follows the other job's training. But what its
    own job does next is not known, and comes the later."""
    table = table_of(1.76)
    ahead = [Stage(kind, 0.2, i) for i, kind in enumerate(("train", "train", "decode_large"))]
    trains = Claim("a.p", "a", TRAIN, ahead=ahead)
    decodes = Claim("b.s", "b", GENERATE, 1, [Stage("decode_large", 0.3, 0)])
    assert MULTIPLEXING["lookahead"].share(two(table, trains, decodes)) == [1, 1]


@pytest.mark.parametrize(("lag_s", "is_beside"), [(0.0, True), (8.0, True), (50.0, False)])
def test_fair_lets_nobody_run_away_from_a_job_that_is_behind(
    lag_s: float, *, is_beside: bool
) -> None:
    """Training loses by the rollout beside it, which loses nothing: only where training is not
    behind already."""
    table = table_of(1.6)
    trains = Claim("a.p", "a", TRAIN, 0, [Stage("train", 1.0, 0)], 100.0, lag_s)
    decodes = Claim("b.s", "b", GENERATE, 1, [Stage("decode_large", 1.0, 0)], 100.0, 0.0)
    assert MULTIPLEXING["greedy"].share(two(table, trains, decodes)) == [1, 1]
    assert (MULTIPLEXING["fair"].share(two(table, trains, decodes)) == [1, 1]) == is_beside


@pytest.mark.parametrize("name", ["lookahead", "fair"])
def test_without_a_table_or_a_prediction_they_decide_as_greedy(name: str) -> None:
    ahead = [Stage("train", 1.0, 0)]
    first, second = (Claim(f"{job}.p", job, TRAIN, ahead=ahead) for job in "ab")
    unknown = [replace(first, ahead=[]), replace(second, ahead=[])]
    table = table_of(1.4)
    for view in (SharingView(2, 2, [first], second), two(table, *unknown)):
        assert MULTIPLEXING[name].share(view) == MULTIPLEXING["greedy"].share(view)


@pytest.mark.parametrize("name", ["lookahead", "fair"])
def test_what_is_queued_of_a_job_is_what_it_is_predicted_to_do(name: str) -> None:
    world = world_of(name, slowdowns=table_of(1.4))
    for seq in range(1, 4):
        world.queue("a", "policy", seq, "forward_backward")
        world.queue("b", "policy", seq, "forward_backward")
    world.queue("b", "sampler", 1, "generate")
    world.run()
    assert set(world.done.values()) == {Outcome.COMPLETED}
    assert overlap_s(world, "a.policy.1", "b.policy.1") > 0.3


def test_what_waits_for_an_update_is_predicted_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout with new weights may be in the log before all of the update that makes them."""
    ahead: list[list[str]] = []

    def share(view: SharingView) -> list[int] | None:
        if view.newcomer is not None:
            ahead.append([stage.kind for stage in view.running[0].ahead])
        return None if view.newcomer else [view.units]

    monkeypatch.setitem(MULTIPLEXING, "noting", Multiplexing(share, predicts=True))
    world = world_of("noting", jobs=("a", "b"))
    world.queue("a", "policy", 1, "forward_backward")
    world.queue("a", "sampler", 1, "sync_weights", after=(("policy", 3),))
    world.queue("a", "sampler", 2, "generate")
    world.queue("a", "policy", 2, "forward_backward")
    world.queue("a", "policy", 3, "optim_step")
    world.queue("b", "sampler", 1, "generate", delay_s=0.1)
    world.run()
    assert ahead[0] == ["train", "train", "train", "decode_large"]


KINDS = ("forward_backward", "optim_step", "generate", "forward")
SENT = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(KINDS), st.floats(0, 0.7)),
    min_size=1,
    max_size=25,
)


@given(
    SENT,
    st.sampled_from(sorted(MULTIPLEXING)),
    st.integers(1, 4),
    st.integers(1, 7),
    st.floats(0.001, 2.0),
    st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.floats(0, 3)), max_size=4),
    st.sampled_from([None, table_of(1.4), table_of(2.0)]),
    st.integers(0, 3),
)
@settings(deadline=None, max_examples=40)
def test_all_ends_whatever_is_sent_and_killed(
    sent: list[tuple[str, str, float]],
    multiplexing: str,
    units: int,
    memory: int,
    boundary_s: float,
    kills: list[tuple[str, bool, float]],
    slowdowns: SlowdownTable | None,
    seed: int,
) -> None:
    world = world_of(
        multiplexing, units=units, memory=memory, jobs="abc", slowdowns=slowdowns, seed=seed
    )
    world.boundary_s = boundary_s
    seqs: dict[tuple[str, str], int] = {}
    for job, kind, pause_s in sent:
        name = "policy" if kind in ("forward_backward", "optim_step") else "sampler"
        seqs[job, name] = seqs.get((job, name), 0) + 1
        world.queue(job, name, seqs[job, name], kind)
        world.run(until_s=world.now_s + pause_s)
        world.core = Core.restore(world.core.snapshot())
    for job, of_policy, after_s in kills:
        world.run(until_s=world.now_s + after_s)
        world.kill(deployment(job, "policy" if of_policy else "sampler"))
    world.run()
    assert len(world.done) == len(sent)
    assert not world.core.state.nodes["d0"].devices[0].slots[0].shares


@pytest.mark.parametrize("name", sorted(MULTIPLEXING))
@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from([GENERATE, TRAIN])), max_size=5),
    st.sampled_from([None, table_of(1.4), table_of(2.0)]),
)
@settings(deadline=None)
def test_policy_divides_no_more_than_there_is(
    name: str,
    units: int,
    num_jobs: int,
    coming: list[tuple[str, tuple[str, ...]]],
    table: SlowdownTable | None,
) -> None:
    policy = MULTIPLEXING[name]
    running = [Claim("a.0", "a", TRAIN)]
    counts = policy.share(SharingView(units, num_jobs, running, slowdowns=table))
    assert counts is not None
    assert 1 <= sum(counts) <= units
    for index, (job, kinds) in enumerate(coming, 1):
        newcomer = Claim(f"{job}.{index}", job, kinds)
        counts = policy.share(SharingView(units, num_jobs, running, newcomer, table))
        if counts is None:
            continue
        running = [*running, newcomer]
        assert len(counts) == len(running)
        assert min(counts) >= 1
        assert sum(counts) <= units


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(CallerError, match="unknown multiplexing policy 'best'") as caught:
        check_policies("pack", "hrrs", "best", 0.0, section="scheduler.")
    assert caught.value.info.field == "scheduler.multiplexing"
    assert "greedy" in (caught.value.info.remedy or "")
