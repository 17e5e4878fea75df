"""`phaseloom accounts`: the passwords of a mesh whose server and services are started by hand.

`phaseloom up` makes those of its own run. For services on several machines this makes one directory
with all that the server and each service has to know, as files of variables that both a shell and
systemd read:

<directory>/nats.conf           the server's settings: accounts, fsync before it acknowledges
           /bus.env             where the server is, and the mesh's own account: for every service
           /scheduler.env, router.env, gateway.env, console.env, node.env
                                what that service needs beside; `node.env` is for agents and state
                                managers
           /tenants/<name>.env  what a controller of that tenant needs
           /credentials.json    the same for `phaseloom … --run <directory>`
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from phaseloom.cli.processes import api_key
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.streams import MAX_PAYLOAD_BYTES
from phaseloom.common.process.config import PREFIX
from phaseloom.common.process.files import replace_file
from phaseloom.common.transport.natsserver import (
    MESH_USER,
    SYNCED,
    Credentials,
    check_tenant,
)
from phaseloom.common.transport.natsserver import (
    accounts as nats_accounts,
)

_CREDENTIALS = "credentials.json"
_STATE_SECRET = "state.secret"
_OPERATOR_KEY = "operator.key"
_MONITORING_PORT = 8222
_PASSWORD_BYTES = 24


def accounts(directory: Path, *tenants: str, url: str) -> None:
    """Make the passwords of a mesh, and the settings of its NATS server and services.

    Everything that the directory has already stays as it is. To add a tenant, call it again with
    all tenants. A running server takes a new `nats.conf` by `nats-server --signal reload`; routers
    and gateways must be started again.

    Parameters
    ----------
    directory
        Where the files go; only its owner can read them.
    tenants
        All tenants of the mesh.
    url
        Where services and controllers reach the server: nats://HOST:PORT.
    """
    make_accounts(directory, tenants, url)
    print(directory)


def make_accounts(directory: Path, tenants: tuple[str, ...], url: str) -> Credentials:
    """Write the files.

    Raises: CallerError: no tenant is named, a name or the address is not valid, a tenant of the
                directory's is missing, or what is in the directory cannot be read.
    """
    if not tenants:
        raise CallerError(
            "expected at least one tenant, got none", field="tenants", remedy="name the tenants"
        )
    for tenant in tenants:
        check_tenant(tenant, "tenants")
    port = _port_of(url)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    earlier = _earlier(directory / _CREDENTIALS)
    known = {} if earlier is None else earlier.tenants
    missing = [tenant for tenant in known if tenant not in tenants]
    if missing:
        raise CallerError(
            f"{directory} already has tenants that you did not name: {', '.join(missing)}",
            code=Code.FAILED_PRECONDITION,
            field="tenants",
            remedy="name them too; otherwise their jobs would no longer be routed",
        )
    made = Credentials(
        url,
        MESH_USER,
        secrets.token_urlsafe(_PASSWORD_BYTES) if earlier is None else earlier.password,
        {name: known.get(name) or secrets.token_urlsafe(_PASSWORD_BYTES) for name in tenants},
    )
    secret, operator = (_kept(directory / name) for name in (_STATE_SECRET, _OPERATOR_KEY))
    _write(directory / _CREDENTIALS, msgspec.json.format(msgspec.json.encode(made)).decode())
    _write(directory / "nats.conf", json.dumps(_server(made, port), indent=2))
    for name, variables in _services(made, secret, operator).items():
        _write(directory / f"{name}.env", _lines(variables))
    (directory / "tenants").mkdir(exist_ok=True)
    for name, password in made.tenants.items():
        variables = {"URL": url, "TENANT": name, "PASSWORD": password}
        _write(directory / "tenants" / f"{name}.env", _lines(variables))
    return made


def _server(credentials: Credentials, port: int) -> dict[str, object]:
    """The settings of the server, apart from the directory of its store, which its command line
    gives."""
    return {
        "server_name": "phaseloom",
        "port": port,
        "http": f"127.0.0.1:{_MONITORING_PORT}",
        "max_payload": MAX_PAYLOAD_BYTES,
        "jetstream": SYNCED,
        "accounts": nats_accounts(credentials.password, credentials.tenants),
    }


def _services(credentials: Credentials, secret: str, operator: str) -> dict[str, dict[str, str]]:
    """The variables of each file, without their prefix.

    Args: secret: the secret by which agents and state managers know one another.
          operator: the console's key that shows the jobs of all tenants.
    """
    keys = {api_key(password): name for name, password in credentials.tenants.items()}
    return {
        "bus": {
            "BUS_URL": credentials.url,
            "BUS_USER": credentials.user,
            "BUS_PASSWORD": credentials.password,
        },
        "scheduler": {"SCHEDULER_STATE_SECRET": secret},
        "router": {"ROUTER_TENANTS": json.dumps(list(credentials.tenants))},
        "gateway": {
            "GATEWAY_KEYS": json.dumps(keys),
            "GATEWAY_PASSWORDS": json.dumps(credentials.tenants),
        },
        "console": {"CONSOLE_OPERATOR_KEY": operator, "CONSOLE_KEYS": json.dumps(keys)},
        "node": {"WORKER_STATE_SECRET": secret, "STATEMGR_SECRET": secret},
    }


def _lines(variables: dict[str, str]) -> str:
    return "".join(f"{PREFIX}{name}='{value}'\n" for name, value in variables.items())


def _write(file: Path, content: str) -> None:
    replace_file(file, content.encode(), 0o600)


def _port_of(url: str) -> int:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        port = None
    if port is None or parts.scheme != "nats" or not parts.hostname:
        raise CallerError(
            f"the server's address must be nats://HOST:PORT, got {url!r}",
            field="--url",
            remedy="for example nats://head.example.com:4222",
        )
    return port


def _earlier(file: Path) -> Credentials | None:
    """The credentials that are in the file; None: there is no such file.

    Raises: CallerError: FAILED_PRECONDITION: the file cannot be read.
    """
    try:
        return msgspec.json.decode(file.read_bytes(), type=Credentials)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise CallerError(
            f"{file} cannot be read: {error}",
            code=Code.FAILED_PRECONDITION,
            field="directory",
            remedy="use another directory and restart the whole mesh with it",
        ) from None


def _kept(file: Path) -> str:
    """The secret that is in the file; where there is no file, a new secret, which is written to
    it."""
    if not file.exists():
        _write(file, secrets.token_urlsafe(_PASSWORD_BYTES))
    return file.read_text()
