"""`phaseloom up` runs a mesh on this machine until Ctrl-C."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from contextlib import suppress
from pathlib import Path
from socket import create_server
from typing import Annotated

import uvloop
from cyclopts import Parameter
from msgspec import Struct
from msgspec.structs import replace

from phaseloom.cli.extras import check_installed, missing
from phaseloom.cli.meshconfig import MeshConfig, settings_of
from phaseloom.cli.processes import api_key
from phaseloom.cli.rundir import new_run_dir, run_to_resume
from phaseloom.cli.supervisor import Mesh
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.specs import SchedulerSettings
from phaseloom.common.process import config
from phaseloom.scheduler.core.policies.registry import check_policies

CONSOLE_PORT = 8900
_GATEWAY_PACKAGES = ("aiohttp", "transformers", "jinja2", "numpy")
_CONSOLE_PACKAGES = ("aiohttp",)
_WORKER_PACKAGES = ("torch", "transformers", "safetensors", "numpy", "psutil")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _overriding(field: str, kind: type[Struct] = MeshConfig, *, unless: str = "") -> Parameter:
    """Return help for an option: the description of the mesh file's setting that it overrides."""
    return Parameter(help=f"{config.description_of(kind, field)} Overrides the mesh file{unless}.")


def up(
    *,
    mesh_file: Path | None = None,
    runs: Path = Path("runs"),
    placement: Annotated[str | None, _overriding("placement", SchedulerSettings)] = None,
    ordering: Annotated[str | None, _overriding("ordering", SchedulerSettings)] = None,
    multiplexing: Annotated[str | None, _overriding("multiplexing", SchedulerSettings)] = None,
    nats_servers: Annotated[int, _overriding("nats_servers", unless=" unless 0")] = 0,
    slowdowns: Annotated[Path | None, _overriding("slowdowns")] = None,
    slo_percentile: Annotated[
        float | None, _overriding("slo_percentile", SchedulerSettings)
    ] = None,
    gateway: Annotated[int, _overriding("gateway_port", unless=" unless 0")] = 0,
    gateways: Annotated[int, _overriding("gateways", unless=" unless 0")] = 0,
    console_port: int | None = None,
    resume: bool = False,
    run: str = "",
    accept_loss: bool = False,
) -> None:
    """Run a NATS server and every service on this machine until Ctrl-C. Controllers can connect.

    Parameters
    ----------
    mesh_file
        TOML file with a table [mesh]: nodes, tenants, policies. Default: with --resume, the
        settings of the earlier run; otherwise one emulated rollout device, one emulated train
        device and the tenant `demo`.
    runs
        Directory in which each run gets a directory for its logs, spans, credentials and the
        NATS server's store.
    console_port
        Port of this machine for the console, a web page that shows the mesh; 0: no console.
        Default: the mesh file's port, or 8900, or any free port.
    resume
        Continue an earlier run in its directory, with its settings, jobs, checkpoints, keys and
        gateway records. A mesh file must then keep the run's nodes, tenants and checkpoint
        directory.
    run
        Run to resume, by name or path. Default: the newest run.
    accept_loss
        Resume even if the NATS server's store has lost its newest messages or is an older copy. The
        nodes' state is set aside: jobs fall back to their checkpoints, and jobs without one fail.
    """
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s"
    )
    if run and not resume:
        raise CallerError(
            f"--run {run} works only with --resume, which is missing",
            field="--run",
            remedy="add --resume, or omit --run",
        )
    earlier = run_to_resume(run, runs) if resume else None
    settings = load_settings(mesh_file, earlier, gateway)
    settings.check()
    settings = with_policies(settings, placement, ordering, multiplexing, slo_percentile)
    settings = replace(
        settings,
        nats_servers=nats_servers or settings.nats_servers,
        slowdowns=str(slowdowns or settings.slowdowns),
        gateway_port=gateway or settings.gateway_port,
        gateways=gateways or settings.gateways,
        console_port=settings.console_port if console_port is None else console_port,
    )
    # The command line may have changed any of the checked settings.
    settings.check()
    if earlier is not None:
        settings.check_resumes(earlier)
    _check_ports(settings)
    run_dir = earlier or new_run_dir(runs)
    uvloop.run(_up(settings, run_dir, accepts_loss=accept_loss))


def load_settings(mesh_file: Path | None, earlier: Path | None, gateway: int = 0) -> MeshConfig:
    """Return the settings of the mesh file or the environment, or else of the run to resume.

    If they have no port for the console, choose a free one.

    Args: earlier: directory of the run to resume; None: start a new run.
          gateway: port of the gateway on the command line; 0: not given.
    """
    earlier_settings = None
    if earlier is not None and mesh_file is None and not config.is_configured("mesh"):
        earlier_settings = settings_of(earlier)
    if earlier_settings is None:
        settings = config.load(MeshConfig, "mesh", file=mesh_file)
        port = settings.console_port or _free_port(CONSOLE_PORT, gateway or settings.gateway_port)
        return replace(settings, console_port=port)
    # Another program may use the console's port by now. A run without a port stays without a
    # console.
    gateway_port = gateway or earlier_settings.gateway_port
    return replace(
        earlier_settings,
        console_port=earlier_settings.console_port
        and _free_port(earlier_settings.console_port, gateway_port),
    )


