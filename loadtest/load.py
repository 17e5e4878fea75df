"""Load: many jobs at once on a whole mesh whose workers do nothing, watched from outside.

Each job has a device of its own, so that the mesh is measured and not the waiting for a device.
The memory of every service, the lag of every stream's consumers and restarts are sampled all along.
The raw chain runs just before and just after, and shows what the machine gives on that day.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
from msgspec.structs import replace

from loadtest.driver import Driver, DriverLine
from loadtest.processes import idle_s
from loadtest.rawchain import raw_chain
from loadtest.records import Machine, describe, quantile
from loadtest.roundtrip import payload, turn
from loadtest.watching import Sample, Watch, processor_s, services, step_seconds
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.supervisor import Mesh
from phaseloom.client import connect
from phaseloom.common.process import config
from phaseloom.common.transport.bus import Bus

TENANT = "load"
CLIENTS = "clients"
"""The name of the group of the controllers' processes."""
CHAIN_OPERATIONS = 5000
_NODE_BYTES = 2**20
_LINE_LIMIT_BYTES = 2**26
_READY_TIMEOUT_S = 600.0


class Settings(msgspec.Struct, frozen=True):
    """The size of one load test."""

    jobs: int = 100
    operations: int = 1000
    """The number of operations of each job."""
    in_flight: int = 1
    """The number of operations of each job under way at once."""
    nodes: int = 4
    """The number of nodes that the jobs are spread over, each on a device of its own."""
    clients: int = 2
    """The number of processes that the jobs' controllers run in."""
    routers: int = 2


class LoadReport(msgspec.Struct, frozen=True):
    machine: Machine
    settings: Settings
    operations: int
    wall_s: float
    throughput: float
    """The throughput in operations a second."""
    p50_ms: float
    p99_ms: float
    step_p50_s: float
    """The median time of the scheduler's decision on an event, as the upper bound of a bucket."""
    step_p99_s: float
    restarts: list[str]
    """Services that were started again."""
    lost_wpgs: list[str]
    """Jobs whose deployment is not in its first incarnation."""
    growth_bytes: dict[str, int]
    """For each service, the median memory in the last quarter less that in the second."""
    max_lag: dict[str, int]
    """The largest lag of each stream, in messages."""
    progress: list[tuple[float, int]]
    """The operations done over time, as (seconds, operations)."""
    samples: list[Sample]
    processor_ms: dict[str, float] = {}
    """For each service, the processor time of its processes for one operation."""
    idle_share: float = 0.0
    """The idle share of the time of all cores. Time that others on the machine took is not idle."""
    chain_throughput: list[float] = []
    """The operations a second of the raw chain with as many in flight, just before and after."""


@dataclass(slots=True)
class _Client:
    """A client process, and how far it is."""

    process: asyncio.subprocess.Process
    done: int = 0

    async def next(self) -> DriverLine:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a client ended with {await self.process.wait()}")
        return msgspec.json.decode(line, type=DriverLine)

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")


