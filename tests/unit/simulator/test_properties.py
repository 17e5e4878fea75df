"""Whatever the workload and whatever goes wrong: it ends, nothing runs twice, decisions replay."""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phaseloom.common.contract.commands import Command
from phaseloom.common.contract.events import OperationFinished
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.contract.operations import Outcome
from phaseloom.common.contract.specs import SchedulerConfig
from phaseloom.scheduler.core.policies.registry import ORDERING as ORDERINGS
from phaseloom.scheduler.core.policies.registry import PLACEMENT as PLACEMENTS
from phaseloom.scheduler.core.state.outputs import SendCommand
from phaseloom.simulator.controllers import Retries
from phaseloom.simulator.engine import Engine
from phaseloom.simulator.jobs import ROLLOUT, TRAIN, Demand, Phase, SimJob, Submission
from phaseloom.simulator.metrics import Result, summarise
from phaseloom.simulator.nodes import Costs
from phaseloom.simulator.world import Crash, Fault, NodeFault, WorkersDie, World
from tests.support.replay import restored_at_every_step
from tests.unit.simulator.builders import checked_engine, config, pools

NODES = 3
_seconds = st.floats(0.5, 20.0).map(lambda s: round(s, 3))


@st.composite
def jobs(draw: st.DrawFn) -> list[SimJob]:
    return [_job(draw, f"j{index}") for index in range(draw(st.integers(1, 5)))]


def _job(draw: st.DrawFn, name: str) -> SimJob:
    submission = draw(st.sampled_from(Submission))
    thinks = submission is Submission.SERIAL
    phases = [
        Phase(
            pool,
            mean_s := draw(_seconds),
            worst_s=2 * mean_s,
            sigma=draw(st.sampled_from([0.0, 0.4])),
            think_s=draw(st.sampled_from([0.0, 1.0])) if thinks else 0.0,
        )
        for pool in draw(st.sampled_from([(ROLLOUT, TRAIN), (ROLLOUT, TRAIN, TRAIN), (TRAIN,)]))
    ]
    demand = Demand(
        num_nodes=draw(st.integers(1, 2)),
        load_s=draw(st.sampled_from([0.0, 1.5])),
        offload_s=draw(st.sampled_from([0.0, 0.5])),
    )
    return SimJob(
        name,
        arrival_s=draw(st.sampled_from([0.0, 7.0, 30.0])),
        iterations=draw(st.integers(1, 5)),
        phases=tuple(phases),
        demands={phase.pool: demand for phase in phases},
        slo=draw(st.sampled_from([0.0, 1.3, 2.0])),
        steps_ahead=draw(st.integers(0, 1)),
        submission=submission,
        is_declared=draw(st.booleans()),
        sync_s=draw(st.sampled_from([0.0, 2.0])),
        start_s=draw(st.sampled_from([0.0, 3.0])),
        move_s=5.0,
    )


@st.composite
def scheduling(draw: st.DrawFn) -> SchedulerConfig:
    return config(
        placement=draw(st.sampled_from(sorted(PLACEMENTS))),
        ordering=draw(st.sampled_from(sorted(ORDERINGS))),
        idle_grace_s=draw(st.sampled_from([0.0, 2.0])),
        quantum_s=draw(st.sampled_from([0.0, 15.0])),
        speculative_switch_in=draw(st.booleans()),
        seal_every=draw(st.sampled_from([0, 1, 3])),
    )


@st.composite
def faults(draw: st.DrawFn) -> list[Fault]:
    at_s = st.floats(1.0, 150.0).map(lambda s: round(s, 2))
    names = st.integers(0, 4).map(lambda index: f"j{index}")
    node = st.builds(
        NodeFault,
        st.sampled_from([f"{pool}-{index}" for pool in (ROLLOUT, TRAIN) for index in range(NODES)]),
        at_s,
        st.just(12.0),
    )
    dies = st.builds(
        lambda name, deployment, at: WorkersDie(DeploymentKey("sim", name, deployment), at),
        names,
        st.sampled_from(["sampler", "policy"]),
        at_s,
    )
    one = st.one_of(node, st.builds(Crash, names, at_s), dies)
    return draw(st.lists(one, max_size=3))


def run(
    workload: list[SimJob], scheduler: SchedulerConfig, wrong: list[Fault]
) -> tuple[Engine, Result]:
    engine, agenda, meter = checked_engine()
    known = {job.name for job in workload}
    world = World(
        agenda,
        engine.append,
        meter,
        workload,
        pools(NODES),
        costs=Costs(stop_s=0.2, restart_s=2.0, seal_s=0.5),
        retries=Retries(resubmit_s=3.0),
        faults=[fault for fault in wrong if _is_about(fault, known)],
    )
    engine.run(world, scheduler, until_s=100_000.0)
    return engine, summarise(meter, agenda.now_s, engine.num_events)


def _is_about(fault: Fault, known: set[str]) -> bool:
    match fault:
        case Crash(job):
            return job in known
        case WorkersDie(deployment):
            return deployment.job in known
        case _:
            return True


def ran_twice(engine: Engine) -> list[str]:
    """Operations that took effect more than once: a replay rebuilds, and is not counted."""
    ends = Counter(
        str(event.key)
        for _, event in engine.log
        if isinstance(event, OperationFinished)
        and event.incarnation
        and not event.replay
        and event.outcome is Outcome.COMPLETED
    )
    return [key for key, count in ends.items() if count > 1]


def replayed(engine: Engine) -> list[Command]:
    _, made = restored_at_every_step(engine.log)
    every = [output for outputs in made for output in outputs]
    return [output.command for output in every if isinstance(output, SendCommand)]


SLOW_IS_FINE = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@SLOW_IS_FINE
@given(jobs(), scheduling())
def test_every_workload_ends_with_every_operation_run_once(
    workload: list[SimJob], scheduler: SchedulerConfig
) -> None:
    engine, result = run(workload, scheduler, [])
    for job, came_of_it in zip(workload, result.jobs, strict=True):
        assert came_of_it.outcome == "done", f"{job.name}: {came_of_it.reason}"
        assert came_of_it.iterations == job.iterations
        assert came_of_it.attempts == 1
    assert result.operations == sum(job.iterations * len(job.phases) for job in workload)
    assert not ran_twice(engine)
    assert replayed(engine) == engine.commands


@SLOW_IS_FINE
@given(jobs(), scheduling(), faults())
def test_what_goes_wrong_is_made_good(
    workload: list[SimJob], scheduler: SchedulerConfig, wrong: list[Fault]
) -> None:
    engine, result = run(workload, scheduler, wrong)
    assert [job.outcome for job in result.jobs] == ["done"] * len(workload), result.jobs
    assert [job.iterations for job in result.jobs] == [job.iterations for job in workload]
    assert not ran_twice(engine)
    assert replayed(engine) == engine.commands
