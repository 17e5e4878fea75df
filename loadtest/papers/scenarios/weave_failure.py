"""A job of a co-execution group dies and comes back (WEAVE Fig. 19).

The group of Fig. 10b (D1, D2, E). E is killed at 2,180 s and submitted again at 4,480 s, as a new
arrival from its last completed iteration.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import mean

from msgspec.structs import replace

from loadtest.papers.bounds import makespan_bound_s
from loadtest.papers.scenarios.pictures import gantt
from loadtest.papers.scenarios.report import at_least, at_most
from loadtest.papers.scenarios.scenario import Options, Scenario
from loadtest.papers.scenarios.weave_micro import jobs_of
from phaseloom.simulator.comparison.cases import Case
from phaseloom.simulator.comparison.clusters import ample, config, run
from phaseloom.simulator.comparison.pictures import canvas
from phaseloom.simulator.comparison.report import Record, Report, Target
from phaseloom.simulator.controllers import Retries
from phaseloom.simulator.jobs import TRAIN, SimJob
from phaseloom.simulator.metering import Span
from phaseloom.simulator.world import Crash

DIES_S, BACK_S = 2180.0, 4480.0
SHOWN_S = 9000.0
_POLICIES = {"coexec": "round_robin", "coexec_repack": "fcfs"}


def _case(policy: str) -> tuple[Record, list[Span]]:
    jobs = jobs_of("b train")
    nodes, settings = ample(jobs), config(policy, _POLICIES[policy])
    undisturbed, _ = run(jobs, nodes, settings, 0)
    result, _ = run(
        jobs,
        nodes,
        settings,
        0,
        faults=[Crash("E", DIES_S)],
        retries=Retries(resubmit_s=BACK_S - DIES_S, checkpoint_every=1),
        records_spans=True,
    )
    ends = train_ends(result.spans)
    solo_s = {job.name: job.solo_s for job in jobs}
    more: dict[str, float] = {}
    for name in ("D1", "D2"):
        for when, start_s, end_s in (
            ("before", 0.0, DIES_S),
            ("while_away", DIES_S, BACK_S),
            ("after", BACK_S, SHOWN_S),
        ):
            within = [end for end, _ in ends[name] if start_s <= end < end_s]
            periods = [b - a for a, b in pairwise(within)]
            if periods:
                more[f"{name}_{when}_over_alone"] = mean(periods) / solo_s[name]
    crashed = next(job for job in result.jobs if job.name == "E")
    more["E_iterations"] = float(crashed.iterations)
    more["over_undisturbed"] = result.makespan_s / undisturbed.makespan_s
    num_nodes = {pool.pool: pool.num_nodes for pool in nodes}
    bound_s = makespan_bound_s([_away(job) for job in jobs], 0, num_nodes)
    record = Record(
        policy=policy,
        seed=0,
        jobs=len(jobs),
        slo_attainment=result.slo_attainment,
        peak_gpus=result.peak_gpus,
        makespan_s=result.makespan_s,
        over_bound=result.makespan_s / bound_s,
        more=more,
    )
    return record, [span for span in result.spans if span.start_s < SHOWN_S]


def _away(job: SimJob) -> SimJob:
    """The job as one that starts later by the time that it is away, so that it loses no work."""
    return replace(job, start_s=job.start_s + BACK_S - DIES_S) if job.name == "E" else job


def train_ends(spans: list[Span]) -> dict[str, list[tuple[float, str]]]:
    """When each job's training operations ended, and their kinds."""
    ends: dict[str, list[tuple[float, str]]] = {}
    for span in sorted(spans, key=lambda span: span.end_s):
        if span.node.startswith(TRAIN) and span.activity != "switch":
            ends.setdefault(span.job.partition(".")[2], []).append((span.end_s, span.activity))
    return ends


def _run(options: Options) -> Report:
    policies = options.policies_of(_POLICIES)
    found = options.run_cases([Case(policy, _case, (policy,)) for policy in policies])
    records = [record for record, _ in found]
    return Report(
        scenario="weave-failure",
        about="E is killed at 2,180 s and submitted again at 4,480 s (WEAVE Fig. 19)",
        parameters={"dies_s": DIES_S, "back_s": BACK_S},
        records=records,
        targets=[target for record in records for target in _targets(record)],
        series={"spans": [(r.policy, spans) for r, (_, spans) in zip(records, found, strict=True)]},
    )


def _targets(record: Record) -> list[Target]:
    slowest = max(value for name, value in record.more.items() if "while_away" in name)
    share = record.slo_attainment or 0.0
    return [
        at_most(f"{record.policy}: D1 and D2 while E is away, over alone", slowest, 1.01),
        at_least(f"{record.policy}: iterations of E in all", record.more["E_iterations"], 40.0),
        at_least(f"{record.policy}: SLO of those that were not killed", share, 2 / 3),
    ]


def _draw(report: Report, path: Path) -> None:
    spans = report.series["spans"]
    with canvas(path, len(spans), width=11.0, height=2.2, across=False) as panels:
        for axes, (policy, of_policy) in zip(panels, spans, strict=True):
            gantt(axes, [Span(*span) for span in of_policy], policy)
            for at_s in (DIES_S, BACK_S):
                axes.axvline(at_s, color="#D55E00", linestyle="--", linewidth=0.9)


SCENARIO = Scenario(
    about="a job of a group dies and comes back (WEAVE Fig. 19)",
    run=_run,
    draw=_draw,
    policies=tuple(_POLICIES),
)
