"""The profiler process: it reads the configuration, wires the shell, and runs it."""

from __future__ import annotations

import phaseloom.common.process.tcponly  # noqa: F401

# isort: split
import asyncio
import gc
from typing import NoReturn

from phaseloom.common.process import config, lifecycle
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.connection import SERVICE_CONNECT_S, BusConfig
from phaseloom.profiler.shell import Shell


async def serve(stop: asyncio.Event) -> None:
    settings = config.load(BusConfig, "bus")
    # The objects that the imports made stay: no collection needs to go through them again.
    gc.freeze()
    opening = Bus.open(settings, "profiler", timeout_s=SERVICE_CONNECT_S)
    bus = await lifecycle.unless_stopped(stop, opening)
    try:
        async with asyncio.TaskGroup() as group:
            following = group.create_task(Shell(bus).run())
            await stop.wait()
            following.cancel()
    finally:
        await bus.close()


def main() -> NoReturn:
    lifecycle.run("profiler", serve)


if __name__ == "__main__":
    main()
