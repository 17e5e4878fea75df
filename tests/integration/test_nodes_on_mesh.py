"""Jobs whose deployments are spread over two nodes, on a mesh of real processes: they learn the
same bits as on one node, whoever is killed on either of them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

import pytest
import pytest_asyncio
from msgspec.structs import replace

from phaseloom import client
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.supervisor import Mesh
from phaseloom.common.contract.api import DrainNode, NodeStatus
from phaseloom.common.contract.errors import ResourceError
from phaseloom.common.contract.events import (
    Event,
    OperationFinished,
    SealCommitted,
    StateSnapshotTaken,
    WpgLost,
    WpgStarted,
)
from phaseloom.common.contract.operations import AdamParams
from phaseloom.common.contract.specs import DeploymentSpec, Layout
from phaseloom.common.process import config as configuration
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.services import call_node_api
from tests.support.directories import short_directory
from tests.support.jobs import TENANT, Log, kill_rank, rank_pid, running_mesh, tenant
from tests.support.node import lesson, policy_spec, sampler_spec
from tests.support.warm import signal_programs

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROLLOUT, TRAIN, SPARE = ("rollout-0", "rollout-1"), ("train-0", "train-1"), "train-2"
MESH = MeshConfig(
    nodes=[
        *(NodeConfig(name, "rollout", [8 * 2**20] * 2) for name in ROLLOUT),
        *(NodeConfig(name, "train", [16 * 2**20] * 2) for name in (*TRAIN, SPARE)),
    ],
    seal_every=1,
)
ADAM = AdamParams(1e-2)
TWO = Layout(dp=2)
STEPS = 6
PATIENCE_S = 60.0


def specs(num_nodes: int) -> list[DeploymentSpec]:
    sampler = replace(sampler_spec(), layout=TWO, num_nodes=num_nodes)
    return [replace(policy_spec(layout=TWO), num_nodes=num_nodes), sampler]


@dataclass
class Learned:
    losses: list[float]
    weights: str
    """Digest of the version in the end."""
    tokens: list[list[list[int]]]
    """What the sampler draws from it."""


async def learn(
    job: client.MeshJob, kill: Callable[[], None] | None = None, log: Log | None = None
) -> Learned:
    """Args: kill: called when half of it is done and the policy has a seal, and its next operation
    is under way. log: with kill."""
    policy, sampler = job.deployment("policy"), job.deployment("sampler")
    losses = []
    for step in range(STEPS):
        args = lesson(step)
        is_half = step == STEPS // 2
        if is_half and log is not None:
            for node in TRAIN:
                await log.until(partial(is_sealed, job.name, node))
        trained = policy.forward_backward(args.batch, args.loss)
        if is_half and kill is not None:
            kill()
        losses.append((await trained).metrics["loss:sum"])
        await policy.optim_step(ADAM)
    published = policy.publish_weights()
    await sampler.sync_weights(published)
    prompts = [client.Prompt([1, 2, 3]), client.Prompt([4, 5])]
    generated = await sampler.generate(prompts, client.SamplingParams(5, temperature=0.0))
    tokens = [[list(s.tokens) for s in group] for group in generated.sequences]
    return Learned(losses, (await published).digest, tokens)


def is_sealed(job: str, node: str, event: Event) -> bool:
    """Whether it has its part of a seal on disk."""
    return isinstance(event, SealCommitted) and (event.deployment.job, event.node) == (job, node)


@dataclass
class World:
    mesh: Mesh
    log: Log
    tenant: client.Mesh
    expected: Learned
    """On one node, of as many ranks."""

    def failures(self, job: str) -> list[OperationFinished]:
        return [failed for failed in self.log.failures() if failed.key.job == job]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world() -> AsyncIterator[World]:
    with short_directory() as directory, pytest.MonkeyPatch.context() as patch:
        # A slow machine, where the bus is away for longer, costs no life either.
        patch.setenv(f"{configuration.PREFIX}WORKER_LEASE_TTL_S", "6")
        async with running_mesh(MESH, directory) as (mesh, log), tenant(mesh) as connection:
            job = await connection.submit_job("one", specs(1))
            expected = await learn(job)
            await job.finish()
            yield World(mesh, log, connection, expected)


async def test_job_over_two_nodes_learns_the_same_bits_as_on_one(world: World) -> None:
    job = await world.tenant.submit_job("two", specs(2))
    assert await learn(job) == world.expected
    await job.finish()
    await world.log.caught_up()
    starts = world.log.starts("two.policy")
    assert sorted((str(s.node), s.devices) for s in starts) == [(name, [0]) for name in TRAIN]
    for node in TRAIN:
        await world.log.until(partial(is_sealed, "two", node))
    assert world.failures(job.name) == []


def of_rank(deployment: str, node: str) -> Callable[[Mesh, str], None]:
    return lambda mesh, job: kill_rank(mesh, f"{job}.{deployment}", node)


def of_services(*names: str) -> Callable[[Mesh, str], None]:
    def kill(mesh: Mesh, _: str) -> None:
        for name in names:
            mesh.kill(name)

    return kill


KILLS = {
    "leader": of_rank("policy", TRAIN[0]),
    "follower": of_rank("policy", TRAIN[1]),
    "leaders-agent": of_services(f"worker-{TRAIN[0]}"),
    "followers-agent": of_services(f"worker-{TRAIN[1]}"),
    "leaders-node": of_services(f"worker-{TRAIN[0]}", f"statemgr-{TRAIN[0]}"),
    "followers-node": of_services(f"worker-{TRAIN[1]}", f"statemgr-{TRAIN[1]}"),
}
"""By who is killed; the deployment has another life then."""
BRIEF = ("leader", "follower", "leaders-node")
"""Who is killed in `make test`: a node's agent dies with the node, too."""


