"""Sharing devices: reading operations together, several devices, phases, speculative switch-in.

The world asserts at every permit that mutating operations are alone, that one deployment at a time
uses a device, and that its state is on all of its devices.
"""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phaseloom.common.contract.commands import OpenActivation, StartWpg
from phaseloom.common.contract.errors import Code
from phaseloom.common.contract.events import (
    JobFinished,
    KindEstimate,
    OperationFinished,
    PhaseDeclared,
    PhaseTrace,
    SessionLost,
    SessionOpened,
)
from phaseloom.common.contract.ids import JobKey
from phaseloom.common.contract.operations import Outcome
from phaseloom.common.contract.specs import Residency, SchedulerConfig
from phaseloom.scheduler.core.dispatch import explain
from phaseloom.scheduler.core.state.step import Step
from phaseloom.scheduler.core.state.transitions import JobState
from tests.support.world import CONFIG, World, deployment, node_up


def configured(**changes: object) -> SchedulerConfig:
    return msgspec.structs.replace(CONFIG, **changes)


def world_of(*jobs: str, num_ranks: int = 1, world: World | None = None) -> World:
    """Jobs that are up and have nothing to do."""
    world = world or World()
    for job in jobs:
        world.submit(job, num_ranks=num_ranks)
    world.run()
    return world


def advance(world: World, seconds: float) -> None:
    until_s = world.now_s + seconds
    world.run(until_s=until_s)
    world.now_s = max(world.now_s, until_s)


def run_of(world: World, operation: str) -> tuple[float, float]:
    """(start, end) of an operation's last run."""
    return next((start, end) for start, end, op in reversed(world.runs) if op == f"t.{operation}")


def opened(world: World) -> list[OpenActivation]:
    return [c for c in world.commands if isinstance(c, OpenActivation)]


# --- Reading operations together ------------------------------------------------------------------


def test_reading_operations_run_together_up_to_the_limit() -> None:
    world = world_of("a", world=World(config=configured(max_reading=4)))
    for index in range(6):
        world.queue("a", "sampler", f"r{index}", "generate")
    world.run()
    starts = sorted(start for start, _, _ in world.runs)
    ends = sorted(end for _, end, _ in world.runs)
    assert starts[:4] == [starts[0]] * 4
    assert starts[4:] == pytest.approx(ends[:2]), "one joins as one ends"


def test_ordered_reading_operations_run_together_between_mutating_ones() -> None:
    world = world_of("a")
    kinds = ["sync_weights", "generate", "forward", "save_state", "sync_weights", "generate"]
    world.queue("a", "policy", 1, "publish_weights")
    for seq, kind in enumerate(kinds, 1):
        version = 1 if kind == "sync_weights" else None
        after = (("policy", 1),) if version else ()
        world.queue("a", "sampler", seq, kind, after=after, version=version)
    world.run()
    runs = {seq: run_of(world, f"a.sampler.{seq}") for seq in range(1, 7)}
    assert runs[2][0] == runs[3][0] == runs[4][0] == pytest.approx(runs[1][1])
    assert runs[5][0] == pytest.approx(max(runs[seq][1] for seq in (2, 3, 4)))
    assert runs[6][0] == pytest.approx(runs[5][1])
    assert set(world.done.values()) == {Outcome.COMPLETED}
    world.check_replay()


def test_newcomer_joins_what_runs() -> None:
    world = world_of("a")
    world.queue("a", "sampler", 1, "generate")
    advance(world, 0.01)
    world.queue("a", "sampler", 2, "generate")
    world.run()
    (first_s, first_end_s), (second_s, _) = (run_of(world, f"a.sampler.{seq}") for seq in (1, 2))
    assert second_s == pytest.approx(first_s + 0.01)
    assert second_s < first_end_s
    assert len(opened(world)) == 1


def test_mutating_operation_ends_an_endless_batch_of_its_deployment() -> None:
    """I1: nothing joins once a mutating operation is at the head; what runs drains."""
    world = world_of("a")
    for index in range(40):
        world.queue("a", "sampler", f"r{index}", "generate")
        if index == 10:
            world.queue("a", "sampler", 1, "load_state")
            queued_s = world.now_s
        advance(world, 0.03)  # less than a generation takes: the batch never ends by itself
    world.run()
    start_s, end_s = run_of(world, "a.sampler.1")
    assert start_s - queued_s <= 1.5 * world.duration_s
    assert not any(
        start < end_s and end > start_s for start, end, _ in world.runs if start != start_s
    )
    assert len(world.done) == 41


