"""Two jobs on the GPUs of one, as recorded, and as this scheduler would run them.

After llm-d's recorded synchronous run (one job 137 min, two 189 min: 1.38x). The job's phases are
the recorded means; every switch takes the recorded offload and load of its pool, or nothing. The
recording has a sample a minute: the phases are estimated twice, with the minutes at their edges
counted by utilisation, and counted whole.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from loadtest.papers.bounds import makespan_bound_s
from loadtest.papers.scenarios.pictures import gantt
from loadtest.papers.scenarios.report import at_most
from loadtest.papers.scenarios.scenario import Options, Scenario
from loadtest.papers.workloads import llmd
from phaseloom.common.contract.specs import SchedulerSettings
from phaseloom.simulator.comparison.cases import Case
from phaseloom.simulator.comparison.clusters import LIVE, config_of, pools, record_of, run
from phaseloom.simulator.comparison.pictures import canvas
from phaseloom.simulator.comparison.report import Record, Report
from phaseloom.simulator.jobs import ROLLOUT, TRAIN
from phaseloom.simulator.metering import Span

_DEFAULT = SchedulerSettings().ordering
_BEST = f"{_DEFAULT}{LIVE}"
_ORDERINGS = ("fcfs", "fifo_lock", "round_robin", "hrrs", _DEFAULT, _BEST)


_RUNS = (
    ("one job", 1, True, False),
    ("two jobs, swaps charged", 2, True, False),
    ("two jobs, swaps hidden", 2, False, False),
    ("one job, whole minutes", 1, True, True),
    ("two jobs, swaps charged, whole minutes", 2, True, True),
)
"""(name, number of jobs, whether swaps are charged, whether minutes at a phase's edge count
whole)."""


def _case(
    name: str, ordering: str, count: int, with_swaps: bool, whole_minutes: bool
) -> tuple[Record, list[Span]]:
    recorded = llmd.recording(whole_minutes=whole_minutes)
    jobs = llmd.jobs(recorded, count=count, with_swaps=with_swaps)
    settings = config_of(ordering, duty_limit=1.0)
    result, wall_s = run(jobs, pools(1, 1), settings, 0, records_spans=True)
    record = record_of(result, wall_s, policy=ordering, seed=0, workload=name)
    kept = Record(
        policy=ordering,
        seed=0,
        workload=name,
        jobs=count,
        makespan_s=record.makespan_s,
        over_bound=result.makespan_s / makespan_bound_s(jobs, 0, {ROLLOUT: 1, TRAIN: 1}),
        switches=record.switches,
        mean_wait_s=record.mean_wait_s,
        bubble_ratio=record.bubble_ratio,
        utilisation=record.utilisation,
    )
    return kept, result.spans


def _run(options: Options) -> Report:
    recorded = llmd.recording()
    orderings = options.policies_of(_ORDERINGS)
    cases = [
        Case(f"{ordering}, {name}", _case, (name, ordering, count, with_swaps, whole_minutes))
        for ordering in orderings
        for name, count, with_swaps, whole_minutes in _RUNS
    ]
    found = options.run_cases(cases)
    records: list[Record] = []
    alone_s = 0.0
    for record, _ in found:
        alone_s = record.makespan_s if record.jobs == 1 else alone_s
        ratio = record.makespan_s / alone_s
        more = {"of_one_job": ratio, "throughput": record.jobs / ratio}
        records.append(msgspec.structs.replace(record, more=more))
    best = [r for r in records if r.policy == (_BEST if _BEST in orderings else orderings[0])]
    return Report(
        scenario="llmd-replay",
        about="Two RL jobs on two GPUs against one, from llm-d's recorded run",
        parameters={
            "recorded": msgspec.to_builtins(recorded),
            "recorded_ratio": recorded.shared_s / recorded.alone_s,
            "placement": "pack",
        },
        records=records,
        targets=[
            at_most("two jobs over one, recorded swaps charged", best[1].more["of_one_job"], 1.30),
            at_most("two jobs over one, switching hidden", best[2].more["of_one_job"], 1.20),
        ],
        series={
            "spans": [
                (r.policy, r.workload, spans) for r, (_, spans) in zip(records, found, strict=True)
            ]
        },
    )


def _draw(report: Report, path: Path) -> None:
    two = {_RUNS[1][0], _RUNS[2][0]}
    shown = [row for row in report.series["spans"] if row[1] in two and row[0] == _BEST]
    shown = shown or report.series["spans"][:2]
    with canvas(path, len(shown), width=11.0, height=1.9, across=False) as panels:
        for axes, (policy, what, spans) in zip(panels, shown, strict=True):
            gantt(axes, [Span(*span) for span in spans], f"{policy}: {what}")


SCENARIO = Scenario(
    about="two jobs on the GPUs of one, from llm-d's recorded run",
    run=_run,
    draw=_draw,
    policies=_ORDERINGS,
)
