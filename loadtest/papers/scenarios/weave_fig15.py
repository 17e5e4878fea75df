"""Placement of 300 jobs in 580 hours: cost over a bound, SLO attainment (WEAVE §6.5, Fig. 15).

Workloads are made after Table 6: a job has one node of each pool (*A*) or 1, 2, 4 by size (*B*);
SLOs are uniform between 1 and 2. Every phase takes its worst case; a context switch takes 5 s and a
move 308 s. Nodes are there when they are needed; those that belong to a group are paid for.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from loadtest.papers.scenarios import weaving
from loadtest.papers.scenarios.pictures import lines
from loadtest.papers.scenarios.report import at_least, at_most, mean_of
from loadtest.papers.scenarios.scenario import Bound, Options, Scenario
from loadtest.papers.scenarios.weaving import MAX_GROUP_JOBS, ORDERINGS, POLICIES
from loadtest.papers.workloads import packaged
from loadtest.papers.workloads.weave import PROFILES, generate
from phaseloom.simulator.comparison import workloadfile
from phaseloom.simulator.comparison.clusters import LIVE, SWITCHING, with_switching
from phaseloom.simulator.comparison.pictures import bars, canvas
from phaseloom.simulator.comparison.report import (
    Published,
    Record,
    Report,
    Target,
    groups_of,
    values,
)
from phaseloom.simulator.jobs import SimJob

_COMPARED = ("coexec", "random", "most_idle")
_PROMISING = ("coexec", "coexec_repack")
"""The policies that promise every SLO, which run on all seeds and on jobs of several nodes."""
_VARIED = (*_PROMISING, "random", "most_idle")
"""The policies that run with other SLOs and other sizes of groups, without which `solo` costs the
same."""
_HEADLINE = "over_solo_bound"
_SEEDS = (0, 1, 2)
_SLOS = (1.2, 1.5, 2.0)
_GROUP_SIZES = (2, 3, 4)
_PAPER = {
    "BL": (1.12, 2.00, 1.75),
    "RH": (1.10, 1.92, 1.89),
    "TH": (1.01, 1.72, 1.38),
    "Mixed": (1.06, 1.97, 1.66),
    "Mixed, SLO 1.2": (1.07, 2.09, 1.73),
    "Mixed, SLO 1.5": (1.07, 1.95, 1.75),
    "Mixed, SLO 2.0": (1.07, 1.89, 1.59),
    "Mixed, groups of 2": (1.10, 2.01, 1.68),
    "Mixed, groups of 3": (1.06, 2.15, 1.71),
    "Mixed, groups of 4": (1.07, 1.91, 1.59),
}
"""The cost over the paper's optimum of `coexec`, `random`, `most_idle` (Fig. 15 a to c)."""
_AIMS = {"Mixed": 1.03, "RH": 0.90, "BL": 1.05, "TH": 1.02}
"""The aims of `coexec_repack` on the workloads A."""


class Setting(msgspec.Struct, frozen=True):
    """One set of jobs, and its name in the table."""

    name: str
    profile: str
    seed: int
    nodes: str = "A"
    slo: float = 0.0
    max_group_jobs: int = MAX_GROUP_JOBS
    file: str = ""
    policies: tuple[str, ...] = POLICIES

    def jobs(self) -> list[SimJob]:
        if self.file:
            return with_switching(workloadfile.read(Path(self.file)), SWITCHING)
        if self.seed == 0 and not self.slo:
            jobs = packaged.packaged(f"{self.profile}_seed0_nodes{self.nodes}")
            return with_switching(jobs, SWITCHING)
        return generate(
            self.profile, self.seed, nodes=self.nodes, slo=self.slo, switching=SWITCHING
        )


def _case(setting: Setting, policy: str, bound: Bound) -> tuple[Record, list[tuple[float, float]]]:
    """Run one setting under a policy; the figures, and the rent over time where it is drawn."""
    record, result = weaving.measured(
        setting.jobs(),
        policy,
        setting.seed,
        workload=setting.name,
        max_group_jobs=setting.max_group_jobs,
        bound=bound,
    )
    is_drawn = setting.name == "Mixed" or bool(setting.file)
    rents = [(at_s / 3600.0, rent) for at_s, rent, _ in result.cost_steps] if is_drawn else []
    return record, rents


