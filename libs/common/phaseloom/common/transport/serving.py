"""The bus connection of a service, open as long as the service runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from phaseloom.common.contract.errors import to_exception
from phaseloom.common.process import config, lifecycle
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.connection import SERVICE_CONNECT_S, BusConfig
from phaseloom.common.transport.natsclient import MeshClient


@asynccontextmanager
async def service_bus(name: str, stop: asyncio.Event) -> AsyncIterator[Bus]:
    """Open the bus named by the configuration, and close it at the end of the block.

    Args:   name: the connection's name in the server's list.
            stop: the service's stop event.
    Raises: Stopped: the service was asked to stop while it connected. CallerError:
            PERMISSION_DENIED: the server rejects the service. If that happens later, the stop event
            is set and the error is raised at the end of the block. ResourceError: UNAVAILABLE: the
            server could not be reached in time.
    """
    opening = Bus.open(config.load(BusConfig, "bus"), name, timeout_s=SERVICE_CONNECT_S)
    bus = await lifecycle.unless_stopped(stop, opening)
    watching = asyncio.create_task(_stop_when_denied(bus.client, stop))
    try:
        yield bus
    finally:
        await lifecycle.end([watching])
        await bus.close()
        if bus.client.denial is not None:
            raise to_exception(bus.client.denial)


async def _stop_when_denied(client: MeshClient, stop: asyncio.Event) -> None:
    """Stop the service once the server rejects it. After a restart it may read a new password."""
    await client.denied.wait()
    stop.set()
