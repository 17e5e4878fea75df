"""`phaseloom accounts` creates passwords for a mesh whose services you start yourself.

`phaseloom up` does not need this command: it creates passwords by itself. The command writes
one directory with the settings of the NATS server and of each service. Shells and systemd can read
the `.env` files:

<directory>/nats.conf           settings of the server: accounts, fsync before acknowledging
           /bus.env             address of the server and the mesh's account, for every service
           /scheduler.env, router.env, gateway.env, console.env, node.env
                                further settings of that service; agents and state managers share
                                `node.env`
           /tenants/<name>.env  address and password for a controller of that tenant
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
    configuration_text,
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
    """Create the passwords of a mesh, and the settings of its NATS server and services.

    Existing passwords do not change. To add a tenant, run the command again with all tenants. Then
    reload the server's `nats.conf` with `nats-server --signal reload`, and restart the routers and
    gateways.

    Parameters
    ----------
    directory
        Directory for the files. Only its owner can read them.
    tenants
        Names of all tenants of the mesh.
    url
        Address at which services and controllers reach the NATS server: nats://HOST:PORT.
    """
    make_accounts(directory, tenants, url)
    print(directory)


def make_accounts(directory: Path, tenants: tuple[str, ...], url: str) -> Credentials:
    """Write the files of `phaseloom accounts`, and return the credentials.

    Raises: CallerError: no tenant is named, a name or the address is invalid, a tenant that the
                directory already has is missing, or the directory's files cannot be read.
    """
    if not tenants:
        raise CallerError(
            "expected at least one tenant, got none",
            field="tenants",
            remedy="name all tenants of the mesh",
        )
    for tenant in tenants:
        check_tenant(tenant, "tenants")
    port = _port_in(url)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    earlier = _read_credentials(directory / _CREDENTIALS)
    earlier_passwords = {} if earlier is None else earlier.tenants
    # Routers serve only the listed tenants, so an omitted one would lose its jobs.
    missing = [tenant for tenant in earlier_passwords if tenant not in tenants]
    if missing:
        raise CallerError(
            f"{directory} already has tenants that you did not name: {', '.join(missing)}",
            code=Code.FAILED_PRECONDITION,
            field="tenants",
            remedy="name these tenants as well: without them, their jobs would no longer be routed",
        )
    credentials = Credentials(
        url,
        MESH_USER,
        secrets.token_urlsafe(_PASSWORD_BYTES) if earlier is None else earlier.password,
        {
            name: earlier_passwords.get(name) or secrets.token_urlsafe(_PASSWORD_BYTES)
            for name in tenants
        },
    )
    secret, operator = (_secret_in(directory / name) for name in (_STATE_SECRET, _OPERATOR_KEY))
    _write(directory / _CREDENTIALS, msgspec.json.format(msgspec.json.encode(credentials)).decode())
    _write(directory / "nats.conf", configuration_text(_server(credentials, port)))
    for name, variables in _services(credentials, secret, operator).items():
        _write(directory / f"{name}.env", _lines(variables))
    (directory / "tenants").mkdir(exist_ok=True)
    for name, password in credentials.tenants.items():
        variables = {"URL": url, "TENANT": name, "PASSWORD": password}
        _write(directory / "tenants" / f"{name}.env", _lines(variables))
    return credentials


def _server(credentials: Credentials, port: int) -> dict[str, object]:
    # The store's directory is not here: it is set on the server's command line (`--store_dir`).
    return {
        "server_name": "phaseloom",
        "port": port,
        "http": f"127.0.0.1:{_MONITORING_PORT}",
        "max_payload": MAX_PAYLOAD_BYTES,
        "ping_interval": "5s",  # a service that hangs must not get requests
        "jetstream": SYNCED,
        "accounts": nats_accounts(credentials.password, credentials.tenants),
    }


def _services(credentials: Credentials, secret: str, operator: str) -> dict[str, dict[str, str]]:
    """Return the environment variables for each `.env` file, without the prefix PHASELOOM_.

    Args: secret: agents and state managers authenticate to each other with it.
          operator: key for the console that shows the jobs of all tenants.
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


def _port_in(url: str) -> int:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        port = None
    if port is None or parts.scheme != "nats" or not parts.hostname:
        raise CallerError(
            f"the server's address must be nats://HOST:PORT, got {url!r}",
            field="--url",
            remedy="give the server's host and port, for example nats://head.example.com:4222",
        )
    return port


def _read_credentials(file: Path) -> Credentials | None:
    """Return the credentials that an earlier call wrote, or None if there is no file.

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


def _secret_in(file: Path) -> str:
    """Return the secret in the file. If the file does not exist, create it with a new secret."""
    if not file.exists():
        _write(file, secrets.token_urlsafe(_PASSWORD_BYTES))
    return file.read_text()
