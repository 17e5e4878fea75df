"""The directory of a run: made, found again, and read for how to reach the mesh of the run."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.process import config
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.connection import BusConfig, connect
from phaseloom.common.transport.natsserver import Credentials

RUNS = Path("runs")
_BUS_URL = f"{config.PREFIX}BUS_URL"


def new_run_dir(runs: Path) -> Path:
    """Make the directory `runs/<time>`, and let `runs/latest` point to it."""
    name = time.strftime("%Y%m%d-%H%M%S")
    run_dir = runs / name
    number = 1
    while True:
        try:
            run_dir.mkdir(parents=True)
            break
        except FileExistsError:
            number += 1
            run_dir = runs / f"{name}-{number}"
    partial = runs / f".latest.{os.getpid()}"
    partial.unlink(missing_ok=True)
    partial.symlink_to(run_dir.name)
    partial.replace(runs / "latest")
    return run_dir


def find_run(run: Path | None, runs: Path = RUNS) -> Path:
    """The given directory; without one, the newest run under `runs`.

    Raises: CallerError: NOT_FOUND: there is no such directory, or no run at all.
    """
    if run is not None:
        if not run.is_dir():
            raise CallerError(
                f"there is no run directory {run}",
                code=Code.NOT_FOUND,
                field="--run",
                remedy="name the one that `phaseloom up` or `phaseloom demo` has printed",
            )
        return run
    found = [path for path in runs.glob("*") if (path / "mesh.json").is_file()]
    if not found:
        raise CallerError(
            f"there is no run under {runs.absolute()}",
            code=Code.NOT_FOUND,
            field="--run",
            remedy="start one with `phaseloom up`, or name its directory",
        )
    return max(found, key=lambda path: (path / "mesh.json").stat().st_mtime).resolve()


def bus_config(run: Path | None) -> BusConfig:
    """How to reach the bus with the mesh's own account.

    A named run answers. Without a name, PHASELOOM_BUS_… answers where it is set, else the newest
    run.

    Raises: CallerError: there is no run, or no readable credentials are in it.
    """
    if run is None and config.inherited().get(_BUS_URL):
        return config.load(BusConfig, "bus")
    file = find_run(run) / "credentials.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=Credentials).bus
    except (OSError, msgspec.DecodeError) as error:
        raise CallerError(
            f"{file} cannot be read: {error}",
            code=Code.FAILED_PRECONDITION,
            field="--run",
            remedy=f"name a run of this machine's, or set {_BUS_URL}, _USER and _PASSWORD",
        ) from None


@asynccontextmanager
async def open_bus(settings: BusConfig, name: str) -> AsyncIterator[Bus]:
    """A connection to the mesh's bus, closed in the end.

    Args: name: of the connection, as the server lists it.
    """
    bus = Bus(await connect(settings.url, name, settings.user, settings.password))
    try:
        yield bus
    finally:
        await bus.close()
