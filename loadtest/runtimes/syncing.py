"""A weight sync from two ranks of `fsdp` to `vllm` on a whole mesh, beside plain copies.

Policy and sampler are on one node first, where the version is memory that both map, then on two, so
that the version crosses TCP between their state managers. That is compared with a plain copy over a
TCP connection of this machine, too, beside the two plain copies.

The time is that of `publish_weights` and `sync_weights`, submitted together, as the controller sees
it: two operations' round trips, the shards' way into a weights version, digests, and the version's
way into the sampler's heap. The bytes have to be copied twice, into the version and out of it.

Some of the time is the same for every model: that of the smallest one. What each GiB more takes is
told by `each_gib`.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from msgspec.structs import replace

from loadtest.records import Record
from loadtest.runtimes import models
from loadtest.state_bench import Pairs, copy_seconds, filled
from phaseloom import client
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.supervisor import Mesh
from phaseloom.common.contract.operations import AdamParams, Datum, Loss
from phaseloom.common.contract.specs import DeploymentSpec, Layout
from phaseloom.statemgr.node.extents import Extent
from phaseloom.worker.backends.model import TORCH_DTYPES, parameter_shapes, weights_dtype

_TENANT = "demo"
_TRAINERS = 2
_ADAM = AdamParams(1e-4)
_COPIES = "two plain copies, into the version and out of it"


@dataclass(frozen=True)
class Sync:
    """What is synced, and where to."""

    hidden: int
    layers: int
    python: Path
    """The interpreter that has vLLM."""
    tp: int = 1
    """The tensor-parallel ranks of the sampler."""
    crosses_nodes: bool = False
    """Whether the sampler is on a node of its own."""
    has_aim: bool = False
    """Whether it is to take at most half as long again as the plain copies."""


async def measure(sync: Sync, directory: Path, num_rounds: int) -> list[Pairs]:
    """The seconds of syncs and of plain copies, round by round; over TCP, of one over TCP, too."""
    policy, sampler = _specs(sync)
    num_bytes = _weights_bytes(policy)
    # Weights, gradients and moments, in float32, and some room for alignment.
    per_trainer = 5 * num_bytes // _TRAINERS
    per_sampler = 2 * num_bytes // sync.tp + models.SCRATCH_BYTES
    devices = {policy.pool: [per_trainer] * _TRAINERS}
    if sync.crosses_nodes:
        devices[sampler.pool] = [per_sampler] * sync.tp
    else:
        sampler = replace(sampler, pool=policy.pool)
        devices = {policy.pool: [max(per_trainer, per_sampler)] * (_TRAINERS + sync.tp)}
    nodes = [
        NodeConfig(
            f"{pool}-0",
            pool,
            sizes,
            host_memory_bytes=16 * num_bytes,
            interpreters={"vllm": str(sync.python.absolute())},
        )
        for pool, sizes in devices.items()
    ]
    mesh_config = MeshConfig(nodes=nodes, tenants=[_TENANT], routers=1)
    name = f"{_name(sync)}_{num_bytes / 2**20:.0f}_mib"
    name += "_over_tcp" if sync.crosses_nodes else ""
    pairs = [Pairs(name, num_bytes, _COPIES, "≤ 1.5" if sync.has_aim else "")]
    if sync.crosses_nodes:
        over = f"{_COPIES}, and one over TCP between them"
        pairs.append(Pairs(f"{name}_against_socket", num_bytes, over, ""))
    source, target = (Extent(num_bytes, f"bench: {side}") for side in ("source", "target"))
    plain, into = filled(source, num_bytes), filled(target, num_bytes)
    async with Mesh(mesh_config, directory) as mesh:
        await mesh.ready()
        password = mesh.credentials.tenants[_TENANT]
        async with client.connect(mesh.url, tenant=_TENANT, password=password) as connection:
            job = await connection.submit_job("sync", [policy, sampler])
            for number in range(-2, num_rounds):
                took_s = await _synced(job)
                bare_s = 2 * await asyncio.to_thread(copy_seconds, plain, into)
                socket_s = await asyncio.to_thread(_socket_seconds, plain, into)
                if number >= 0:  # the first ones touch all memory for the first time
                    for each, limit_s in zip(pairs, (bare_s, bare_s + socket_s), strict=False):
                        each.ours_s.append(took_s)
                        each.limit_s.append(limit_s)
            await job.finish()
    return pairs


def each_gib(sync: Sync, small: Pairs, large: Pairs) -> Record:
    """The milliseconds that each GiB more takes, by the medians of two sizes."""
    more_gib = (large.num_bytes - small.num_bytes) / 2**30
    ours_s = median(large.ours_s) - median(small.ours_s)
    bare_s = median(large.limit_s) - median(small.limit_s)
    return Record(
        name=f"{_name(sync)}_each_gib",
        value=round(1e3 * ours_s / more_gib, 3),
        unit="ms/GiB",
        limit=_COPIES,
        limit_value=round(1e3 * bare_s / more_gib, 3),
        ratio=round(ours_s / bare_s, 3),
    )


def _name(sync: Sync) -> str:
    return f"sync_fsdp_dp{_TRAINERS}_to_vllm_tp{sync.tp}"


def _socket_seconds(source: memoryview, target: memoryview) -> float:
    """The seconds of a copy over one TCP connection, in the clear and unchecked."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sending,
        server.accept()[0] as receiving,
        ThreadPoolExecutor(1) as sender,
    ):
        started_s = time.perf_counter()
        sent = sender.submit(sending.sendall, source)
        done = 0
        while done < len(target):
            count = receiving.recv_into(target[done:])
            assert count, "the sender has failed"
            done += count
        sent.result()
        return time.perf_counter() - started_s


async def _synced(job: client.Job) -> float:
    """Change the weights, then publish and sync them. Returns: the seconds of the latter."""
    policy, sampler = job.deployment("policy"), job.deployment("sampler")
    batch = [Datum(text[:-1], text[1:], weights=[0.1] * 8) for text in models.texts(2, 9)]
    await policy.forward_backward(batch, Loss.CROSS_ENTROPY)
    await policy.optim_step(_ADAM)
    started_s = time.perf_counter()
    published = policy.publish_weights()
    synced = sampler.sync_weights(published)
    await published
    await synced
    return time.perf_counter() - started_s


def _specs(sync: Sync) -> tuple[DeploymentSpec, DeploymentSpec]:
    policy = models.spec("fsdp", sync.hidden, sync.layers)
    sampler = models.spec("vllm", sync.hidden, sync.layers)
    return (
        replace(policy, layout=Layout(dp=_TRAINERS)),
        replace(sampler, layout=Layout(tp=sync.tp)),
    )


def _weights_bytes(spec: DeploymentSpec) -> int:
    size = TORCH_DTYPES[weights_dtype(spec.model)].itemsize
    return size * sum(math.prod(shape) for shape in parameter_shapes(spec.model).values())