def _settings(options: Options) -> list[Setting]:
    """The workloads of the paper on every seed, and variants of one of them on the first seed.

    The variants have other SLOs, other sizes of groups, and jobs of several nodes.
    """
    if options.workload:
        return [Setting(options.workload.stem, "Mixed", 0, file=str(options.workload))]
    seeds = options.seeds or _SEEDS
    main = [
        Setting(profile, profile, seed, policies=POLICIES if seed == seeds[0] else _PROMISING)
        for profile in PROFILES
        for seed in seeds
    ]
    wide = [
        Setting(f"{profile}, B", profile, seeds[0], nodes="B", policies=_PROMISING)
        for profile in ("Mixed", "RH")
    ]
    slos = [
        Setting(f"Mixed, SLO {slo}", "Mixed", seeds[0], slo=slo, policies=_VARIED) for slo in _SLOS
    ]
    sizes = [
        Setting(
            f"Mixed, groups of {size}", "Mixed", seeds[0], max_group_jobs=size, policies=_VARIED
        )
        for size in _GROUP_SIZES
    ]
    return [*main, *wide, *slos, *sizes]


def _run(options: Options) -> Report:
    policies = options.policies_of(POLICIES)
    settings = _settings(options)
    runs = [
        (setting, policy)
        for setting in settings
        for policy in policies
        if policy in setting.policies
    ]
    results = weaving.compared(options, runs, _case)
    records = [record for record, _ in results]
    first = [(record.policy, rent) for record, rent in results if rent and record.seed == 0]
    return Report(
        scenario="weave-fig15",
        about="300 jobs in 580 hours (WEAVE Fig. 15): cost, SLO attainment",
        parameters={
            "switching": msgspec.to_builtins(SWITCHING),
            "max_group_jobs": MAX_GROUP_JOBS,
            "orderings": {policy: ORDERINGS[policy.removesuffix(LIVE)] for policy in policies},
        },
        records=records,
        targets=_targets(records),
        published=_published(records),
        series={"rent": dict(reversed(first))},
    )


def _published(records: list[Record]) -> list[Published]:
    return [
        Published(
            f"{workload}, {policy}: cost",
            _PAPER[workload][_COMPARED.index(policy.removesuffix(LIVE))],
            mean_of(of_policy, _HEADLINE),
        )
        for (workload, policy), of_policy in groups_of(records).items()
        if workload in _PAPER
        and policy.removesuffix(LIVE) in _COMPARED
        and values(of_policy, _HEADLINE)
    ]


def _targets(records: list[Record]) -> list[Target]:
    targets = []
    for (workload, policy), of_policy in groups_of(records).items():
        if not policy.startswith("coexec"):
            continue
        lowest = min(r.slo_attainment or 0.0 for r in of_policy)
        targets.append(at_least(f"{workload}, {policy}: SLO attainment, worst seed", lowest, 1.0))
        aim = _AIMS.get(workload) if policy.startswith("coexec_repack") else None
        if aim is not None and values(of_policy, _HEADLINE):
            cost = mean_of(of_policy, _HEADLINE)
            targets.append(at_most(f"{workload}, {policy}: cost / solo bound", cost, aim))
        seconds = max(r.simulated_in_s or 0.0 for r in of_policy)
        targets.append(at_most(f"{workload}, {policy}: simulated in, s", seconds, 20.0))
    return targets


def _draw(report: Report, path: Path) -> None:
    main = [r for r in report.records if "," not in r.workload]
    with canvas(path, 4, width=8.0, height=2.8, across=False) as (costs, slos, sense, rent):
        bars(costs, main, _HEADLINE, "cost over the solo bound", aim=1.0)
        bars(slos, main, "slo_attainment", "share of jobs within their SLO")
        others = [r for r in report.records if "," in r.workload] or main
        bars(sense, others, _HEADLINE, "cost over the solo bound, by SLO and group size", aim=1.0)
        lines(
            rent,
            report.series["rent"],
            f"rent, {main[0].workload if main else ''}, $/h",
            "hours",
            steps=True,
        )


SCENARIO = Scenario(
    about="cost and SLO attainment of 300 jobs in 580 hours (WEAVE Fig. 15)",
    run=_run,
    draw=_draw,
    policies=POLICIES,
    accepts=frozenset({"workload", "bound"}),
)
