"""`phaseloom top` shows the state of the mesh as a live table.

It only reads: the decision log, the jobs' views in KV, and the notices. Rates and shares cover the
operations and switches that ended in the last `WINDOW_S` seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import uvloop
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from phaseloom.cli.output import print_whole
from phaseloom.cli.rundir import bus_config, open_bus
from phaseloom.common.contract.api import DeploymentStatus, JobStatus
from phaseloom.common.contract.codec import decode
from phaseloom.common.contract.events import NodeLost, NodeUp, Notice
from phaseloom.common.contract.ids import JobKey
from phaseloom.common.contract.operations import Outcome
from phaseloom.common.contract.streams import Bucket
from phaseloom.common.observability.activity import Activity, Execution, Switch
from phaseloom.common.process import lifecycle
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.connection import BusConfig
from phaseloom.common.transport.decisionlog import LogEntry

WINDOW_S = 30.0
NUM_NOTICES = 8
_REFRESHES_PER_S = 2


def top(*, run: Path | None = None, once: bool = False, console: Console | None = None) -> None:
    """Watch the mesh: jobs, devices, queues, switches, notices. Press Ctrl-C to end.

    Parameters
    ----------
    run
        Run directory, or its name under runs/. Default: the mesh that PHASELOOM_BUS_URL, _USER and
        _PASSWORD name if they are set, otherwise the newest run under runs/.
    once
        Print the table once and exit. In a file or a pipe it has its full width.
    """
    with suppress(KeyboardInterrupt):
        uvloop.run(_top(bus_config(run), once, console or Console()))


async def _top(settings: BusConfig, once: bool, console: Console) -> None:
    dashboard = Dashboard()
    async with open_bus(settings, "top") as bus:
        if once:
            await catch_up(bus, dashboard)
            show(dashboard, time.time(), console)
        else:
            await _watch(bus, dashboard, console)


def show(dashboard: Dashboard, now_s: float, console: Console) -> None:
    """Print the dashboard once. In a file or a pipe it has its full width."""
    print_whole(console, dashboard.render(now_s))


async def catch_up(bus: Bus, dashboard: Dashboard) -> None:
    """Pass everything that is on the bus now to the dashboard."""
    end = await bus.log.end()
    if end:
        async with aclosing(bus.log.read_entries()) as entries:
            async for entry in entries:
                for part in entry.split():
                    dashboard.accept(part)
                if entry.sequence >= end:
                    break
    for key in await bus.keys.names(Bucket.VIEW):
        stored = await bus.keys.get(Bucket.VIEW, key)
        dashboard.view(key, stored.payload if stored else None)
    for notice in await bus.newest_notices(NUM_NOTICES):
        dashboard.notice(notice)


async def _watch(bus: Bus, dashboard: Dashboard, console: Console) -> None:
    with Live(
        get_renderable=lambda: dashboard.render(time.time()),
        console=console,
        refresh_per_second=_REFRESHES_PER_S,
        screen=console.is_terminal,
    ):
        async with asyncio.TaskGroup() as tasks:
            watching = [
                tasks.create_task(_follow_log(bus, dashboard)),
                tasks.create_task(_follow_views(bus, dashboard)),
                tasks.create_task(_follow_notices(bus, dashboard)),
            ]
            try:
                await asyncio.Event().wait()
            finally:
                await lifecycle.end(watching)


async def _follow_log(bus: Bus, dashboard: Dashboard) -> None:
    async with aclosing(bus.log.read()) as entries:
        async for entry in entries:
            dashboard.accept(entry)


async def _follow_views(bus: Bus, dashboard: Dashboard) -> None:
    async for change in bus.keys.watch(Bucket.VIEW):
        dashboard.view(change.key, change.stored.payload if change.stored else None)


async def _follow_notices(bus: Bus, dashboard: Dashboard) -> None:
    async with aclosing(bus.read_notices(NUM_NOTICES)) as notices:
        async for notice in notices:
            dashboard.notice(notice)


@dataclass(slots=True)
class Dashboard:
    """The current state of the mesh, and its display as tables."""

    _activity: Activity = field(default_factory=Activity)
    _executions: deque[Execution] = field(default_factory=deque)
    _switches: deque[Switch] = field(default_factory=deque)
    _devices: dict[str, int] = field(default_factory=dict)
    """Node that is up → its number of devices."""
    _views: dict[JobKey, JobStatus] = field(default_factory=dict)
    _notices: deque[Notice] = field(default_factory=lambda: deque(maxlen=NUM_NOTICES))
    _num_operations: int = 0

    def accept(self, entry: LogEntry) -> None:
        """Process the next entry of the decision log."""
        match entry.event:
            case NodeUp(node=node, devices=devices):
                self._devices[node] = len(devices)
            case NodeLost(node=node):
                self._devices.pop(node, None)
        for observation in self._activity.step(entry.time_s, entry.event):
            if isinstance(observation, Switch):
                self._switches.append(observation)
            elif not observation.is_replay:
                self._executions.append(observation)
                self._num_operations += 1
        self._forget(entry.time_s)

    def view(self, key: str, payload: bytes | None) -> None:
        """Store the changed view of a job, or remove the view if the payload is None."""
        tenant, _, name = key.partition(".")
        if payload is None:
            self._views.pop(JobKey(tenant, name), None)
        else:
            self._views[JobKey(tenant, name)] = decode(payload, JobStatus)

    def notice(self, notice: Notice) -> None:
        self._notices.append(notice)

    def render(self, now_s: float) -> Group:
        """Return the dashboard's tables for the given time."""
        self._forget(now_s)
        return Group(
            Text(self._heading(), "bold"),
            self._jobs(),
            Text(""),
            self._nodes(now_s),
            Text(""),
            self._newest_notices(),
        )

    def _forget(self, now_s: float) -> None:
        while self._executions and self._executions[0].end_s < now_s - WINDOW_S:
            self._executions.popleft()
        while self._switches and self._switches[0].end_s < now_s - WINDOW_S:
            self._switches.popleft()

    def _heading(self) -> str:
        num_jobs = sum(not status.has_ended for status in self._views.values())
        num_open = sum(n for job, n in self._activity.depth().items() if not self._has_ended(job))
        return (
            f"jobs: {num_jobs}, operations: {num_open} open, {self._num_operations} done; "
            f"rates over the last {WINDOW_S:.0f} s"
        )

    def _jobs(self) -> Table:
        table = _table("job", "state", "deployments")
        for column in ("queue", "ops/s", "wait p50 ms", "run p50 ms", "failed"):
            table.add_column(column, justify="right", no_wrap=True)
        depths = self._activity.depth()
        for job, status in sorted(self._views.items()):
            ran = [e for e in self._executions if e.key.job_key == job]
            if status.has_ended and not ran:
                continue
            table.add_row(
                str(job),
                status.state,
                ", ".join(_deployment_text(d) for d in status.deployments),
                str(0 if status.has_ended else depths.get(job, 0)),
                f"{len(ran) / WINDOW_S:.1f}",
                _median_ms(e.waited_s for e in ran),
                _median_ms(e.end_s - e.start_s for e in ran),
                str(sum(e.outcome is not Outcome.COMPLETED for e in ran)),
            )
        return table

    def _nodes(self, now_s: float) -> Table:
        table = _table("node", "pool", "holder")
        for column in ("busy", "waiting", "switches/s", "switch p50 ms", "hidden"):
            table.add_column(column, justify="right", no_wrap=True)
        waiting = self._activity.waiting(now_s)
        for node, num_devices in sorted(self._devices.items()):
            switches = [s for s in self._switches if s.node == node]
            switched_s = sum(s.duration_s for s in switches)
            hidden_s = sum(s.hidden_s for s in switches)
            holder = self._activity.holders.get(node)
            if holder is not None and self._has_ended(holder.job_key):
                holder = None
            table.add_row(
                node,
                self._activity.pools.get(node, ""),
                str(holder) if holder else "-",
                f"{self._busy_s(node, now_s) / (WINDOW_S * num_devices):.0%}",
                str(waiting[node]),
                f"{len(switches) / WINDOW_S:.1f}",
                _median_ms(s.duration_s for s in switches),
                f"{hidden_s / switched_s:.0%}" if switched_s else "-",
            )
        return table

    def _has_ended(self, job: JobKey) -> bool:
        """Whether a job has ended. The log does not say so of a job that failed or was drained."""
        status = self._views.get(job)
        return status is not None and status.has_ended

    def _busy_s(self, node: str, now_s: float) -> float:
        """Return the device seconds within the window in which the node ran operations."""
        return sum(
            min(seconds, execution.end_s - (now_s - WINDOW_S))
            for execution in self._executions
            for (name, _), seconds in execution.busy_s.items()
            if name == node
        )

    def _newest_notices(self) -> Table:
        table = _table("notice from", "kind", "about", "reason")
        for notice in reversed(self._notices):
            table.add_row(notice.source, notice.what, notice.subject, notice.reason)
        return table


def _deployment_text(deployment: DeploymentStatus) -> str:
    text = f"{deployment.name} {deployment.state} {deployment.node}".strip()
    return f"{text} (moves {deployment.moving})" if deployment.moving else text


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, min_width=10, overflow="fold")
    return table


def _median_ms(seconds: Iterable[float]) -> str:
    values = list(seconds)
    return f"{1e3 * median(values):.1f}" if values else "-"
