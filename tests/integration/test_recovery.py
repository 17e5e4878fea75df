"""kill -9 in the middle of a run: the jobs end with the weights that they have undisturbed.

Where something is killed is told by the decision log, not by the clock: right after an operation
has its outcome, the next of the same deployment is about to run or runs.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from phaseloom import client
from phaseloom.cli.supervisor import Mesh, MeshConfig
from phaseloom.common.messages import NodeUp, SealCommitted
from tests.support.jobs import (
    TASKS,
    Log,
    kill_rank,
    oracle,
    policy_seq,
    run_job,
    running_mesh,
    short,
    tenant,
)
from tests.support.processes import until_gone

STEPS = 6
A, B = TASKS


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """SHA-256 of each task's final weights, undisturbed."""
    root = tmp_path_factory.mktemp("oracle")
    return {task: oracle(task, short(task, STEPS), root / task) for task in TASKS}


async def both_jobs(mesh: Mesh) -> dict[str, str]:
    shas = await asyncio.gather(*(run_job(mesh, task, short(task, STEPS)) for task in TASKS))
    return dict(zip(TASKS, shas, strict=True))


async def test_killed_ranks_start_again_from_seeds_where_nothing_is_sealed(
    expected: dict[str, str], short_dir: Path
) -> None:
    async with running_mesh(MeshConfig(seal_every=0), short_dir) as (mesh, log):
        async with asyncio.TaskGroup() as group:
            job = group.create_task(run_job(mesh, A, short(A, STEPS)))
            await log.until_finished(f"{A}.policy.4")
            kill_rank(mesh, f"{A}.policy")
            await log.until_finished(f"{A}.policy.{policy_seq(2, 1)}")
            kill_rank(mesh, f"{A}.policy")
            await log.until_finished(f"{A}.reference.3")
            kill_rank(mesh, f"{A}.reference")
        assert job.result() == expected[A]
        assert [life.applied for life in log.starts(f"{A}.policy")] == [0, 0, 0]
        assert len(log.starts(f"{A}.reference")) == 2
        assert log.failures() == []


async def test_whatever_is_killed_two_jobs_end_with_the_same_weights(
    expected: dict[str, str], short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler goes on from a snapshot, of which the log before is truncated."""
    monkeypatch.setenv("PHASELOOM_SCHEDULER_SNAPSHOT_EVERY", "25")
    async with running_mesh(MeshConfig(seal_every=4), short_dir) as (mesh, log):
        async with asyncio.TaskGroup() as group:
            jobs = group.create_task(both_jobs(mesh))
            await until_sealed(log, A)
            await log.until_finished(f"{A}.policy.{policy_seq(1, 1)}")
            kill_rank(mesh, f"{A}.policy")
            await log.until_finished(f"{B}.policy.{policy_seq(2, 1)}")
            mesh.kill("router-0")
            await log.until_finished(f"{A}.policy.{policy_seq(3, 1)}")
            mesh.kill("scheduler")
            await log.until_finished(f"{B}.sampler.9")
            kill_rank(mesh, f"{B}.sampler")
            await log.until_finished(f"{A}.policy.{policy_seq(5, 2)}")
            mesh.kill("profiler")
            kill_rank(mesh, f"{B}.policy")
        assert jobs.result() == expected
        lives = [life.applied for life in log.starts(f"{A}.policy")]
        assert lives[0] == 0
        assert lives[1] > 0, "not started from its seal"
        assert len(log.starts(f"{B}.sampler")) == 2
        assert log.failures() == []


async def test_nodes_that_lose_their_daemons_come_back_with_what_they_held(
    expected: dict[str, str], short_dir: Path
) -> None:
    """An agent's ranks go with it; a state manager's memory is kept for it by its agent."""
    async with running_mesh(MeshConfig(seal_every=4), short_dir) as (mesh, log):
        async with asyncio.TaskGroup() as group:
            jobs = group.create_task(both_jobs(mesh))
            await until_sealed(log, B)
            await log.until_finished(f"{B}.policy.{policy_seq(1, 1)}")
            mesh.kill("worker-train-0")
            await log.until_finished(f"{A}.policy.{policy_seq(3, 1)}")
            mesh.kill("statemgr-train-0")
            await log.until_finished(f"{A}.policy.{policy_seq(4, 2)}")
            mesh.kill("statemgr-rollout-0")
            await log.until_finished(f"{A}.policy.{policy_seq(5, 2)}")
            mesh.kill("nats")
        assert jobs.result() == expected
        nodes = [str(event.node) for event in log.events if isinstance(event, NodeUp)]
        assert nodes.count("train-0") == 2
        assert nodes.count("rollout-0") == 1
        assert log.failures() == []


async def until_sealed(log: Log, job: str) -> None:
    await log.until(lambda e: isinstance(e, SealCommitted) and e.deployment.job == job)


NOOP = [
    client.DeploymentSpec("policy", "train", "noop", client.ModelSpec({}), trainable=True),
    client.DeploymentSpec("sampler", "rollout", "noop", client.ModelSpec({})),
]


async def test_version_that_was_lost_before_it_was_synced_is_cut_again(short_dir: Path) -> None:
    """Its only copy was in the memory of the policy's node; the sync waits until it is back."""
    async with running_mesh(MeshConfig(seal_every=0), short_dir) as (mesh, log), tenant(mesh) as t:
        job = await t.submit_job("noop", NOOP)
        policy, sampler = job.deployment("policy"), job.deployment("sampler")
        await policy.optim_step(client.AdamParams(1e-3))
        published = policy.publish_weights()
        digest = (await published).digest
        both = mesh.kill("statemgr-train-0") + mesh.kill("worker-train-0")
        await until_gone(both, timeout_s=5)
        synced = sampler.sync_weights(published)
        assert (await synced).digest == digest
        await sampler.generate([client.Prompt([1])], client.SamplingParams(1))
        assert log.failures() == []
