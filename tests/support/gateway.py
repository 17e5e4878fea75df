"""A mesh with a gateway, and what a user has of it: an address and an API key."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace

from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.processes import api_key
from phaseloom.cli.supervisor import Mesh
from phaseloom.common.process import config as configuration
from tests.support.jobs import TENANT
from tests.support.pretrained import save_model
from tests.support.processes import free_port

OTHER = "other"
TEMPLATE = "{% for each in messages %}{{ each.content }} {% endfor %}"
SDK_CHILD = Path(__file__).parents[1] / "integration" / "gateway" / "sdk_child.py"
_NODES = [
    NodeConfig("rollout-0", "rollout", [16 * 2**20]),
    NodeConfig("train-0", "train", [16 * 2**20]),
]
_MAX_JOBS = 20
"""So many of a program's jobs fit beside those that programs before it have left."""


@dataclass(frozen=True)
class Served:
    mesh: Mesh
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def key(self, tenant: str = TENANT) -> str:
        return api_key(self.mesh.credentials.tenants[tenant])

    async def start_sdk(
        self, *words: str, python: Path = Path(sys.executable), cwd: Path | None = None
    ) -> asyncio.subprocess.Process:
        """A program that uses the Tinker SDK, or OpenAI's.

        Args: words: the program's, for the interpreter.
        """
        return await asyncio.create_subprocess_exec(
            str(python),
            "-W",
            "ignore",
            *words,
            cwd=cwd,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={
                **configuration.inherited(),
                "PATH": os.environ["PATH"],
                "TINKER_BASE_URL": self.url,
                "TINKER_API_KEY": self.key(),
                "TINKER_TELEMETRY": "0",
                "OPENAI_BASE_URL": f"{self.url}/v1",
                "OPENAI_API_KEY": self.key(),
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
            },
        )

    async def sdk(self, *part: str, python: Path = Path(sys.executable)) -> dict[str, Any]:
        """What a part of `sdk_child.py` tells in the end; on stderr it says how far it is."""
        return await told(await self.start_sdk(str(SDK_CHILD), *part, python=python))


def check_whole(said: dict[str, Any]) -> None:
    """Check what the part `whole` of `sdk_child.py`, or `full`, tells of any backends."""
    # Without gradients a processor may have other kernels, which round otherwise: AVX-512 has them.
    assert said["losses"][0] == pytest.approx(said["before"], rel=1e-6)
    assert said["losses"][-1] < 0.01 * said["before"]
    assert said["shapes"] == [[7]]
    assert said["sampled"] == said["named"] == said["earlier"] == [9, 2, 7, 3, 11, 4]
    assert said["newer"] == said["sampled"]
    assert said["base"] != said["sampled"]
    assert said["difference"] <= 1e-6
    assert len(said["drawn"]) == 3
    assert len(set(said["loaded"])) == 1
    own, with_optimizer, without = said["went_on"]
    assert own == with_optimizer != without
    assert said["custom"]["mine"] == 1.0
    for loss in ("importance_sampling", "ppo", "cispo", "dro"):
        metrics = said[loss]
        assert metrics["num_tokens:sum"] == 7
        assert metrics["gap_abs:sum"] >= metrics["gap:max"] >= abs(metrics["kl_k1:sum"]) / 7
        assert metrics["kl_k3:sum"] > 0 < metrics["ratio:max"]
        assert metrics["clipped:sum"] in range(8)
    assert "unknown loss 'kto'" in said["refused"]
    assert "partial gradients are dropped" in said["partial"]
    assert said["after"] > 0.0
    assert said["runs"] == 4
    assert said["listed"] == said["paths"]
    assert "NotFoundError" in said["gone"]
    assert said["both"] == [said["newer"], said["base"]]
    assert "there is no model 'none'" in said["unknown_model"]
    assert "NotFoundError" in said["unknown_path"]


async def ended(process: asyncio.subprocess.Process) -> bytes:
    """What the program has written on stdout."""
    said, complaints = await process.communicate()
    assert process.returncode == 0, complaints.decode()[-4000:]
    return said


async def told(process: asyncio.subprocess.Process) -> dict[str, Any]:
    """The JSON object that the program told in the end."""
    answer: dict[str, Any] = msgspec.json.decode(await ended(process))
    return answer


@asynccontextmanager
async def serving(
    directory: Path,
    session_s: float = 600.0,
    replicas: int = 1,
    port: int = 0,
    interpreters: dict[str, str] | None = None,
    **models: Path,
) -> AsyncIterator[Served]:
    """A mesh with a gateway, the registered model `tiny`, which has a chat template, and others.

    Where there was one in the directory, this goes on with what that one has left.

    Args: interpreters: of the nodes.
    """
    model = directory / "model"
    if not model.exists():
        await asyncio.to_thread(save_model, model, torch.float32)
        (model / "chat_template.jinja").write_text(TEMPLATE)
    names = {name: str(path) for name, path in {"tiny": model, **models}.items()}
    port = port or free_port()
    config = MeshConfig(
        nodes=[replace(node, interpreters=interpreters or {}) for node in _NODES],
        tenants=[TENANT, OTHER],
        models=names,
        gateway_port=port,
        gateways=replicas,
        gateway_session_s=session_s,
        max_group_jobs=_MAX_JOBS,
        fsync=False,
    )
    async with Mesh(config, directory / "run") as mesh:
        await mesh.ready()
        yield Served(mesh, port)
