"""Workloads as CSV tables: what is read, and what is said of a bad one."""

from __future__ import annotations

from pathlib import Path

import pytest

from phaseloom.common.contract.errors import CallerError
from phaseloom.simulator.comparison import workloadfile
from phaseloom.simulator.jobs import ROLLOUT, TRAIN, Demand

HEAD = "id,arrival,dur,profile,size,R,T,slo,model,nr,nt,mr,mt"
ROW = "7,1.5,2.0,RH,M,300.0,60.0,1.4,14B,2,1,445.4,456.1"


def test_row_becomes_a_job() -> None:
    (job,) = workloadfile.parse([HEAD, ROW], "here")
    assert (job.name, job.arrival_s, job.slo, job.model) == ("job-7", 5400.0, 1.4, "14B")
    assert job.iterations == 20
    assert job.solo_s == 360.0
    assert job.demands == {
        ROLLOUT: Demand(2, 445_400_000_000),
        TRAIN: Demand(1, 456_100_000_000),
    }


def test_jobs_come_by_arrival_and_columns_in_any_order() -> None:
    head = HEAD.split(",")
    rows = [
        ",".join(reversed(line.split(","))) for line in (HEAD, ROW, ROW.replace("7,1.5", "8,0"))
    ]
    jobs = workloadfile.parse(rows, "here")
    assert len(head) == 13
    assert [job.name for job in jobs] == ["job-8", "job-7"]


@pytest.mark.parametrize(
    ("row", "column", "what"),
    [
        (ROW.replace("300.0", "fast"), "R", "must be a number, got 'fast'"),
        (ROW.replace("60.0,", "0,"), "T", "must be greater than 0, got 0"),
        (ROW.replace("1.4", "0.9"), "slo", "must be 0 or at least 1"),
        (ROW.replace("1.5,2.0", "-1,2.0"), "arrival", "must be at least 0, got -1"),
        (ROW.replace("14B,2,", "14B,2.5,"), "nr", "must be an integer of at least 1, got '2.5'"),
        (ROW.replace("445.4", "nan"), "mr", "must be at least 0, got nan"),
        (ROW.rpartition(",")[0], "mt", "is empty"),
    ],
)
def test_bad_row_names_its_line_and_column(row: str, column: str, what: str) -> None:
    with pytest.raises(CallerError) as raised:
        workloadfile.parse([HEAD, ROW.replace("7,", "6,", 1), row], "jobs.csv")
    assert f"jobs.csv, line 3, column {column!r}: " in raised.value.info.message
    assert what in raised.value.info.message
    assert workloadfile.COLUMNS[column] in raised.value.info.remedy


def test_table_without_its_columns_or_its_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match="lacks the column 'slo', 'mt'"):
        workloadfile.parse(["id,arrival,dur,profile,size,R,T,model,nr,nt,mr"], "here")
    with pytest.raises(CallerError, match="contains no jobs"):
        workloadfile.parse([HEAD], "here")
    with pytest.raises(CallerError, match="'job-7' is used twice"):
        workloadfile.parse([HEAD, ROW, ROW], "here")
    with pytest.raises(CallerError, match="cannot be read"):
        workloadfile.read(tmp_path / "none.csv")


def test_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text(f"{HEAD}\n{ROW}\n")
    assert workloadfile.read(path) == workloadfile.parse([HEAD, ROW], "")
