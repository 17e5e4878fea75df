"""Finding a run: its directory, and how its mesh is reached."""

from __future__ import annotations

from pathlib import Path

import msgspec

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.process import config
from phaseloom.common.transport.bus import BusConfig
from phaseloom.common.transport.natsserver import Credentials

RUNS = Path("runs")
_BUS_URL = f"{config.PREFIX}BUS_URL"


def find_run(run: Path | None, runs: Path = RUNS) -> Path:
    """The directory named, else the newest one under `runs`.

    Raises: CallerError: NOT_FOUND.
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
    """How the mesh account is reached: PHASELOOM_BUS_… where set and no run is named, else the run.

    Raises: CallerError: no run, or no readable credentials in it.
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
