"""A service that is told to stop before it has what it needs ends in order, and soon."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from phaseloom.common.contract.streams import Bucket
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.leases import scheduler_lease_key
from phaseloom.common.transport.natsserver import EmbeddedServer
from phaseloom.scheduler.core.core import Core
from phaseloom.scheduler.snapshots import Snapshots
from tests.support.processes import free_port, service


@asynccontextmanager
async def silent_server() -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Url of one that takes connections and never says a word, and whether it has one."""
    is_met = asyncio.Event()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_met.set()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(take, "127.0.0.1", 0) as server:
        yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}", is_met


def worker(directory: Path) -> dict[str, str]:
    return {
        "PHASELOOM_WORKER_NODE": "train-0",
        "PHASELOOM_WORKER_POOL": "train",
        "PHASELOOM_WORKER_DEVICES": "[1000000]",
        "PHASELOOM_WORKER_HOST_MEMORY_BYTES": "1000000",
        "PHASELOOM_WORKER_STATE_SOCKET": str(directory / "state.sock"),
        "PHASELOOM_WORKER_STATE_SECRET": "secret",
        "PHASELOOM_WORKER_RUNTIME_DIRECTORY": str(directory),
    }


ROUTER = {"PHASELOOM_ROUTER_TENANTS": '["acme"]'}
GATEWAY = {
    "PHASELOOM_GATEWAY_PORT": "1",
    "PHASELOOM_GATEWAY_KEYS": "{}",
    "PHASELOOM_GATEWAY_PASSWORDS": "{}",
}

CONSOLE = {"PHASELOOM_CONSOLE_PORT": "1", "PHASELOOM_CONSOLE_OPERATOR_KEY": "key"}


@pytest.mark.parametrize(
    "name", ["scheduler", "router", "profiler", "worker", "gateway", "console"]
)
async def test_service_told_to_stop_ends_while_no_server_has_taken_it(
    nats_server: EmbeddedServer, tmp_path: Path, name: str
) -> None:
    async with silent_server() as (url, is_met):
        environment = {**ROUTER, **GATEWAY, **CONSOLE, **worker(tmp_path), "PHASELOOM_BUS_URL": url}
        async with service(name, nats_server, **environment) as process:
            await is_met.wait()
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0


async def test_agent_told_to_stop_ends_while_it_waits_for_its_state_manager(
    nats_server: EmbeddedServer, bus: Bus, tmp_path: Path
) -> None:
    is_met = asyncio.Event()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_met.set()
        writer.close()

    async with (
        await asyncio.start_unix_server(take, tmp_path / "state.sock"),
        service("worker", nats_server, **worker(tmp_path)) as process,
    ):
        await is_met.wait()
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


async def test_scheduler_told_to_stop_ends_though_the_server_is_gone_while_it_restores(
    nats_server: EmbeddedServer, bus: Bus
) -> None:
    """From so many chunks that the server goes in between."""
    fields = msgspec.msgpack.decode(Core().snapshot())
    fields["unknown"] = os.urandom(2_000_000)
    await Snapshots(bus, chunk_bytes=1_000).save(0, msgspec.msgpack.encode(fields))
    # Nor does it end as one that loses its lease.
    ttl = {"PHASELOOM_SCHEDULER_LEASE_TTL_S": "60"}
    async with service("scheduler", nats_server, **ttl) as process:
        async for change in bus.keys.watch(Bucket.LEASES, scheduler_lease_key()):
            if change.stored is not None:
                break
        await nats_server.kill()
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


@pytest.mark.parametrize(
    ("name", "wrong", "remedy"),
    [
        ("router", "PHASELOOM_BUS_PASSWORD", "PHASELOOM_BUS_USER and PHASELOOM_BUS_PASSWORD"),
        ("gateway", "PHASELOOM_GATEWAY_PASSWORDS", "PHASELOOM_GATEWAY_PASSWORDS"),
    ],
)
async def test_service_with_a_wrong_password_ends_at_once_and_names_its_variable(
    nats_server: EmbeddedServer,
    bus: Bus,
    capfd: pytest.CaptureFixture[str],
    name: str,
    wrong: str,
    remedy: str,
) -> None:
    keys = {"PHASELOOM_GATEWAY_KEYS": '{"tml-key": "acme"}'}
    environment = {**ROUTER, **GATEWAY, **keys, wrong: '{"acme": "guess"}'}
    async with asyncio.timeout(30), service(name, nats_server, **environment) as process:
        assert await process.wait() == 1
    last = capfd.readouterr().err.splitlines()[-1]
    assert "PERMISSION_DENIED" in last
    assert f"user and password in {remedy}; " in last


async def test_gateway_serves_the_other_tenants_where_one_has_a_wrong_password(
    nats_server: EmbeddedServer, bus: Bus, capfd: pytest.CaptureFixture[str]
) -> None:
    passwords = {**nats_server.credentials.tenants, "other": "guess"}
    environment = {
        "PHASELOOM_GATEWAY_PORT": str(port := free_port()),
        "PHASELOOM_GATEWAY_KEYS": '{"tml-acme": "acme", "tml-other": "other"}',
        "PHASELOOM_GATEWAY_PASSWORDS": json.dumps(passwords),
    }
    async with asyncio.timeout(60), service("gateway", nats_server, **environment) as process:
        while process.returncode is None:
            with suppress(ConnectionRefusedError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                await writer.wait_closed()
                break
            await asyncio.sleep(0.05)
        assert process.returncode is None
    assert "rejects user 'other'" in capfd.readouterr().err
