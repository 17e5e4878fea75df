"""Ranks of adapters on one base share a process on a mesh: what is one's own stays one's own."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from phaseloom import client
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.supervisor import Mesh
from phaseloom.common.contract import streams
from phaseloom.common.contract.codec import content_type_of, decode
from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.events import WpgLost, WpgStarted
from phaseloom.common.contract.ids import OperationKey
from phaseloom.common.contract.operations import Progress
from phaseloom.common.transport.bus import Bus
from tests.support.jobs import TENANT, Log, kill_rank, rank_pid, running_mesh, tenant
from tests.support.node import STEP, exploding, lesson
from tests.support.pretrained import save_model
from tests.support.processes import until_gone

pytestmark = pytest.mark.timeout(240)
NEIGHBOUR = "neighbour"
NODES = [
    NodeConfig("rollout-0", "rollout", [16 * 2**20]),
    NodeConfig("train-0", "train", [16 * 2**20]),
]
LONG = 20_000
"""New tokens that take much longer than anything else here."""
_PATIENCE_S = 30.0


def policy_spec(rank: int, seed: int = 0) -> client.DeploymentSpec:
    model = client.ModelSpec(registered="tiny", adapter=client.Adapter(rank=rank, seed=seed))
    return client.DeploymentSpec("policy", "train", "fsdp", model, trainable=True)


async def train(policy: client.Deployment, steps: range) -> None:
    for number in steps:
        batch = lesson(number)
        policy.forward_backward(batch.batch, batch.loss)
        await policy.optim_step(replace(STEP.adam, learning_rate=0.05))


async def digest(policy: client.Deployment, name: str) -> str | None:
    return (await policy.save_state(name)).weights_sha256


async def until_threads(pid: int, num_threads: int) -> None:
    """Until a process has so many threads."""
    async with asyncio.timeout(_PATIENCE_S):
        while threads(pid) != num_threads:
            await asyncio.sleep(0.01)


def threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def extents(pid: int) -> int:
    """Mappings of host memory that the state manager has lent."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:")


async def until_started(log: Log, deployment: str, incarnation: int) -> None:
    key = f"{TENANT}.{deployment}", incarnation
    await log.until(
        lambda e: isinstance(e, WpgStarted) and (str(e.deployment), e.incarnation) == key
    )


async def until_lost(log: Log, deployment: str, incarnation: int = 1) -> WpgLost:
    """Until an incarnation of it (`<job>.<name>`) has ended."""
    key = f"{TENANT}.{deployment}", incarnation
    lost = await log.until(
        lambda e: isinstance(e, WpgLost) and (str(e.deployment), e.incarnation) == key
    )
    assert isinstance(lost, WpgLost)
    return lost


def policy_pid(mesh: Mesh, job: str, tenant: str = TENANT) -> int:
    return rank_pid(mesh, f"{job}.policy", tenant=tenant)


async def test_each_job_has_the_weights_that_it_has_alone_whatever_the_others_do(
    short_dir: Path, tmp_path: Path
) -> None:
    directory = await asyncio.to_thread(save_model, tmp_path / "model")
    config = MeshConfig(nodes=NODES[1:], models={"tiny": str(directory)})
    config = replace(config, tenants=[TENANT, NEIGHBOUR])
    async with (
        running_mesh(config, short_dir) as (mesh, log),
        tenant(mesh) as connection,
        tenant(mesh, NEIGHBOUR) as other,
    ):
        alone = await other.submit_job("alone", [policy_spec(4, seed=1)])
        policy = alone.deployment("policy")
        await train(policy, range(6))
        expected = await digest(policy, "end")

        kept = await connection.submit_job("first", [policy_spec(4, seed=1)])
        first = kept.deployment("policy")
        await train(first, range(2))
        pid = policy_pid(mesh, "first")
        assert pid != policy_pid(mesh, "alone", NEIGHBOUR), "tenants share no process"
        lone_threads, lone_extents = threads(pid), extents(pid)

        job = await connection.submit_job("second", [policy_spec(8)])
        second = job.deployment("policy")
        await asyncio.gather(train(first, range(2, 4)), train(second, range(4)))
        assert policy_pid(mesh, "second") == pid, "they share a process"

        kill_rank(mesh, "first.policy")
        for each in ("first.policy", "second.policy"):
            await until_lost(log, each)
        await asyncio.gather(train(first, range(4, 6)), train(second, range(4, 6)))
        assert await digest(first, "end") == expected
        again = policy_pid(mesh, "first")
        assert policy_pid(mesh, "second") == again != pid
        assert policy_pid(mesh, "alone", NEIGHBOUR) != again
        assert len(log.starts("first.policy")) == len(log.starts("second.policy")) == 2

        # One that fails half-way is rebuilt, and nobody else is.
        with pytest.raises(CallerError):
            await second.forward_backward(exploding().batch, exploding().loss)
        with pytest.raises(CallerError, match="partial gradients"):
            await second.optim_step(STEP.adam)
        await train(second, range(6, 8))
        await train(first, range(6, 8))
        assert len(log.starts("second.policy")) == 3
        assert policy_pid(mesh, "second") == again

        await job.finish()
        await until_lost(log, "second.policy", 3)
        await train(first, range(8, 10))
        await train(policy, range(6, 10))
        expected = await digest(policy, "later")
        assert await digest(first, "later") == expected
        assert len(log.starts("first.policy")) == 2
        assert extents(again) == lone_extents
        await until_threads(again, lone_threads)


