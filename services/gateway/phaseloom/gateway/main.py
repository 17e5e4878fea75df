"""The gateway process: HTTP front doors to the mesh, the Tinker API and OpenAI's."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import msgspec
from aiohttp import web

from phaseloom.client import CallerError, connect
from phaseloom.common.process import config, lifecycle
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.connection import SERVICE_CONNECT_S, BusConfig
from phaseloom.gateway import openai, tinker
from phaseloom.gateway.futures import Futures
from phaseloom.gateway.http import TENANTS
from phaseloom.gateway.models import Backends, Models
from phaseloom.gateway.records import Book
from phaseloom.gateway.tenants import Tenant, Tenants

_MAX_BODY_BYTES = 64 * 2**20
_END_S = 2.0
"""How long calls that wait for a promise may go on when the gateway is told to stop."""


class GatewayConfig(msgspec.Struct, frozen=True):
    """The settings of a gateway: the section `gateway`, or PHASELOOM_GATEWAY_<FIELD>."""

    port: int
    keys: dict[str, str]
    """API key → tenant. The Tinker SDK wants keys that begin with `tml-`."""
    passwords: dict[str, str]
    """Tenant → its password."""
    name: str = "gateway"
    """The name of this process, as NATS shows the connection."""
    host: str = "127.0.0.1"
    """The address to listen at."""
    train_pool: str = "train"
    rollout_pool: str = "rollout"
    train_backend: str = "fsdp"
    rollout_backend: str = "sampler"
    scratch_bytes: int = 0
    """Of each sampler, on its device: vLLM's KV cache."""

    @property
    def backends(self) -> Backends:
        return Backends(
            self.train_backend,
            self.rollout_backend,
            self.train_pool,
            self.rollout_pool,
            self.scratch_bytes,
        )

    def check(self) -> None:
        """Raises: CallerError: a key is of a tenant without a password."""
        for tenant in self.keys.values():
            if tenant not in self.passwords:
                raise CallerError(
                    f"tenant {tenant!r} has no password",
                    field="gateway.passwords",
                    remedy="give the password of each tenant that a key is of",
                )


async def serve(stop: asyncio.Event) -> None:
    """Serve until told to stop. Jobs go on, and the next gateway attaches to them."""
    settings = config.load(GatewayConfig, "gateway")
    settings.check()
    bus_config = config.load(BusConfig, "bus")
    opening = Bus.open(bus_config, settings.name, timeout_s=SERVICE_CONNECT_S)
    bus = await lifecycle.unless_stopped(stop, opening)
    try:
        book = Book(bus)
        await book.load()
        async with AsyncExitStack() as connections:
            tenants = []
            for name in sorted(set(settings.keys.values())):
                connecting = connect(bus_config.url, name, settings.passwords[name])
                mesh = await connections.enter_async_context(connecting)
                models = Models(mesh, settings.backends)
                tenants.append(Tenant(name, models, Futures(), book, bus))
            await _listen(settings, Tenants(settings.keys, tenants), stop)
    finally:
        await bus.close()


async def _listen(settings: GatewayConfig, tenants: Tenants, stop: asyncio.Event) -> None:
    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    app[TENANTS] = tenants
    app.add_routes(tinker.routes)
    app.add_routes(openai.routes)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_END_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, settings.host, settings.port).start()
        await stop.wait()
    finally:
        await runner.cleanup()


def main() -> None:
    lifecycle.run("gateway", serve)


if __name__ == "__main__":
    main()
