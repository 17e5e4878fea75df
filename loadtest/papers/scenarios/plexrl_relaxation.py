"""Jobs that begin in phase delay one another less and less (PlexRL §7.1).

Two to four jobs share one train node and all begin at once, with rollout one step ahead or in step.
*equal*: 30B jobs of PlexRL Table 2. *double*: every other job's rollout makes its period twice as
long. *unlike*: every other job's period is 1.37 times as long. The paper states the effect and no
numbers: delays shift the jobs against each other until their training no longer overlaps.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import mean

from msgspec.structs import replace

from loadtest.papers.scenarios.pictures import lines
from loadtest.papers.scenarios.plexrl_fig7b import ordering_config, shared_train_node, table_2_job
from loadtest.papers.scenarios.report import at_most
from loadtest.papers.scenarios.scenario import Options, Scenario
from loadtest.papers.scenarios.weave_failure import train_ends
from loadtest.papers.workloads.plexrl import MODELS
from phaseloom.simulator.comparison.clusters import run
from phaseloom.simulator.comparison.pictures import canvas
from phaseloom.simulator.comparison.report import Record, Report, Target
from phaseloom.simulator.jobs import SimJob

STEPS = 60
SETTLED = 20
"""The steps before these count as the time in which jobs shift against each other."""
_PERIODS = {"equal": 1.0, "double": 2.0, "unlike": 1.37}
_WAYS = ("hrrs", "fifo_lock", "live")


def _jobs(periods: str, num_jobs: int, ahead: int) -> list[SimJob]:
    model = next(model for model in MODELS if model.name == "30B")
    jobs = []
    for index in range(num_jobs):
        job = table_2_job(f"j{index}", model, steps=STEPS, ahead=ahead)
        rollout, *training = job.phases
        added_s = (_PERIODS[periods] - 1) * model.cycle_s * (index % 2)
        rollout = replace(rollout, mean_s=rollout.mean_s + added_s, worst_s=0.0, sigma=0.0)
        jobs.append(replace(job, phases=(rollout, *training)))
    return jobs


def _case(workload: str, way: str, seed: int) -> tuple[Record, list[float]]:
    periods, count, staleness = workload.split(", ")
    jobs = _jobs(periods, int(count[0]), int(staleness == "one step ahead"))
    result, _ = run(jobs, shared_train_node(jobs), ordering_config(way), seed, records_spans=True)
    late: list[list[float]] = []
    for job in jobs:
        ends = [
            end for end, kind in train_ends(result.spans)[job.name] if kind == "publish_weights"
        ]
        late.append([(after - before) / job.solo_s - 1 for before, after in pairwise([0.0, *ends])])
    by_step = [mean(steps) for steps in zip(*late, strict=False)]
    record = Record(
        policy=way,
        seed=seed,
        workload=workload,
        jobs=len(jobs),
        switches=result.switches,
        more={
            "late_at_first": mean(by_step[1:4]),
            "late_when_settled": mean(by_step[SETTLED:]),
        },
    )
    return record, by_step


def _run(options: Options) -> Report:
    workloads = [
        f"{periods}, {count} jobs, {staleness}"
        for periods in _PERIODS
        for count in (2, 3)
        for staleness in ("in step", "one step ahead")
    ]
    results = options.run_each(_case, workloads, options.policies_of(_WAYS), (0,))
    records: list[Record] = [record for record, _ in results]
    return Report(
        scenario="plexrl-relaxation",
        about="Jobs that begin in phase shift against each other (PlexRL §7.1)",
        parameters={"steps": STEPS, "settled_after": SETTLED, "periods": _PERIODS},
        records=records,
        targets=_targets(records),
        series={
            "late": {
                f"{r.workload.split(',')[0]}, {r.policy}": list(enumerate(by_step[:SETTLED]))
                for r, by_step in results
                if r.workload.endswith("2 jobs, in step")
            }
        },
    )


def _targets(records: list[Record]) -> list[Target]:
    """Two equal jobs whose cycles are not cut into operations end without waiting. In step, each
    still needs one switch a step."""
    return [
        at_most(f"{r.workload}, {r.policy}: late when settled", r.more["late_when_settled"], limit)
        for r in records
        for workload, limit in (("one step ahead", 0.02), ("in step", 0.14))
        if r.policy == "fifo_lock" and r.workload == f"equal, 2 jobs, {workload}"
    ]


def _draw(report: Report, path: Path) -> None:
    with canvas(path, 1, width=8.0) as (panel,):
        what = "how much longer than alone a step of two jobs takes, in step"
        lines(panel, report.series["late"], what, "step")


SCENARIO = Scenario(
    about="jobs that begin in phase delay one another less and less (PlexRL §7.1)",
    run=_run,
    draw=_draw,
    policies=_WAYS,
)
