"""The scheduler tells a node what it will need next, and its state manager gets that ready."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.supervisor import Mesh
from phaseloom.client import AdamParams, Deployment, DeploymentSpec, ModelSpec
from phaseloom.common.contract.codec import decode
from phaseloom.common.contract.events import KindEstimate, PhaseTrace
from phaseloom.common.contract.ids import JobKey, NodeId
from phaseloom.common.contract.state_agent import StatusReport
from phaseloom.common.contract.streams import state_subject
from phaseloom.common.transport.bus import Bus
from tests.support.jobs import TENANT, Log, running_mesh, tenant
from tests.support.warm import signal_programs

MiB = 2**20
NODE = NodeId("train-0")
LARGE = ModelSpec({"num_floats": MiB // 4})
FAR_S = 3600.0


def spec(name: str) -> DeploymentSpec:
    return DeploymentSpec(name, "train", "noop", LARGE, trainable=True)


@asynccontextmanager
async def operator(mesh: Mesh) -> AsyncIterator[Bus]:
    bus = await Bus.open(mesh.credentials.bus, "operator")
    try:
        yield bus
    finally:
        await bus.close()


async def on_nvme(bus: Bus) -> set[str]:
    """`<job>.<deployment>` of each whose state is on the node's NVMe alone."""
    answer = await bus.client.request(state_subject(NODE), timeout=30)
    report: StatusReport = decode(answer.data, StatusReport)
    demoted = [d.deployment for d in report.deployments if not (d.host_bytes or d.device_bytes)]
    return {f"{key.job}.{key.deployment}" for key in demoted}


async def predict(bus: Bus, log: Log, job: str, *deployments: str) -> None:
    """As if the profiler had found that something else follows each of their steps, much later."""
    estimates = [KindEstimate(d, "optim_step", 0.01, FAR_S, count=9) for d in deployments]
    trace = PhaseTrace(JobKey(TENANT, job), 0.0, [], estimates)
    await bus.log.append(trace)
    await log.until(lambda event: event == trace)


async def take_step(deployment: Deployment, log: Log) -> None:
    """Returns when the log has its end, too: only what is queued after it tells what follows it."""
    step = deployment.optim_step(AdamParams(1e-3))
    await step
    await log.until_finished(step.key.removeprefix(f"{TENANT}."))


@pytest.mark.usefixtures("noop_nodes")
async def test_state_is_up_from_nvme_before_the_operation_that_is_predicted(
    short_dir: Path,
) -> None:
    """A device for one state, host memory for two, and three of them. While the critic steps, after
    the other job did, the policy is on NVMe; that the step has ended is the sign that it comes."""
    train = NodeConfig(NODE, "train", [MiB], host_memory_bytes=2 * MiB)
    config = MeshConfig(nodes=[train], seal_every=0)
    async with (
        running_mesh(config, short_dir) as (mesh, log),
        tenant(mesh) as t,
        operator(mesh) as bus,
    ):
        signal_programs(mesh.pids("profiler"), signal.SIGSTOP)  # what it finds is told here
        try:
            two = await t.submit_job("two", [spec("policy"), spec("critic")])
            other = (await t.submit_job("other", [spec("policy")])).deployment("policy")
            policy, critic = two.deployment("policy"), two.deployment("critic")
            await predict(bus, log, "two", "policy", "critic")
            for deployment in (policy, critic, policy, critic, policy, other, critic):
                await take_step(deployment, log)
            async with asyncio.timeout(60):
                while await on_nvme(bus) != {"other.policy"}:
                    pass
            await policy.optim_step(AdamParams(1e-3))
            await log.caught_up()
            assert log.failures() == []
        finally:
            signal_programs(mesh.pids("profiler"), signal.SIGCONT)