@pytest.mark.parametrize(
    "who",
    [pytest.param(who, marks=[] if who in BRIEF else [pytest.mark.slow]) for who in KILLS],
)
async def test_killed_part_costs_a_life_and_no_bit(world: World, who: str) -> None:
    job = await world.tenant.submit_job(who, specs(2))
    learned = await learn(job, lambda: KILLS[who](world.mesh, who), world.log)
    assert learned == world.expected
    await job.finish()
    await world.log.caught_up()
    lives = world.log.starts(f"{who}.policy")
    assert len(lives) == 4, "two lives of two parts"
    assert len({life.applied for life in lives[2:]}) == 1
    assert lives[-1].applied > 0, "not started from its seal"
    assert world.failures(job.name) == []


@pytest.mark.parametrize("node", [TRAIN[0], pytest.param(TRAIN[1], marks=pytest.mark.slow)])
async def test_killed_state_manager_costs_no_life(world: World, node: str) -> None:
    job = await world.tenant.submit_job(f"state-{node}", specs(2))
    kill = of_services(f"statemgr-{node}")
    assert await learn(job, lambda: kill(world.mesh, ""), world.log) == world.expected
    await job.finish()
    await world.log.caught_up()
    assert len(world.log.starts(f"state-{node}.policy")) == 2
    assert world.failures(job.name) == []


async def test_rank_that_is_killed_in_a_collective_takes_its_life_with_it(world: World) -> None:
    """The leader waits for it in the middle of an operation, which is left to the next life."""
    job = await world.tenant.submit_job("amid", specs(2))
    policy, args = job.deployment("policy"), lesson(0)
    first = await policy.forward_backward(args.batch, args.loss)
    await policy.optim_step(ADAM)
    pid = rank_pid(world.mesh, "amid.policy", TRAIN[1])
    os.kill(pid, signal.SIGSTOP)
    second = policy.forward_backward(args.batch, args.loss)
    async with asyncio.timeout(PATIENCE_S):
        while (await second.explain()).state != "permitted":
            await asyncio.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    assert (await second).metrics["loss:sum"] < first.metrics["loss:sum"]
    await job.finish()
    await world.log.caught_up()
    assert len(world.log.starts("amid.policy")) == 4
    assert world.failures(job.name) == []


@pytest.mark.slow
async def test_agent_that_is_silent_ends_the_life_on_both_nodes(world: World) -> None:
    """It loses its lease; its ranks, which know nothing of that, are killed when it wakes."""
    job = await world.tenant.submit_job("silent", specs(2))

    def stop() -> None:
        signal_programs(world.mesh.pids(f"worker-{TRAIN[1]}"), signal.SIGSTOP)

    async with asyncio.TaskGroup() as group:
        learning = group.create_task(learn(job, stop, world.log))
        await world.log.until(partial(is_lost, "silent", TRAIN[0]))
        signal_programs(world.mesh.pids(f"worker-{TRAIN[1]}"), signal.SIGCONT)
    assert learning.result() == world.expected
    await job.finish()
    await world.log.caught_up()
    assert len(world.log.starts("silent.policy")) == 4
    assert world.failures(job.name) == []


def is_lost(job: str, node: str, event: Event) -> bool:
    return isinstance(event, WpgLost) and (event.deployment.job, event.node) == (job, node)


async def test_restart_of_the_bus_costs_no_life(world: World) -> None:
    job = await world.tenant.submit_job("bus", specs(2))

    def restart() -> None:
        world.mesh.kill("nats")

    assert await learn(job, restart, world.log) == world.expected
    await job.finish()
    await world.log.caught_up()
    assert len(world.log.starts("bus.policy")) == 2


