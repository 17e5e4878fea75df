"""The profiler process: read the configuration, wire, run."""

from __future__ import annotations

import asyncio
from typing import NoReturn

from phaseloom.common import config, lifecycle
from phaseloom.common.bus import Bus, BusConfig
from phaseloom.profiler.shell import Shell


async def serve(stop: asyncio.Event) -> None:
    bus = await Bus.open(config.load(BusConfig, "bus"), "profiler")
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
