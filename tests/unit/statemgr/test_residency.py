"""The books of deployments and devices: transitions, fences, budgets, seals."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.contract.state_agent import RegisterWpg
from phaseloom.common.contract.state_rank import RegisterHeap
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.statemgr.node.extents import HostMemory
from phaseloom.statemgr.records.incarnations import (
    ON_DEVICE,
    TRANSITIONS,
    InvalidTransition,
    Rank,
    State,
    Step,
    Wpg,
)
from phaseloom.statemgr.records.layouts import PAGE_BYTES
from phaseloom.statemgr.records.residency import Residency

A, B, C = (DeploymentKey("acme", job, "policy") for job in "abc")


def add(residency: Residency, key: DeploymentKey, heap_bytes: int, *devices: int) -> Wpg:
    """A deployment in host memory, one rank on each device (0 where none is named)."""
    devices = devices or (0,)
    tokens = [f"token {key} {index}" for index in range(len(devices))]
    residency.register(RegisterWpg(tokens, key, 1, list(devices), 0))
    for token in tokens:
        rank = residency.authenticate(token)
        residency.check_heap(rank, RegisterHeap(heap_bytes, b""), TensorTable.of([]))
        residency.register_heap(
            rank, RegisterHeap(heap_bytes, b""), TensorTable.of([]), extent=hash(token)
        )
        residency.fill(rank, 0, "digest")
    return rank.wpg


def load(residency: Residency, wpg: Wpg) -> None:
    for rank in wpg.ranks:
        residency.begin_load(rank)
        residency.step(rank, Step.LOAD_VERIFIED)


def reaped(residency: Residency, wpg: Wpg) -> list[int | None]:
    """The extents of all memory that an incarnation gives up."""
    extents, copies = residency.reap(wpg)
    return [*extents, *(copy.extent for copy in copies)]


def held(residency: Residency) -> list[int]:
    return [*residency.extents(), *residency.copies.extents()]


def extents(key: DeploymentKey, num_ranks: int = 1) -> list[int]:
    return [hash(f"token {key} {index}") for index in range(num_ranks)]


@pytest.mark.parametrize("state", [s for s in State if s is not State.LOST])
@pytest.mark.parametrize("step", Step)
def test_every_step_leads_where_the_table_says_or_raises_with_the_story(
    state: State, step: Step
) -> None:
    residency = Residency([10])
    (rank,) = add(residency, A, 10).ranks
    rank.state = state
    following = TRANSITIONS.get((state, step))
    if following is None:
        with pytest.raises(InvalidTransition, match=f"{state}: no .*{step}.*awaiting → filling"):
            residency.step(rank, step)
        assert rank.state is state
    else:
        residency.step(rank, step)
        assert rank.state is following


def test_every_state_can_be_left_and_reached() -> None:
    assert {state for state, _ in TRANSITIONS} == set(State) - {State.LOST}
    assert set(TRANSITIONS.values()) == set(State) - {State.LOST, State.AWAITING}


def test_lost_deployment_takes_no_step() -> None:
    residency = Residency([10])
    wpg = add(residency, A, 10)
    load(residency, wpg)
    residency.lose(wpg)
    for step in Step:
        with pytest.raises(ResourceError, match="has lost its rank"):
            residency.step(wpg.ranks[0], step)
    assert residency.device_used_bytes(0) == 0
    assert reaped(residency, wpg) == extents(A)
    assert reaped(residency, wpg) == []


def test_all_ranks_are_lost_with_one() -> None:
    residency = Residency([10, 10])
    wpg = add(residency, A, 10, 0, 1)
    load(residency, wpg)
    assert [residency.device_used_bytes(device) for device in (0, 1)] == [10, 10]
    residency.lose(wpg)
    residency.validate()
    assert [residency.device_used_bytes(device) for device in (0, 1)] == [0, 0]
    assert reaped(residency, wpg) == extents(A, 2)


def test_plan_offloads_what_is_resident_of_what_it_displaces() -> None:
    residency = Residency([20])
    a, b, c = add(residency, A, 10), add(residency, B, 10), add(residency, C, 20)
    load(residency, a)
    unknown = DeploymentKey("acme", "z", "policy")
    plan = residency.plan_switch_in(C, 1, 1, [A, B, A, unknown])
    assert (plan.wpg, plan.offload, plan.load) == (c, a.ranks, c.ranks)
    with pytest.raises(ResourceError, match="20 bytes of device 0: 10 of 20 are in use") as caught:
        residency.plan_switch_in(C, 1, 1, [B])
    assert caught.value.info.code is Code.RESOURCE_EXHAUSTED
    assert residency.plan_switch_in(A, 1, 1, []).load == []
    assert b.ranks[0].state is State.HOST


def test_plan_moves_what_is_in_the_way_and_counts_each_device_by_itself() -> None:
    residency = Residency([10, 20, 10])
    a, b, c = add(residency, A, 10, 0, 1), add(residency, B, 10, 1), add(residency, C, 10, 1, 2)
    load(residency, a)
    load(residency, b)
    plan = residency.plan_switch_in(C, 1, 1, [A])
    # A's rank on device 0 is in nobody's way.
    assert (plan.offload, plan.load) == (a.ranks[1:], c.ranks)
    with pytest.raises(ResourceError, match="10 bytes of device 1: 20 of 20 are in use"):
        residency.plan_switch_in(C, 1, 2, [])
    assert residency.plan_switch_out(A, 1, 3) == a.ranks
    assert residency.plan_switch_out(C, 1, 4) == []
    assert c.ranks[0].copy is not None
    residency.copies.step(c.ranks[0].copy, Step.DEMOTE_BEGUN)
    assert residency.plan_switch_out(C, 1, 4) == []
    c.ranks[0].state = State.FILLING
    with pytest.raises(CallerError, match="filling"):
        residency.plan_switch_out(C, 1, 4)


def test_plan_counts_two_ranks_on_one_device_together() -> None:
    residency = Residency([15])
    add(residency, A, 10, 0, 0)
    with pytest.raises(ResourceError, match="20 bytes of device 0: 0 of 15 are in use"):
        residency.plan_switch_in(A, 1, 1, [])


def test_plan_of_an_earlier_epoch_displaces_nothing_that_came_later() -> None:
    """An order to switch in may be lost, and come again when what it displaces runs once more."""
    residency = Residency([10])
    a, b = add(residency, A, 10), add(residency, B, 10)
    load(residency, a)
    residency.plan_switch_in(A, 1, 17, [])
    with pytest.raises(ResourceError, match=r"epoch 16 .* is over: .* at 17") as caught:
        residency.plan_switch_in(B, 1, 16, [A])
    assert caught.value.info.code is Code.ABORTED
    assert residency.plan_switch_in(B, 1, 18, [A]).offload == a.ranks
    assert b.ranks[0].state is State.HOST


def test_plan_refuses_to_displace_itself_or_on_another_device() -> None:
    residency = Residency([10, 10])
    a, b = add(residency, A, 10), add(residency, B, 10, 1)
    load(residency, a)
    load(residency, b)
    with pytest.raises(CallerError, match="cannot displace itself"):
        residency.plan_switch_in(A, 1, 1, [A])
    with pytest.raises(CallerError, match="on device 1, not 0"):
        residency.plan_switch_in(A, 1, 1, [B])


def test_load_is_refused_when_the_room_is_gone_since_the_plan() -> None:
    residency = Residency([10])
    a, b = add(residency, A, 10), add(residency, B, 10)
    residency.plan_switch_in(A, 1, 1, [])
    load(residency, b)
    with pytest.raises(ResourceError, match="RESOURCE_EXHAUSTED"):
        residency.begin_load(a.ranks[0])
    assert a.ranks[0].state is State.HOST


def test_same_registration_again_changes_nothing() -> None:
    residency = Residency([10])
    wpg = add(residency, A, 10)
    token = wpg.ranks[0].token
    assert residency.register(RegisterWpg([token], A, 1, [0], 0)) is None
    assert residency.current(A, 1) is wpg
    with pytest.raises(CallerError, match="ALREADY_EXISTS"):
        residency.register(RegisterWpg(["another"], A, 1, [0], 0))
    with pytest.raises(CallerError, match="in use"):
        residency.register(RegisterWpg([token], B, 1, [0], 0))
    with pytest.raises(CallerError, match="in use"):
        residency.register(RegisterWpg(["twice", "twice"], B, 1, [0, 0], 0))
    with pytest.raises(CallerError, match="device must be below 1, got 1"):
        residency.register(RegisterWpg(["t"], B, 1, [1], 0))
    for tokens, devices in ((["t"], [0, 0]), ([], [])):
        with pytest.raises(CallerError, match=f"each of {len(tokens)} ranks, got {len(devices)}"):
            residency.register(RegisterWpg(tokens, B, 1, devices, 0))


def test_fence_outlives_the_deployment_until_it_is_forgotten() -> None:
    residency = Residency([10])
    residency.register(RegisterWpg(["t3"], A, 3, [0], 0))
    assert residency.drop(A, 3) is not None
    with pytest.raises(ResourceError, match="fenced"):
        residency.register(RegisterWpg(["t2"], A, 2, [0], 0))
    with pytest.raises(CallerError, match="NOT_FOUND"):
        residency.current(A, 4)
    residency.forget(A)
    residency.register(RegisterWpg(["t1"], A, 1, [0], 0))


def test_offload_over_a_prepared_seal_is_our_own_bug() -> None:
    residency = Residency([10])
    wpg = add(residency, A, 10)
    (rank,) = wpg.ranks
    load(residency, wpg)
    residency.begin_copy_out(rank, release=False)
    residency.finish_copy_out(rank, 4, "digest 4")
    with pytest.raises(CallerError, match="has applied 4, not 5"):
        residency.prepare_seal(wpg, 5)
    residency.prepare_seal(wpg, 4)
    with pytest.raises(PhaseloomError, match="overwrite the seal prepared at 4"):
        residency.begin_copy_out(rank, release=True)
    residency.begin_write(wpg, 4)
    with pytest.raises(CallerError, match="no seal of"):
        residency.begin_write(wpg, 4)
    residency.end_seal(wpg)
    residency.begin_copy_out(rank, release=True)


def test_seal_needs_all_ranks_at_the_same_seq() -> None:
    residency = Residency([10, 10])
    wpg = add(residency, A, 10, 0, 1)
    load(residency, wpg)
    for rank, applied in zip(wpg.ranks, (4, 3), strict=True):
        residency.begin_copy_out(rank, release=False)
        residency.finish_copy_out(rank, applied, "digest")
    with pytest.raises(CallerError, match=r"rank 1 of .* has applied 3, not 4"):
        residency.prepare_seal(wpg, 4)


def test_extent_of_a_lost_deployment_is_kept_while_it_is_sealed() -> None:
    residency = Residency([10])
    wpg = add(residency, A, 10)
    residency.prepare_seal(wpg, 0)
    residency.begin_write(wpg, 0)
    residency.register(RegisterWpg(["t2"], A, 2, [0], 0))
    assert wpg.is_lost
    assert reaped(residency, wpg) == []
    residency.validate()
    assert held(residency) == extents(A)
    residency.end_seal(wpg)
    assert reaped(residency, wpg) == extents(A)
    assert held(residency) == []


class AnySequence(RuleBasedStateMachine):
    """Whatever agents ask and ranks do, in any order: the budgets hold and the records agree."""

    def __init__(self) -> None:
        super().__init__()
        self.residency = Residency([10, 16])
        self.memory = HostMemory(8 * PAGE_BYTES)
        self.incarnations: dict[DeploymentKey, int] = {}
        self.epoch = 0
        self.live: list[Wpg] = []

    def teardown(self) -> None:
        self.memory.close()

    keys = st.sampled_from([A, B, C, *(DeploymentKey("x", "y", n) for n in "de")])
    pick = st.integers(0, 1000)

    def chosen(self, pick: int, *states: State) -> Wpg | None:
        """A live one of which every rank is in one of these states."""
        ready = [w for w in self.live if all(rank.state in states for rank in w.ranks)]
        return ready[pick % len(ready)] if ready else None

    def chosen_rank(self, pick: int, *states: State) -> Rank | None:
        ready = [rank for wpg in self.live for rank in wpg.ranks if rank.state in states]
        return ready[pick % len(ready)] if ready else None

    def over(self, wpg: Wpg) -> None:
        for extent in reaped(self.residency, wpg):
            assert extent is not None
            self.memory.free(extent)
        self.live = [other for other in self.live if other is not wpg]

    @rule(key=keys, devices=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def register(self, key: DeploymentKey, devices: list[int]) -> None:
        number = self.incarnations[key] = self.incarnations.get(key, 0) + 1
        tokens = [f"{key} {number} {index}" for index in range(len(devices))]
        replaced = self.residency.register(RegisterWpg(tokens, key, number, devices, 0))
        if replaced is not None and (replaced.prepared is None):
            self.over(replaced)
        self.live.append(self.residency.authenticate(tokens[0]).wpg)

    @rule(pick=pick, heap_bytes=st.integers(0, 18))
    def register_heap(self, pick: int, heap_bytes: int) -> None:
        rank = self.chosen_rank(pick, State.AWAITING)
        if rank is None:
            return
        try:
            self.residency.check_heap(rank, RegisterHeap(heap_bytes, b""), TensorTable.of([]))
            extent = self.memory.reserve(heap_bytes * PAGE_BYTES // 4, str(rank))
        except ResourceError:
            return
        self.residency.register_heap(
            rank, RegisterHeap(heap_bytes, b""), TensorTable.of([]), extent
        )
        self.residency.fill(rank, 0, "digest")

    @rule(pick=pick, displaces=st.lists(keys), fails=st.booleans())
    def switch_in(self, pick: int, displaces: list[DeploymentKey], fails: bool) -> None:
        wpg = self.chosen(pick, State.HOST, State.RESIDENT)
        if wpg is None:
            return
        self.epoch += 1
        try:
            plan = self.residency.plan_switch_in(wpg.key, wpg.incarnation, self.epoch, displaces)
        except PhaseloomError:
            return
        done = []
        for other in plan.offload:
            if other.state is State.RESIDENT and other.wpg.prepared is None:
                self.residency.begin_copy_out(other, release=True)
                self.residency.finish_copy_out(other, other.applied + 1, "digest")
                done.append(other)
        if len(done) < len(plan.offload):
            return
        for rank in plan.load:
            self.residency.begin_load(rank)  # the plan said that it fits
        for rank in plan.load:
            self.residency.step(rank, Step.LOAD_FAILED if fails else Step.LOAD_VERIFIED)
        if fails:
            for other in done:  # and so does what was there before
                self.residency.begin_load(other)
                self.residency.step(other, Step.LOAD_VERIFIED)

    @rule(pick=pick)
    def load_what_was_not_planned(self, pick: int) -> None:
        rank = self.chosen_rank(pick, State.HOST)
        if rank is not None:
            try:
                self.residency.begin_load(rank)
            except ResourceError:
                assert rank.state is State.HOST

    @rule(pick=pick, step=st.sampled_from(Step))
    def take_any_step(self, pick: int, step: Step) -> None:
        rank = self.chosen_rank(pick, State.LOADING, State.OFFLOADING)
        if rank is None or (rank.state, step) not in TRANSITIONS:
            return
        if step is Step.OFFLOAD_VERIFIED:
            self.residency.finish_copy_out(rank, rank.applied, "digest")
        else:
            rank.copied(rank.applied, "digest")
            self.residency.step(rank, step)

    @rule(pick=pick)
    def begin_offload(self, pick: int) -> None:
        rank = self.chosen_rank(pick, State.RESIDENT)
        if rank is not None and rank.wpg.prepared is None:
            self.residency.begin_copy_out(rank, release=True)

    @rule(pick=pick)
    def seal(self, pick: int) -> None:
        wpg = self.chosen(pick, State.HOST)
        if wpg is not None and wpg.prepared is None:
            seq = wpg.ranks[0].applied
            try:
                self.residency.prepare_seal(wpg, seq)
            except CallerError:
                assert any(rank.applied != seq for rank in wpg.ranks)
            else:
                self.residency.begin_write(wpg, seq)

    @rule(pick=pick)
    def end_seal(self, pick: int) -> None:
        sealed = [wpg for wpg in self.live if wpg.prepared is not None]
        if sealed:
            wpg = sealed[pick % len(sealed)]
            self.residency.end_seal(wpg)
            if wpg.is_lost:
                self.over(wpg)

    @rule(pick=pick)
    def lose(self, pick: int) -> None:
        if self.live:
            wpg = self.live[pick % len(self.live)]
            self.residency.lose(wpg)
            if wpg.prepared is None:
                self.over(wpg)

    @rule(pick=pick)
    def drop(self, pick: int) -> None:
        if not self.live:
            return
        wpg = self.live[pick % len(self.live)]
        was_current = self.residency.drop(wpg.key, wpg.incarnation) is not None
        if was_current and wpg.prepared is None:
            self.over(wpg)

    @invariant()
    def holds(self) -> None:
        self.residency.validate()
        self.memory.validate()
        assert sorted(held(self.residency)) == sorted(self.memory.extents_in_use())
        # Counted here from the other side: an oracle of the budget rule.
        ranks = [rank for wpg in self.live for rank in wpg.ranks]
        for device, budget in enumerate(self.residency.device_budget_bytes):
            loaded = [r.heap_bytes for r in ranks if r.device == device and r.state in ON_DEVICE]
            assert self.residency.device_used_bytes(device) == sum(loaded) <= budget


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