async def test_samples_are_drawn_and_cancelled_on_both_nodes(world: World) -> None:
    """A rank that is killed as it draws costs its WPG's life, and no sample."""
    long = replace(sampler_spec(positions=4096), layout=TWO)
    spread = replace(long, num_nodes=2)
    prompts = [client.Prompt([1, 2, 3]), client.Prompt([4, 5], seed=1)]

    def draw(job: client.MeshJob, tokens: int) -> client.OperationHandle[client.GenerateResult]:
        sampling = client.SamplingParams(tokens, ignore_eos=True)
        return job.deployment("sampler").generate(prompts, sampling)

    one = await world.tenant.submit_job("one-draws", [long])
    two = await world.tenant.submit_job("two-draws", [spread])
    expected = await draw(one, 60)
    assert await draw(two, 60) == expected
    draws = asyncio.Event()

    @two.runtime_hook
    def tell(event: client.RuntimeEvent) -> None:
        if isinstance(event, client.Progress):
            draws.set()

    endless = draw(two, 4000)
    async with asyncio.timeout(PATIENCE_S):
        await draws.wait()
    await endless.cancel()
    with pytest.raises(ResourceError, match="cancelled"):
        await endless
    killed = draw(two, 60)
    kill_rank(world.mesh, "two-draws.sampler", ROLLOUT[1])
    assert await killed == expected
    for job in (one, two):
        await job.finish()


async def test_checkpoint_of_two_nodes_is_that_of_one(world: World) -> None:
    """Whoever is killed while it is written; and it is loaded on both, as by another layout."""
    shas = []
    for num_nodes in (1, 2):
        job = await world.tenant.submit_job(f"saved-{num_nodes}", specs(num_nodes)[:1])
        policy, args = job.deployment("policy"), lesson(0)
        policy.forward_backward(args.batch, args.loss)
        policy.optim_step(ADAM)
        saved = policy.save_state("early")
        if num_nodes == 2:
            await world.log.until(partial(is_cut, "saved-2"))
            kill_rank(world.mesh, "saved-2.policy", TRAIN[1])
            world.mesh.kill(f"statemgr-{TRAIN[0]}")
        policy.forward_backward(args.batch, args.loss)
        policy.optim_step(ADAM)
        early, later = await saved, await policy.save_state("later")
        loaded = await policy.load_state("early")
        assert loaded.weights_sha256 == early.weights_sha256
        policy.forward_backward(args.batch, args.loss)
        policy.optim_step(ADAM)
        again = await policy.save_state("again")
        assert again.weights_sha256 == later.weights_sha256
        shas.append((loaded.weights_sha256, again.weights_sha256))
        left = (world.mesh.run_dir / "checkpoints" / TENANT / job.name / "policy").iterdir()
        assert {path.name for path in left} == {"early", "later", "again"}
        await job.finish()
    assert shas[0] == shas[1]
    await world.log.caught_up()
    assert world.failures(job.name) == []


def is_cut(job: str, event: Event) -> bool:
    return isinstance(event, StateSnapshotTaken) and event.key.job == job


@pytest.mark.parametrize("left", [TRAIN[0], pytest.param(TRAIN[1], marks=pytest.mark.slow)])
async def test_part_goes_to_another_node_and_learns_the_same(world: World, left: str) -> None:
    """Its part of the seal comes along; the other part's node stays."""
    name = f"from-{left}"
    job = await world.tenant.submit_job(name, specs(2))
    bus = await Bus.open(world.mesh.credentials.bus, "operator")
    try:
        async with asyncio.TaskGroup() as group:
            learning = group.create_task(learn(job, lambda: None, world.log))
            await world.log.until(partial(is_sealed, name, TRAIN[1]))
            await call_node_api(bus.client, "drain", DrainNode(left), NodeStatus)
        await world.log.until(partial(is_started, name, SPARE))
        await call_node_api(bus.client, "drain", DrainNode(left, undo=True), NodeStatus)
    finally:
        await bus.close()
    assert learning.result() == world.expected
    await job.finish()
    await world.log.caught_up()
    stayed = next(node for node in TRAIN if node != left)
    last = world.log.starts(f"{name}.policy")[-2:]
    assert {str(life.node) for life in last} == {stayed, SPARE}
    assert last[-1].applied > 0
    assert world.failures(job.name) == []


def is_started(job: str, node: str, event: Event) -> bool:
    return isinstance(event, WpgStarted) and (event.deployment.job, event.node) == (job, node)
