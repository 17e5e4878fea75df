"""`phaseloom replay` writes a run's timeline as one HTML file for a browser.

The file is self-contained and fetches nothing, so it can be mailed or published.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import aclosing
from pathlib import Path

import uvloop
from rich.console import Console

from phaseloom.cli.recorder import Recorded, read_events
from phaseloom.cli.rundir import bus_config, find_run, open_bus
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.transport.connection import BusConfig
from phaseloom.common.transport.localrun import RUNS
from phaseloom.console.core.view import View
from phaseloom.console.core.wire import Replay
from phaseloom.console.page import write_replay

FILE = "replay.html"
_EVENTS = "events.jsonl"
_MAX_ROWS = 2_000_000
"""Number of rows that a browser can still draw. For a longer run, the file has the newest rows."""


def replay(
    run: str = "", *, out: Path | None = None, runs: Path = RUNS, console: Console | None = None
) -> None:
    """Write a run's timeline as one self-contained HTML file.

    Parameters
    ----------
    run
        Run directory, or its name under runs/. Default: the newest run. A mesh of `phaseloom up`
        must be running; `phaseloom demo` has recorded its log in a file.
    out
        File to write. Default: `replay.html` in the run's directory.
    runs
        Directory that contains the runs' directories.
    """
    directory = find_run(Path(run) if run else None, runs).resolve()
    recorded = directory / _EVENTS
    if recorded.is_file():
        events: list[Recorded] = read_events(recorded)
    else:
        events = uvloop.run(_read_live(bus_config(directory)))
    path = out or directory / FILE
    make_replay(directory.name, events, path)
    (console or Console()).print(f"{path}", soft_wrap=True, markup=False)


def make_replay(title: str, events: Iterable[Recorded], path: Path) -> None:
    """Write the timeline of recorded events as an HTML page.

    Raises: CallerError: FAILED_PRECONDITION: there are no events.
    """
    view = View(_MAX_ROWS)
    last_s = 0.0
    for entry in events:
        view.step(entry.time_unix_s, entry.event)
        last_s = entry.time_unix_s
    if not last_s:
        raise CallerError(
            f"{title} has no events to show",
            code=Code.FAILED_PRECONDITION,
            field="run",
            remedy="name a run in which at least one job has run",
        )
    write_replay(Replay(title, view.update(last_s)), path)


async def _read_live(settings: BusConfig) -> list[Recorded]:
    """Return all events in the decision log of a running mesh."""
    events: list[Recorded] = []
    async with open_bus(settings, "replay") as bus:
        end = await bus.log.end()
        if end:
            async with aclosing(bus.log.read_entries()) as entries:
                async for entry in entries:
                    events += (
                        Recorded(part.sequence, part.time_s, part.event) for part in entry.split()
                    )
                    if entry.sequence >= end:
                        break
    return events
