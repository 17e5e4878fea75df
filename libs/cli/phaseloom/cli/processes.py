"""The processes of a mesh on this machine, each with its environment variables."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from socket import AF_INET, AF_INET6, create_server, socket

import msgspec

from phaseloom.cli.meshconfig import SCHEDULER_SETTINGS, MeshConfig, NodeConfig
from phaseloom.common.process import config as configuration
from phaseloom.common.transport.certificates import directory_of
from phaseloom.common.transport.natsserver import Credentials

_LONG_LEASE_S = 12.0
"""Lease of a node if the NATS servers are replicated. No lease can be renewed while they elect a
leader (up to 9 s), and that must not end any agent."""
_BACKLOG = 1024
"""Connections that wait until a replica accepts them."""


class Listener:
    """A listening socket that replicas of a service share.

    A connection goes to any replica that accepts it, so never to one that hangs.
    """

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._socket: socket | None = None

    def open(self) -> socket:
        """Return the socket, and open it when it is first needed.

        Raises: OSError: another program uses the port.
        """
        if self._socket is None:
            family = AF_INET6 if ":" in self._address[0] else AF_INET
            self._socket = create_server(self._address, family=family, backlog=_BACKLOG)
        return self._socket

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A process `python -m <module>`, with environment variables in addition to the inherited
    ones."""

    name: str
    module: str
    environment: dict[str, str]
    listener: Listener | None = None
    """The socket that the process gets as its standard input."""


def child_specs(
    config: MeshConfig,
    run_dir: Path,
    sockets: Path,
    credentials: Credentials,
    secret: str,
    *,
    listener: Listener | None = None,
) -> list[ChildSpec]:
    """Return the processes of a mesh. Each process gets only the variables that it reads.

    Args: sockets: a directory whose path is short enough for Unix sockets.
          secret: the mesh's secret. Agents and state managers authenticate to each other with it,
              and the scheduler signs tickets with it.
          listener: the gateways' socket, which all of them share.
    """
    bus = {
        "URL": credentials.url,
        "USER": credentials.user,
        "PASSWORD": credentials.password,
        "REPLICAS": config.nats_servers,
    }
    shared = {
        **_section("BUS", bus),
        **_section("TELEMETRY", {"SPANS_DIR": run_dir / "spans"}),
        # 0 overrides an inherited port, which all services would share.
        **_section("METRICS", {"PORT": 0}),
        "OMP_NUM_THREADS": "1",
    }
    specs = [*_schedulers(config, secret), *_routers(config)]
    specs.append(ChildSpec("profiler", "phaseloom.profiler.main", {}))
    if config.gateway_port:
        specs += _gateways(config, credentials, listener)
    if config.console_port:
        specs.append(_console(config, credentials))
    for node in config.nodes:
        specs += _node(node, config, run_dir, sockets, secret)
    return [replace(s, environment={**shared, **s.environment}) for s in specs]


def _schedulers(config: MeshConfig, secret: str) -> list[ChildSpec]:
    specs = []
    for number in range(config.schedulers):
        name = f"scheduler-{number}" if number else "scheduler"
        settings = {
            "NAME": name,
            **{setting.upper(): getattr(config, setting) for setting in SCHEDULER_SETTINGS},
            "SLOWDOWNS_FILE": Path(config.slowdowns).absolute() if config.slowdowns else "",
            "STATE_SECRET": secret,
        }
        specs.append(ChildSpec(name, "phaseloom.scheduler.main", _section("SCHEDULER", settings)))
    return specs


def _routers(config: MeshConfig) -> list[ChildSpec]:
    specs = []
    for number in range(config.routers):
        name = f"router-{number}"
        settings = {
            "NAME": name,
            "TENANTS": config.tenants,
            "OPS_MAX_BYTES": config.ops_max_bytes,
            "TENANT_LIMITS": config.tenant_limits,
        }
        specs.append(ChildSpec(name, "phaseloom.router.main", _section("ROUTER", settings)))
    return specs


def api_key(password: str) -> str:
    """Return a tenant's API key for the gateway."""
    return f"tml-{password}"


