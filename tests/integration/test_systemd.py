"""The units of deploy/systemd: systemd takes them, and a job runs on what they start."""

from __future__ import annotations

import asyncio
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from phaseloom import client
from phaseloom.cli.accounts import make_accounts
from phaseloom.cli.certs import make_certificates
from phaseloom.common.transport.certificates import directory_of
from tests.support.containers import ROOT, can_connect, last_words, process, services
from tests.support.jobs import NOOP
from tests.support.processes import free_port

UNITS = ROOT / "deploy/systemd"
PREFIX = "/opt/phaseloom/bin/"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    for unit in UNITS.glob("phaseloom*"):
        here = unit.read_text().replace(PREFIX, f"{Path(sys.executable).parent}/")
        (tmp_path / unit.name).write_text(here)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *sorted(tmp_path.iterdir())],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


class Unit:
    """What a unit runs, with the directories of a test in place of the machine's."""

    def __init__(self, name: str, places: dict[str, str]) -> None:
        name, at, self._instance = f"phaseloom-{name}".replace("-@", "@").partition("@")
        self._places = places
        self._lines = [
            self._here(line) for line in (UNITS / f"{name}{at}.service").read_text().splitlines()
        ]

    @property
    def command(self) -> list[str]:
        (command,) = self._values("ExecStart")
        return shlex.split(command)

    @property
    def environment(self) -> dict[str, str]:
        pairs = [pair for value in self._values("Environment") for pair in shlex.split(value)]
        for file in self._values("EnvironmentFile"):
            if file.startswith("-") and not Path(file[1:]).exists():
                continue
            lines = self._here(Path(file.removeprefix("-")).read_text()).splitlines()
            pairs += [shlex.split(line)[0] for line in lines if line and not line.startswith("#")]
        return dict(pair.split("=", 1) for pair in pairs)

    def _values(self, key: str) -> list[str]:
        return [line.partition("=")[2] for line in self._lines if line.startswith(f"{key}=")]

    def _here(self, text: str) -> str:
        text = text.replace("%H", "host").replace("%i", self._instance)
        for there, here in self._places.items():
            text = re.sub(rf"{re.escape(there)}(?=[/\s']|$)", here, text, flags=re.MULTILINE)
        return text


@pytest.mark.usefixtures("noop_nodes")
async def test_job_runs_on_what_the_units_start(short_dir: Path) -> None:
    port = free_port()
    etc = short_dir / "etc"
    places = {
        PREFIX.rstrip("/"): str(Path(sys.executable).parent),
        "/etc/phaseloom": str(etc),
        "/run/phaseloom": str(short_dir / "run"),
        "/var/lib/phaseloom": str(short_dir / "lib"),
        "/mnt/checkpoints": str(short_dir / "checkpoints"),
        "train-0.example.com": "127.0.0.1",
        "[68719476736]": "[16777216]",
        "137438953472": str(2**31),
        "=cuda": "=emulated",
    }
    for name in ("run", "lib/state", "checkpoints"):
        (short_dir / name).mkdir(parents=True)
    made = make_accounts(etc, ("demo",), f"nats://127.0.0.1:{port}")
    conf = (etc / "nats.conf").read_text()
    (etc / "nats.conf").write_text(conf.replace("127.0.0.1:8222", f"127.0.0.1:{free_port()}"))
    make_certificates(short_dir / "certificates", ["train-0"])
    shutil.copytree(directory_of(short_dir / "certificates", "train-0"), etc / "certificates")
    shutil.copy(UNITS / "this-node.env.example", etc / "this-node.env")
    names = ("nats", "scheduler", "router@0", "@profiler", "statemgr", "agent")
    trained = NOOP[:1]  # its pool has a node here
    async with AsyncExitStack() as stack:
        try:
            for name in names:
                unit = Unit(name, places)
                log = short_dir / f"{name}.log"
                running = process(log, unit.command, unit.environment)
                await stack.enter_async_context(running)
                if name == "nats":
                    await until_listening(port)
            async with client.connect(made.url, "demo", made.tenants["demo"]) as mesh:
                job = await mesh.submit_job("noop", trained)
                await job.deployment("policy").optim_step(client.AdamParams(1e-3))
                await job.finish()
        except Exception as error:
            error.add_note(last_words(short_dir))
            raise


async def until_listening(port: int) -> None:
    async with asyncio.timeout(60):
        while not can_connect(port):
            await asyncio.sleep(0.02)


def test_every_service_has_a_unit() -> None:
    modules = {
        match[1]
        for unit in UNITS.glob("*.service")
        for match in re.finditer(r"phaseloom\.(\w+)\.main", unit.read_text())
    }
    modules |= {"profiler", "gateway", "console"}  # of the template
    assert modules == services()
