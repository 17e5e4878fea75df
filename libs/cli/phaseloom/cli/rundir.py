"""Creates, finds and locks the directory of a run, and connects to its mesh."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.process import config, files
from phaseloom.common.process.files import read_json, replace_file
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.connection import SERVICE_CREDENTIALS, BusConfig, connect
from phaseloom.common.transport.localrun import LATEST, RUNS, newest_run, read_credentials
from phaseloom.common.transport.natsserver import (
    CREDENTIALS,
    Credentials,
    inherit_credentials,
)

log = logging.getLogger(__name__)

LOCK = "lock"
"""Name of the file in a run directory that is locked while the mesh runs."""
_BUS_URL = f"{config.PREFIX}BUS_URL"


def new_run_dir(runs: Path) -> Path:
    """Create the directory `runs/<time>`, and point the link `runs/latest` to it.

    Raises: CallerError: FAILED_PRECONDITION: it cannot be created.
    """
    name = time.strftime("%Y%m%d-%H%M%S")
    run_dir = runs / name
    number = 1
    try:
        runs.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                run_dir.mkdir()
                break
            except FileExistsError:
                number += 1
                run_dir = runs / f"{name}-{number}"
        point_at(run_dir)
    except OSError as error:
        raise CallerError(
            f"no run directory can be created in {runs}: {error.strerror}",
            code=Code.FAILED_PRECONDITION,
            field="--runs",
            remedy="name a directory that you may write to, on a disk with free space",
        ) from None
    return run_dir


def point_at(run_dir: Path) -> None:
    """Point the link `latest`, next to a run directory, to that directory."""
    partial = run_dir.with_name(f".latest.{os.getpid()}")
    partial.unlink(missing_ok=True)
    partial.symlink_to(run_dir.name)
    # A rename replaces the old link atomically; a link cannot be overwritten in place.
    partial.replace(run_dir.with_name(LATEST))


def run_to_resume(run: str, runs: Path) -> Path:
    """Return the directory of a run that has ended and can be resumed.

    Args:   run: its name under `runs`, or a path; empty: the newest run.
    Raises: CallerError: NOT_FOUND: there is no such run. FAILED_PRECONDITION: it has not ended.
    """
    directory = find_run(Path(run) if run else None, runs).resolve()
    with locked(directory):
        if directory.parent == runs.resolve():
            point_at(directory)
        return directory


def inherit_keys(run_dir: Path, num_servers: int) -> None:
    """Give a new run the passwords, and so the keys, of the runs next to it, and their ports."""
    with suppress(FileNotFoundError):
        remedy = "remove the file, or add --new-keys"
        earlier = read_json(run_dir.parent / CREDENTIALS, Credentials, remedy)
        inherit_credentials(run_dir / CREDENTIALS, earlier, num_servers)


def keep_keys(run_dir: Path, credentials: Credentials) -> None:
    """Keep the passwords of a run for later runs next to it."""
    file = run_dir.parent / CREDENTIALS
    with suppress(OSError, CallerError):  # then later runs get new keys
        tenants: dict[str, str] = {}
        with suppress(FileNotFoundError):
            tenants = read_json(file, Credentials, "").tenants
        # A tenant that this run does not have keeps its password for a run that has it.
        kept = replace(credentials, tenants=tenants | credentials.tenants)
        replace_file(file, msgspec.json.format(msgspec.json.encode(kept)))


def is_running(run_dir: Path) -> bool:
    """Whether the mesh of a run is running on this machine."""
    try:
        with locked(run_dir):
            return False
    except CallerError:
        return True


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Lock a run directory against other meshes within the block.

    Raises: CallerError: FAILED_PRECONDITION: another process has locked the directory.
    """
    in_use = CallerError(
        f"{run_dir} is in use by a running mesh or a backup",
        code=Code.FAILED_PRECONDITION,
        field="--run",
        remedy="stop the mesh, or wait until the backup has ended",
    )
    with files.locked(run_dir / LOCK, in_use):
        yield


def find_run(run: Path | None, runs: Path = RUNS) -> Path:
    """Return the directory of a run.

    Args:   run: its name under `runs`, or a path; None: the newest run.
    Raises: CallerError: NOT_FOUND: there is no such directory, or no run at all.
    """
    if run is not None:
        if not run.is_dir() and (runs / run).is_dir():
            return runs / run
        if not run.is_dir():
            raise CallerError(
                f"there is no run directory {run}",
                code=Code.NOT_FOUND,
                field="--run",
                remedy="name the directory that `phaseloom up` or `phaseloom demo` printed",
            )
        return run
    newest = newest_run(runs)
    if newest is None:
        raise CallerError(
            f"there is no run under {runs.absolute()}",
            code=Code.NOT_FOUND,
            field="--run",
            remedy="start one with `phaseloom up`, or name its directory",
        )
    return newest


def bus_config(run: Path | None) -> BusConfig:
    """Return the address of a mesh's NATS server and the account to use there.

    If `run` is None, they come from PHASELOOM_BUS_URL, _USER and _PASSWORD if these are set,
    otherwise from the newest run.

    Raises: CallerError: there is no run, or its credentials cannot be read.
    """
    if run is None and config.inherited().get(_BUS_URL):
        return config.load(BusConfig, "bus")
    remedy = f"name a run on this machine with --run, or set {_BUS_URL}, _USER and _PASSWORD"
    return read_credentials(find_run(run), remedy).bus


@asynccontextmanager
async def open_bus(settings: BusConfig, name: str) -> AsyncIterator[Bus]:
    """Connect to the NATS server of a mesh within the block.

    Args: name: name of the connection, which the server shows in its list.
    """
    client = await connect(
        settings.url,
        name,
        settings.user,
        settings.password,
        credentials_from=f"credentials.json of the run, or {SERVICE_CREDENTIALS}",
    )
    bus = Bus(client, settings.replicas)
    try:
        yield bus
    finally:
        await bus.close()