async def _up(settings: MeshConfig, run_dir: Path, *, accepts_loss: bool) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, stop.set)
    async with Mesh(settings, run_dir, accepts_loss=accepts_loss) as mesh:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_announce(mesh)), group.create_task(mesh.wait())]
            await stop.wait()
            for task in tasks:
                task.cancel()
        print("stopping", flush=True)


async def _announce(mesh: Mesh) -> None:
    print(f"starting the mesh in {mesh.run_dir}", flush=True)
    await mesh.ready()
    print(greeting(mesh), flush=True)


def greeting(mesh: Mesh) -> str:
    """Describe how controllers connect, with lines to paste into a shell."""
    blocks = [
        f"to connect a controller of tenant {tenant}:\n"
        f"export PHASELOOM_URL={mesh.url}\n"
        f"export PHASELOOM_TENANT={tenant}\n"
        f"export PHASELOOM_PASSWORD={password}"
        for tenant, password in mesh.credentials.tenants.items()
    ]
    nodes = ", ".join(
        f"{node.name} ({node.pool}, {_sizes(node.devices)})" for node in mesh.config.nodes
    )
    return "\n".join(
        [
            f"the mesh is up: {nodes}; logs in {mesh.run_dir / 'logs'}",
            *blocks,
            *_gateway(mesh),
            *_console(mesh),
            *_metrics(mesh),
            *_missing_packages(),
            "Ctrl-C stops everything",
        ]
    )


def _sizes(devices: list[int]) -> str:
    """Format the memory of a node's devices."""
    return " + ".join(f"{num_bytes / 2**20:,.0f}" for num_bytes in devices) + " MiB"


def _gateway(mesh: Mesh) -> list[str]:
    port = mesh.config.gateway_port
    if not port:
        return []
    keys = [
        f"export TINKER_API_KEY={api_key(password)} OPENAI_API_KEY={api_key(password)}  # {tenant}"
        for tenant, password in mesh.credentials.tenants.items()
    ]
    return [
        "to connect the Tinker SDK or an OpenAI client:",
        f"export TINKER_BASE_URL=http://127.0.0.1:{port} OPENAI_BASE_URL=http://127.0.0.1:{port}/v1",
        *keys,
    ]


def _console(mesh: Mesh) -> list[str]:
    if not mesh.config.console_port:
        return []
    return [
        f"console: {mesh.console_url()}",
        *(f"  for tenant {tenant}: {mesh.console_url(tenant)}" for tenant in mesh.config.tenants),
    ]


def _free_port(preferred: int, excluded: int) -> int:
    """Return `wanted` if it is free, otherwise another free port except `taken`.

    Returns 0 if the packages of the console are not installed.
    """
    if missing(_CONSOLE_PACKAGES):
        return 0
    for port in (0,) if preferred == excluded else (preferred, 0):
        # Without `reuse_port`, binding fails if another mesh's console uses the port.
        with suppress(OSError), create_server(("127.0.0.1", port)) as listener:
            return int(listener.getsockname()[1])
    return 0


def _check_ports(settings: MeshConfig) -> None:
    """Check before the mesh starts that its ports are free and the required packages installed.

    Raises: CallerError: FAILED_PRECONDITION: another program uses a port, or packages are missing.
    """
    for field, port, packages in (
        ("mesh.gateway_port", settings.gateway_port, _GATEWAY_PACKAGES),
        ("mesh.console_port", settings.console_port, _CONSOLE_PACKAGES),
    ):
        if port:
            extra = field.removeprefix("mesh.").removesuffix("_port")
            check_installed(f"a {extra}", packages, extra)
        try:
            if port:
                create_server(("127.0.0.1", port)).close()
        except OSError as error:
            raise CallerError(
                f"port {port} cannot be used: {error.strerror}",
                code=Code.FAILED_PRECONDITION,
                field=field,
                remedy="choose another port, or end the program that uses this one",
            ) from None


def _missing_packages() -> list[str]:
    absent = missing(_WORKER_PACKAGES)
    if not absent:
        return []
    return [
        f"models cannot run without {', '.join(absent)}: run pip install 'phaseloom[worker]', or "
        "name interpreters in the mesh file that have these packages"
    ]


def _metrics(mesh: Mesh) -> list[str]:
    urls = [f"http://127.0.0.1:{port}/metrics" for port in mesh.metrics_ports.values()]
    return ["metrics: " + ", ".join(urls)] if urls else []


def with_policies(
    settings: MeshConfig,
    placement: str | None,
    ordering: str | None,
    multiplexing: str | None = None,
    slo_percentile: float | None = None,
) -> MeshConfig:
    """Return the settings with the policies that the command line names.

    Raises: CallerError: a policy is unknown (the remedy lists the known ones), or the percentile is
                not between 0 and 100.
    """
    settings = replace(
        settings,
        placement=placement or settings.placement,
        ordering=ordering or settings.ordering,
        multiplexing=multiplexing or settings.multiplexing,
        slo_percentile=settings.slo_percentile if slo_percentile is None else slo_percentile,
    )
    check_policies(
        settings.placement,
        settings.ordering,
        settings.multiplexing,
        settings.slo_percentile,
    )
    return settings
