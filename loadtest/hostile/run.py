"""What one tenant, or a fault of a process, can do to another tenant at work.

*Floods*: one tenant sends all that it may, another works at 20 operations a second. Rounds of all
floods alternate with rest. Each flood is sent twice, the second time once the operations of the
first have ended, which shows whether memory grows with repetition. *Faults*: a process hangs or
lacks something for some seconds, and a job takes steps meanwhile. Its weights must be those of a
job that nobody disturbed.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
from nats.errors import Error as NatsError

from loadtest.hostile.floods import DEPLOYMENT, FLOODS, Latencies, spec
from loadtest.hostile.web import save_model
from loadtest.processes import descendants, pss_bytes
from loadtest.records import Machine, describe
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.processes import api_key
from phaseloom.cli.supervisor import Mesh
from phaseloom.client import AdamParams, connect
from phaseloom.common.process import config, diewithparent
from phaseloom.common.transport.bus import Bus

FLOODING, VICTIM = "flooding", "victim"
WEB_FLOOD = "long_text"
AIM_P99_S = 0.25
AIM_LONGEST_S = 1.0
AIM_GROWTH = 1.1
MEMORY_CEILING_BYTES = 3 * 2**30
"""Of routers, gateways, scheduler, their worker processes and NATS together, at their highest."""
_QUIET_S = 5.0
_SETTLE_S = 1.0
_SAMPLE_S = 0.1
_SERVICES = ("router", "gateway", "scheduler", "nats")
_STEP_S = 0.05
_FAULT_S = 8.0
_AFTER_S = 6.0
_NO_FILES = 8


class Settings(msgspec.Struct, frozen=True):
    rounds: int = 3
    floods: list[str] = []
    """The floods to send; empty: all."""
    faults: bool = True


class FloodRow(msgspec.Struct, frozen=True):
    """One flood; times and bytes are medians over the rounds."""

    flood: str
    idle_p99_s: float
    p99_s: float
    longest_s: float
    accepted: int
    """Operations that were stored, or calls that were answered as the flood expects."""
    failed: int
    """Operations and calls of the victim that failed, over all rounds."""
    restarts: int
    peak_bytes: int
    growth: float
    """The peak of a flood that follows the same flood, over that one's peak."""

    @property
    def reaches(self) -> bool:
        return (
            self.p99_s <= max(2 * self.idle_p99_s, AIM_P99_S)
            and self.longest_s <= AIM_LONGEST_S
            and not self.failed
            and not self.restarts
            and self.peak_bytes <= MEMORY_CEILING_BYTES
            and self.growth <= AIM_GROWTH
        )


class FaultRow(msgspec.Struct, frozen=True):
    fault: str
    longest_s: float
    """The longest time of one step."""
    recovery_s: float
    """From the end of the shortage until the next step that began after it was done."""
    notices: list[str]
    is_same: bool
    """Whether the weights are those of an undisturbed job of as many steps."""


class HostileReport(msgspec.Struct, frozen=True):
    machine: Machine
    settings: Settings
    floods: list[FloodRow]
    faults: list[FaultRow]

    @property
    def has_failed(self) -> bool:
        return not (
            all(row.reaches for row in self.floods) and all(row.is_same for row in self.faults)
        )


@dataclass(frozen=True, slots=True)
class _Sample:
    idle: Latencies
    latencies: Latencies
    accepted: int
    restarts: int
    peaks: list[int]


async def run(settings: Settings, directory: Path, tell: Callable[[str], None]) -> HostileReport:
    """Measure. Args: directory: an existing one, for the model and the meshes."""
    model = await asyncio.to_thread(save_model, directory / "model")
    names = settings.floods or [*FLOODS, WEB_FLOOD]
    samples: dict[str, list[_Sample]] = {name: [] for name in names}
    for number in range(settings.rounds):
        for name in names:
            # A mesh of its own: what an earlier flood left must not count.
            async with _mesh(directory / f"{name}-{number}", model) as mesh:
                sample = await _measure_flood(mesh, name)
            samples[name].append(sample)
            tell(
                f"{name}: p99 {1e3 * sample.latencies.p99_s:.0f} ms, longest "
                f"{1e3 * sample.latencies.longest_s:.0f} ms, idle p99 "
                f"{1e3 * sample.idle.p99_s:.0f} ms, {sample.accepted} accepted"
            )
    faults = []
    for name, fault in _FAULTS.items() if settings.faults else ():
        async with _mesh(directory / f"fault-{name.replace(' ', '-')}", model) as mesh:
            faults.append(await _measure_fault(mesh, name, fault))
        tell(f"{name}: {faults[-1]}")
    return HostileReport(
        describe(), settings, [_row(name, rows) for name, rows in samples.items()], faults
    )


