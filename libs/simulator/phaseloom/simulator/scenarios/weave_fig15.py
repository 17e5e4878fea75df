"""Placement of 300 jobs in 580 hours: cost over the optimum, SLO attainment (WEAVE §6.5, Fig. 15).

Workloads after Table 6, one node of each pool a job (*A*) or 1, 2, 4 by size (*B*); SLOs uniform
between 1 and 2. Every phase takes its worst case; a context switch takes 5 s and a move 308 s.
Nodes are there when wanted; what is paid is those that belong to a group.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from phaseloom.simulator.jobs import SimJob
from phaseloom.simulator.optimum import Pricing, Terms
from phaseloom.simulator.scenarios.common import HOST_BYTES, ample, config, record_of, run
from phaseloom.simulator.scenarios.optimal import over_optimal, solo_bound
from phaseloom.simulator.scenarios.pictures import bars, canvas, lines
from phaseloom.simulator.scenarios.report import (
    Record,
    Report,
    Target,
    at_least,
    at_most,
    groups_of,
    mean_of,
)
from phaseloom.simulator.scenarios.scenario import (
    Advance,
    Case,
    Options,
    Scenario,
    chosen,
    run_cases,
)
from phaseloom.simulator.workloads import table
from phaseloom.simulator.workloads.weave import PROFILES, Switching, generate, with_switching

ORDERINGS = {
    "coexec": "round_robin",
    "coexec_repack": "fcfs",
    "random": "round_robin",
    "most_idle": "round_robin",
    "solo": "fcfs",
}
SWITCHING = Switching(phase_s=5.0, move_s=308.0)
"""A switch of a phase: 2 s in WEAVE Table 4, 2.5 to 9 s in llm-d's recording; a move: 197 to 419 s
(WEAVE §6.6)."""
MAX_GROUP_JOBS = 5
_DOLLARS = "dollars"
_PROMISING = ("coexec", "coexec_repack")
"""Policies that promise every SLO: on all seeds."""
_SEEDS = (0, 1)
_AIMS = {"Mixed": 1.03, "RH": 0.90, "BL": 1.05, "TH": 1.02}
"""Of `coexec_repack` on the workloads A."""


class Setting(msgspec.Struct, frozen=True):
    """One set of jobs, and what it is called in the table."""

    name: str
    profile: str
    seed: int
    nodes: str = "A"
    slo: float = 0.0
    max_group_jobs: int = MAX_GROUP_JOBS
    file: str = ""
    is_base: bool = True
    """Whether the policies that promise nothing are run on it too."""

    def pricing(self) -> Pricing:
        return Pricing(Terms(host_bytes=HOST_BYTES, max_group_jobs=self.max_group_jobs))

    def jobs(self) -> list[SimJob]:
        if self.file:
            return with_switching(table.read(Path(self.file)), SWITCHING)
        if self.seed == 0 and not self.slo:
            packaged = table.packaged(f"{self.profile}_seed0_nodes{self.nodes}")
            return with_switching(packaged, SWITCHING)
        return generate(
            self.profile, self.seed, nodes=self.nodes, slo=self.slo, switching=SWITCHING
        )


def _solo_bound(setting: Setting) -> float:
    return solo_bound(setting.jobs(), setting.pricing())


def planned_switch_s(jobs: list[SimJob]) -> float:
    """A phase of the largest job leaves and another comes."""
    takes = [take for job in jobs for take in job.takes.values()]
    return max(take.offload_s for take in takes) + max(take.load_s for take in takes)


def _case(setting: Setting, policy: str) -> tuple[Record, list[tuple[float, float]]]:
    """Returns: the figures, and the rent over time where it is drawn."""
    jobs = setting.jobs()
    settings = config(
        policy,
        ORDERINGS[policy],
        max_group_jobs=setting.max_group_jobs,
        switch_s=planned_switch_s(jobs),
    )
    result, cpu_s = run(jobs, ample(jobs), settings, setting.seed)
    record = record_of(result, cpu_s, policy=policy, seed=setting.seed, workload=setting.name)
    # Where nobody's SLO counts jobs pile up, and the optimum of so many takes hours.
    ratio = over_optimal(result, jobs, setting.pricing()) if policy in _PROMISING else None
    more = {_DOLLARS: result.cost}
    record = msgspec.structs.replace(record, cost_over_optimal=ratio, more=more)
    is_drawn = setting.name == "Mixed" or bool(setting.file)
    rents = [(at_s / 3600.0, rent) for at_s, rent, _ in result.cost_steps] if is_drawn else []
    return record, rents


def _settings(options: Options) -> list[Setting]:
    if options.workload:
        return [Setting(options.workload.stem, "Mixed", 0, file=str(options.workload))]
    seeds = options.seeds or _SEEDS
    return [
        Setting(profile, profile, seed, is_base=profile == "Mixed" and seed == seeds[0])
        for profile in PROFILES
        for seed in seeds
    ]


def _run(options: Options, advance: Advance) -> Report:
    policies = chosen(options.policies, tuple(ORDERINGS), "policy")
    settings = _settings(options)
    runs = [
        (setting, policy)
        for setting in settings
        for policy in policies
        if (setting.is_base or policy in _PROMISING)
    ]
    cases = [Case(f"{s.name}, {policy}, seed {s.seed}", _case, (s, policy)) for s, policy in runs]
    bounds = [Case(f"{s.name}, bound, seed {s.seed}", _solo_bound, (s,)) for s in settings]
    every = run_cases([*bounds, *cases], options, advance)
    dollars = dict(zip(settings, every, strict=False))
    found = every[len(bounds) :]
    records = [
        _over(record, dollars[setting])
        for (setting, _), (record, _) in zip(runs, found, strict=True)
    ]
    first = [(record.policy, rent) for record, rent in found if rent and record.seed == 0]
    return Report(
        scenario="weave-fig15",
        about="300 jobs in 580 hours (WEAVE Fig. 15): cost, SLO attainment",
        parameters={
            "switching": msgspec.to_builtins(SWITCHING),
            "max_group_jobs": MAX_GROUP_JOBS,
            "orderings": {policy: ORDERINGS[policy] for policy in policies},
        },
        records=records,
        targets=_targets(records),
        series={"rent": dict(reversed(first))},
    )


def _over(record: Record, bound: float) -> Record:
    """Beside the bound for jobs as they were there: the one for jobs alone, in dollars."""
    more = {"cost_over_solo_bound": record.more[_DOLLARS] / bound}
    return msgspec.structs.replace(record, more=more)


def _targets(records: list[Record]) -> list[Target]:
    targets = []
    for (workload, policy), of_policy in groups_of(records).items():
        if not policy.startswith("coexec"):
            continue
        lowest = min(r.slo_attainment or 0.0 for r in of_policy)
        targets.append(at_least(f"{workload}, {policy}: SLO attainment, worst seed", lowest, 1.0))
        if policy == "coexec_repack" and workload in _AIMS:
            cost = mean_of(of_policy, "cost_over_optimal")
            targets.append(at_most(f"{workload}, {policy}: cost", cost, _AIMS[workload]))
        seconds = max(r.simulated_in_s or 0.0 for r in of_policy)
        targets.append(at_most(f"{workload}, {policy}: simulated in, s", seconds, 20.0))
    return targets


def _draw(report: Report, path: Path) -> None:
    main = [r for r in report.records if "," not in r.workload]
    with canvas(path, 3, width=8.0, height=2.8, across=False) as (costs, slos, rent):
        bars(costs, main, "cost_over_optimal", "cost over optimal regrouping", aim=1.0)
        bars(slos, main, "slo_attainment", "share of jobs within their SLO")
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
    policies=tuple(ORDERINGS),
    accepts=frozenset({"workload"}),
)
