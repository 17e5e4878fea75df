"""Two jobs on one device of two cores, with real processes: side by side, killed, bit for bit."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from grpo import declared, deployments, train
from settings import MODEL

from phaseloom import client
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.supervisor import Mesh
from phaseloom.client import Datum, Prompt, SamplingParams
from phaseloom.common.contract import streams
from phaseloom.common.contract.codec import decode
from phaseloom.common.contract.commands import AdjustClaims, Command
from phaseloom.common.contract.events import (
    ClaimsAdjusted,
    OperationFinished,
    SchedulerConfigured,
    WpgLost,
)
from phaseloom.common.contract.ids import NodeId
from phaseloom.common.contract.specs import Residency
from phaseloom.common.process.slowdowns import read
from phaseloom.common.transport.bus import Bus
from phaseloom.simulator.tables import TWO_CORES_TABLE
from tests.support.jobs import Log, Reports, no_barrier, rank_pid, running_mesh, short, tenant
from tests.support.processes import without_torch

LONG_S = 3.0
"""Training of a noop takes so long: whatever is to happen meanwhile does."""
BATCH = [Datum([1, 2], [2, 3], weights=[1.0, 1.0])]
PROMPTS = [Prompt([1, 2, 3], seed=1)]


def one_device(multiplexing: str = "greedy") -> MeshConfig:
    node = NodeConfig(
        "device-0",
        "train",
        [64 * 2**20],
        cores_per_device=2,
        exclusive_residency=Residency.SHARED,
    )
    # Nothing is kept for the job that ran last: what is queued begins.
    return MeshConfig(
        nodes=[node],
        multiplexing=multiplexing,
        slowdowns=str(TWO_CORES_TABLE),
        seal_every=0,
        idle_grace_s=0.0,
    )


def noops(train_s: float) -> list[client.DeploymentSpec]:
    slow = client.ModelSpec({"seconds": {"forward_backward": train_s}})
    return [
        client.DeploymentSpec("policy", "train", "noop", slow, trainable=True),
        client.DeploymentSpec("sampler", "train", "noop", client.ModelSpec({})),
    ]


def ends(log: Log) -> list[str]:
    finished = [event for event in log.events if isinstance(event, OperationFinished)]
    return [str(event.key).removeprefix("demo.") for event in finished]


async def until_asked(mesh: Mesh, deployment: str) -> None:
    """Return once the node has a command in hand by which a rank is to give up units."""
    bus = await Bus.open(mesh.credentials.bus, "test")
    subject = streams.permit_subject(NodeId("device-0"))
    try:
        async with asyncio.timeout(60):
            while True:
                newest = await bus.stored.get(streams.PERMITS, subject)
                command = decode(newest.payload, Command) if newest is not None else None
                if isinstance(command, AdjustClaims) and command.shrinks:
                    assert str(command.deployment) == f"demo.{deployment}"
                    return
    finally:
        await bus.close()


async def test_a_rollout_runs_beside_training_and_a_kill_between_loses_nothing(
    short_dir: Path,
) -> None:
    """The rank is stopped, so that it cannot answer, and killed while it is asked for units."""
    with without_torch():
        async with running_mesh(one_device(), short_dir) as (mesh, log), tenant(mesh) as connection:
            a = await connection.submit_job("a", noops(LONG_S))
            b = await connection.submit_job("b", noops(0.0))
            policy, sampler = a.deployment("policy"), b.deployment("sampler")
            await policy.forward(BATCH)
            # The scheduler may know of an end later than the caller does, and would ask for units.
            await log.until_finished("a.policy.1")
            await sampler.generate(PROMPTS, SamplingParams(4))
            await log.until_finished("b.sampler.1")
            trained = policy.forward_backward(BATCH, "cross_entropy")
            await log.until_queued("a.policy.2")
            await sampler.generate(PROMPTS, SamplingParams(4))
            await trained
            adjusted = await log.until(lambda event: isinstance(event, ClaimsAdjusted))
            assert isinstance(adjusted, ClaimsAdjusted)
            assert str(adjusted.deployment) == "demo.a.policy"
            await log.until_finished("a.policy.2")
            await log.until_finished("b.sampler.2")
            in_order = ends(log)
            # A boundary is enough: the rollout has not waited for the training's end.
            assert in_order.index("b.sampler.2") < in_order.index("a.policy.2")

            again = policy.forward_backward(BATCH, "cross_entropy")
            await log.until_queued("a.policy.3")
            pid = rank_pid(mesh, "a.policy")
            os.kill(pid, signal.SIGSTOP)
            generated = sampler.generate(PROMPTS, SamplingParams(4))
            await until_asked(mesh, "a.policy")
            assert "b.sampler.3" not in ends(log), "it began before the other gave up its units"
            os.kill(pid, signal.SIGKILL)
            await generated
            await again
            await log.until_finished("a.policy.3")
            lost = [e for e in log.events if isinstance(e, WpgLost)]
            assert [str(e.deployment) for e in lost] == ["demo.a.policy"]
            assert len([e for e in log.events if isinstance(e, ClaimsAdjusted)]) == 1
            assert log.failures() == []
            (configured,) = [e for e in log.events if isinstance(e, SchedulerConfigured)]
            assert configured.config.slowdowns == read(TWO_CORES_TABLE)
            await a.finish()
            await b.finish()


def two_pools() -> MeshConfig:
    """One device for rollouts, of two cores, and one for training."""
    rollouts = NodeConfig(
        "rollout-0",
        "rollout",
        [64 * 2**20],
        cores_per_device=2,
        exclusive_residency=Residency.SHARED,
    )
    return MeshConfig(
        nodes=[rollouts, NodeConfig("train-0", "train", [64 * 2**20])],
        placement="coexec_repack",
        ordering="fcfs",
        multiplexing="greedy",
        slowdowns=str(TWO_CORES_TABLE),
        seal_every=0,
        idle_grace_s=0.0,
    )


async def test_a_job_with_an_slo_is_placed_beside_another_on_their_only_device(
    short_dir: Path,
) -> None:
    """Each rolls out for 4 s of 5 s, and may take 7.5 s: in turns one of them would have to wait
    for a second device."""
    model = client.ModelSpec(MODEL)
    specs = [
        client.DeploymentSpec("policy", "train", "noop", client.ModelSpec({}), trainable=True),
        client.DeploymentSpec("sampler", "rollout", "sampler", model, host_bytes=16 * 2**20),
    ]
    async with running_mesh(two_pools(), short_dir) as (mesh, log), tenant(mesh) as connection:
        a, b = [
            await connection.submit_job(
                name, specs, slo=1.5, cycle=declared(4.0, 1.0), duration_s=1000.0, may_wait=False
            )
            for name in ("a", "b")
        ]
        placement = (await b.status()).placement
        assert "its rollouts run next to those of 1 other job and take up to 1.2" in placement
        for job in (a, b):
            await job.deployment("sampler").generate(PROMPTS, SamplingParams(4))
        await log.until_finished("b.sampler.1")
        sampling = SamplingParams(40, ignore_eos=True)
        many = a.deployment("sampler").generate(PROMPTS * 16, sampling, 64)
        await log.until_queued("a.sampler.2")
        await b.deployment("sampler").generate(PROMPTS, SamplingParams(4))
        await many
        await log.until_finished("a.sampler.2")
        await log.until_finished("b.sampler.2")
        in_order = ends(log)
        assert in_order.index("b.sampler.2") < in_order.index("a.sampler.2")
        await a.finish()
        await b.finish()


async def run(connection: client.Mesh, name: str, task: str) -> str:
    reports, settings = Reports(), short(task, 3)
    job = await connection.submit_job(name, deployments(settings, pool="train"))
    await train(job, task, settings, reports, no_barrier)
    await job.finish()
    return reports.weights_sha256


@pytest.mark.slow
async def test_weights_are_the_same_alone_and_beside_others(short_dir: Path) -> None:
    async with running_mesh(one_device(), short_dir) as (mesh, log), tenant(mesh) as connection:
        alone = await run(connection, "alone", "chain_sum")
        beside, _ = await asyncio.gather(
            run(connection, "beside", "chain_sum"), run(connection, "other", "letter_counting")
        )
        assert any(isinstance(event, ClaimsAdjusted) for event in log.events)
        assert beside == alone
