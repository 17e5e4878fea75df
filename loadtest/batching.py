"""The gain of decoding operations together: sixteen one-prompt `generate` in flight against one.

It is measured on the sampler itself, a small model on one emulated device, through the whole mesh.
Alone, sixteen take sixteen times as long as one; batched they may take at most six times as long.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from pathlib import Path
from statistics import median

from loadtest.rawchain import TENANT
from loadtest.records import Record
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.supervisor import Mesh
from phaseloom.client import connect
from phaseloom.common.contract.operations import Prompt, SamplingParams
from phaseloom.common.contract.specs import Batching, DeploymentSpec, ModelSpec
from phaseloom.common.process import config

IN_FLIGHT = 16
MAX_TOKENS = 32
MODEL: dict[str, object] = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 0,
}
"""About 0.9 million parameters."""
_POOL = "rollout"
_DEVICE_BYTES = 64 * 2**20
_PROMPT_TOKENS = 16
_LIMIT = f"one of these operations, of {MAX_TOKENS} new tokens"


async def measure(directory: Path, num_rounds: int) -> list[Record]:
    """Measure one operation and sixteen at once, and record the medians over rounds.

    Args: directory: an existing directory for the mesh's store and logs.
    """
    config.set_for_children("PHASELOOM_TELEMETRY_SAMPLE_RATIO", "0")
    mesh_config = MeshConfig(
        nodes=[NodeConfig("bench-0", _POOL, [_DEVICE_BYTES])], tenants=[TENANT], routers=1
    )
    async with Mesh(mesh_config, directory / "batching") as mesh:
        await mesh.ready()
        password = mesh.credentials.tenants[TENANT]
        async with connect(mesh.url, TENANT, password) as controller:
            spec = DeploymentSpec(
                "sampler", _POOL, "sampler", ModelSpec(MODEL), batching=Batching.SHARED
            )
            job = await controller.submit_job("batching", [spec])
            sampler = job.deployment("sampler")
            sampling = SamplingParams(MAX_TOKENS, ignore_eos=True)

            async def seconds(count: int) -> float:
                started_s = time.perf_counter()
                async with asyncio.TaskGroup() as group:
                    for number in range(count):
                        prompt = Prompt([1 + number] * _PROMPT_TOKENS, seed=number)
                        group.create_task(_done(sampler.generate([prompt], sampling)))
                return time.perf_counter() - started_s

            await seconds(IN_FLIGHT)
            pairs = [(await seconds(IN_FLIGHT), await seconds(1)) for _ in range(num_rounds)]
            await job.finish()
    return [
        Record(
            name=f"generate_{IN_FLIGHT}_in_flight",
            value=round(1e3 * median(many for many, _ in pairs), 3),
            unit="ms",
            limit=_LIMIT,
            limit_value=round(1e3 * median(one for _, one in pairs), 3),
            ratio=round(median(many / one for many, one in pairs), 3),
            aim="≤ 6",
        )
    ]


async def _done(handle: Awaitable[object]) -> None:
    await handle
