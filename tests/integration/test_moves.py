"""Deployments that move between nodes, or lose theirs, and end with the same weights.

Real processes on emulated nodes of one machine. What happens when is told by the decision log.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from grpo import declared
from rich.console import Console

from phaseloom.cli.jobs import drain_node
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.supervisor import Mesh
from phaseloom.client import Deployment, Durability, MeshJob
from phaseloom.common.contract.api import DrainNode, NodeStatus
from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.contract.events import NodeLost, ReplanComputed, SealCommitted, StateMirrored
from phaseloom.common.contract.ids import NodeId
from phaseloom.common.contract.operations import ForwardBackward, OptimStepResult
from phaseloom.common.contract.specs import DeploymentSpec, JobSpec
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.services import call_node_api
from tests.support import inprocess
from tests.support.jobs import (
    NOOP,
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
from tests.support.node import STEP, lesson, policy_spec

A = TASKS[0]
POLICY = f"{A}.policy"
SETTINGS = short(TASKS[0], 3)
NODES = [
    NodeConfig("rollout-0", "rollout", [8 * 2**20]),
    NodeConfig("train-0", "train", [16 * 2**20]),
    NodeConfig("train-1", "train", [16 * 2**20]),
]
OTHER = {"train-0": "train-1", "train-1": "train-0"}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """SHA-256 of the final weights, undisturbed."""
    return oracle(A, SETTINGS, tmp_path_factory.mktemp("oracle"))


@asynccontextmanager
async def running(directory: Path, **settings: float) -> AsyncIterator[tuple[Mesh, Log, Bus]]:
    """A mesh with a spare train node, and an operator's connection."""
    config = msgspec.structs.replace(MeshConfig(nodes=NODES, seal_every=4), **settings)
    async with running_mesh(config, directory) as (mesh, log):
        bus = await Bus.open(mesh.credentials.bus, "operator")
        try:
            yield mesh, log, bus
        finally:
            await bus.close()


def homes(log: Log) -> list[str]:
    """Nodes of the policy's lives."""
    return [str(life.node) for life in log.starts(POLICY)]


def sealed_on_disk(run_dir: Path) -> list[Path]:
    assert (run_dir / "nodes").is_dir()
    return list(run_dir.glob("nodes/**/seal-*"))


async def ask(
    bus: Bus, call: str, node: str, *, undo: bool = False, timeout_s: float = 30
) -> NodeStatus:
    request = DrainNode(node, undo)
    status: NodeStatus = await call_node_api(
        bus.client, call, request, NodeStatus, timeout_s=timeout_s
    )
    return status


async def until_empty(bus: Bus, node: str) -> None:
    """Whoever answers meanwhile."""
    async with asyncio.timeout(120):
        while True:
            with contextlib.suppress(ResourceError):
                if not (await ask(bus, "status", node, timeout_s=5)).deployments:
                    return
            await asyncio.sleep(0.05)


def learn(
    policy: inprocess.Deployment | Deployment, batch: ForwardBackward
) -> Awaitable[OptimStepResult]:
    """One step; its operations are submitted at once."""
    policy.forward_backward(batch.batch, batch.loss)
    return policy.optim_step(STEP.adam)


class Gates:
    """A controller waits at each of its barriers until it is let on."""

    def __init__(self) -> None:
        self._at = {name: asyncio.Event() for name in ("start", "end")}
        self._open = {name: asyncio.Event() for name in ("start", "end")}

    async def __call__(self, name: str) -> None:
        self._at[name].set()
        await self._open[name].wait()

    async def reached(self, name: str) -> None:
        await self._at[name].wait()

    def lift(self, name: str) -> None:
        self._open[name].set()