def _gateways(
    config: MeshConfig, credentials: Credentials, listener: Listener | None
) -> list[ChildSpec]:
    specs = []
    for number in range(config.gateways):
        name = f"gateway-{number}"
        settings = {
            "NAME": name,
            "PORT": config.gateway_port,
            "INHERITS_SOCKET": listener is not None,
            "KEYS": {api_key(password): name for name, password in credentials.tenants.items()},
            "PASSWORDS": credentials.tenants,
            "SESSION_S": config.gateway_session_s,
        }
        environment = _section("GATEWAY", settings)
        specs.append(ChildSpec(name, "phaseloom.gateway.main", environment, listener))
    return specs


def console_key(password: str) -> str:
    """Return the console's key for a tenant or the operator, derived from their password.

    The key appears in URLs, so it must not reveal the password.
    """
    return hashlib.blake2b(password.encode(), digest_size=18, person=b"console").hexdigest()


def console_url(port: int, password: str) -> str:
    """Return the address of the console's page, with the key of a tenant or the operator."""
    return f"http://127.0.0.1:{port}/?key={console_key(password)}"


def _console(config: MeshConfig, credentials: Credentials) -> ChildSpec:
    settings = {
        "PORT": config.console_port,
        "OPERATOR_KEY": console_key(credentials.password),
        "KEYS": {console_key(password): name for name, password in credentials.tenants.items()},
    }
    return ChildSpec("console", "phaseloom.console.main", _section("CONSOLE", settings))


def _node(
    node: NodeConfig, config: MeshConfig, run_dir: Path, sockets: Path, secret: str
) -> list[ChildSpec]:
    state_socket = sockets / f"{node.name}.sock"
    checkpoints = Path(config.checkpoint_root or run_dir / "checkpoints").absolute()
    state = {
        "NODE": node.name,
        "SOCKET": state_socket,
        "SECRET": secret,
        "DIRECTORY": run_dir / "nodes" / node.name,
        "CERTIFICATES": directory_of(run_dir / "certificates", node.name),
        "SITE": node.site,
        "FROZEN_BASES": config.frozen_bases,
        "DEVICES": node.devices,
        "HOST_MEMORY_BYTES": node.host_memory_bytes,
        "CHECKPOINT_ROOT": checkpoints,
        "TENANT_LIMITS": config.tenant_limits,
    }
    worker = {
        "NODE": node.name,
        "POOL": node.pool,
        "DEVICES": node.devices,
        "DEVICE_KIND": node.device_kind,
        "CORES_PER_DEVICE": node.cores_per_device,
        "HOST_MEMORY_BYTES": node.host_memory_bytes,
        "EXCLUSIVE_RESIDENCY": node.exclusive_residency,
        "INTERPRETERS": {
            backend: str(Path(python).expanduser().absolute())
            for backend, python in node.interpreters.items()
        },
        "PRICE_PER_HOUR": node.price_per_hour,
        "STATE_SOCKET": state_socket,
        "STATE_SECRET": secret,
        "RUNTIME_DIRECTORY": sockets,
        **({} if config.nats_servers == 1 else {"LEASE_TTL_S": _LONG_LEASE_S}),
        "DIRECTORY": run_dir / "nodes" / node.name,
    }
    return [
        ChildSpec(f"statemgr-{node.name}", "phaseloom.statemgr.main", _section("STATEMGR", state)),
        ChildSpec(f"worker-{node.name}", "phaseloom.worker.main", _section("WORKER", worker)),
    ]


def with_metrics(specs: Sequence[ChildSpec]) -> tuple[list[ChildSpec], dict[str, int]]:
    """Assign a free loopback port for metrics to each process.

    Returns: the processes with their ports set, and process name → port.
    """
    with ExitStack() as stack:
        # All listeners stay open until every port is assigned, so that the ports differ.
        listeners = {s.name: stack.enter_context(create_server(("127.0.0.1", 0))) for s in specs}
        ports = {name: int(listener.getsockname()[1]) for name, listener in listeners.items()}
    settings = {name: _section("METRICS", {"PORT": port}) for name, port in ports.items()}
    return [replace(s, environment={**s.environment, **settings[s.name]}) for s in specs], ports


def _section(name: str, values: Mapping[str, object]) -> dict[str, str]:
    return {f"{configuration.PREFIX}{name}_{key}": _text(value) for key, value in values.items()}


def _text(value: object) -> str:
    if isinstance(value, str | Path):
        return str(value)
    return msgspec.json.encode(value).decode()
