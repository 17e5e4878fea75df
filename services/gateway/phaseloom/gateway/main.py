"""The gateway process: HTTP front doors to the mesh, the Tinker API and OpenAI's."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
from functools import partial

import msgspec
from aiohttp import web

from phaseloom.client import CallerError, connect
from phaseloom.common.contract.sizes import Size
from phaseloom.common.process import config, lifecycle
from phaseloom.common.process.malformed import answer_malformed
from phaseloom.common.process.workers import WorkerPool
from phaseloom.common.transport import connection
from phaseloom.common.transport.connection import SERVICE_CONNECT_S, BusConfig
from phaseloom.common.transport.serving import service_bus
from phaseloom.gateway import checkpoints, openai, tinker
from phaseloom.gateway.futures import Futures
from phaseloom.gateway.http import WORKERS, answered, refused
from phaseloom.gateway.models import Backends, Models
from phaseloom.gateway.records import Book
from phaseloom.gateway.replicas import (
    MAX_BODY_BYTES,
    PEERS,
    REPLICA,
    Replica,
    Seat,
    passed_on,
    peers,
)
from phaseloom.gateway.tenants import Tenant
from phaseloom.gateway.tinker.sessions import end_silent_sessions
from phaseloom.gateway.tokenizers import TOKENIZERS, Tokenizers

log = logging.getLogger(__name__)

_WORKER_MODULES = (
    "phaseloom.gateway.core.convert",
    "phaseloom.gateway.core.templates",
    "phaseloom.gateway.tinker.requests",
)
_NUM_WORKERS = 3
_MAX_WAITING = 1024
"""Calls of one tenant that may wait for a worker process."""
_END_S = 2.0
"""Time that calls waiting for a promise may continue after a stop was requested."""


class GatewayConfig(msgspec.Struct, frozen=True):
    """The gateway's settings, from the section `gateway` or PHASELOOM_GATEWAY_<FIELD>."""

    port: int
    keys: dict[str, str]
    """Tenants by API key. The Tinker SDK needs keys that begin with `tml-`."""
    passwords: dict[str, str]
    """Passwords on the bus, by tenant."""
    name: str = "gateway"
    """Name of this process, shown in NATS's list of connections."""
    host: str = "127.0.0.1"
    """The address to listen at."""
    train_pool: str = "train"
    rollout_pool: str = "rollout"
    train_backend: str = "fsdp"
    rollout_backend: str = "sampler"
    scratch_bytes: Size = 0
    """Bytes of device memory for vLLM's KV cache, in each sampler."""
    max_adapters: int = 8
    """Adapters that the sampler of a base keeps on its device."""
    session_s: float = 600.0
    """Time without a heartbeat after which a session of the Tinker SDK ends, with its models. The
    SDK sends a heartbeat every 10 s."""

    inherits_socket: bool = False
    """Whether standard input is the listening socket, instead of one at `host` and `port`. Replicas
    that share a socket accept connections only while they run: one that hangs gets none."""
    peer_host: str = ""
    """Host name at which other replicas reach this one. Empty: `host`, or this machine's name if
    `host` means every address."""

    @property
    def reached_at(self) -> str:
        every = self.host in ("0.0.0.0", "::")
        return self.peer_host or (socket.gethostname() if every else self.host)

    @property
    def backends(self) -> Backends:
        return Backends(
            self.train_backend,
            self.rollout_backend,
            self.train_pool,
            self.rollout_pool,
            self.scratch_bytes,
            self.max_adapters,
        )

    def check(self) -> None:
        """Raises: CallerError: a number is out of range, or a key belongs to a tenant without a
        password."""
        config.check_bounds(self, "gateway", _BOUNDS)
        for tenant in self.keys.values():
            if tenant not in self.passwords:
                raise CallerError(
                    f"tenant {tenant!r} has no password",
                    field="gateway.passwords",
                    remedy="give the password of every tenant that has a key",
                )


_BOUNDS = {
    "port": (1, config.LAST_PORT),
    "scratch_bytes": (0, math.inf),
    "max_adapters": (0, math.inf),
    "session_s": (0, math.inf),
}


async def serve(stop: asyncio.Event) -> None:
    """Serve until `stop` is set. Jobs continue, and the next gateway attaches to them."""
    settings = config.load(GatewayConfig, "gateway")
    settings.check()
    bus_config = config.load(BusConfig, "bus")
    async with service_bus(settings.name, stop) as bus:
        await lifecycle.unless_stopped(stop, _check_passwords(settings, bus_config.url))

        async def serve_tenant(seat: Seat) -> None:
            password = settings.passwords[seat.name]
            async with connect(bus_config.url, seat.name, password) as mesh:
                book = Book(bus)
                await book.load(seat.name)
                models = Models(mesh, settings.backends)
                seat.tenant = Tenant(seat.name, models, Futures(), book, bus)
                await end_silent_sessions(seat.tenant, settings.session_s)

        with socket.create_server((settings.host, 0)) as listener:
            address = f"http://{settings.reached_at}:{listener.getsockname()[1]}"
            tenants = sorted(set(settings.keys.values()))
            seats = [Seat(name, bus, address, serve_tenant) for name in tenants]
            app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[answered, passed_on])
            app.add_routes(tinker.routes)
            app.add_routes(checkpoints.routes)
            app.add_routes(openai.routes)
            app[REPLICA] = Replica(settings.keys, seats)
            async with peers() as app[PEERS], workers() as app[WORKERS], Tokenizers() as texts:
                app[TOKENIZERS] = texts
                await _listen(app, settings, listener, seats, stop)


def workers() -> WorkerPool:
    return WorkerPool(_WORKER_MODULES, num_workers=_NUM_WORKERS, max_waiting=_MAX_WAITING)


async def _check_passwords(settings: GatewayConfig, url: str) -> None:
    """Connect once as every tenant and log those that are denied. The others are still served.

    Raises: CallerError: PERMISSION_DENIED: every tenant is denied.
    """
    tenants = sorted(set(settings.keys.values()))
    denied: list[CallerError] = []
    for tenant in tenants:
        try:
            client = await connection.connect(
                url,
                settings.name,
                tenant,
                settings.passwords[tenant],
                timeout_s=SERVICE_CONNECT_S,
                credentials_from="PHASELOOM_GATEWAY_PASSWORDS",
            )
        except CallerError as error:
            log.error("%s", error)
            denied.append(error)
        else:
            await connection.close_client(client)
    if denied and len(denied) == len(tenants):
        raise denied[0]


async def _listen(
    app: web.Application,
    settings: GatewayConfig,
    listener: socket.socket,
    seats: list[Seat],
    stop: asyncio.Event,
) -> None:
    """Answer calls and serve tenants until `stop` is set.

    Args: listener: the socket at which other replicas reach this one.
    """
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_END_S, auto_decompress=False)
    await runner.setup()
    answer_malformed(runner, partial(refused, "", 400, field=""))
    keeping = [asyncio.create_task(seat.keep()) for seat in seats]
    try:
        await web.SockSite(runner, listener).start()
        if settings.inherits_socket:
            await web.SockSite(runner, _inherited_socket()).start()
        else:
            await web.TCPSite(runner, settings.host, settings.port).start()
        await stop.wait()
    finally:
        await lifecycle.end(keeping)
        await runner.cleanup()


def _inherited_socket() -> socket.socket:
    """Move the listening socket from standard input, which processes of this one inherit."""
    listener = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return listener


def main() -> None:
    lifecycle.return_large_blocks()
    lifecycle.run("gateway", serve)


if __name__ == "__main__":
    main()