async def test_job_that_takes_its_process_along_twice_has_one_of_its_own(
    short_dir: Path, tmp_path: Path
) -> None:
    directory = await asyncio.to_thread(
        save_model, tmp_path / "model", max_position_embeddings=LONG + 10
    )
    config = MeshConfig(nodes=NODES[:1], models={"tiny": str(directory)}, max_losses=2)
    model = client.ModelSpec(registered="tiny", adapter=client.Adapter(rank=4))
    shared = client.Batching.SHARED
    spec = client.DeploymentSpec("sampler", "rollout", "sampler", model, batching=shared)
    sampling = client.SamplingParams(LONG, ignore_eos=True)
    async with running_mesh(config, short_dir) as (mesh, log), tenant(mesh) as connection:
        quiet = await connection.submit_job("quiet", [spec])
        before = await said(quiet, 0)
        job = await connection.submit_job("loud", [spec])
        async with beginnings(mesh, "loud") as has_begun:
            long = job.deployment("sampler").generate([client.Prompt([1])], sampling, stream=True)
            pids = set()
            for life in (1, 2):
                await until_started(log, "quiet.sampler", life)
                await has_begun()
                pid = rank_pid(mesh, "loud.sampler")
                assert rank_pid(mesh, "quiet.sampler") == pid
                pids.add(pid)
                os.kill(pid, signal.SIGKILL)
                await until_lost(log, "quiet.sampler", life)
            await has_begun()
            await long.stop()
            await long
        await until_started(log, "quiet.sampler", 3)
        own = rank_pid(mesh, "loud.sampler")
        assert own != rank_pid(mesh, "quiet.sampler")

        third = await connection.submit_job("third", [spec])
        await kill_at_work(mesh, log, third, sampling, "quiet.sampler", 3)
        await third.finish()
        assert await said(quiet, 0) == before
        assert len(log.starts("quiet.sampler")) == 4
        other = rank_pid(mesh, "quiet.sampler")
        assert pids.isdisjoint({own, other})

        # A job that is ended while it is at work takes nobody along.
        ended = await connection.submit_job("ended", [spec])
        async with beginnings(mesh, "ended") as has_begun:
            ended.deployment("sampler").generate([client.Prompt([1])], sampling, stream=True)
            await has_begun()
        assert rank_pid(mesh, "ended.sampler") == other
        await ended.finish()
        await until_lost(log, "ended.sampler")
        assert await said(quiet, 0) == before
        assert len(log.starts("quiet.sampler")) == 4

        await quiet.finish()
        await until_gone([other], _PATIENCE_S)
        await said(job, 4)
        assert rank_pid(mesh, "loud.sampler") == own


async def kill_at_work(
    mesh: Mesh,
    log: Log,
    job: client.Job,
    sampling: client.SamplingParams,
    neighbour: str,
    incarnation: int,
) -> None:
    """Kill the process in which a job is at work, and an idle neighbour that has died twice. A
    death of its own would be one too many for the neighbour: it has completed nothing since the
    first."""
    async with beginnings(mesh, job.name) as has_begun:
        long = job.deployment("sampler").generate([client.Prompt([1])], sampling, stream=True)
        await has_begun()
        kill_rank(mesh, f"{job.name}.sampler")
        lost = await until_lost(log, neighbour, incarnation)
        assert [str(key) for key in lost.culprits] == [f"{TENANT}.{job.name}.sampler"]
        assert f"{job.name}.sampler was at work" in lost.error.message
        await has_begun()
        await long.stop()
        await long


@asynccontextmanager
async def beginnings(mesh: Mesh, job: str) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Waits until a rank of its sampler has told the first tokens of a `generate`; once a rank."""
    bus = await Bus.open(mesh.credentials.bus, "test")
    key = OperationKey(TENANT, job, "sampler", "*")
    told = await bus.client.subscribe(streams.progress_subject(key))

    async def has_begun() -> None:
        while True:
            message = await told.next_msg(timeout=_PATIENCE_S)
            progress = decode(message.data, Progress, content_type_of(message.headers))
            if any(drawn.offset == 0 for drawn in progress.drawn):
                return

    try:
        yield has_begun
    finally:
        await bus.close()


async def said(job: client.Job, seed: int) -> list[int]:
    """What its sampler says, shortly."""
    prompt = client.Prompt([1, 2], seed)
    result = await job.deployment("sampler").generate(
        [prompt], client.SamplingParams(4, ignore_eos=True)
    )
    return client.int32s(result.sequences[0][0].tokens)
