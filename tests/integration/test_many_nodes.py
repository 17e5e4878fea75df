"""64 nodes, each with a real agent and a real state manager, on one machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from phaseloom import client
from phaseloom.cli.jobs import drain_node
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.common.contract.api import DrainNode
from phaseloom.common.contract.events import NodeLost, OperationFinished
from phaseloom.common.contract.ids import NodeId
from tests.support.jobs import NOOP, TENANT, Log, running_mesh, tenant

PER_POOL = 32
NUM_JOBS = 24
LOST = 10
START_S = 600.0
"""How long this machine may take to start 128 processes."""
NODES = [
    NodeConfig(f"{pool}-{number}", pool, [2**20], host_memory_bytes=2**24)
    for pool in ("rollout", "train")
    for number in range(PER_POOL)
]


async def work(job: client.MeshJob) -> None:
    """An iteration: the new weights come to the sampler, wherever the two are."""
    policy, sampler = job.deployment("policy"), job.deployment("sampler")
    await policy.optim_step(client.AdamParams(1e-3))
    await sampler.sync_weights(policy.publish_weights())
    await sampler.generate([client.Prompt([1])], client.SamplingParams(1))


async def all_work(jobs: list[client.MeshJob]) -> None:
    async with asyncio.TaskGroup() as group:
        for job in jobs:
            group.create_task(work(job))


def home(log: Log, job: str, deployment: str = "policy") -> str:
    return str(log.starts(f"{job}.{deployment}")[-1].node)


def ended(log: Log, deployment: str) -> set[int]:
    """The seqs of a deployment's operations that have ended, replays included."""
    ends = [event for event in log.events if isinstance(event, OperationFinished)]
    return {
        event.key.seq or 0
        for event in ends
        if str(event.key.deployment_key) == f"{TENANT}.{deployment}"
    }


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("noop_nodes", "cold_nodes")
async def test_jobs_on_64_nodes_outlive_a_drain_and_the_loss_of_ten_nodes_at_once(
    short_dir: Path, record_property: Callable[[str, object], None]
) -> None:
    """Nothing is sealed, so what was on the lost nodes is rebuilt elsewhere from the log."""
    config = MeshConfig(nodes=NODES, seal_every=0, node_grace_s=2.0, max_group_jobs=8)
    began_s = time.monotonic()
    async with running_mesh(config, short_dir, ready_s=START_S) as (mesh, log), tenant(mesh) as t:
        record_property("start_s", time.monotonic() - began_s)
        jobs = [await t.submit_job(f"job-{number}", NOOP) for number in range(NUM_JOBS)]
        await all_work(jobs)

        drained = home(log, "job-0")
        began_s = time.monotonic()
        out = Console(file=StringIO())
        assert await drain_node(mesh.credentials.bus, DrainNode(NodeId(drained)), 300.0, out) == 0
        record_property("drain_s", time.monotonic() - began_s)
        await all_work(jobs)
        await log.caught_up()
        assert home(log, "job-0") != drained

        used = {home(log, f"job-{number}") for number in range(NUM_JOBS)}
        lost = sorted(used)[:LOST]
        assert len(lost) == LOST, "jobs are on that many nodes"
        hit = [n for n in range(NUM_JOBS) if home(log, f"job-{n}") in lost]
        began_s = time.monotonic()
        for node in lost:
            mesh.lose(node)
        await all_work(jobs)
        record_property("loss_s", time.monotonic() - began_s)
        await log.caught_up()
        gone = {str(event.node) for event in log.events if isinstance(event, NodeLost)}
        assert gone == set(lost)
        for number in hit:
            assert home(log, f"job-{number}") not in lost
        for number in range(NUM_JOBS):
            done = log.finished(f"job-{number}.policy")
            assert done == sorted(set(done)), "nothing ends twice"
            # What had begun on a lost node ends as a replay, for the first time.
            assert ended(log, f"job-{number}.policy") == {1, 2, 3, 4, 5, 6}
        assert log.failures() == []