async def test_node_is_drained_in_the_middle_of_a_run_and_the_weights_are_the_same(
    expected: str, short_dir: Path
) -> None:
    async with running(short_dir) as (mesh, log, bus):
        gates = Gates()
        gates.lift("start")
        async with asyncio.TaskGroup() as group:
            job = group.create_task(run_job(mesh, A, SETTINGS, barrier=gates))
            await log.until_finished(f"{POLICY}.{policy_seq(2, 1)}")
            (home,) = set(homes(log))
            out = StringIO()
            console = Console(file=out, width=200)
            settings = mesh.credentials.bus
            assert await drain_node(settings, DrainNode(home), 120.0, console) == 0
            assert f"moves to {OTHER[home]}" in out.getvalue()
            assert f"{home}: empty; it may be shut down" in out.getvalue()
            assert (await ask(bus, "status", home)).is_draining
            assert await drain_node(settings, DrainNode(OTHER[home]), 0.5, console) == 1
            assert "no other node of pool 'train' has room" in out.getvalue()
            assert "draining continues" in out.getvalue()
            await ask(bus, "drain", OTHER[home], undo=True)
            with pytest.raises(PhaseloomError) as refused:
                await drain_node(settings, DrainNode(NodeId("typo")), 0.5, console)
            assert refused.value.info.code is Code.NOT_FOUND
            assert home in refused.value.info.remedy
            gates.lift("end")
        assert job.result() == expected
        await log.caught_up()
        assert homes(log) == [home, OTHER[home]]
        assert log.starts(POLICY)[-1].applied > 0, "it began with its seal"
        mirrors = [e for e in log.events if isinstance(e, StateMirrored)]
        assert [(str(e.node), e.error) for e in mirrors] == [(OTHER[home], None)]
        assert log.failures() == []


@pytest.mark.slow
async def test_whoever_is_killed_on_the_way_it_arrives_with_the_same_weights(
    expected: str, short_dir: Path
) -> None:
    """The scheduler, then the node that it goes to, then the one that it comes from."""
    async with running(short_dir) as (mesh, log, bus):
        gates = Gates()
        async with asyncio.TaskGroup() as group:
            job = group.create_task(run_job(mesh, A, SETTINGS, barrier=gates))
            await gates.reached("start")
            await log.caught_up()
            (home,) = set(homes(log))
            other = OTHER[home]
            await ask(bus, "drain", home)
            mesh.kill("scheduler")
            await until_empty(bus, home)

            gates.lift("start")
            await log.until_finished(f"{POLICY}.{policy_seq(2, 1)}")
            await ask(bus, "drain", home, undo=True)
            await ask(bus, "drain", other)
            mesh.kill(f"statemgr-{home}")
            mesh.kill(f"worker-{home}")
            await until_empty(bus, other)

            await gates.reached("end")
            await ask(bus, "drain", other, undo=True)
            await ask(bus, "drain", home)
            mesh.kill(f"statemgr-{home}")
            mesh.kill(f"worker-{home}")
            await until_empty(bus, home)
            gates.lift("end")
        assert job.result() == expected
        await log.caught_up()
        assert homes(log)[0] == home
        assert homes(log)[-1] == other
        assert log.failures() == []


async def test_lost_node_costs_a_remote_job_nothing(expected: str, short_dir: Path) -> None:
    """It goes on elsewhere, from the copy of its seal and the operations after it."""
    async with running(short_dir, node_grace_s=0.1) as (mesh, log, _):
        gates = Gates()
        async with asyncio.TaskGroup() as group:
            running_job = run_job(mesh, A, SETTINGS, barrier=gates, durability=Durability.REMOTE)
            job = group.create_task(running_job)
            gates.lift("start")
            await log.until(lambda e: isinstance(e, SealCommitted) and bool(e.copies))
            await log.until_finished(f"{POLICY}.{policy_seq(2, 1)}")
            (home,) = set(homes(log))
            mesh.lose(home)
            gates.lift("end")
        assert job.result() == expected
        await log.caught_up()
        assert homes(log) == [home, OTHER[home]]
        assert log.starts(POLICY)[-1].applied > 0
        assert log.failures() == []


