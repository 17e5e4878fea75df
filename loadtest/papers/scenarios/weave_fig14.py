"""Two weeks of 200 jobs: dollars, bubbles, peak and admission mix (WEAVE §6.4, Fig. 14).

The paper replays a trace of its own. Here the jobs are drawn from the figures that it states
(`workloads/weave.production`). `solo` gives each job its own nodes (Solo-D); `colocated` runs all
phases of a job on its train nodes, as long as on two pools (veRL).
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import NamedTuple

import msgspec

from loadtest.papers.scenarios.pictures import lines
from loadtest.papers.scenarios.report import at_least, mean_of
from loadtest.papers.scenarios.scenario import Bound, Options, Scenario
from loadtest.papers.scenarios.weaving import (
    LIVE_POLICIES,
    MAX_GROUP_JOBS,
    colocated,
    compared,
    measured,
)
from loadtest.papers.workloads.weave import PRODUCTION_JOBS, production
from phaseloom.simulator.comparison.clusters import SWITCHING
from phaseloom.simulator.comparison.pictures import bars, canvas
from phaseloom.simulator.comparison.report import Published, Record, Report
from phaseloom.simulator.jobs import ROLLOUT, TRAIN, SimJob

NUM_JOBS = PRODUCTION_JOBS
_POLICIES = ("coexec", "coexec_repack", *LIVE_POLICIES, "solo", "colocated")
_SEEDS = (0,)
_PAPER_COST = {"solo": 1.84, "colocated": 1.38}
"""Dollars of the baseline over WEAVE's."""
_PAPER = {
    "direct_packing": 0.605,
    "rollout_scaling": 0.15,
    "new_group": 0.245,
    "peak_rollout_gpus": 216.0,
    "peak_train_gpus": 152.0,
}
_PAPER_SOLO_PEAK = 328.0
_PAPER_BUBBLES = {"rollout": 0.244, "train": 0.431}
"""The reduction of bubbles against Solo-D."""


class TwoWeeks(NamedTuple):
    seed: int
    num_jobs: int
    name: str = "two weeks"
    max_group_jobs: int = MAX_GROUP_JOBS

    def jobs(self) -> list[SimJob]:
        return production(self.seed, num_jobs=self.num_jobs, switching=SWITCHING)


def _case(weeks: TwoWeeks, policy: str, bound: Bound) -> tuple[Record, list[tuple[float, float]]]:
    jobs = weeks.jobs()
    if policy == "colocated":
        jobs = [colocated(job) for job in jobs]
        bound = Bound.NONE
    record, result = measured(jobs, policy, weeks.seed, bound=bound)
    more: dict[str, float] = {}
    for pool, of_pool in result.pools.items():
        if of_pool.held_s:
            more[f"{pool}_bubbles"] = of_pool.bubble_ratio
            more[f"peak_{pool}_gpus"] = 8.0 * of_pool.peak_nodes
    if policy.startswith("coexec"):
        more["direct_packing"] = mean(not job.opened for job in result.jobs)
        more["rollout_scaling"] = mean(job.opened == [ROLLOUT] for job in result.jobs)
        more["new_group"] = mean(TRAIN in job.opened for job in result.jobs)
    rents = [(at_s / 3600.0, rent) for at_s, rent, _ in result.cost_steps]
    return msgspec.structs.replace(record, more=more), rents


def _run(options: Options) -> Report:
    policies = options.policies_of(_POLICIES)
    weeks = [TwoWeeks(seed, NUM_JOBS) for seed in options.seeds or _SEEDS]
    results = compared(options, [(w, policy) for w in weeks for policy in policies], _case)
    records = [record for record, _ in results]
    return Report(
        scenario="weave-fig14",
        about=f"{NUM_JOBS} jobs in two weeks (WEAVE §6.4, Fig. 14)",
        parameters={"jobs": NUM_JOBS, "switching": msgspec.to_builtins(SWITCHING)},
        records=records,
        targets=[
            at_least(f"{r.policy}, seed {r.seed}: SLO attainment", r.slo_attainment or 0.0, 1.0)
            for r in records
            if r.policy.startswith("coexec")
        ],
        published=_published(records),
        series={"rent": {r.policy: rent for r, rent in results if r.seed == weeks[0].seed}},
    )


def _published(records: list[Record]) -> list[Published]:
    of = {policy: [r for r in records if r.policy == policy] for policy in _POLICIES}
    rows = []
    for ours in ("coexec", *LIVE_POLICIES):
        if not of[ours]:
            continue
        for baseline, paper in _PAPER_COST.items():
            if of[baseline]:
                ratio = mean_of(of[baseline], "dollars") / mean_of(of[ours], "dollars")
                rows.append(Published(f"cost of {baseline} over {ours}", paper, ratio))
        rows += [Published(f"{ours}: {n}", p, mean_of(of[ours], n)) for n, p in _PAPER.items()]
        if of["solo"]:
            for pool, paper in _PAPER_BUBBLES.items():
                name = f"{pool}_bubbles"
                saved = 1 - mean_of(of[ours], name) / mean_of(of["solo"], name)
                rows.append(Published(f"{ours}: {name} less than solo", paper, saved))
    if of["solo"]:
        peak = mean_of(of["solo"], "peak_train_gpus")
        rows.append(Published("solo: peak_train_gpus", _PAPER_SOLO_PEAK, peak))
    return rows


def _draw(report: Report, path: Path) -> None:
    with canvas(path, 3, width=8.0, height=2.8, across=False) as (costs, bubbles, rent):
        bars(costs, report.records, "dollars", "cost, $")
        bars(bubbles, report.records, "train_bubbles", "idle share of train nodes")
        lines(rent, report.series["rent"], "rent, $/h", "hours", steps=True)


SCENARIO = Scenario(
    about="200 jobs in two weeks against solo and co-location (WEAVE §6.4, Fig. 14)",
    run=_run,
    draw=_draw,
    policies=_POLICIES,
    accepts=frozenset({"bound"}),
)