async def run(settings: Settings, directory: Path) -> LoadReport:
    """Run a load test; raises where an operation fails or a client ends.

    Args: directory: an existing directory for the mesh's store and logs.
    """
    config.set_for_children("PHASELOOM_TELEMETRY_SAMPLE_RATIO", "0")
    per_node = -(-settings.jobs // settings.nodes)
    nodes = [
        NodeConfig(f"load-{n}", f"pool-{n}", [_NODE_BYTES] * per_node)
        for n in range(settings.nodes)
    ]
    mesh_config = MeshConfig(
        nodes=nodes,
        tenants=[TENANT],
        routers=settings.routers,
        metrics=True,
        tenant_limits={TENANT: dict.fromkeys(("max_jobs", "max_deployments", "max_ranks"), 0)},
    )
    before = await _chain_rate(settings, directory / "before")
    async with Mesh(mesh_config, directory) as mesh:
        await mesh.ready(_READY_TIMEOUT_S)
        async with _clients(settings, mesh) as clients:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                for client in clients:
                    await client.next()
            report = await _drive(settings, mesh, clients)
    after = await _chain_rate(settings, directory / "after")
    return replace(report, chain_throughput=[before, after])


async def _chain_rate(settings: Settings, directory: Path) -> float:
    in_flight = settings.jobs * settings.in_flight
    async with raw_chain(directory, payload()) as chain:
        await turn(chain.call, in_flight, 2 * in_flight)
        return round((await turn(chain.call, in_flight, CHAIN_OPERATIONS)).rate, 1)


async def _drive(settings: Settings, mesh: Mesh, clients: list[_Client]) -> LoadReport:
    bus = await Bus.open(mesh.credentials.bus, "load")
    watch = Watch(mesh, bus, TENANT)
    loop = asyncio.get_running_loop()
    progress: list[tuple[float, int]] = []
    groups = {**services(mesh), CLIENTS: [client.process.pid for client in clients]}
    processor_before_s, idle_before_s = processor_s(groups), idle_s()
    started_s = loop.time()

    async def follow(client: _Client) -> list[float]:
        client.go()
        while (said := await client.next()).event != "done":
            client.done = said.done
            progress.append((round(loop.time() - started_s, 2), sum(c.done for c in clients)))
        client.done = said.done
        return said.times_s

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch.run())
        async with asyncio.TaskGroup() as following:
            tasks = [following.create_task(follow(client)) for client in clients]
        wall_s = loop.time() - started_s
        taken_s, idle_time_s = processor_s(groups), idle_s() - idle_before_s
        watching.cancel()
    times_s = sorted(itertools.chain.from_iterable(task.result() for task in tasks))
    step_p50_s, step_p99_s = await step_seconds(mesh, 0.5, 0.99)
    lost = await _lost_wpgs(settings, mesh)
    for client in clients:
        client.go()
    for client in clients:
        await client.process.wait()
    await bus.close()
    return LoadReport(
        machine=describe(),
        settings=settings,
        operations=len(times_s),
        wall_s=round(wall_s, 2),
        throughput=round(len(times_s) / wall_s, 1),
        p50_ms=round(1e3 * quantile(times_s, 0.5), 2),
        p99_ms=round(1e3 * quantile(times_s, 0.99), 2),
        step_p50_s=step_p50_s,
        step_p99_s=step_p99_s,
        restarts=watch.restarts,
        lost_wpgs=lost,
        growth_bytes=growth(watch.samples),
        max_lag={
            stream: max(sample.lag[stream] for sample in watch.samples)
            for stream in watch.samples[0].lag
        },
        progress=progress,
        samples=watch.samples,
        processor_ms={
            name: round(1e3 * (taken_s[name] - before_s) / len(times_s), 3)
            for name, before_s in processor_before_s.items()
        },
        idle_share=round(idle_time_s / (wall_s * (os.cpu_count() or 1)), 3),
    )


def growth(samples: list[Sample]) -> dict[str, int]:
    """The median memory of the last quarter less that of the second: in the first it fills up."""
    quarter = max(1, len(samples) // 4)
    before, after = samples[quarter : 2 * quarter] or samples, samples[-quarter:]
    return {
        name: round(
            median(s.memory_bytes[name] for s in after)
            - median(s.memory_bytes[name] for s in before)
        )
        for name in samples[-1].memory_bytes
    }


async def _lost_wpgs(settings: Settings, mesh: Mesh) -> list[str]:
    lost = []
    async with connect(mesh.url, TENANT, mesh.credentials.tenants[TENANT]) as controller:
        for name in _jobs(settings):
            status = await controller.status(name)
            lost += [name for deployment in status.deployments if deployment.incarnation != 1]
    return lost


def _jobs(settings: Settings) -> dict[str, str]:
    return {f"job-{n}": f"pool-{n % settings.nodes}" for n in range(settings.jobs)}


@asynccontextmanager
async def _clients(settings: Settings, mesh: Mesh) -> AsyncIterator[list[_Client]]:
    jobs = list(_jobs(settings).items())
    clients: list[_Client] = []
    try:
        for number in range(settings.clients):
            driver = Driver(
                url=mesh.url,
                tenant=TENANT,
                password=mesh.credentials.tenants[TENANT],
                jobs=dict(jobs[number :: settings.clients]),
                operations=settings.operations,
                in_flight=settings.in_flight,
            )
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "loadtest.driver"),
                *(msgspec.json.encode(driver).decode(), str(os.getpid())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LINE_LIMIT_BYTES,
                env=config.inherited(),
            )
            clients.append(_Client(process))
        yield clients
    finally:
        for client in clients:
            if client.process.returncode is None:
                client.process.terminate()
            await client.process.wait()
