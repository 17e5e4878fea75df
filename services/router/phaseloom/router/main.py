"""The router process: configuration, wiring, life."""

from __future__ import annotations

import asyncio

import msgspec

from phaseloom.common import config, lifecycle
from phaseloom.common.bus import Bus, BusConfig
from phaseloom.router.shell import Router


class RouterConfig(msgspec.Struct, frozen=True):
    """Section `router`; PHASELOOM_ROUTER_<FIELD>."""

    tenants: list[str]
    """Whose operations to route; each has an account on the server."""
    name: str = "router"
    """Of this replica, as NATS shows the connection."""
    ops_max_bytes: int = 1 << 30
    """Of each tenant's operation stream; when it is full, publishing is refused."""


async def serve(stop: asyncio.Event) -> None:
    """Route until told to stop; what is in hand then is finished first."""
    settings = config.load(RouterConfig, "router")
    bus = await Bus.open(config.load(BusConfig, "bus"), settings.name)
    try:
        for tenant in settings.tenants:
            await bus.provision_tenant(tenant, settings.ops_max_bytes)
        async with Router(bus).running(settings.tenants):
            await stop.wait()
    finally:
        await bus.close()


def main() -> None:
    lifecycle.run("router", serve)


if __name__ == "__main__":
    main()
