"""The scheduler tells a node what it will need next, and its state manager gets that ready."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.supervisor import Mesh
from phaseloom.client import (
    AdamParams,
    Deployment,
    DeploymentSpec,
    ModelSpec,
    OperationHandle,
    Prompt,
    PublishWeightsResult,
    SamplingParams,
)
from phaseloom.common.contract.codec import decode
from phaseloom.common.contract.events import KindEstimate, PhaseTrace
from phaseloom.common.contract.ids import JobKey, NodeId, VersionKey
from phaseloom.common.contract.specs import Layout
from phaseloom.common.contract.state_agent import StatusReport
from phaseloom.common.contract.streams import state_subject
from phaseloom.common.transport.bus import Bus
from tests.support.jobs import TENANT, Log, running_mesh, tenant
from tests.support.node import policy_spec, sampler_spec
from tests.support.warm import signal_programs

MiB = 2**20
NODE = NodeId("train-0")
LARGE = ModelSpec({"num_floats": MiB // 4})
FAR_S = 3600.0
LONG = 20_000
"""New tokens: a rollout of so many is stopped long before it ends."""


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


async def versions_at(bus: Bus, node: str) -> list[VersionKey]:
    """The versions in a node's host memory, and their parts and slices."""
    answer = await bus.client.request(state_subject(NodeId(node)), timeout=30)
    report: StatusReport = decode(answer.data, StatusReport)
    return report.versions


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


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_version_is_on_the_node_before_the_sync_that_brings_it(
    num_ranks: int, short_dir: Path
) -> None:
    """While the sampler samples. Of a policy on two ranks, the sampler's rank takes slices."""
    train = NodeConfig(NODE, "train", [8 * MiB] * 2)
    config = MeshConfig(nodes=[NodeConfig("rollout-0", "rollout", [8 * MiB]), train])
    async with (
        running_mesh(config, short_dir) as (mesh, log),
        tenant(mesh) as t,
        operator(mesh) as bus,
    ):
        specs = [policy_spec(layout=Layout(dp=num_ranks)), sampler_spec(positions=LONG + 10)]
        job = await t.submit_job("job", specs)
        policy, sampler = job.deployment("policy"), job.deployment("sampler")

        async def num_here(published: OperationHandle[PublishWeightsResult]) -> int:
            """The whole version is one piece; a manifest and slices are two."""
            keys = await versions_at(bus, "rollout-0")
            return len([key for key in keys if key.seq == published.ref.seq])

        async def sync_behind_a_rollout() -> tuple[Any, ...]:
            rollout = sampler.generate([Prompt([1, 2])], SamplingParams(LONG, ignore_eos=True))
            published = policy.publish_weights()
            sync = sampler.sync_weights(published)
            while await num_here(published) < num_ranks:
                pass
            assert not rollout.done()
            return rollout, published, sync

        async with asyncio.timeout(120):
            rollout, _, sync = await sync_behind_a_rollout()
            await rollout.stop()
            await sync
            rollout, published, sync = await sync_behind_a_rollout()
            await sync.cancel()
            await policy.publish_weights()
            while await num_here(published):
                pass
            await rollout.stop()
        await job.finish()
        assert log.failures() == []


@pytest.mark.parametrize(
    "victim", ["scheduler", "worker-rollout-0", "statemgr-rollout-0", "statemgr-train-0"]
)
async def test_whoever_dies_while_a_version_is_fetched_ahead_its_sync_brings_it(
    victim: str, short_dir: Path
) -> None:
    """Its source says nothing meanwhile; and nothing of it is left once the job has ended."""
    train = NodeConfig(NODE, "train", [8 * MiB])
    config = MeshConfig(nodes=[NodeConfig("rollout-0", "rollout", [8 * MiB]), train])
    async with (
        running_mesh(config, short_dir) as (mesh, log),
        tenant(mesh) as t,
        operator(mesh) as bus,
    ):
        job = await t.submit_job("job", [policy_spec(), sampler_spec(positions=LONG + 10)])
        policy, sampler = job.deployment("policy"), job.deployment("sampler")
        rollout = sampler.generate([Prompt([1, 2])], SamplingParams(LONG, ignore_eos=True))
        published = policy.publish_weights()
        digest = (await published).digest
        source = mesh.pids(f"statemgr-{NODE}")
        signal_programs(source, signal.SIGSTOP)
        sync = sampler.sync_weights(published)
        await log.until_queued(f"job.sampler.{sync.ref.seq}")
        if victim != f"statemgr-{NODE}":
            mesh.kill(victim)
            signal_programs(source, signal.SIGCONT)
        else:
            signal_programs(source, signal.SIGKILL)
        await rollout.stop()
        assert (await sync).digest == digest
        await job.finish()
        async with asyncio.timeout(60):
            while await versions_at(bus, "rollout-0") or await versions_at(bus, NODE):
                pass
