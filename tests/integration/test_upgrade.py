"""A mesh that runs is upgraded to a build with another core version: its jobs notice nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from phaseloom import client
from phaseloom.cli.meshconfig import MeshConfig
from phaseloom.cli.supervisor import Mesh
from phaseloom.common.contract.events import Event, NodeUp, OperationFinished
from phaseloom.common.transport.bus import Bus
from phaseloom.scheduler.core.state.tree import CORE_VERSION
from phaseloom.scheduler.snapshots import Snapshot, Snapshots
from tests.support.jobs import (
    NOOP,
    TASKS,
    Log,
    policy_seq,
    run_job,
    running_mesh,
    short,
    tenant,
)
from tests.support.newbuild import NEWER, newer_build
from tests.support.processes import until_gone

STEPS = 30
"""Enough that both jobs still train when the last service has been restarted."""
A, B = TASKS


async def newest_snapshot(mesh: Mesh) -> Snapshot:
    bus = await Bus.open(mesh.credentials.bus, "test")
    try:
        stored = await Snapshots(bus).load()
    finally:
        await bus.close()
    assert stored is not None
    return stored


def version_of(snapshot: Snapshot) -> int:
    version: int = msgspec.msgpack.decode(snapshot.payload)["core_version"]
    return version


def pid_of(mesh: Mesh, name: str) -> int:
    """The process of one service; 0: it has none now. `scheduler` is the first of two here."""
    pids = set(mesh.pids(name)) - set(mesh.pids(f"{name}-1"))
    assert len(pids) <= 1, name
    return pids.pop() if pids else 0


async def restart(mesh: Mesh, name: str) -> None:
    """Stop a service in order, as an upgrade does, and return once the next one has begun."""
    old = pid_of(mesh, name)
    os.kill(old, signal.SIGTERM)
    await until_gone([old], timeout_s=60)
    async with asyncio.timeout(60):
        while pid_of(mesh, name) in (0, old):
            await asyncio.sleep(0.02)


async def until_new(log: Log, is_met: Callable[[Event], bool]) -> None:
    """Until something is in the log that is not there now."""
    await log.caught_up()
    num_seen = len(log.events)
    known = {id(event) for event in log.events[:num_seen]}
    await log.until(lambda event: id(event) not in known and is_met(event))


@pytest.mark.usefixtures("noop_nodes", "cold_nodes")
async def test_scheduler_of_a_newer_build_goes_on_with_a_job(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = newer_build(short_dir / "newer")
    async with running_mesh(MeshConfig(), short_dir / "run") as (mesh, log), tenant(mesh) as t:
        job = await t.submit_job("noop", NOOP)
        policy = job.deployment("policy")
        await policy.optim_step(client.AdamParams(1e-3))
        assert version_of(await newest_snapshot(mesh)) == CORE_VERSION
        monkeypatch.setenv("PYTHONPATH", path)
        await restart(mesh, "scheduler")
        await policy.optim_step(client.AdamParams(1e-3))
        assert (await newest_snapshot(mesh)).manifest.led_since == NEWER
        await restart(mesh, "scheduler")
        assert version_of(await newest_snapshot(mesh)) == NEWER
        await policy.optim_step(client.AdamParams(1e-3))
        assert (await job.status()).state == "active"
        await log.until_finished("noop.policy.3")
        assert log.finished("noop.policy") == [1, 2, 3]
        assert len(log.starts("noop.policy")) == 1, "its ranks went on"


@pytest.mark.slow
@pytest.mark.usefixtures("cold_nodes")
async def test_mesh_with_two_jobs_is_upgraded_service_by_service(
    expected: dict[str, str], short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of docs/clusters.md; each once both jobs have gone on after the one before."""
    path = newer_build(short_dir / "newer")
    both = asyncio.Barrier(len(TASKS))

    async def meet(where: str) -> None:
        if where == "end":
            await both.wait()

    settings = MeshConfig(seal_every=4, schedulers=2)
    async with running_mesh(settings, short_dir / "run") as (mesh, log):
        async with asyncio.TaskGroup() as group:
            jobs = [
                group.create_task(run_job(mesh, task, short(task, STEPS), barrier=meet))
                for task in TASKS
            ]
            for task in TASKS:
                await log.until_finished(f"{task}.policy.{policy_seq(1, 1)}")
            monkeypatch.setenv("PYTHONPATH", path)
            for name in ("router-0", "router-1", "profiler"):
                await restart(mesh, name)
                await until_both_go_on(log)
            for node in ("train-0", "rollout-0"):
                await restart(mesh, f"statemgr-{node}")
                await until_both_go_on(log)
                again = asyncio.create_task(until_new(log, node_up(node)))
                await restart(mesh, f"worker-{node}")
                await again
                await until_both_go_on(log)
            for name in ("scheduler-1", "scheduler"):
                await restart(mesh, name)
                await until_both_go_on(log)
            stored = await newest_snapshot(mesh)
            assert NEWER in (stored.manifest.led_since, version_of(stored))
        shas = dict(zip(TASKS, (job.result() for job in jobs), strict=True))
        await log.caught_up()
        assert log.failures() == []
        assert {build_of(pid) for pid in set(mesh.pids()) - set(mesh.pids("nats"))} == {path}
    assert shas == expected


def build_of(pid: int) -> str:
    """PYTHONPATH of a process."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    (path,) = (v for v in variables if v.startswith(b"PYTHONPATH="))
    return path.decode().partition("=")[2]


def node_up(node: str) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, NodeUp) and event.node == node


async def until_both_go_on(log: Log) -> None:
    """Until an operation of each job has come after now and has its outcome."""
    for task in TASKS:
        await until_new(log, finished_of(task))


def finished_of(job: str) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, OperationFinished) and event.key.job == job