def test_unordered_operations_go_on_while_the_mutating_head_waits_elsewhere() -> None:
    """The controller may need them before it publishes what the head comes after."""
    world = world_of("a")
    world.queue("a", "sampler", 1, "sync_weights", after=(("policy", 1),), version=1)
    world.queue("a", "sampler", "rone", "generate")
    world.run()
    assert world.done == {"t.a.sampler.rone": Outcome.COMPLETED}


def test_sibling_goes_first_after_a_quantum_though_the_policy_prefers_the_others() -> None:
    """HRRS would run short operations for as long as new ones come."""
    world = world_of("a", world=World(config=configured(quantum_s=0.5)))
    short = KindEstimate("sampler", "generate", 0.001, -1.0, count=9)
    long = KindEstimate("reference", "forward", 100.0, -1.0, count=9)
    world.feed(PhaseTrace(JobKey("t", "a"), 0.0, [], [short, long]))
    world.queue("a", "sampler", "rfirst", "generate")
    world.queue("a", "reference", 1, "forward")
    queued_s = world.now_s
    for index in range(60):
        world.queue("a", "sampler", f"r{index}", "generate")
        advance(world, 0.03)
    world.run()
    start_s, _ = run_of(world, "a.reference.1")
    assert start_s - queued_s <= 0.5 + 1.5 * world.duration_s


@pytest.mark.parametrize("quantum_s", [0.0, 0.5])
def test_endless_reading_of_a_job_does_not_starve_another(quantum_s: float) -> None:
    world = world_of("a", "b", world=World(config=configured(quantum_s=quantum_s)))
    for index in range(100):
        world.queue("a", "sampler", f"r{index}", "generate")
        if index == 5:
            world.queue("b", "reference", 1, "forward")
            queued_s = world.now_s
        advance(world, 0.03)
    world.run()
    start_s, _ = run_of(world, "b.reference.1")
    assert start_s - queued_s <= quantum_s + 1.5 * world.duration_s
    assert len(world.done) == 101
    world.check_replay()


def test_endless_reading_does_not_starve_another_deployment_of_its_job() -> None:
    world = world_of("a", world=World(config=configured(quantum_s=0.5)))
    for index in range(100):
        world.queue("a", "sampler", f"r{index}", "generate")
        if index == 5:
            world.queue("a", "reference", 1, "forward")
            queued_s = world.now_s
        advance(world, 0.03)
    world.run()
    start_s, _ = run_of(world, "a.reference.1")
    assert start_s - queued_s <= 0.5 + 1.5 * world.duration_s
    assert len(world.done) == 101


def test_operation_after_a_reading_one_goes_on_as_soon_as_that_has_ended() -> None:
    """`sampler` 2 ends while 1 still runs: what names 2 waits for 2 only."""
    world = world_of("a")
    world.duration_s = 10.0
    world.queue("a", "sampler", 1, "generate")
    advance(world, 0.01)
    world.duration_s = 0.1
    world.queue("a", "sampler", 2, "generate")
    world.queue("a", "policy", 1, "forward_backward", after=(("sampler", 2),))
    world.run()
    start_s, _ = run_of(world, "a.policy.1")
    assert start_s == pytest.approx(run_of(world, "a.sampler.2")[1])
    assert start_s < run_of(world, "a.sampler.1")[1]
    assert world.core.state.deployments["t.a.sampler"].queue.next_seq == 3


def test_second_word_of_an_operation_that_ended_out_of_order_changes_nothing() -> None:
    world = world_of("a")
    world.duration_s = 10.0
    world.queue("a", "sampler", 1, "generate")
    advance(world, 0.01)
    world.duration_s = 0.1
    event = world.queue("a", "sampler", 2, "generate")
    advance(world, 1.0)
    finished = next(e for _, e in world.log if isinstance(e, OperationFinished))
    world.core.step(len(world.log) + 1, world.now_s, finished)
    assert world.core.state.deployments["t.a.sampler"].queue.next_seq == 1
    world.log.append((world.now_s, finished))
    world.payloads[str(event.key)] = event
    world.feed(event)  # a copy of it
    assert str(event.key) not in world.payloads
    world.run()
    assert world.core.state.deployments["t.a.sampler"].queue.operations == {}


