"""Ordering policies at work: jobs on one device, through the core and in virtual time."""

from __future__ import annotations

import functools
import itertools

import pytest

from phaseloom.common.contract.events import JobFinished, PhaseDeclared, SessionLost, SessionOpened
from phaseloom.scheduler.core.core import Core
from phaseloom.scheduler.core.dispatch import explain
from phaseloom.scheduler.core.policies.ordering.hold import PATIENCE
from phaseloom.scheduler.core.policies.registry import ORDERING
from phaseloom.scheduler.core.state.step import Step
from tests.support.contention import TENANT, Call, Contention, Loop, config_of

BIG = [Call("forward", 19.62), Call("optim_step", 56.35), Call("publish_weights", 7.57, 201.26)]
"""PlexRL, Table 2: compute_log_prob, update_actor, sync_weight of the 30B job; rollout after."""
SMALL = [Call("forward", 9.66), Call("optim_step", 38.08), Call("publish_weights", 9.76, 231.53)]
"""The 7B job."""
CYCLES = 40


@functools.cache
def contention(ordering: str, *, is_serial: bool, num_jobs: int = 2) -> Contention:
    """Jobs of Table 2 on one node, the first at the same time as the second."""
    loops = [
        Loop(f"j{i}", SMALL if i > 1 else BIG, CYCLES, is_serial, starts_s=60.0 * (i // 2))
        for i in range(num_jobs)
    ]
    return Contention(config_of(ordering), loops).run()


@pytest.mark.parametrize("ordering", ORDERING)
def test_every_operation_runs(ordering: str) -> None:
    for is_serial in (True, False):
        runs = contention(ordering, is_serial=is_serial).runs
        assert len(runs) == 2 * CYCLES * len(BIG)


def test_hold_switches_once_a_cycle_where_hrrs_switches_at_every_operation() -> None:
    """The next operation of a serial job has not waited: under HRRS it always loses."""
    hrrs = contention("hrrs", is_serial=True)
    ours = contention("hold", is_serial=True)
    assert hrrs.switches >= 230
    assert ours.switches <= 90
    assert ours.mean_wait_s < hrrs.mean_wait_s / 10
    assert ours.makespan_s < 0.7 * hrrs.makespan_s


@pytest.mark.parametrize("is_serial", [True, False])
@pytest.mark.parametrize("num_jobs", [2, 4])
def test_hold_is_never_worse_than_hrrs(is_serial: bool, num_jobs: int) -> None:
    hrrs = contention("hrrs", is_serial=is_serial, num_jobs=num_jobs)
    ours = contention("hold", is_serial=is_serial, num_jobs=num_jobs)
    assert ours.switches <= hrrs.switches
    assert ours.mean_wait_s <= 1.01 * hrrs.mean_wait_s
    assert max(ours.waits_s) <= 2 * max(hrrs.waits_s)


def test_hold_ends_if_the_job_does_not_return() -> None:
    """The controller of the first job takes 10 s between two operations, then says nothing."""
    calls = [Call("forward", 20.0, 10.0), Call("optim_step", 20.0, 100.0)]
    loops = [
        Loop("a", calls, cycles=1, silent_after=1),
        Loop("b", [Call("forward", 20.0, 100.0)], cycles=1, starts_s=5.0),
    ]
    world = Contention(config_of("hold"), loops).run()
    (_, ended_s, first), (began_s, _, second) = world.runs
    assert (first, second) == ("a.1", "b.1")
    assert began_s == pytest.approx(ended_s + PATIENCE * 20.0 + 20.0)


def test_hold_does_not_wait_past_an_slo() -> None:
    """Whoever tolerates little delay goes before the resident job's next operations."""

    def wait_s(slo: float) -> float:
        kinds = ["forward", "forward_backward", "optim_step"]
        calls = [*(Call(kind, 15.0, 10.0) for kind in kinds), Call("publish_weights", 15.0, 40.0)]
        loops = [
            Loop("a", calls, cycles=40),
            Loop("b", [Call("forward", 10.0, 90.0)], cycles=40, slo=slo, starts_s=7.0),
        ]
        return Contention(config_of("hold"), loops).run().waits_of("b")

    assert wait_s(slo=1.5) < wait_s(slo=9.0)


@pytest.mark.parametrize("ordering", ["round_robin", "fifo_lock", "hold"])
def test_phase_of_a_serial_job_is_one_turn(ordering: str) -> None:
    assert contention(ordering, is_serial=True).switches == 2 * CYCLES


def test_round_robin_gives_every_job_one_phase_in_the_order_in_which_they_joined() -> None:
    """The second needs twice as long between its phases: the first waits for it, ready or not."""
    loops = [
        Loop("a", [Call("optim_step", 10.0, 50.0)], cycles=10),
        Loop("b", [Call("optim_step", 10.0, 150.0)], cycles=10),
        Loop("c", [Call("optim_step", 10.0, 50.0)], cycles=10),
    ]
    world = Contention(config_of("round_robin"), loops).run()
    assert world.order == ["a", "b", "c"] * 10
    assert Contention(config_of("fcfs"), loops_again(loops)).run().order != world.order


def loops_again(loops: list[Loop]) -> list[Loop]:
    return [Loop(loop.name, loop.calls, loop.cycles) for loop in loops]


def test_round_robin_passes_over_whoever_is_overdue_until_it_comes() -> None:
    loops = [
        Loop("a", [Call("optim_step", 10.0, 50.0)], cycles=30),
        Loop("b", [Call("optim_step", 10.0, 50.0)], cycles=30, silent_after=2),
    ]
    world = Contention(config_of("round_robin"), loops).run(until_s=5000.0)
    assert world.order[:4] == ["a", "b", "a", "b"]
    assert set(world.order[4:]) == {"a"}
    assert len(world.order) == 32
    gaps_s = [later[0] - earlier[1] for earlier, later in itertools.pairwise(world.runs[4:])]
    assert max(gaps_s) <= 60.0, "it waits for it once, and never again"


def test_round_robin_lets_a_late_joiner_into_the_round_that_is_running() -> None:
    """It has no rounds to make up for, and none comes twice before it."""
    call = [Call("optim_step", 10.0, 15.0)]
    loops = [Loop("a", call, 30), Loop("b", call, 30), Loop("c", call, 9, starts_s=700.0)]
    order = Contention(config_of("round_robin"), loops).run().order
    joined = order.index("c")
    assert joined > 20
    assert order[joined : joined + 27] == ["c", "a", "b"] * 9


def test_round_robin_gives_one_that_was_away_one_turn_a_round() -> None:
    """It comes back many rounds behind: they are not made up for."""
    away = [Call("optim_step", 10.0, 5.0)] * 3 + [Call("optim_step", 10.0, 900.0)]
    loops = [
        Loop("a", [Call("optim_step", 10.0, 0.0)], cycles=200),
        Loop("b", away, cycles=2, is_profiled=False),
    ]
    order = Contention(config_of("round_robin"), loops).run().order
    assert order.count("b") == 8
    assert "bb" not in "".join(order)
    assert "a" * 20 in "".join(order), "nobody waits for it"


def test_round_robin_waits_for_no_job_that_is_lost_or_of_which_nothing_is_known() -> None:
    def longest_gap_s(*, is_profiled: bool, is_lost: bool) -> float:
        loops = [
            Loop("a", [Call("optim_step", 10.0, 5.0)], cycles=60),
            Loop("b", [Call("optim_step", 10.0, 500.0)], 20, is_profiled=is_profiled),
        ]
        world = Contention(config_of("round_robin"), loops)
        if is_lost:
            world.later(5.0, SessionOpened(loops[1].key.job_key, 1))
            world.later(60.0, SessionLost(loops[1].key.job_key, 1))
        world.run(until_s=1700.0)
        return max(later[0] - earlier[1] for earlier, later in itertools.pairwise(world.runs))

    assert longest_gap_s(is_profiled=True, is_lost=False) >= 400.0, "a strict barrier"
    assert longest_gap_s(is_profiled=False, is_lost=False) < 50.0
    assert longest_gap_s(is_profiled=True, is_lost=True) < 50.0


def test_declared_phase_keeps_the_lock_until_the_controller_ends_it() -> None:
    loops = [
        Loop("a", [Call("optim_step", 10.0, 30.0)], cycles=3, is_profiled=False),
        Loop("b", [Call("optim_step", 10.0, 30.0)], cycles=3, starts_s=5.0),
    ]
    world = Contention(config_of("fifo_lock", phase_hold_s=150.0), loops)
    world.later(5.0, PhaseDeclared(loops[0].key.job_key, 0, "train", is_open=True))
    world.later(200.0, PhaseDeclared(loops[0].key.job_key, 0, "train", is_open=False))
    world.run()
    assert world.order == ["a"] * 3 + ["b"] * 3
    assert world.runs[3][0] == pytest.approx(1200.0 + 20.0), "not before the phase was over"


@pytest.mark.parametrize("ordering", ORDERING)
def test_quiet_device_sets_no_timers(ordering: str) -> None:
    loops = [Loop("a", [Call("optim_step", 10.0, 50.0)], 3), Loop("b", BIG, 3, silent_after=2)]
    world = Contention(config_of(ordering), loops).run()
    assert not world.core.state.timers
    assert len(world.runs) == 5


@pytest.mark.parametrize("ordering", ORDERING)
def test_policy_replays_from_any_snapshot(ordering: str) -> None:
    """What it goes by is in the state."""
    world = Contention(config_of(ordering), [Loop("a", BIG, 4), Loop("b", SMALL, 4, starts_s=9.0)])
    world.run()
    again = Core()
    for sequence, (time_s, event, made) in enumerate(world.log, start=1):
        assert again.step(sequence, time_s, event) == made
        again = Core.restore(again.snapshot())


def test_device_forgets_a_job_that_has_left() -> None:
    loops = [Loop("a", BIG, 2), Loop("b", SMALL, 2)]
    world = Contention(config_of("round_robin"), loops).run()
    slot = world.core.state.nodes["t0"].devices[0].slots[0]
    for known in (slot.served, slot.rounds):
        assert set(known) == {f"{TENANT}.a", f"{TENANT}.b"}
    world.feed(JobFinished(loops[0].key.job_key, "finish"))
    for known in (slot.served, slot.rounds):
        assert set(known) == {f"{TENANT}.b"}


@pytest.mark.parametrize(
    ("ordering", "why"),
    [
        ("hold", "its gap here takes 5.00 s, and to return takes 20.00 s"),
        ("fifo_lock", "its phase holds the device's lock"),
        ("round_robin", "its phase has not ended"),
    ],
)
def test_waiting_operation_knows_for_what_the_policy_leaves_the_device_idle(
    ordering: str, why: str
) -> None:
    calls = [Call("forward", 20.0, 5.0), Call("optim_step", 20.0, 200.0)]
    loops = [
        Loop("a", calls, cycles=1, silent_after=1),
        Loop("b", [Call("forward", 20.0, 100.0)], cycles=1, starts_s=5.0),
    ]
    world = Contention(config_of(ordering), loops)
    world.run(until_s=1050.0)
    world.now_s = 1051.0
    state = world.core.state
    step = Step(state, state.sequence, world.now_s)
    waiting = state.deployments[str(loops[1].key)]
    op = waiting.queue.operations[1]
    (line,) = explain.waiting_reasons(step, waiting, op)
    place, start_s = explain.queue_position(step, waiting, op)
    assert line.startswith("device 0 of t0, kept idle up to ")
    assert line.endswith(f"s for job t.a: {why}")
    assert place == 1
    world.run()
    assert world.runs[1][0] == pytest.approx(1051.0 + start_s)
    assert explain.waiting_reasons(step, waiting, op) != [line]


def test_quantum_of_the_configuration_is_kept_under_a_policy_that_waits() -> None:
    """Within it the holder's ready operations go first, whatever the policy says."""
    loops = [
        Loop("a", [Call("optim_step", 10.0, 0.0)], cycles=8),
        Loop("b", [Call("optim_step", 10.0, 0.0)], cycles=8),
    ]
    config = config_of("round_robin", quantum_s=35.0, idle_grace_s=1.0)
    world = Contention(config, loops).run()
    assert world.order[:8] == ["a", "a", "b", "b", "a", "a", "b", "b"]
