"""GRPO jobs cut down to seconds, on a mesh of real processes and on the in-process oracle."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from grpo import deployments, train
from settings import SETTINGS, Settings

from phaseloom import client
from phaseloom.cli.supervisor import Mesh, MeshConfig
from phaseloom.common.bus import Bus, LogEntry
from phaseloom.common.messages import Event, JobSpec, OperationFinished, Outcome, WpgStarted
from tests.support import inprocess

TENANT = "demo"
TASKS = ("chain_sum", "letter_counting")
WARMUP_STEPS = 3
MICRO_BATCHES = 2
FIRST_GRPO_SEQ = 2 * WARMUP_STEPS + 2
"""Of the policy: after the warm-up's updates and the version that is cut from them."""
SEQS_PER_STEP = MICRO_BATCHES + 2


def short(task: str, steps: int) -> Settings:
    """Enough of everything to have every kind of operation several times."""
    base = SETTINGS[task]
    return Settings(
        steps=steps,
        prompts=4,
        micro_batches=MICRO_BATCHES,
        max_tokens=base.max_tokens,
        warmup_steps=WARMUP_STEPS,
        group=4,
        warmup_batch=16,
        eval_prompts=8,
    )


def policy_seq(step: int, nth: int = 1) -> int:
    """The policy's `nth` operation of a GRPO step, both counted from 1."""
    return FIRST_GRPO_SEQ + (step - 1) * SEQS_PER_STEP + nth - 1


@dataclass
class Reports:
    """What a controller has said."""

    values: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __call__(self, event: str, **values: Any) -> None:
        self.values[event] = values

    @property
    def weights_sha256(self) -> str:
        return cast(str, self.values["done"]["weights_sha256"])


async def no_barrier(_: str) -> None:
    """The controllers of a test wait for nobody."""


def oracle(task: str, settings: Settings, root: Path) -> str:
    """SHA-256 of the weights that the same controller ends with where nothing is shared."""
    reports = Reports()
    with inprocess.Job(JobSpec(deployments=deployments(settings)), root) as job:
        # It offers what the controller uses of a mesh's job.
        asyncio.run(train(cast(client.Job, job), task, settings, reports, no_barrier))
    return reports.weights_sha256


@asynccontextmanager
async def running_mesh(config: MeshConfig, directory: Path) -> AsyncIterator[tuple[Mesh, Bus]]:
    """A mesh that is up, and a connection to its account."""
    async with Mesh(config, directory) as mesh:
        await mesh.ready()
        bus = await Bus.open(mesh.credentials.bus, "test")
        try:
            yield mesh, bus
        finally:
            await bus.close()


@asynccontextmanager
async def tenant(mesh: Mesh, name: str = TENANT) -> AsyncIterator[client.Mesh]:
    """A tenant's connection."""
    password = mesh.credentials.tenants[name]
    async with client.connect(mesh.url, name, password) as connection:
        yield connection


async def run_job(mesh: Mesh, task: str, settings: Settings, name: str = "") -> str:
    """Submit a GRPO job, called like its task where not told, run it, and give the final SHA."""
    reports = Reports()
    async with tenant(mesh) as connection:
        job = await connection.submit_job(name or task, deployments(settings))
        await train(job, task, settings, reports, no_barrier)
        await job.finish()
    return reports.weights_sha256


async def until(
    bus: Bus, is_met: Callable[[Event], bool], timeout_s: float = 60.0, start_sequence: int = 1
) -> LogEntry:
    """The first entry of the decision log that meets a condition, there already or to come."""
    async with asyncio.timeout(timeout_s), aclosing(bus.read_log(start_sequence)) as entries:
        async for entry in entries:
            if is_met(entry.event):
                return entry
    raise AssertionError("the log ended")


async def until_finished(bus: Bus, operation: str) -> LogEntry:
    """Until an operation (`<job>.<deployment>.<seq>`) has its outcome."""
    key = f"{TENANT}.{operation}"
    return await until(bus, lambda e: isinstance(e, OperationFinished) and str(e.key) == key)


async def whole_log(bus: Bus) -> list[Event]:
    """Every event of the decision log so far."""
    end = await bus.log_end()
    events: list[Event] = []
    async with aclosing(bus.read_log()) as entries:
        async for entry in entries:
            events.append(entry.event)
            if entry.sequence >= end:
                return events
    raise AssertionError("the log ended")


def starts(events: list[Event], deployment: str) -> list[WpgStarted]:
    """The lives of a deployment (`<job>.<name>`), in order."""
    key = f"{TENANT}.{deployment}"
    return [e for e in events if isinstance(e, WpgStarted) and str(e.deployment) == key]


def failures(events: list[Event]) -> list[OperationFinished]:
    """Operations that ran and did not complete."""
    finished = [e for e in events if isinstance(e, OperationFinished)]
    return [e for e in finished if e.outcome is not Outcome.COMPLETED]


def rank_pid(mesh: Mesh, deployment: str) -> int:
    """The process of a deployment's (`<job>.<name>`) newest life, as its log tells."""
    service = re.escape(f'"worker:{TENANT}.{deployment}"')
    starts = re.compile(rf'"service": {service}, .*"message": "rank of .* starts, pid (\d+)"')
    files = sorted((mesh.run_dir / "logs").glob("worker-*.log"))
    return [int(pid) for file in files for pid in starts.findall(file.read_text())][-1]


def kill_rank(mesh: Mesh, deployment: str) -> None:
    """As the kernel does when memory runs out."""
    os.kill(rank_pid(mesh, deployment), signal.SIGKILL)