def test_operation_that_kills_its_workers_does_not_take_its_batch_along() -> None:
    """After a loss what ran in it runs alone: the one to blame is found, the others complete."""
    world = world_of("a", world=World(config=configured(max_losses=2)))
    for slot in ("rone", "rpoison", "rtwo"):
        world.queue("a", "sampler", slot, "generate")
    sampler = world.core.state.deployments["t.a.sampler"]
    key = deployment("a", "sampler")
    while "t.a.sampler.rpoison" not in world.done:
        while not any(operation.slot == "rpoison" for operation in sampler.activation.running):
            advance(world, 0.01)
        world.kill(key)
    world.run()
    assert world.done == {
        "t.a.sampler.rone": Outcome.COMPLETED,
        "t.a.sampler.rpoison": Outcome.FAILED,
        "t.a.sampler.rtwo": Outcome.COMPLETED,
    }


def test_refused_activation_gives_back_the_whole_batch() -> None:
    world = world_of("a")
    for slot in ("rone", "rtwo"):
        world.queue("a", "sampler", slot, "generate")
    advance(world, 0.0)
    (command,) = opened(world)
    world.refuse(command)
    world.run()
    assert set(world.done.values()) == {Outcome.COMPLETED}
    assert len(world.done) == 2
    assert len(opened(world)) == 2


# --- Several devices ------------------------------------------------------------------------------


def test_deployment_with_two_ranks_takes_two_devices_of_one_node() -> None:
    world = world_of("a", num_ranks=2, world=World(num_devices=3))
    starts = {c.deployment.deployment: c.devices for c in world.commands if isinstance(c, StartWpg)}
    assert starts == {"policy": [0, 1], "sampler": [0, 1], "reference": [2]}


def mixed(world: World) -> World:
    """A deployment over both devices of a node, `wide`, and beside it one on each."""
    world_of("a", num_ranks=2, world=world)
    world_of("b", "c", world=world)
    deployments = world.core.state.deployments.items()
    devices = {name: [index for _, index in d.places] for name, d in deployments}
    assert devices["t.a.sampler"] == [0, 1]
    assert devices["t.b.sampler"] == [1]
    assert devices["t.c.reference"] == [0]
    return world


WIDE = ("a", "sampler")
NARROW = (("b", "sampler"), ("c", "reference"))


def test_claims_on_all_devices_are_taken_at_once() -> None:
    """The world asserts that no two deployments on one device overlap."""
    world = mixed(World(num_devices=2))
    for seq in range(1, 9):
        for job, name in (WIDE, *NARROW):
            world.queue(job, name, seq, "load_state")
    world.run()
    assert len(world.done) == 24
    world.check_replay()


@pytest.mark.parametrize(
    ("endless", "waiting"),
    [(NARROW, (WIDE,)), ((WIDE,), NARROW), ((WIDE,), NARROW[:1])],
    ids=["two-for-one", "one-for-two", "one-for-one"],
)
def test_no_layout_starves_another(
    endless: tuple[tuple[str, str], ...], waiting: tuple[tuple[str, str], ...]
) -> None:
    quantum_s = 0.5
    world = mixed(World(num_devices=2, config=configured(quantum_s=quantum_s)))
    for seq in range(1, 101):
        for job, name in endless:
            world.queue(job, name, seq, "load_state")
    advance(world, 0.35)
    for job, name in waiting:
        world.queue(job, name, 1, "load_state")
    queued_s = world.now_s
    world.run()
    for job, name in waiting:
        start_s, _ = run_of(world, f"{job}.{name}.1")
        assert start_s - queued_s <= 2 * quantum_s + 4 * 1.5 * world.duration_s
    assert len(world.done) == 100 * len(endless) + len(waiting)


def test_turns_that_miss_each_other_do_not_starve_a_deployment_over_several_devices() -> None:
    """Two jobs take turns on each of its devices, half a quantum apart."""
    quantum_s = 0.5
    world = mixed(World(num_devices=2, config=configured(quantum_s=quantum_s), duration_s=0.01))
    for seq in range(1, 251):
        for job, name in itertools.product("bc", ("reference", "sampler")):
            # The samplers begin half a quantum after the references.
            if name == "reference" or seq > 12:
                world.queue(job, name, seq if name == "reference" else seq - 12, "load_state")
        if seq == 25:
            world.queue("a", "sampler", 1, "load_state")
            queued_s = world.now_s
        advance(world, 2 * world.duration_s)
    world.run()
    start_s, _ = run_of(world, "a.sampler.1")
    assert start_s - queued_s <= 4 * quantum_s


