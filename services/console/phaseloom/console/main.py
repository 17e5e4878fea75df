"""The console process: a web page that shows what the mesh does, live."""

from __future__ import annotations

import asyncio
import gc
import math
from pathlib import Path
from typing import NoReturn

import msgspec
from aiohttp import web

from phaseloom.common.observability.telemetry import TelemetryConfig
from phaseloom.common.process import config, lifecycle
from phaseloom.common.process.malformed import answer_malformed
from phaseloom.common.transport.serving import service_bus
from phaseloom.console.core.view import HISTORY, View
from phaseloom.console.http import Keys, application, malformed
from phaseloom.console.shell import Shell

_END_S = 1.0
"""Time that open pages may delay shutdown."""


class ConsoleConfig(msgspec.Struct, frozen=True):
    """The console's settings, from the section `console` or PHASELOOM_CONSOLE_<FIELD>."""

    port: int
    operator_key: str
    """The operator's key. It shows all tenants and may cancel jobs and drain nodes."""
    keys: dict[str, str] = {}
    """Tenants by key. A key shows its tenant's jobs."""
    host: str = "127.0.0.1"
    """The address to listen on."""
    history: int = HISTORY
    """Number of operations, and of context switches, kept for pages that are opened later."""

    def check(self) -> None:
        """Raises: CallerError: a number is out of range."""
        config.check_bounds(self, "console", _BOUNDS)


_BOUNDS = {"port": (1, config.LAST_PORT), "history": (1, math.inf)}


async def serve(stop: asyncio.Event) -> None:
    settings = config.load(ConsoleConfig, "console")
    settings.check()
    # Imported objects live forever, so garbage collections need not scan them.
    gc.freeze()
    async with service_bus("console", stop) as bus:
        spans = config.load(TelemetryConfig, "telemetry").spans_dir
        shell = Shell(bus, View(settings.history), Path(spans) if spans else None)
        keys = Keys.of(settings.operator_key, settings.keys, settings.port)
        runner = web.AppRunner(
            application(shell, keys),
            access_log=None,
            handle_signals=False,
            shutdown_timeout=_END_S,
        )
        await runner.setup()
        answer_malformed(runner, malformed)
        try:
            await web.TCPSite(runner, settings.host, settings.port).start()
            await lifecycle.unless_stopped(stop, shell.run())
        finally:
            await runner.cleanup()


def main() -> NoReturn:
    lifecycle.run("console", serve)


if __name__ == "__main__":
    main()
