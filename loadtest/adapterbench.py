"""What adapters on one base save: bytes and time of a switch, eight in one batch, many on a mesh.

The base has 112 MiB of float32 weights. Switches go through a real state manager, with states as
large as a policy's with an adapter of rank 8, and as one that trains all weights. The backend
`sampler` decodes rows of eight adapters of mixed rank, in this process, in one call and one adapter
after another; and so does a sampler on a mesh, which reads eight versions of two policies by their
names, submitted at once and each after the one before. Many jobs on one base share two devices of a
mesh (`manyadapters`).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForCausalLM

from loadtest import manyadapters
from loadtest.rawchain import TENANT
from loadtest.records import Record
from loadtest.state_bench import measure_switches
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.supervisor import Mesh
from phaseloom.client import connect
from phaseloom.common.contract.operations import Generate, Prompt, SamplingParams
from phaseloom.common.contract.specs import Adapter, Batching, DeploymentSpec, ModelSpec
from phaseloom.common.process import config
from phaseloom.common.tensors.modelfiles import read_model
from phaseloom.worker.backends import backend_factory
from phaseloom.worker.backends.base import AdapterVersion, RankGroup, Unwatched
from phaseloom.worker.state.heap import Heap

RANKS = (8, 32, 4, 16, 8, 1, 32, 8)
ROWS = 4
PROMPT_TOKENS = 16
NEW_TOKENS = 24
_BASE: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
_MIB = 2**20
_POLICY_RANKS = (8, 32)
"""Of the policies on the mesh."""
_DEVICE_BYTES = 512 * _MIB


async def measure(directory: Path, num_rounds: int, num_jobs: int, num_steps: int) -> list[Record]:
    """Measure all of it.

    Args: directory: an existing one, on a disk with room for 2 GiB.
          num_jobs: as of `manyadapters.measure`; 0 leaves that out. So of `num_steps`.
    """
    node = RankGroup(node_directory=str(directory))
    base = _base(directory / "base")
    full, own = (
        backend_factory("fsdp").plan(_spec("fsdp", base, adapter), node).heap_bytes
        for adapter in (None, Adapter(rank=8))
    )
    switches = {
        num_bytes: await measure_switches(directory / f"{num_bytes}", num_bytes, num_rounds)
        for num_bytes in (full, own)
    }
    full_ms, own_ms = (
        next(each.value for each in switches[num_bytes] if each.name.startswith("switch_"))
        for num_bytes in (full, own)
    )
    figures = [
        _record("adapter_switch_bytes", "MiB", "all weights", (own / _MIB, full / _MIB), "≤ 0.025"),
        _record("adapter_switch", "ms", "all weights", (own_ms, full_ms), "≤ 0.1"),
        _decoding(base, node, num_rounds),
        await _on_a_mesh(directory, num_rounds),
    ]
    if num_jobs:
        figures += await manyadapters.measure(
            directory / "jobs", directory / "base", num_jobs, num_steps
        )
    return figures


def _base(directory: Path) -> ModelSpec:
    factory: Any = AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        factory.from_config(AutoConfig.for_model("qwen3", **_BASE)).save_pretrained(directory)
    model = read_model("base", directory)
    return ModelSpec(model.config, registered="base", pinned=model.directory)


def _spec(
    backend: str, base: ModelSpec, adapter: Adapter | None, max_adapters: int = 0
) -> DeploymentSpec:
    return DeploymentSpec(
        "it",
        "pool",
        backend,
        replace(base, adapter=adapter),
        trainable=backend == "fsdp",
        max_adapters=max_adapters,
    )


class _Watch(Unwatched):
    def __init__(self, versions: Mapping[int, AdapterVersion]) -> None:
        self._versions = versions

    def adapter(self, i: int) -> AdapterVersion | None:
        return self._versions.get(i)


def _decoding(base: ModelSpec, node: RankGroup, num_rounds: int) -> Record:
    versions = [_version(base, node, number) for number in range(len(RANKS))]
    shared, _ = _sampler(base, node, Adapter(rank=max(RANKS)), len(RANKS))
    requests = [
        Generate(
            [Prompt([1 + number] * PROMPT_TOKENS, seed=number)],
            SamplingParams(NEW_TOKENS, ignore_eos=True),
            num_samples=ROWS,
        )
        for number in range(len(RANKS))
    ]

    def together() -> None:
        shared.generate(requests, _Watch(dict(enumerate(versions))))

    def in_turn() -> None:
        for request, version in zip(requests, versions, strict=True):
            shared.generate([request], _Watch({0: version}))

    together()
    pairs = [(_seconds(together), _seconds(in_turn)) for _ in range(num_rounds)]
    many_s, turns_s = (median(side) for side in zip(*pairs, strict=True))
    name, limit = f"{len(RANKS)}_adapters_in_one_batch", "one after another"
    return _record(name, "ms", limit, (1e3 * many_s, 1e3 * turns_s), "≤ 0.4")


async def _on_a_mesh(directory: Path, num_rounds: int) -> Record:
    """Args: directory: the base's files are in `base` there."""
    config.set_for_children("PHASELOOM_TELEMETRY_SAMPLE_RATIO", "0")
    nodes = [
        NodeConfig("rollout-0", "rollout", [_DEVICE_BYTES]),
        NodeConfig("train-0", "train", [_DEVICE_BYTES] * len(_POLICY_RANKS)),
    ]
    mesh_config = MeshConfig(
        nodes=nodes, tenants=[TENANT], routers=1, models={"base": str(directory / "base")}
    )
    async with Mesh(mesh_config, directory / "mesh") as mesh:
        await mesh.ready()
        async with connect(mesh.url, TENANT, mesh.credentials.tenants[TENANT]) as controller:
            job = await controller.submit_job("adapters", _deployments())
            policies = [job.deployment(f"policy-{rank}") for rank in _POLICY_RANKS]
            each = len(RANKS) // len(policies)
            versions = [p.publish_weights(ttl_s=3600.0) for p in policies for _ in range(each)]
            sampler = job.deployment("sampler")

            def submit(number: int) -> Awaitable[object]:
                prompt = Prompt([1 + number] * PROMPT_TOKENS, seed=number)
                sampling = SamplingParams(NEW_TOKENS, ignore_eos=True)
                return sampler.generate([prompt], sampling, ROWS, weights=versions[number])

            async def together_s() -> float:
                started_s = time.perf_counter()
                for handle in [submit(number) for number in range(len(versions))]:
                    await handle
                return time.perf_counter() - started_s

            async def in_turn_s() -> float:
                started_s = time.perf_counter()
                for number in range(len(versions)):
                    await submit(number)
                return time.perf_counter() - started_s

            await together_s()
            pairs = [(await together_s(), await in_turn_s()) for _ in range(num_rounds)]
            await job.finish()
    many_s, turns_s = (median(side) for side in zip(*pairs, strict=True))
    name, limit = f"{len(RANKS)}_adapters_through_the_mesh", "one after another"
    return _record(name, "ms", limit, (1e3 * many_s, 1e3 * turns_s), "≤ 0.4")


