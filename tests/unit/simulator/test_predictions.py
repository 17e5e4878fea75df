"""What `explain` predicts, against what comes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from phaseloom.common.contract.events import Event, OperationFinished, PhaseTrace
from phaseloom.simulator.agenda import Agenda
from phaseloom.simulator.engine import Engine
from phaseloom.simulator.jobs import ROLLOUT, TRAIN, Demand, Phase, SimJob, Submission
from phaseloom.simulator.metering import Meter
from phaseloom.simulator.nodes import PoolSpec
from phaseloom.simulator.predictions import Prediction, accuracy, durations, predictions
from phaseloom.simulator.world import World
from tests.support.contention import config_of

ITERATIONS = 40
TAKES = {
    ROLLOUT: Demand(load_s=0.01, offload_s=0.01),
    TRAIN: Demand(load_s=0.02, offload_s=0.02),
}


def job(name: str, rollout_s: float, backward_s: float, step_s: float, sigma: float) -> SimJob:
    return SimJob(
        name=name,
        arrival_s=0.0 if name == "a" else 0.3,
        iterations=ITERATIONS,
        phases=(
            Phase(ROLLOUT, rollout_s, 2 * rollout_s, sigma),
            Phase(TRAIN, backward_s, 2 * backward_s, sigma, kind="forward_backward"),
            Phase(TRAIN, step_s, 2 * step_s, sigma, kind="optim_step"),
            Phase(TRAIN, step_s / 2, kind="publish_weights"),
        ),
        demands=TAKES,
        submission=Submission.CYCLE,
    )


def log_of(jobs: list[SimJob], ordering: str) -> list[tuple[int, float, Event]]:
    """The log of jobs on one rollout and one train device."""
    agenda, meter = Agenda(), Meter()
    engine = Engine(agenda, meter, records=True)
    pools = [PoolSpec(ROLLOUT, 1, 1.0, 10**12), PoolSpec(TRAIN, 1, 1.0, 10**12)]
    world = World(agenda, engine.append, meter, jobs, pools)
    live = {"idle_grace_s": 0.03, "quantum_s": 2.0, "max_reading": 8, "phase_hold_s": 2.0}
    engine.run(world, config_of(ordering, switch_s=0.0, speculative_switch_in=True, **live))
    return [(place + 1, time_s, event) for place, (time_s, event) in enumerate(engine.log)]


@pytest.mark.parametrize("ordering", ["fcfs", "hrrs", "hold", "round_robin"])
@pytest.mark.parametrize(
    "cycles", [((0.5, 0.25, 0.05), (0.4, 0.35, 0.06)), ((0.2, 0.35, 0.1), (0.15, 0.3, 0.12))]
)
def test_starts_are_predicted_where_nothing_is_drawn(
    ordering: str, cycles: tuple[tuple[float, float, float], ...]
) -> None:
    """The wait behind a phase counts the switch that it began with, and what it still brings."""
    jobs = [job(name, *cycle, sigma=0.0) for name, cycle in zip("ab", cycles, strict=True)]
    found = accuracy(predictions(log_of(jobs, ordering)))
    assert found.operations > 2 * ITERATIONS - 4
    assert found.error_p90 is not None
    assert found.error_p90 < 1e-6


def test_errors_are_small_beside_the_waits_where_durations_are_drawn() -> None:
    jobs = [job("a", 0.2, 0.35, 0.1, sigma=0.1), job("b", 0.15, 0.3, 0.12, sigma=0.1)]
    found = accuracy(predictions(log_of(jobs, "hrrs")))
    assert found.error_p50 is not None
    assert found.error_p50 < 0.1


LATENCY_S = 0.04


def late(event: Event) -> Event:
    """The event as it would be where an operation begins later than permitted and switched in: its
    device is taken for as long, and the operation is shorter."""
    if isinstance(event, OperationFinished):
        started_s = event.started_unix_s + LATENCY_S
        return replace(event, duration_s=event.duration_s - LATENCY_S, started_unix_s=started_s)
    if isinstance(event, PhaseTrace):
        estimates = [replace(e, duration_s=e.duration_s - LATENCY_S) for e in event.estimates]
        return replace(event, estimates=estimates)
    return event


def test_latency_of_commands_and_outcomes_is_learned() -> None:
    """Where commands take their time, every operation on a device comes later by that."""
    jobs = [job("a", 0.5, 0.25, 0.1, sigma=0.1), job("b", 0.4, 0.35, 0.1, sigma=0.1)]
    log = log_of(jobs, "hrrs")
    in_time = accuracy(predictions(log))
    found = accuracy(predictions((place, time_s, late(event)) for place, time_s, event in log))
    assert found.bias_seconds is not None
    assert in_time.bias_seconds is not None
    assert found.bias_seconds > in_time.bias_seconds - LATENCY_S / 2


def test_short_waits_are_left_out() -> None:
    found = accuracy(
        [
            Prediction("a", "generate", 0.0, 0.01),
            Prediction("b", "generate", 0.9, 1.0),
            Prediction("c", "generate", 3.0, 2.0),
        ]
    )
    assert found.operations == 2
    assert found.error_p50 == pytest.approx(0.5)
    assert found.error_seconds_p90 == pytest.approx(1.0)
    assert found.bias_seconds == pytest.approx(0.45)


def test_run_in_which_nothing_waited_has_no_errors() -> None:
    found = accuracy(predictions(log_of([job("a", 0.2, 0.2, 0.1, sigma=0.0)], "hrrs")))
    assert found.operations == 0
    assert found.error_p50 is None


def test_durations_are_compared_with_the_newest_trace_before_them() -> None:
    """Nothing is counted before a kind is measured, and nothing where durations do not vary."""
    steady = durations(log_of([job("a", 0.2, 0.3, 0.1, sigma=0.0)], "hrrs"))
    assert steady.operations > 3 * (ITERATIONS - 10)
    assert steady.error_p90 == pytest.approx(0.0, abs=1e-6)
    drawn = durations(log_of([job("a", 0.2, 0.3, 0.1, sigma=0.2)], "hrrs"))
    assert drawn.error_p50 is not None
    assert 0.05 < drawn.error_p50 < 0.2


def in_passes(name: str, passes: int, pass_s: float) -> SimJob:
    """A job that trains in several passes, all of them queued at once."""
    plain = job(name, 0.4, pass_s, 0.05, sigma=0.0)
    rollout, backward, *rest = plain.phases
    return replace(plain, phases=(rollout, *[backward] * passes, *rest))


def test_wait_for_a_quantum_lasts_until_what_runs_then_has_ended() -> None:
    """A job that has more queued than its quantum has time for is not cut short in an operation."""
    entries = log_of([in_passes("a", 1, 0.2), in_passes("b", 9, 0.3)], "hrrs")
    waits = [p for p in predictions(entries) if "a." in p.operation and p.waited_s > 1.0]
    assert len(waits) > ITERATIONS / 4
    assert sorted(p.error for p in waits)[len(waits) * 9 // 10] < 1e-6


def thinking(name: str, rollout_s: float, train_s: float) -> SimJob:
    """A job whose controller answers between two operations before their device is given away."""
    plain = job(name, rollout_s, 0.0, train_s, sigma=0.0)
    phases = (
        Phase(ROLLOUT, rollout_s, think_s=0.02),
        Phase(ROLLOUT, 0.1, kind="forward"),
        Phase(TRAIN, train_s, kind="optim_step"),
    )
    return replace(plain, phases=phases, submission=Submission.SERIAL)


def test_controller_that_answers_soon_keeps_the_device_and_takes_its_time() -> None:
    """What usually follows comes after the usual gap; after a long gap nothing more is expected."""
    jobs = [thinking("a", 0.2, 0.15), thinking("b", 0.3, 0.11)]
    found = accuracy(predictions(log_of(jobs, "hrrs")))
    assert found.operations > 2 * ITERATIONS - 4
    assert found.error_p90 is not None
    assert found.error_p90 < 1e-6


def out_of_date(event: Event) -> Event:
    """The event as it would be where jobs had been slower when they were measured."""
    if isinstance(event, PhaseTrace):
        slower = [replace(e, duration_s=1.3 * e.duration_s) for e in event.estimates]
        return replace(event, estimates=slower)
    return event


def test_newest_durations_count_and_not_those_of_an_old_trace() -> None:
    jobs = [job("a", 0.5, 0.25, 0.05, sigma=0.0), job("b", 0.4, 0.35, 0.06, sigma=0.0)]
    log = log_of(jobs, "fcfs")
    found = accuracy(predictions((at, time_s, out_of_date(event)) for at, time_s, event in log))
    assert found.error_p90 is not None
    assert found.error_p90 < 1e-6
