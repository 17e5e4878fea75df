"""The images of the compose file, built for real, run the demo's two jobs."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from grpo import deployments, train

from phaseloom import client
from phaseloom.common.transport import natsserver
from tests.integration.test_compose import compose, ours
from tests.support import images
from tests.support.containers import ROOT, can_connect
from tests.support.jobs import TASKS, Reports, no_barrier, short
from tests.support.processes import free_port

STEPS = 2
PREFIX = "phaseloom-test"
LEFT_OUT = {"console", "front", "jaeger"}
"""Services that the jobs do not need."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(images.missing() != "", reason=f"lacks {images.missing()}"),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The image of each service, by the name of its directory."""
    directory = tmp_path_factory.mktemp("images")
    images.settings_of_podman(directory)
    images.make_base(directory)
    used = [spec for name, spec in ours().items() if name not in LEFT_OUT]
    dockerfiles = {Path(spec["build"]["dockerfile"]) for spec in used}
    return {file.parent.name: images.build(file.parent.name, directory) for file in dockerfiles}


@contextmanager
def running(built: dict[str, str], port: int) -> Iterator[None]:
    """The compose file's services on a network of their own, the server at a port of this
    machine."""
    started: list[str] = []
    volumes = {
        volume.split(":")[0] for spec in ours().values() for volume in spec.get("volumes", [])
    }
    images.run("podman", "network", "create", PREFIX)
    try:
        started.append(f"{PREFIX}-nats")
        images.run("podman", "run", "--detach", *server(port))
        wait_for(port)
        for name, spec in ours().items():
            if name in LEFT_OUT:
                continue
            service = Path(spec["build"]["dockerfile"]).parent.name
            is_service = spec["restart"] != "no"
            command = ["run", *["--detach"] * is_service]
            command += images.run_arguments(name, without_jaeger(spec), PREFIX, PREFIX)
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


def test_the_demo_trains_in_the_images(built: dict[str, str], expected: dict[str, str]) -> None:
    port = free_port()
    password = compose()["services"]["nats"]["environment"]["PHASELOOM_DEMO_PASSWORD"]

    async def both() -> dict[str, str]:
        url = f"nats://127.0.0.1:{port}"
        async with client.connect(url, "demo", password) as mesh:
            shas = await asyncio.gather(*(one(mesh, task) for task in TASKS))
        return dict(zip(TASKS, shas, strict=True))

    async def one(mesh: client.Mesh, task: str) -> str:
        reports = Reports()
        settings = short(task, STEPS)
        job = await mesh.submit_job(task, deployments(settings))
        await train(job, task, settings, reports, no_barrier)
        await job.finish()
        return reports.weights_sha256

    with running(built, port):
        assert asyncio.run(both()) == expected


def test_images_do_not_run_as_root(built: dict[str, str]) -> None:
    for service, image in built.items():
        inspected = images.run("podman", "image", "inspect", "--format", "{{.User}}", image)
        assert inspected.strip() == "10001:10001", service
