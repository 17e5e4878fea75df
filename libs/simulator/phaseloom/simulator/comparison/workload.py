"""A workload of the user's own under each placement policy: cost, SLOs, waits, moves.

Every job could have nodes of its own, so provisioning never waits, and only nodes that belong to a
group cost money. Switches and moves take the times of `SWITCHING`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from phaseloom.common.contract.errors import CallerError
from phaseloom.simulator.comparison import workloadfile
from phaseloom.simulator.comparison.cases import Case, Options
from phaseloom.simulator.comparison.clusters import (
    SWITCHING,
    ample,
    config,
    planned_switch_s,
    record_of,
    run,
    with_switching,
)
from phaseloom.simulator.comparison.pictures import bars, canvas
from phaseloom.simulator.comparison.report import Record, Report
from phaseloom.simulator.jobs import SimJob

# Policies that spread a backlog over few nodes are left out: with nodes for every job they do the
# same as `solo`.
ORDERINGS = {
    "coexec": "round_robin",
    "coexec_repack": "fcfs",
    "pack": "hrrs",
    "random": "round_robin",
    "most_idle": "round_robin",
    "solo": "fcfs",
}
"""Placement policy → the ordering policy that it is run with."""


def _case(policy: str, seed: int, jobs: list[SimJob]) -> Record:
    settings = config(policy, ORDERINGS[policy], switch_s=planned_switch_s(jobs))
    result, cpu_s = run(jobs, ample(jobs), settings, seed)
    return record_of(result, cpu_s, policy=policy, seed=seed)


def compare(options: Options) -> Report:
    """Run the workload file under each policy and seed.

    Raises: CallerError: no file is named, the file is not valid, or a policy is unknown.
    """
    if options.workload is None:
        raise CallerError(
            "workload is required",
            field="workload",
            remedy="name a CSV file with --workload; docs/simulator.md describes its columns",
        )
    policies = options.policies_of(ORDERINGS)
    jobs = with_switching(workloadfile.read(options.workload), SWITCHING)
    cases = [
        Case(f"{policy}, seed {seed}", _case, (policy, seed, jobs))
        for seed in options.seeds or (0,)
        for policy in policies
    ]
    return Report(
        scenario="workload",
        about=f"{len(jobs)} jobs of {options.workload.name}",
        parameters={
            "workload": str(options.workload),
            "switching": msgspec.to_builtins(SWITCHING),
            "orderings": {policy: ORDERINGS[policy] for policy in policies},
        },
        records=options.run_cases(cases),
    )


def draw(report: Report, path: Path) -> None:
    """Draw the costs, SLOs and largest clusters of a report (PNG)."""
    with canvas(path, 3) as (costs, slos, gpus):
        bars(costs, report.records, "dollars", "cost, $")
        bars(slos, report.records, "slo_attainment", "share of jobs within their SLO")
        bars(gpus, report.records, "peak_gpus", "GPUs at the peak")
