"""Chaos: the two example jobs under kill -9 of everything, against an undisturbed run.

One process after another is killed at random moments: ranks, agents, state managers, routers,
schedulers (two run), the profiler, controllers, nats-server. The next kill waits until an operation
of every job was submitted and completed since the last one, so that each recovery is seen whole;
then the jobs run on for a random time. New jobs follow those that end, until there were as many
kills as asked for. All jobs must end with the weights of the undisturbed run, bit for bit.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from statistics import median

import msgspec
from msgspec.structs import replace

from loadtest.processes import children
from loadtest.records import Machine, describe
from phaseloom.cli.meshconfig import MeshConfig
from phaseloom.cli.supervisor import Mesh
from phaseloom.common.contract.events import OperationFinished, QueuedOperation
from phaseloom.common.contract.ids import OperationKey
from phaseloom.common.contract.operations import Outcome
from phaseloom.common.process import config, diewithparent, lifecycle
from phaseloom.common.transport.bus import Bus
from phaseloom.demo.command import TINY_KV_CACHE_BYTES, Program, with_vllm
from phaseloom.demo.controllers import find_example

TENANT = "demo"
TASKS = ("chain_sum", "letter_counting")
_LINE_LIMIT_BYTES = 2**20
_START_AGAIN_S = 0.2
_LOOK_EVERY_S = 0.05


class Victim(StrEnum):
    RANK = "rank"
    AGENT = "agent"
    STATEMGR = "state manager"
    ROUTER = "router"
    SCHEDULER = "scheduler"
    PROFILER = "profiler"
    CONTROLLER = "controller"
    NATS = "nats-server"


_SERVICES = {
    Victim.AGENT: "worker",
    Victim.STATEMGR: "statemgr",
    Victim.ROUTER: "router",
    Victim.SCHEDULER: "scheduler",
    Victim.PROFILER: "profiler",
    Victim.NATS: "nats",
}


class Settings(msgspec.Struct, frozen=True):
    """The jobs of a run, and how they are disturbed."""

    kills: int = 20
    seed: int = 0
    steps: int = 24
    """The steps of each job; with more of them, more kills meet the same job."""
    prompts: int = 24
    warmup_steps: int = 10
    checkpoint_every: int = 2
    max_pause_s: float = 1.5
    """The longest time that jobs run on between a recovery and the next kill; it is random."""
    vllm: str = ""
    """Python of an environment that has vLLM, which rollouts then run on; empty: on `sampler`."""
    megatron: str = ""
    """Python of an environment that has Megatron-core, which trains the policies then, each over
    two tensor by two pipeline parallel ranks; empty: `fsdp` does, on one rank."""
    stuck_s: float = 120.0
    """A job that completes nothing for so long counts as stuck."""


class Kill(msgspec.Struct, frozen=True):
    victim: Victim
    at_s: float
    """Seconds since the run began."""
    recovery_s: float
    """Seconds until an operation of every job had been submitted and completed since the kill."""


class JobEnd(msgspec.Struct, frozen=True):
    job: str
    task: str
    weights_sha256: str
    is_same: bool
    """Whether the weights are those of the undisturbed run."""
    controller_starts: int


class VictimSummary(msgspec.Struct, frozen=True):
    victim: Victim
    kills: int
    recovery_median_s: float
    recovery_max_s: float


class ChaosReport(msgspec.Struct, frozen=True):
    machine: Machine
    settings: Settings
    wall_s: float
    reference: dict[str, str]
    """The SHA-256 of the weights of each task's undisturbed run."""
    jobs: list[JobEnd]
    victims: list[VictimSummary]
    kills: list[Kill]
    stuck: str = ""
    """Why the run was given up; empty: it went to its end."""

    @property
    def has_failed(self) -> bool:
        return bool(self.stuck) or not all(job.is_same for job in self.jobs)


class Stuck(Exception):
    """A job has completed nothing for too long."""


@dataclass
class _Job:
    """One job, and the process that is its controller now."""

    name: str
    task: str
    process: asyncio.subprocess.Process | None = None
    starts: int = 0
    weights_sha256: str = ""
    queued_s: dict[OperationKey, float] = field(default_factory=dict)
    """When each open operation was queued."""
    through_s: float = field(default_factory=time.monotonic)
    """When the newest of the job's completed operations was queued."""
    is_over: bool = False


