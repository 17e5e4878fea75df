"""`phaseloom simulate` runs the scheduler's own code on a workload, under a virtual clock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from phaseloom.common.contract.errors import CallerError

FILE_WIDTH = 240
"""Characters in a line of a table that is written to a file or a pipe."""


def simulate(
    scenario: str = "",
    *,
    policy: tuple[str, ...] = (),
    seed: tuple[int, ...] = (),
    workload: Path | None = None,
    virtual_cluster: tuple[str, ...] = (),
    start_h: float | None = None,
    slowdowns: Path | None = None,
    bound: Literal["none", "solo", "regrouping"] = "regrouping",
    out: Path = Path("runs/simulate"),
    processes: int = 0,
) -> None:
    """Reproduce a figure, or try a workload of your own. Without a scenario, list the scenarios.

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
        With `weave-fig15` and `weave-drift`: the cost's yardstick. `regrouping` searches for the
        optimum of the jobs that were present, for some minutes where they are many; `solo` for
        that of jobs that each stay for as long as they would alone; `none` for nothing.
    out
        Folder for the results.
    processes
        How many runs go on at once; 0: one on each core.
    """
    from phaseloom.simulator.scenarios import SCENARIOS
    from phaseloom.simulator.scenarios.report import table, targets_table, write
    from phaseloom.simulator.scenarios.scenario import Bound, Options

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    if not scenario:
        for name, found in SCENARIOS.items():
            console.print(f"{name:15} {found.about}")
        return
    if scenario not in SCENARIOS:
        raise CallerError(
            f"scenario {scenario!r} is not known",
            field="scenario",
            remedy=f"one of {', '.join(SCENARIOS)}",
        )
    chosen = SCENARIOS[scenario]
    options = Options(
        policy, seed, workload, virtual_cluster, start_h, slowdowns, Bound(bound), processes
    )
    chosen.check(scenario, options)
    out.mkdir(parents=True, exist_ok=True)  # before the minutes that some take
    with _bar(console) as progress:
        task = progress.add_task(scenario, total=None, what="")

        def advance(what: str, done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, what=what)
            if not console.is_terminal:
                console.print(f"{done}/{total} {what}")

        report = chosen.run(replace(options, advance=advance))
    path = write(report, out)
    chosen.draw(report, path.with_suffix(".png"))
    console.print(table(report))
    if report.targets:
        console.print(targets_table(report))
    console.print(f"wrote {path} and {path.with_suffix('.png')}")


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[what]}"),
        console=console,
        transient=True,
    )
