"""What survives a cut of the power, on a file system that loses what was not fsynced."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from grpo import deployments, train

from phaseloom import client
from phaseloom.common.contract import streams
from phaseloom.common.contract.events import TimerFired
from phaseloom.common.process.files import replace_file
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.connection import close_client
from phaseloom.common.transport.natsserver import EmbeddedServer
from tests.support import powercut
from tests.support.jobs import TASKS, TENANT, Reports, no_barrier, oracle, short

pytestmark = pytest.mark.skipif(powercut.missing() != "", reason=f"lacks {powercut.missing()}")

NUM_MESSAGES = 50


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[powercut.PowerCut]:
    with powercut.power_cut(tmp_path) as cutting:
        yield cutting


async def stored_before_a_cut(disk: powercut.PowerCut, *, fsync: bool, seed: int | None) -> int:
    """How many of the messages that a server has acknowledged it still has after a power cut.

    They are as many operations, log entries and keys, published side by side, as services do.
    """
    server = EmbeddedServer(disk.directory / "nats", ["acme"], fsync=fsync)
    await server.start()
    bus = await Bus.open(server.credentials.bus, "test")
    await bus.provision_tenant("acme", 2**20)
    subjects = [f"pl.v1.op.acme.sums.policy.{n}" for n in range(1, NUM_MESSAGES + 1)]
    leases = await bus.js.key_value("leases")
    async with asyncio.TaskGroup() as group:
        for number, subject in enumerate(subjects):
            group.create_task(bus.publish(subject, {"number": number}))
            group.create_task(bus.append(TimerFired(f"timer-{number}")))
            group.create_task(leases.put(f"key-{number}", b"value"))
    await server.kill()
    await close_client(bus.client)

    lost = disk.cut(seed=seed)
    assert fsync or any(name.endswith(".blk") for name in lost), lost
    await server.start()
    try:
        async with asyncio.timeout(60):
            bus = await Bus.open(server.credentials.bus, "test")
            await bus.provision_tenant("acme", 2**20)
            leases = await bus.js.key_value("leases")
            kept = sum([await bus.get_stored("OPS_acme", s) is not None for s in subjects])
            kept += (await bus.js.stream_info(streams.SCHED)).state.messages
            kept += (await leases.status()).values
        await bus.close()
    finally:
        await server.stop()
    return kept


@pytest.mark.parametrize("seed", [None, 1])
async def test_acknowledged_messages_survive_a_power_cut(
    disk: powercut.PowerCut, seed: int | None
) -> None:
    assert await stored_before_a_cut(disk, fsync=True, seed=seed) == 3 * NUM_MESSAGES


async def test_without_fsync_a_power_cut_loses_what_was_acknowledged(
    disk: powercut.PowerCut,
) -> None:
    """The other test can fail."""
    assert await stored_before_a_cut(disk, fsync=False, seed=None) < 3 * NUM_MESSAGES


def test_files_of_a_run_are_whole_after_a_power_cut(disk: powercut.PowerCut) -> None:
    """Without its credentials a mesh could not be gone on with, though all else is there."""
    file = disk.directory / "credentials.json"
    replace_file(file, b"first")
    replace_file(file, b"second")
    assert disk.cut() == {}
    assert file.read_bytes() == b"second"


class Progress(Reports):
    """What a controller has said, and how many steps of it."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self._moved = asyncio.Event()

    def __call__(self, event: str, **values: Any) -> None:
        super().__call__(event, **values)
        if event == "step":
            self.steps += 1
            self._moved.set()

    async def reached(self, step: int) -> None:
        while self.steps < step:
            self._moved.clear()
            await self._moved.wait()


class Machine:
    """`phaseloom up` on a disk whose power can be cut, as an operator runs it."""

    def __init__(self, disk: powercut.PowerCut, mesh_file: Path) -> None:
        self._disk = disk
        self._command = [
            *(sys.executable, "-m", "phaseloom.cli.main", "up"),
            *("--mesh-file", str(mesh_file), "--runs", str(disk.directory)),
            *("--console-port", "0"),
        ]
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, *options: str) -> None:
        """Start the mesh, and wait until it is up."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command, *options, stdout=asyncio.subprocess.PIPE
        )
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if line.startswith(b"the mesh is up"):
                return
        raise AssertionError(f"the mesh does not come up: {await self._process.wait()}")

    async def cut(self, *, seed: int | None) -> dict[str, int]:
        """Everything is gone at once, and of the disk what was not fsynced."""
        assert self._process is not None
        pids = json.loads(self._state("mesh.json"))["pids"].values()
        self._process.kill()
        await self._process.wait()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return await asyncio.to_thread(self._disk.cut, seed=seed)

    async def stop(self) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.terminate()
            await self._process.communicate()

    def connection(self) -> Any:
        bus = json.loads(self._state("credentials.json"))
        return client.connect(bus["url"], TENANT, bus["tenants"][TENANT])

    def _state(self, name: str) -> str:
        return (self._disk.directory / "latest" / name).read_text()


async def trained(disk: powercut.PowerCut, tmp_path: Path, steps: int, cuts: list[int]) -> None:
    """Train both tasks at once, cut the power after each of these steps, and compare the weights
    with those that nothing has disturbed."""
    expected = {
        task: await asyncio.to_thread(oracle, task, short(task, steps), tmp_path / task)
        for task in TASKS
    }
    mesh_file = tmp_path / "mesh.toml"
    mesh_file.write_text("[mesh]\nseal_every = 10\n")
    machine = Machine(disk, mesh_file)
    await machine.start()
    said = {task: Progress() for task in TASKS}

    async def control(task: str) -> None:
        settings = short(task, steps)
        async with machine.connection() as mesh:
            job = await mesh.submit_job(task, deployments(settings))
            await train(job, task, settings, said[task], no_barrier)
            await job.finish()

    try:
        async with asyncio.TaskGroup() as group:
            for task in TASKS:
                group.create_task(control(task))
            for seed, step in enumerate(cuts):
                await said[TASKS[0]].reached(step)
                assert await machine.cut(seed=seed if seed % 2 else None)
                await machine.start("--resume")
    finally:
        await machine.stop()
    assert {task: reports.weights_sha256 for task, reports in said.items()} == expected


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_jobs_train_to_the_same_weights_over_many_power_cuts(
    disk: powercut.PowerCut, tmp_path: Path
) -> None:
    await trained(disk, tmp_path, steps=12, cuts=[1, 3, 5, 8, 10])