@dataclass
class _Run:
    """One mesh with its jobs."""

    settings: Settings
    mesh: Mesh
    program: Program
    directory: Path
    jobs: dict[str, _Job] = field(default_factory=dict)

    @property
    def open_jobs(self) -> list[_Job]:
        return [job for job in self.jobs.values() if not job.is_over]

    async def follow(self, bus: Bus) -> None:
        """Follow which operations of the jobs are queued and completed, until cancelled."""
        async with aclosing(bus.log.read()) as entries:
            async for entry in entries:
                match entry.event:
                    case QueuedOperation(key=key) if job := self.jobs.get(key.job):
                        job.queued_s.setdefault(key, time.monotonic())
                    case OperationFinished(key=key, outcome=outcome) if key.job in self.jobs:
                        job = self.jobs[key.job]
                        queued_s = job.queued_s.pop(key, 0.0)
                        if outcome is Outcome.COMPLETED:
                            job.through_s = max(job.through_s, queued_s)

    async def control(self, job: _Job) -> str:
        """Start the job's controller until it ends well; returns the weights."""
        log_file = self.directory / "logs" / f"controller-{job.name}.log"
        with log_file.open("ab") as log:
            while True:
                job.starts += 1
                job.process = await asyncio.create_subprocess_exec(
                    *diewithparent.launcher(self._command(job)),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    env=self._environment(),
                    limit=_LINE_LIMIT_BYTES,
                )
                try:
                    job.weights_sha256 = await _weights(job.process)
                    code = await job.process.wait()
                finally:
                    if job.process.returncode is None:
                        job.process.kill()
                        await job.process.wait()
                if code == 0 and job.weights_sha256:
                    job.is_over = True
                    return job.weights_sha256
                await asyncio.sleep(_START_AGAIN_S)

    def _command(self, job: _Job) -> list[str]:
        settings = self.settings
        options = {
            "--task": job.task,
            "--job": job.name,
            "--steps": settings.steps,
            "--prompts": settings.prompts,
            "--warmup-steps": settings.warmup_steps,
            "--checkpoint-every": settings.checkpoint_every,
        }
        words = [str(word) for option in options.items() for word in option]
        return [sys.executable, "-u", str(self.program.script), *words, *self.program.arguments]

    def _environment(self) -> dict[str, str]:
        return {
            **config.inherited(),
            "PHASELOOM_URL": self.mesh.url,
            "PHASELOOM_TENANT": TENANT,
            "PHASELOOM_PASSWORD": self.mesh.credentials.tenants[TENANT],
            "OMP_NUM_THREADS": "1",
        }

    # --- killing --------------------------------------------------------------------------------

    def candidates(self, victim: Victim) -> list[int]:
        """The processes of this kind, of which one may be killed."""
        match victim:
            case Victim.RANK:
                # An agent's fork server is its child, and the ranks are the fork server's.
                servers = [pid for agent in self.mesh.pids("worker") for pid in children(agent)]
                return [rank for server in servers for rank in children(server)]
            case Victim.CONTROLLER:
                processes = [job.process for job in self.open_jobs]
                return [p.pid for p in processes if p is not None and p.returncode is None]
            case _:
                return self.mesh.pids(_SERVICES[victim])

    async def recovered(self, since_s: float) -> None:
        """Wait until an operation of every open job was submitted and completed since this time.

        Raises: Stuck: that took longer than `stuck_s`.
        """
        while waiting := [job for job in self.open_jobs if job.through_s <= since_s]:
            if time.monotonic() - since_s > self.settings.stuck_s:
                names = ", ".join(job.name for job in waiting)
                raise Stuck(f"{names}: nothing completed for {self.settings.stuck_s:.0f} s")
            await asyncio.sleep(_LOOK_EVERY_S)


async def run(settings: Settings, directory: Path, told: Callable[[str], None]) -> ChaosReport:
    """Run the jobs undisturbed, then under kills.

    Args: directory: an existing directory for the meshes' stores and logs.
          told: called with a line about each thing that happens.
    """
    config.set_for_children("PHASELOOM_TELEMETRY_SAMPLE_RATIO", "0")
    started_s = time.monotonic()
    reference = await _undisturbed(settings, directory / "undisturbed")
    told(f"undisturbed: {reference}")
    kills: list[Kill] = []
    ends: list[JobEnd] = []
    stuck = ""
    try:
        async with _mesh(settings, directory / "disturbed") as running:
            await _disturb(running, reference, kills, ends, told)
    except* Stuck as error:
        stuck = str(_leaf(error))
    return ChaosReport(
        machine=describe(),
        settings=settings,
        wall_s=round(time.monotonic() - started_s, 1),
        reference=reference,
        jobs=ends,
        victims=summaries(kills),
        kills=kills,
        stuck=stuck,
    )


