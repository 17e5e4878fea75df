"""kill -9 in the middle of a run: the jobs end with the weights that they have undisturbed.

Where something is killed is told by the decision log, not by the clock: right after an operation
has its outcome, the next of the same deployment is about to run or runs.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from phaseloom import client
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.supervisor import Mesh
from phaseloom.common.contract import streams
from phaseloom.common.contract.api import (
    Attached,
    Explanation,
    JobRequest,
    JobStatus,
    OperationRequest,
    SubmitJob,
)
from phaseloom.common.contract.codec import decode
from phaseloom.common.contract.commands import Command, Permits
from phaseloom.common.contract.events import NodeUp, SealCommitted, WpgStarted
from phaseloom.common.contract.ids import NodeId
from phaseloom.common.contract.operations import (
    After,
    Args,
    Generate,
    Operation,
    Outcome,
    Prompt,
    PublishWeights,
    SamplingParams,
    SaveState,
    SaveStateResult,
    SyncWeights,
)
from phaseloom.common.contract.specs import JobSpec
from phaseloom.common.transport.bus import Bus
from tests.support.jobs import (
    NOOP,
    TASKS,
    TENANT,
    Log,
    Wire,
    kill_rank,
    policy_seq,
    run_job,
    running_mesh,
    short,
    tenant,
)
from tests.support.node import STEP, lesson, policy_spec, sampler_spec
from tests.support.processes import until_gone
from tests.support.tinymodel import VOCAB

STEPS = 6
A, B = TASKS


async def both_jobs(mesh: Mesh) -> dict[str, str]:
    """They end GRPO together: who is ahead has its processes still, and needs them again."""
    both = asyncio.Barrier(len(TASKS))

    async def meet(where: str) -> None:
        if where == "end":
            await both.wait()

    shas = await asyncio.gather(
        *(run_job(mesh, task, short(task, STEPS), barrier=meet) for task in TASKS)
    )
    return dict(zip(TASKS, shas, strict=True))


async def test_killed_ranks_start_again_from_seeds_where_nothing_is_sealed(
    expected: dict[str, str], short_dir: Path
) -> None:
    async with running_mesh(MeshConfig(seal_every=0), short_dir) as (mesh, log):
        async with asyncio.TaskGroup() as group:
            job = group.create_task(run_job(mesh, A, short(A, STEPS)))
            await log.until_finished(f"{A}.policy.4")
            kill_rank(mesh, f"{A}.policy")
            await until_alive_again(log, f"{A}.policy")
            await log.until_finished(f"{A}.policy.{policy_seq(2, 1)}")
            kill_rank(mesh, f"{A}.policy")
            await log.until_finished(f"{A}.reference.3")
            kill_rank(mesh, f"{A}.reference")
        assert job.result() == expected[A]
        await log.caught_up()
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
        await log.caught_up()
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
        await log.caught_up()
        nodes = [str(event.node) for event in log.events if isinstance(event, NodeUp)]
        assert nodes.count("train-0") == 2
        assert nodes.count("rollout-0") == 1
        assert log.failures() == []


async def until_alive_again(log: Log, deployment: str) -> None:
    """In its second life; operations that finished may have done so in its first."""
    key = f"{TENANT}.{deployment}"
    await log.until(
        lambda e: isinstance(e, WpgStarted) and str(e.deployment) == key and e.incarnation > 1
    )


async def until_sealed(log: Log, job: str) -> None:
    await log.until(lambda e: isinstance(e, SealCommitted) and e.deployment.job == job)


@pytest.mark.usefixtures("noop_nodes")
async def test_version_that_was_lost_before_it_was_synced_is_cut_again(short_dir: Path) -> None:
    """Its only copy was in the memory of the policy's node; the sync waits until it is back."""
    async with running_mesh(MeshConfig(seal_every=0), short_dir) as (mesh, log), tenant(mesh) as t:
        job = await t.submit_job("noop", NOOP)
        policy, sampler = job.deployment("policy"), job.deployment("sampler")
        await policy.optim_step(client.AdamParams(1e-3))
        published = policy.publish_weights()
        digest = (await published).digest
        both = mesh.kill("statemgr-train-0") + mesh.kill("worker-train-0")
        await until_gone(both, timeout_s=30)
        synced = sampler.sync_weights(published)
        assert (await synced).digest == digest
        await sampler.generate([client.Prompt([1])], client.SamplingParams(1))
        await log.caught_up()
        assert log.failures() == []


