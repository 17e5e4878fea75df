"""Services that hang: SIGSTOP leaves their sockets open, so that others cannot notice by themselves
that nobody reads from them."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from nats.aio.msg import Msg

from phaseloom.cli.backup import paused
from phaseloom.cli.meshconfig import MeshConfig
from phaseloom.cli.processes import api_key
from phaseloom.cli.supervisor import Mesh
from phaseloom.client import AdamParams, Deployment, DeploymentSpec, ModelSpec
from phaseloom.common.contract.codec import decode
from phaseloom.common.contract.events import Notice, OperationFinished
from phaseloom.common.transport.bus import Bus
from tests.support.directories import short_directory
from tests.support.jobs import running_mesh, tenant
from tests.support.processes import free_port
from tests.support.refusing import refuse
from tests.support.warm import program_pid, signal_programs

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("noop_nodes"), pytest.mark.timeout(240)]
ROOT = Path(__file__).parents[2]
TENANTS = {"demo": "train", "other": "rollout"}
"""Tenant → the pool of its job, so that no job waits for the other's device."""
LONGEST_S = 9.0
"""Bound on the longest call. The first messages of a hung router wait for 4 s, and then go to
another one. The remainder is for a busy machine."""
NUM_CALLS = 40
"""Calls of each tenant while a replica hangs. Half of them would reach it."""
NUM_SPINNERS = 8
PIDFD_GETFD = 438
BUSY_S = 6.0


class Notices:
    """The supervisor's notices, each read once."""

    def __init__(self) -> None:
        self._received: asyncio.Queue[Notice] = asyncio.Queue()

    @classmethod
    @asynccontextmanager
    async def of(cls, mesh: Mesh) -> AsyncIterator[Notices]:
        bus = await Bus.open(mesh.credentials.bus, "observer")
        notices = cls()

        async def receive(message: Msg) -> None:
            notices._received.put_nowait(decode(message.data, Notice))

        await bus.client.subscribe("pl.v1.event.supervisor", cb=receive)
        await bus.client.flush()
        try:
            yield notices
        finally:
            await bus.close()

    async def until(self, what: str, subject: str) -> list[str]:
        """Wait for a notice. Returns: what the notices about this subject say, in order."""
        whats: list[str] = []
        while not whats or whats[-1] != what:
            whats.append((await self._next(subject)).what)
        return whats

    async def until_notice(self, what: str, subject: str) -> Notice:
        while (notice := await self._next(subject)).what != what:
            pass
        return notice

    async def _next(self, subject: str) -> Notice:
        async with asyncio.timeout(60):
            while (notice := await self._received.get()).subject != subject:
                pass
        return notice

    def remaining(self) -> list[Notice]:
        return [self._received.get_nowait() for _ in range(self._received.qsize())]


class Caller:
    """Makes calls one after another, and measures them."""

    def __init__(self, call: Callable[[], Awaitable[object]]) -> None:
        self._call = call
        self.num_calls = 0
        self.longest_s = 0.0

    async def run(self) -> None:
        while True:
            start_s = time.monotonic()
            await self._call()
            self.longest_s = max(self.longest_s, time.monotonic() - start_s)
            self.num_calls += 1
            await asyncio.sleep(0.02)


@asynccontextmanager
async def calling(*calls: Callable[[], Awaitable[object]]) -> AsyncIterator[list[Caller]]:
    callers = [Caller(call) for call in calls]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(caller.run()) for caller in callers]
        yield callers
        for task in tasks:
            task.cancel()


async def more_calls(callers: list[Caller], number: int) -> None:
    """Wait until each caller has completed this number of calls from now on."""
    aims = [caller.num_calls + number for caller in callers]
    async with asyncio.timeout(60):
        while any(c.num_calls < aim for c, aim in zip(callers, aims, strict=True)):
            await asyncio.sleep(0.05)


def spec(pool: str) -> DeploymentSpec:
    return DeploymentSpec("policy", pool, "noop", ModelSpec({}), trainable=True)


def step_of(policy: Deployment) -> Callable[[], Awaitable[object]]:
    async def step() -> object:
        return await policy.optim_step(AdamParams(1e-3))

    return step