def test_job_that_no_node_could_hold_is_refused_with_the_numbers() -> None:
    world = world_of("a", num_ranks=4, world=World(num_devices=2))
    job = world.core.state.jobs["t.a"]
    assert job.state is JobState.REJECTED
    assert job.error is not None
    assert job.error.code is Code.RESOURCE_EXHAUSTED
    assert "4 devices" in job.error.message
    assert "more than 2" in job.error.message
    assert not [c for c in world.commands if isinstance(c, StartWpg)]


def test_job_is_placed_on_the_node_that_has_enough_devices() -> None:
    world = World()
    for name, pool in (("r1", "rollout"), ("t1", "train")):
        world.later(0, node_up(name, pool, num_devices=4))
    world_of("a", num_ranks=4, world=world)
    nodes = {d.node for d in world.core.state.deployments.values()}
    assert nodes == {"r1", "t1"}


def test_wpg_lost_on_two_devices_frees_both() -> None:
    world = world_of("a", num_ranks=2, world=World(num_devices=2))
    world.queue("a", "policy", 1, "forward_backward")
    advance(world, 0.01)
    world.kill(deployment("a", "policy"))
    assert not any(d.slots[0].running for n in world.core.state.nodes.values() for d in n.devices)
    world.run()
    assert world.done == {"t.a.policy.1": Outcome.COMPLETED}


def test_claim_of_a_wpg_that_died_is_dropped() -> None:
    world = mixed(World(num_devices=2))
    node = world.core.state.nodes["r0"]
    world.queue("b", "sampler", 1, "load_state")
    advance(world, 0.01)
    world.queue("a", "sampler", 1, "load_state")
    advance(world, 2 * CONFIG.quantum_s)
    world.queue("b", "sampler", 2, "load_state")
    advance(world, 0.01)
    world.queue("a", "sampler", 2, "load_state")
    advance(world, 0.0)
    assert node.claims == ["t.a.sampler"]
    world.queue("c", "reference", 1, "load_state")
    advance(world, 0.0)
    assert node.devices[0].slots[0].running == "", "nothing begins on a claimed device"
    world.kill(deployment("a", "sampler"))
    assert node.claims == []
    assert node.devices[0].slots[0].running == "t.c.reference"
    world.run()
    assert len(world.done) == 5


# --- Declared phases ------------------------------------------------------------------------------


def declare(world: World, job: str, *, is_open: bool, session: int = 0) -> None:
    world.feed(PhaseDeclared(JobKey("t", job), session, "rollout", is_open))


def held_s(world: World, events: str = "") -> float:
    """How long `b` waits for the device after `a` has used it last."""
    world.run()
    return run_of(world, "b.sampler.1")[0] - run_of(world, "a.sampler.1")[1]


def two_on_a_device(world: World | None = None) -> World:
    world = world_of("a", "b", world=world)
    world.queue("a", "sampler", 1, "generate")
    advance(world, 0.001)
    world.queue("b", "sampler", 1, "generate")
    return world


def test_declared_phase_holds_the_device_longer_than_the_grace() -> None:
    world = two_on_a_device()
    declare(world, "a", is_open=True)
    assert held_s(world) == pytest.approx(CONFIG.phase_hold_s)
    world.check_replay()


def test_declared_phase_holds_no_longer_than_the_quantum() -> None:
    world = two_on_a_device(World(config=configured(phase_hold_s=60.0)))
    declare(world, "a", is_open=True)
    start_s, end_s = run_of(world, "a.sampler.1")
    assert held_s(world) == pytest.approx(CONFIG.quantum_s - (end_s - start_s))


def test_end_of_a_phase_gives_the_device_away_at_once() -> None:
    world = two_on_a_device()
    declare(world, "a", is_open=True)
    end_s = run_of(world, "a.sampler.1")[1]
    advance(world, end_s - world.now_s + 0.2)
    declare(world, "a", is_open=False)
    assert held_s(world) == pytest.approx(0.2)


def test_phase_that_ended_before_its_last_operation_leaves_no_grace() -> None:
    world = two_on_a_device()
    declare(world, "a", is_open=True)
    declare(world, "a", is_open=False)
    assert held_s(world) == pytest.approx(0.0)


