"""Arrivals and lengths of Microsoft's Philly trace (2017; CC-BY-4.0), in virtual clusters."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Sequence
from random import Random

from loadtest.papers.workloads.packaged import DATA
from loadtest.papers.workloads.weave import (
    FREE,
    LONGEST_H,
    NUM_JOBS,
    WINDOW_H,
    draw_job,
)
from phaseloom.common.contract.errors import CallerError
from phaseloom.simulator.comparison.clusters import Switching
from phaseloom.simulator.jobs import SimJob

SHORTEST_H = 0.25


def jobs(
    virtual_clusters: Sequence[str],
    start_h: float,
    seed: int,
    *,
    num_jobs: int = NUM_JOBS,
    window_h: float = WINDOW_H,
    switching: Switching = FREE,
) -> list[SimJob]:
    """The jobs that arrive in the window, at most so many, each a job of WEAVE Table 6.

    Raises: CallerError: there is no such virtual cluster, or no job arrives in the window.
    """
    rows = _rows()
    known = sorted({cluster for _, _, cluster in rows})
    for cluster in virtual_clusters:
        if cluster not in known:
            raise CallerError(
                f"virtual cluster {cluster!r} is not in the trace",
                field="virtual_cluster",
                remedy=f"one of {', '.join(known)}",
            )
    there = [
        (arrival_h - start_h, length_h)
        for arrival_h, length_h, cluster in rows
        if cluster in virtual_clusters and start_h <= arrival_h < start_h + window_h
    ]
    if not there:
        raise CallerError(
            f"no job arrives from hour {start_h:g} to {start_h + window_h:g}",
            field="start_h",
            remedy=f"the trace ends at hour {rows[-1][0]:.0f}",
        )
    taken = [there[i * len(there) // num_jobs] for i in range(num_jobs)]
    chosen = taken if len(there) > num_jobs else there
    draws = Random(f"philly {seed}")
    return [
        draw_job(
            f"j{i}",
            arrival_h,
            min(LONGEST_H, max(SHORTEST_H, length_h)),
            "Mixed",
            draws,
            switching=switching,
        )
        for i, (arrival_h, length_h) in enumerate(chosen)
    ]


def _rows() -> list[tuple[float, float, str]]:
    """The (arrival, length, virtual cluster) of each job, in hours, by arrival."""
    data = DATA / "philly_2017_10.csv.gz"
    text = gzip.decompress(data.read_bytes()).decode()
    return [
        (float(row["arrival_s"]) / 3600, float(row["duration_s"]) / 3600, row["virtual_cluster"])
        for row in csv.DictReader(io.StringIO(text))
    ]
