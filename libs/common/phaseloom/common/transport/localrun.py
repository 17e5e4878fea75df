"""Runs of `phaseloom up` on this machine: where they are, and the accounts of their meshes."""

from __future__ import annotations

from pathlib import Path

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.process.files import read_json
from phaseloom.common.transport.natsserver import CREDENTIALS, Credentials

RUNS = Path("runs")
LATEST = "latest"
"""Name of the link to the newest run, next to the runs."""
MESH = "mesh.json"
"""Name of the file in a run directory that a mesh writes once it runs."""


def newest_run(runs: Path = RUNS) -> Path | None:
    """Return the directory of the run whose mesh has started a process last; None: no run."""
    directories = [path for path in runs.glob("*") if (path / MESH).is_file()]
    if not directories:
        return None
    return max(directories, key=lambda path: (path / MESH).stat().st_mtime).resolve()


def read_credentials(run_dir: Path, remedy: str) -> Credentials:
    """Return the accounts of a run's mesh.

    Raises: CallerError: FAILED_PRECONDITION: the file is missing, damaged or unreadable.
    """
    file = run_dir / CREDENTIALS
    try:
        credentials: Credentials = read_json(file, Credentials, remedy)
    except FileNotFoundError:
        raise CallerError(
            f"{file} does not exist",
            code=Code.FAILED_PRECONDITION,
            field=file.name,
            remedy=remedy,
        ) from None
    return credentials


def choose_tenant(credentials: Credentials, tenant: str, run_dir: Path, field: str) -> str:
    """Return the tenant with a name, or the only tenant if the name is empty.

    Args:   field: the argument or option that names the tenant.
    Raises: CallerError: the run has no such tenant, or several and none is named.
    """
    names = sorted(credentials.tenants)
    if tenant in names:
        return tenant
    if not tenant and len(names) == 1:
        return names[0]
    problem = f"no tenant {tenant!r}" if tenant else f"{len(names)} tenants"
    raise CallerError(
        f"the run in {run_dir} has {problem}",
        code=Code.NOT_FOUND if tenant else Code.INVALID_ARGUMENT,
        field=field,
        remedy=f"set {field} to one of {', '.join(names)}",
    )