def test_grace_is_back_with_the_next_operation() -> None:
    world = two_on_a_device()
    declare(world, "a", is_open=True)
    declare(world, "a", is_open=False)
    world.run()
    advance(world, 1.0)
    world.queue("a", "sampler", 2, "generate")
    advance(world, 0.001)
    world.queue("b", "sampler", 2, "generate")
    world.run()
    gap_s = run_of(world, "b.sampler.2")[0] - run_of(world, "a.sampler.2")[1]
    assert gap_s == pytest.approx(CONFIG.idle_grace_s)


@pytest.mark.parametrize("end", ["lost", "attached", "finished"])
def test_phase_ends_with_its_controller(end: str) -> None:
    world = two_on_a_device()
    declare(world, "a", is_open=True)
    end_s = run_of(world, "a.sampler.1")[1]
    advance(world, end_s - world.now_s + 0.2)
    job = JobKey("t", "a")
    match end:
        case "lost":
            world.feed(SessionLost(job, 0))
        case "attached":
            world.feed(SessionOpened(job, 1))
        case "finished":
            world.feed(JobFinished(job, "x"))
    assert held_s(world) == pytest.approx(0.2)


def test_older_session_declares_nothing() -> None:
    world = two_on_a_device()
    world.feed(SessionOpened(JobKey("t", "a"), 2))
    declare(world, "a", is_open=True, session=1)
    assert held_s(world) <= CONFIG.idle_grace_s + 1e-6


# --- Speculative switch-in -----------------------------------------------------------------------


def trace(job: str, name: str, kind: str, gap_s: float) -> PhaseTrace:
    return PhaseTrace(JobKey("t", job), 0.0, [], [KindEstimate(name, kind, 0.1, gap_s, count=9)])


def cycle(world: World, gaps_s: dict[str, float], seconds: float) -> None:
    """Each job generates so long after its last generation has ended."""
    end_s = world.now_s + seconds
    seqs = dict.fromkeys(gaps_s, 0)
    due_s = {job: world.now_s + 0.3 * index for index, job in enumerate(gaps_s)}
    while min(due_s.values()) < end_s:
        job = min(due_s, key=lambda name: (due_s[name], name))
        advance(world, due_s[job] - world.now_s)
        seqs[job] += 1
        world.queue(job, "sampler", seqs[job], "generate")
        key = f"t.{job}.sampler.{seqs[job]}"
        while not any(op == key for _, _, op in world.runs):
            advance(world, 0.001)
        due_s[job] = run_of(world, key[2:])[1] + gaps_s[job]


def speculative(world: World) -> list[OpenActivation]:
    return [c for c in opened(world) if c.is_speculative]


def speculative_world(
    *, speculative_switch_in: bool = True, num_ranks: int = 1, **gaps_s: float
) -> World:
    world = World(
        config=configured(speculative_switch_in=speculative_switch_in), num_devices=num_ranks
    )
    world_of(*gaps_s, num_ranks=num_ranks, world=world)
    for job, gap_s in gaps_s.items():
        world.feed(trace(job, "sampler", "generate", gap_s))
    return world


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_activation_is_opened_before_the_operation_that_is_predicted(num_ranks: int) -> None:
    world = speculative_world(a=2.0, b=2.0, num_ranks=num_ranks)
    cycle(world, {"a": 2.0, "b": 2.0}, 20.0)
    world.run()
    guesses = speculative(world)
    assert len(guesses) >= 10
    # From the second cycle on nobody opens an activation when an operation is there already.
    late = [c for c in opened(world) if not c.is_speculative]
    assert len(late) <= 4
    world.check_replay()


def test_early_activation_is_begun_at_once_where_what_it_displaces_comes_later() -> None:
    world = speculative_world(a=2.0, b=2.0)
    cycle(world, {"a": 2.0, "b": 2.0}, 20.0)
    world.run()
    ends_s = [end_s for _, end_s, _ in world.runs]
    guesses = speculative(world)[4:]
    assert len(guesses) > 4
    assert all(world.log[guess.epoch - 1][0] in ends_s for guess in guesses)


