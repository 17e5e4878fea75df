"""Calls through the Tinker SDK and the gateway, beside the same through our own client.

Both have a job of their own with the same tiny model, on one mesh, and take turns. What is measured
is the way: the SDK, HTTP, the gateway, and the mesh behind all of it. In the end the SDKs of two
tenants make their calls at the same time.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from loadtest.records import Machine, describe
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.processes import api_key
from phaseloom.cli.supervisor import Mesh
from phaseloom.client import (
    AdamParams,
    Batching,
    Datum,
    Deployment,
    DeploymentSpec,
    Loss,
    ModelSpec,
    Prompt,
    SamplingParams,
    connect,
)
from phaseloom.common.process import config, diewithparent

TENANT = "demo"
OTHER = "other"
TOKENS = [1, 5, 9, 2, 7, 3, 11, 4]
_IN_FLIGHT = 256
_LONG = 50
_VOCAB = 29
_MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": _VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


class Settings(msgspec.Struct, frozen=True):
    rounds: int = 7
    calls: int = 30
    """Calls of each kind in a round, one at a time."""
    large: int = 20_000
    """Datums of the large batch, of 50 tokens each."""


class Way(msgspec.Struct, frozen=True):
    """What one way took."""

    seconds: dict[str, float]
    """The median of each kind of call."""
    in_flight_s: float
    """256 samples of one prompt, all asked for before the first is answered; the median."""
    large_s: float
    """The large batch; the median."""


class GatewayReport(msgspec.Struct, frozen=True):
    machine: Machine
    settings: Settings
    gateway: Way
    client: Way
    two_tenants: Way | None = None
    """What calls through the SDK took for each of two tenants that made them at the same time; the
    median over both."""


async def run(settings: Settings, directory: Path) -> GatewayReport:
    """Measure. Args: directory: an existing one, for the model and the mesh."""
    model = await asyncio.to_thread(_save_model, directory / "model")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    nodes = [NodeConfig(f"{pool}-{i}", pool, [16 * 2**20]) for pool in _POOLS for i in range(2)]
    meshed = MeshConfig(
        nodes=nodes, tenants=[TENANT, OTHER], models={"tiny": str(model)}, gateway_port=port
    )
    async with Mesh(meshed, directory / "mesh") as mesh:
        await mesh.ready()
        password = mesh.credentials.tenants[TENANT]
        sdks = [await _start_sdk(settings, port, api_key(password), directory / "sdk.log")]
        async with connect(mesh.url, TENANT, password) as connection:
            spec = ModelSpec(registered="tiny")
            job = await connection.submit_job(
                "ours",
                [
                    DeploymentSpec("policy", "train", "fsdp", spec, trainable=True),
                    DeploymentSpec("sampler", "rollout", "sampler", spec, batching=Batching.SHARED),
                ],
            )
            own = Own(job.deployment("policy"), job.deployment("sampler"), settings)
            rounds = []
            for _ in range(settings.rounds):
                rounds.append((await _measure(sdks[0]), await own.measure()))
            await job.finish()
        other = api_key(mesh.credentials.tenants[OTHER])
        sdks.append(await _start_sdk(settings, port, other, directory / "other-sdk.log"))
        two = [await asyncio.gather(*map(_measure, sdks)) for _ in range(settings.rounds)]
        for each in sdks:
            each.kill()
            await each.wait()
    return GatewayReport(
        describe("torch", "aiohttp", "tinker"),
        settings,
        _way([theirs for theirs, _ in rounds]),
        _way([ours for _, ours in rounds]),
        _way([each for both in two for each in both]),
    )


_POOLS = ("rollout", "train")


class Own:
    """The same calls through our client."""

    def __init__(self, policy: Deployment, sampler: Deployment, settings: Settings) -> None:
        self._policy = policy
        self._sampler = sampler
        self._settings = settings

    async def measure(self) -> dict[str, Any]:
        datum = Datum(TOKENS[:-1], TOKENS[1:], weights=[1.0] * 7)
        scored = Datum(TOKENS[:-1], TOKENS[1:])
        sampling = SamplingParams(4)
        prompt = Prompt(TOKENS[:3], seed=1)
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "forward": lambda: self._policy.forward([scored]),
            "forward_backward": lambda: self._policy.forward_backward(
                [datum], Loss.CROSS_ENTROPY, logprobs=True
            ),
            "optim_step": lambda: self._policy.optim_step(AdamParams(1e-4)),
            "sample": lambda: self._sampler.generate([prompt], sampling),
        }
        told: dict[str, Any] = {}
        for name, call in calls.items():
            told[name] = []
            for _ in range(self._settings.calls):
                began = time.perf_counter()
                await call()
                told[name].append(time.perf_counter() - began)
        began = time.perf_counter()
        for handle in [self._sampler.generate([prompt], sampling) for _ in range(_IN_FLIGHT)]:
            await handle
        told["in_flight_s"] = time.perf_counter() - began
        text = [index % _VOCAB for index in range(_LONG)]
        long = Datum(text, text, weights=[1.0] * _LONG)
        began = time.perf_counter()
        batch = [long] * self._settings.large
        await self._policy.forward_backward(batch, Loss.CROSS_ENTROPY, logprobs=True)
        told["large_s"] = time.perf_counter() - began
        await self._policy.optim_step(AdamParams(1e-4))
        return told


def _way(rounds: list[dict[str, Any]]) -> Way:
    kinds = [name for name in rounds[0] if not name.endswith("_s")]
    return Way(
        {name: median([median(each[name]) for each in rounds]) for name in kinds},
        median(each["in_flight_s"] for each in rounds),
        median(each["large_s"] for each in rounds),
    )


async def _start_sdk(
    settings: Settings, port: int, key: str, log: Path
) -> asyncio.subprocess.Process:
    program = Path(__file__).with_name("gatewaysdk.py")
    words = [str(program), str(settings.calls), str(settings.large)]
    with log.open("wb") as output:
        sdk = await asyncio.create_subprocess_exec(
            *diewithparent.launcher([sys.executable, "-W", "ignore", *words]),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=output,
            env={
                **config.inherited(),
                "TINKER_BASE_URL": f"http://127.0.0.1:{port}",
                "TINKER_API_KEY": key,
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
            },
        )
    assert sdk.stdout is not None
    if (await sdk.stdout.readline()).strip() != b"ready":
        raise RuntimeError(f"the SDK's program ended, see {log}")
    return sdk


async def _measure(sdk: asyncio.subprocess.Process) -> dict[str, Any]:
    return {**await _ask(sdk, "calls"), **await _ask(sdk, "large")}


async def _ask(sdk: asyncio.subprocess.Process, what: str) -> dict[str, Any]:
    assert sdk.stdin is not None
    assert sdk.stdout is not None
    sdk.stdin.write(f"{what}\n".encode())
    told: dict[str, Any] = msgspec.json.decode(await sdk.stdout.readline())
    return told


def _save_model(directory: Path) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(_MODEL)
    factory: Any = AutoModelForCausalLM
    torch.manual_seed(1)
    settings = AutoConfig.for_model(values.pop("model_type"), **values)
    factory.from_config(settings, dtype=torch.float32).save_pretrained(directory)
    return directory
