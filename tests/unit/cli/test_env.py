"""`phaseloom env`, and the keys that a later run in the same directory has again."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from socket import create_server

import msgspec
import pytest

from phaseloom.cli.env import env
from phaseloom.cli.meshconfig import SETTINGS, MeshConfig
from phaseloom.cli.rundir import inherit_keys, keep_keys, locked, new_run_dir
from phaseloom.common.contract.errors import CallerError
from phaseloom.common.transport.connection import addresses
from phaseloom.common.transport.natsserver import (
    CREDENTIALS,
    Credentials,
    EmbeddedEnsemble,
    EmbeddedServer,
)
from tests.support.processes import free_port

TENANTS = {"acme": "it's $HOME", "demo": 'a "word"'}


def _run(tenants: dict[str, str], *, gateway_port: int = 0) -> Path:
    run_dir = new_run_dir(Path("runs"))
    credentials = Credentials("nats://127.0.0.1:4222", "mesh", "secret", tenants)
    settings = MeshConfig(gateway_port=gateway_port, console_port=8900)
    (run_dir / "mesh.json").touch()
    (run_dir / CREDENTIALS).write_bytes(msgspec.json.encode(credentials))
    (run_dir / SETTINGS).write_bytes(msgspec.json.encode(settings))
    return run_dir


@pytest.fixture(autouse=True)
def _in_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_env_is_what_a_shell_evaluates(capsys: pytest.CaptureFixture[str]) -> None:
    with locked(_run(TENANTS, gateway_port=8800)):
        env(tenant="acme")
        script = capsys.readouterr().out
        env(tenant="acme", json=True)
    values = json.loads(capsys.readouterr().out)
    assert values.pop("console").startswith("http://127.0.0.1:8900/?key=")
    assert values["PHASELOOM_PASSWORD"] == TENANTS["acme"]
    assert values["OPENAI_BASE_URL"] == "http://127.0.0.1:8800/v1"
    done = subprocess.run(
        ["sh", "-c", 'eval "$0"; env -0', script], capture_output=True, text=True, check=True
    )
    shown = dict(line.split("=", 1) for line in done.stdout.split("\0") if "=" in line)
    assert {name: shown[name] for name in values} == values


def test_env_names_the_tenants_if_there_are_several(capsys: pytest.CaptureFixture[str]) -> None:
    with locked(_run(TENANTS)):
        with pytest.raises(CallerError) as refused:
            env()
        assert refused.value.info.remedy == "set --tenant to one of acme, demo"
        with pytest.raises(CallerError, match="no tenant 'nobody'"):
            env(tenant="nobody")
    with locked(_run({"demo": "word"})):
        env()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == ["export PHASELOOM_TENANT=demo", "export PHASELOOM_PASSWORD=word"]


def test_env_is_refused_while_the_mesh_does_not_run() -> None:
    with pytest.raises(CallerError, match="there is no run"):
        env()
    _run(TENANTS)
    with pytest.raises(CallerError, match="is not running"):
        env(tenant="acme")


async def test_next_run_has_the_keys_and_the_ports_if_they_are_free() -> None:
    runs = Path("runs")
    port = free_port()
    earlier = Credentials(f"nats://127.0.0.1:{port}", "mesh", "secret", TENANTS)
    first = new_run_dir(runs)
    inherit_keys(first, 1)
    assert not (first / CREDENTIALS).exists()
    keep_keys(first.absolute(), earlier)
    assert (runs / CREDENTIALS).stat().st_mode & 0o777 == 0o600

    second = new_run_dir(runs)
    inherit_keys(second, 1)
    file = second / CREDENTIALS
    async with EmbeddedServer(second / "nats", ["demo"], credentials_file=file) as server:
        assert server.credentials == msgspec.structs.replace(
            earlier, tenants={"demo": TENANTS["demo"]}
        )
        keep_keys(second, server.credentials)
        third = new_run_dir(runs)
        with create_server(("127.0.0.1", 0)):
            inherit_keys(third, 1)
        file = third / CREDENTIALS
        async with EmbeddedServer(third / "nats", [*TENANTS], credentials_file=file) as other:
            assert other.credentials.url != server.credentials.url
            assert other.credentials.tenants == TENANTS

    fourth = new_run_dir(runs)
    inherit_keys(fourth, 3)
    ensemble = EmbeddedEnsemble(fourth / "nats", ["demo"], credentials_file=fourth / CREDENTIALS)
    async with ensemble:
        assert len(set(addresses(ensemble.credentials.url))) == 3
        assert ensemble.credentials.password == "secret"


@pytest.mark.parametrize("num_servers", [1, 3])
async def test_server_starts_in_a_directory_of_any_name(tmp_path: Path, num_servers: int) -> None:
    name = (
        'größe 日本 \N{GRINNING FACE} "quoted" it\'s $HOME {a} #b \\u00e9 \\ \b\f\n\x01\x7f \udcff'
    )
    kind = EmbeddedServer if num_servers == 1 else EmbeddedEnsemble
    servers = kind(tmp_path / name, ["demo"])
    async with servers:
        assert all(server.store.is_dir() for server in servers.members.values())
    assert os.listdir(tmp_path) == [name]
