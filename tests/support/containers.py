"""Containers as plain processes: what an image runs, under its restart policy, on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from phaseloom.common.process.lifecycle import DIE_WITH_PARENT

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "services/Dockerfile"
RESTART_PAUSE_S = 0.1
"""The first pause of a container runtime; it grows, where a container ends again and again."""
LAST_LINES = 20


def instruction(name: str) -> str:
    """Return the Dockerfile's last instruction of this name, its lines joined."""
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if line.startswith(f"{name} ")][-1][len(name) + 1 :]


def services() -> set[str]:
    return {path.parents[2].name for path in ROOT.glob("services/*/phaseloom/*/main.py")}


def image_command(service: str) -> list[str]:
    """Return what the image of a service runs, with this Python."""
    shell, option, script = json.loads(instruction("CMD"))
    assert (shell, option) == ("sh", "-c")
    execute, _, *arguments = script.replace("$SERVICE", service).split()
    assert execute == "exec"
    return [sys.executable, *arguments]


def image_environment() -> dict[str, str]:
    """Return the variables that the image sets; PATH is the machine's own."""
    pairs = [pair for pair in instruction("ENV").split() if "=" in pair]
    variables = dict(pair.split("=", 1) for pair in pairs)
    del variables["PATH"], variables["SERVICE"]
    return variables


@asynccontextmanager
async def process(
    log: Path, command: Sequence[str | Path], environment: Mapping[str, str]
) -> AsyncIterator[asyncio.subprocess.Process]:
    with log.open("ab") as output:
        started = await asyncio.create_subprocess_exec(
            *command,
            cwd=log.parent,
            env={**os.environ, **environment, DIE_WITH_PARENT: str(os.getpid())},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield started
    finally:
        with suppress(ProcessLookupError):
            started.terminate()
        await started.wait()


async def completed(
    log: Path, command: Sequence[str | Path], environment: Mapping[str, str]
) -> None:
    """Run a container that makes something and ends."""
    async with process(log, command, environment) as making:
        assert await making.wait() == 0, last_words(log.parent)


async def restarted(
    log: Path, command: Sequence[str | Path], environment: Mapping[str, str]
) -> None:
    """Run a service, again whenever it ends, until cancelled.

    A node's agent relies on it: one that could not renew its lease in time ends.
    """
    while True:
        async with process(log, command, environment) as running:
            await running.wait()
        await asyncio.sleep(RESTART_PAUSE_S)


def last_words(directory: Path) -> str:
    """What the processes have warned of, for whoever looks at a run that failed."""
    lines = []
    for log in sorted(directory.glob("*.log")):
        said = [line for line in log.read_text().splitlines() if '"level": "INFO"' not in line]
        lines += [f"{log.name}: {line}" for line in said[-LAST_LINES:]]
    return "\n".join(lines)


@asynccontextmanager
async def listening(
    port: int, log: Path, command: Sequence[str | Path], environment: Mapping[str, str]
) -> AsyncIterator[None]:
    """Run a server that takes connections within the block."""
    async with process(log, command, environment):
        async with asyncio.timeout(60):
            while not can_connect(port):
                await asyncio.sleep(0.02)
        yield


def can_connect(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
