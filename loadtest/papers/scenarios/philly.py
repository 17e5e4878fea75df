"""Real arrivals: any 580 hours of any virtual clusters of Philly (WEAVE §6.5's source).

Arrivals and lengths are the trace's; the seed draws each job's type from WEAVE Table 6. Lengths are
cut to between 15 minutes and 142.9 hours. From more than 300 jobs every n-th is taken.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from loadtest.papers.scenarios.report import at_least
from loadtest.papers.scenarios.scenario import Bound, Options, Scenario
from loadtest.papers.scenarios.weaving import MAX_GROUP_JOBS, POLICIES, compared, measured
from loadtest.papers.workloads import philly
from phaseloom.simulator.comparison.clusters import SWITCHING
from phaseloom.simulator.comparison.pictures import bars, canvas
from phaseloom.simulator.comparison.report import Record, Report
from phaseloom.simulator.jobs import SimJob

_CLUSTERS = ("2869ce",)
_START_H = 0.0
"""The hour at which the window begins; that cluster has 151 jobs of 23 h on average in it."""
_SEEDS = (0, 1)


class _Window(NamedTuple):
    name: str
    seed: int
    clusters: tuple[str, ...]
    start_h: float
    max_group_jobs: int = MAX_GROUP_JOBS

    def jobs(self) -> list[SimJob]:
        return philly.jobs(self.clusters, self.start_h, self.seed, switching=SWITCHING)


def _case(window: _Window, policy: str, bound: Bound) -> tuple[Record, None]:
    return measured(window.jobs(), policy, window.seed, bound=bound)[0], None


def _run(options: Options) -> Report:
    policies = options.policies_of(POLICIES)
    clusters = options.virtual_clusters or _CLUSTERS
    start_h = _START_H if options.start_h is None else options.start_h
    windows = [_Window("philly", s, clusters, start_h) for s in options.seeds or _SEEDS]
    runs = [(window, policy) for window in windows for policy in policies]
    records = [record for record, _ in compared(options, runs, _case)]
    kept = [r for r in records if r.policy.startswith("coexec")]
    return Report(
        scenario="philly",
        about=f"Arrivals of Philly's virtual clusters {', '.join(clusters)} from hour {start_h:g}",
        parameters={
            "virtual_clusters": list(clusters),
            "start_h": start_h,
            "switching": msgspec.to_builtins(SWITCHING),
        },
        records=records,
        targets=[
            at_least(f"{r.policy}, seed {r.seed}: SLO attainment", r.slo_attainment or 0.0, 1.0)
            for r in kept
        ],
    )


def _draw(report: Report, path: Path) -> None:
    with canvas(path, 3) as (costs, slos, gpus):
        bars(costs, report.records, "over_solo_bound", "cost over the solo bound", aim=1.0)
        bars(slos, report.records, "slo_attainment", "share of jobs within their SLO")
        bars(gpus, report.records, "peak_gpus", "GPUs at the peak")


SCENARIO = Scenario(
    about="real arrivals: any window and virtual clusters of the Philly trace",
    run=_run,
    draw=_draw,
    policies=POLICIES,
    accepts=frozenset({"virtual_clusters", "start_h", "bound"}),
)
