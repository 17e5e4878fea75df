"""Three NATS servers beside one: what they cost, and how long a job stands still at each fault.

The cost is measured as `roundtrip` does, with both meshes up and measured in turns. For the faults
a job has one operation in flight at any time; a stall is the longest time between the ends of two
operations that follow one another, from the fault on until the servers are whole again.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import msgspec
from nats.errors import Error as NatsError
from nats.errors import TimeoutError as NatsTimeoutError

from loadtest.cuttingoff import EnsembleBehindProxies
from loadtest.rawchain import TENANT
from loadtest.records import Machine, Record, describe, quantile
from loadtest.roundtrip import WARM_UP, Call, Turn, call_of, turn
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.supervisor import Mesh
from phaseloom.client import Deployment, connect
from phaseloom.common.contract.specs import DeploymentSpec, ModelSpec
from phaseloom.common.contract.streams import DONE, PERMITS, SCHED, Bucket, ops_stream
from phaseloom.common.process import config, lifecycle
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.leases import scheduler_lease_key
from phaseloom.common.transport.natsserver import MEMBERS

IN_FLIGHT = (1, 256)
_POOL = "bench"
_DEVICE_BYTES = 2**20
_CUT_OFF_S = 12.0
_SETTLE_S = 5.0
_LOOK_EVERY_S = 0.05
_STREAMS = (SCHED, PERMITS, DONE, ops_stream(TENANT), f"KV_{Bucket.LEASES}")
"""The streams that an operation, or who may work on it, needs."""


class Settings(msgspec.Struct, frozen=True):
    rounds: int = 10
    operations: int = 1000
    """Operations of each side with one in flight, over all rounds."""
    faults: int = 5
    """How often each fault happens."""


class Stall(msgspec.Struct, frozen=True):
    fault: str
    times_s: list[float]
    aim: str = ""

    @property
    def median_s(self) -> float:
        return median(self.times_s)


class ServersReport(msgspec.Struct, frozen=True):
    machine: Machine
    settings: Settings
    figures: list[Record]
    stalls: list[Stall]


@dataclass(slots=True)
class _Job:
    """A mesh with a job on it, on the backend `noop`."""

    mesh: Mesh
    bus: Bus
    policy: Deployment
    ends_s: list[float] = field(default_factory=list)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def keep_calling(self) -> None:
        call = call_of(self.policy, 1)
        while True:
            await call()
            self.ends_s.append(time.monotonic())
            self._ended.set()

    async def stall(self, fault: Callable[[_Job], Awaitable[None]]) -> float:
        """Have a fault happen. Returns: how long the job stood still, seconds."""
        began_s = time.monotonic()
        await fault(self)
        await self.whole()
        await asyncio.sleep(_SETTLE_S)
        self._ended.clear()
        await self._ended.wait()
        before = [s for s in self.ends_s if s <= began_s][-1:] or [began_s]
        ends_s = [*before, *(s for s in self.ends_s if s > began_s)]
        return max(later - earlier for earlier, later in itertools.pairwise(ends_s))

    async def whole(self) -> None:
        """Until every server has all of each stream."""
        while True:
            if all([await self._is_whole(stream) for stream in _STREAMS]):
                return
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _is_whole(self, stream: str) -> bool:
        with suppress(NatsError, NatsTimeoutError):
            cluster = (await self.bus.js.stream_info(stream)).cluster
            peers = (cluster.replicas if cluster is not None else None) or []
            wanted = self.mesh.config.nats_servers - 1
            return len(peers) == wanted and all(p.current and not p.offline for p in peers)
        return False

    async def leader(self, stream: str) -> str:
        cluster = (await self.bus.js.stream_info(stream)).cluster
        assert cluster is not None
        return cluster.leader or MEMBERS[0]


async def _kill_log_leader(job: _Job) -> None:
    job.mesh.kill(await job.leader(SCHED))


async def _kill_follower(job: _Job) -> None:
    """A server that leads none of the streams that an operation needs, where there is one."""
    leaders = {await job.leader(stream) for stream in _STREAMS}
    last = await job.leader(SCHED)
    job.mesh.kill(
        next((n for n in MEMBERS if n not in leaders), next(n for n in MEMBERS if n != last))
    )


async def _freeze_log_leader(job: _Job) -> None:
    name = await job.leader(SCHED)
    job.mesh.kill(name, signal.SIGSTOP)
    await asyncio.sleep(_CUT_OFF_S)
    job.mesh.kill(name, signal.SIGCONT)


async def _cut_off_log_leader(job: _Job) -> None:
    servers = job.mesh.servers
    assert isinstance(servers, EnsembleBehindProxies)
    name = await job.leader(SCHED)
    servers.cut_off(name)
    await asyncio.sleep(_CUT_OFF_S)
    servers.bring_back(name)


async def _restart_in_turn(job: _Job) -> None:
    for name in MEMBERS:
        (before,) = job.mesh.pids(name)
        job.mesh.kill(name, signal.SIGTERM)
        await _again(job.mesh, name, before)
        await job.whole()


async def _again(mesh: Mesh, name: str, before: int) -> None:
    """Until a server has a process that is not this one."""
    while True:
        if mesh.pids(name) not in ([], [before]):
            return
        await asyncio.sleep(_LOOK_EVERY_S)


async def _kill_only_server(job: _Job) -> None:
    job.mesh.kill("nats")


async def _kill_scheduler(job: _Job) -> None:
    stored = await job.bus.keys.get(Bucket.LEASES, scheduler_lease_key())
    assert stored is not None
    os.kill(int(stored.payload.decode().rpartition(" ")[2]), signal.SIGKILL)


_FAULTS = {
    "`kill -9` of the server that leads the log": (_kill_log_leader, ""),
    "`kill -9` of another server": (_kill_follower, ""),
    "the log's leader stands still for 12 s": (_freeze_log_leader, ""),
    "all servers restarted in turn": (_restart_in_turn, ""),
    "`kill -9` of the leading scheduler, with a standby": (_kill_scheduler, "≤ 4 s"),
}


async def run(settings: Settings, directory: Path, told: Callable[[str], None]) -> ServersReport:
    """Measure the cost, then the stalls.

    Args: directory: an existing directory for the meshes' stores and logs.
          told: called with a line about each thing that happens.
    """
    config.set_for_children("PHASELOOM_TELEMETRY_SAMPLE_RATIO", "0")
    figures = await _cost(settings, directory)
    stalls = []
    async with _mesh(directory / "faults", 3) as job:
        for name, (fault, aim) in _FAULTS.items():
            times_s = await _stalls(job, name, fault, settings.faults, told)
            stalls.append(Stall(name, times_s, aim))
    async with _mesh(directory / "cut-off", 3, behind_proxies=True) as job:
        name = "the log's leader is cut off for 12 s"
        times_s = await _stalls(job, name, _cut_off_log_leader, settings.faults, told)
        stalls.append(Stall(name, times_s))
    async with _mesh(directory / "alone", 1) as job:
        name = "one server alone: `kill -9` of it"
        times_s = await _stalls(job, name, _kill_only_server, settings.faults, told)
        stalls.append(Stall(name, times_s))
    return ServersReport(describe(), settings, figures, stalls)


async def _stalls(
    job: _Job,
    name: str,
    fault: Callable[[_Job], Awaitable[None]],
    count: int,
    told: Callable[[str], None],
) -> list[float]:
    times_s = []
    calling = asyncio.create_task(job.keep_calling())
    try:
        for _ in range(count):
            times_s.append(round(await job.stall(fault), 2))
            told(f"{name}: {times_s[-1]} s")
    finally:
        await lifecycle.end([calling])
    return times_s


async def _cost(settings: Settings, directory: Path) -> list[Record]:
    figures = []
    per_round = max(1, settings.operations // settings.rounds)
    async with AsyncExitStack() as stack:
        jobs = {
            count: await stack.enter_async_context(_mesh(directory / f"servers-{count}", count))
            for count in (1, 3)
        }
        for in_flight in IN_FLIGHT:
            calls: dict[int, Call] = {n: call_of(j.policy, in_flight) for n, j in jobs.items()}
            for call in calls.values():
                await turn(call, in_flight, max(WARM_UP, 2 * in_flight))
            rounds: list[dict[int, Turn]] = []
            for number in range(settings.rounds):
                order = (1, 3) if number % 2 else (3, 1)
                count = max(per_round, 4 * in_flight)
                rounds.append({side: await turn(calls[side], in_flight, count) for side in order})
            figures += _compared(in_flight, rounds)
    return figures


def _compared(in_flight: int, rounds: list[dict[int, Turn]]) -> list[Record]:
    pairs: dict[str, tuple[str, Callable[[Turn], float]]] = {
        f"round_trip_p50_{in_flight}_in_flight": ("ms", lambda t: 1e3 * quantile(t.times_s, 0.5)),
        f"round_trip_p99_{in_flight}_in_flight": ("ms", lambda t: 1e3 * quantile(t.times_s, 0.99)),
        f"throughput_{in_flight}_in_flight": ("operations/s", lambda t: t.rate),
    }
    return [
        Record(
            name=name,
            value=round(median(of(each[3]) for each in rounds), 3),
            unit=unit,
            limit="one server",
            limit_value=round(median(of(each[1]) for each in rounds), 3),
            ratio=round(median(of(each[3]) / of(each[1]) for each in rounds), 3),
        )
        for name, (unit, of) in pairs.items()
    ]


@asynccontextmanager
async def _mesh(
    directory: Path, nats_servers: int, *, behind_proxies: bool = False
) -> AsyncIterator[_Job]:
    mesh_config = MeshConfig(
        nodes=[NodeConfig("bench-0", _POOL, [_DEVICE_BYTES])],
        tenants=[TENANT],
        schedulers=2,
        nats_servers=nats_servers,
    )
    servers = None
    if behind_proxies:
        file = directory / "credentials.json"
        servers = EnsembleBehindProxies(directory / "nats", [TENANT], credentials_file=file)
    async with Mesh(mesh_config, directory, servers=servers) as mesh:
        await mesh.ready(120)
        bus = await Bus.open(mesh.credentials.bus, "servers")
        password = mesh.credentials.tenants[TENANT]
        async with connect(mesh.url, TENANT, password) as controller:
            spec = DeploymentSpec("policy", _POOL, "noop", ModelSpec({}))
            job = await controller.submit_job("bench", [spec])
            yield _Job(mesh, bus, job.deployment("policy"))
            await job.finish()
        await bus.close()
