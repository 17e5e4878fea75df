"""The images of the compose file, built for real, run the demo's two jobs.

    apt-get install podman runc debootstrap catatonit netavark aardvark-dns iptables
    .venv/bin/pytest -n 0 tests/integration/test_images.py

as root. The images of other projects (NATS, HAProxy, Jaeger, Prometheus, Grafana) are not built
here: the server's binary stands in for the first, and jobs do not need the others.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from grpo import deployments, train

from phaseloom import client
from phaseloom.common.transport import natsserver
from tests.integration.test_compose import compose, ours, service_of
from tests.support import images
from tests.support.containers import ROOT, can_connect, instruction, services
from tests.support.jobs import TASKS, Reports, no_barrier, short
from tests.support.processes import free_port

STEPS = 2
PREFIX = "phaseloom-test"
CONSOLE_PORT = 8900

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(images.missing() != "", reason=f"lacks {images.missing()}"),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The image of each service, by the name of its directory."""
    directory = tmp_path_factory.mktemp("images")
    images.settings_of_podman(directory)
    images.make_base(directory)
    return {name: images.build(name, directory) for name in sorted(services())}


@dataclass(frozen=True)
class Ports:
    """The ports of this machine at which the containers are reached."""

    nats: int
    console: int


@pytest.fixture(scope="module")
def mesh(built: dict[str, str]) -> Iterator[Ports]:
    ports = Ports(free_port(), free_port())
    with running(built, ports):
        yield ports


@contextmanager
def running(built: dict[str, str], ports: Ports) -> Iterator[None]:
    """The compose file's services on a network of their own."""
    started: list[str] = []
    volumes = {
        volume.split(":")[0] for spec in ours().values() for volume in spec.get("volumes", [])
    }
    images.run("podman", "network", "create", PREFIX)
    try:
        started.append(f"{PREFIX}-nats")
        images.run("podman", "run", "--detach", *server(ports.nats))
        wait_for(ports.nats)
        for name, spec in ours().items():
            service = service_of(spec)
            is_service = spec["restart"] != "no"
            command = ["run", *["--detach"] * is_service]
            command += images.run_arguments(name, without_jaeger(spec), PREFIX, PREFIX)
            if name == "console":
                command.append(f"--publish=127.0.0.1:{ports.console}:{CONSOLE_PORT}")
            started.append(f"{PREFIX}-{name}")
            images.run("podman", *command, built[service], *spec.get("command", []))
        yield
    except BaseException as error:
        for name in started:
            logs = ["podman", "logs", "--tail=20", name]
            said = subprocess.run(logs, capture_output=True, text=True, check=False)
            error.add_note(f"{name}:\n{said.stdout}{said.stderr}")
        raise
    finally:
        of_volumes = [["volume", "rm", "--force", f"{PREFIX}-{volume}"] for volume in volumes]
        images.remove(started, *of_volumes, ["network", "rm", "--force", PREFIX])


def without_jaeger(spec: dict[str, Any]) -> dict[str, Any]:
    """A service that sends its traces nowhere."""
    environment = dict(spec["environment"])
    environment.pop("PHASELOOM_TELEMETRY_OTLP_ENDPOINT", None)
    return {**spec, "environment": environment}


def server(port: int) -> list[str]:
    """The compose file's server. Its image is another project's; the binary is the same."""
    spec = compose()["services"]["nats"]
    source, inside, mode = spec["volumes"][0].split(":")
    return [
        f"--name={PREFIX}-nats",
        f"--network={PREFIX}",
        "--network-alias=nats",
        f"--publish=127.0.0.1:{port}:4222",
        "--tmpfs=/data",
        f"--volume={ROOT / source}:{inside}:{mode}",
        f"--volume={natsserver.find_binary()}:/usr/local/bin/nats-server:ro",
        *(f"--env={key}={value}" for key, value in spec["environment"].items()),
        images.BASE,
        "nats-server",
        *spec["command"],
    ]


def wait_for(port: int) -> None:
    async def connects() -> None:
        async with asyncio.timeout(60):
            while not can_connect(port):
                await asyncio.sleep(0.05)

    asyncio.run(connects())


def test_the_demo_trains_in_the_images(mesh: Ports, expected: dict[str, str]) -> None:
    password = compose()["services"]["nats"]["environment"]["PHASELOOM_DEMO_PASSWORD"]

    async def both() -> dict[str, str]:
        url = f"nats://127.0.0.1:{mesh.nats}"
        async with client.connect(url, "demo", password) as connected:
            shas = await asyncio.gather(*(one(connected, task) for task in TASKS))
        return dict(zip(TASKS, shas, strict=True))

    async def one(connected: client.Mesh, task: str) -> str:
        reports = Reports()
        settings = short(task, STEPS)
        job = await connected.submit_job(task, deployments(settings))
        await train(job, task, settings, reports, no_barrier)
        await job.finish()
        return reports.weights_sha256

    assert asyncio.run(both()) == expected


def test_every_service_is_well_by_its_images_own_check(mesh: Ports) -> None:
    """After the demo: each container has run all that time, under the limits that compose sets."""
    for name, spec in ours().items():
        if spec["restart"] == "no":
            continue
        check = json.loads(instruction("HEALTHCHECK").partition("CMD ")[2])
        images.run("podman", "exec", f"{PREFIX}-{name}", *check)
        restarts = images.run(
            "podman", "inspect", "--format", "{{.RestartCount}}", f"{PREFIX}-{name}"
        )
        assert restarts.strip() == "0", name


def test_console_shows_the_jobs_from_its_image(mesh: Ports) -> None:
    key = ours()["console"]["environment"]["PHASELOOM_CONSOLE_OPERATOR_KEY"]
    asked = urllib.request.Request(
        f"http://127.0.0.1:{mesh.console}/api/jobs", headers={"Authorization": f"Bearer {key}"}
    )
    with urllib.request.urlopen(asked, timeout=30) as answer:
        jobs = {row["job"] for row in json.load(answer)}
    assert jobs >= {f"demo.{task}" for task in TASKS}
    with urllib.request.urlopen(f"http://127.0.0.1:{mesh.console}/", timeout=30) as page:
        assert b"static/console.js" in page.read()


def test_images_do_not_run_as_root(built: dict[str, str]) -> None:
    assert built.keys() == {service_of(spec) for spec in ours().values()}
    for service, image in built.items():
        inspected = images.run("podman", "image", "inspect", "--format", "{{.User}}", image)
        assert inspected.strip() == "10001:10001", service
