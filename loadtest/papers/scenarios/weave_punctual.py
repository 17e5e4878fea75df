"""The price of keeping single iterations within their SLO, and not their mean alone.

`coexec_repack` lets a job spend beside others what it saved while it ran alone, so the mean of a
job's iterations is within its SLO and one in five of them is not. Here `slo_percentile` bounds how
many may be late. The paper's policy, `coexec`, keeps nearly all of them, and is the yardstick.
"""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from loadtest.papers.scenarios.report import at_least, at_most
from loadtest.papers.scenarios.scenario import Bound, Options, Scenario
from loadtest.papers.scenarios.weaving import measured
from loadtest.papers.workloads.weave import generate
from phaseloom.simulator.comparison.cases import Case
from phaseloom.simulator.comparison.clusters import SWITCHING
from phaseloom.simulator.comparison.pictures import bars, canvas
from phaseloom.simulator.comparison.report import Record, Report, Target

NUM_JOBS = 100
_PERCENTILES = (0.0, 90.0, 95.0, 99.0)
_POLICIES = ("coexec", "coexec_repack")
_SEEDS = (0, 1, 2)


def _name(percentile: float) -> str:
    return f"{percentile:g} % of iterations" if percentile else "the mean alone"


def _case(policy: str, percentile: float, seed: int) -> Record:
    jobs = list(generate("Mixed", seed, num_jobs=NUM_JOBS, switching=SWITCHING))
    record, result = measured(
        jobs,
        policy,
        seed,
        workload=_name(percentile),
        bound=Bound.NONE,
        slo_percentile=percentile,
    )
    least = min(job.within_slo for job in result.promised)
    return replace(record, more={"least_of_a_job": least})


def _run(options: Options) -> Report:
    cases = [
        Case(f"{policy}, {_name(percentile)}, seed {seed}", _case, (policy, percentile, seed))
        for policy in options.policies_of(_POLICIES)
        for percentile in (_PERCENTILES if policy == "coexec_repack" else (0.0,))
        for seed in options.seeds or _SEEDS
    ]
    records: list[Record] = options.run_cases(cases)
    costs = {(r.workload, r.policy, r.seed): r.dollars or 0.0 for r in records}
    records = [
        replace(r, more={**r.more, "over_the_mean_alone": costs[key] / costs[base]})
        if (base := (_name(0.0), *key[1:])) in costs
        else r
        for r in records
        if (key := (r.workload, r.policy, r.seed))
    ]
    return Report(
        scenario="weave-punctual",
        about=f"{NUM_JOBS} jobs whose single iterations have an SLO, too",
        parameters={"percentiles": list(_PERCENTILES), "profile": "Mixed"},
        records=records,
        targets=_targets(records),
    )


def _targets(records: list[Record]) -> list[Target]:
    targets = []
    for percentile in _PERCENTILES[1:]:
        found = [r for r in records if r.workload == _name(percentile)]
        if found:
            name = f"coexec_repack, {_name(percentile)}: least of any job within SLO"
            least = min(r.more["least_of_a_job"] for r in found)
            targets.append(at_least(name, least, percentile / 100))
    plain = {r.seed: r.dollars or 0.0 for r in records if r.policy == "coexec"}
    asked = [r for r in records if r.workload == _name(95.0) and r.seed in plain]
    if asked:
        most = max((r.dollars or 0.0) / plain[r.seed] for r in asked)
        targets.append(at_most(f"coexec_repack, {_name(95.0)}: cost over coexec", most, 1.0))
    return targets


def _draw(report: Report, path: Path) -> None:
    with canvas(path, 2) as (costs, slos):
        bars(costs, report.records, "dollars", "cost, $")
        bars(slos, report.records, "slo_iterations", "share of iterations within SLO")


SCENARIO = Scenario(
    about="what it costs to keep single iterations within their SLO",
    run=_run,
    draw=_draw,
    policies=_POLICIES,
)
