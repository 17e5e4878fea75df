"""Pairs of jobs on one rollout node, with their long tails gathered and without (WEAVE Fig. 12).

The paper reports 1.06 to 1.28 times the throughput: most for long outputs, least where the phases
of a pair are dissimilar. It publishes no durations. Here a rollout takes 300 s, 200 s of another
job in the dissimilar pair, training 75 s, a switch 2 s, and the tail is a share of the rollout.
Where each token ends its sample with the same chance, the last fifth of the samples takes more than
half of the time; where all that are longer than twice the mean are cut off there, a fifth. The node
has eight devices. While a tail holds some of them, the bulk of the next rollout takes as much
longer as it has fewer.
"""

from __future__ import annotations

from pathlib import Path

from loadtest.papers.scenarios.report import at_least
from loadtest.papers.scenarios.scenario import Options, Scenario
from phaseloom.simulator.comparison.cases import Case
from phaseloom.simulator.comparison.clusters import HOST_BYTES, PRICES, config, run
from phaseloom.simulator.comparison.pictures import bars, canvas
from phaseloom.simulator.comparison.report import Record, Report, Target
from phaseloom.simulator.jobs import ROLLOUT, TRAIN, Demand, Phase, SimJob
from phaseloom.simulator.nodes import PoolSpec

ITERATIONS = 40
NUM_DEVICES = 8
SWITCH_S = 2.0
TRAIN_S = 75.0
TAILS = (0.2, 0.35, 0.5)
"""Shares of a rollout's time."""
PAIRS = {"alike": (300.0, 300.0), "dissimilar": (300.0, 200.0)}
"""The seconds of the rollouts of two jobs."""
GATHERED, WHOLE = "gathered", "whole"
_PAPER = (1.06, 1.28)


def _job(name: str, rollout_s: float, tail: float) -> SimJob:
    half_s = SWITCH_S / 2
    return SimJob(
        name=name,
        arrival_s=0.0,
        iterations=ITERATIONS,
        phases=(Phase(ROLLOUT, rollout_s, tail=tail), Phase(TRAIN, TRAIN_S)),
        demands={
            ROLLOUT: Demand(num_devices=NUM_DEVICES, load_s=half_s, offload_s=half_s),
            TRAIN: Demand(load_s=half_s, offload_s=half_s),
        },
    )


def _case(pair: str, tail: float, policy: str) -> Record:
    gathers = tail if policy == GATHERED else 0.0
    jobs = [_job(f"job-{i}", s, gathers) for i, s in enumerate(PAIRS[pair])]
    nodes = [
        PoolSpec(ROLLOUT, 1, PRICES[ROLLOUT], HOST_BYTES, num_devices=NUM_DEVICES),
        PoolSpec(TRAIN, 1, PRICES[TRAIN], HOST_BYTES),
    ]
    result, wall_s = run(jobs, nodes, config("pack", "fcfs"), 0)
    rates = [job.solo_s / sim.mean_iteration_s for job, sim in zip(jobs, result.jobs, strict=True)]
    return Record(
        policy=policy,
        seed=0,
        workload=f"{pair}, {tail:.0%}",
        jobs=len(jobs),
        makespan_s=result.makespan_s,
        switches=sum(job.switches for job in result.jobs),
        simulated_in_s=wall_s,
        more={"throughput_over_alone": sum(rates)},
    )


def _run(options: Options) -> Report:
    cases = [
        Case(f"{pair}, {tail:.0%}, {policy}", _case, (pair, tail, policy))
        for pair in PAIRS
        for tail in TAILS
        for policy in options.policies_of((WHOLE, GATHERED))
    ]
    records = options.run_cases(cases)
    return Report(
        scenario="weave-tails",
        about="Long tails gathered on fewer devices (WEAVE Fig. 12)",
        parameters={
            "iterations": ITERATIONS,
            "devices": NUM_DEVICES,
            "switch_s": SWITCH_S,
            "train_s": TRAIN_S,
            "pairs": PAIRS,
            "paper": _PAPER,
        },
        records=records,
        targets=_targets(records),
    )


def _targets(records: list[Record]) -> list[Target]:
    value = {(r.workload, r.policy): r.more["throughput_over_alone"] for r in records}
    return [
        at_least(f"{workload}: throughput over whole", gathered / value[workload, WHOLE], _PAPER[0])
        for (workload, policy), gathered in value.items()
        if policy == GATHERED and (workload, WHOLE) in value
    ]


def _draw(report: Report, path: Path) -> None:
    with canvas(path, 1, width=8.0, height=2.4, across=False) as panels:
        what = "both jobs' rates over alone, by pair and by the tail's share of a rollout"
        bars(panels[0], report.records, "throughput_over_alone", what)


SCENARIO = Scenario(
    about="long tails of rollouts gathered on fewer devices (WEAVE Fig. 12)",
    run=_run,
    draw=_draw,
    policies=(WHOLE, GATHERED),
)
