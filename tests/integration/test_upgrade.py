"""A mesh that runs is upgraded to a build with another core version: its jobs notice nothing."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import msgspec
import pytest

from phaseloom import client
from phaseloom.cli.supervisor import Mesh, MeshConfig
from phaseloom.common.transport.bus import Bus
from phaseloom.scheduler.core.state.tree import CORE_VERSION
from phaseloom.scheduler.snapshots import Snapshot, Snapshots
from tests.support.jobs import NOOP, running_mesh, tenant
from tests.support.newbuild import NEWER, newer_build
from tests.support.processes import until_gone


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


async def restart(mesh: Mesh, name: str) -> None:
    """Stop a service in order, as an upgrade does, and return once the next one has begun."""
    (old,) = mesh.kill(name, signal.SIGTERM)
    await until_gone([old], timeout_s=60)
    async with asyncio.timeout(60):
        while mesh.pids(name) in ([], [old]):
            await asyncio.sleep(0.02)


@pytest.mark.usefixtures("noop_nodes")
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
        await log.caught_up()
        assert log.finished("noop.policy") == [1, 2, 3]
        assert len(log.starts("noop.policy")) == 1, "its ranks went on"
