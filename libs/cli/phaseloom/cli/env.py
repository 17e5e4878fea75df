"""`phaseloom env` prints what controllers, SDKs and people need to reach the running mesh."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Console

from phaseloom.cli.meshconfig import MeshConfig, settings_of
from phaseloom.cli.output import print_json
from phaseloom.cli.processes import api_key, console_url
from phaseloom.cli.rundir import find_run, is_running
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.transport.localrun import choose_tenant, read_credentials
from phaseloom.common.transport.natsserver import Credentials


def env(
    *,
    tenant: str = "",
    run: Path | None = None,
    json: bool = False,
    console: Console | None = None,
) -> None:
    """Print the variables by which controllers and SDKs reach the running mesh.

    Parameters
    ----------
    tenant
        Tenant to connect as. Needed if the mesh has several.
    run
        Run directory, or its name under runs/. Default: the newest run.
    json
        Print one JSON object instead of lines for a shell. It also has the address of the console.
    """
    directory = find_run(run)
    if not is_running(directory):
        raise CallerError(
            f"the mesh of {directory} is not running",
            code=Code.FAILED_PRECONDITION,
            field="--run",
            remedy="start it with `phaseloom up`, or name the run of another mesh with --run",
        )
    credentials = read_credentials(directory, "name another run with --run")
    settings = settings_of(directory) or MeshConfig()
    name = choose_tenant(credentials, tenant, directory, "--tenant")
    variables = variables_of(credentials, settings, name)
    if json:
        page = console_url(settings.console_port, credentials.password)
        print_json(variables | {"console": page} if settings.console_port else variables)
        return
    lines = [f"export {key}={shlex.quote(value)}" for key, value in variables.items()]
    (console or Console()).print(*lines, sep="\n", soft_wrap=True, markup=False, highlight=False)


def variables_of(credentials: Credentials, settings: MeshConfig, tenant: str) -> dict[str, str]:
    """Return the variables for a tenant's controllers, and for SDKs if there is a gateway."""
    password = credentials.tenants[tenant]
    variables = {
        "PHASELOOM_URL": credentials.url,
        "PHASELOOM_TENANT": tenant,
        "PHASELOOM_PASSWORD": password,
    }
    if settings.gateway_port:
        gateway = f"http://127.0.0.1:{settings.gateway_port}"
        variables |= {
            "TINKER_BASE_URL": gateway,
            "TINKER_API_KEY": api_key(password),
            "OPENAI_BASE_URL": f"{gateway}/v1",
            "OPENAI_API_KEY": api_key(password),
        }
    return variables
