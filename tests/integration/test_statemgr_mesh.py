"""The state manager within a whole mesh: killed, or out of room, while jobs run."""

from __future__ import annotations

import asyncio
import resource
import signal
from pathlib import Path

import msgspec
import pytest

from phaseloom import client
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.supervisor import Mesh
from phaseloom.common.contract.codec import decode
from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.contract.events import Event, NodeUp, SealCommitted, SealFailed, WpgLost
from phaseloom.common.contract.ids import NodeId
from phaseloom.common.contract.specs import Layout
from phaseloom.common.contract.state_agent import StatusReport
from phaseloom.common.contract.streams import state_subject
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.services import request_reply
from tests.support.jobs import (
    NOOP,
    TASKS,
    TENANT,
    policy_seq,
    run_job,
    running_mesh,
    short,
    tenant,
)
from tests.support.processes import until_gone
from tests.support.statedaemon import flip_in_memory, is_empty
from tests.support.warm import program_pid, signal_programs

STEPS = 5
A, B = TASKS
MiB = 2**20


@pytest.mark.slow
async def test_killed_state_managers_cost_two_sharing_jobs_nothing(
    expected: dict[str, str], short_dir: Path
) -> None:
    """Its agent and its ranks live on: no node comes up again and no rank is started again."""
    async with running_mesh(MeshConfig(seal_every=4), short_dir) as (mesh, log):
        async with asyncio.TaskGroup() as group:
            jobs = [group.create_task(run_job(mesh, task, short(task, STEPS))) for task in TASKS]
            await log.until_finished(f"{A}.policy.{policy_seq(1, 1)}")
            mesh.kill("statemgr-train-0")
            await log.until_finished(f"{B}.policy.{policy_seq(2, 2)}")
            mesh.kill("statemgr-rollout-0")
            await log.until_finished(f"{A}.policy.{policy_seq(3, 1)}")
            mesh.kill("statemgr-train-0")
            mesh.kill("statemgr-rollout-0")
        assert {task: job.result() for task, job in zip(TASKS, jobs, strict=True)} == expected
        assert log.failures() == []
        assert sum(isinstance(event, NodeUp) for event in log.events) == 2
        for task in TASKS:
            for name in ("policy", "sampler", "reference"):
                assert len(log.starts(f"{task}.{name}")) == 1, f"{task}.{name} started again"


@pytest.mark.usefixtures("noop_nodes")
async def test_version_that_only_memory_holds_survives_the_state_manager(short_dir: Path) -> None:
    async with running_mesh(MeshConfig(seal_every=0), short_dir) as (mesh, log), tenant(mesh) as t:
        job = await t.submit_job("noop", NOOP)
        policy, sampler = job.deployment("policy"), job.deployment("sampler")
        await policy.optim_step(client.AdamParams(1e-3))
        published = policy.publish_weights()
        digest = (await published).digest
        await until_gone(mesh.kill("statemgr-train-0"), timeout_s=30)
        synced = sampler.sync_weights(published)
        assert (await synced).digest == digest
        await policy.optim_step(client.AdamParams(1e-3))
        assert log.failures() == []
        assert len(log.starts("noop.policy")) == 1


@pytest.mark.usefixtures("noop_nodes")
async def test_versions_of_a_job_that_ends_while_an_agent_is_away_leave_its_node(
    short_dir: Path,
) -> None:
    """The agent was told to drop them, and had no time for it; its state manager lives on."""
    async with running_mesh(MeshConfig(), short_dir) as (mesh, log), tenant(mesh) as t:
        job = await t.submit_job("noop", NOOP)
        await job.deployment("sampler").sync_weights(job.deployment("policy").publish_weights())
        agents = mesh.pids("worker-rollout-0")
        signal_programs(agents, signal.SIGSTOP)
        await job.finish()
        signal_programs(agents, signal.SIGKILL)
        bus = await Bus.open(mesh.credentials.bus, "operator")
        num_ups = 0

        def is_back(event: Event) -> bool:
            nonlocal num_ups
            num_ups += isinstance(event, NodeUp) and event.node == "rollout-0"
            return num_ups == 2

        await log.until(is_back)
        async with asyncio.timeout(60):
            while not is_empty(await _report(bus, "rollout-0")):
                pass
        await bus.close()