async def until_members(bus: Bus, number: int) -> None:
    """Wait until this number of routers receives requests, by the server's own account."""
    inbox = bus.client.new_inbox()
    answers: asyncio.Queue[bytes] = asyncio.Queue()

    async def receive(message: Msg) -> None:
        answers.put_nowait(message.data)

    subscription = await bus.client.subscribe(inbox, cb=receive)
    async with asyncio.timeout(60):
        while True:
            await bus.client.publish("$SRV.PING.router", b"", reply=inbox)
            await asyncio.sleep(0.3)
            if len([answers.get_nowait() for _ in range(answers.qsize())]) == number:
                break
    await subscription.unsubscribe()


async def test_hung_router_leaves_the_rotation_until_it_wakes(tmp_path: Path) -> None:
    config = MeshConfig(tenants=[*TENANTS], replace_hung_s=100.0)
    async with (
        running_mesh(config, tmp_path) as (mesh, log),
        Notices.of(mesh) as notices,
        tenant(mesh, "demo") as demo,
        tenant(mesh, "other") as other,
    ):
        pools = zip((demo, other), TENANTS.values(), strict=True)
        jobs = [await connection.submit_job("j", [spec(pool)]) for connection, pool in pools]
        bus = await Bus.open(mesh.credentials.bus, "counter")
        pids = mesh.pids("router")
        async with calling(*(step_of(job.deployment("policy")) for job in jobs)) as callers:
            await more_calls(callers, NUM_CALLS)
            signal_programs(mesh.pids("router-0"), signal.SIGSTOP)
            try:
                await notices.until("hung", "router-0")
                await more_calls(callers, NUM_CALLS)
                await until_members(bus, 1)
            finally:
                signal_programs(mesh.pids("router-0"), signal.SIGCONT)
            assert await notices.until("resumed", "router-0") == ["resumed"]
            await until_members(bus, 2)
            await more_calls(callers, NUM_CALLS)
            assert max(caller.longest_s for caller in callers) < LONGEST_S
        assert mesh.pids("router") == pids
        await bus.close()
        for job in jobs:
            await job.finish()
        await log.caught_up()
        finished = [e for e in log.events if isinstance(e, OperationFinished)]
        ends = Counter(e.key for e in finished if not e.replay)
        assert {*ends.values()} == {1}
        for name, caller in zip(TENANTS, callers, strict=True):
            seqs = sorted(key.seq or 0 for key in ends if key.tenant == name)
            assert seqs == [*range(1, len(seqs) + 1)]
            assert len(seqs) >= caller.num_calls
        assert log.failures() == []


async def test_service_that_hangs_for_long_is_replaced(tmp_path: Path) -> None:
    async with (
        running_mesh(MeshConfig(replace_hung_s=3.0), tmp_path) as (mesh, _),
        Notices.of(mesh) as notices,
        tenant(mesh) as demo,
    ):
        step = step_of((await demo.submit_job("j", [spec("train")])).deployment("policy"))
        for service in ("router-1", "scheduler", "statemgr-train-0", "worker-train-0"):
            await step()
            before = mesh.pids(service)
            signal_programs(before, signal.SIGSTOP)
            assert await notices.until("restarted", service) == ["hung", "replaced", "restarted"]
            await step()
            assert mesh.pids(service) != before
        before = mesh.kill("nats", signal.SIGSTOP)
        await step()
        await notices.until("replaced", "nats")
        assert mesh.pids("nats") != before


async def test_busy_machine_replaces_nothing(tmp_path: Path) -> None:
    async with (
        running_mesh(MeshConfig(replace_hung_s=3.0), tmp_path) as (mesh, _),
        Notices.of(mesh) as notices,
        tenant(mesh) as demo,
    ):
        job = await demo.submit_job("j", [spec("train")])
        pids = mesh.pids()
        spin = f"import time\nend = time.monotonic() + {BUSY_S}\nwhile time.monotonic() < end: pass"
        command = (sys.executable, "-c", spin)
        spinners = [await asyncio.create_subprocess_exec(*command) for _ in range(NUM_SPINNERS)]
        async with calling(step_of(job.deployment("policy"))):
            for spinner in spinners:
                assert await spinner.wait() == 0
        assert notices.remaining() == []
        assert mesh.pids() == pids


