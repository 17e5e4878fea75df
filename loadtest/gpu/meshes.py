"""Proofs that need a whole mesh: jobs whose processes share one device, under the default order.

A mesh with one node of one device runs each of two jobs alone, then both. The weights of every step
must be the same. `Setup` has the kind of device, so that a test tries this on an emulated one.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from loadtest.gpu.backends import MODEL
from loadtest.gpu.proofs import Found, Skipped, require
from phaseloom.worker.cuda.driver import Driver

if TYPE_CHECKING:
    from phaseloom.client import DeploymentSpec, Job
    from phaseloom.common.contract.specs import DeviceKind
    from phaseloom.demo.report import RunLog

STEPS = 16
ALONE = ("alone-0", "alone-1")
TOGETHER = ("together-0", "together-1")
TENANT = "bench"
SHARE_OF_DEVICE = 0.7
"""The share of the free bytes that the mesh gets. Contexts and workspaces have the rest."""
FULL_MODEL: dict[str, Any] = {**MODEL, "hidden_size": 1024, "intermediate_size": 3072}
"""A model whose states are large enough for their switches to be measured."""


@dataclass(frozen=True, slots=True)
class Setup:
    kind: DeviceKind
    device_bytes: int
    model: dict[str, Any]
    samples: bool
    """Whether each job has a sampler, which syncs every version."""
    steps: int = STEPS


def two_processes(driver: Driver) -> Found:
    """Two training jobs in processes of their own, on one GPU."""
    return _on_gpu(driver, MODEL, samples=False)


def two_full_jobs(driver: Driver) -> Found:
    """Two jobs that train all weights, publish them, sync them to a sampler and generate."""
    return _on_gpu(driver, FULL_MODEL, samples=True)


def _on_gpu(driver: Driver, model: dict[str, Any], *, samples: bool) -> Found:
    try:
        from phaseloom.common.contract.specs import DeviceKind
        from phaseloom.worker.backends import missing_modules

        if missing := [*missing_modules("fsdp"), *missing_modules("sampler")]:
            raise Skipped(f"not installed in this Python: {', '.join(missing)}")
        import phaseloom.demo.report  # noqa: F401
    except ModuleNotFoundError as error:
        raise Skipped(f"not installed in this Python: {error.name}") from error
    num_bytes = int(driver.free_bytes() * SHARE_OF_DEVICE)
    return prove(Setup(DeviceKind.CUDA, num_bytes, model, samples))


def prove(setup: Setup) -> Found:
    """Run each job alone, then both together, and compare the digests of their weights."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as directory:
        alone, together, log = asyncio.run(_run(setup, Path(directory)))
    require(alone == together, "the weights differ from those of the jobs alone")
    moved = [switch for switch in log.switches if switch.to.job in TOGETHER]
    require(len(moved) > 1, f"the jobs did not take turns: {len(moved)} switch")
    figures = {
        "switches": float(len(moved)),
        "switch_ms": median(s.offload_s + s.load_s for s in moved) * 1e3,
        "switch_gb_s": sum(s.bytes_in + s.bytes_out for s in moved)
        / sum(s.offload_s + s.load_s for s in moved)
        / 1e9,
    }
    for operation in ("publish_weights", "sync_weights"):
        if taken := [e.end_s - e.start_s for e in log.executions if e.kind == operation]:
            figures[f"{operation}_ms"] = median(taken) * 1e3
    return Found(f"{setup.steps} steps of each job, weights equal to those alone", figures)


async def _run(setup: Setup, directory: Path) -> tuple[list[list[str]], list[list[str]], RunLog]:
    """Run the jobs. Returns: the digests of each job's versions, alone and together; the log."""
    from loadtest.hiding import recorded
    from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
    from phaseloom.cli.supervisor import Mesh
    from phaseloom.client import connect
    from phaseloom.demo.report import read_log

    node = NodeConfig("gpu-0", "gpu", [setup.device_bytes], device_kind=setup.kind)
    async with Mesh(MeshConfig(nodes=[node], tenants=[TENANT], seal_every=0), directory) as mesh:
        await mesh.ready()
        async with recorded(mesh, len(ALONE + TOGETHER)) as entries:
            password = mesh.credentials.tenants[TENANT]
            async with connect(mesh.url, TENANT, password) as connection:

                async def run(name: str, seed: int) -> list[str]:
                    job = await connection.submit_job(name, _specs(setup))
                    digests = await _control(setup, job, seed)
                    await job.finish()
                    return digests

                alone = [await run(name, seed) for seed, name in enumerate(ALONE)]
                running = [run(name, seed) for seed, name in enumerate(TOGETHER)]
                together = [*await asyncio.gather(*running)]
        return alone, together, read_log(entries)


def _specs(setup: Setup) -> list[DeploymentSpec]:
    from phaseloom.client import DeploymentSpec, ModelSpec

    spec = ModelSpec(setup.model, init_seed=7)
    policy = DeploymentSpec("policy", "gpu", "fsdp", spec, trainable=True)
    return [policy, *([DeploymentSpec("sampler", "gpu", "sampler", spec)] if setup.samples else [])]


async def _control(setup: Setup, job: Job, seed: int) -> list[str]:
    """Train a job. Returns: the digest of its weights after each step."""
    from phaseloom.client import AdamParams, Loss, Prompt, SamplingParams
    from phaseloom.common.contract.operations import Datum

    policy, digests = job.deployment("policy"), []
    for number in range(setup.steps):
        text = [(7 * i + 11 * number + seed) % 500 for i in range(65)]
        batch = [Datum(text[:-1], text[1:], weights=[1.0] * 64)] * 4
        policy.forward_backward(batch, Loss.CROSS_ENTROPY)
        policy.optim_step(AdamParams(1e-3))
        published = policy.publish_weights()
        if setup.samples:
            sampler = job.deployment("sampler")
            await sampler.sync_weights(published)
            await sampler.generate([Prompt(text[:8], seed=seed)], SamplingParams(16), 4)
        digests.append((await published).digest)
    return digests
