"""`save_state` on a whole mesh: training goes on behind it, and whatever dies, none is lost."""

from __future__ import annotations

import asyncio
import io
import shutil
import tarfile
from pathlib import Path

import pytest

from phaseloom import client
from phaseloom.cli import checkpoints
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.supervisor import Mesh
from phaseloom.common.contract.errors import ResourceError
from phaseloom.common.contract.events import StateSnapshotTaken
from tests.integration.test_cli_jobs import shown
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
    """One that was none before is refused when the mesh starts."""
    root = short_dir / "taken"
    config = MeshConfig(nodes=NODES, checkpoint_root=str(root))
    async with running_mesh(config, short_dir / "run") as (mesh, _), tenant(mesh) as connection:
        shutil.rmtree(root, ignore_errors=True)
        root.touch()
        for save in await begin(connection, "calm"):
            with pytest.raises(ResourceError, match=r"taken/.*Not a directory; .* may write"):
                await save
        policy = (await connection.attach("calm")).deployment("policy")
        await policy.publish_weights()


async def test_checkpoints_are_listed_kept_deleted_and_downloaded_by_their_tenant_alone(
    short_dir: Path,
) -> None:
    config = MeshConfig(nodes=NODES, tenants=[TENANT, "other"])
    async with (
        running_mesh(config, short_dir) as (mesh, _),
        tenant(mesh) as connection,
        tenant(mesh, "other") as stranger,
    ):
        job = await connection.submit_job("calm", [policy_spec()])
        policy = job.deployment("policy")
        old = await policy.save_state("c")
        policy.forward_backward(lesson(0).batch, lesson(0).loss)
        policy.optim_step(STEP.adam)
        await policy.load_state("c")
        with pytest.raises(client.CallerError) as raised:
            await policy.save_state("c")
        assert raised.value.info.code is client.Code.ALREADY_EXISTS
        policy.forward_backward(lesson(0).batch, lesson(0).loss)
        policy.optim_step(STEP.adam)
        new = await policy.save_state("c", overwrite=True)
        assert new.weights_sha256 != old.weights_sha256
        shown = await connection.show_checkpoint("calm", "policy", "c")
        assert shown.weights_sha256 == new.weights_sha256
        await policy.save_state("last", controller_blob=b"here", ttl_s=1e-3)
        with pytest.raises(client.CallerError, match="falls back") as raised:
            await connection.delete_checkpoint("calm", "policy", "last")
        assert raised.value.info.code is client.Code.FAILED_PRECONDITION
        with pytest.raises(client.CallerError, match="falls back"):
            await policy.save_state("last", overwrite=True)
        with pytest.raises(client.CallerError) as raised:
            await policy.save_state("never", ttl_s=-1.0)
        assert raised.value.info.field == "args.ttl_s"

        # The rank that loaded what was overwritten, and then deleted, is rebuilt from it.
        archive = await connection.archive_checkpoint("calm", "policy", "c")
        assert await connection.delete_checkpoint("calm", "policy", "c") == shown.num_bytes
        kill_rank(mesh, "calm.policy")
        assert (await policy.save_state("rebuilt")).weights_sha256 == new.weights_sha256
        content = b"".join([part async for part in archive])
        assert len(content) == archive.num_bytes
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            assert {member.name: member.size for member in tar.getmembers()} == {
                f"c/{name}": num_bytes for name, num_bytes in shown.files.items()
            }

        assert (await stranger.list_checkpoints()).checkpoints == []
        for name in ("rebuilt", "never"):
            for call in (
                stranger.show_checkpoint,
                stranger.delete_checkpoint,
                stranger.archive_checkpoint,
            ):
                with pytest.raises(client.CallerError) as raised:
                    await call("calm", "policy", name)
                assert raised.value.info.code is client.Code.NOT_FOUND
        with pytest.raises(client.CallerError) as raised:
            await connection.show_checkpoint("calm", "policy", "../other")
        assert raised.value.info.field == "name"

        # The last one has expired, and stays for as long as the job may fall back to it.
        listed = await connection.list_checkpoints("calm")
        assert [each.name for each in listed.checkpoints] == ["last", "rebuilt"]
        assert listed.silent_nodes == []
        await job.finish()
        async with asyncio.timeout(120):
            while "last" in [c.name for c in (await connection.list_checkpoints()).checkpoints]:
                await asyncio.sleep(0.1)
        await commands(mesh, short_dir)
        assert (await connection.list_checkpoints()).checkpoints == []