@pytest.mark.parametrize("latency_s", [0.0, 0.05])
def test_early_activation_is_just_open_where_what_it_displaces_may_come_before(
    latency_s: float,
) -> None:
    """`a` comes after 2 s, and has come after a tenth of that."""
    world = speculative_world(a=2.0, b=2.0)
    world.latency_s = latency_s
    estimate = KindEstimate("sampler", "generate", 0.1, 2.0, count=9, gap_p10_s=0.2)
    world.feed(PhaseTrace(JobKey("t", "a"), 0.0, [], [estimate]))
    cycle(world, {"b": 2.0, "a": 2.0}, 20.0)
    world.run()
    leads_s = []
    for guess in speculative(world)[4:]:
        at_s = world.log[guess.epoch - 1][0]
        after_s = [start_s for start_s, _, op in world.runs if ".b." in op and start_s > at_s]
        if guess.deployment.job == "b" and after_s:
            leads_s.append(min(after_s) - at_s)
    # It takes 20 ms and the latency.
    assert leads_s == pytest.approx([0.02 + latency_s] * len(leads_s), abs=0.005)
    assert len(leads_s) > 2


def test_speculative_switch_in_changes_no_result() -> None:
    ends = []
    for speculative_switch_in in (True, False):
        world = speculative_world(a=1.0, b=1.3, speculative_switch_in=speculative_switch_in)
        cycle(world, {"a": 1.0, "b": 1.3}, 6.0)
        world.run()
        assert bool(speculative(world)) == speculative_switch_in
        ends.append((world.done, world.states()))
    assert ends[0] == ends[1]


def test_resident_job_that_is_expected_sooner_is_not_displaced_until_it_is_overdue() -> None:
    """`b` is expected at 2.1 s, `a`, which is resident, at 1.95 s; it comes at 2.2 s."""
    world = speculative_world(a=1.75, b=2.0)
    for seq in (1, 2):  # learns what follows a generation of `b`
        advance(world, 1.0)
        start_s = world.now_s
        world.queue("b", "sampler", seq, "generate")
        world.run()
    world.queue("a", "sampler", 1, "generate")
    advance(world, start_s + 2.2 - world.now_s)
    assert speculative(world) == []
    overdue_s = run_of(world, "a.sampler.1")[1] + 1.5 * 1.75
    world.run()
    (guess,) = speculative(world)
    assert guess.deployment.job == "b"
    assert world.log[guess.epoch - 1][0] == pytest.approx(overdue_s, abs=0.01)


def test_resident_job_of_which_nothing_is_known_is_not_displaced() -> None:
    world = world_of("a", "b")
    world.feed(trace("b", "sampler", "generate", 1.0))
    cycle(world, {"b": 1.0, "a": 1.0}, 4.0)
    assert not [c for c in speculative(world) if c.deployment.job == "b"]


def test_wrong_guesses_become_rare() -> None:
    """`b` is predicted to come soon after each of its operations and never does."""
    world = speculative_world(a=2.0, b=1.0)
    cycle(world, {"a": 2.0, "b": 3.9}, 150.0)
    wrong = [c for c in speculative(world) if c.deployment.job == "b"]
    num_gaps = sum(".b." in op for _, _, op in world.runs)
    assert num_gaps > 30
    assert 0 < len(wrong) <= num_gaps / 4


def test_guess_is_made_once_a_gap() -> None:
    world = speculative_world(a=1.0, b=1.0)
    cycle(world, {"a": 1.0, "b": 1.0}, 6.0)
    world.run()
    before = len(speculative(world))
    advance(world, 100.0)
    assert len(speculative(world)) - before <= 2


def test_early_activation_that_is_refused_does_no_harm() -> None:
    world = speculative_world(a=2.0, b=2.0)
    cycle(world, {"a": 2.0, "b": 2.0}, 6.0)
    world.run()
    last = speculative(world)[-1]
    world.refuse(last)
    world.run()
    seq = world.core.state.deployments[str(last.deployment)].queue.next_seq
    world.queue(last.deployment.job, "sampler", seq, "generate")
    world.run()
    assert set(world.done.values()) == {Outcome.COMPLETED}


# --- What `explain` says --------------------------------------------------------------------------


def standing(world: World, operation: str) -> tuple[list[str], int, float]:
    job, name, slot = operation.split(".")
    state = world.core.state
    step = Step(state, state.sequence, world.now_s)
    owner = state.deployments[f"t.{job}.{name}"]
    op = (
        owner.queue.operations.get(int(slot)) if slot.isdigit() else owner.queue.unordered.get(slot)
    )
    assert op is not None
    return explain.waiting_reasons(step, owner, op), *explain.queue_position(step, owner, op)


