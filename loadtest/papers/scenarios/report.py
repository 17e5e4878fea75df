"""Additions to a report of the simulator: figures to reach, and Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import mean

import msgspec
from msgspec.structs import replace
from rich.table import Table

from phaseloom.simulator.comparison.report import Published, Record, Report, Target, cells, values


def at_most(what: str, value: float, limit: float) -> Target:
    return Target(what, value, limit, value <= limit)


def at_least(what: str, value: float, limit: float) -> Target:
    return Target(what, value, limit, value >= limit)


def only(record: Record, *names: str) -> Record:
    """The record with these figures alone, beside policy, seed and workload."""
    kept = {"policy", "seed", "workload", "more", "simulated_in_s", *names}
    return replace(record, **{f: None for f in record.__struct_fields__ if f not in kept})


def read(path: Path) -> Report:
    return msgspec.json.decode(path.read_bytes(), type=Report)


def mean_of(records: Iterable[Record], name: str) -> float:
    """The mean of one column.

    Raises: ValueError: no record has it.
    """
    found = values(records, name)
    if not found:
        raise ValueError(f"no record has {name}")
    return mean(found)


def markdown(report: Report) -> str:
    """The tables of a report in Markdown, for a page of the documentation."""
    lines = _markdown(*cells(report))
    if report.targets:
        rows = [_target_cells(target) for target in report.targets]
        lines += ["", *_markdown(list(_TARGET_HEAD), rows)]
    if report.published:
        rows = [_published_cells(published) for published in report.published]
        lines += ["", *_markdown(list(_PUBLISHED_HEAD), rows)]
    return "\n".join(lines)


def _markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]


_PUBLISHED_HEAD = ("figure", "paper", "ours", "ours / paper")


def _published_cells(published: Published) -> list[str]:
    paper, ours = f"{published.paper:.4g}", f"{published.ours:.4g}"
    return [published.figure, paper, ours, f"{published.ratio:.2f}"]


_TARGET_HEAD = ("figure", "reached", "value", "aim")


def _target_cells(target: Target) -> list[str]:
    reached = "yes" if target.is_reached else "**no**"
    return [target.what, reached, f"{target.value:.4g}", f"{target.limit:.4g}"]


def published_table(report: Report) -> Table:
    result = Table(title="Next to the paper", title_justify="left")
    for name in _PUBLISHED_HEAD:
        result.add_column(name, justify="left" if name == "figure" else "right")
    for published in report.published:
        result.add_row(*_published_cells(published))
    return result


def targets_table(report: Report) -> Table:
    result = Table(title="Figures to reach", title_justify="left")
    for name in _TARGET_HEAD:
        result.add_column(name)
    for target in report.targets:
        what, reached, *numbers = _target_cells(target)
        mark = reached if target.is_reached else "[bold red]no[/]"
        result.add_row(what, mark, *numbers)
    return result
