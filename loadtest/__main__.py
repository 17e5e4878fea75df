"""`python -m loadtest`: measure the mesh; prints a table and merges it into the latest results."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import cyclopts
import uvloop
from rich.console import Console
from rich.table import Table

from loadtest import roundtrip
from loadtest.records import LATEST, Record, record

app = cyclopts.App(name="loadtest", help=__doc__)


@app.default
def bench(*, rounds: int = 10, operations: int = 2000, file: Path = LATEST) -> None:
    """Measure the round trip of an operation, one in flight.

    Parameters
    ----------
    rounds
        How often the mesh and the raw chain take turns.
    operations
        Of each side, over all rounds.
    file
        Where the figures are merged by name.
    """
    directory = file.parent / "work"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    measured = uvloop.run(roundtrip.measure(directory, rounds, max(1, operations // rounds)))
    records = record(roundtrip.figures(measured), file)
    Console().print(_table(records))


def _table(records: list[Record]) -> Table:
    table = Table("figure", "measured", "limit", "ratio", "what the limit is")
    table.columns[0].no_wrap = True
    for entry in records:
        table.add_row(
            entry.name,
            f"{entry.value:.3g} {entry.unit}",
            f"{entry.limit_value:.3g} {entry.unit}",
            f"{entry.ratio:.2f}",
            entry.limit,
        )
    return table


if __name__ == "__main__":
    sys.exit(app())
