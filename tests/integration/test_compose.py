"""What docker-compose.yml runs, as plain processes: its commands, its environment, its server."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from grpo import deployments, train

from phaseloom import client
from phaseloom.common.contract.streams import MAX_PAYLOAD_BYTES, SCHED
from phaseloom.common.transport import natsserver
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.connection import BusConfig
from tests.support.containers import (
    DOCKERFILE,
    ROOT,
    completed,
    image_command,
    image_environment,
    instruction,
    last_words,
    listening,
    restarted,
    services,
)
from tests.support.jobs import Reports, no_barrier, oracle, short
from tests.support.processes import free_port

pytestmark = pytest.mark.long

TASK = "chain_sum"
THREE = "docker-compose.nats3.yml"
GPU = "docker-compose.gpu.yml"


def compose(name: str = "docker-compose.yml") -> dict[str, Any]:
    text = (ROOT / name).read_text()
    filled = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
    document: dict[str, Any] = yaml.safe_load(filled)
    return document


def ours() -> dict[str, Any]:
    """The services that are built from this repository."""
    return {name: spec for name, spec in compose()["services"].items() if "build" in spec}


def service_of(spec: dict[str, Any]) -> str:
    name: str = spec["build"]["args"]["SERVICE"]
    return name


class Containers:
    """Where things of a container are on this machine."""

    def __init__(self, directory: Path, nats_port: int) -> None:
        self._directory = directory
        self._nats_port = nats_port

    def environment(self, name: str, spec: dict[str, Any]) -> dict[str, str]:
        variables = image_environment()
        variables |= {key: str(value) for key, value in spec["environment"].items()}
        mounts = _mounts(spec)
        return {key: self._here(name, value, mounts) for key, value in variables.items()}

    def command(self, spec: dict[str, Any]) -> list[str]:
        return [self._here("", part, _mounts(spec)) for part in spec["command"]]

    def _here(self, name: str, value: str, mounts: dict[str, str]) -> str:
        if value in ("9464", "8800", "8900"):
            return str(free_port())
        if value in (name, "0.0.0.0"):  # its own name in the network of containers
            return "127.0.0.1"
        if value == "http://jaeger:4318":
            return ""
        value = value.replace("nats://nats:4222", f"nats://127.0.0.1:{self._nats_port}")
        for inside in sorted(mounts, key=len, reverse=True):
            if value.startswith(inside):
                outside = self._directory / mounts[inside]
                outside.mkdir(exist_ok=True)
                return str(outside) + value.removeprefix(inside)
        return value


def _mounts(spec: dict[str, Any]) -> dict[str, str]:
    """Path inside → volume."""
    return dict(volume.split(":")[:2][::-1] for volume in spec.get("volumes", []))


@asynccontextmanager
async def server(directory: Path, port: int) -> AsyncIterator[None]:
    """The compose file's nats-server with the compose file's configuration and passwords."""
    spec = compose()["services"]["nats"]
    source, inside = spec["volumes"][0].split(":")[:2]
    here = {inside: str(ROOT / source), "/data": str(directory / "data")}
    arguments = [here.get(part, part) for part in spec["command"]]
    own = ["--addr", "127.0.0.1", "--port", str(port), "--http_port", str(free_port())]
    command = [str(natsserver.find_binary()), *arguments, *own]
    async with listening(port, directory / "nats.log", command, spec["environment"]):
        yield


@asynccontextmanager
async def containers(directory: Path, nats_port: int) -> AsyncIterator[None]:
    here = Containers(directory, nats_port)
    async with server(directory, nats_port):
        running: list[asyncio.Task[None]] = []
        try:
            for name, spec in ours().items():
                environment = here.environment(name, spec)
                log = directory / f"{name}.log"
                if "command" in spec:  # it makes something, and ends
                    script, *arguments = here.command(spec)
                    command = [str(Path(sys.executable).with_name(script)), *arguments]
                    await completed(log, command, environment)
                    continue
                command = image_command(service_of(spec))
                assert spec["restart"] == "unless-stopped", name
                running.append(asyncio.create_task(restarted(log, command, environment)))
            yield
        except Exception as error:
            error.add_note(last_words(directory))
            raise
        finally:
            for task in reversed(running):
                task.cancel()
                await asyncio.wait([task])


async def test_job_trains_on_what_the_compose_file_starts(tmp_path: Path, short_dir: Path) -> None:
    settings = short(TASK, steps=1)
    port = free_port()
    reports = Reports()
    async with containers(short_dir, port):
        password = compose()["services"]["nats"]["environment"]["PHASELOOM_DEMO_PASSWORD"]
        async with client.connect(f"nats://127.0.0.1:{port}", "demo", password) as mesh:
            job = await mesh.submit_job(TASK, deployments(settings))
            await train(job, TASK, settings, reports, no_barrier)
            await job.finish()
    alone = await asyncio.to_thread(oracle, TASK, settings, tmp_path)
    assert reports.weights_sha256 == alone


def test_server_configuration_has_the_accounts_of_the_mesh() -> None:
    text = (ROOT / "deploy/nats/nats.conf").read_text()
    body = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    settings = json.loads(re.sub(r": (\$\w+)", r': "\1"', body))
    expected = natsserver.accounts("$PHASELOOM_MESH_PASSWORD", {"demo": "$PHASELOOM_DEMO_PASSWORD"})
    assert settings["accounts"] == expected
    assert settings["max_payload"] == MAX_PAYLOAD_BYTES
    assert settings["jetstream"] == natsserver.SYNCED


def test_with_three_servers_every_service_knows_them_all() -> None:
    changed = compose(THREE)["services"]
    servers = ["nats", "nats-2", "nats-3"]
    assert changed.keys() == ours().keys() - {"certificates"} | {*servers}
    for name in ours().keys() - {"certificates"}:
        said = changed[name]["environment"]
        assert said["PHASELOOM_BUS_URL"] == ",".join(f"nats://{n}:4222" for n in servers), name
        assert said["PHASELOOM_BUS_REPLICAS"] == "3", name
        assert ("PHASELOOM_WORKER_LEASE_TTL_S" in said) == name.startswith("worker"), name


async def test_three_servers_of_the_compose_file_find_one_another(tmp_path: Path) -> None:
    (config,) = {str(compose(THREE)["services"][n]["command"][1]) for n in ("nats", "nats-2")}
    names = {"nats": free_port(), "nats-2": free_port(), "nats-3": free_port()}
    routes = {name: free_port() for name in names}
    for file in (ROOT / "deploy/nats").iterdir():
        shutil.copy(file, tmp_path)
    text = (tmp_path / Path(config).name).read_text()
    async with AsyncExitStack() as running:
        for name, port in names.items():
            file = tmp_path / f"of-{name}.conf"
            file.write_text(text.replace("port: 6222", f"host: 127.0.0.1, port: {routes[name]}"))
            said = dict(compose(THREE)["services"][name]["environment"])
            for other, route in routes.items():
                said["PHASELOOM_NATS_ROUTES"] = said["PHASELOOM_NATS_ROUTES"].replace(
                    f"@{other}:6222", f"@127.0.0.1:{route}"
                )
            own = ["--addr", "127.0.0.1", "--port", str(port), "--http_port", str(free_port())]
            place = ["--config", str(file), "--store_dir", str(tmp_path / name)]
            command = [str(natsserver.find_binary()), *place, *own]
            log = tmp_path / f"{name}.log"
            await running.enter_async_context(listening(port, log, command, said))
        url = ",".join(f"nats://127.0.0.1:{port}" for port in names.values())
        password = said["PHASELOOM_MESH_PASSWORD"]
        bus = await Bus.open(BusConfig(url, "mesh", password, replicas=3), "test")
        cluster = (await bus.js.stream_info(SCHED)).cluster
        assert cluster is not None
        assert len(cluster.replicas or []) == 2
        await bus.close()


def test_images_are_small_and_not_root() -> None:
    for name, spec in ours().items():
        assert ROOT / spec["build"]["dockerfile"] == DOCKERFILE, name
    assert {service_of(spec) for spec in ours().values()} == services()
    assert instruction("USER") == "10001:10001"
    assert "/healthz" in instruction("HEALTHCHECK")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    torch = {name for name in services() if "torch" in str(extras.get(name))}
    assert torch == {"worker"}


def test_with_gpus_every_worker_has_one_of_its_own_and_works_on_it() -> None:
    workers = {name for name in ours() if name.startswith("worker-")}
    changed = compose(GPU)["services"]
    assert changed.keys() == workers
    gpus = []
    for name, spec in changed.items():
        assert spec["environment"] == {"PHASELOOM_WORKER_DEVICE_KIND": "cuda"}, name
        (device,) = spec["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"]), name
        gpus += device["device_ids"]
    assert len(set(gpus)) == len(workers)


def test_kind_of_devices_and_site_are_said_once_for_all_nodes() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    for variable, key in (
        ("PHASELOOM_DEVICE_KIND", "PHASELOOM_WORKER_DEVICE_KIND"),
        ("PHASELOOM_SITE", "PHASELOOM_STATEMGR_SITE"),
    ):
        assert text.count("${" + variable) == 1
        values = [s["environment"][key] for s in ours().values() if key in s["environment"]]
        assert len(values) == 2, "of each node"


def test_services_that_scale_have_no_name_or_port_of_their_own() -> None:
    for name in ("router", "scheduler", "gateway"):
        assert not {"container_name", "ports"} & set(ours()[name])


def test_front_finds_every_gateway_where_it_listens() -> None:
    spec = compose()["services"]["front"]
    source, inside = spec["volumes"][0].split(":")[:2]
    assert inside == "/usr/local/etc/haproxy/haproxy.cfg", "where the image reads it"
    settings = (ROOT / source).read_text()
    port = image_environment()["PHASELOOM_GATEWAY_PORT"]
    assert re.search(rf"\bserver-template \S+ \d+ gateway:{port} check\b", settings)
    assert spec["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert f"bind :{port}\n" in settings


def test_prometheus_finds_every_service_by_one_name() -> None:
    settings = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    (source,) = settings["scrape_configs"][0]["dns_sd_configs"]
    assert str(source["port"]) == image_environment()["PHASELOOM_METRICS_PORT"]
    for name, spec in ours().items():
        assert spec["networks"]["default"]["aliases"] == source["names"], name


@pytest.mark.skipif(not shutil.which("haproxy"), reason="needs haproxy")
def test_settings_of_the_front_are_valid() -> None:
    done = subprocess.run(
        ["haproxy", "-c", "-f", ROOT / "deploy/haproxy/haproxy.cfg"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not shutil.which("docker-compose"), reason="needs docker-compose")
@pytest.mark.parametrize("beside", [[], [THREE], [GPU], [THREE, GPU]], ids="-".join)
def test_compose_files_are_valid_together(beside: list[str]) -> None:
    """And the merged file has each service whole: with its image, and what it had alone."""
    files = [part for name in ("docker-compose.yml", *beside) for part in ("-f", name)]
    done = subprocess.run(
        ["docker-compose", *files, "config"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    merged = yaml.safe_load(done.stdout)["services"]
    assert merged.keys() == set().union(*(compose(n)["services"] for n in files[1::2]))
    for name, spec in compose()["services"].items():
        assert merged[name].get("image") == spec.get("image"), name
        assert spec.get("environment", {}).keys() <= merged[name].get("environment", {}).keys()
        assert set(spec.get("depends_on", [])) <= merged[name].get("depends_on", {}).keys(), name


@pytest.mark.skipif(not shutil.which("npm"), reason="needs npm")
def test_compose_file_passes_its_linter(tmp_path: Path) -> None:
    for name in ("docker-compose.yml", ".dclintrc.yaml"):
        shutil.copy(ROOT / name, tmp_path / name)
    commands = (
        ["npm", "install", "--no-audit", "--no-fund", "--no-save", "dclint@^3.1.0"],
        ["node_modules/.bin/dclint", "--max-warnings", "0", "docker-compose.yml"],
    )
    for command in commands:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_dockerfile_passes_its_linter() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([linter, DOCKERFILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
