"""A NATS server that was short of open files: the mesh notices, restarts it, and jobs go on."""

from __future__ import annotations

import asyncio
import resource
from pathlib import Path

import pytest
from nats.errors import Error as NatsError

from phaseloom.cli.meshconfig import MeshConfig
from phaseloom.common.transport.bus import Bus
from tests.support.jobs import NOOP, following, running_mesh, tenant
from tests.support.node import STEP

pytestmark = pytest.mark.timeout(180)
_BLOCK_BYTES = 8 * 2**20


@pytest.mark.usefixtures("noop_nodes")
async def test_server_that_cannot_write_is_restarted_and_reported(short_dir: Path) -> None:
    async with running_mesh(MeshConfig(), short_dir) as (mesh, _):
        bus = await Bus.open(mesh.credentials.bus, "looker")
        (pid,) = mesh.pids("nats")
        await bus.js.add_stream(name="FILLED", subjects=["filled"])
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        # No file can be opened: the stream's next block cannot begin.
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (8, limits[1]))
        notices: list[str] = []
        async with asyncio.timeout(120):
            while not notices:
                for _ in range(_BLOCK_BYTES // 2**20):
                    try:
                        await bus.js.publish("filled", bytes(2**20), timeout=2)
                    except (NatsError, TimeoutError):
                        await asyncio.sleep(0.1)
                try:
                    newest = await bus.newest_notices(9)
                except (NatsError, TimeoutError):
                    continue
                notices = [notice.reason for notice in newest if notice.what == "writes_failed"]
            while mesh.pids("nats") in ([], [pid]):
                await asyncio.sleep(0.05)
        assert "ulimit -n" in notices[0]
        await bus.close()
        async with following(mesh) as log, tenant(mesh) as connection:
            job = await connection.submit_job("job", NOOP)
            await job.deployment("policy").optim_step(STEP.adam)
            await log.until_finished("job.policy.1")