LONG = 33
"""Of the sampler's operations: it runs until it is cancelled, and those behind it wait."""
LAST = 65
FOR_EVER = 60_000
TINY = [policy_spec(), sampler_spec(positions=FOR_EVER + 10)]


async def send_batch(wire: Wire, log: Log, job: str) -> None:
    """Updates of a policy, and 64 reading operations that may all begin at once."""
    await wire.call("job.submit", SubmitJob(job, JobSpec(deployments=TINY)), JobStatus)
    session = (await wire.call("session.attach", JobRequest(job), Attached)).session

    async def send(deployment: str, seq: int, args: Args, *after: After) -> None:
        operation = Operation(f"{deployment}{seq}", session, args, after=list(after))
        assert "error" not in await wire.send(f"{job}.{deployment}.{seq}", operation)

    async with asyncio.TaskGroup() as group:
        for seq in range(2, LAST + 1):
            sampling = SamplingParams(FOR_EVER if seq == LONG else 4, ignore_eos=True)
            generate = Generate([Prompt([seq % VOCAB, 2, 3], seed=seq)], sampling)
            group.create_task(send("sampler", seq, generate))
    await send("sampler", 1, SyncWeights("policy", 3), After("policy", 3))
    for seq in range(1, LAST + 1):
        await log.until_queued(f"{job}.sampler.{seq}")
    training: list[Args] = [lesson(), STEP, PublishWeights(), lesson(1), STEP, SaveState("last")]
    for seq, args in enumerate(training, 1):
        await send("policy", seq, args, *([After("sampler", LAST)] if seq > 3 else []))


async def half_done(mesh: Mesh, log: Log, job: str) -> None:
    """Returns when half of the batch has ended, and the rest is in the hands of the node."""
    await log.until_finished(f"{job}.sampler.{LONG - 1}")
    bus = await Bus.open(mesh.credentials.bus, "test")
    try:
        subject = streams.permit_subject(NodeId("rollout-0"))
        permits = await bus.stored.get(streams.PERMITS, subject)
        assert permits is not None
        command = decode(permits.payload, Command)
        assert isinstance(command, Permits)
        assert [permit.operation.seq for permit in command.permits] == [*range(2, LAST + 1)]
    finally:
        await bus.close()


async def end_batch(wire: Wire, job: str) -> list[tuple[Outcome, object]]:
    """Its outcomes, once the long one is cancelled; the policy's last one has its weights."""
    request = OperationRequest(job, "sampler", str(LONG))
    await wire.call("operation.cancel", request, Explanation)
    names = [f"sampler.{seq}" for seq in range(1, LAST + 1)] + [f"policy.{s}" for s in range(1, 7)]
    done = [await wire.outcome(f"{job}.{name}") for name in names]
    return [(one.outcome, _without_path(one.result)) for one in done]


def _without_path(result: object) -> object:
    return result.weights_sha256 if isinstance(result, SaveStateResult) else result


@pytest.mark.slow
async def test_each_operation_of_a_batch_counts_once_whoever_is_killed_in_its_middle(
    short_dir: Path,
) -> None:
    nodes = [
        NodeConfig("rollout-0", "rollout", [64 * 2**20]),
        NodeConfig("train-0", "train", [16 * 2**20]),
    ]
    async with (
        running_mesh(MeshConfig(nodes=nodes), short_dir) as (mesh, log),
        Wire.connected(mesh) as wire,
    ):
        await send_batch(wire, log, "calm")
        await half_done(mesh, log, "calm")
        expected = await end_batch(wire, "calm")
        assert [outcome for outcome, _ in expected].count(Outcome.COMPLETED) == len(expected) - 1

        async with asyncio.TaskGroup() as group:
            group.create_task(send_batch(wire, log, "rank"))
            await log.until_queued("rank.sampler.9")
            mesh.kill("router-0")
        await half_done(mesh, log, "rank")
        kill_rank(mesh, "rank.sampler")
        assert await end_batch(wire, "rank") == expected

        await send_batch(wire, log, "agent")
        await half_done(mesh, log, "agent")
        mesh.kill("worker-rollout-0")
        assert await end_batch(wire, "agent") == expected

        for job in ("calm", "rank", "agent"):
            for seq in range(1, LAST + 1):
                await log.until_finished(f"{job}.sampler.{seq}")
            await log.caught_up()
            ended = log.finished(f"{job}.sampler")
            assert sorted(ended) == [*range(1, LAST + 1)], "not once each"
