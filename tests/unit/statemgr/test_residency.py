"""The books of deployments and devices: transitions, fences, budgets, seals."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from phaseloom.common.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.ids import DeploymentKey
from phaseloom.statemgr.core.arena import PAGE_BYTES, Arena
from phaseloom.statemgr.core.residency import (
    ON_DEVICE,
    TRANSITIONS,
    InvalidTransition,
    Residency,
    State,
    Step,
    Wpg,
)

A, B, C = (DeploymentKey("acme", job, "policy") for job in "abc")


def add(books: Residency, key: DeploymentKey, heap_bytes: int, *, device: int = 0) -> Wpg:
    """A deployment in host memory."""
    books.register(f"token {key}", key, 1, device, 0)
    wpg = books.authenticate(f"token {key}")
    books.check_heap(wpg, heap_bytes, [])
    books.register_heap(wpg, heap_bytes, [], extent=hash(key))
    books.fill(wpg, 0, "digest")
    return wpg


def load(books: Residency, wpg: Wpg) -> None:
    books.begin_load(wpg)
    books.step(wpg, Step.LOAD_VERIFIED)


@pytest.mark.parametrize("state", [s for s in State if s is not State.LOST])
@pytest.mark.parametrize("step", Step)
def test_every_step_leads_where_the_table_says_or_raises_with_the_story(
    state: State, step: Step
) -> None:
    books = Residency([10])
    wpg = add(books, A, 10)
    wpg.state = state
    following = TRANSITIONS.get((state, step))
    if following is None:
        with pytest.raises(InvalidTransition, match=f"{state}: no .*{step}.*awaiting → filling"):
            books.step(wpg, step)
        assert wpg.state is state
    else:
        books.step(wpg, step)
        assert wpg.state is following


def test_every_state_can_be_left_and_reached() -> None:
    assert {state for state, _ in TRANSITIONS} == set(State) - {State.LOST}
    assert set(TRANSITIONS.values()) == set(State) - {State.LOST, State.AWAITING}


def test_lost_deployment_takes_no_step() -> None:
    books = Residency([10])
    wpg = add(books, A, 10)
    load(books, wpg)
    books.lose(wpg)
    for step in Step:
        with pytest.raises(ResourceError, match="has lost its rank"):
            books.step(wpg, step)
    assert books.device_used_bytes(0) == 0
    assert books.reap(wpg) == hash(A)
    assert books.reap(wpg) is None


def test_plan_offloads_what_is_resident_of_what_it_displaces() -> None:
    books = Residency([20])
    a, b, c = add(books, A, 10), add(books, B, 10), add(books, C, 20)
    load(books, a)
    unknown = DeploymentKey("acme", "z", "policy")
    plan = books.plan_switch_in(C, 1, 1, [A, B, A, unknown])
    assert (plan.wpg, plan.offload, plan.is_load_needed) == (c, [a], True)
    with pytest.raises(ResourceError, match="20 bytes of device 0: 10 of 20 are in use") as caught:
        books.plan_switch_in(C, 1, 1, [B])
    assert caught.value.info.code is Code.RESOURCE_EXHAUSTED
    assert not books.plan_switch_in(A, 1, 1, []).is_load_needed
    assert b.state is State.HOST


def test_plan_refuses_to_displace_itself_or_on_another_device() -> None:
    books = Residency([10, 10])
    a, b = add(books, A, 10), add(books, B, 10, device=1)
    load(books, a)
    load(books, b)
    with pytest.raises(CallerError, match="cannot displace itself"):
        books.plan_switch_in(A, 1, 1, [A])
    with pytest.raises(CallerError, match="on device 1, not 0"):
        books.plan_switch_in(A, 1, 1, [B])


def test_load_is_refused_when_the_room_is_gone_since_the_plan() -> None:
    books = Residency([10])
    a, b = add(books, A, 10), add(books, B, 10)
    books.plan_switch_in(A, 1, 1, [])
    load(books, b)
    with pytest.raises(ResourceError, match="RESOURCE_EXHAUSTED"):
        books.begin_load(a)
    assert a.state is State.HOST


def test_same_registration_again_changes_nothing() -> None:
    books = Residency([10])
    wpg = add(books, A, 10)
    assert books.register(wpg.token, A, 1, 0, 0) is None
    assert books.current(A, 1) is wpg
    with pytest.raises(CallerError, match="ALREADY_EXISTS"):
        books.register("another", A, 1, 0, 0)
    with pytest.raises(CallerError, match="in use"):
        books.register(wpg.token, B, 1, 0, 0)
    with pytest.raises(CallerError, match="device 1 of 1"):
        books.register("t", B, 1, 1, 0)


def test_fence_outlives_the_deployment_until_it_is_forgotten() -> None:
    books = Residency([10])
    books.register("t3", A, 3, 0, 0)
    assert books.drop(A, 3) is not None
    with pytest.raises(ResourceError, match="fenced"):
        books.register("t2", A, 2, 0, 0)
    with pytest.raises(CallerError, match="NOT_FOUND"):
        books.current(A, 4)
    books.forget(A)
    books.register("t1", A, 1, 0, 0)


def test_offload_over_a_prepared_seal_is_our_own_bug() -> None:
    books = Residency([10])
    wpg = add(books, A, 10)
    load(books, wpg)
    books.begin_copy(wpg)
    books.finish_copy(wpg, 4, "digest 4")
    with pytest.raises(CallerError, match="has applied 4, not 5"):
        books.prepare_seal(wpg, 5)
    books.prepare_seal(wpg, 4)
    with pytest.raises(PhaseloomError, match="over the seal prepared at 4"):
        books.begin_offload(wpg)
    books.begin_write(wpg, 4)
    with pytest.raises(CallerError, match="no copy"):
        books.begin_write(wpg, 4)
    books.end_seal(wpg)
    books.begin_offload(wpg)


def test_extent_of_a_lost_deployment_is_kept_while_it_is_sealed() -> None:
    books = Residency([10])
    wpg = add(books, A, 10)
    books.prepare_seal(wpg, 0)
    books.begin_write(wpg, 0)
    books.register("t2", A, 2, 0, 0)
    assert wpg.state is State.LOST
    assert books.reap(wpg) is None
    books.validate()
    assert books.extents() == [hash(A)]
    books.end_seal(wpg)
    assert books.reap(wpg) == hash(A)
    assert books.extents() == []


class AnySequence(RuleBasedStateMachine):
    """Whatever agents ask and ranks do, in any order: the budgets hold and the books agree."""

    def __init__(self) -> None:
        super().__init__()
        self.books = Residency([10, 16])
        self.arena = Arena(8 * PAGE_BYTES)
        self.incarnations: dict[DeploymentKey, int] = {}
        self.epoch = 0
        self.live: list[Wpg] = []

    keys = st.sampled_from([A, B, C, *(DeploymentKey("x", "y", n) for n in "de")])
    pick = st.integers(0, 1000)

    def chosen(self, pick: int, *states: State) -> Wpg | None:
        ready = [wpg for wpg in self.live if wpg.state in states]
        return ready[pick % len(ready)] if ready else None

    def over(self, wpg: Wpg) -> None:
        extent = self.books.reap(wpg)
        if extent is not None:
            self.arena.free(extent)
        self.live = [other for other in self.live if other is not wpg]

    @rule(key=keys, device=st.integers(0, 1))
    def register(self, key: DeploymentKey, device: int) -> None:
        number = self.incarnations[key] = self.incarnations.get(key, 0) + 1
        replaced = self.books.register(f"{key} {number}", key, number, device, 0)
        if replaced is not None and (replaced.prepared is None):
            self.over(replaced)
        self.live.append(self.books.authenticate(f"{key} {number}"))

    @rule(pick=pick, heap_bytes=st.integers(0, 18))
    def register_heap(self, pick: int, heap_bytes: int) -> None:
        wpg = self.chosen(pick, State.AWAITING)
        if wpg is None:
            return
        try:
            self.books.check_heap(wpg, heap_bytes, [])
            grant = self.arena.reserve(heap_bytes * PAGE_BYTES // 4, str(wpg))
        except ResourceError:
            return
        self.books.register_heap(wpg, heap_bytes, [], grant.extent)
        self.books.fill(wpg, 0, "digest")

    @rule(pick=pick, displaces=st.lists(keys), fails=st.booleans())
    def switch_in(self, pick: int, displaces: list[DeploymentKey], fails: bool) -> None:
        wpg = self.chosen(pick, State.HOST, State.RESIDENT)
        if wpg is None:
            return
        self.epoch += 1
        try:
            plan = self.books.plan_switch_in(wpg.key, wpg.incarnation, self.epoch, displaces)
        except PhaseloomError:
            return
        done = []
        for other in plan.offload:
            if other.state is State.RESIDENT and other.prepared is None:
                self.books.begin_offload(other)
                self.books.finish_offload(other, other.applied + 1, "digest")
                done.append(other)
        if not plan.is_load_needed or len(done) < len(plan.offload):
            return
        self.books.begin_load(wpg)  # the plan said that it fits
        self.books.step(wpg, Step.LOAD_FAILED if fails else Step.LOAD_VERIFIED)
        if fails:
            for other in done:
                load(self.books, other)  # and so does what was there before

    @rule(pick=pick)
    def load_what_was_not_planned(self, pick: int) -> None:
        wpg = self.chosen(pick, State.HOST)
        if wpg is not None:
            try:
                self.books.begin_load(wpg)
            except ResourceError:
                assert wpg.state is State.HOST

    @rule(pick=pick, step=st.sampled_from(Step))
    def take_any_step(self, pick: int, step: Step) -> None:
        wpg = self.chosen(pick, State.LOADING, State.OFFLOADING)
        if wpg is None or (wpg.state, step) not in TRANSITIONS:
            return
        if step is Step.OFFLOAD_VERIFIED:
            self.books.finish_offload(wpg, wpg.applied, "digest")
        else:
            wpg.digest = "digest"
            self.books.step(wpg, step)

    @rule(pick=pick)
    def begin_offload(self, pick: int) -> None:
        wpg = self.chosen(pick, State.RESIDENT)
        if wpg is not None and wpg.prepared is None:
            self.books.begin_offload(wpg)

    @rule(pick=pick)
    def seal(self, pick: int) -> None:
        wpg = self.chosen(pick, State.HOST)
        if wpg is not None and wpg.prepared is None:
            self.books.prepare_seal(wpg, wpg.applied)
            self.books.begin_write(wpg, wpg.applied)

    @rule(pick=pick)
    def end_seal(self, pick: int) -> None:
        sealed = [wpg for wpg in self.live if wpg.prepared is not None]
        if sealed:
            wpg = sealed[pick % len(sealed)]
            self.books.end_seal(wpg)
            if wpg.state is State.LOST:
                self.over(wpg)

    @rule(pick=pick)
    def lose(self, pick: int) -> None:
        wpg = self.chosen(pick, *State)
        if wpg is not None:
            self.books.lose(wpg)
            if wpg.prepared is None:
                self.over(wpg)

    @rule(pick=pick)
    def drop(self, pick: int) -> None:
        wpg = self.chosen(pick, *State)
        if wpg is None:
            return
        was_current = self.books.drop(wpg.key, wpg.incarnation) is not None
        if was_current and wpg.prepared is None:
            self.over(wpg)

    @invariant()
    def holds(self) -> None:
        self.books.validate()
        self.arena.validate()
        assert sorted(self.books.extents()) == sorted(self.arena.extents_in_use())
        # Counted here from the other side: an oracle of the budget rule.
        for device, budget in enumerate(self.books.device_budget_bytes):
            loaded = [
                w.heap_bytes for w in self.live if w.device == device and w.state in ON_DEVICE
            ]
            assert self.books.device_used_bytes(device) == sum(loaded) <= budget


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
