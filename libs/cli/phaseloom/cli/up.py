"""`phaseloom up`: the mesh on this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path

import uvloop

from phaseloom.cli.policies import with_policies
from phaseloom.cli.supervisor import Mesh, MeshConfig, new_run_dir
from phaseloom.common.process import config

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def up(
    *,
    mesh_file: Path | None = None,
    runs: Path = Path("runs"),
    placement: str | None = None,
    ordering: str | None = None,
) -> None:
    """Run a nats-server and every service on this machine until Ctrl-C, for your own controllers.

    Parameters
    ----------
    mesh_file
        TOML with a table [mesh]: nodes, tenants, policies. Without it: one rollout and one train
        device, both emulated, and the tenant `demo`.
    runs
        Where the run's directory is made: logs, spans, credentials, the server's store.
    placement
        Policy: which nodes a job is pinned to, and with whom. Goes before the file's.
    ordering
        Policy: which ready operation a device runs next. Goes before the file's.
    """
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s"
    )
    settings = config.load(MeshConfig, "mesh", file=mesh_file)
    settings.check()
    settings = with_policies(settings, placement, ordering)
    uvloop.run(_up(settings, new_run_dir(runs)))


async def _up(settings: MeshConfig, run_dir: Path) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, stop.set)
    async with Mesh(settings, run_dir) as mesh:
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
    """How a controller connects, ready to paste into a shell."""
    blocks = [
        f"export PHASELOOM_URL={mesh.url}\n"
        f"export PHASELOOM_TENANT={tenant}\n"
        f"export PHASELOOM_PASSWORD={password}"
        for tenant, password in mesh.credentials.tenants.items()
    ]
    nodes = ", ".join(f"{node.name} ({node.pool})" for node in mesh.config.nodes)
    return "\n".join(
        [
            f"the mesh is up: {nodes}; logs in {mesh.run_dir / 'logs'}",
            "connect a controller with",
            *blocks,
            *_metrics(mesh),
            "Ctrl-C stops everything",
        ]
    )


def _metrics(mesh: Mesh) -> list[str]:
    urls = [f"http://127.0.0.1:{port}/metrics" for port in mesh.metrics_ports.values()]
    return ["metrics: " + ", ".join(urls)] if urls else []
