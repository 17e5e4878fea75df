"""Workloads as CSV files with one row per job and the columns of `COLUMNS`.

A job alternates one rollout and one training phase of fixed, worst-case length. It runs for as many
iterations as fill its duration when it is alone.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from pathlib import Path

from phaseloom.common.contract.errors import CallerError
from phaseloom.simulator.jobs import ROLLOUT, TRAIN, Demand, Phase, SimJob

COLUMNS = {
    "id": "name of the job, unique",
    "arrival": "hours from the start",
    "dur": "hours that it runs, alone",
    "profile": "kind of workload, for people",
    "size": "class of length, for people",
    "R": "seconds of an iteration's rollout, at the token limit",
    "T": "seconds of an iteration's training, at the token limit",
    "slo": "slowdown over running alone that it tolerates, at least 1; 0: best effort",
    "model": "for people",
    "nr": "rollout nodes",
    "nt": "training nodes",
    "mr": "GB of host memory on each rollout node",
    "mt": "GB of host memory on each training node",
}
_HOUR_S = 3600.0
_GB = 10**9


def read(path: Path) -> list[SimJob]:
    """Return the jobs of a CSV file in order of arrival.

    Raises: CallerError: a row is not valid. Its message names the file, the line and the column.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CallerError(
            f"{path} cannot be read: {error}",
            field="workload",
            remedy="give the path of a CSV file in UTF-8",
        ) from None
    return parse(text.splitlines(), str(path))


def parse(lines: Iterable[str], source: str) -> list[SimJob]:
    """Return the jobs of the lines of a table. Args: source: name of the source, for errors."""
    rows = csv.DictReader(lines)
    missing = [column for column in COLUMNS if column not in (rows.fieldnames or [])]
    if missing:
        raise CallerError(
            f"{source} lacks the column {', '.join(map(repr, missing))}",
            field="workload",
            remedy=f"name these columns in the first line: {','.join(COLUMNS)}",
        )
    jobs: dict[str, SimJob] = {}
    for row in rows:
        job = _Row(row, f"{source}, line {rows.line_num}").job()
        if job.name in jobs:
            raise _invalid(f"{source}, line {rows.line_num}", "id", f"{job.name!r} is used twice")
        jobs[job.name] = job
    if not jobs:
        raise CallerError(
            f"{source} contains no jobs", field="workload", remedy="add one line for each job"
        )
    return sorted(jobs.values(), key=lambda job: job.arrival_s)


class _Row:
    def __init__(self, row: dict[str, str | None], source: str) -> None:
        self._row = row
        self._source = source

    def job(self) -> SimJob:
        rollout_s = self._number("R", above=0.0)
        train_s = self._number("T", above=0.0)
        duration_s = self._number("dur", above=0.0) * _HOUR_S
        slo = self._number("slo")
        if 0 < slo < 1:
            raise _invalid(self._source, "slo", "must be 0 or at least 1")
        name = self._text("id")
        return SimJob(
            name=f"job-{name}" if name.isdigit() else name,
            arrival_s=self._number("arrival") * _HOUR_S,
            iterations=max(1, round(duration_s / (rollout_s + train_s))),
            phases=(Phase(ROLLOUT, rollout_s, rollout_s), Phase(TRAIN, train_s, train_s)),
            demands={
                ROLLOUT: Demand(self._count("nr"), round(self._number("mr") * _GB)),
                TRAIN: Demand(self._count("nt"), round(self._number("mt") * _GB)),
            },
            slo=slo,
            model=self._text("model"),
        )

    def _text(self, column: str) -> str:
        text = (self._row[column] or "").strip()
        if not text:
            raise _invalid(self._source, column, "is empty")
        return text

    def _number(self, column: str, above: float | None = None) -> float:
        text = self._text(column)
        try:
            number = float(text)
        except ValueError:
            raise _invalid(self._source, column, f"must be a number, got {text!r}") from None
        if not math.isfinite(number) or number < 0 or (above is not None and number <= above):
            limit = "greater than 0" if above is not None else "at least 0"
            raise _invalid(self._source, column, f"must be {limit}, got {text}")
        return number

    def _count(self, column: str) -> int:
        text = self._text(column)
        if not text.isdigit() or int(text) < 1:
            raise _invalid(self._source, column, f"must be an integer of at least 1, got {text!r}")
        return int(text)


def _invalid(source: str, column: str, problem: str) -> CallerError:
    return CallerError(
        f"{source}, column {column!r}: {problem}",
        field=f"workload.{column}",
        remedy=f"the column holds: {COLUMNS[column]}",
    )
