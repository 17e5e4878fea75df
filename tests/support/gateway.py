"""A mesh with a gateway, and what a user has of it: an address and an API key."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from phaseloom.cli.supervisor import Mesh, MeshConfig, NodeConfig, api_key
from phaseloom.common.process import config as configuration
from tests.support.jobs import TENANT
from tests.support.pretrained import save_model

OTHER = "other"
TEMPLATE = "{% for each in messages %}{{ each.content }} {% endfor %}"
SDK_CHILD = Path(__file__).parents[1] / "integration" / "gateway" / "sdk_child.py"
_NODES = [
    NodeConfig("rollout-0", "rollout", [16 * 2**20]),
    NodeConfig("train-0", "train", [16 * 2**20]),
]


@dataclass(frozen=True)
class Served:
    mesh: Mesh
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def key(self, tenant: str = TENANT) -> str:
        return api_key(self.mesh.credentials.tenants[tenant])

    async def start_sdk(self, part: str) -> asyncio.subprocess.Process:
        """A program that uses the Tinker SDK; it says on stderr how far it is."""
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-W",
            "ignore",
            str(SDK_CHILD),
            part,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={
                **configuration.inherited(),
                "PATH": os.environ["PATH"],
                "TINKER_BASE_URL": self.url,
                "TINKER_API_KEY": self.key(),
                "TINKER_TELEMETRY": "0",
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
            },
        )

    async def sdk(self, part: str) -> dict[str, Any]:
        return await ended(await self.start_sdk(part))


async def ended(process: asyncio.subprocess.Process) -> dict[str, Any]:
    """What the program told in the end."""
    said, complaints = await process.communicate()
    assert process.returncode == 0, complaints.decode()[-4000:]
    told: dict[str, Any] = msgspec.json.decode(said)
    return told


@asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[Served]:
    """A mesh with a gateway and the registered model `tiny`, which has a chat template."""
    model = await asyncio.to_thread(save_model, directory / "model", torch.float32)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    config = MeshConfig(
        nodes=_NODES, tenants=[TENANT, OTHER], models={"tiny": str(model)}, gateway_port=port
    )
    async with Mesh(config, directory / "run") as mesh:
        await mesh.ready()
        yield Served(mesh, port)
