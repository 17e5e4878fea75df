"""A whole mesh of real processes: comes up, keeps running, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from pathlib import Path

import msgspec
import pytest

from phaseloom.cli.meshconfig import MeshConfig, settings_of
from phaseloom.cli.supervisor import Mesh
from phaseloom.client import DeploymentSpec, ModelSpec, connect
from phaseloom.common.contract.codec import decode
from phaseloom.common.contract.errors import ResourceError
from phaseloom.common.contract.events import Notice
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.natsserver import Credentials
from tests.support.pretrained import save_model
from tests.support.processes import descendant_pids, free_port, gone, until_gone

pytestmark = pytest.mark.usefixtures("noop_nodes")

SERVICES = {
    "scheduler",
    "router-0",
    "router-1",
    "profiler",
    "statemgr-rollout-0",
    "worker-rollout-0",
    "statemgr-train-0",
    "worker-train-0",
}


async def test_mesh_comes_up_and_leaves_no_process_when_it_is_stopped(tmp_path: Path) -> None:
    async with Mesh(MeshConfig(), tmp_path) as mesh:
        await mesh.ready()
        pids = mesh.pids()
        assert len(pids) == len(SERVICES) + 1
        assert len(mesh.pids("router")) == 2
        everything = [*pids, *(pid for parent in pids for pid in descendant_pids(parent))]
        state = json.loads((tmp_path / "mesh.json").read_text())
        assert state["url"] == mesh.url
        assert set(state["pids"]) == SERVICES | {"nats"}
        assert sorted(state["pids"].values()) == sorted(pids)
    await until_gone(everything, timeout_s=30)
    assert {file.stem for file in (tmp_path / "logs").iterdir()} == SERVICES
    for file in (tmp_path / "logs").iterdir():
        assert " stopped after " in file.read_text().splitlines()[-1], file


async def test_mesh_starts_a_killed_service_again_and_says_so(tmp_path: Path) -> None:
    async with Mesh(MeshConfig(), tmp_path) as mesh:
        await mesh.ready()
        observer = await Bus.open(mesh.credentials.bus, "observer")
        heard = await observer.client.subscribe("pl.v1.event.supervisor")
        await observer.client.flush()
        (killed,) = mesh.kill("router-0")
        notice = decode((await heard.next_msg(timeout=60)).data, Notice)
        assert (notice.what, notice.subject) == ("restarted", "router-0")
        assert notice.reason.startswith("SIGKILL after")
        async with asyncio.timeout(60):
            while not mesh.pids("router-0"):
                await observer.client.flush()
        assert mesh.pids("router-0") != [killed]
        await observer.close()


async def test_mesh_keeps_its_address_when_the_server_is_killed(tmp_path: Path) -> None:
    """The services reconnect; the file streams and who may connect are as before."""
    async with Mesh(MeshConfig(), tmp_path) as mesh:
        await mesh.ready()
        url = mesh.url
        (killed,) = mesh.kill("nats")
        await until_gone([killed], timeout_s=30)
        await mesh.ready()
        assert mesh.url == url
        (again,) = mesh.pids("nats")
        assert again != killed


async def test_mesh_starts_again_what_is_killed_while_the_server_is_away(tmp_path: Path) -> None:
    async with Mesh(MeshConfig(), tmp_path) as mesh:
        await mesh.ready()
        killed = [*mesh.kill("router-0"), *mesh.kill("nats")]
        async with asyncio.timeout(60):
            while len({*mesh.pids("router-0"), *mesh.pids("nats")} - {*killed}) < len(killed):
                await asyncio.sleep(0.001)
            while sorted(written_pids(tmp_path)) != sorted(mesh.pids()):
                await asyncio.sleep(0.001)
        await mesh.ready()


def written_pids(run: Path) -> list[int]:
    pids: dict[str, int] = json.loads((run / "mesh.json").read_text())["pids"]
    return list(pids.values())


async def test_mesh_says_what_is_missing_when_a_service_does_not_come_up(tmp_path: Path) -> None:
    config = MeshConfig(ordering="no_such_policy")
    async with Mesh(config, tmp_path) as mesh:
        log, missing = "", ""
        async with asyncio.timeout(120):
            while "no_such_policy" not in log or ": no answer from scheduler;" not in missing:
                with pytest.raises(ResourceError) as error:
                    await mesh.ready(timeout_s=1)
                missing = str(error.value)
                log = (tmp_path / "logs" / "scheduler.log").read_text()
    assert "Traceback" not in log


async def test_mesh_is_ready_only_when_its_own_gateway_and_nodes_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when something else has the port, nor for nodes of an earlier run in the directory."""
    port = free_port()
    stranger = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", port)
    config = MeshConfig(gateway_port=port, fsync=False)
    async with Mesh(config, tmp_path) as mesh:
        assert await missing_but(mesh, "gateway") == "gateway"
        stranger.close()
        await stranger.wait_closed()
        await mesh.ready()
    monkeypatch.setenv("PHASELOOM_WORKER_PRELOAD", "no agent starts with this")
    async with Mesh(config, tmp_path) as mesh:
        assert await missing_but(mesh, "node") == "node rollout-0, node train-0"
    assert settings_of(tmp_path) == config


