"""Ordering policies against the best periodic schedule of two and three jobs.

The jobs share one rollout and one train device and submit as examples/grpo_pretrained.py does.
Nothing varies. *Over optimum* is the slowdown of the slowest job, relative to its least possible
value (`periodic`). Each row is the mean over nine switch costs, from nothing to two phases.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean

from loadtest.papers import periodic
from loadtest.papers.scenarios.order_mixes import DEFAULT
from loadtest.papers.scenarios.report import at_most
from loadtest.papers.scenarios.scenario import Options, Scenario
from phaseloom.simulator.comparison.cases import Case
from phaseloom.simulator.comparison.clusters import live_config, pools, run
from phaseloom.simulator.comparison.pictures import bars, canvas
from phaseloom.simulator.comparison.report import Record, Report
from phaseloom.simulator.jobs import ROLLOUT, TRAIN, Demand, Phase, SimJob, Submission

_ITERATIONS = 40
"""Iterations of the job with the longest step. The others run for as long."""
_OVER = "over_optimum"
_ALL = "all"
_ORDERINGS = (DEFAULT, "hrrs", "fcfs", "fifo_lock")


def jobs_of(steps: periodic.Steps, switch_s: float, iterations: int = _ITERATIONS) -> list[SimJob]:
    longest_s = max(map(sum, steps))
    demand = Demand(load_s=switch_s / 2, offload_s=switch_s / 2)
    return [
        SimJob(
            name=f"j{index}",
            arrival_s=0.0,
            iterations=round(iterations * longest_s / (rollout_s + train_s)),
            phases=(
                Phase(ROLLOUT, 0.8 * rollout_s, kind="generate"),
                Phase(TRAIN, 0.75 * train_s, kind="forward_backward"),
                Phase(TRAIN, 0.2 * train_s, kind="optim_step"),
                Phase(TRAIN, 0.05 * train_s, kind="publish_weights"),
                Phase(ROLLOUT, 0.2 * rollout_s, kind="sync_weights"),
            ),
            demands={ROLLOUT: demand, TRAIN: demand},
            submission=Submission.BURST,
        )
        for index, (rollout_s, train_s) in enumerate(steps)
    ]


def over_optimum(ordering: str, steps: periodic.Steps, switch_s: float) -> float:
    jobs = jobs_of(steps, switch_s)
    result, _ = run(jobs, pools(1, 1), live_config(ordering=ordering, duty_limit=1.0), 0)
    slowest = max((j.ended_s - j.placed_s) / (j.iterations * j.solo_s) for j in result.jobs)
    return slowest / periodic.optimum(steps, switch_s).slowdown


def _case(ordering: str, shape: str, ratio: float) -> Record:
    over = over_optimum(ordering, periodic.SHAPES[shape], ratio * periodic.PHASE_S)
    return Record(policy=ordering, seed=0, workload=shape, more={_OVER: over})


def _run(options: Options) -> Report:
    orderings = options.policies_of(_ORDERINGS)
    cases = [
        Case(f"{shape}, switch of {ratio:g} phases, {ordering}", _case, (ordering, shape, ratio))
        for shape in periodic.SHAPES
        for ratio in periodic.RATIOS
        for ordering in orderings
    ]
    records: list[Record] = options.run_cases(cases)
    every = [Record(policy=r.policy, seed=0, workload=_ALL, more=r.more) for r in records]
    ours = [record.more[_OVER] for record in records if record.policy == DEFAULT]
    targets = []
    if ours:
        targets.append(at_most(f"{DEFAULT}: slowest job over the optimum, mean", mean(ours), 1.03))
        targets.append(at_most(f"{DEFAULT}: slowest job over the optimum, worst", max(ours), 1.10))
    return Report(
        scenario="order-optimum",
        about="Ordering policies against the best periodic schedule",
        parameters={"ratios": periodic.RATIOS, "phase_s": periodic.PHASE_S, "default": DEFAULT},
        records=[*every, *records],
        targets=targets,
    )


def _draw(report: Report, path: Path) -> None:
    with canvas(path, 1) as panels:
        bars(panels[0], report.records, _OVER, "slowest job over the optimum")


SCENARIO = Scenario(
    about="ordering policies against the best schedule of two and three jobs",
    run=_run,
    draw=_draw,
    policies=_ORDERINGS,
)