def test_waiting_operation_knows_what_runs_and_its_place() -> None:
    world = world_of("a", "b", "c")
    for job in "abc":
        world.queue(job, "sampler", 1, "load_state")
        advance(world, 0.01)
    lines, place, start_s = standing(world, "b.sampler.1")
    assert lines == ["device 0 of r0, which runs t.a.sampler.1"]
    assert place == 1
    _, other_place, other_start_s = standing(world, "c.sampler.1")
    assert other_place == 2
    assert 0 < start_s < other_start_s


def test_waiting_operation_knows_for_whom_the_device_is_kept() -> None:
    world = two_on_a_device()
    declare(world, "a", is_open=True)
    advance(world, run_of(world, "a.sampler.1")[1] - world.now_s + 0.25)
    lines, place, start_s = standing(world, "b.sampler.1")
    assert lines == ["device 0 of r0, kept for 0.75 s for job t.a, which has declared a phase"]
    assert place == 1
    assert start_s == pytest.approx(0.77, abs=0.01)


def test_operation_that_is_not_ready_has_no_place() -> None:
    world = world_of("a")
    world.queue("a", "sampler", 1, "generate", after=(("policy", 1),))
    world.run()
    assert standing(world, "a.sampler.1")[1:] == (0, -1.0)


# --- Everything at once ---------------------------------------------------------------------------

KINDS = ("generate", "forward", "generate", "load_state", "generate", "forward_backward")


@st.composite
def workloads(draw: st.DrawFn) -> list[tuple[float, str, str, str]]:
    """(seconds after the one before, job, deployment, kind): `rgenerate` has no order, `begin` and
    `end` declare a phase."""
    steps = st.tuples(
        st.sampled_from([0.0, 0.01, 0.1, 0.5]),
        st.sampled_from("abc"),
        st.sampled_from(["sampler", "reference", "policy"]),
        st.sampled_from([*KINDS, "rgenerate", "begin", "end"]),
    )
    return draw(st.lists(steps, min_size=1, max_size=40))


def play(
    workload: list[tuple[float, str, str, str]],
    kills: list[int],
    residency: Residency,
    host_memory_bytes: int = 1000,
) -> World:
    world = World(num_devices=2, config=configured(max_reading=3, quantum_s=0.3), gathers=True)
    for name, pool in (("r0", "rollout"), ("t0", "train")):
        up = node_up(
            name,
            pool,
            num_devices=2,
            revision=2,
            residency=residency,
            host_memory_bytes=host_memory_bytes,
        )
        world.later(0, up)
    world_of("a", num_ranks=2, world=world)
    world_of("b", "c", world=world)
    for job in "abc":
        world.feed(trace(job, "sampler", "generate", 0.2))
    seqs: dict[tuple[str, str], int] = {}
    for index, (wait_s, job, name, kind) in enumerate(workload):
        advance(world, wait_s)
        if kind in ("begin", "end"):
            declare(world, job, is_open=kind == "begin")
        elif kind == "rgenerate":
            world.queue(job, name, f"r{index}", "generate")
        else:
            seqs[job, name] = seqs.get((job, name), 0) + 1
            world.queue(job, name, seqs[job, name], kind)
        if index in kills:
            advance(world, 0.01)
            world.kill(deployment(job, name))
    world.run()
    return world


@settings(max_examples=40, deadline=None)
@given(
    workload=workloads(),
    kills=st.lists(st.integers(0, 39), max_size=3),
    residency=st.sampled_from(Residency),
    host_memory_bytes=st.sampled_from([30, 1000]),
)
def test_everything_ends_and_replays_whatever_is_shared(
    workload: list[tuple[float, str, str, str]],
    kills: list[int],
    residency: Residency,
    host_memory_bytes: int,
) -> None:
    world = play(workload, kills, residency, host_memory_bytes)
    assert len(world.done) == sum(kind not in ("begin", "end") for _, _, _, kind in workload)
    assert set(world.done.values()) <= {Outcome.COMPLETED}
    assert world.states() == play(workload, [], residency).states()
    state = world.core.state
    assert not any(node.claims for node in state.nodes.values())
    assert not any(
        d.queue.operations or d.queue.unordered or d.activation.running
        for d in state.deployments.values()
    )
    world.check_replay()
