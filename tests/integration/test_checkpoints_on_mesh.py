"""`save_state` on a whole mesh: training goes on behind it, and whatever dies, none is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from phaseloom import client
from phaseloom.cli.supervisor import Mesh, MeshConfig, NodeConfig
from phaseloom.common.contract.errors import ResourceError
from phaseloom.common.contract.events import StateSnapshotTaken
from tests.support.jobs import TENANT, Log, kill_rank, running_mesh, tenant
from tests.support.node import STEP, lesson, policy_spec

pytestmark = pytest.mark.timeout(240)
NODES = [NodeConfig("train-0", "train", [16 * 2**20])]


async def begin(
    connection: client.Mesh, job: str
) -> list[client.OperationHandle[client.SaveStateResult]]:
    """Two steps and a checkpoint after each, all sent at once."""
    policy = (await connection.submit_job(job, [policy_spec()])).deployment("policy")
    saves = []
    for number in range(2):
        batch = lesson(number)
        policy.forward_backward(batch.batch, batch.loss)
        policy.optim_step(STEP.adam)
        saves.append(policy.save_state(f"after{number}"))
    return saves


async def until_cut(log: Log, operation: str) -> None:
    key = f"{TENANT}.{operation}"
    await log.until(lambda e: isinstance(e, StateSnapshotTaken) and str(e.key) == key)


async def test_checkpoints_are_the_same_whoever_is_killed_while_they_are_written(
    short_dir: Path,
) -> None:
    async with (
        running_mesh(MeshConfig(nodes=NODES), short_dir) as (mesh, log),
        tenant(mesh) as connection,
    ):
        expected = [(await save).weights_sha256 for save in await begin(connection, "calm")]
        assert expected[0] != expected[1]

        async def disturbed(job: str) -> list[str]:
            saves = await begin(connection, job)
            await until_cut(log, f"{job}.policy.3")
            kill(mesh, job)
            return [(await save).weights_sha256 for save in saves]

        for job in ("rank", "agent", "daemon", "scheduler"):
            assert await disturbed(job) == expected, job
        await log.caught_up()
        assert log.failures() == []


async def test_a_later_run_loads_what_an_earlier_one_saved(short_dir: Path) -> None:
    config = MeshConfig(nodes=NODES, checkpoint_root=str(short_dir / "kept"))
    async with running_mesh(config, short_dir / "first") as (mesh, _), tenant(mesh) as connection:
        saved = [(await save).weights_sha256 for save in await begin(connection, "calm")]
    async with running_mesh(config, short_dir / "second") as (mesh, _), tenant(mesh) as connection:
        policy = (await connection.submit_job("calm", [policy_spec()])).deployment("policy")
        for number, digest in enumerate(saved):
            assert (await policy.load_state(f"after{number}")).weights_sha256 == digest


async def test_root_that_is_no_directory_is_told_so_and_training_goes_on(short_dir: Path) -> None:
    root = short_dir / "taken"
    root.touch()
    config = MeshConfig(nodes=NODES, checkpoint_root=str(root))
    async with running_mesh(config, short_dir / "run") as (mesh, _), tenant(mesh) as connection:
        for save in await begin(connection, "calm"):
            with pytest.raises(ResourceError, match=r"taken/.*Not a directory; .* may write"):
                await save
        policy = (await connection.attach("calm")).deployment("policy")
        await policy.publish_weights()


def kill(mesh: Mesh, what: str) -> None:
    match what:
        case "rank":
            kill_rank(mesh, "rank.policy")
        case "agent":
            mesh.kill("worker-train-0")
        case "daemon":
            mesh.kill("statemgr-train-0")
        case _:
            mesh.kill(what)