def _row(name: str, samples: list[_Sample]) -> FloodRow:
    return FloodRow(
        name,
        median(sample.idle.p99_s for sample in samples),
        median(sample.latencies.p99_s for sample in samples),
        median(sample.latencies.longest_s for sample in samples),
        int(median(sample.accepted for sample in samples)),
        sum(sample.latencies.num_failed for sample in samples),
        sum(sample.restarts for sample in samples),
        int(median(max(sample.peaks) for sample in samples)),
        median(sample.peaks[1] / sample.peaks[0] for sample in samples),
    )


@asynccontextmanager
async def _mesh(directory: Path, model: Path) -> AsyncIterator[Mesh]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    nodes = [
        NodeConfig("train-0", "train", [16 * 2**20, 16 * 2**20]),
        NodeConfig("rollout-0", "rollout", [16 * 2**20]),
    ]
    settings = MeshConfig(
        nodes=nodes,
        tenants=[FLOODING, VICTIM],
        models={"tiny": str(model)},
        gateway_port=port,
        gateways=2,
    )
    async with Mesh(settings, directory) as mesh:
        await mesh.ready()
        for tenant in (FLOODING, VICTIM):
            async with connect(mesh.url, tenant, mesh.credentials.tenants[tenant]) as connection:
                job = await connection.submit_job(tenant, [spec("train")])
                await job.deployment(DEPLOYMENT).optim_step(AdamParams(1e-3))
        yield mesh


async def _measure_flood(mesh: Mesh, name: str) -> _Sample:
    if name == WEB_FLOOD:  # the first requests wait for the model's tokenizer and its sampler
        await _work(mesh, name, lambda: asyncio.sleep(_SETTLE_S, 0))
    idle, _ = await _work(mesh, name, lambda: asyncio.sleep(_QUIET_S, 0))
    peaks: list[int] = []
    accepted = 0

    async def flood() -> int:
        nonlocal accepted
        for _ in range(2):
            pids = [pid for service in _SERVICES for pid in mesh.pids(service)]
            peak = asyncio.create_task(_peak_bytes(pids))
            async with _tenant(*_flood_arguments(mesh, name)) as process:
                accepted += int(await _answer(process, "go\n"))
            await asyncio.sleep(_SETTLE_S)
            peak.cancel()
            peaks.append(await peak)
        return accepted

    latencies, _ = await _work(mesh, name, flood)
    notices = await _notices(mesh)
    restarts = sum(notice.startswith("restarted") for notice in notices)
    return _Sample(idle, latencies, accepted, restarts, peaks)


def _flood_arguments(mesh: Mesh, name: str) -> list[str]:
    password = mesh.credentials.tenants[FLOODING]
    if name == WEB_FLOOD:
        return ["web-flood", _gateway(mesh), api_key(password), "tiny"]
    return ["flood", name, mesh.url, FLOODING, password, FLOODING]


def _gateway(mesh: Mesh) -> str:
    return f"http://127.0.0.1:{mesh.config.gateway_port}"


async def _work(
    mesh: Mesh, name: str, meanwhile: Callable[[], Awaitable[int]]
) -> tuple[Latencies, int]:
    """Have the victim work while something else happens. Returns: its times, and the result."""
    password = mesh.credentials.tenants[VICTIM]
    arguments = ["victim", mesh.url, VICTIM, password, VICTIM]
    if name == WEB_FLOOD:
        arguments = ["web-victim", _gateway(mesh), api_key(password), "tiny"]
    async with _tenant(*arguments) as process:
        await asyncio.sleep(_SETTLE_S)
        result = await meanwhile()
        answer = await _answer(process, "")
    return msgspec.json.decode(answer, type=Latencies), result


@asynccontextmanager
async def _tenant(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A tenant's process that is ready."""
    process = await asyncio.create_subprocess_exec(
        *diewithparent.launcher([sys.executable, "-m", "loadtest.hostile.side", *arguments]),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**config.inherited()},
        limit=2**24,
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n", arguments[0]
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _answer(process: asyncio.subprocess.Process, line: str) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line.encode())
    process.stdin.close()
    return await process.stdout.readline()