async def _undisturbed(settings: Settings, directory: Path) -> dict[str, str]:
    async with _mesh(settings, directory) as running:
        jobs = _add_jobs(running, 0)
        async with asyncio.TaskGroup() as group:
            tasks = {job.task: group.create_task(running.control(job)) for job in jobs}
        return {task: done.result() for task, done in tasks.items()}


async def _disturb(
    running: _Run,
    reference: dict[str, str],
    kills: list[Kill],
    ends: list[JobEnd],
    told: Callable[[str], None],
) -> None:
    """Run rounds of both jobs until there were enough kills; jobs that began run to their end."""
    rng = random.Random(running.settings.seed)
    order = victims_in_order(rng, running.settings.kills)
    began_s = time.monotonic()
    number = 0
    while len(kills) < len(order):
        number += 1
        jobs = _add_jobs(running, number)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(running.control(job)) for job in jobs]
            await running.recovered(time.monotonic())
            while len(kills) < len(order) and running.open_jobs:
                await asyncio.sleep(rng.uniform(0, running.settings.max_pause_s))
                victim = order[len(kills)]
                if not (pids := running.candidates(victim)):
                    continue  # it is being started again
                at_s = time.monotonic()
                with suppress(ProcessLookupError):
                    os.kill(rng.choice(pids), signal.SIGKILL)
                await running.recovered(at_s)
                recovery_s = round(time.monotonic() - at_s, 2)
                kills.append(Kill(victim, round(at_s - began_s, 2), recovery_s))
                told(f"kill {len(kills)} of {len(order)}, {victim}: recovered in {recovery_s} s")
            while running.open_jobs:
                await running.recovered(time.monotonic())
        for job, task in zip(jobs, tasks, strict=True):
            same = task.result() == reference[job.task]
            ends.append(JobEnd(job.name, job.task, task.result(), same, job.starts))
            told(f"{job.name}: {'the same weights' if same else 'OTHER WEIGHTS'}")


def victims_in_order(rng: random.Random, count: int) -> list[Victim]:
    """A random order of victims in which each kind comes as often as every other."""
    order: list[Victim] = []
    while len(order) < count:
        order += rng.sample(list(Victim), len(Victim))
    return order[:count]


def summaries(kills: list[Kill]) -> list[VictimSummary]:
    found = []
    for victim in Victim:
        times_s = [kill.recovery_s for kill in kills if kill.victim is victim]
        if times_s:
            found.append(VictimSummary(victim, len(times_s), median(times_s), max(times_s)))
    return found


def _add_jobs(running: _Run, number: int) -> list[_Job]:
    jobs = [_Job(f"{task.replace('_', '-')}-{number}", task) for task in TASKS]
    running.jobs.update({job.name: job for job in jobs})
    return jobs


@asynccontextmanager
async def _mesh(settings: Settings, directory: Path) -> AsyncIterator[_Run]:
    mesh_config = MeshConfig(tenants=[TENANT], routers=2, schedulers=2, seal_every=10)
    program = Program(find_example())
    if settings.vllm:
        python = Path(settings.vllm)
        mesh_config, program = with_vllm(mesh_config, program, python, TINY_KV_CACHE_BYTES)
    if settings.megatron:
        mesh_config, program = _with_megatron(mesh_config, program, Path(settings.megatron))
    async with Mesh(mesh_config, directory) as mesh:
        await mesh.ready()
        bus = await Bus.open(mesh.credentials.bus, "chaos")
        running = _Run(settings, mesh, program, directory)
        try:
            async with asyncio.TaskGroup() as group:
                following = group.create_task(running.follow(bus))
                try:
                    yield running
                finally:
                    await lifecycle.end([following])
        finally:
            await bus.close()


def _with_megatron(mesh: MeshConfig, program: Program, python: Path) -> tuple[MeshConfig, Program]:
    """The same with policies on the four devices of each training node."""
    interpreters = {"megatron": str(python.absolute())}
    nodes = [
        replace(node, devices=[*node.devices] * 4, interpreters=interpreters)
        if node.pool == "train"
        else node
        for node in mesh.nodes
    ]
    words = ["--train-backend", "megatron", "--tp", "2", "--pp", "2"]
    return replace(mesh, nodes=nodes), Program(program.script, [*program.arguments, *words])


def _leaf(error: BaseException) -> BaseException:
    return _leaf(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


async def _weights(process: asyncio.subprocess.Process) -> str:
    """The weights' SHA-256 that a controller writes at its end; empty where it was killed."""
    assert process.stdout is not None
    async for line in process.stdout:
        with suppress(msgspec.DecodeError):  # half a line of one that was killed
            said = msgspec.json.decode(line)
            if said["event"] == "done":
                return str(said["weights_sha256"])
    return ""