def _deployments() -> list[DeploymentSpec]:
    def model(rank: int) -> ModelSpec:
        return ModelSpec(registered="base", adapter=Adapter(rank))

    policies = [
        DeploymentSpec(f"policy-{rank}", "train", "fsdp", model(rank), trainable=True)
        for rank in _POLICY_RANKS
    ]
    sampler = DeploymentSpec(
        "sampler",
        "rollout",
        "sampler",
        model(max(_POLICY_RANKS)),
        batching=Batching.SHARED,
        max_adapters=len(RANKS),
    )
    return [*policies, sampler]


def _seconds(work: Any) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def _sampler(
    base: ModelSpec, node: RankGroup, adapter: Adapter, max_adapters: int = 0
) -> tuple[Any, Heap]:
    spec = _spec("sampler", base, adapter, max_adapters)
    factory = backend_factory("sampler")
    memory = factory.plan(spec, node)
    heap = Heap(memory.heap_bytes, memory.scratch_bytes)
    return factory(spec, heap, node), heap


def _version(base: ModelSpec, node: RankGroup, number: int) -> AdapterVersion:
    adapter = Adapter(rank=RANKS[number])
    sampler, heap = _sampler(base, node, adapter)
    generator = torch.Generator().manual_seed(number)
    torch.frombuffer(heap.buffer, dtype=torch.float32).normal_(0.0, 0.02, generator=generator)
    return AdapterVersion(f"v{number}", adapter, sampler.version_slots, heap.buffer)


def _record(name: str, unit: str, limit: str, found: tuple[float, float], aim: str) -> Record:
    """Args: found: the value, and that of the limit."""
    value, limit_value = (round(each, 3) for each in found)
    return Record(name, value, unit, limit, limit_value, round(found[0] / found[1], 4), aim)
