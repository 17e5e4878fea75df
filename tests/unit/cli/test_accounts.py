"""`phaseloom accounts`: what a server and services on several machines have to know."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import msgspec
import pytest

from phaseloom.cli.accounts import accounts, make_accounts
from phaseloom.cli.rundir import bus_config
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.process import config
from phaseloom.common.transport.connection import BusConfig
from phaseloom.common.transport.natsserver import SYNCED
from phaseloom.common.transport.natsserver import accounts as nats_accounts
from phaseloom.router.main import RouterConfig

URL = "nats://head.example.com:4222"


def variables(*files: Path) -> dict[str, str]:
    """As a shell reads them."""
    script = 'set -a; for file in "$@"; do . "$file"; done; env -0'
    done = subprocess.run(
        ["/bin/sh", "-euc", script, "sh", *files], capture_output=True, check=True, env={}
    )
    pairs = [pair for pair in done.stdout.decode().split("\0") if pair.startswith("PHASELOOM_")]
    return dict(pair.split("=", 1) for pair in pairs)


def test_services_read_what_is_written(tmp_path: Path) -> None:
    made = make_accounts(tmp_path / "mesh", ("a", "b"), URL)
    bus = config.load(BusConfig, "bus", variables(tmp_path / "mesh/bus.env"))
    assert bus == made.bus == bus_config(tmp_path / "mesh")
    router = config.load(RouterConfig, "router", variables(tmp_path / "mesh/router.env"))
    assert router.tenants == ["a", "b"]
    gateway = variables(tmp_path / "mesh/gateway.env")
    keys = {f"tml-{password}": name for name, password in made.tenants.items()}
    assert json.loads(gateway["PHASELOOM_GATEWAY_KEYS"]) == keys
    assert json.loads(gateway["PHASELOOM_GATEWAY_PASSWORDS"]) == made.tenants
    scheduler, node = (variables(tmp_path / f"mesh/{name}.env") for name in ("scheduler", "node"))
    assert len({*scheduler.values(), *node.values()}) == 1, "one secret"
    assert variables(tmp_path / "mesh/tenants/b.env") == {
        "PHASELOOM_URL": URL,
        "PHASELOOM_TENANT": "b",
        "PHASELOOM_PASSWORD": made.tenants["b"],
    }


def test_server_has_the_accounts_and_fsyncs(tmp_path: Path) -> None:
    made = make_accounts(tmp_path, ("a",), URL)
    settings = json.loads((tmp_path / "nats.conf").read_text())
    assert settings["accounts"] == nats_accounts(made.password, made.tenants)
    assert settings["jetstream"] == SYNCED
    assert settings["port"] == 4222


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    make_accounts(tmp_path / "mesh", ("a",), URL)
    assert (tmp_path / "mesh").stat().st_mode & 0o777 == 0o700
    files = [path for path in (tmp_path / "mesh").rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_passwords_stay_when_a_tenant_is_added(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = make_accounts(tmp_path, ("a",), URL)
    secret = (tmp_path / "node.env").read_text()
    accounts(tmp_path, "a", "b", url="nats://other:4223")
    assert capsys.readouterr().out == f"{tmp_path}\n"
    second = make_accounts(tmp_path, ("a", "b"), URL)
    assert second.password == first.password
    assert second.tenants["a"] == first.tenants["a"]
    assert second.tenants["b"] not in (first.password, *first.tenants.values())
    assert (tmp_path / "node.env").read_text() == secret


@pytest.mark.parametrize(
    ("tenants", "url", "field"),
    [
        ((), URL, "tenants"),
        (("a.b",), URL, "tenants"),
        (("a",), "head:4222", "--url"),
        (("a",), "nats://head", "--url"),
        (("a",), "nats://head:port", "--url"),
        (("b",), URL, "tenants"),
    ],
)
def test_bad_arguments_are_refused_and_nothing_changes(
    tmp_path: Path, tenants: tuple[str, ...], url: str, field: str
) -> None:
    make_accounts(tmp_path, ("a",), URL)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.env")}
    with pytest.raises(CallerError) as caught:
        make_accounts(tmp_path, tenants, url)
    assert caught.value.info.field == field
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.env")} == before


def test_unreadable_credentials_are_refused(tmp_path: Path) -> None:
    (tmp_path / "credentials.json").write_bytes(msgspec.json.encode({"url": URL}))
    with pytest.raises(CallerError) as caught:
        make_accounts(tmp_path, ("a",), URL)
    assert caught.value.info.code is Code.FAILED_PRECONDITION
