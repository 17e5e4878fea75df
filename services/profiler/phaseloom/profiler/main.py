"""The profiler process: reads its configuration, wires the shell, and runs it."""

from __future__ import annotations

import phaseloom.common.process.tcponly  # noqa: F401

# isort: split
import asyncio
import gc
from typing import NoReturn

from phaseloom.common.process import lifecycle
from phaseloom.common.transport.serving import service_bus
from phaseloom.profiler.shell import Shell


async def serve(stop: asyncio.Event) -> None:
    # Imported objects live forever, so garbage collections need not scan them.
    gc.freeze()
    async with service_bus("profiler", stop) as bus:
        await lifecycle.unless_stopped(stop, Shell(bus).run())


def main() -> NoReturn:
    lifecycle.run("profiler", serve)


if __name__ == "__main__":
    main()
