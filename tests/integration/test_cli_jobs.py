"""`phaseloom jobs` and `phaseloom explain` on a mesh."""

from __future__ import annotations

import asyncio
import io
import json
import time
from pathlib import Path

import pytest
from rich.console import Console

from phaseloom import client
from phaseloom.cli.jobs import cancel, drain, explain, jobs
from phaseloom.cli.meshconfig import MeshConfig
from phaseloom.cli.runs import list_runs, prune
from phaseloom.cli.supervisor import Mesh
from phaseloom.client import Cycle, DeploymentSpec, ModelSpec, Segment
from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.operations import After, Operation, PublishWeights
from tests.support.jobs import Wire, tenant


def shown(call: object, *args: object, **kwargs: object) -> str:
    console = Console(width=160, file=io.StringIO())
    assert callable(call)
    call(*args, **kwargs, console=console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.usefixtures("noop_nodes")
async def test_jobs_are_listed_and_waiting_operations_explained(tmp_path: Path) -> None:
    run = tmp_path / "run"
    async with Mesh(MeshConfig(), run) as mesh:
        await mesh.ready()
        assert "none yet" in await asyncio.to_thread(shown, jobs, run=run)
        async with tenant(mesh) as connection:
            spec = DeploymentSpec("policy", "train", "noop", ModelSpec({}), trainable=True)
            job = await connection.submit_job(
                "mine", [spec], config={"lr": 0.5, "[red]": [1]}, tags=["baseline", "[b]x"]
            )
            policy = job.deployment("policy")
            await policy.publish_weights()
            listed = await asyncio.to_thread(shown, jobs, run=run)
            assert f"run {job.run}, #baseline, #[b]x, lr=0.5, [red]=[1]" in listed
            assert "demo.mine" in listed
            text = await asyncio.to_thread(shown, jobs, run=run, json=True, profile=True)
            (row,) = [json.loads(line) for line in text.splitlines()]
            assert (row["tenant"], row["job"], row["run"]) == ("demo", "mine", job.run)
            assert "profile" in row
            assert "train-0" in listed
            assert "g1" in listed, "where it is"
            placed = await asyncio.to_thread(shown, explain, "demo.mine", run=run)
            assert "policy on train-0: leaves and enters through host memory" in placed
            async with Wire.connected(mesh) as wire:
                waiting = Operation("w", job.session, PublishWeights(), [After("policy", 9)])
                await wire.send("mine.policy.11", waiting)
                text = await asyncio.to_thread(explain_until_known, run, "demo.mine.policy.11")
            assert "publish_weights, queued" in text
            record = await asyncio.to_thread(
                shown, explain, "demo.mine.policy.11", run=run, json=True
            )
            assert json.loads(record)["tenant"] == "demo"
            assert "waits for" in text
            other = await connection.submit_job("other", [spec])
            await other.deployment("policy").publish_weights()
            drained = await asyncio.to_thread(shown, drain, "demo.other", run=run)
            # The word that its operation has ended may still be on its way to the scheduler.
            assert drained.startswith(("demo.other: done", "demo.other: draining"))
            async with asyncio.timeout(60):
                while (await other.status()).state != "done":
                    await asyncio.sleep(0.01)
            cancelled = await asyncio.to_thread(shown, cancel, "demo.mine", run=run, json=True)
            assert json.loads(cancelled)["state"] == "cancelled"
            cancelled = await asyncio.to_thread(shown, cancel, "demo.mine", run=run)
            assert cancelled.strip() == "demo.mine: cancelled"
            done = await asyncio.to_thread(shown, explain, "demo.mine.policy.1", run=run)
            assert done.strip() == "demo.mine.policy.1: publish_weights, completed"
            for call in (cancel, drain):
                with pytest.raises(CallerError, match="does not exist"):
                    await asyncio.to_thread(shown, call, "demo.nobody", run=run)
                with pytest.raises(CallerError, match="expected <tenant>"):
                    call("demo.nobody.policy", run=run)
            await check_runs(run, connection, job.run, spec)


async def check_runs(run: Path, connection: client.Mesh, first: str, spec: DeploymentSpec) -> None:
    """Job `mine` was cancelled, and `other` drained. A second run of `mine` goes on."""
    second = await connection.submit_job("mine", [spec], tags=["again"])
    second.report({"loss": 1.0})
    text = await asyncio.to_thread(shown, list_runs, json=True, run=run)
    runs = [json.loads(line) for line in text.splitlines()]
    assert [(r["job"], r["state"]) for r in runs] == [
        ("mine", "cancelled"),
        ("other", "done"),
        ("mine", "active"),
    ]
    assert (runs[0]["run"], runs[2]["run"]) == (first, second.run)
    assert (runs[0]["config"], runs[0]["tags"]) == ({"lr": 0.5, "[red]": [1]}, ["baseline", "[b]x"])
    assert runs[0]["ended_s"] >= runs[0]["submitted_s"]
    table = await asyncio.to_thread(shown, list_runs, run=run)
    assert "baseline, [b]x" in table
    assert second.run not in await asyncio.to_thread(shown, list_runs, tag="baseline", run=run)
    with pytest.raises(CallerError, match="expected a bound"):
        prune(run=run)
    for dry in (True, False):
        deleted = await asyncio.to_thread(shown, prune, keep=0, dry_run=dry, run=run)
        assert f"demo.mine {first}" in deleted
        assert f"demo.mine {second.run}" not in deleted, "it goes on"
    left = await asyncio.to_thread(shown, list_runs, json=True, run=run)
    assert [json.loads(line)["run"] for line in left.splitlines()] == [second.run]
    assert "no run to delete" in await asyncio.to_thread(shown, prune, keep=0, run=run)


@pytest.mark.usefixtures("noop_nodes")
async def test_job_that_may_not_wait_is_refused_and_a_place_is_told_in_words(
    tmp_path: Path,
) -> None:
    async with Mesh(MeshConfig(placement="isolated"), tmp_path) as mesh:
        await mesh.ready()
        async with tenant(mesh) as connection:
            spec = DeploymentSpec("policy", "train", "noop", ModelSpec({}), trainable=True)
            cycle = Cycle(10.0, [Segment("train", 0.0, 5.0)])
            first = await connection.submit_job("first", [spec], slo=1.5, cycle=cycle)
            placement = (await first.status()).placement
            assert placement.startswith("group g1, train: train-0, alone")
            with pytest.raises(ResourceError, match=r"may_wait is false: .*\(0 free\)") as caught:
                await connection.submit_job("second", [spec], may_wait=False)
            assert caught.value.info.code is Code.RESOURCE_EXHAUSTED
            with pytest.raises(CallerError) as wrong:
                await connection.submit_job("third", [spec], cycle=Cycle(1.0, cycle.segments))
            assert wrong.value.info.field == "spec.cycle.segments[0].offset_s"


def explain_until_known(run: Path, key: str) -> str:
    """The router hands it on a moment after it was stored."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return shown(explain, key, run=run)
        except CallerError as error:
            if error.info.code is not Code.NOT_FOUND or time.monotonic() > deadline:
                raise