@pytest.mark.usefixtures("cold_nodes")
async def test_pause_of_the_whole_mesh_replaces_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a backup makes one, for as long as it copies what has changed."""
    async with (
        running_mesh(MeshConfig(replace_hung_s=3.0), tmp_path) as (mesh, _),
        tenant(mesh) as demo,
    ):
        step = step_of((await demo.submit_job("j", [spec("train")])).deployment("policy"))
        await step()
        services = ("nats", "scheduler", "router", "profiler", "statemgr")
        pids = [mesh.pids(service) for service in services]
        with paused(mesh.run_dir):
            await asyncio.sleep(BUSY_S)
        await step()
        # Agents are missing here: they end because they lost their leases.
        assert [mesh.pids(service) for service in services] == pids
    assert "hangs" not in caplog.text


async def test_process_that_is_short_of_files_is_reported_and_recovers(tmp_path: Path) -> None:
    async with (
        running_mesh(MeshConfig(), tmp_path) as (mesh, _),
        Notices.of(mesh) as notices,
        tenant(mesh) as demo,
    ):
        step = step_of((await demo.submit_job("j", [spec("train")])).deployment("policy"))
        await step()
        for service in ("worker-train-0", "statemgr-train-0"):
            pids = mesh.pids(service)
            programs = [program_pid(pid) for pid in pids]
            limits = [resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in programs]
            for pid, (_, hard) in zip(programs, limits, strict=True):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
            short = await notices.until_notice("short", service)
            assert "open files" in short.reason
            assert "ulimit -n" in short.reason
            for pid, limit in zip(programs, limits, strict=True):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, limit)
            await notices.until_notice("no longer short", service)
            await step()
            assert mesh.pids(service) == pids


async def replace_hung_replicas(directory: Path) -> None:
    """Let a router and a gateway hang where nobody may close their connections."""
    refuse(PIDFD_GETFD)
    config = MeshConfig(gateway_port=free_port(), gateways=2, replace_hung_s=100.0, fsync=False)
    async with Mesh(config, directory) as mesh, Notices.of(mesh) as notices:
        await mesh.ready(60)
        key = api_key(mesh.credentials.tenants["demo"])
        async with aiohttp.ClientSession(f"http://127.0.0.1:{config.gateway_port}") as http:
            for hung in ("router-0", "gateway-0"):
                before = mesh.pids(hung)
                signal_programs(before, signal.SIGSTOP)
                events = await notices.until("restarted", hung)
                assert events == ["hung", "replaced", "restarted"]
                assert mesh.pids(hung) != before
                await capabilities(http, key)()


def test_replica_that_cannot_leave_the_rotation_is_replaced_at_once() -> None:
    """In a process of its own, because what is refused stays refused."""
    with short_directory() as directory:
        call = f"asyncio.run(test.replace_hung_replicas(Path({str(directory)!r})))"
        code = f"import asyncio, tests.integration.{Path(__file__).stem} as test; "
        code += f"from pathlib import Path; {call}"
        paths = (str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH", ""))
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            check=False,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )
        assert done.returncode == 0, done.stderr.decode()


async def test_hung_gateway_gets_no_calls_until_it_wakes() -> None:
    with short_directory() as directory:
        config = MeshConfig(
            tenants=[*TENANTS],
            gateway_port=free_port(),
            gateways=2,
            replace_hung_s=100.0,
            fsync=False,
        )
        url = f"http://127.0.0.1:{config.gateway_port}"
        async with Mesh(config, directory) as mesh, Notices.of(mesh) as notices:
            await mesh.ready(60)
            # Connections stay open between calls, so those to the hung replica must end.
            async with aiohttp.ClientSession(url) as http:
                calls = [
                    capabilities(http, api_key(key)) for key in mesh.credentials.tenants.values()
                ]
                async with calling(*calls) as callers:
                    for hung in ("gateway-0", "gateway-1"):
                        await more_calls(callers, NUM_CALLS)
                        signal_programs(mesh.pids(hung), signal.SIGSTOP)
                        try:
                            await notices.until("hung", hung)
                            await more_calls(callers, NUM_CALLS)
                        finally:
                            signal_programs(mesh.pids(hung), signal.SIGCONT)
                        assert await notices.until("resumed", hung) == ["resumed"]
                    assert max(caller.longest_s for caller in callers) < LONGEST_S
            assert notices.remaining() == []


def capabilities(http: aiohttp.ClientSession, key: str) -> Callable[[], Awaitable[object]]:
    async def call() -> None:
        while True:
            try:
                path = "/api/v1/get_server_capabilities"
                async with http.get(path, headers={"X-API-Key": key}) as answer:
                    assert answer.status == 200, await answer.text()
                    return
            except aiohttp.ClientConnectionError:  # call again, as any client of the API does
                await asyncio.sleep(0.05)

    return call