@pytest.mark.usefixtures("noop_nodes")
async def test_deployment_with_two_ranks_goes_on_after_the_state_manager_is_killed(
    short_dir: Path,
) -> None:
    train = NodeConfig("train-0", "train", [16 * MiB, 16 * MiB])
    nodes = [NodeConfig("rollout-0", "rollout", [8 * MiB]), train]
    pair = msgspec.structs.replace(NOOP[0], layout=Layout(dp=2))
    config = MeshConfig(nodes=nodes, seal_every=0)
    async with running_mesh(config, short_dir) as (mesh, log), tenant(mesh) as t:
        job = await t.submit_job("noop", [pair, NOOP[1]])
        policy, sampler = job.deployment("policy"), job.deployment("sampler")
        await policy.optim_step(client.AdamParams(1e-3))
        await until_gone(mesh.kill("statemgr-train-0"), timeout_s=30)
        published = policy.publish_weights()
        assert (await sampler.sync_weights(published)).digest == (await published).digest
        assert log.failures() == []
        assert len(log.starts("noop.policy")) == 1


@pytest.mark.usefixtures("noop_nodes")
async def test_bit_that_flips_in_a_host_copy_costs_the_job_nothing(short_dir: Path) -> None:
    """It begins again from the log, whoever has the device meanwhile. There are no seals, which are
    written from host copies, too: a bit that flips meanwhile would spoil them."""
    train = NodeConfig("train-0", "train", [4096])  # each of these states takes one page
    nodes = [NodeConfig("rollout-0", "rollout", [8 * MiB]), train]
    config = MeshConfig(nodes=nodes, seal_every=0)
    async with running_mesh(config, short_dir) as (mesh, log), tenant(mesh) as t:
        jobs = [await t.submit_job(name, NOOP[:1]) for name in ("first", "second")]
        first, second = (job.deployment("policy") for job in jobs)
        for _ in range(4):
            await first.optim_step(client.AdamParams(1e-3))
        before = await first.publish_weights()
        await second.optim_step(client.AdamParams(1e-3))
        await _digested(mesh, "train-0")
        pid = program_pid(*mesh.pids("statemgr-train-0"))
        flip_in_memory(pid, f"the host copy of {TENANT}.first.policy", place=0)
        after = await first.publish_weights()
        assert after.digest == before.digest
        await second.optim_step(client.AdamParams(1e-3))
        assert log.failures() == []
        assert [len(log.starts(f"{job.name}.policy")) for job in jobs] == [2, 1]


@pytest.mark.usefixtures("noop_nodes")
async def test_bit_that_flips_in_a_version_before_it_is_sealed_costs_the_job_nothing(
    short_dir: Path,
) -> None:
    """Its policy is rebuilt from its seal and the log, and makes it again: the sync waits."""
    train = NodeConfig("train-0", "train", [16 * MiB])
    nodes = [NodeConfig("rollout-0", "rollout", [8 * MiB]), train]
    config = MeshConfig(nodes=nodes, seal_every=0)
    async with running_mesh(config, short_dir) as (mesh, log), tenant(mesh) as t:
        job = await t.submit_job("noop", NOOP)
        policy, sampler = job.deployment("policy"), job.deployment("sampler")
        await policy.optim_step(client.AdamParams(1e-3))
        publishing = policy.publish_weights()
        published = await publishing
        pid = program_pid(*mesh.pids("statemgr-train-0"))
        flip_in_memory(
            program_pid(pid), f"version {TENANT}.noop.policy.{published.version}", place=0
        )
        assert (await sampler.sync_weights(publishing)).digest == published.digest
        await policy.optim_step(client.AdamParams(1e-3))
        assert log.failures() == []
        assert len(log.starts("noop.policy")) == 2
        assert len(log.starts("noop.sampler")) == 1


@pytest.mark.usefixtures("noop_nodes")
async def test_version_that_a_seal_finds_bad_is_made_again_and_sealed(short_dir: Path) -> None:
    """Nobody has read it: who is to put it on disk verifies it, too."""
    train = NodeConfig("train-0", "train", [16 * MiB])
    nodes = [NodeConfig("rollout-0", "rollout", [8 * MiB]), train]
    config = MeshConfig(nodes=nodes, seal_every=3)
    async with running_mesh(config, short_dir) as (mesh, log), tenant(mesh) as t:
        policy = (await t.submit_job("noop", NOOP[:1])).deployment("policy")
        await policy.optim_step(client.AdamParams(1e-3))
        published = await policy.publish_weights()
        pid = program_pid(*mesh.pids("statemgr-train-0"))
        flip_in_memory(
            program_pid(pid), f"version {TENANT}.noop.policy.{published.version}", place=0
        )
        async with asyncio.timeout(120):
            for kind in (SealFailed, WpgLost, SealCommitted):
                while not any(isinstance(event, kind) for event in log.events):
                    await policy.optim_step(client.AdamParams(1e-3))
        (sealed, *_) = (event for event in log.events if isinstance(event, SealCommitted))
        assert published.version in sealed.versions
        assert log.failures() == []


