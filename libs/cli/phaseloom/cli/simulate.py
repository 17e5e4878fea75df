"""`phaseloom simulate` runs the scheduler's code on a workload, under a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from phaseloom.cli.extras import check_installed
from phaseloom.cli.output import print_json
from phaseloom.common.contract.errors import CallerError

if TYPE_CHECKING:
    from phaseloom.simulator.comparison.cases import Options
    from phaseloom.simulator.comparison.report import Report

    OptionsT = TypeVar("OptionsT", bound=Options)

FILE_WIDTH = 240
"""Width in characters of a table that goes to a file or a pipe."""


def simulate(
    scenario: str = "",
    *,
    policy: tuple[str, ...] = (),
    seed: tuple[int, ...] = (),
    workload: Path | None = None,
    out: Path = Path("runs/simulate"),
    processes: int = 0,
    json: bool = False,
) -> None:
    """Compare placement policies on your own workload.

    Prints a table, and writes workload.json and workload.png to a directory.

    Parameters
    ----------
    scenario
        Name of a figure in a paper. Prints the command that reproduces it in a clone of the
        repository.
    policy
        Simulate only this placement policy. Repeat the option for several.
    seed
        Simulate with this seed instead of 0. Repeat the option for several.
    workload
        CSV file with one job per line; docs/simulator.md describes its columns.
    out
        Directory for the results.
    processes
        Number of parallel simulations; 0: one per core.
    json
        Print the results as one JSON object instead of a table.
    """
    from phaseloom.simulator.comparison import workload as comparison
    from phaseloom.simulator.comparison.cases import Options

    if scenario:
        raise CallerError(
            f"scenario {scenario!r} is not part of the product",
            field="scenario",
            remedy=f"run `python -m loadtest simulate {scenario}` in a clone of the repository, or "
            "name a workload of your own with --workload",
        )
    options = Options(policy, seed, workload, processes)
    run_and_show("workload", comparison.compare, comparison.draw, options, out, json=json)


def run_and_show(
    name: str,
    run: Callable[[OptionsT], Report],
    draw: Callable[[Report, Path], None],
    options: OptionsT,
    out: Path,
    *,
    json: bool = False,
) -> Report:
    """Run a comparison with a progress bar, print its table, and write its JSON and its picture."""
    from phaseloom.simulator.comparison.report import table, write

    check_installed("the picture of a simulation", ("matplotlib",), "simulator")
    options.check()
    console = Console(highlight=False, stderr=json)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    out.mkdir(parents=True, exist_ok=True)  # fail here rather than after minutes of simulation
    with _bar(console) as progress:
        task = progress.add_task(name, total=None, what="")

        def advance(step: str, done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, what=step)
            if not console.is_terminal:
                console.print(f"{done}/{total} {step}")

        report = run(replace(options, advance=advance))
    path = write(report, out)
    draw(report, path.with_suffix(".png"))
    if json:
        print_json(report)
    else:
        console.print(table(report))
    console.print(f"wrote {path} and {path.with_suffix('.png')}")
    return report


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
