"""The Node example trains on a mesh: any language with a NATS client can be a controller."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from phaseloom.cli.meshconfig import MeshConfig
from phaseloom.cli.supervisor import Mesh
from tests.support.jobs import TENANT

EXAMPLE = Path(__file__).parents[2] / "examples" / "node"

pytestmark = pytest.mark.skipif(
    not (shutil.which("node") and shutil.which("npm")), reason="needs Node and npm"
)


async def run(directory: Path, *command: str, **environment: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=directory,
        env={**os.environ, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(120):
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


async def test_node_controller_trains(tmp_path: Path) -> None:
    directory = tmp_path / "node"
    shutil.copytree(EXAMPLE, directory, ignore=shutil.ignore_patterns("node_modules"))
    await run(directory, "npm", "install", "--no-audit", "--no-fund", "--no-package-lock")
    async with Mesh(MeshConfig(), tmp_path / "run") as mesh:
        await mesh.ready()
        output = await run(
            directory,
            "node",
            "train.js",
            "12",
            PHASELOOM_URL=mesh.url,
            PHASELOOM_TENANT=TENANT,
            PHASELOOM_PASSWORD=mesh.credentials.tenants[TENANT],
        )
    assert "step 12: loss" in output
    assert "3 4 5 ->" in output
