"""The connection of a service to the bus, for as long as the service runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from phaseloom.common.process import config, lifecycle
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.connection import SERVICE_CONNECT_S, BusConfig


@asynccontextmanager
async def service_bus(name: str, stop: asyncio.Event) -> AsyncIterator[Bus]:
    """The bus that the configuration names, closed at the end of the block.

    Args:   name: the connection's name in the server's list.
            stop: the service's stop event.
    Raises: Stopped: the service was told to stop while it connected.
            ResourceError: UNAVAILABLE: the server could not be reached in time.
    """
    opening = Bus.open(config.load(BusConfig, "bus"), name, timeout_s=SERVICE_CONNECT_S)
    bus = await lifecycle.unless_stopped(stop, opening)
    try:
        yield bus
    finally:
        await bus.close()
