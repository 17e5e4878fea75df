"""`phaseloom state` shows which state each node stores, in which tier, and how large it is."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Column, Table

from phaseloom.cli.output import print_json, print_whole
from phaseloom.cli.rundir import bus_config, open_bus
from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.contract.state_agent import DeploymentState, SharedCopyState, StatusReport
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.connection import BusConfig
from phaseloom.common.transport.leases import nodes_up
from phaseloom.common.transport.services import node_report

_TIMEOUT_S = 5.0
_NOTHING = "–"
_HASH_CHARS = 12


def state(
    *,
    node: str = "",
    run: Path | None = None,
    json: bool = False,
    console: Console | None = None,
) -> int:
    """Show which deployments and weights versions are in device memory, host memory and on NVMe.

    The exit code is 1 if a node did not answer.

    Parameters
    ----------
    node
        Show only this node.
    run
        Run directory, or its name under runs/. Default: PHASELOOM_BUS_URL, else the newest run.
    json
        Print one JSON object per node instead of tables.
    """
    reports = uvloop.run(_request_reports(bus_config(run), node))
    target = console or Console()
    for name, report in sorted(reports.items()):
        if json:
            content = report if isinstance(report, StatusReport) else report.info
            print_json({"node": name, "report": content})
        elif isinstance(report, StatusReport):
            target.print(headline(name, report), soft_wrap=True)
            for table in tables(report):
                print_whole(target, table)
        else:
            target.print(f"{name}: {report}", markup=False)
    return int(any(isinstance(report, PhaseloomError) for report in reports.values()))


async def _request_reports(
    settings: BusConfig, node: str
) -> dict[str, StatusReport | PhaseloomError]:
    """Request the status reports of one node, or of all nodes that are up.

    Raises: CallerError: NOT_FOUND: the node does not exist or is down.
    """
    async with open_bus(settings, "state") as bus:
        nodes = await nodes_up(bus)
        if node and node not in nodes:
            raise CallerError(
                f"node {node} does not exist or is down",
                code=Code.NOT_FOUND,
                field="--node",
                remedy=f"name a node that is up: {', '.join(nodes) or 'none is'}",
            )
        nodes = [node] if node else nodes
        return dict(
            zip(nodes, await asyncio.gather(*(_report(bus, n) for n in nodes)), strict=True)
        )


async def _report(bus: Bus, node: str) -> StatusReport | PhaseloomError:
    try:
        return await node_report(bus.client, node, timeout_s=_TIMEOUT_S)
    except ResourceError as error:
        return error


def headline(node: str, report: StatusReport) -> str:
    """Format the used and the total bytes of each tier of a node in one line."""
    devices = [
        f"device {number}: {_usage(used, budget)}"
        for number, (used, budget) in enumerate(
            zip(report.device_used_bytes, report.device_budget_bytes, strict=True)
        )
    ]
    return "; ".join(
        [
            f"[bold]{node}[/]",
            *devices,
            f"host memory: {_usage(report.host_used_bytes, report.host_budget_bytes)}",
            f"NVMe ({report.disk.method}): "
            f"{_usage(report.nvme_used_bytes, report.nvme_budget_bytes)} for host copies",
            *_sharing(report),
        ]
    )


def _sharing(report: StatusReport) -> list[str]:
    """Format how many bytes the owners have in total, and how many are stored thanks to sharing."""
    if not report.held_bytes:
        return []
    ratio = report.owned_bytes / report.held_bytes
    return [
        f"sharing: {_size(report.owned_bytes)} stored as {_size(report.held_bytes)} "
        f"({ratio:.2f} to 1)"
    ]


def tables(report: StatusReport) -> list[Table]:
    """Return the tables of deployments, weights versions and shared copies that have rows."""
    columns = ("inc.", "seq", "device", "host", "NVMe", "never on a device", "shared")
    deployments = Table(_names("deployment"), *columns, box=None)
    for deployment in report.deployments:
        deployments.add_row(
            str(deployment.deployment),
            str(deployment.incarnation),
            str(deployment.applied),
            _on_device(deployment),
            _size(deployment.host_bytes),
            _size(deployment.nvme_bytes),
            _size(deployment.host_only_bytes),
            _size(deployment.shared_bytes),
        )
    versions = Table(_names("weights version"), "host", "NVMe", "in use", box=None)
    for version in report.version_states:
        versions.add_row(
            str(version.version),
            _size(version.num_bytes * version.in_host),
            _size(version.num_bytes * version.on_nvme),
            str(version.num_users),
        )
    shared_copies = Table(_names("shared copy"), "bytes", "in", _names("held for"), box=None)
    for copy in report.shared_copies:
        shared_copies.add_row(
            _copy_name(copy),
            _size(copy.num_bytes),
            "NVMe" if copy.on_nvme else "host",
            ", ".join(_users(copy)),
        )
    return [table for table in (deployments, versions, shared_copies) if table.row_count]


def _names(header: str) -> Column:
    """Return a column that folds long names. Cutting could make two names look equal."""
    return Column(header, overflow="fold")


def _copy_name(copy: SharedCopyState) -> str:
    """Name a shared copy by its weights version, its base model, or the beginning of its hash."""
    if copy.version is not None:
        return str(copy.version)
    short_hash = copy.hash[:_HASH_CHARS] or "not hashed"
    return f"{copy.base} ({short_hash})" if copy.base else short_hash


def _users(copy: SharedCopyState) -> list[str]:
    """List each user of a shared copy once, with its number of ranks if it has several."""
    return [
        user if number == 1 else f"{user} ×{number}" for user, number in Counter(copy.users).items()
    ]


def _on_device(deployment: DeploymentState) -> str:
    """Format the bytes of a deployment on devices: its state, plus its scratch memory if it has
    any."""
    scratch = f" + {_size(deployment.scratch_bytes)}" if deployment.scratch_bytes else ""
    return _size(deployment.device_bytes) + scratch


def _usage(used: int, budget: int) -> str:
    return f"{_size(used)} of {_size(budget)}"


def _size(num_bytes: int) -> str:
    if not num_bytes:
        return _NOTHING
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"
