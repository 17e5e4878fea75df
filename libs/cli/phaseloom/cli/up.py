"""`phaseloom up` runs a mesh on this machine until Ctrl-C."""

from __future__ import annotations

import asyncio
import logging
import shlex
import signal
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from socket import create_server
from typing import Annotated

import uvloop
from cyclopts import Parameter
from msgspec import Struct
from msgspec.structs import replace

from phaseloom.cli.extras import check_installed, missing
from phaseloom.cli.fitting import footprints, nodes_for, what_fits
from phaseloom.cli.hub import find_models
from phaseloom.cli.meshconfig import MeshConfig, settings_of
from phaseloom.cli.processes import api_key
from phaseloom.cli.rundir import inherit_keys, keep_keys, new_run_dir, run_to_resume
from phaseloom.cli.supervisor import Mesh
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.sizes import format_size
from phaseloom.common.contract.specs import SchedulerSettings
from phaseloom.common.process import config, machine
from phaseloom.common.transport.localrun import RUNS, newest_run
from phaseloom.common.transport.natsserver import CREDENTIALS
from phaseloom.scheduler.core.policies.registry import check_policies

CONSOLE_PORT = 8900
GATEWAY_PORT = 8800
_EXAMPLE = "tinker_adapter.py"
_GATEWAY_PACKAGES = ("aiohttp", "transformers", "jinja2", "numpy")
_CONSOLE_PACKAGES = ("aiohttp",)
_WORKER_PACKAGES = ("torch", "transformers", "safetensors", "numpy", "psutil")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _overriding(field: str, kind: type[Struct] = MeshConfig, *, unless: str = "") -> Parameter:
    """Return help for an option: the description of the mesh file's setting that it overrides."""
    return Parameter(help=f"{config.description_of(kind, field)} Overrides the mesh file{unless}.")


def up(
    *,
    model: list[str] | None = None,
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
    new_keys: bool = False,
) -> None:
    """Run a NATS server and every service on this machine until Ctrl-C. Controllers can connect.

    Parameters
    ----------
    model
        Model to serve and to train: ORG/NAME or ORG/NAME:REVISION of the Hugging Face Hub, which
        is downloaded unless the local cache has it; NAME=DIR; or a directory. May be repeated.
        The gateway then serves it at port 8800, or any free port.
    mesh_file
        TOML file with a table [mesh]: nodes, tenants, policies. Default: with --resume, the
        settings of the earlier run; otherwise the tenant `demo`, one emulated rollout device and
        one emulated train device, which together have half of the available memory.
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
    new_keys
        Make new passwords and keys, and choose new ports. Default: passwords and keys are those of
        the earlier runs in the directory of the runs, and ports too if they are free.
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
    if new_keys and resume:
        raise CallerError(
            "--new-keys does not work with --resume: jobs continue with their keys",
            field="--new-keys",
            remedy="omit --new-keys, or start a new run without --resume",
        )
    earlier = run_to_resume(run, runs) if resume else None
    ports = MeshConfig() if new_keys else _newest_settings(runs)
    settings = load_settings(mesh_file, earlier, gateway, preferred=ports.console_port)
    settings = with_models(
        settings, model or [], mesh_file, earlier, preferred_port=ports.gateway_port
    )
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
    if earlier is None and new_keys:
        (runs / CREDENTIALS).unlink(missing_ok=True)
    elif earlier is None:
        inherit_keys(run_dir, settings.nats_servers)
    uvloop.run(_up(settings, run_dir, accepts_loss=accept_loss))


def load_settings(
    mesh_file: Path | None,
    earlier: Path | None,
    gateway: int = 0,
    *,
    preferred: int = 0,
) -> MeshConfig:
    """Return the settings of the mesh file or the environment, or else of the run to resume.

    If they have no port for the console, choose a free one.

    Args: earlier: directory of the run to resume; None: start a new run.
          gateway: port of the gateway on the command line; 0: not given.
          preferred: port for the console if it is free; 0: the usual one.
    """
    earlier_settings = None
    if earlier is not None and mesh_file is None and not config.is_configured("mesh"):
        earlier_settings = settings_of(earlier)
    if earlier_settings is None:
        settings = config.load(MeshConfig, "mesh", file=mesh_file)
        port = settings.console_port or _free_port(
            preferred or CONSOLE_PORT, gateway or settings.gateway_port
        )
        return replace(settings, console_port=port)
    # Another program may use the console's port by now. A run without a port stays without a
    # console.
    gateway_port = gateway or earlier_settings.gateway_port
    return replace(
        earlier_settings,
        console_port=earlier_settings.console_port
        and _free_port(earlier_settings.console_port, gateway_port),
    )


def with_models(
    settings: MeshConfig,
    models: list[str],
    mesh_file: Path | None,
    earlier: Path | None,
    *,
    preferred_port: int = 0,
) -> MeshConfig:
    """Return the settings with the models of the command line, and a gateway that serves them.

    Unless the settings state nodes, these get the sizes that suit this machine and the models, or
    those of the run to resume.

    Raises: CallerError or ResourceError: a model cannot be had, or does not fit on this machine.
    """
    found = find_models(models, report=lambda line: print(line, flush=True))
    settings = replace(settings, models={**settings.models, **found})
    if found and not settings.gateway_port:
        port = _free_port(preferred_port or GATEWAY_PORT, settings.console_port, _GATEWAY_PACKAGES)
        # A missing package is reported where the ports are checked.
        settings = replace(settings, gateway_port=port or GATEWAY_PORT)
    if config.is_set("mesh", "nodes", mesh_file):
        return settings
    before = settings_of(earlier) if earlier is not None else None
    if before is not None:
        return replace(settings, nodes=before.nodes)
    nodes = nodes_for(footprints(settings.models), machine.available_bytes())
    return replace(settings, nodes=nodes)


async def _up(settings: MeshConfig, run_dir: Path, *, accepts_loss: bool) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, stop.set)
    async with Mesh(settings, run_dir, accepts_loss=accepts_loss) as mesh:
        keep_keys(mesh.run_dir, mesh.credentials)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_announce(mesh)), group.create_task(mesh.wait())]
            await stop.wait()
            for task in tasks:
                task.cancel()
        print("stopping", flush=True)


async def _announce(mesh: Mesh) -> None:
    print(f"starting the mesh in {mesh.run_dir}", flush=True)
    for model in mesh.config.models:
        print(f"{model}: reading and hashing its files", flush=True)
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
            f'or in one line: eval "$({_env_command(mesh.run_dir)})"',
            *_gateway(mesh),
            *_models(mesh),
            *_console(mesh),
            *_metrics(mesh),
            *_missing_packages(),
            "Ctrl-C stops everything",
        ]
    )


def _env_command(run_dir: Path) -> str:
    if run_dir.parent == RUNS.absolute():
        return "phaseloom env"
    return f"phaseloom env --run {shlex.quote(str(run_dir))}"


def _sizes(devices: list[int]) -> str:
    """Format the memory of a node's devices."""
    return " + ".join(map(format_size, devices))


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