async def _peak_bytes(pids: list[int]) -> int:
    """Return the highest memory of these processes and their children together, until
    cancelled."""
    peak = 0
    with suppress(asyncio.CancelledError):
        while True:
            # Their worker processes come and go.
            processes = [*pids, *descendants(pids)]
            peak = max(peak, await asyncio.to_thread(sum, map(pss_bytes, processes)))
            await asyncio.sleep(_SAMPLE_S)
    return peak


async def _notices(mesh: Mesh) -> list[str]:
    """Return the supervisor's notices so far."""
    bus = await Bus.open(mesh.credentials.bus, "hostile")
    try:
        newest = await bus.newest_notices(200)
    finally:
        await bus.close()
    return [f"{n.what} {n.subject}" for n in newest if n.source == "supervisor"]


# --- faults ---------------------------------------------------------------------------------------


async def _router_hangs(mesh: Mesh) -> None:
    pids = mesh.pids("router-0")
    mesh.kill("router-0", signal.SIGSTOP)
    await asyncio.sleep(_FAULT_S)
    for pid in pids:
        with suppress(ProcessLookupError):  # it was replaced
            os.kill(pid, signal.SIGCONT)


async def _server_lacks_files(mesh: Mesh) -> None:
    """Until it is restarted, the server can open no file, as a stream needs the next one."""
    (pid,) = mesh.pids("nats")
    bus = await Bus.open(mesh.credentials.bus, "hostile")
    await bus.js.add_stream(name="FILLER", subjects=["filler"])
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (_NO_FILES, _NO_FILES))
    try:
        while mesh.pids("nats") == [pid]:
            with suppress(NatsError, TimeoutError):
                await bus.js.publish("filler", bytes(2**20), timeout=0.2)
    finally:
        await bus.close()


async def _logs_are_removed(mesh: Mesh) -> None:
    """The supervisor has to make the directory again to start the router."""
    for path in (mesh.run_dir / "logs").iterdir():
        path.unlink()
    (mesh.run_dir / "logs").rmdir()
    mesh.kill("router-0")


async def _agent_lacks_files(mesh: Mesh) -> None:
    (pid,) = mesh.pids("worker-train-0")
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (_NO_FILES, limits[1]))
    mesh.kill("statemgr-train-0")
    await asyncio.sleep(_FAULT_S)
    with suppress(ProcessLookupError):  # the supervisor has started another
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


async def _supervisor_lacks_files(mesh: Mesh) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_NO_FILES, hard))
    try:
        mesh.kill("statemgr-train-0")
        await asyncio.sleep(_FAULT_S)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


_FAULTS: dict[str, Callable[[Mesh], Awaitable[None]]] = {
    "a router hangs for 8 s": _router_hangs,
    "NATS lacks files": _server_lacks_files,
    "logs are removed": _logs_are_removed,
    "an agent lacks files for 8 s": _agent_lacks_files,
    "the supervisor lacks files for 8 s": _supervisor_lacks_files,
}


async def _measure_fault(
    mesh: Mesh, name: str, fault: Callable[[Mesh], Awaitable[None]]
) -> FaultRow:
    longest_s, done = 0.0, asyncio.Event()
    began: list[tuple[float, float]] = []
    async with connect(mesh.url, VICTIM, mesh.credentials.tenants[VICTIM]) as connection:
        job = await connection.attach(VICTIM)
        policy = job.deployment(DEPLOYMENT)

        async def step() -> None:
            start_s = time.monotonic()
            await policy.optim_step(AdamParams(1e-3))
            began.append((start_s, time.monotonic()))

        async def work() -> None:
            async with asyncio.TaskGroup() as steps:
                while not done.is_set():
                    steps.create_task(step())
                    await asyncio.sleep(_STEP_S)

        working = asyncio.create_task(work())
        await asyncio.sleep(_SETTLE_S)
        await fault(mesh)
        over_s = time.monotonic()
        await asyncio.sleep(_AFTER_S)
        done.set()
        await working
        longest_s = max(end_s - start_s for start_s, end_s in began)
        recovery_s = min(end_s for start_s, end_s in began if start_s >= over_s) - over_s
        weights = (await policy.save_state("end")).weights_sha256
        undisturbed = await connection.submit_job("undisturbed", [spec("train")])
        other = undisturbed.deployment(DEPLOYMENT)
        for _ in range(len(began) + 1):
            last = other.optim_step(AdamParams(1e-3))
        await last
        expected = (await other.save_state("end")).weights_sha256
    return FaultRow(name, longest_s, recovery_s, await _notices(mesh), weights == expected)