async def missing_but(mesh: Mesh, what: str) -> str:
    """What is missing when all else is up."""
    missing = ""
    async with asyncio.timeout(120):
        while not missing or not all(each.startswith(what) for each in missing.split(", ")):
            with pytest.raises(ResourceError) as error:
                await mesh.ready(timeout_s=1)
            missing = str(error.value).partition(": no answer from ")[2].partition(";")[0]
    return missing


NOOP = DeploymentSpec("policy", "train", "noop", ModelSpec({}))


async def start_up(tmp_path: Path, *options: str) -> tuple[asyncio.subprocess.Process, Path]:
    """`phaseloom up` as a user starts it, once it has said that the mesh is up; its run."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "from phaseloom.cli.main import main; main()",
        "up",
        "--runs",
        str(tmp_path),
        *options,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    async for line in process.stdout:
        if b"PHASELOOM_PASSWORD=" in line:
            return process, tmp_path / "latest"
    raise AssertionError("phaseloom up ended")


@pytest.mark.usefixtures("noop_nodes", "cold_nodes")
async def test_up_prints_how_to_connect_and_ctrl_c_stops_everything(tmp_path: Path) -> None:
    model = await asyncio.to_thread(save_model, tmp_path / "model")
    process, run = await start_up(tmp_path, "--model", f"Org/tiny={model}")
    everything = descendant_pids(process.pid)
    assert len(everything) >= len(SERVICES) + 2, "and the gateway"
    process.send_signal(signal.SIGINT)
    output, _ = await process.communicate()
    assert process.returncode == 0
    assert b"console: http://127.0.0.1:" in output
    assert b"stopping" in output
    (chat,) = [line for line in output.decode().splitlines() if line.startswith("curl ")]
    *_, body = shlex.split(chat)
    assert json.loads(body)["model"] == "Org/tiny"
    (training,) = [line for line in output.decode().splitlines() if " && TINKER_" in line]
    *_, python, example, option, name = shlex.split(training)
    assert (python, option, name) == (sys.executable, "--model", "Org/tiny")
    assert await asyncio.to_thread(Path(example).is_file)
    assert b"Org/tiny: " in output, "what fits"
    await until_gone(everything, timeout_s=30)
    assert not (run / "s").exists()


@pytest.mark.usefixtures("noop_nodes", "cold_nodes")
async def test_nothing_is_left_when_up_is_killed(tmp_path: Path) -> None:
    """kill -9 of the parent: the kernel ends its children, ranks end with their agent."""
    process, run = await start_up(tmp_path, "--console-port", "0")
    credentials = msgspec.json.decode((run / "credentials.json").read_bytes(), type=Credentials)
    async with connect(credentials.url, "demo", credentials.tenants["demo"]) as mesh:
        before = set(descendant_pids(process.pid))
        await mesh.submit_job("bench", [NOOP])
    everything = descendant_pids(process.pid)
    assert set(everything) - before, "the rank"
    named = set(json.loads((run / "mesh.json").read_text())["pids"].values())
    assert named <= set(everything)
    os.kill(process.pid, signal.SIGKILL)
    await process.communicate()
    await until_gone(everything, timeout_s=30)
    assert all(gone(pid) for pid in named)