async def _digested(mesh: Mesh, node: str) -> None:
    """What has left a device there has its digest."""
    bus = await Bus.open(mesh.credentials.bus, "test")
    async with asyncio.timeout(30):
        while any(state.dirty_bytes for state in (await _report(bus, node)).deployments):
            pass
    await bus.close()


async def _report(bus: Bus, node: str) -> StatusReport:
    subject = state_subject(NodeId(node))
    message = await request_reply(bus.client, subject, b"", timeout_s=10.0, headers={})
    report: StatusReport = decode(message.data, StatusReport)
    return report


def _limit_files(mesh: Mesh, child: str, num_bytes: int) -> None:
    """As a full disk: no file of this child may grow beyond that. -1: as large as it likes."""
    pid = program_pid(*mesh.pids(child))
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


async def test_seal_that_finds_no_room_fails_alone_and_the_next_one_is_made(
    expected: dict[str, str], short_dir: Path
) -> None:
    async with running_mesh(MeshConfig(seal_every=4), short_dir) as (mesh, log):
        async with asyncio.TaskGroup() as group:
            job = group.create_task(run_job(mesh, A, short(A, STEPS)))
            await log.until_finished(f"{A}.policy.1")  # its host memory is there
            _limit_files(mesh, "statemgr-train-0", 4 * MiB)
            failed = await log.until(lambda event: isinstance(event, SealFailed))
            assert isinstance(failed, SealFailed)
            assert failed.error.code is Code.RESOURCE_EXHAUSTED
            assert failed.error.details["num_bytes"].isdecimal()
            assert not any(isinstance(event, SealCommitted) for event in log.events)
            _limit_files(mesh, "statemgr-train-0", resource.RLIM_INFINITY)
            await log.until(lambda event: isinstance(event, SealCommitted))
        assert job.result() == expected[A]
        assert log.failures() == []
        assert len(log.starts(f"{A}.policy")) == 1


@pytest.mark.usefixtures("noop_nodes")
async def test_more_jobs_than_host_memory_holds_take_turns_through_nvme(short_dir: Path) -> None:
    """Each of these states takes one page: two fit, three train."""
    train = NodeConfig("train-0", "train", [16 * MiB], host_memory_bytes=2 * 4096)
    nodes = [NodeConfig("rollout-0", "rollout", [8 * MiB]), train]
    config = MeshConfig(nodes=nodes, seal_every=0)
    async with running_mesh(config, short_dir) as (mesh, log), tenant(mesh) as t:
        jobs = [await t.submit_job(name, NOOP[:1]) for name in ("first", "second", "third")]
        policies = [job.deployment("policy") for job in jobs]
        for _ in range(3):
            for policy in policies:
                await policy.optim_step(client.AdamParams(1e-3))
        for job in jobs:
            assert len(log.starts(f"{job.name}.policy")) == 1
            await job.finish()


@pytest.mark.usefixtures("noop_nodes")
async def test_full_host_memory_fails_the_move_that_needs_it_and_nobody_else(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these states takes one page: two fit, and nothing may go to NVMe."""
    monkeypatch.setenv("PHASELOOM_STATEMGR_NVME_BYTES", "0")
    train = NodeConfig("train-0", "train", [16 * MiB], host_memory_bytes=2 * 4096)
    nodes = [NodeConfig("rollout-0", "rollout", [8 * MiB]), train]
    config = MeshConfig(nodes=nodes, seal_every=0)
    async with running_mesh(config, short_dir) as (mesh, log), tenant(mesh) as t:
        first = await t.submit_job("first", NOOP[:1])
        second = await t.submit_job("second", NOOP[:1])
        with pytest.raises(ResourceError, match="8192 of 8192 are in use") as caught:
            await t.submit_job("third", NOOP[:1])
        assert caught.value.info.code is Code.RESOURCE_EXHAUSTED
        policy = first.deployment("policy")
        await policy.optim_step(client.AdamParams(1e-3))
        with pytest.raises(ResourceError, match="8192 of 8192 are in use") as caught:
            await policy.publish_weights()
        assert caught.value.info.code is Code.RESOURCE_EXHAUSTED
        await second.finish()
        await log.until(lambda e: isinstance(e, WpgLost) and e.deployment.job == "second")
        await policy.optim_step(client.AdamParams(1e-3))
        await policy.publish_weights()
        assert len(log.starts("first.policy")) == 1
