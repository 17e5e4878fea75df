"""Many jobs that train adapters on one base, on one train and one rollout device of a mesh.

Each job generates, trains on a batch and syncs its sampler, step by step: all jobs at once, then
one after another. It is the same work on the same devices, at once with a switch wherever an
operation of another job is next. The memory and the start of a job that joins others on its base
stand beside those of the first, whose processes it shares.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from contextlib import aclosing
from pathlib import Path
from statistics import median

from loadtest.records import Record
from loadtest.watching import RANKS, memory_bytes, services
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.supervisor import Mesh
from phaseloom.client import (
    AdamParams,
    Adapter,
    Datum,
    DeploymentSpec,
    Loss,
    MeshJob,
    ModelSpec,
    Prompt,
    SamplingParams,
    connect,
)
from phaseloom.client import Mesh as Connection
from phaseloom.common.contract.events import ActivationOpened, Event, OperationFinished
from phaseloom.common.process import lifecycle
from phaseloom.common.transport.bus import Bus

TENANT = "bench"
ADAPTER_RANKS = (8, 32, 4, 16, 8, 1, 32, 8)
_MIB = 2**20
_DEVICE_BYTES = 64 * _MIB
_PROMPT_TOKENS = 16
_NUM_PROMPTS = 4
_SAMPLING = SamplingParams(8, ignore_eos=True)
_BATCH = [Datum([*range(1, 17)], [*range(2, 18)], weights=[1.0] * 16)] * 2


class _DeviceTime:
    """The time that operations and switches took on devices, as the decision log tells."""

    def __init__(self, bus: Bus) -> None:
        self.seconds = 0.0
        self._bus = bus
        self._sequence = 0
        self._grown = asyncio.Condition()

    async def follow(self) -> None:
        async with aclosing(self._bus.log.read_entries()) as entries:
            async for entry in entries:
                async with self._grown:
                    self.seconds += sum(_seconds(one.event) for one in entry.split())
                    self._sequence = entry.sequence
                    self._grown.notify_all()

    async def of(self, work: Awaitable[None]) -> tuple[float, float]:
        """Device seconds and wall seconds of some work."""
        await self._caught_up()
        before_s, begun_s = self.seconds, time.perf_counter()
        await work
        wall_s = time.perf_counter() - begun_s
        await self._caught_up()
        return self.seconds - before_s, wall_s

    async def _caught_up(self) -> None:
        end = await self._bus.log.end()
        async with self._grown:
            await self._grown.wait_for(lambda: self._sequence >= end)


def _seconds(event: Event) -> float:
    match event:
        case OperationFinished():
            return event.duration_s
        case ActivationOpened():
            return event.offload_s + event.load_s
    return 0.0


async def measure(directory: Path, base: Path, num_jobs: int, num_steps: int) -> list[Record]:
    """Measure.

    Args: directory: for the mesh.
          base: of the model's files.
          num_jobs: at least two.
          num_steps: of each job, at once and again one after another.
    """
    nodes = [NodeConfig(f"{pool}-0", pool, [_DEVICE_BYTES]) for pool in ("rollout", "train")]
    config = MeshConfig(
        nodes, [TENANT], models={"base": str(base)}, max_group_jobs=num_jobs, fsync=False
    )
    async with Mesh(config, directory) as mesh:
        await mesh.ready()
        bus = await Bus.open(mesh.credentials.bus, "bench")
        devices = _DeviceTime(bus)
        following = asyncio.create_task(devices.follow())
        try:
            password = mesh.credentials.tenants[TENANT]
            async with connect(mesh.url, TENANT, password) as connection:
                return await _measured(mesh, connection, devices, num_jobs, num_steps)
        finally:
            await lifecycle.end([following])
            await bus.close()


async def _measured(
    mesh: Mesh, connection: Connection, devices: _DeviceTime, num_jobs: int, num_steps: int
) -> list[Record]:
    jobs: list[MeshJob] = []
    start_s: list[float] = []
    memory = [_memory_bytes(mesh)]
    for number in range(num_jobs):
        begun_s = time.perf_counter()
        jobs.append(await _started(connection, number))
        start_s.append(time.perf_counter() - begun_s)
        memory.append(_memory_bytes(mesh))
    at_once = await devices.of(_at_once(jobs, num_steps))
    in_turn = await devices.of(_in_turn(jobs, num_steps))
    for job in jobs:
        await job.finish()
    step_ms = 1e3 / (num_jobs * num_steps)
    more_mib = (memory[-1] - memory[1]) / (num_jobs - 1) / _MIB
    turns, first = "one after another", "the first job"
    return [
        _record("device_time_a_step", "ms", turns, at_once[0] * step_ms, in_turn[0] * step_ms),
        _record("wall_time_a_step", "ms", turns, at_once[1] * step_ms, in_turn[1] * step_ms),
        _record("one_more_job_memory", "MiB", first, more_mib, (memory[1] - memory[0]) / _MIB),
        _record("one_more_job_start", "ms", first, 1e3 * median(start_s[1:]), 1e3 * start_s[0]),
    ]


def _record(name: str, unit: str, limit: str, value: float, limit_value: float) -> Record:
    ratio = round(value / limit_value, 4)
    return Record(f"many_{name}", round(value, 3), unit, limit, round(limit_value, 3), ratio)


def _memory_bytes(mesh: Mesh) -> int:
    """The memory of all processes that agents started, the fork servers' included."""
    return memory_bytes(services(mesh))[RANKS]


async def _started(connection: Connection, number: int) -> MeshJob:
    """A job that has done a step."""
    rank = ADAPTER_RANKS[number % len(ADAPTER_RANKS)]
    model = ModelSpec(registered="base", adapter=Adapter(rank, seed=number))
    policy = DeploymentSpec("policy", "train", "fsdp", model, trainable=True)
    sampler = DeploymentSpec("sampler", "rollout", "sampler", model)
    job = await connection.submit_job(f"job-{number}", [policy, sampler])
    await _run(job, 1)
    return job


async def _run(job: MeshJob, num_steps: int) -> None:
    policy, sampler = job.deployment("policy"), job.deployment("sampler")
    for _ in range(num_steps):
        prompts = [Prompt([1 + i] * _PROMPT_TOKENS, seed=i) for i in range(_NUM_PROMPTS)]
        await sampler.generate(prompts, _SAMPLING)
        policy.forward_backward(_BATCH, Loss.CROSS_ENTROPY)
        await policy.optim_step(AdamParams(1e-3))
        await sampler.sync_weights(policy.publish_weights())


async def _at_once(jobs: list[MeshJob], num_steps: int) -> None:
    async with asyncio.TaskGroup() as group:
        for job in jobs:
            group.create_task(_run(job, num_steps))


async def _in_turn(jobs: list[MeshJob], num_steps: int) -> None:
    for job in jobs:
        await _run(job, num_steps)