def _models(mesh: Mesh) -> list[str]:
    """Describe what fits of each model, and how to chat with it and to train an adapter on it."""
    models, port = footprints(mesh.config.models), mesh.config.gateway_port
    if not models:
        return []
    lines = [line for model in models for line in what_fits(model, mesh.config.nodes)]
    if port:
        key = api_key(next(iter(mesh.credentials.tenants.values())))
        python = shlex.quote(sys.executable)
        body = f'{{"model": "{models[0].name}", "max_tokens": 64, "messages": [{{"role": "user", '
        lines += [
            "to chat:",
            f"curl -s http://127.0.0.1:{port}/v1/chat/completions -H 'Authorization: Bearer {key}' "
            f"-H 'Content-Type: application/json' -d '{body}\"content\": \"What is 3 + 4?\"}}]}}'",
            "to train an adapter with the Tinker SDK:",
            f"{python} -m pip install -q 'tinker>=0.25,<1' && "
            f"TINKER_BASE_URL=http://127.0.0.1:{port} TINKER_API_KEY={key} {python} {_example()} "
            f"--model {models[0].name}",
        ]
    return lines


def _example() -> str:
    """Return the path of an example as the shell needs it: the installed one, or the clone's."""
    demo = find_spec("phaseloom.demo")
    assert demo is not None
    installed = Path(str(demo.origin)).parent / "examples" / _EXAMPLE
    file = installed if installed.is_file() else installed.parents[5] / "examples" / _EXAMPLE
    return shlex.quote(str(file))


def _console(mesh: Mesh) -> list[str]:
    if not mesh.config.console_port:
        absent = missing(_CONSOLE_PACKAGES)
        return ["no console: run pip install 'phaseloom[console]' to have one"] if absent else []
    return [
        f"console: {mesh.console_url()}",
        *(f"  for tenant {tenant}: {mesh.console_url(tenant)}" for tenant in mesh.config.tenants),
    ]


def _newest_settings(runs: Path) -> MeshConfig:
    """Return the settings of the newest run, whose ports a new one has again if they are free."""
    newest = newest_run(runs)
    with suppress(CallerError):  # damaged settings of an old run do not stop a new one
        return (settings_of(newest) if newest is not None else None) or MeshConfig()
    return MeshConfig()


def _free_port(preferred: int, excluded: int, packages: tuple[str, ...] = _CONSOLE_PACKAGES) -> int:
    """Return `preferred` if it is free, otherwise another free port except `excluded`.

    Returns 0 if packages that the port's service needs are not installed.
    """
    if missing(packages):
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
