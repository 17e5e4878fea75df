"""The commands `phaseloom runs list` and `phaseloom runs prune`.

A run is one life of a job, from its submission to its end. It is named by the job and its start.
The mesh keeps a record of each run (its state, device time, config and tags) and the curves that
its controller reported.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table
from rich.text import Text

from phaseloom.cli.output import print_json, print_whole, with_names
from phaseloom.cli.rundir import bus_config, open_bus
from phaseloom.common.contract.api import JobStatus
from phaseloom.common.contract.codec import decode
from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.ids import JobKey
from phaseloom.common.contract.streams import Bucket
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.connection import BusConfig

_DAY_S = 86_400.0
Runs = dict[tuple[JobKey, str], JobStatus]
"""(job, run) → its newest status, oldest run first."""


def list_runs(
    *,
    job: str = "",
    tag: str = "",
    json: bool = False,
    run: Path | None = None,
    console: Console | None = None,
) -> None:
    """List the runs of jobs, the newest last: each submission of a job's name is a run.

    Parameters
    ----------
    job
        List only the runs of this job, `<tenant>.<job>`.
    tag
        List only the runs with this tag.
    json
        Print one JSON object per run and line.
    run
        Run directory, or its name under runs/. Default: PHASELOOM_BUS_URL, else the newest run.
    """
    listed = uvloop.run(_list(bus_config(run)))
    listed = {
        key: status
        for key, status in listed.items()
        if job in ("", str(key[0])) and (not tag or tag in status.tags)
    }
    target = console or Console()
    if json:
        for (key, _), status in listed.items():
            print_json(with_names(status, tenant=key.tenant), console=target)
    else:
        print_whole(target, run_table(listed, time.time()))


def prune(
    *,
    job: str = "",
    days: float | None = None,
    keep: int | None = None,
    dry_run: bool = False,
    json: bool = False,
    run: Path | None = None,
    console: Console | None = None,
) -> None:
    """Delete the records and curves of old runs. Runs that have not ended and checkpoints stay.

    A run is deleted if it meets both conditions that are given.

    Parameters
    ----------
    job
        Delete only runs of this job, `<tenant>.<job>`.
    days
        Delete runs that ended more than this many days ago.
    keep
        Keep this many of the newest runs of each job.
    dry_run
        Print what would be deleted, and delete nothing.
    json
        Print one JSON object per run and line.
    run
        Run directory, or its name under runs/. Default: PHASELOOM_BUS_URL, else the newest run.
    """
    if days is None and keep is None:
        raise CallerError(
            "expected a bound, got none", field="--days", remedy="give --days, --keep or both"
        )
    for value, field in ((days, "--days"), (keep, "--keep")):
        if value is not None and not value >= 0:
            raise CallerError(
                f"{field} must be at least 0, got {value:g}", field=field, remedy="use 0 or more"
            )
    pruned = uvloop.run(_prune(bus_config(run), job, days, keep, dry_run))
    if json:
        records = ({"job": str(key), "run": name} for key, name in pruned)
        return print_json(*records, console=console)
    target = console or Console()
    for key, name in pruned:
        verb = "would be deleted" if dry_run else "deleted"
        target.print(f"{key} {name}: {verb}", soft_wrap=True, markup=False)
    if not pruned:
        target.print("no run to delete")


async def _list(settings: BusConfig) -> Runs:
    async with open_bus(settings, "runs") as bus:
        return await current_runs(bus)


async def _prune(
    settings: BusConfig, job: str, days: float | None, keep: int | None, dry_run: bool
) -> list[tuple[JobKey, str]]:
    async with open_bus(settings, "runs") as bus:
        pruned = to_prune(await current_runs(bus), time.time(), job=job, days=days, keep=keep)
        for key, name in [] if dry_run else pruned:
            await bus.drop_run(key, name)
    return pruned


async def current_runs(bus: Bus) -> Runs:
    """Return all runs that have a record, with the present status of those that have not ended."""
    runs = await bus.runs()
    for (job, name), status in runs.items():
        if status.has_ended:
            continue
        stored = await bus.keys.get(Bucket.VIEW, str(job))
        present: JobStatus | None = decode(stored.payload, JobStatus) if stored else None
        if present is not None and present.run == name:
            runs[job, name] = present
    return dict(sorted(runs.items(), key=lambda item: (item[1].submitted_s, item[0])))


def to_prune(
    runs: Runs, now_s: float, *, job: str, days: float | None, keep: int | None
) -> list[tuple[JobKey, str]]:
    """Return the ended runs that are old enough and not among the newest ones of their job."""
    newer: Counter[JobKey] = Counter()
    pruned = []
    for (key, name), status in reversed(runs.items()):
        newer[key] += 1
        is_old = days is None or now_s - status.ended_s > days * _DAY_S
        is_beyond = keep is None or newer[key] > keep
        if status.has_ended and is_old and is_beyond and job in ("", str(key)):
            pruned.append((key, name))
    return pruned[::-1]


def run_table(runs: Runs, now_s: float) -> Table:
    table = Table("job", "run", "state", "took", "device s", "tags", "config", box=None)
    for (job, name), status in runs.items():
        took_s = max(0.0, (status.ended_s or now_s) - status.submitted_s)
        device_s = sum(status.device_s.values())
        config = msgspec.json.encode(status.config).decode() if status.config else ""
        table.add_row(
            *(str(job), name, status.state, _duration(took_s), f"{device_s:.1f}"),
            *(Text(", ".join(status.tags)), Text(config, overflow="ellipsis", no_wrap=True)),
        )
    if not runs:
        table.add_row("none yet")
    return table


def _duration(seconds: float) -> str:
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest_s:02}"
