"""`phaseloom state` on a mesh, and how it shows what a node says."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from phaseloom.cli.meshconfig import MeshConfig
from phaseloom.cli.state import headline, state, tables
from phaseloom.cli.supervisor import Mesh
from phaseloom.client import DeploymentSpec, ModelSpec
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.contract.state_agent import (
    DeploymentState,
    DiskMethod,
    DiskPath,
    SharedCopyState,
    StatusReport,
    VersionState,
)
from tests.support.jobs import tenant

MiB = 2**20
POLICY = DeploymentKey("acme", "sums", "policy")
VERSION = VersionKey(POLICY, 7)
REPORT = StatusReport(
    device_budget_bytes=[64 * MiB],
    device_used_bytes=[8 * MiB],
    host_budget_bytes=2**30,
    host_used_bytes=24 * MiB,
    deployments=[
        DeploymentState(
            deployment=POLICY,
            incarnation=3,
            devices=[0, 0],
            heap_bytes=16 * MiB,
            resident=True,
            applied=9,
            device_bytes=8 * MiB,
            scratch_bytes=2 * MiB,
            host_bytes=12 * MiB,
            nvme_bytes=4 * MiB,
            host_only_bytes=6 * MiB,
            shared_bytes=3 * MiB,
        )
    ],
    versions=[VERSION],
    endpoint="h:1",
    disk=DiskPath(DiskMethod.DIRECT, 512, ""),
    nvme_budget_bytes=2**40,
    nvme_used_bytes=4 * MiB,
    version_states=[VersionState(VERSION, 5 * MiB, in_host=True, on_nvme=False, num_users=2)],
    shared_copies=[
        SharedCopyState(
            num_bytes=3 * MiB,
            hash="0123456789abcdef" * 4,
            base="a model",
            users=["acme.sums.policy", "acme.sums.policy", "acme.letters.reference"],
            version=None,
            in_host=True,
            on_nvme=False,
        ),
        SharedCopyState(
            num_bytes=5 * MiB,
            hash="",
            base="",
            users=["acme.sums.sampler"],
            version=VERSION,
            in_host=True,
            on_nvme=False,
        ),
    ],
    owned_bytes=30 * MiB,
    held_bytes=24 * MiB,
)


def test_every_tier_is_shown_with_its_bytes() -> None:
    console = Console(width=200, file=io.StringIO())
    console.print(headline("n0", REPORT), *tables(REPORT), sep="\n")
    assert isinstance(console.file, io.StringIO)
    head, _, deployment, _, version, _, content, other = console.file.getvalue().splitlines()
    assert "device 0: 8.0 MiB of 64.0 MiB" in head
    assert "host memory: 24.0 MiB of 1.0 GiB" in head
    assert "NVMe (direct): 4.0 MiB of 1.0 TiB" in head
    assert "sharing: 30.0 MiB stored as 24.0 MiB (1.25 to 1)" in head
    told = " ".join(deployment.split())
    assert told == "acme.sums.policy 3 9 8.0 MiB + 2.0 MiB 12.0 MiB 4.0 MiB 6.0 MiB 3.0 MiB"
    assert version.split() == [str(VERSION), "5.0", "MiB", "–", "2"]
    told = " ".join(content.split())
    assert told == "a model (0123456789ab) 3.0 MiB host acme.sums.policy ×2, acme.letters.reference"
    assert " ".join(other.split()) == f"{VERSION} 5.0 MiB host acme.sums.sampler"


def test_names_are_whole_on_a_narrow_terminal() -> None:
    console = Console(width=60, file=io.StringIO())
    console.print(*tables(REPORT), sep="\n")
    assert isinstance(console.file, io.StringIO)
    assert "…" not in console.file.getvalue()


@pytest.mark.usefixtures("noop_nodes")
async def test_nodes_of_a_mesh_tell_what_they_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    async with Mesh(MeshConfig(), run) as mesh:
        await mesh.ready()
        async with tenant(mesh) as connection:
            spec = DeploymentSpec("policy", "train", "noop", ModelSpec({}), trainable=True)
            job = await connection.submit_job("mine", [spec])
            published = await job.deployment("policy").publish_weights()
            assert await asyncio.to_thread(state, run=run, json=True) == 0
            told = {
                line["node"]: line["report"]
                for line in map(json.loads, capsys.readouterr().out.splitlines())
            }
            assert set(told) == {"train-0", "rollout-0"}
            (deployment,) = told["train-0"]["deployments"]
            assert deployment["deployment"]["job"] == "mine"
            assert deployment["host_bytes"] > 0
            (version,) = told["train-0"]["version_states"]
            assert version["version"]["seq"] == published.version
            assert told["rollout-0"]["deployments"] == []
            with pytest.raises(CallerError) as refused:
                await asyncio.to_thread(state, node="nowhere", run=run)
            assert refused.value.info.code is Code.NOT_FOUND
            assert refused.value.info.remedy.endswith("rollout-0, train-0")
