"""Small workloads whose every second is known."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from phaseloom.common.contract.events import PhaseTrace, QueuedOperation
from phaseloom.scheduler.core.core import Core
from phaseloom.simulator.agenda import Agenda
from phaseloom.simulator.controllers import Retries
from phaseloom.simulator.engine import Engine, simulate
from phaseloom.simulator.jobs import ROLLOUT, TRAIN, Drift, Phase, SimJob, Submission
from phaseloom.simulator.metering import Meter, Span
from phaseloom.simulator.metrics import JobResult, Result
from phaseloom.simulator.nodes import Costs
from phaseloom.simulator.world import Crash, NodeFault, WorkersDie, World
from tests.unit.simulator.builders import checked_engine, config, job, pools, switching


def of(result: Result, name: str) -> JobResult:
    return next(job for job in result.jobs if job.name == name)


def spans(result: Result, node: str) -> list[tuple[str, str, float, float]]:
    return [tuple(span[1:]) for span in result.spans if span.node == node]  # type: ignore[misc]


def logged(jobs: list[SimJob]) -> Engine:
    engine, agenda, meter = checked_engine()
    engine.run(World(agenda, engine.append, meter, jobs, pools()), config())
    return engine


# --- one job -------------------------------------------------------------------------------------


def test_job_alone_takes_its_phases_one_after_the_other() -> None:
    result = simulate([job(iterations=3)], pools(), config(), records_spans=True)
    alone = of(result, "a")
    assert alone.outcome == "done"
    assert alone.mean_iteration_s == alone.solo_s == 15.0
    assert alone.slowdown == 1.0
    assert (result.makespan_s, result.switches, result.operations) == (45.0, 0, 6)
    assert spans(result, "rollout-0") == [
        ("sim.a", "generate", start_s, start_s + 10.0) for start_s in (0.0, 15.0, 30.0)
    ]
    assert spans(result, "train-0") == [
        ("sim.a", "optim_step", start_s, start_s + 5.0) for start_s in (10.0, 25.0, 40.0)
    ]


def test_bubbles_and_cost_are_what_is_held_and_not_used() -> None:
    result = simulate([job(iterations=4)], pools(3), config())
    assert result.pools[ROLLOUT].bubble_ratio == pytest.approx(1 / 3)
    assert result.pools[TRAIN].bubble_ratio == pytest.approx(2 / 3)
    assert result.cost == pytest.approx((2.0 + 4.0) * 60 / 3600)
    assert result.peak_gpus == 16
    assert result.cost_steps == [(0.0, 6.0, 16), (60.0, 0.0, 0)]


def test_controllers_own_time_and_sync_lengthen_the_iteration() -> None:
    phases = (Phase(ROLLOUT, 10.0, think_s=2.0), Phase(TRAIN, 5.0))
    result = simulate([job(phases=phases, sync_s=3.0)], pools(), config())
    assert of(result, "a").solo_s == 20.0
    # Nobody needs the weights of the last iteration: its sync is not waited for.
    assert result.makespan_s == 3 * 17.0 + 2 * 3.0


def test_one_step_asynchronous_job_is_bound_by_its_longest_phase() -> None:
    result = simulate([job(iterations=5, steps_ahead=1)], pools(), config(), records_spans=True)
    assert of(result, "a").solo_s == 10.0
    assert result.makespan_s == 5 * 10.0 + 5.0
    starts = [start_s for _, _, start_s, _ in spans(result, "rollout-0")]
    assert starts == [0.0, 10.0, 20.0, 30.0, 40.0]


def test_start_of_workers_is_waited_for() -> None:
    result = simulate([job(start_s=7.0)], pools(), config())
    assert result.makespan_s == 7.0 + 3 * 15.0


def test_deployment_over_several_nodes_keeps_them_all_busy() -> None:
    demands = {
        pool: demand.__class__(num_nodes=2, load_s=1.0) for pool, demand in switching().items()
    }
    result = simulate([job(demands=demands, iterations=2)], pools(3), config(), records_spans=True)
    assert result.pools[ROLLOUT].busy_s == 2 * 20.0
    assert result.pools[ROLLOUT].peak_nodes == 2
    assert spans(result, "rollout-0") == spans(result, "rollout-1")
    assert result.makespan_s == 2 * 15.0 + 2 * 1.0  # each deployment is loaded once


@pytest.mark.parametrize("submission", Submission)
def test_cycle_is_published_as_the_controller_submits(submission: Submission) -> None:
    engine = logged([job(iterations=2, submission=submission)])
    queued_s = [t for t, event in engine.log if isinstance(event, QueuedOperation)]
    together = [0.0, 0.0, 15.0, 15.0]
    assert queued_s == ([0.0, 10.0, 15.0, 25.0] if submission is not Submission.CYCLE else together)


# --- several jobs --------------------------------------------------------------------------------


def test_two_jobs_fill_each_others_bubbles() -> None:
    """Of two jobs alike, one rolls out while the other trains: 10 s of rollout each, 20 in all."""
    jobs = [job("a", iterations=10), job("b", iterations=10)]
    result = simulate(jobs, pools(), config())
    assert of(result, "a").mean_iteration_s <= 20.0
    assert result.makespan_s == 10 * 20.0 + 5.0
    assert result.pools[ROLLOUT].utilisation == pytest.approx(200 / 205)


def test_switches_are_charged_and_counted() -> None:
    jobs = [job(name, iterations=2, demands=switching(1.0, 0.5)) for name in ("a", "b")]
    result = simulate(jobs, pools(), config(), records_spans=True)
    rollout = spans(result, "rollout-0")
    assert rollout[:4] == [
        ("sim.a", "switch", 0.0, 1.0),  # nothing has to leave
        ("sim.a", "generate", 1.0, 11.0),
        ("sim.b", "switch", 11.0, 12.5),
        ("sim.b", "generate", 12.5, 22.5),
    ]
    assert result.pools[ROLLOUT].switches == 3
    assert result.pools[ROLLOUT].switch_s == 1.0 + 3 * 1.5
    # When b trains for the last time, a has ended: nothing has to leave.
    assert result.switches == sum(job.switches for job in result.jobs) == 5


def test_job_waits_for_a_place_and_is_told_apart_from_one_that_is_refused() -> None:
    jobs = [job("a"), job("b", 1.0), job("c", 2.0, may_wait=False)]
    result = simulate(jobs, pools(), config(placement="isolated"))
    waited, refused = of(result, "b"), of(result, "c")
    assert (waited.outcome, waited.queueing_s, waited.queueing_delay) == ("done", 44.0, 44.0 / 45.0)
    assert refused.outcome == "rejected"
    assert refused.reason
    assert (refused.queueing_s, refused.queueing_delay) == (-1.0, -1.0)


def test_slo_is_of_the_mean_iteration_and_the_share_of_single_ones_is_told() -> None:
    drift = (Drift(ROLLOUT, (1.0, 1.0, 2.0)),)
    jobs = [job("a", iterations=4, slo=1.1, drift=drift), job("b", slo=1.1), job("c")]
    result = simulate(jobs, pools(3), config(placement="isolated"))
    drifted = of(result, "a")
    assert drifted.mean_iteration_s == (15.0 + 15.0 + 15.0 + 20.0) / 4 > 1.05 * 15.0
    assert drifted.is_slo_met
    assert drifted.within_slo == 0.75
    assert (result.slo_attainment, result.iterations_within_slo) == (1.0, 6 / 7)
    worse = [replace(jobs[0], slo=1.05), *jobs[1:]]
    assert simulate(worse, pools(3), config(placement="isolated")).slo_attainment == 0.5


def test_job_that_was_profiled_moves_and_its_nodes_are_given_back() -> None:
    """Measured alone, it then shares; each deployment goes when it may, the training one sealed."""
    jobs = [job("a", iterations=20), job("b", iterations=6, is_declared=False, move_s=8.0)]
    costs = Costs(stop_s=0.25, seal_s=1.0)
    scheduler = config(placement="pack", duty_limit=0.9)
    result = simulate(jobs, pools(2), scheduler, costs=costs, records_spans=True)
    assert (of(result, "a").moves, of(result, "b").moves, result.moves) == (0, 1, 1)
    gone_s = {"rollout-1": 15.0 + 0.25, "train-1": 15.0 + 1.0 + 0.25}
    assert [step[0] for step in result.cost_steps][:3] == [0.0, *gone_s.values()]
    after = [span for span in result.spans if span.job == "sim.b" and span.start_s >= 15.0]
    assert {span.node for span in after} == {"rollout-0", "train-0"}
    assert after[0].start_s >= gone_s["rollout-1"] + 8.0


# --- time ----------------------------------------------------------------------------------------


def test_durations_are_the_same_under_every_schedule() -> None:
    phases = (Phase(ROLLOUT, 10.0, 14.0, 0.6), Phase(TRAIN, 5.0, 6.0, 0.3))
    jobs = [job(name, iterations=20, phases=phases) for name in ("a", "b")]
    together = simulate(jobs, pools(), config(), seed=3)
    apart = simulate(jobs, pools(2), config(placement="isolated"), seed=3)
    assert together.pools[ROLLOUT].busy_s == pytest.approx(apart.pools[ROLLOUT].busy_s)
    assert together.pools[ROLLOUT].busy_s < 40 * 14.0
    assert of(apart, "a").slowdown == pytest.approx(1.0)
    assert of(together, "a").slowdown > 1.1
    other = simulate(jobs, pools(), config(), seed=4)
    assert other.pools[ROLLOUT].busy_s != together.pools[ROLLOUT].busy_s


def test_drift_changes_durations_over_the_life_and_is_told() -> None:
    drifting = job(iterations=40, drift=(Drift(ROLLOUT, (1.0, 1.0, 2.0)),))
    assert [drifting.drift[0].factor(p) for p in (0.0, 0.5, 0.75, 1.0)] == [1.0, 1.0, 1.5, 2.0]
    engine = logged([drifting])
    traces = [event for _, event in engine.log if isinstance(event, PhaseTrace)]
    assert traces[0].period_s == 15.0
    drifts = [trace.drift for trace in traces if trace.drift]
    assert drifts
    assert all(drift >= 0.1 for drift in drifts)
    assert len(traces) < 10


def test_cycle_of_a_cold_start_is_told_after_one_iteration() -> None:
    engine = logged([job(is_declared=False, iterations=2)])
    told_s, trace = next((t, e) for t, e in engine.log if isinstance(e, PhaseTrace))
    assert (told_s, trace.period_s) == (15.0, 15.0)
    assert [(s.pool, s.offset_s, s.duration_s) for s in trace.segments] == [
        (ROLLOUT, 0.0, 10.0),
        (TRAIN, 10.0, 5.0),
    ]
    gaps_s = {estimate.deployment: estimate.next_gap_s for estimate in trace.estimates}
    assert gaps_s == {"sampler": 5.0, "policy": 10.0}


@pytest.mark.parametrize("is_declared", [True, False])
def test_an_iteration_of_several_optimizer_steps_counts_as_one(is_declared: bool) -> None:
    """Counted as several, a job would seem to have almost ended, and its budget to be spent."""
    phases = (Phase(ROLLOUT, 10.0), Phase(TRAIN, 3.0), Phase(TRAIN, 2.0))
    stepping = job(iterations=6, phases=phases, is_declared=is_declared, slo=1.5)
    counted: dict[float, tuple[int, int]] = {}
    agenda, meter = Agenda(), Meter()

    def look(core: Core) -> None:
        cluster = core.state.cluster
        for group in cluster.groups.values():
            member = group.members["sim.a"]
            counted[cluster.now_s] = (member.iterations, member.num_iterations)

    engine = Engine(agenda, meter, after_step=look)
    engine.run(World(agenda, engine.append, meter, [stepping], pools()), config())
    assert meter.jobs["sim.a"].completed == 6
    assert counted[45.0] == (3, 6)
    assert counted[58.0] == (3, 6), "its first step of two"
    assert counted[60.0] == (4, 6)


def test_simulation_can_be_stopped() -> None:
    result = simulate([job(iterations=100)], pools(), config(), until_s=60.0)
    stopped = of(result, "a")
    assert (stopped.outcome, stopped.iterations) == ("open", 4)
    assert result.makespan_s <= 60.0


# --- what goes wrong -----------------------------------------------------------------------------


def test_job_that_crashes_is_a_new_arrival_and_goes_on_from_its_checkpoint() -> None:
    """A checkpoint every other iteration: of the three that were done, two are kept."""
    retries = Retries(resubmit_s=20.0, checkpoint_every=2)
    result = simulate(
        [job(iterations=5)], pools(), config(), retries=retries, faults=[Crash("a", 50.0)]
    )
    again = of(result, "a")
    assert (again.outcome, again.attempts, again.iterations) == ("done", 2, 5)
    assert result.makespan_s == 50.0 + 20.0 + 3 * 15.0


def test_workers_that_die_are_rebuilt_and_their_operation_runs_again() -> None:
    fault = WorkersDie(job().deployment(TRAIN), 12.0)
    result = simulate([job()], pools(), config(), costs=Costs(restart_s=4.0), faults=[fault])
    assert of(result, "a").attempts == 1
    assert result.makespan_s == 12.0 + 4.0 + 5.0 + 2 * 15.0


def test_node_that_dies_is_waited_for() -> None:
    fault = NodeFault("rollout-0", 5.0, 30.0)
    result = simulate([job()], pools(), config(), faults=[fault])
    assert result.makespan_s == 5.0 + 30.0 + 3 * 15.0
    assert result.notices["node lost"] == 1
    # A node that is away is not paid for.
    assert result.pools[ROLLOUT].held_s == 5.0 + 3 * 15.0


def test_span_names_node_job_and_what_ran() -> None:
    result = simulate([job(iterations=1)], pools(), config(), records_spans=True)
    assert result.spans[0] == Span("rollout-0", "sim.a", "generate", 0.0, 10.0)
    assert simulate([job(iterations=1)], pools(), config()).spans == []
