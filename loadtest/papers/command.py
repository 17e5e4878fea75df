"""`python -m loadtest simulate`: the papers' scenarios."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from rich.console import Console

from loadtest.papers.scenarios import SCENARIOS
from loadtest.papers.scenarios.report import published_table, targets_table
from loadtest.papers.scenarios.scenario import Bound, Options
from phaseloom.cli.simulate import run_and_show
from phaseloom.common.contract.errors import CallerError


def simulate(
    scenario: str = "",
    *,
    policy: tuple[str, ...] = (),
    seed: tuple[int, ...] = (),
    workload: Path | None = None,
    virtual_cluster: tuple[str, ...] = (),
    start_h: float | None = None,
    slowdowns: Path | None = None,
    bound: Literal["none", "solo", "regrouping"] = "solo",
    mixes: int | None = None,
    out: Path = Path("runs/simulate"),
    processes: int = 0,
) -> None:
    """Reproduce a figure of a paper. Without a scenario, list the scenarios.

    The table is printed, and SCENARIO.json and SCENARIO.png are written to a folder.

    Parameters
    ----------
    scenario
        Name of the scenario to run.
    policy
        Run this policy only; may be given several times.
    seed
        Run with this seed instead of the scenario's own; may be given several times.
    workload
        CSV file to run instead of the scenario's workloads; its columns are in docs/simulator.md.
    virtual_cluster
        With `philly`: take only the jobs of this cluster; may be given several times.
    start_h
        With `philly`: the hour at which the window of 580 hours begins.
    slowdowns
        With `jigsaw-*`: JSON file with a table of slowdowns instead of the paper's.
    bound
        With `weave-*` and `philly`: what the cost is compared with. `solo`: the optimum of jobs
        that each stay as long as they would alone, which is the same for every policy.
        `regrouping`: also the optimum of the jobs that were present in the run, which takes
        minutes if there are many; `none`: nothing.
    mixes
        With `order-mixes`: number of random mixes, instead of 60, which take some minutes.
    out
        Folder for the results.
    processes
        Number of runs at once; 0: one on each core.
    """
    if not scenario:
        console = Console(highlight=False)
        for name, known in SCENARIOS.items():
            console.print(f"{name:15} {known.about}")
        return
    if scenario not in SCENARIOS:
        raise CallerError(
            f"scenario {scenario!r} is not known",
            field="scenario",
            remedy=f"one of {', '.join(SCENARIOS)}",
        )
    chosen = SCENARIOS[scenario]
    options = Options(
        policy,
        seed,
        workload,
        processes,
        virtual_clusters=virtual_cluster,
        start_h=start_h,
        slowdowns=slowdowns,
        bound=Bound(bound),
        mixes=mixes,
    )
    chosen.check(scenario, options)
    report = run_and_show(scenario, chosen.run, chosen.draw, options, out)
    if report.targets:
        Console(highlight=False).print(targets_table(report))
    if report.published:
        Console(highlight=False).print(published_table(report))