async def commands(mesh: Mesh, directory: Path) -> None:
    """What an operator does with the checkpoint that is left."""

    async def run(call: object, *args: object) -> str:
        return await asyncio.to_thread(shown, call, *args, run=mesh.run_dir)

    name = f"{TENANT}.calm.policy.rebuilt"
    assert name in await run(checkpoints.list_checkpoints)
    assert name in await run(checkpoints.list_checkpoints, f"{TENANT}.calm.policy")
    assert "none yet" in await run(checkpoints.list_checkpoints, "other")
    assert "for 100 s" in await run(checkpoints.expire, name, 100.0)
    assert "until it is deleted" in await run(checkpoints.expire, name, 0.0)
    assert "model.safetensors: " in await run(checkpoints.show, name)
    file = directory / "c.tar"
    await run(checkpoints.archive, name, file)
    with tarfile.open(file) as tar:
        assert "rebuilt/config.json" in tar.getnames()
    with pytest.raises(client.CallerError, match="exists"):
        await run(checkpoints.archive, name, file)
    with pytest.raises(client.CallerError, match="cannot be written: No such file") as refused:
        await run(checkpoints.archive, name, directory / "nowhere" / "c.tar")
    assert refused.value.info.field == "file"
    assert "deleted" in await run(checkpoints.delete, name)
    with pytest.raises(client.CallerError, match="does not exist"):
        await run(checkpoints.delete, name)
    with pytest.raises(client.CallerError, match="expected <tenant>"):
        await run(checkpoints.show, "demo.calm")


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


async def test_another_job_goes_on_from_a_checkpoint_with_the_optimizer_and_without(
    short_dir: Path,
) -> None:
    async def further(policy: client.Deployment) -> str:
        batch = lesson(2)
        policy.forward_backward(batch.batch, batch.loss)
        policy.optim_step(STEP.adam)
        return (await policy.save_state("further")).weights_sha256

    config = MeshConfig(nodes=NODES)
    async with running_mesh(config, short_dir) as (mesh, _), tenant(mesh) as connection:
        first = await connection.submit_job("first", [policy_spec()])
        source = first.deployment("policy")
        for number in range(2):
            batch = lesson(number)
            source.forward_backward(batch.batch, batch.loss)
            source.optim_step(STEP.adam)
        saved = (await source.save_state("kept")).weights_sha256
        expected = await further(source)
        await first.finish()

        job = await connection.submit_job("second", [policy_spec()])
        policy = job.deployment("policy")
        loaded = await policy.load_state("kept", source="first/policy")
        assert loaded.weights_sha256 == saved
        assert await further(policy) == expected
        loaded = await policy.load_state("kept", source="first/policy", optimizer=False)
        assert loaded.weights_sha256 == saved
        batch = lesson(2)
        policy.forward_backward(batch.batch, batch.loss)
        policy.optim_step(STEP.adam)
        assert (await policy.save_state("afresh")).weights_sha256 not in {saved, expected}

        with pytest.raises(client.CallerError) as raised:
            await policy.load_state("kept", source="none/policy")
        assert raised.value.info.code is client.Code.NOT_FOUND
        for bad in ("first", "first/policy/x", "../first/policy", "first/", "/policy"):
            with pytest.raises(client.CallerError) as raised:
                await policy.load_state("kept", source=bad)
            assert raised.value.info.field == "args.source"
        kept = await policy.load_state("further")
        assert kept.weights_sha256 == expected