async def test_job_whose_seal_is_gone_with_its_node_fails_as_a_whole(short_dir: Path) -> None:
    """Its seals are on that one node's disk, and it has no checkpoint to fall back to."""
    async with running(short_dir, node_grace_s=0.1) as (mesh, log, bus):
        endless = short(A, 1000)  # whenever its first seal is there, it is in the middle
        job = asyncio.create_task(run_job(mesh, A, endless))
        await log.until(lambda e: isinstance(e, SealCommitted))
        (home,) = set(homes(log))
        mesh.lose(home)
        await log.until(lambda e: isinstance(e, NodeLost) and e.node == home)
        request = DrainNode(home, gone=True)
        async with asyncio.timeout(60):
            while True:  # the log has it before the scheduler has folded it
                with contextlib.suppress(CallerError):
                    await call_node_api(bus.client, "drain", request, NodeStatus)
                    break
        with pytest.raises(PhaseloomError, match=f"node {home} is gone"):
            await job


async def test_host_seals_outlive_ranks_and_daemons_and_touch_no_disk(
    expected: str, short_dir: Path
) -> None:
    async with running(short_dir) as (mesh, log, _):
        gates = Gates()
        gates.lift("start")
        async with asyncio.TaskGroup() as group:
            running_job = run_job(mesh, A, SETTINGS, barrier=gates, durability=Durability.HOST)
            job = group.create_task(running_job)
            await log.until(lambda e: isinstance(e, SealCommitted))
            await log.until_finished(f"{POLICY}.{policy_seq(2, 1)}")
            (home,) = set(homes(log))
            mesh.kill(f"statemgr-{home}")
            kill_rank(mesh, POLICY)
            await gates.reached("end")
            assert sealed_on_disk(short_dir) == []
            gates.lift("end")
        assert job.result() == expected
        await log.caught_up()
        assert log.starts(POLICY)[-1].applied > 0
        assert log.failures() == []


async def test_job_that_the_scheduler_repacks_ends_with_the_same_weights(short_dir: Path) -> None:
    """Two jobs on nodes of their own are put together once the one that was between them has left.
    Whichever goes to the other, operations of both are under way."""
    steps = [lesson(number) for number in range(3)]
    with inprocess.Job(JobSpec(deployments=[policy_spec()])) as undisturbed:
        alone = undisturbed.deployment("policy")
        for step in steps:
            await learn(alone, step)
        expected = alone.backend.weights_sha256()

    config = MeshConfig(
        nodes=[*NODES, NodeConfig("rollout-1", "rollout", [8 * 2**20])],
        placement="coexec_repack",
        ordering="fcfs",
        max_group_jobs=2,
        seal_every=2,
    )
    cycle = declared(5.0, 5.0)
    async with running_mesh(config, short_dir) as (mesh, log), tenant(mesh) as connection:

        async def submit(name: str, specs: list[DeploymentSpec]) -> MeshJob:
            return await connection.submit_job(name, specs, cycle=cycle, duration_s=1e6)

        jobs = {"first": await submit("first", [policy_spec(), NOOP[1]])}
        between = await submit("between", NOOP)
        jobs["second"] = await submit("second", [policy_spec(), NOOP[1]])
        policies = {name: job.deployment("policy") for name, job in jobs.items()}
        homes = {name: await home(log, name, 1) for name in policies}
        assert homes["first"] != homes["second"]
        assert await home(log, "between", 1) == homes["first"]
        for policy in policies.values():
            await learn(policy, steps[0])
        await between.finish()
        for policy in policies.values():
            learn(policy, steps[1])

        repacked = await log.until(lambda e: isinstance(e, ReplanComputed) and bool(e.moves))
        assert isinstance(repacked, ReplanComputed)
        (move,) = repacked.moves
        (other,) = homes.keys() - {move.job.job}
        assert await home(log, move.job.job, 2) == homes[other]
        for policy in policies.values():
            await learn(policy, steps[2])
            assert (await policy.save_state("end")).weights_sha256 == expected
        await log.caught_up()
        assert log.starts(f"{move.job.job}.policy")[1].applied > 0, "it began with its seal"
        assert len(log.starts(f"{other}.policy")) == 1
        assert log.failures() == []


async def home(log: Log, job: str, life: int) -> str:
    """The node of that life of its policy, counted from 1, once it has begun."""
    await log.until(lambda _: len(log.starts(f"{job}.policy")) >= life)
    return str(log.starts(f"{job}.policy")[life - 1].node)
