"""Deployments over two nodes of which one is lost for good, or has not what the other has: they go
on from the copy on another node, from the job's checkpoint, or where they were."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from msgspec.structs import replace

from phaseloom import client
from phaseloom.cli import processes
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.processes import ChildSpec
from phaseloom.cli.supervisor import Mesh
from phaseloom.common.contract.api import DrainNode, NodeStatus
from phaseloom.common.contract.errors import CallerError, PhaseloomError
from phaseloom.common.contract.events import Event, NodeLost, SealCommitted
from phaseloom.common.contract.ids import NodeId
from phaseloom.common.contract.operations import AdamParams
from phaseloom.common.contract.specs import Durability, Layout
from phaseloom.common.process import config as configuration
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.services import call_node_api
from tests.support.directories import short_directory
from tests.support.jobs import Log, running_mesh, tenant
from tests.support.node import lesson, policy_spec

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

NODES = [f"train-{number}" for number in range(5)]
MESH = MeshConfig(
    nodes=[NodeConfig(name, "train", [16 * 2**20] * 2) for name in NODES],
    seal_every=1,
    node_grace_s=0.1,
)
ADAM = AdamParams(1e-2)
ON_ONE = policy_spec(layout=Layout(dp=2))
ON_TWO = replace(ON_ONE, num_nodes=2)
HALF, STEPS = 2, 4
PATIENCE_S = 60.0


async def learn(job: client.MeshJob, steps: range) -> None:
    policy = job.deployment("policy")
    for step in steps:
        args = lesson(step)
        policy.forward_backward(args.batch, args.loss)
        await policy.optim_step(ADAM)


async def weights(job: client.MeshJob, name: str, blob: bytes = b"") -> str:
    saved = job.deployment("policy").save_state(name, controller_blob=blob)
    return (await saved).weights_sha256


@dataclass
class World:
    mesh: Mesh
    log: Log
    bus: Bus
    tenant: client.Mesh
    expected: str
    """The weights in the end, on one node."""

    def homes(self, job: str) -> list[NodeId]:
        """Of its newest life, by name: the first one's is the leader's."""
        lives = self.log.starts(f"{job}.policy")
        newest = max(life.incarnation for life in lives)
        return sorted(life.node for life in lives if life.incarnation == newest)

    async def sealed(self, job: str, *, copied: bool = False) -> None:
        """Until each of its nodes has its part of a seal."""
        for node in self.homes(job):
            await self.log.until(partial(is_sealed, job, node, copied))

    async def lose(self, node: NodeId) -> None:
        """For good, and nobody waits for it."""
        self.mesh.lose(node)
        await self.log.until(lambda e: isinstance(e, NodeLost) and e.node == node)
        async with asyncio.timeout(PATIENCE_S):
            while True:  # the log has it before the scheduler has folded it
                with contextlib.suppress(CallerError):
                    request = DrainNode(node, gone=True)
                    await call_node_api(self.bus.client, "drain", request, NodeStatus)
                    return


def is_sealed(job: str, node: str, copied: bool, event: Event) -> bool:
    return (
        isinstance(event, SealCommitted)
        and (event.deployment.job, event.node) == (job, node)
        and (bool(event.copies) or not copied)
    )


def root_of(run_dir: Path, node: str) -> Path:
    return run_dir / "roots" / node


def specs_with_roots(
    config: MeshConfig, run_dir: Path, *others: Any, specs: Callable[..., list[ChildSpec]]
) -> list[ChildSpec]:
    """Each node has a path of its own to the one checkpoint root: it may lead elsewhere later."""
    variable = f"{configuration.PREFIX}STATEMGR_CHECKPOINT_ROOT"
    mounted = []
    for spec in specs(config, run_dir, *others):
        kind, _, node = spec.name.partition("-")
        if kind == "statemgr":
            root = root_of(run_dir, node)
            root.parent.mkdir(exist_ok=True)
            root.symlink_to(spec.environment[variable])
            mine = {**spec.environment, variable: str(root)}
            mounted.append(dataclasses.replace(spec, environment=mine))
        else:
            mounted.append(spec)
    return mounted


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world() -> AsyncIterator[World]:
    with (
        short_directory() as directory,
        pytest.MonkeyPatch.context() as patch,
    ):
        patched = partial(specs_with_roots, specs=processes.child_specs)
        patch.setattr("phaseloom.cli.supervisor.child_specs", patched)
        async with running_mesh(MESH, directory) as (mesh, log), tenant(mesh) as connection:
            bus = await Bus.open(mesh.credentials.bus, "operator")
            job = await connection.submit_job("one", [ON_ONE])
            await learn(job, range(STEPS))
            expected = await weights(job, "end")
            await job.finish()
            yield World(mesh, log, bus, connection, expected)
            await bus.close()


async def test_checkpoint_that_one_node_cannot_read_is_loaded_on_none(world: World) -> None:
    """Where another node than the leader's cannot, its state is replaced on the leader's already:
    the life ends, and the next one has the state of before."""
    job = await world.tenant.submit_job("apart", [ON_TWO])
    policy = job.deployment("policy")
    await learn(job, range(1))
    first = await weights(job, "first")
    await learn(job, range(1, 2))
    second = await weights(job, "second")
    assert second != first
    for node in world.homes("apart"):
        root = root_of(world.mesh.run_dir, node)
        shared = root.readlink()
        root.unlink()
        root.mkdir()
        with pytest.raises(PhaseloomError, match="'first'"):
            await policy.load_state("first")
        shutil.rmtree(root)  # with the lock of the load
        root.symlink_to(shared)
        assert await weights(job, f"after-{node}") == second
    assert (await policy.load_state("first")).weights_sha256 == first
    await world.log.caught_up()
    assert len(world.log.starts("apart.policy")) == 4, "two lives of two parts"
    await job.finish()


async def test_remote_part_goes_on_from_its_copy(world: World) -> None:
    """The leader's node is lost for good; another takes its part, and the other part stays."""
    job = await world.tenant.submit_job("remote", [ON_TWO], durability=Durability.REMOTE)
    await learn(job, range(HALF))
    await world.sealed("remote", copied=True)
    lost, stayed = world.homes("remote")
    await world.lose(lost)
    await learn(job, range(HALF, STEPS))
    assert await weights(job, "end") == world.expected
    await world.log.caught_up()
    assert stayed in world.homes("remote")
    assert lost not in world.homes("remote")
    assert min(life.applied for life in world.log.starts("remote.policy")[-2:]) > 0
    assert [e for e in world.log.failures() if e.key.job == "remote"] == []
    await job.finish()


async def test_job_falls_back_to_its_checkpoint_where_a_part_is_lost(world: World) -> None:
    """Both nodes begin with it, and it learns from there what it would have learned."""
    job = await world.tenant.submit_job("back", [ON_TWO])
    await learn(job, range(HALF))
    saved = await weights(job, "best", blob=b"half")
    await learn(job, range(HALF + 1, HALF + 2))
    await world.sealed("back")
    stayed, lost = world.homes("back")
    await world.lose(lost)
    with pytest.raises(PhaseloomError, match="attach again"):
        await weights(job, "late")
    again = await world.tenant.attach("back")
    assert again.checkpoint is not None
    assert again.checkpoint.controller_blob == b"half"
    assert await weights(again, "begun") == saved
    await learn(again, range(HALF, STEPS))
    assert await weights(again, "end") == world.expected
    await world.log.caught_up()
    assert stayed in world.homes("back")
    assert lost not in world.homes("back")
    await again.finish()
